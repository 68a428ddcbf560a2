-- Flows: graphs, joins, and what is owed after an end or a cancel.

alter table ff_exec_core add column successors text collate "C";

create table ff_flow_core (
    partition                       bigint not null,
    created_at                      bigint not null,
    last_mutation_at                bigint not null,
    graph_revision                  bigint not null,
    node_count                      bigint not null,
    edge_count                      bigint not null,
    revision                        bigint not null,
    public_flow_state               smallint not null,
    flow_id                         text collate "C" not null,
    flow_kind                       text collate "C" not null,
    namespace                       text collate "C" not null,
    cancelled_at                    bigint,
    project_at                      bigint,
    cancellation_policy             smallint,
    tags                            text collate "C",
    cancel_reason                   text collate "C",
    primary key (flow_id)
) with (fillfactor = 50);
create index ff_flow_core_partition on ff_flow_core (partition, flow_id)
    where partition is not null;
create index ff_flow_core_project_at on ff_flow_core (project_at, flow_id)
    where project_at is not null;

create table ff_flow_member (
    flow_id                         text collate "C" not null,
    execution_id                    text collate "C" not null,
    primary key (flow_id, execution_id)
);

create table ff_edge (
    created_at                      bigint not null,
    dependency_kind                 smallint not null,
    flow_id                         text collate "C" not null,
    edge_id                         text collate "C" not null,
    upstream_execution_id           text collate "C" not null,
    downstream_execution_id         text collate "C" not null,
    data_passing_ref                text collate "C",
    primary key (flow_id, edge_id)
);
create index ff_edge_upstream_execution_id on ff_edge (upstream_execution_id, edge_id)
    where upstream_execution_id is not null;
create index ff_edge_downstream_execution_id on ff_edge (downstream_execution_id, edge_id)
    where downstream_execution_id is not null;

create table ff_edge_group (
    k                               bigint not null,
    staged                          bigint not null,
    n                               bigint not null,
    succeeded                       bigint not null,
    failed                          bigint not null,
    skipped                         bigint not null,
    revision                        bigint not null,
    policy_variant                  smallint not null,
    group_state                     smallint not null,
    cancel_siblings_pending_flag    boolean not null,
    flow_id                         text collate "C" not null,
    downstream_execution_id         text collate "C" not null,
    satisfied_at                    bigint,
    waiting_since                   bigint,
    last_flow_graph_revision        bigint,
    on_satisfied                    smallint,
    cancel_siblings_pending_members text collate "C",
    cancel_siblings_reason          text collate "C",
    primary key (flow_id, downstream_execution_id)
) with (fillfactor = 80);
create index ff_edge_group_waiting_since on ff_edge_group (waiting_since, flow_id, downstream_execution_id)
    where waiting_since is not null;

create table ff_dependency (
    revision                        bigint not null,
    dependency_kind                 smallint not null,
    state                           smallint not null,
    downstream_execution_id         text collate "C" not null,
    edge_id                         text collate "C" not null,
    flow_id                         text collate "C" not null,
    upstream_execution_id           text collate "C" not null,
    last_resolved_at                bigint,
    unfolded_at                     bigint,
    outcome                         smallint,
    data_passing_ref                text collate "C",
    primary key (downstream_execution_id, edge_id)
) with (fillfactor = 80);
create index ff_dependency_unfolded_at on ff_dependency (unfolded_at, downstream_execution_id, edge_id)
    where unfolded_at is not null;

create table ff_dispatch (
    due_at                          bigint not null,
    revision                        bigint not null,
    outcome                         smallint not null,
    execution_id                    text collate "C" not null,
    flow_id                         text collate "C" not null,
    after_edge                      text collate "C" not null,
    primary key (execution_id)
);
create index ff_dispatch_due_at on ff_dispatch (due_at, execution_id)
    where due_at is not null;

create table ff_pending_cancel_groups (
    flagged_at                      bigint not null,
    revision                        bigint not null,
    flow_id                         text collate "C" not null,
    downstream_execution_id         text collate "C" not null,
    primary key (flow_id, downstream_execution_id)
);
create index ff_pending_cancel_groups_flagged_at on ff_pending_cancel_groups (flagged_at, flow_id, downstream_execution_id)
    where flagged_at is not null;

create table ff_cancel_backlog (
    due_at                          bigint not null,
    remaining                       bigint not null,
    revision                        bigint not null,
    flow_id                         text collate "C" not null,
    primary key (flow_id)
);
create index ff_cancel_backlog_due_at on ff_cancel_backlog (due_at, flow_id)
    where due_at is not null;

create table ff_cancel_backlog_member (
    flow_id                         text collate "C" not null,
    execution_id                    text collate "C" not null,
    primary key (flow_id, execution_id)
);

create table ff_flow_summary (
    last_summary_update_at          bigint not null,
    total_members                   bigint not null,
    sampled_members                 bigint not null,
    members_completed               bigint not null,
    members_failed                  bigint not null,
    members_cancelled               bigint not null,
    members_expired                 bigint not null,
    members_skipped                 bigint not null,
    members_active                  bigint not null,
    members_suspended               bigint not null,
    members_waiting                 bigint not null,
    members_delayed                 bigint not null,
    members_rate_limited            bigint not null,
    members_waiting_children        bigint not null,
    public_flow_state               smallint not null,
    flow_id                         text collate "C" not null,
    primary key (flow_id)
);
