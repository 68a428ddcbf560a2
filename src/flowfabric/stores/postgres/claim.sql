-- name: take
-- Claim the first rows of some lines: at most one a stamp, best rank first, then by id.
--
-- Rows are locked in the order of the lines, one by one, passing over what someone else holds, until enough are locked;
-- a locked row is asked again whether it still stands there. It is written at the `spot` where it was locked, which
-- costs no second search. A row that someone changed between this statement's snapshot and its lock has its spot where
-- the snapshot sees nothing: it is passed over, too. The n-th gets the n-th stamp, and what `becomes` says of all of
-- them; no state is named here. Stamps come as texts, since the driver is slow with arrays.
--
-- Answers with the time, whether a second look might find more, how many entries of the index of lines it stepped over,
-- and the rows as they are now with their payloads, in no order; with one row of nothing when nothing was taken. Columns that the caller has just given it does not hear back,
-- and those that are rarely set are one list, if one of them is.
with clock as materialized (select {clock} as now),
before as materialized (select {entries} as entries),
{locked},
stamped as materialized (
    select s.*
      from unnest(array(select spot from locked), {lease_ids}, {attempt_ids}, {revisions})
           with ordinality as s (spot, lease_id, attempt_id, revision, place)
     where s.spot is not null
),
number as materialized ({number} where exists (select 1 from stamped)),
taken as (
    update ff_exec_core e
       set {claimed}
      from stamped s, clock c
     where e.ctid = s.spot
 returning {heard}
),
batch as (
    insert into ff_batch (batch_id, at, events)
    select n.batch_id, c.now, {acquired}
      from number n, clock c
     where exists (select 1 from taken)
)
select c.now, {more}(select count(*) from stamped) > (select count(*) from taken) as more,
       (select {entries} - before.entries from before) as entries, {told}
  from clock c
  left join taken t on true
  {payloads};

-- name: hand
-- Parts of a commit (commit.py): claim the rows that it would put into lines, unless somebody stands there. The writes
-- that would put them there are held back then; both ask the one row of `lone`.
lone as materialized (
    select not exists (
           select 1
             from unnest(:lines::bigint[]) as wanted (line)
            cross join lateral (
                  select 1 from ff_exec_core e where e.line = wanted.line order by e.rank, e.execution_id limit 1) other
           ) as so
),
handed as (
    update ff_exec_core e
       set {claimed}
      from unnest({execution_ids}, {numbers}, {lease_ids}, {attempt_ids}, {revisions})
           with ordinality as s (execution_id, no, lease_id, attempt_id, revision, place), clock c
     where e.execution_id = s.execution_id
       and (select yes from verdict)[s.no]
       and (select so from lone)
 returning {heard}
),
acquired as materialized (select {acquired} as events);

-- name: claimed
-- What a claim makes of a row `e` with a stamp `s`, at the time of `c`.
{becomes}lease_id = s.lease_id,
           worker_id = :worker_id::text,
           worker_instance_id = :worker_instance_id::text,
           lease_epoch = e.lease_epoch + 1,
           lease_acquired_at = c.now,
           lease_renewed_at = c.now,
           lease_expires_at = c.now + :lease_ttl_ms::bigint,
           current_lane = e.lane_id,
           attempt_id = case when e.next_type is null then e.attempt_id else s.attempt_id end,
           attempt_type = coalesce(e.next_type, e.attempt_type),
           attempt_index = case when e.next_type is null then e.attempt_index else e.total_attempt_count end,
           total_attempt_count = e.total_attempt_count + case when e.next_type is null then 0 else 1 end,
           attempt_started_at = case when e.next_type is null then e.attempt_started_at else c.now end,
           attempt_resumed_at = case when e.next_type is null then c.now end,
           started_at = coalesce(e.started_at, c.now),
           attempt_timeout_at = c.now + e.next_timeout_ms,
           last_transition_at = c.now,
           last_mutation_at = c.now,
           revision = s.revision,
           told = {pointer};

-- name: heard
-- What there is to hear of a claimed row.
s.place, s.lease_id as stamp, e.attempt_resumed_at is not null as is_resumed,
           case when num_nonnulls({rare}) > 0 then json_build_array({rare})::text end as rare, {columns};

-- name: acquired
-- What is told of claimed rows.
array(
           select row(t.execution_id, t.namespace, t.tags, t.flow_id, 'acquired', t.stamp, t.lease_epoch,
                      t.attempt_id, t.attempt_index, :worker_id, :worker_instance_id,
                      case when t.is_resumed then 'claim_resumed' end,
                      null, null, null, null)::ff_told
             from {rows} t
            order by t.place);

-- name: payloads
-- The payloads of claimed rows `t`.
left join lateral (
       select * from ff_payload p where p.execution_id = t.execution_id offset 0) p on true;

