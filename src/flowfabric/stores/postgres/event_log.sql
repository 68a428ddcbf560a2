-- name: read_events
-- A page of the feed from a position on, and the last assigned position; `unnumbered` says that some batches have no
-- position yet. `last` is the end of the window, null if the window contains everything. `known` says that the first
-- position was assigned: its batch exists, unless it was trimmed.
select f.numbered,
       f.trimmed,
       f.lost_{topic} as last_trimmed,
       exists (select 1 from ff_batch where position is null) as unnumbered,
       (select position from ff_batch
         where position >= :first order by position offset :window - 1 limit 1) as last,
       :first <= f.trimmed or exists (select 1 from ff_batch where position = :first) as known,
       array(
           select row(b.position, e.ordinal - 1, b.at, {events})
             from (select position, at, events from ff_batch
                    where position >= :first order by position limit :window) b
            cross join lateral (
                  select * from unnest(b.events) with ordinality as e ({names}, ordinal)
                   where e.{topic} is not null
                     and (b.position > :first or e.ordinal > :ord + 1)) e
            order by b.position, e.ordinal
            limit :limit) as events
  from ff_feed f;

-- name: history
-- The newest events of one execution, newest first. Two places point to the batches that contain its events.
select b.position, e.ordinal - 1, b.at, {events}
  from (select batch_id
          from (select unnest(told) as batch_id from ff_exec_core where execution_id = :execution_id
                 union select batch_id from ff_told_in where execution_id = :execution_id) pointers
         order by batch_id desc) p
 cross join lateral (select position, at, events from ff_batch b where b.batch_id = p.batch_id offset 0) b
 cross join lateral (
       select * from unnest(b.events) with ordinality as e ({names}, ordinal)
        where e.execution_id = :execution_id and e.{topic} <> :without) e
 order by p.batch_id desc, e.ordinal desc
 limit :limit;

-- name: read_end
-- The last assigned position, and whether some batches have none yet.
select f.numbered, exists (select 1 from ff_batch where position is null) as unnumbered from ff_feed f;

-- name: assign_positions
-- Assign positions to committed batches, up to a thousand. Sent as one message of five statements.
--
-- The row lock comes first, then a statement with a snapshot of its own. It sees every position that the previous lock
-- holders have assigned, so none is assigned twice. Positions are dense while a server runs. After a restart, a
-- promotion or a restore they continue from the wall clock, 32 per millisecond. So they are higher than positions that
-- were assigned and lost, unless the clock of the new server is behind by more than the uptime of the old one.
--
-- A position that a reader has seen must not be lost in a crash. Readers see it when this transaction commits, and the
-- commit waits for the disk even if other transactions do not (synchronous_commit off).
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
unnumbered as (
    select batch_id, row_number() over (order by batch_id) as ordinal
      from (select batch_id from ff_batch where position is null order by batch_id limit 1000) committed
),
assigned as (
    update ff_batch b set position = base.numbered + unnumbered.ordinal
      from unnumbered, base
     where b.batch_id = unnumbered.batch_id
 returning 1
)
update ff_feed f set numbered = base.numbered + (select count(*) from assigned), server = base.server
  from base
 where exists (select 1 from assigned);
commit;

-- name: trim_batches
-- Delete the oldest batches emitted before an instant, up to a limit; return the number of deleted events.
with oldest as (
    select batch_id, position, at from ff_batch where position is not null order by position limit :limit
),
stop as (
    select coalesce(min(position) filter (where at >= :before), max(position) + 1) as position from oldest
),
trimmed_batches as (
    delete from ff_batch b using oldest o, stop s
     where b.batch_id = o.batch_id and o.position < s.position
 returning b.batch_id, b.position, b.events
),
trimmed_events as materialized (
    select g.batch_id, e.execution_id, g.position * :max_events + e.ordinal - 1 as position, e.lease, e.outcome, e.operator, e.signal
      from trimmed_batches g
     cross join lateral unnest(g.events) with ordinality as e ({names}, ordinal)
     where e.execution_id is not null
),
recorded as (
    update ff_feed
       set trimmed = greatest(trimmed, (select max(position) from trimmed_batches)),
           lost_lease = greatest(lost_lease, (select max(position) from trimmed_events where lease is not null)),
           lost_outcome = greatest(lost_outcome, (select max(position) from trimmed_events where outcome is not null)),
           lost_operator = greatest(lost_operator, (select max(position) from trimmed_events where operator is not null)),
           lost_signal = greatest(lost_signal, (select max(position) from trimmed_events where signal is not null))
     where exists (select 1 from trimmed_batches)
)
select count(*) as events, array_agg(execution_id) as executions, array_agg(batch_id) as batches from trimmed_events;

-- name: delete_pointers
-- Delete the pointers to batches that were trimmed. A statement of its own sees the pointers of transactions that the
-- trim had to wait for: a transaction that deletes an execution locks the batches that its pointers lead to.
delete from ff_told_in
 where ctid = any (array(
       select p.row_tid
         from unnest(:executions::text[], :batches::bigint[]) as d (execution_id, batch_id)
        cross join lateral (
              select t.ctid as row_tid from ff_told_in t
               where t.execution_id = d.execution_id and t.batch_id = d.batch_id offset 0) p));
