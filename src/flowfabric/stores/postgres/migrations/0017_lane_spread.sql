-- compatible: yes
-- The spread of lanes (model/scheduling/lane.py). The release before may still run. Spread no lane before it has stopped: it looks
-- for an idempotency key on the first partition of the lane only.

create table ff_lane (
    effective_at                bigint not null,
    revision                    bigint not null,
    spread                      bigint not null,
    previous                    bigint not null,
    lane_id                     text collate "C" not null,
    former                      text collate "C" not null,
    primary key (lane_id)
);
