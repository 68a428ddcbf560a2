-- The first schema: the tables of the catalogue (stores/catalog.py), the lines, and the feed.
--
-- Columns of fixed width that are always set stand first, then what is indexed, texts and rare values last: rows stay
-- narrow and cheap to take apart. Texts compare byte by byte, so that every store has the same order. An enum is kept
-- as its member's place.

create table ff_exec_core (
    partition                   bigint not null,
    priority                    bigint not null,
    created_at                  bigint not null,
    last_transition_at          bigint not null,
    last_mutation_at            bigint not null,
    total_attempt_count         bigint not null,
    retry_count                 bigint not null,
    replay_count                bigint not null,
    lease_reclaim_count         bigint not null,
    lease_epoch                 bigint not null,
    rank                        bigint not null,
    revision                    bigint not null,
    lifecycle_phase             smallint not null,
    ownership_state             smallint not null,
    eligibility_state           smallint not null,
    blocking_reason             smallint not null,
    terminal_outcome            smallint not null,
    attempt_state               smallint not null,
    public_state                smallint not null,
    execution_id                text collate "C" not null,
    line                        integer,
    lease_expires_at            bigint,
    delay_until                 bigint,
    attempt_timeout_at          bigint,
    deadline_at                 bigint,
    purge_at                    bigint,
    namespace                   text collate "C" not null,
    lane_id                     text collate "C" not null,
    started_at                  bigint,
    completed_at                bigint,
    attempt_index               bigint,
    attempt_started_at          bigint,
    attempt_suspended_at        bigint,
    attempt_resumed_at          bigint,
    lease_acquired_at           bigint,
    lease_renewed_at            bigint,
    lease_expired_at            bigint,
    lease_revoked_at            bigint,
    next_timeout_ms             bigint,
    granted_until               bigint,
    last_capability_mismatch_at bigint,
    progress_pct                bigint,
    progress_updated_at         bigint,
    attempt_type                smallint,
    next_type                   smallint,
    flow_id                     text collate "C",
    tags                        text collate "C",
    required_capabilities       text collate "C",
    terms                       text collate "C",
    blocking_text               text collate "C",
    attempt_id                  text collate "C",
    attempt_suspension          text collate "C",
    lineage                     text collate "C",
    lease_id                    text collate "C",
    worker_id                   text collate "C",
    worker_instance_id          text collate "C",
    current_lane                text collate "C",
    lease_revoke_reason         text collate "C",
    "grant"                     text collate "C",
    failure_reason              text collate "C",
    cancellation_reason         text collate "C",
    cancelled_by                text collate "C",
    progress_message            text collate "C",
    primary key (execution_id)
) with (
    fillfactor = 50,                       -- a claimed row finds room on its page
    autovacuum_vacuum_scale_factor = 0.02, -- claims step over what earlier claims left in the index of lines
    autovacuum_vacuum_threshold = 5000
);
create index ff_exec_core_line on ff_exec_core (line, rank, execution_id)
    where line is not null;
create index ff_exec_core_lease_expires_at on ff_exec_core (lease_expires_at, execution_id)
    where lease_expires_at is not null;
create index ff_exec_core_delay_until on ff_exec_core (delay_until, execution_id)
    where delay_until is not null;
create index ff_exec_core_attempt_timeout_at on ff_exec_core (attempt_timeout_at, execution_id)
    where attempt_timeout_at is not null;
create index ff_exec_core_deadline_at on ff_exec_core (deadline_at, execution_id)
    where deadline_at is not null;
create index ff_exec_core_purge_at on ff_exec_core (purge_at, execution_id)
    where purge_at is not null;

create table ff_payload (
    execution_id                text collate "C" not null,
    execution_kind              text collate "C" not null,
    creator_identity            text collate "C" not null,
    input_payload               bytea,
    payload_encoding            text collate "C",
    policy                      text collate "C",
    primary key (execution_id)
);

create table ff_result (
    execution_id                text collate "C" not null,
    payload                     bytea not null,
    encoding                    text collate "C",
    primary key (execution_id)
);

create table ff_attempt (
    attempt_index               bigint not null,
    started_at                  bigint not null,
    lease_epoch                 bigint not null,
    attempt_type                smallint not null,
    attempt_state               smallint not null,
    execution_id                text collate "C" not null,
    attempt_id                  text collate "C" not null,
    lease_id                    text collate "C" not null,
    worker_id                   text collate "C" not null,
    worker_instance_id          text collate "C" not null,
    suspended_at                bigint,
    resumed_at                  bigint,
    ended_at                    bigint,
    lineage                     text collate "C",
    suspension_id               text collate "C",
    failure_reason              text collate "C",
    failure_category            text collate "C",
    primary key (execution_id, attempt_index)
);

create table ff_idempotency (
    partition                   bigint not null,
    expires_at                  bigint not null,
    revision                    bigint not null,
    digest                      text collate "C" not null,
    execution_id                text collate "C" not null,
    primary key (partition, digest)
);
create index ff_idempotency_expires_at on ff_idempotency (expires_at)
    where expires_at is not null;

create table ff_sweep (
    lease_until                 bigint not null,
    revision                    bigint not null,
    sweep                       text collate "C" not null,
    holder                      text collate "C" not null,
    primary key (sweep)
);

create table ff_keystore (
    keystore_id                 bigint not null,
    revision                    bigint not null,
    current_kid                 text collate "C" not null,
    primary key (keystore_id)
);

create table ff_waitpoint_hmac (
    keystore_id                 bigint not null,
    current                     boolean not null,
    kid                         text collate "C" not null,
    secret_hex                  text collate "C" not null,
    expires_at                  bigint,
    primary key (keystore_id, kid)
);

-- Which number stands for which line. The digest is of the whole key, which may be too long for an index.
create table ff_line (
    line            integer generated by default as identity primary key,
    digest          bytea not null unique,
    fairness_weight bigint not null,
    decided         boolean not null,
    lane_id         text collate "C" not null,
    required        text collate "C" not null,
    fairness_key    text collate "C" not null
);
create index ff_line_lane_id on ff_line (lane_id);

-- The feed. A batch is what one statement had to tell; it gets its position in the feed after it was committed.
create table ff_batch (
    batch_id bigint generated by default as identity primary key,
    at       bigint not null,
    position bigint
);
create unique index ff_batch_position on ff_batch (position) where position is not null;
create index ff_batch_unnumbered on ff_batch (batch_id) where position is null;

create table ff_event (
    batch_id           bigint not null,
    lease_epoch        bigint,
    attempt_index      bigint,
    ord                integer not null,
    execution_id       text collate "C" not null,
    namespace          text collate "C" not null,
    tags               text collate "C",
    flow_id            text collate "C",
    lease              text collate "C",
    lease_id           text collate "C",
    attempt_id         text collate "C",
    worker_id          text collate "C",
    worker_instance_id text collate "C",
    reason             text collate "C",
    outcome            text collate "C",
    operator           text collate "C",
    signal             text collate "C",
    details            text collate "C",
    primary key (batch_id, ord)
);
create index ff_event_execution_id on ff_event (execution_id, batch_id, ord);

-- How many batches have a position; whoever gives out positions holds this row.
create table ff_feed (
    feed_id  smallint primary key,
    numbered bigint not null
) with (fillfactor = 10);
insert into ff_feed values (1, 0);
