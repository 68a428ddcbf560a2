-- The first schema: the tables of the catalogue (stores/catalog.py), the lines, and the feed.
--
-- Tables keep their rows in the order of insertion, not of their keys: ids are random, and what is created together is
-- worked on together. An enum is its member's place, a line its number. An index holds only rows that are set in it.

CREATE TABLE ff_schema_version (
    version INTEGER PRIMARY KEY,
    applied_at INTEGER NOT NULL
) STRICT;

CREATE TABLE ff_line (
    line_id INTEGER PRIMARY KEY,
    lane_id TEXT NOT NULL,
    required TEXT NOT NULL,
    fairness_key TEXT NOT NULL,
    fairness_weight INTEGER NOT NULL,
    decided INTEGER NOT NULL,
    UNIQUE (lane_id, required, fairness_key, fairness_weight, decided)
) STRICT;

-- A position is given under the write lock and never again, whatever is removed.
CREATE TABLE ff_event (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    at INTEGER NOT NULL,
    execution_id TEXT NOT NULL,
    namespace TEXT NOT NULL,
    tags TEXT,
    flow_id TEXT,
    lease TEXT,
    lease_id TEXT,
    lease_epoch INTEGER,
    attempt_id TEXT,
    attempt_index INTEGER,
    worker_id TEXT,
    worker_instance_id TEXT,
    reason TEXT,
    outcome TEXT,
    operator TEXT,
    signal TEXT,
    details TEXT
) STRICT;
CREATE INDEX ff_event_execution_id ON ff_event (execution_id);
-- Nearly every event belongs to the lease feed; the others are found without reading past those.
CREATE INDEX ff_event_outcome ON ff_event (position) WHERE outcome IS NOT NULL;
CREATE INDEX ff_event_operator ON ff_event (position) WHERE operator IS NOT NULL;
CREATE INDEX ff_event_signal ON ff_event (position) WHERE signal IS NOT NULL;

CREATE TABLE ff_exec_core (
    execution_id TEXT NOT NULL,
    partition INTEGER NOT NULL,
    namespace TEXT NOT NULL,
    lane_id TEXT NOT NULL,
    priority INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    last_transition_at INTEGER NOT NULL,
    last_mutation_at INTEGER NOT NULL,
    lifecycle_phase INTEGER NOT NULL,
    ownership_state INTEGER NOT NULL,
    eligibility_state INTEGER NOT NULL,
    blocking_reason INTEGER NOT NULL,
    terminal_outcome INTEGER NOT NULL,
    attempt_state INTEGER NOT NULL,
    public_state INTEGER NOT NULL,
    flow_id TEXT,
    tags TEXT,
    required_capabilities TEXT,
    terms TEXT,
    blocking_text TEXT,
    total_attempt_count INTEGER NOT NULL,
    retry_count INTEGER NOT NULL,
    replay_count INTEGER NOT NULL,
    lease_reclaim_count INTEGER NOT NULL,
    started_at INTEGER,
    completed_at INTEGER,
    attempt_index INTEGER,
    attempt_id TEXT,
    attempt_type INTEGER,
    attempt_started_at INTEGER,
    attempt_suspended_at INTEGER,
    attempt_suspension TEXT,
    attempt_resumed_at INTEGER,
    lineage TEXT,
    lease_epoch INTEGER NOT NULL,
    lease_id TEXT,
    worker_id TEXT,
    worker_instance_id TEXT,
    current_lane TEXT,
    lease_acquired_at INTEGER,
    lease_renewed_at INTEGER,
    lease_expires_at INTEGER,
    lease_expired_at INTEGER,
    lease_revoked_at INTEGER,
    lease_revoke_reason TEXT,
    delay_until INTEGER,
    attempt_timeout_at INTEGER,
    deadline_at INTEGER,
    purge_at INTEGER,
    line INTEGER,
    rank INTEGER NOT NULL,
    next_type INTEGER,
    next_timeout_ms INTEGER,
    granted_until INTEGER,
    grant TEXT,
    failure_reason TEXT,
    cancellation_reason TEXT,
    cancelled_by TEXT,
    last_capability_mismatch_at INTEGER,
    progress_pct INTEGER,
    progress_message TEXT,
    progress_updated_at INTEGER,
    revision INTEGER NOT NULL,
    PRIMARY KEY (execution_id)
) STRICT;
CREATE INDEX ff_exec_core_line ON ff_exec_core (line, rank, execution_id) WHERE line IS NOT NULL;
CREATE INDEX ff_exec_core_lease_expires_at ON ff_exec_core (lease_expires_at, execution_id) WHERE lease_expires_at IS NOT NULL;
CREATE INDEX ff_exec_core_delay_until ON ff_exec_core (delay_until, execution_id) WHERE delay_until IS NOT NULL;
CREATE INDEX ff_exec_core_attempt_timeout_at ON ff_exec_core (attempt_timeout_at, execution_id) WHERE attempt_timeout_at IS NOT NULL;
CREATE INDEX ff_exec_core_deadline_at ON ff_exec_core (deadline_at, execution_id) WHERE deadline_at IS NOT NULL;
CREATE INDEX ff_exec_core_purge_at ON ff_exec_core (purge_at, execution_id) WHERE purge_at IS NOT NULL;

CREATE TABLE ff_payload (
    execution_id TEXT NOT NULL,
    execution_kind TEXT NOT NULL,
    creator_identity TEXT NOT NULL,
    input_payload BLOB,
    payload_encoding TEXT,
    policy TEXT,
    PRIMARY KEY (execution_id)
) STRICT;

CREATE TABLE ff_result (
    execution_id TEXT NOT NULL,
    payload BLOB NOT NULL,
    encoding TEXT,
    PRIMARY KEY (execution_id)
) STRICT;

CREATE TABLE ff_attempt (
    execution_id TEXT NOT NULL,
    attempt_index INTEGER NOT NULL,
    attempt_id TEXT NOT NULL,
    attempt_type INTEGER NOT NULL,
    attempt_state INTEGER NOT NULL,
    started_at INTEGER NOT NULL,
    lease_id TEXT NOT NULL,
    lease_epoch INTEGER NOT NULL,
    worker_id TEXT NOT NULL,
    worker_instance_id TEXT NOT NULL,
    lineage TEXT,
    suspended_at INTEGER,
    suspension_id TEXT,
    resumed_at INTEGER,
    ended_at INTEGER,
    failure_reason TEXT,
    failure_category TEXT,
    PRIMARY KEY (execution_id, attempt_index)
) STRICT;

CREATE TABLE ff_idempotency (
    partition INTEGER NOT NULL,
    digest TEXT NOT NULL,
    execution_id TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (partition, digest)
) STRICT;
CREATE INDEX ff_idempotency_expires_at ON ff_idempotency (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE ff_sweep (
    sweep TEXT NOT NULL,
    holder TEXT NOT NULL,
    lease_until INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (sweep)
) STRICT;

CREATE TABLE ff_keystore (
    keystore_id INTEGER NOT NULL,
    current_kid TEXT NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (keystore_id)
) STRICT;

CREATE TABLE ff_waitpoint_hmac (
    kid TEXT NOT NULL,
    secret_hex TEXT NOT NULL,
    current INTEGER NOT NULL,
    expires_at INTEGER,
    keystore_id INTEGER NOT NULL,
    PRIMARY KEY (keystore_id, kid)
) STRICT;
