-- The feed in packs: a batch holds its events itself, and executions point to the batches that tell of them.

lock table ff_exec_core, ff_batch, ff_event in access exclusive mode;

-- An event as a batch holds it, with the fields of `Event` in their order.
create type ff_told as (
    execution_id       text collate "C",
    namespace          text collate "C",
    tags               text collate "C",
    flow_id            text collate "C",
    lease              text collate "C",
    lease_id           text collate "C",
    lease_epoch        bigint,
    attempt_id         text collate "C",
    attempt_index      bigint,
    worker_id          text collate "C",
    worker_instance_id text collate "C",
    reason             text collate "C",
    outcome            text collate "C",
    operator           text collate "C",
    signal             text collate "C",
    details            text collate "C"
);
alter table ff_batch add column events ff_told[];
alter table ff_batch alter column events set storage external; -- to pack them costs the server more than to keep them

-- The batches that tell of an execution, unless its own row points to them.
create table ff_told_in (
    batch_id     bigint not null,
    execution_id text collate "C" not null,
    primary key (execution_id, batch_id)
);

-- The batches in which its claims and ends were told, the newest thousand; the row is written then anyway.
alter table ff_exec_core add column told bigint[];

-- Events keep their places, so that cursors stay valid: where an old batch had a gap, the array has a null.
update ff_batch b
   set events = array(
           select case when e.ord is not null then
                  row(e.execution_id, e.namespace, e.tags, e.flow_id, e.lease, e.lease_id, e.lease_epoch, e.attempt_id,
                      e.attempt_index, e.worker_id, e.worker_instance_id, e.reason, e.outcome, e.operator, e.signal,
                      e.details)::ff_told end
             from generate_series(0, (select max(last.ord) from ff_event last where last.batch_id = b.batch_id))
                  as place (ord)
             left join ff_event e on e.batch_id = b.batch_id and e.ord = place.ord
            order by place.ord);
insert into ff_told_in (batch_id, execution_id) select distinct batch_id, execution_id from ff_event;
alter table ff_batch alter column events set not null;
drop table ff_event;
