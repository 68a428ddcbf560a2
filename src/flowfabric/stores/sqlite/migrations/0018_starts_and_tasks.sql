-- compatible: yes
-- When the first try of a step began, the tasks that a worker runs, and until when a durable function asks people. The
-- release before may still run: it leaves the columns empty, so that what its workers ask is not listed.

ALTER TABLE ff_step ADD COLUMN started_at INTEGER;
ALTER TABLE ff_worker_registry ADD COLUMN tasks TEXT;
ALTER TABLE ff_suspension ADD COLUMN asks_until INTEGER;
UPDATE ff_suspension SET asks_until = due_at WHERE due_at IS NOT NULL AND gates IS NOT NULL;
CREATE INDEX ff_suspension_asks_until ON ff_suspension (asks_until, execution_id) WHERE asks_until IS NOT NULL;
