-- compatible: yes
-- Facts that runs show, the order of messages to a run, and replies. The release before may still run: it sends messages
-- without a number, which come before those with one, and it takes the count of a fact for a step of that name.

create table ff_fact (
    revision                      bigint not null,
    number                        bigint not null,
    set_at                        bigint not null,
    execution_id                  text collate "C" not null,
    name                          text collate "C" not null,
    encoding                      text collate "C",
    value                         bytea not null,
    primary key (execution_id, name)
) with (fillfactor = 80);

create table ff_reply (
    asked_at                      bigint not null,
    replied_at                    bigint,
    state                         smallint not null,
    execution_id                  text collate "C" not null,
    message_id                    text collate "C" not null,
    mailbox                       text collate "C" not null,
    payload_encoding              text collate "C",
    reason                        text collate "C",
    payload                       bytea,
    primary key (execution_id, message_id)
);

alter table ff_mail add column number bigint;
alter table ff_mail add column wants_reply boolean not null default false;
alter table ff_gate add column message_number bigint;
alter table ff_gate add column wants_reply boolean not null default false;
alter table ff_suspension add column message_count bigint not null default 0;
alter table ff_suspension add column inbox_closed_at bigint;
alter table ff_exec_core add column has_mail boolean not null default false;
