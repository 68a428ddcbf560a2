-- compatible: yes
-- Facts that runs show, the order of messages to a run, and replies. The release before may still run: it sends messages
-- without a number, which come before those with one, and it takes the count of a fact for a step of that name.

CREATE TABLE ff_fact (
    execution_id TEXT NOT NULL,
    name TEXT NOT NULL,
    number INTEGER NOT NULL,
    set_at INTEGER NOT NULL,
    value BLOB NOT NULL,
    encoding TEXT,
    revision INTEGER NOT NULL,
    PRIMARY KEY (execution_id, name)
) STRICT;

CREATE TABLE ff_reply (
    execution_id TEXT NOT NULL,
    message_id TEXT NOT NULL,
    mailbox TEXT NOT NULL,
    state INTEGER NOT NULL,
    asked_at INTEGER NOT NULL,
    replied_at INTEGER,
    payload BLOB,
    payload_encoding TEXT,
    reason TEXT,
    PRIMARY KEY (execution_id, message_id)
) STRICT;

ALTER TABLE ff_mail ADD COLUMN number INTEGER;
ALTER TABLE ff_mail ADD COLUMN wants_reply INTEGER NOT NULL DEFAULT 0;
ALTER TABLE ff_gate ADD COLUMN message_number INTEGER;
ALTER TABLE ff_gate ADD COLUMN wants_reply INTEGER NOT NULL DEFAULT 0;
ALTER TABLE ff_suspension ADD COLUMN message_count INTEGER NOT NULL DEFAULT 0;
ALTER TABLE ff_suspension ADD COLUMN inbox_closed_at INTEGER;
ALTER TABLE ff_exec_core ADD COLUMN has_mail INTEGER NOT NULL DEFAULT 0;
