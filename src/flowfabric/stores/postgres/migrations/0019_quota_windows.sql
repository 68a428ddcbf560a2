-- compatible: yes
-- The requests of a quota's window are read by time, and deleted by a sweep when they have expired. The release before
-- may still run: it reads and deletes them by key.
--
-- The condition of the first index is always true. It keeps the server from using this index for reads by key, which
-- it would do without statistics, and then read a whole window for one request.

create index ff_quota_window_quota_policy_id
    on ff_quota_window (quota_policy_id, namespace, dimension, admitted_at, execution_id)
    where admitted_at is not null;
create index ff_quota_window_expires_at on ff_quota_window (expires_at) where expires_at is not null;
