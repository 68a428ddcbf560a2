-- How many partitions this deployment has.

CREATE TABLE ff_partition_config (
    deployment_id INTEGER NOT NULL,
    num_flow_partitions INTEGER NOT NULL,
    num_budget_partitions INTEGER NOT NULL,
    num_quota_partitions INTEGER NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (deployment_id)
) STRICT;
