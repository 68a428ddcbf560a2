-- compatible: yes
-- Retention removes flows. The release before may still run: it leaves the column alone, and its flows are checked from
-- the migration on, or when their last member is removed.

alter table ff_flow_core add column purge_check_at bigint;
create index ff_flow_core_purge_check_at on ff_flow_core (purge_check_at, flow_id) where purge_check_at is not null;
update ff_flow_core set purge_check_at = created_at where node_count > 0 or cancelled_at is not null;
