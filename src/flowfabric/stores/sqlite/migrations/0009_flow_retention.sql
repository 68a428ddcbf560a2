-- compatible: yes
-- Retention removes flows. The release before may still run: it leaves the column alone, and its flows are checked from
-- the migration on, or when their last member is removed.
ALTER TABLE ff_flow_core ADD COLUMN purge_check_at INTEGER;
CREATE INDEX ff_flow_core_purge_check_at ON ff_flow_core (purge_check_at, flow_id) WHERE purge_check_at IS NOT NULL;
UPDATE ff_flow_core SET purge_check_at = created_at WHERE node_count > 0 OR cancelled_at IS NOT NULL;
