-- name: claim_rows
-- Claim the first rows of some queues: at most one per lease id, ordered by position and execution id.
--
-- Rows are locked one by one in queue order, skipping rows that others have locked, until enough are locked. A locked
-- row is checked again for still being in its queue. It is updated at its ctid (`row_tid`), which saves a second index
-- search. A row that was changed between this statement's snapshot and its lock has a ctid that the snapshot cannot
-- see, so it is skipped, too. The n-th row gets the n-th lease id. What is written to a row and which event it emits is
-- compiled from the template of the claim; no state is named here. Lease ids arrive as texts, because the driver is
-- slow with arrays.
--
-- Returns the time, whether a second claim might find more rows, how many entries of the queue index were read, whether
-- nothing was locked although there are rows (others had locked them all), and the claimed rows with their payloads, in
-- no order; one row of nulls if nothing was claimed. Columns that the caller has supplied are not returned. Columns that
-- are rarely set are returned as one list, if any of them is set.
with clock as materialized (select {clock} as now),
before as materialized (select {entries} as entries),
{locked},
with_lease_ids as materialized (
    select s.*
      from unnest(array(select row_tid from locked), {lease_ids}, {attempt_ids}, {revisions})
           with ordinality as s (row_tid, lease_id, attempt_id, revision, ordinal)
     where s.row_tid is not null
),
new_batch as materialized ({next_batch_id} where exists (select 1 from with_lease_ids)),
claimed as (
    update ff_exec_core e
       set {claim_set}
      from with_lease_ids s, clock c
     where e.ctid = s.row_tid
 returning {returning}
),
batch as (
    insert into ff_batch (batch_id, at, events)
    select n.batch_id, c.now, {claim_events}
      from new_batch n, clock c
     where exists (select 1 from claimed)
)
select c.now, {more}(select count(*) from with_lease_ids) > (select count(*) from claimed) as more,
       (select {entries} - before.entries from before) as entries,
       not exists (select 1 from locked) and exists ({any_row}) as has_locked, {result_columns}
  from clock c
  left join claimed t on true
  {join_payloads};

-- name: claim_in_commit
-- CTEs of a commit (commit/statement.py): claim the rows that it would enqueue, unless these queues have other rows. The
-- writes that would enqueue them are then skipped; both depend on the one row of `queues_empty`.
queues_empty as materialized (
    select not exists (
           select 1
             from unnest(:queue_ids::bigint[]) as queue (line)
            cross join lateral (
                  select 1 from ff_exec_core e where e.line = queue.line order by e.rank, e.execution_id limit 1) other
           ) as holds
),
claimed as (
    update ff_exec_core e
       set {claim_set}
      from unnest({execution_ids}, {change_numbers}, {lease_ids}, {attempt_ids}, {revisions})
           with ordinality as s (execution_id, change_no, lease_id, attempt_id, revision, ordinal), clock c
     where e.execution_id = s.execution_id
       and (select accepted from verdict)[s.change_no]
       and (select holds from queues_empty)
 returning {returning}
),
claim_events as materialized (select {claim_events} as events);

-- name: claim_set
-- The assignments that claim a row `e` with the lease ids `s` at the time of `c`.
{fields},
           revision = s.revision,
           told = {pointer};

-- name: claim_returning
-- The columns that are returned of a claimed row, or read by its event.
s.ordinal, case when num_nonnulls({sparse}) > 0 then json_build_array({sparse})::text end as sparse, {columns};

-- name: claim_events
-- The events of claimed rows.
array(select {event} from claimed t order by t.ordinal);

-- name: join_payloads
-- The payloads of claimed rows `t`.
left join lateral (
       select * from ff_payload p where p.execution_id = t.execution_id offset 0) p on true;

-- name: lock_heads_of_one_queue
-- The first rows of one queue, in the order of the queue index.
locked as materialized (
    select e.ctid as row_tid
      from ff_exec_core e
     where e.line = (select (:queue_ids::bigint[])[1] from before)
       and (e.granted_until is null or e.granted_until <= (select now from clock))
     order by e.rank, e.execution_id
     limit :max_rows::bigint
       for update skip locked
);

