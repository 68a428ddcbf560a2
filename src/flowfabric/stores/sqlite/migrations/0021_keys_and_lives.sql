-- compatible: yes
-- The key of a run, how often it continued as new, and how long its key is taken. The release before may still run: its
-- workers take the next life of a run for the first, so start none of them beside functions that continue as new.

ALTER TABLE ff_exec_core ADD COLUMN idempotency_key TEXT;
ALTER TABLE ff_exec_core ADD COLUMN life INTEGER;
ALTER TABLE ff_exec_core ADD COLUMN past_life INTEGER;
ALTER TABLE ff_idempotency ADD COLUMN until INTEGER;
ALTER TABLE ff_idempotency ADD COLUMN first_at INTEGER;
