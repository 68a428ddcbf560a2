-- compatible: yes
-- The lease that took a reservation up last, and how often each branch of a function has reported progress. The release
-- before may still run: it leaves the columns as they are, refunds whatever is reserved, and reports progress again.

alter table ff_budget_reservation add column epoch bigint not null default 0;
alter table ff_exec_core add column progress_counts text collate "C";
