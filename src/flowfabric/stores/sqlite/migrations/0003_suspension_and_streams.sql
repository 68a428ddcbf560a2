-- Suspension and streams: what an execution waits for, what it was sent, what its attempts put out.

ALTER TABLE ff_exec_core ADD COLUMN current_suspension_id TEXT;
ALTER TABLE ff_exec_core ADD COLUMN current_waitpoint_id TEXT;
ALTER TABLE ff_exec_core ADD COLUMN last_hmac_validation_failed_at INTEGER;
ALTER TABLE ff_exec_core ADD COLUMN stream_index INTEGER;
ALTER TABLE ff_exec_core ADD COLUMN parent_id TEXT;
ALTER TABLE ff_exec_core ADD COLUMN has_waits INTEGER NOT NULL DEFAULT 0;
ALTER TABLE ff_exec_core ADD COLUMN has_steps INTEGER NOT NULL DEFAULT 0;

CREATE TABLE ff_suspension (
    execution_id TEXT NOT NULL,
    partition INTEGER NOT NULL,
    signal_count INTEGER NOT NULL,
    suspension_id TEXT,
    attempt_index INTEGER,
    waitpoints TEXT,
    reason_code TEXT,
    requested_by INTEGER,
    continuation_metadata_pointer TEXT,
    created_at INTEGER,
    timeout_at INTEGER,
    timeout_behavior INTEGER,
    due_at INTEGER,
    resume_condition TEXT,
    resume_policy TEXT,
    last_signal_at INTEGER,
    satisfied_at INTEGER,
    closed_at INTEGER,
    close_reason TEXT,
    closer_signal_id TEXT,
    progress TEXT,
    satisfiers TEXT,
    waits_on TEXT,
    gates TEXT,
    mail TEXT,
    revision INTEGER NOT NULL,
    PRIMARY KEY (execution_id)
) STRICT;
CREATE INDEX ff_suspension_due_at ON ff_suspension (due_at, execution_id) WHERE due_at IS NOT NULL;

CREATE TABLE ff_waitpoint (
    waitpoint_id TEXT NOT NULL,
    partition INTEGER NOT NULL,
    execution_id TEXT NOT NULL,
    attempt_index INTEGER NOT NULL,
    waitpoint_key TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    token_kid TEXT NOT NULL,
    token_fingerprint TEXT NOT NULL,
    suspension_id TEXT,
    gate TEXT,
    activated_at INTEGER,
    expires_at INTEGER,
    pending_until INTEGER,
    closed_at INTEGER,
    close_reason TEXT,
    signal_count INTEGER NOT NULL,
    matched_signal_count INTEGER NOT NULL,
    last_signal_at INTEGER,
    log_start INTEGER NOT NULL,
    PRIMARY KEY (waitpoint_id, partition)
) STRICT;
CREATE INDEX ff_waitpoint_execution_id ON ff_waitpoint (execution_id, waitpoint_id) WHERE execution_id IS NOT NULL;
CREATE INDEX ff_waitpoint_pending_until ON ff_waitpoint (pending_until, waitpoint_id) WHERE pending_until IS NOT NULL;

CREATE TABLE ff_signal (
    execution_id TEXT NOT NULL,
    waitpoint_id TEXT NOT NULL,
    seq INTEGER NOT NULL,
    signal_id TEXT NOT NULL,
    signal_name TEXT NOT NULL,
    signal_category TEXT NOT NULL,
    source_type TEXT NOT NULL,
    source_identity TEXT NOT NULL,
    target_scope TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    accepted_at INTEGER NOT NULL,
    observed_effect TEXT NOT NULL,
    correlation_id TEXT,
    idempotency_key TEXT,
    payload_encoding TEXT,
    payload BLOB,
    PRIMARY KEY (execution_id, waitpoint_id, seq)
) STRICT;

CREATE TABLE ff_remembered (
    execution_id TEXT NOT NULL,
    scope TEXT NOT NULL,
    digest TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    answer TEXT NOT NULL,
    PRIMARY KEY (execution_id, scope, digest)
) STRICT;

