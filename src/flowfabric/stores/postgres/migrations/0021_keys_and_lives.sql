-- compatible: yes
-- The key of a run, how often it continued as new, and how long its key is taken. The release before may still run: its
-- workers take the next life of a run for the first, so start none of them beside functions that continue as new.

alter table ff_exec_core add column idempotency_key text collate "C";
alter table ff_exec_core add column life bigint;
alter table ff_exec_core add column past_life bigint;
alter table ff_idempotency add column until smallint;
alter table ff_idempotency add column first_at bigint;
