-- How many partitions this deployment has.

create table ff_partition_config (
    deployment_id               bigint not null,
    num_flow_partitions         bigint not null,
    num_budget_partitions       bigint not null,
    num_quota_partitions        bigint not null,
    revision                    bigint not null,
    primary key (deployment_id)
);