CREATE TABLE ff_gate (
    execution_id TEXT NOT NULL,
    gate TEXT NOT NULL,
    kind INTEGER NOT NULL,
    ended_as INTEGER NOT NULL,
    opened_at INTEGER NOT NULL,
    closed_at INTEGER NOT NULL,
    votes TEXT,
    payload BLOB,
    payload_encoding TEXT,
    sender TEXT,
    message_id TEXT,
    PRIMARY KEY (execution_id, gate)
) STRICT;

CREATE TABLE ff_mail (
    execution_id TEXT NOT NULL,
    mailbox TEXT NOT NULL,
    seq INTEGER NOT NULL,
    message_id TEXT NOT NULL,
    sent_at INTEGER NOT NULL,
    sender TEXT NOT NULL,
    payload BLOB,
    payload_encoding TEXT,
    PRIMARY KEY (execution_id, mailbox, seq)
) STRICT;

CREATE TABLE ff_child_end (
    parent_id TEXT NOT NULL,
    child_id TEXT NOT NULL,
    life INTEGER NOT NULL,
    outcome TEXT NOT NULL,
    due_at INTEGER,
    PRIMARY KEY (parent_id, child_id, life)
) STRICT;
CREATE INDEX ff_child_end_due_at ON ff_child_end (due_at) WHERE due_at IS NOT NULL;

CREATE TABLE ff_step (
    execution_id TEXT NOT NULL,
    name TEXT NOT NULL,
    occurrence INTEGER NOT NULL,
    attempt_index INTEGER NOT NULL,
    recorded_at INTEGER NOT NULL,
    result BLOB NOT NULL,
    encoding TEXT,
    digest TEXT,
    PRIMARY KEY (execution_id, name, occurrence)
) STRICT;

CREATE TABLE ff_stream (
    execution_id TEXT NOT NULL,
    attempt_index INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    last_ms INTEGER NOT NULL,
    last_seq INTEGER NOT NULL,
    frame_count INTEGER NOT NULL,
    total_bytes INTEGER NOT NULL,
    last_frame_at INTEGER NOT NULL,
    kept_from INTEGER NOT NULL,
    pages TEXT NOT NULL,
    has_durable_frame INTEGER NOT NULL,
    vanishes_at INTEGER,
    ema_rate_hz REAL,
    last_append_ts_ms INTEGER,
    maxlen_applied_last INTEGER,
    closed_at INTEGER,
    closed_reason TEXT,
    revision INTEGER NOT NULL,
    PRIMARY KEY (execution_id, attempt_index)
) STRICT;

CREATE TABLE ff_frame (
    execution_id TEXT NOT NULL,
    attempt_index INTEGER NOT NULL,
    page INTEGER NOT NULL,
    ms INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    number INTEGER NOT NULL,
    ts INTEGER NOT NULL,
    mode INTEGER NOT NULL,
    frame_type TEXT NOT NULL,
    payload BLOB NOT NULL,
    correlation_id TEXT,
    summary_version INTEGER,
    ttl_ms INTEGER,
    PRIMARY KEY (execution_id, attempt_index, page, ms, seq)
) STRICT;

CREATE TABLE ff_stream_summary (
    execution_id TEXT NOT NULL,
    attempt_index INTEGER NOT NULL,
    document TEXT NOT NULL,
    version INTEGER NOT NULL,
    first_applied_ms INTEGER NOT NULL,
    last_updated_ms INTEGER NOT NULL,
    patch_kind TEXT NOT NULL,
    PRIMARY KEY (execution_id, attempt_index)
) STRICT;

-- The last position of each topic that is no longer kept.
CREATE TABLE ff_feed_trim (
    lost_lease INTEGER NOT NULL,
    lost_outcome INTEGER NOT NULL,
    lost_operator INTEGER NOT NULL,
    lost_signal INTEGER NOT NULL
) STRICT;
INSERT INTO ff_feed_trim VALUES (0, 0, 0, 0);
