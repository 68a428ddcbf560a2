-- name: read
-- A page of the feed from a position on, and how far positions were given out; `news` says that some were not yet.
-- `last` is where the window ends, unset when it holds everything. `known` says that the first position is one that was
-- given out: it has its batch, unless that was trimmed.
select f.numbered,
       f.trimmed,
       f.lost_{topic} as lost,
       exists (select 1 from ff_batch where position is null) as news,
       (select position from ff_batch
         where position >= :first order by position offset :window - 1 limit 1) as last,
       :first <= f.trimmed or exists (select 1 from ff_batch where position = :first) as known,
       array(
           select row(b.position, e.place - 1, b.at, {events})
             from (select position, at, events from ff_batch
                    where position >= :first order by position limit :window) b
            cross join lateral (
                  select * from unnest(b.events) with ordinality as e ({names}, place)
                   where e.{topic} is not null
                     and (b.position > :first or e.place > :ord + 1)) e
            order by b.position, e.place
            limit :limit) as events
  from ff_feed f;

-- name: history
-- The newest events of one execution, newest first: it points to the batches that tell of it, in two places.
select b.position, e.place - 1, b.at, {events}
  from (select batch_id
          from (select unnest(told) as batch_id from ff_exec_core where execution_id = :execution_id
                 union select batch_id from ff_told_in where execution_id = :execution_id) pointers
         order by batch_id desc) p
 cross join lateral (select position, at, events from ff_batch b where b.batch_id = p.batch_id offset 0) b
 cross join lateral (
       select * from unnest(b.events) with ordinality as e ({names}, place)
        where e.execution_id = :execution_id and e.{topic} <> :without) e
 order by p.batch_id desc, e.place desc
 limit :limit;

-- name: end
-- How far positions were given out, and whether some were not yet.
select f.numbered, exists (select 1 from ff_batch where position is null) as news from ff_feed f;

-- name: number
-- Give positions to committed batches, up to a thousand. Sent as one message of five statements.
--
-- The row lock first, then a statement with a snapshot of its own: it sees every position that was given out by
-- whoever held the row before, so that none is given twice. Within one life of a server they are dense. In another one,
-- after a restart, a promotion or a restore, they go on from the time of day, 32 to a millisecond. So they lie above
-- those that were given out and lost, unless the clock of the new server is behind by more than the whole life of the
-- old one.
--
-- A position that somebody has seen must not be lost in a crash. It is seen when this transaction ends, and that waits
-- for the disk even where other transactions do not (synchronous_commit off).
begin isolation level read committed;
select set_config('synchronous_commit', 'local', true) where current_setting('synchronous_commit') = 'off';
select numbered from ff_feed for update;
with base as materialized (
    select now.server,
           case when f.server = now.server then f.numbered
                else greatest(f.numbered, floor(extract(epoch from clock_timestamp()) * 1000)::bigint * 32)
           end as numbered
      from ff_feed f,
           (select (extract(epoch from pg_postmaster_start_time()) * 1000000)::bigint || ' '
                   || 'ff_feed'::regclass::oid as server) now
),
news as (
    select batch_id, row_number() over (order by batch_id) as place
      from (select batch_id from ff_batch where position is null order by batch_id limit 1000) unnumbered
),
given as (
    update ff_batch b set position = base.numbered + news.place
      from news, base
     where b.batch_id = news.batch_id
 returning 1
)
update ff_feed f set numbered = base.numbered + (select count(*) from given), server = base.server
  from base
 where exists (select 1 from given);
commit;

-- name: trim
-- Drop the oldest batches that were told before an instant, up to so many; how many events went.
with oldest as (
    select batch_id, position, at from ff_batch where position is not null order by position limit :limit
),
stop as (
    select coalesce(min(position) filter (where at >= :before), max(position) + 1) as position from oldest
),
gone as (
    delete from ff_batch b using oldest o, stop s
     where b.batch_id = o.batch_id and o.position < s.position
 returning b.batch_id, b.position, b.events
),
dead as materialized (
    select g.batch_id, e.execution_id, g.position * :most + e.place - 1 as place, e.lease, e.outcome, e.operator, e.signal
      from gone g
     cross join lateral unnest(g.events) with ordinality as e ({names}, place)
     where e.execution_id is not null
),
noted as (
    update ff_feed
       set trimmed = greatest(trimmed, (select max(position) from gone)),
           lost_lease = greatest(lost_lease, (select max(place) from dead where lease is not null)),
           lost_outcome = greatest(lost_outcome, (select max(place) from dead where outcome is not null)),
           lost_operator = greatest(lost_operator, (select max(place) from dead where operator is not null)),
           lost_signal = greatest(lost_signal, (select max(place) from dead where signal is not null))
     where exists (select 1 from gone)
)
select count(*) as events, array_agg(execution_id) as executions, array_agg(batch_id) as batches from dead;

-- name: drop_pointers
-- Remove the pointers to batches that were dropped. This is a statement of its own, so that it sees pointers of
-- transactions that the drop had to wait for: whoever deletes an execution locks the batches that its pointers go to.
delete from ff_told_in
 where ctid = any (array(
       select p.spot
         from unnest(:executions::text[], :batches::bigint[]) as d (execution_id, batch_id)
        cross join lateral (
              select t.ctid as spot from ff_told_in t
               where t.execution_id = d.execution_id and t.batch_id = d.batch_id offset 0) p));