-- name: locked_in_one
-- The best rows of one line: the index of lines has them in order.
locked as materialized (
    select e.ctid as spot
      from ff_exec_core e
     where e.line = (select (:lines::bigint[])[1] from before)
       and (e.granted_until is null or e.granted_until <= (select now from clock))
     order by e.rank, e.execution_id
     limit :wanted::bigint
       for update skip locked
);

-- name: locked_in_some
-- The heads of several lines are read without locks, some more than wanted.
{heads},
locked as materialized (
    select held.spot
      from heads head
     cross join lateral (
           select e.ctid as spot
             from ff_exec_core e
            where e.execution_id = head.execution_id
              and e.line = head.line
              and e.rank = head.rank
              and (e.granted_until is null or e.granted_until <= (select now from clock))
              for update skip locked) held
     limit :wanted::bigint
);

-- name: heads_of_few
-- The best rows of some lines: the first of each line, through the index of lines, merged.
heads as materialized (
    select head.line, head.rank, head.execution_id
      from before
     cross join {wanted}
     cross join lateral (
           select e.line, e.rank, e.execution_id
             from ff_exec_core e
            where e.line = wanted.line{within}
              and (e.granted_until is null or e.granted_until <= (select now from clock))
            order by e.rank, e.execution_id
            limit :reach) head
     order by head.rank, head.execution_id
     limit :reach
);

-- name: heads_of_many
-- The same for many lines, without reading that many rows of each: a few rows of each line tell up to which rank the
-- wanted ones can lie at most, and only those are read.
sample as materialized (
    select head.rank
      from before
     cross join {wanted}
     cross join lateral (
           select e.rank
             from ff_exec_core e
            where e.line = wanted.line{within}
              and (e.granted_until is null or e.granted_until <= (select now from clock))
            order by e.rank, e.execution_id
            limit 1 + :reach / cardinality(:lines)) head
),
bound as materialized (
    select coalesce((select rank from sample order by rank offset :reach - 1 limit 1), 9223372036854775807) as rank
),
heads as materialized (
    select head.line, head.rank, head.execution_id
      from {wanted}
     cross join lateral (
           select e.line, e.rank, e.execution_id
             from ff_exec_core e
            where e.line = wanted.line{within}
              and e.rank <= (select rank from bound)
              and (e.granted_until is null or e.granted_until <= (select now from clock))
            order by e.rank, e.execution_id
            limit :reach) head
     order by head.rank, head.execution_id
     limit :reach
);

-- name: renew
-- Move the end of leases that are in force and match in everything; per lease, by its place, the new end.
-- The rows are locked in the order in which they are given, by id; the clock is read when all locks are held. Where it
-- is told stands beside the row, not in it: a row that is renewed for days shall not grow.
with held as materialized (
    select given.place, given.ttl, e.*
      from unnest(:places::int[], :execution_ids::text[], :attempt_indexes::bigint[], :attempt_ids::text[],
                  :lease_ids::text[], :lease_epochs::bigint[], :ttls::bigint[])
           as given (place, execution_id, attempt_index, attempt_id, lease_id, lease_epoch, ttl)
     cross join lateral (
           select e.execution_id, e.namespace, e.tags, e.flow_id, e.lease_id, e.lease_epoch, e.attempt_id,
                  e.attempt_index, e.worker_id, e.worker_instance_id, e.lease_expires_at
             from ff_exec_core e
            where e.execution_id = given.execution_id
              and e.attempt_index = given.attempt_index
              and e.attempt_id = given.attempt_id
              and e.lease_id = given.lease_id
              and e.lease_epoch = given.lease_epoch
              and e.lease_expired_at is null
              for update) e
),
clock as materialized (select {clock} as now where (select count(*) from held) >= 0),
live as materialized (
    select h.*, c.now, c.now + h.ttl as until from held h, clock c where h.lease_expires_at > c.now
),
renewed as (
    update ff_exec_core e
       set lease_expires_at = l.until, lease_renewed_at = l.now
      from live l
     where e.execution_id = l.execution_id
),
number as materialized ({number} where exists (select 1 from live)),
batch as (
    insert into ff_batch (batch_id, at, events)
    select n.batch_id, c.now, array(
           select row(l.execution_id, l.namespace, l.tags, l.flow_id, 'renewed', l.lease_id, l.lease_epoch,
                      l.attempt_id, l.attempt_index, l.worker_id, l.worker_instance_id,
                      null, null, null, null, null)::ff_told
             from live l
            order by l.place)
      from number n, clock c
),
pointers as (
    insert into ff_told_in (execution_id, batch_id)
    select l.execution_id, n.batch_id from live l, number n
    on conflict do nothing
)
select place, until from live;
