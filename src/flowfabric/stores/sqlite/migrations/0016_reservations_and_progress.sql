-- compatible: yes
-- The lease that took a reservation up last, and how often each branch of a function has reported progress. The release
-- before may still run: it leaves the columns as they are, refunds whatever is reserved, and reports progress again.

ALTER TABLE ff_budget_reservation ADD COLUMN epoch INTEGER NOT NULL DEFAULT 0;
ALTER TABLE ff_exec_core ADD COLUMN progress_counts TEXT;
