-- compatible: yes
-- What durable functions remember: the order of operations, results of children, children to cancel. The release before
-- may still run: it leaves the columns empty, and leaves the children of a cancelled parent running.

alter table ff_step add column number bigint;
alter table ff_gate add column mailbox text collate "C";
alter table ff_gate add column number bigint;
alter table ff_gate add column results text collate "C";
alter table ff_child_end add column result bytea;
alter table ff_child_end add column result_encoding text collate "C";

create table ff_child_cancel (
    due_at                        bigint,
    revision                      bigint not null,
    parent_id                     text collate "C" not null,
    primary key (parent_id)
);
create index ff_child_cancel_due_at on ff_child_cancel (due_at, parent_id) where due_at is not null;
