-- name: read
-- A page of the feed between two positions, and how far positions were given out; `news` says that some were not yet.
select f.numbered,
       f.trimmed,
       f.lost_{topic} as lost,
       exists (select 1 from ff_batch where position is null) as news,
       array(
           select row(b.position, e.place - 1, b.at, {events})
             from (select position, at, events from ff_batch
                    where position >= :first and position <= :last order by position) b
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
-- Give positions to committed batches, up to a thousand. Sent as one message of four statements.
--
-- The row lock first, then a statement with a snapshot of its own: it sees every position that was given out by
-- whoever held the row before, so that positions are dense and never given twice.
begin isolation level read committed;
select numbered from ff_feed for update;
with news as (
    select batch_id, row_number() over (order by batch_id) as place
      from (select batch_id from ff_batch where position is null order by batch_id limit 1000) unnumbered
),
given as (
    update ff_batch b set position = f.numbered + news.place
      from news, ff_feed f
     where b.batch_id = news.batch_id
 returning 1
)
update ff_feed set numbered = numbered + (select count(*) from given) where exists (select 1 from given);
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
pointers as (
    delete from ff_told_in
     where ctid = any (array(
           select p.spot
             from dead d
            cross join lateral (
                  select t.ctid as spot from ff_told_in t
                   where t.execution_id = d.execution_id and t.batch_id = d.batch_id offset 0) p))
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
select count(*) from dead;
