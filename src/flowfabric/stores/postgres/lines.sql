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
