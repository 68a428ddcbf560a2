-- Budgets and quota policies belong to a namespace. What exists belongs to `default`.
--
-- The primary keys change, so the release before must not run on this schema: stop its processes first.

ALTER TABLE ff_budget_policy RENAME TO ff_budget_policy_before;
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
    namespace TEXT NOT NULL,
    declaration TEXT, -- which declaration in an application's code the limits were last taken from
    PRIMARY KEY (namespace, budget_id)
) STRICT;
INSERT INTO ff_budget_policy SELECT budget_id, partition, defined, scope_type, scope_id, enforcement_mode, on_hard_limit, on_soft_limit, reset_interval_ms, breach_count, soft_breach_count, reset_count, last_updated_at, created_at, last_breach_at, last_breach_dim, last_reset_at, next_reset_at, breached_at, lapse_at, revision, 'default', NULL FROM ff_budget_policy_before;
DROP TABLE ff_budget_policy_before;
CREATE INDEX ff_budget_policy_next_reset_at ON ff_budget_policy (next_reset_at, namespace, budget_id) WHERE next_reset_at IS NOT NULL;
CREATE INDEX ff_budget_policy_lapse_at ON ff_budget_policy (lapse_at, namespace, budget_id) WHERE lapse_at IS NOT NULL;

ALTER TABLE ff_budget_usage RENAME TO ff_budget_usage_before;
CREATE TABLE ff_budget_usage (
    budget_id TEXT NOT NULL,
    dimension TEXT NOT NULL,
    hard_limit INTEGER NOT NULL,
    soft_limit INTEGER NOT NULL,
    usage INTEGER,
    reserved INTEGER NOT NULL,
    position INTEGER,
    namespace TEXT NOT NULL,
    PRIMARY KEY (namespace, budget_id, dimension)
) STRICT;
INSERT INTO ff_budget_usage SELECT budget_id, dimension, hard_limit, soft_limit, usage, reserved, position, 'default' FROM ff_budget_usage_before;
DROP TABLE ff_budget_usage_before;

ALTER TABLE ff_budget_usage_by_exec RENAME TO ff_budget_usage_by_exec_before;
CREATE TABLE ff_budget_usage_by_exec (
    budget_id TEXT NOT NULL,
    execution_id TEXT NOT NULL,
    dimension TEXT NOT NULL,
    amount INTEGER NOT NULL,
    namespace TEXT NOT NULL,
    PRIMARY KEY (namespace, budget_id, execution_id, dimension)
) STRICT;
INSERT INTO ff_budget_usage_by_exec SELECT budget_id, execution_id, dimension, amount, 'default' FROM ff_budget_usage_by_exec_before;
DROP TABLE ff_budget_usage_by_exec_before;

ALTER TABLE ff_budget_reservation RENAME TO ff_budget_reservation_before;
CREATE TABLE ff_budget_reservation (
    budget_id TEXT NOT NULL,
    reservation_id TEXT NOT NULL,
    dimension TEXT NOT NULL,
    execution_id TEXT NOT NULL,
    amount INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    namespace TEXT NOT NULL,
    PRIMARY KEY (namespace, budget_id, reservation_id, dimension)
) STRICT;
INSERT INTO ff_budget_reservation SELECT budget_id, reservation_id, dimension, execution_id, amount, expires_at, 'default' FROM ff_budget_reservation_before;
DROP TABLE ff_budget_reservation_before;

ALTER TABLE ff_budget_usage_dedup RENAME TO ff_budget_usage_dedup_before;
CREATE TABLE ff_budget_usage_dedup (
    budget_id TEXT NOT NULL,
    digest TEXT NOT NULL,
    expires_at INTEGER NOT NULL,
    namespace TEXT NOT NULL,
    PRIMARY KEY (namespace, budget_id, digest, expires_at)
) STRICT;
INSERT INTO ff_budget_usage_dedup SELECT budget_id, digest, expires_at, 'default' FROM ff_budget_usage_dedup_before;
DROP TABLE ff_budget_usage_dedup_before;
CREATE INDEX ff_budget_usage_dedup_expires_at ON ff_budget_usage_dedup (expires_at) WHERE expires_at IS NOT NULL;

ALTER TABLE ff_quota_policy RENAME TO ff_quota_policy_before;
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
    namespace TEXT NOT NULL,
    PRIMARY KEY (namespace, quota_policy_id)
) STRICT;
INSERT INTO ff_quota_policy SELECT quota_policy_id, partition, defined, requests_per_window_seconds, max_requests_per_window, active_concurrency_cap, jitter_ms, active, created_at, revision, 'default' FROM ff_quota_policy_before;
DROP TABLE ff_quota_policy_before;

ALTER TABLE ff_quota_admitted RENAME TO ff_quota_admitted_before;
CREATE TABLE ff_quota_admitted (
    quota_policy_id TEXT NOT NULL,
    execution_id TEXT NOT NULL,
    life INTEGER NOT NULL,
    admission INTEGER NOT NULL,
    counted INTEGER NOT NULL,
    expires_at INTEGER,
    namespace TEXT NOT NULL,
    PRIMARY KEY (namespace, quota_policy_id, execution_id)
) STRICT;
INSERT INTO ff_quota_admitted SELECT quota_policy_id, execution_id, life, admission, counted, expires_at, 'default' FROM ff_quota_admitted_before;
DROP TABLE ff_quota_admitted_before;

ALTER TABLE ff_quota_window RENAME TO ff_quota_window_before;
CREATE TABLE ff_quota_window (
    quota_policy_id TEXT NOT NULL,
    dimension TEXT NOT NULL,
    execution_id TEXT NOT NULL,
    admitted_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    namespace TEXT NOT NULL,
    PRIMARY KEY (namespace, quota_policy_id, dimension, execution_id)
) STRICT;
INSERT INTO ff_quota_window SELECT quota_policy_id, dimension, execution_id, admitted_at, expires_at, 'default' FROM ff_quota_window_before;
DROP TABLE ff_quota_window_before;
