-- compatible: yes
-- The requests of a quota's window are read by time, and deleted by a sweep when they have expired. The release before
-- may still run: it reads and deletes them by key.

CREATE INDEX ff_quota_window_quota_policy_id ON ff_quota_window (quota_policy_id, namespace, dimension, admitted_at, execution_id) WHERE quota_policy_id IS NOT NULL;
CREATE INDEX ff_quota_window_expires_at ON ff_quota_window (expires_at) WHERE expires_at IS NOT NULL;
