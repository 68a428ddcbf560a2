-- Flows: graphs, joins, and what is owed after an end or a cancel.

ALTER TABLE ff_exec_core ADD COLUMN successors TEXT;

CREATE TABLE ff_flow_core (
    flow_id TEXT NOT NULL,
    partition INTEGER NOT NULL,
    flow_kind TEXT NOT NULL,
    namespace TEXT NOT NULL,
    public_flow_state INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    last_mutation_at INTEGER NOT NULL,
    graph_revision INTEGER NOT NULL,
    node_count INTEGER NOT NULL,
    edge_count INTEGER NOT NULL,
    tags TEXT,
    cancelled_at INTEGER,
    cancel_reason TEXT,
    cancellation_policy INTEGER,
    project_at INTEGER,
    revision INTEGER NOT NULL,
    PRIMARY KEY (flow_id)
) STRICT;
CREATE INDEX ff_flow_core_partition ON ff_flow_core (partition, flow_id) WHERE partition IS NOT NULL;
CREATE INDEX ff_flow_core_project_at ON ff_flow_core (project_at, flow_id) WHERE project_at IS NOT NULL;

CREATE TABLE ff_flow_member (
    flow_id TEXT NOT NULL,
    execution_id TEXT NOT NULL,
    PRIMARY KEY (flow_id, execution_id)
) STRICT;

CREATE TABLE ff_edge (
    flow_id TEXT NOT NULL,
    edge_id TEXT NOT NULL,
    upstream_execution_id TEXT NOT NULL,
    downstream_execution_id TEXT NOT NULL,
    dependency_kind INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    data_passing_ref TEXT,
    PRIMARY KEY (flow_id, edge_id)
) STRICT;
CREATE INDEX ff_edge_upstream_execution_id ON ff_edge (upstream_execution_id, edge_id) WHERE upstream_execution_id IS NOT NULL;
CREATE INDEX ff_edge_downstream_execution_id ON ff_edge (downstream_execution_id, edge_id) WHERE downstream_execution_id IS NOT NULL;

CREATE TABLE ff_edge_group (
    flow_id TEXT NOT NULL,
    downstream_execution_id TEXT NOT NULL,
    policy_variant INTEGER NOT NULL,
    on_satisfied INTEGER,
    k INTEGER NOT NULL,
    staged INTEGER NOT NULL,
    n INTEGER NOT NULL,
    succeeded INTEGER NOT NULL,
    failed INTEGER NOT NULL,
    skipped INTEGER NOT NULL,
    group_state INTEGER NOT NULL,
    satisfied_at INTEGER,
    waiting_since INTEGER,
    cancel_siblings_pending_flag INTEGER NOT NULL,
    cancel_siblings_pending_members TEXT,
    cancel_siblings_reason TEXT,
    last_flow_graph_revision INTEGER,
    revision INTEGER NOT NULL,
    PRIMARY KEY (flow_id, downstream_execution_id)
) STRICT;
CREATE INDEX ff_edge_group_waiting_since ON ff_edge_group (waiting_since, flow_id, downstream_execution_id) WHERE waiting_since IS NOT NULL;

CREATE TABLE ff_dependency (
    downstream_execution_id TEXT NOT NULL,
    edge_id TEXT NOT NULL,
    flow_id TEXT NOT NULL,
    upstream_execution_id TEXT NOT NULL,
    dependency_kind INTEGER NOT NULL,
    state INTEGER NOT NULL,
    data_passing_ref TEXT,
    outcome INTEGER,
    last_resolved_at INTEGER,
    unfolded_at INTEGER,
    revision INTEGER NOT NULL,
    PRIMARY KEY (downstream_execution_id, edge_id)
) STRICT;
CREATE INDEX ff_dependency_unfolded_at ON ff_dependency (unfolded_at, downstream_execution_id, edge_id) WHERE unfolded_at IS NOT NULL;

CREATE TABLE ff_dispatch (
    execution_id TEXT NOT NULL,
    flow_id TEXT NOT NULL,
    outcome INTEGER NOT NULL,
    due_at INTEGER NOT NULL,
    after_edge TEXT NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (execution_id)
) STRICT;
CREATE INDEX ff_dispatch_due_at ON ff_dispatch (due_at, execution_id) WHERE due_at IS NOT NULL;

CREATE TABLE ff_pending_cancel_groups (
    flow_id TEXT NOT NULL,
    downstream_execution_id TEXT NOT NULL,
    flagged_at INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (flow_id, downstream_execution_id)
) STRICT;
CREATE INDEX ff_pending_cancel_groups_flagged_at ON ff_pending_cancel_groups (flagged_at, flow_id, downstream_execution_id) WHERE flagged_at IS NOT NULL;

CREATE TABLE ff_cancel_backlog (
    flow_id TEXT NOT NULL,
    due_at INTEGER NOT NULL,
    remaining INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (flow_id)
) STRICT;
CREATE INDEX ff_cancel_backlog_due_at ON ff_cancel_backlog (due_at, flow_id) WHERE due_at IS NOT NULL;

CREATE TABLE ff_cancel_backlog_member (
    flow_id TEXT NOT NULL,
    execution_id TEXT NOT NULL,
    PRIMARY KEY (flow_id, execution_id)
) STRICT;

CREATE TABLE ff_flow_summary (
    flow_id TEXT NOT NULL,
    public_flow_state INTEGER NOT NULL,
    last_summary_update_at INTEGER NOT NULL,
    total_members INTEGER NOT NULL,
    sampled_members INTEGER NOT NULL,
    members_completed INTEGER NOT NULL,
    members_failed INTEGER NOT NULL,
    members_cancelled INTEGER NOT NULL,
    members_expired INTEGER NOT NULL,
    members_skipped INTEGER NOT NULL,
    members_active INTEGER NOT NULL,
    members_suspended INTEGER NOT NULL,
    members_waiting INTEGER NOT NULL,
    members_delayed INTEGER NOT NULL,
    members_rate_limited INTEGER NOT NULL,
    members_waiting_children INTEGER NOT NULL,
    PRIMARY KEY (flow_id)
) STRICT;