-- name: lock_heads_of_queues
-- The heads of several queues are read without locks, a few more than needed, and then locked.
{heads},
locked as materialized (
    select locked_head.row_tid
      from heads head
     cross join lateral (
           select e.ctid as row_tid
             from ff_exec_core e
            where e.execution_id = head.execution_id
              and e.line = head.line
              and e.rank = head.rank
              and (e.granted_until is null or e.granted_until <= (select now from clock))
              for update skip locked) locked_head
     limit :max_rows::bigint
);

-- name: heads_of_few_queues
-- The first rows of some queues: the heads of each queue, read through the queue index and merged.
heads as materialized (
    select head.line, head.rank, head.execution_id
      from before
     cross join {queues}
     cross join lateral (
           select e.line, e.rank, e.execution_id
             from ff_exec_core e
            where e.line = queue.line{within}
              and (e.granted_until is null or e.granted_until <= (select now from clock))
            order by e.rank, e.execution_id
            limit :max_heads) head
     order by head.rank, head.execution_id
     limit :max_heads
);

-- name: heads_of_many_queues
-- The same for many queues without reading `max_heads` rows of each: a sample of each queue bounds the position of the
-- rows to claim, and only rows up to this bound are read.
sample as materialized (
    select head.rank
      from before
     cross join {queues}
     cross join lateral (
           select e.rank
             from ff_exec_core e
            where e.line = queue.line{within}
              and (e.granted_until is null or e.granted_until <= (select now from clock))
            order by e.rank, e.execution_id
            limit 1 + :max_heads / cardinality(:queue_ids)) head
),
bound as materialized (
    select coalesce((select rank from sample order by rank offset :max_heads - 1 limit 1), 9223372036854775807) as rank
),
heads as materialized (
    select head.line, head.rank, head.execution_id
      from {queues}
     cross join lateral (
           select e.line, e.rank, e.execution_id
             from ff_exec_core e
            where e.line = queue.line{within}
              and e.rank <= (select rank from bound)
              and (e.granted_until is null or e.granted_until <= (select now from clock))
            order by e.rank, e.execution_id
            limit :max_heads) head
     order by head.rank, head.execution_id
     limit :max_heads
);

-- name: any_row_of_one_queue
-- A row of the queue, locked or not, found through the queue index.
select 1
  from unnest(:queue_ids::bigint[]) as queue (line)
 cross join lateral (
       select 1
         from ff_exec_core e
        where e.line = queue.line
          and (e.granted_until is null or e.granted_until <= c.now)
        order by e.rank, e.execution_id
        limit 1) row

-- name: renew_leases
-- Apply a template to the executions of leases that meet its condition; return the ordinal and the new expiry of each.
-- The rows are locked in the given order, by id; the clock is read when all locks are held, and decides the rest of the
-- condition. `live` has the rows as they will be. The pointer to the event's batch is a row of its own, not an element
-- of the execution's row: a row that is renewed for days must not grow.
with matched as materialized (
    select given.ordinal, {given}, e.*
      from unnest(:ordinals::int[], :execution_ids::text[], :attempt_indexes::bigint[], :attempt_ids::text[],
                  :lease_ids::text[], :lease_epochs::bigint[], :ttls::bigint[])
           as given (ordinal, execution_id, attempt_index, attempt_id, lease_id, lease_epoch, lease_ttl_ms)
     cross join lateral (
           select {columns}
             from ff_exec_core e
            where e.execution_id = given.execution_id
              and {equal}
              for update) e
),
clock as materialized (select {clock} as now where (select count(*) from matched) >= 0),
live as materialized (
    select m.ordinal, {new_values} from matched m, clock c where {future}
),
renewed as (
    update ff_exec_core e
       set {settings}
      from live l
     where e.execution_id = l.execution_id
),
new_batch as materialized ({next_batch_id} where exists (select 1 from live)),
batch as (
    insert into ff_batch (batch_id, at, events)
    select n.batch_id, c.now, array(select {event} from live l order by l.ordinal)
      from new_batch n, clock c
),
pointers as (
    insert into ff_told_in (execution_id, batch_id)
    select l.execution_id, n.batch_id from live l, new_batch n
    on conflict do nothing
)
select ordinal, lease_expires_at from live;
