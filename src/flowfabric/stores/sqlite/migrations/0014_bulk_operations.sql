-- compatible: yes
-- Bulk operations (model/bulk_operation.py). The release before may still run: it does not work them off.

CREATE TABLE ff_bulk_operation (
    operation_id TEXT NOT NULL,
    verb INTEGER NOT NULL,
    criteria TEXT NOT NULL,
    ceiling INTEGER NOT NULL,
    state INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    reason TEXT NOT NULL,
    requested_by TEXT NOT NULL,
    priority INTEGER,
    due_at INTEGER,
    after_created_at INTEGER,
    after_execution_id TEXT,
    page TEXT,
    changed INTEGER NOT NULL,
    refused INTEGER NOT NULL,
    last_refusal TEXT,
    ended_at INTEGER,
    revision INTEGER NOT NULL,
    PRIMARY KEY (operation_id)
) STRICT;
CREATE INDEX ff_bulk_operation_due_at ON ff_bulk_operation (due_at, operation_id) WHERE due_at IS NOT NULL;
CREATE INDEX ff_bulk_operation_created_at ON ff_bulk_operation (created_at, operation_id);
