-- compatible: yes
-- Schedules (model/scheduling/schedule.py). The release before may still run: it does not fire them.

create table ff_schedule (
    created_at                  bigint not null,
    updated_at                  bigint not null,
    decided_until               bigint not null,
    fired                       bigint not null,
    skipped                     bigint not null,
    missed                      bigint not null,
    revision                    bigint not null,
    schedule_id                 text collate "C" not null,
    namespace                   text collate "C" not null,
    name                        text collate "C" not null,
    spec                        text collate "C" not null,
    template                    text collate "C" not null,
    digest                      text collate "C" not null,
    next_at                     bigint,
    next_instant                bigint,
    paused_at                   bigint,
    last_instant                bigint,
    paused_by                   smallint,
    owner                       text collate "C",
    note                        text collate "C",
    active                      text collate "C",
    pending                     text collate "C",
    last_run_id                 text collate "C",
    input_payload               bytea,
    primary key (schedule_id)
);
create index ff_schedule_next_at on ff_schedule (next_at, schedule_id) where next_at is not null;
create index ff_schedule_name on ff_schedule (name, schedule_id);
