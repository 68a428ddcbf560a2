-- compatible: yes
-- Schedules (model/scheduling/schedule.py). The release before may still run: it does not fire them.

CREATE TABLE ff_schedule (
    schedule_id TEXT NOT NULL,
    namespace TEXT NOT NULL,
    name TEXT NOT NULL,
    spec TEXT NOT NULL,
    template TEXT NOT NULL,
    digest TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,
    decided_until INTEGER NOT NULL,
    input_payload BLOB,
    owner TEXT,
    next_at INTEGER,
    next_instant INTEGER,
    paused_at INTEGER,
    paused_by INTEGER,
    note TEXT,
    active TEXT,
    pending TEXT,
    last_run_id TEXT,
    last_instant INTEGER,
    fired INTEGER NOT NULL,
    skipped INTEGER NOT NULL,
    missed INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (schedule_id)
) STRICT;
CREATE INDEX ff_schedule_next_at ON ff_schedule (next_at, schedule_id) WHERE next_at IS NOT NULL;
CREATE INDEX ff_schedule_name ON ff_schedule (name, schedule_id);
