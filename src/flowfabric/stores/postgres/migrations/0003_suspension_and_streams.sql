-- Suspension and streams: what an execution waits for, what it was sent, what its attempts put out.

alter table ff_exec_core add column current_suspension_id text collate "C";
alter table ff_exec_core add column current_waitpoint_id text collate "C";
alter table ff_exec_core add column last_hmac_validation_failed_at bigint;
alter table ff_exec_core add column stream_index bigint;
alter table ff_exec_core add column parent_id text collate "C";
alter table ff_exec_core add column has_waits boolean not null default false;
alter table ff_exec_core add column has_steps boolean not null default false;

create table ff_suspension (
    partition                     bigint not null,
    signal_count                  bigint not null,
    revision                      bigint not null,
    execution_id                  text collate "C" not null,
    attempt_index                 bigint,
    created_at                    bigint,
    timeout_at                    bigint,
    due_at                        bigint,
    last_signal_at                bigint,
    satisfied_at                  bigint,
    closed_at                     bigint,
    requested_by                  smallint,
    timeout_behavior              smallint,
    suspension_id                 text collate "C",
    waitpoints                    text collate "C",
    reason_code                   text collate "C",
    continuation_metadata_pointer text collate "C",
    resume_condition              text collate "C",
    resume_policy                 text collate "C",
    close_reason                  text collate "C",
    closer_signal_id              text collate "C",
    progress                      text collate "C",
    satisfiers                    text collate "C",
    waits_on                      text collate "C",
    gates                         text collate "C",
    mail                          text collate "C",
    primary key (execution_id)
) with (fillfactor = 80);
create index ff_suspension_due_at on ff_suspension (due_at, execution_id)
    where due_at is not null;

create table ff_waitpoint (
    partition                     bigint not null,
    attempt_index                 bigint not null,
    created_at                    bigint not null,
    signal_count                  bigint not null,
    matched_signal_count          bigint not null,
    log_start                     bigint not null,
    waitpoint_id                  text collate "C" not null,
    execution_id                  text collate "C" not null,
    waitpoint_key                 text collate "C" not null,
    token_kid                     text collate "C" not null,
    token_fingerprint             text collate "C" not null,
    activated_at                  bigint,
    expires_at                    bigint,
    pending_until                 bigint,
    closed_at                     bigint,
    last_signal_at                bigint,
    suspension_id                 text collate "C",
    gate                          text collate "C",
    close_reason                  text collate "C",
    primary key (waitpoint_id, partition)
);
create index ff_waitpoint_execution_id on ff_waitpoint (execution_id, waitpoint_id)
    where execution_id is not null;
create index ff_waitpoint_pending_until on ff_waitpoint (pending_until, waitpoint_id)
    where pending_until is not null;

create table ff_signal (
    seq                           bigint not null,
    created_at                    bigint not null,
    accepted_at                   bigint not null,
    execution_id                  text collate "C" not null,
    waitpoint_id                  text collate "C" not null,
    signal_id                     text collate "C" not null,
    signal_name                   text collate "C" not null,
    signal_category               text collate "C" not null,
    source_type                   text collate "C" not null,
    source_identity               text collate "C" not null,
    target_scope                  text collate "C" not null,
    observed_effect               text collate "C" not null,
    correlation_id                text collate "C",
    idempotency_key               text collate "C",
    payload_encoding              text collate "C",
    payload                       bytea,
    primary key (execution_id, waitpoint_id, seq)
);

create table ff_remembered (
    expires_at                    bigint not null,
    execution_id                  text collate "C" not null,
    scope                         text collate "C" not null,
    digest                        text collate "C" not null,
    answer                        text collate "C" not null,
    primary key (execution_id, scope, digest)
);

create table ff_gate (
    opened_at                     bigint not null,
    closed_at                     bigint not null,
    kind                          smallint not null,
    ended_as                      smallint not null,
    execution_id                  text collate "C" not null,
    gate                          text collate "C" not null,
    votes                         text collate "C",
    payload_encoding              text collate "C",
    sender                        text collate "C",
    message_id                    text collate "C",
    payload                       bytea,
    primary key (execution_id, gate)
);

create table ff_mail (
    seq                           bigint not null,
    sent_at                       bigint not null,
    execution_id                  text collate "C" not null,
    mailbox                       text collate "C" not null,
    message_id                    text collate "C" not null,
    sender                        text collate "C" not null,
    payload_encoding              text collate "C",
    payload                       bytea,
    primary key (execution_id, mailbox, seq)
);

create table ff_child_end (
    life                          bigint not null,
    parent_id                     text collate "C" not null,
    child_id                      text collate "C" not null,
    outcome                       text collate "C" not null,
    due_at                        bigint,
    primary key (parent_id, child_id, life)
);
create index ff_child_end_due_at on ff_child_end (due_at)
    where due_at is not null;

create table ff_step (
    occurrence                    bigint not null,
    attempt_index                 bigint not null,
    recorded_at                   bigint not null,
    execution_id                  text collate "C" not null,
    name                          text collate "C" not null,
    result                        bytea not null,
    encoding                      text collate "C",
    digest                        text collate "C",
    primary key (execution_id, name, occurrence)
);

create table ff_stream (
    attempt_index                 bigint not null,
    created_at                    bigint not null,
    last_ms                       bigint not null,
    last_seq                      bigint not null,
    frame_count                   bigint not null,
    total_bytes                   bigint not null,
    last_frame_at                 bigint not null,
    kept_from                     bigint not null,
    revision                      bigint not null,
    has_durable_frame             boolean not null,
    execution_id                  text collate "C" not null,
    pages                         text collate "C" not null,
    vanishes_at                   bigint,
    last_append_ts_ms             bigint,
    maxlen_applied_last           bigint,
    closed_at                     bigint,
    ema_rate_hz                   double precision,
    closed_reason                 text collate "C",
    primary key (execution_id, attempt_index)
) with (fillfactor = 80);

create table ff_frame (
    attempt_index                 bigint not null,
    page                          bigint not null,
    ms                            bigint not null,
    seq                           bigint not null,
    number                        bigint not null,
    ts                            bigint not null,
    mode                          smallint not null,
    execution_id                  text collate "C" not null,
    frame_type                    text collate "C" not null,
    payload                       bytea not null,
    summary_version               bigint,
    ttl_ms                        bigint,
    correlation_id                text collate "C",
    primary key (execution_id, attempt_index, page, ms, seq)
);

create table ff_stream_summary (
    attempt_index                 bigint not null,
    version                       bigint not null,
    first_applied_ms              bigint not null,
    last_updated_ms               bigint not null,
    execution_id                  text collate "C" not null,
    document                      text collate "C" not null,
    patch_kind                    text collate "C" not null,
    primary key (execution_id, attempt_index)
);

-- How many batches of the feed are no longer kept, and the last place of each topic among them.
alter table ff_feed add column trimmed bigint not null default 0;
alter table ff_feed add column lost_lease bigint not null default 0;
alter table ff_feed add column lost_outcome bigint not null default 0;
alter table ff_feed add column lost_operator bigint not null default 0;
alter table ff_feed add column lost_signal bigint not null default 0;
