-- name: add_queues
-- Insert missing rows of queues.
insert into ff_line (line, digest, lane_id, required, fairness_key, fairness_weight, decided)
select given.*
  from unnest(:queue_ids::bigint[], :digests::bytea[], :lane_id::text[], :required::text[], :fairness_key::text[],
              :fairness_weight::bigint[], :guarded::boolean[]) as given (line)
 where not exists (select 1 from ff_line old where old.line = given.line)
 order by given.line
    on conflict do nothing;

-- name: ensure_queues
-- A CTE of a commit: insert missing rows of the queues that it puts work into. `rows` has one list per queue: the digest
-- in hexadecimal digits and the fields of the key.
queues as (
    insert into ff_line (line, digest, lane_id, required, fairness_key, fairness_weight, decided)
    select missing.line, decode(key ->> 0, 'hex'), key ->> 1, key ->> 2, key ->> 3,
           (key ->> 4)::bigint, (key ->> 5)::boolean
      from (select given.line, :rows::text::json -> (given.ordinal - 1)::int as key
              from unnest(:queue_ids::bigint[]) with ordinality as given (line, ordinal)
             where not exists (select 1 from ff_line old where old.line = given.line)
            offset 0) missing
        on conflict do nothing
);

-- name: find_queues
-- The queues with these ids.
select line, lane_id, required, fairness_key, fairness_weight, decided
  from ff_line
 where line = any(:queue_ids::bigint[]);

-- name: executions_in_missing_queues
-- Executions in queues that have no row. A loose index scan steps from queue to queue.
with recursive occupied as (
    (select e.line from ff_exec_core e where e.line is not null order by e.line limit 1)
    union all
    select (select e.line from ff_exec_core e where e.line > occupied.line order by e.line limit 1)
      from occupied
     where occupied.line is not null
)
select e.execution_id
  from occupied
 cross join lateral (
       select e.execution_id from ff_exec_core e
        where e.line = occupied.line
          and not exists (select 1 from ff_line l where l.line = occupied.line)
        order by e.rank, e.execution_id
        limit :limit) e
 limit :limit;

-- name: queues
-- All queues, or those of one lane.
select line, lane_id, required, fairness_key, fairness_weight, decided
  from ff_line
 where :lane_id::text is null or lane_id = :lane_id;

-- name: nonempty_queues
-- The nonempty queues in some ranges of the index (ids of ready queues, or names of lists of blocked work), with the
-- number of index entries read before and after.
select {clock} as now, {entries} as began,
       array(
           select stepped.queue
             from unnest(:lows::{kind}[], :highs::{kind}[]) as gap (low, high)
            cross join lateral (
                  with recursive occupied as (
                      (select e.{column} as queue from ff_exec_core e
                        where e.{column} > gap.low and e.{column} < gap.high order by e.{column} limit 1)
                      union all
                      select (select e.{column} from ff_exec_core e
                               where e.{column} > occupied.queue and e.{column} < gap.high order by e.{column} limit 1)
                        from occupied
                       where occupied.queue is not null
                  )
                  select occupied.queue from occupied where occupied.queue is not null) stepped
            limit :limit::bigint) as queues,
       {entries} as ended
  from unnest(array[1]) as once;

-- name: first_positions
-- The first position in each range of a queue, with the number of index entries read before and after.
select part.line, {clock} as now, {entries} as began,
       (select e.rank from ff_exec_core e
         where e.line = part.line
           and (e.rank, e.execution_id) > (part.low_rank, part.low_id)
           and (e.rank, e.execution_id) <= (part.high_rank, part.high_id)
         order by e.rank, e.execution_id
         limit 1) as first_rank,
       {entries} as ended
  from unnest(:queue_ids::bigint[], :low_ranks::bigint[], :low_ids::text[], :high_ranks::bigint[], :high_ids::text[])
       as part (line, low_rank, low_id, high_rank, high_id);

-- name: queue_sizes
-- The first position in each queue except the known ones, with the number of index entries read before and after.
select l.line, {clock} as now, {entries} as began,
       (select e.rank from ff_exec_core e where e.line = l.line order by e.rank, e.execution_id limit 1) as first_rank,
       {entries} as ended
  from ff_line l
 where l.line <> all (:known::bigint[]);

-- name: lanes
-- The lanes that have a queue, ascending, after a given one. A loose index scan steps from lane to lane.
with recursive lane as (
    (select min(lane_id) as lane_id from ff_line where :after::text is null or lane_id > :after)
    union all
    select (select min(next.lane_id) from ff_line next where next.lane_id > lane.lane_id)
      from lane
     where lane.lane_id is not null
)
select lane_id from lane where lane_id is not null limit :limit;
