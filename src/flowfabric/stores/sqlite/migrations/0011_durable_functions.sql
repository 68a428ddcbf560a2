-- compatible: yes
-- What durable functions remember: the order of operations, results of children, children to cancel. The release before
-- may still run: it leaves the columns empty, and leaves the children of a cancelled parent running.

ALTER TABLE ff_step ADD COLUMN number INTEGER;
ALTER TABLE ff_gate ADD COLUMN mailbox TEXT;
ALTER TABLE ff_gate ADD COLUMN number INTEGER;
ALTER TABLE ff_gate ADD COLUMN results TEXT;
ALTER TABLE ff_child_end ADD COLUMN result BLOB;
ALTER TABLE ff_child_end ADD COLUMN result_encoding TEXT;

CREATE TABLE ff_child_cancel (
    parent_id TEXT NOT NULL,
    due_at INTEGER,
    revision INTEGER NOT NULL,
    PRIMARY KEY (parent_id)
) STRICT;
CREATE INDEX ff_child_cancel_due_at ON ff_child_cancel (due_at, parent_id) WHERE due_at IS NOT NULL;
