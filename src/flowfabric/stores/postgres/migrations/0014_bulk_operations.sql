-- compatible: yes
-- Bulk operations (model/bulk_operation.py). The release before may still run: it does not work them off.

create table ff_bulk_operation (
    ceiling                     bigint not null,
    created_at                  bigint not null,
    changed                     bigint not null,
    refused                     bigint not null,
    revision                    bigint not null,
    verb                        smallint not null,
    state                       smallint not null,
    operation_id                text collate "C" not null,
    criteria                    text collate "C" not null,
    reason                      text collate "C" not null,
    requested_by                text collate "C" not null,
    priority                    bigint,
    due_at                      bigint,
    after_created_at            bigint,
    ended_at                    bigint,
    after_execution_id          text collate "C",
    page                        text collate "C",
    last_refusal                text collate "C",
    primary key (operation_id)
);
create index ff_bulk_operation_due_at on ff_bulk_operation (due_at, operation_id)
    where due_at is not null;
create index ff_bulk_operation_created_at on ff_bulk_operation (created_at, operation_id);
