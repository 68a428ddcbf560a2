-- Budgets, quotas, the worker registry, and the outbox between partitions.

ALTER TABLE ff_exec_core ADD COLUMN blocked_on TEXT;
ALTER TABLE ff_exec_core ADD COLUMN blocked_at INTEGER;
CREATE INDEX ff_exec_core_blocked_on ON ff_exec_core (blocked_on, rank, execution_id) WHERE blocked_on IS NOT NULL;

CREATE TABLE ff_outbox (
    origin TEXT NOT NULL,
    message_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    target TEXT NOT NULL,
    body TEXT NOT NULL,
    due_at INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (origin, message_id)
) STRICT;
CREATE INDEX ff_outbox_due_at ON ff_outbox (due_at) WHERE due_at IS NOT NULL;

CREATE TABLE ff_budget_policy (
    budget_id TEXT NOT NULL,
    partition INTEGER NOT NULL,
    defined INTEGER NOT NULL,
    scope_type TEXT NOT NULL,
    scope_id TEXT NOT NULL,
    enforcement_mode TEXT NOT NULL,
    on_hard_limit TEXT NOT NULL,
    on_soft_limit TEXT NOT NULL,
    reset_interval_ms INTEGER NOT NULL,
    breach_count INTEGER NOT NULL,
    soft_breach_count INTEGER NOT NULL,
    reset_count INTEGER NOT NULL,
    last_updated_at INTEGER NOT NULL,
    created_at INTEGER,
    last_breach_at INTEGER,
    last_breach_dim TEXT,
    last_reset_at INTEGER,
    next_reset_at INTEGER,
    breached_at INTEGER,
    lapse_at INTEGER,
    revision INTEGER NOT NULL,
    PRIMARY KEY (budget_id)
) STRICT;
CREATE INDEX ff_budget_policy_next_reset_at ON ff_budget_policy (next_reset_at, budget_id) WHERE next_reset_at IS NOT NULL;
CREATE INDEX ff_budget_policy_lapse_at ON ff_budget_policy (lapse_at, budget_id) WHERE lapse_at IS NOT NULL;

CREATE TABLE ff_budget_usage (
    budget_id TEXT NOT NULL,
    dimension TEXT NOT NULL,
    hard_limit INTEGER NOT NULL,
    soft_limit INTEGER NOT NULL,
    usage INTEGER,
    reserved INTEGER NOT NULL,
    position INTEGER,
    PRIMARY KEY (budget_id, dimension)
) STRICT;

CREATE TABLE ff_budget_usage_by_exec (
    budget_id TEXT NOT NULL,
    execution_id TEXT NOT NULL,
    dimension TEXT NOT NULL,
    amount INTEGER NOT NULL,
    PRIMARY KEY (budget_id, execution_id, dimension)
) STRICT;

CREATE TABLE ff_budget_reservation (
    budget_id TEXT NOT NULL,
    reservation_id TEXT NOT NULL,
    dimension TEXT NOT NULL,
    execution_id TEXT NOT NULL,
    amount INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (budget_id, reservation_id, dimension)
) STRICT;

CREATE TABLE ff_budget_usage_dedup (
    budget_id TEXT NOT NULL,
    digest TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (budget_id, digest, expires_at)
) STRICT;
CREATE INDEX ff_budget_usage_dedup_expires_at ON ff_budget_usage_dedup (expires_at) WHERE expires_at IS NOT NULL;

CREATE TABLE ff_quota_policy (
    quota_policy_id TEXT NOT NULL,
    partition INTEGER NOT NULL,
    defined INTEGER NOT NULL,
    requests_per_window_seconds INTEGER NOT NULL,
    max_requests_per_window INTEGER NOT NULL,
    active_concurrency_cap INTEGER NOT NULL,
    jitter_ms INTEGER NOT NULL,
    active INTEGER NOT NULL,
    created_at INTEGER,
    revision INTEGER NOT NULL,
    PRIMARY KEY (quota_policy_id)
) STRICT;

CREATE TABLE ff_quota_admitted (
    quota_policy_id TEXT NOT NULL,
    execution_id TEXT NOT NULL,
    life INTEGER NOT NULL,
    admission INTEGER NOT NULL,
    counted INTEGER NOT NULL,
    expires_at INTEGER,
    PRIMARY KEY (quota_policy_id, execution_id)
) STRICT;

CREATE TABLE ff_quota_window (
    quota_policy_id TEXT NOT NULL,
    dimension TEXT NOT NULL,
    execution_id TEXT NOT NULL,
    admitted_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (quota_policy_id, dimension, execution_id)
) STRICT;

CREATE TABLE ff_worker_registry (
    namespace TEXT NOT NULL,
    worker_instance_id TEXT NOT NULL,
    partition INTEGER NOT NULL,
    worker_id TEXT NOT NULL,
    lanes TEXT NOT NULL,
    capabilities TEXT NOT NULL,
    liveness_ttl_ms INTEGER NOT NULL,
    registered_at_ms INTEGER NOT NULL,
    last_heartbeat_ms INTEGER NOT NULL,
    lapses_at INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (namespace, worker_instance_id)
) STRICT;
CREATE INDEX ff_worker_registry_lapses_at ON ff_worker_registry (lapses_at) WHERE lapses_at IS NOT NULL;

CREATE TABLE ff_worker_registry_event (
    namespace TEXT NOT NULL,
    worker_instance_id TEXT NOT NULL,
    event_at_ms INTEGER NOT NULL,
    event_kind TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    reason TEXT,
    PRIMARY KEY (namespace, worker_instance_id, event_at_ms, event_kind)
) STRICT;
CREATE INDEX ff_worker_registry_event_expires_at ON ff_worker_registry_event (expires_at) WHERE expires_at IS NOT NULL;
