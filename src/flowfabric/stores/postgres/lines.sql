-- name: add
-- Give a number to each line that has none.
insert into ff_line (digest, lane_id, required, fairness_key, fairness_weight, decided)
select given.*
  from unnest(:digests::bytea[], :lane_id::text[], :required::text[], :fairness_key::text[],
              :fairness_weight::bigint[], :decided::boolean[]) as given (digest)
 where not exists (select 1 from ff_line old where old.digest = given.digest)
 order by given.digest
    on conflict (digest) do nothing;

-- name: find
-- The lines with these digests.
select line, lane_id, required, fairness_key, fairness_weight, decided
  from ff_line
 where digest = any(:digests::bytea[]);

-- name: read
-- All lines, or those of one lane.
select line, lane_id, required, fairness_key, fairness_weight, decided
  from ff_line
 where :lane_id::text is null or lane_id = :lane_id;

-- name: standing
-- The lines of a lane in which something stands: from line to line, each found by one step through the index.
with recursive taken as (
    (select e.line from ff_exec_core e where e.line is not null order by e.line limit 1)
    union all
    select (select e.line from ff_exec_core e where e.line > taken.line order by e.line limit 1)
      from taken
     where taken.line is not null
)
select l.line, l.lane_id, l.required, l.fairness_key, l.fairness_weight, l.decided
  from taken
 cross join lateral (select * from ff_line l where l.line = taken.line and l.lane_id = :lane_id offset 0) l;

-- name: lanes
-- The lanes that have a line, ascending, after a given one: each found by one step through the index.
with recursive lane as (
    (select min(lane_id) as lane_id from ff_line where :after::text is null or lane_id > :after)
    union all
    select (select min(next.lane_id) from ff_line next where next.lane_id > lane.lane_id)
      from lane
     where lane.lane_id is not null
)
select lane_id from lane where lane_id is not null limit :limit;
