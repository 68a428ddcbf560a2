-- compatible: yes
-- Lists of executions and flows, newest first, of children, and of what an execution has spent. The release before may
-- still run: it does not use these indexes.

CREATE INDEX ff_exec_core_created_at ON ff_exec_core (created_at, execution_id);
CREATE INDEX ff_exec_core_parent_id ON ff_exec_core (parent_id, created_at, execution_id) WHERE parent_id IS NOT NULL;
CREATE INDEX ff_flow_core_created_at ON ff_flow_core (created_at, flow_id);
CREATE INDEX ff_budget_usage_by_exec_execution_id ON ff_budget_usage_by_exec (execution_id) WHERE execution_id IS NOT NULL;
CREATE INDEX ff_budget_reservation_execution_id ON ff_budget_reservation (execution_id) WHERE execution_id IS NOT NULL;
