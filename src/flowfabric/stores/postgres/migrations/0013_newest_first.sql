-- compatible: yes
-- Lists of executions and flows, newest first, of children, and of what an execution has spent. The release before may
-- still run: it does not use these indexes.

create index ff_exec_core_created_at on ff_exec_core (created_at, execution_id);
create index ff_exec_core_parent_id on ff_exec_core (parent_id, created_at, execution_id)
    where parent_id is not null;
create index ff_flow_core_created_at on ff_flow_core (created_at, flow_id);
create index ff_budget_usage_by_exec_execution_id on ff_budget_usage_by_exec (execution_id)
    where execution_id is not null;
create index ff_budget_reservation_execution_id on ff_budget_reservation (execution_id)
    where execution_id is not null;
