-- Budgets, quotas, the worker registry, and the outbox between partitions.

alter table ff_exec_core add column blocked_at bigint;
alter table ff_exec_core add column blocked_on text collate "C";
create index ff_exec_core_blocked_on on ff_exec_core (blocked_on, rank, execution_id)
    where blocked_on is not null;

create table ff_outbox (
    due_at                      bigint not null,
    attempts                    bigint not null,
    revision                    bigint not null,
    origin                      text collate "C" not null,
    message_id                  text collate "C" not null,
    kind                        text collate "C" not null,
    target                      text collate "C" not null,
    body                        text collate "C" not null,
    primary key (origin, message_id)
);
create index ff_outbox_due_at on ff_outbox (due_at)
    where due_at is not null;

create table ff_budget_policy (
    partition                   bigint not null,
    reset_interval_ms           bigint not null,
    breach_count                bigint not null,
    soft_breach_count           bigint not null,
    reset_count                 bigint not null,
    last_updated_at             bigint not null,
    revision                    bigint not null,
    defined                     boolean not null,
    budget_id                   text collate "C" not null,
    scope_type                  text collate "C" not null,
    scope_id                    text collate "C" not null,
    enforcement_mode            text collate "C" not null,
    on_hard_limit               text collate "C" not null,
    on_soft_limit               text collate "C" not null,
    created_at                  bigint,
    last_breach_at              bigint,
    last_reset_at               bigint,
    next_reset_at               bigint,
    breached_at                 bigint,
    lapse_at                    bigint,
    last_breach_dim             text collate "C",
    primary key (budget_id)
) with (fillfactor = 50);
create index ff_budget_policy_next_reset_at on ff_budget_policy (next_reset_at, budget_id)
    where next_reset_at is not null;
create index ff_budget_policy_lapse_at on ff_budget_policy (lapse_at, budget_id)
    where lapse_at is not null;

create table ff_budget_usage (
    hard_limit                  bigint not null,
    soft_limit                  bigint not null,
    reserved                    bigint not null,
    budget_id                   text collate "C" not null,
    dimension                   text collate "C" not null,
    usage                       bigint,
    position                    bigint,
    primary key (budget_id, dimension)
) with (fillfactor = 50);

create table ff_budget_usage_by_exec (
    amount                      bigint not null,
    budget_id                   text collate "C" not null,
    execution_id                text collate "C" not null,
    dimension                   text collate "C" not null,
    primary key (budget_id, execution_id, dimension)
);

create table ff_budget_reservation (
    amount                      bigint not null,
    expires_at                  bigint not null,
    budget_id                   text collate "C" not null,
    reservation_id              text collate "C" not null,
    dimension                   text collate "C" not null,
    execution_id                text collate "C" not null,
    primary key (budget_id, reservation_id, dimension)
);

create table ff_budget_usage_dedup (
    expires_at                  bigint not null,
    budget_id                   text collate "C" not null,
    digest                      text collate "C" not null,
    primary key (budget_id, digest, expires_at)
);
create index ff_budget_usage_dedup_expires_at on ff_budget_usage_dedup (expires_at)
    where expires_at is not null;

create table ff_quota_policy (
    partition                   bigint not null,
    requests_per_window_seconds bigint not null,
    max_requests_per_window     bigint not null,
    active_concurrency_cap      bigint not null,
    jitter_ms                   bigint not null,
    active                      bigint not null,
    revision                    bigint not null,
    defined                     boolean not null,
    quota_policy_id             text collate "C" not null,
    created_at                  bigint,
    primary key (quota_policy_id)
) with (fillfactor = 50);

create table ff_quota_admitted (
    life                        bigint not null,
    admission                   bigint not null,
    counted                     boolean not null,
    quota_policy_id             text collate "C" not null,
    execution_id                text collate "C" not null,
    expires_at                  bigint,
    primary key (quota_policy_id, execution_id)
);

create table ff_quota_window (
    admitted_at                 bigint not null,
    expires_at                  bigint not null,
    quota_policy_id             text collate "C" not null,
    dimension                   text collate "C" not null,
    execution_id                text collate "C" not null,
    primary key (quota_policy_id, dimension, execution_id)
);

create table ff_worker_registry (
    partition                   bigint not null,
    liveness_ttl_ms             bigint not null,
    registered_at_ms            bigint not null,
    last_heartbeat_ms           bigint not null,
    lapses_at                   bigint not null,
    revision                    bigint not null,
    namespace                   text collate "C" not null,
    worker_instance_id          text collate "C" not null,
    worker_id                   text collate "C" not null,
    lanes                       text collate "C" not null,
    capabilities                text collate "C" not null,
    primary key (namespace, worker_instance_id)
);
create index ff_worker_registry_lapses_at on ff_worker_registry (lapses_at)
    where lapses_at is not null;

create table ff_worker_registry_event (
    event_at_ms                 bigint not null,
    expires_at                  bigint not null,
    namespace                   text collate "C" not null,
    worker_instance_id          text collate "C" not null,
    event_kind                  text collate "C" not null,
    reason                      text collate "C",
    primary key (namespace, worker_instance_id, event_at_ms, event_kind)
);
create index ff_worker_registry_event_expires_at on ff_worker_registry_event (expires_at)
    where expires_at is not null;
