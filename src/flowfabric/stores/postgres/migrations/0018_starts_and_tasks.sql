-- compatible: yes
-- When the first try of a step began, the tasks that a worker runs, and until when a durable function asks people. The
-- release before may still run: it leaves the columns empty, so that what its workers ask is not listed.
alter table ff_step add column started_at bigint;
alter table ff_worker_registry add column tasks text collate "C";
alter table ff_suspension add column asks_until bigint;
update ff_suspension set asks_until = due_at where due_at is not null and gates is not null;
create index ff_suspension_asks_until on ff_suspension (asks_until, execution_id)
    where asks_until is not null;
