-- compatible: yes
-- The spread of lanes (model/scheduling/lane.py). The release before may still run. Spread no lane before it has stopped: it looks
-- for an idempotency key on the first partition of the lane only.

CREATE TABLE ff_lane (
    lane_id TEXT NOT NULL,
    spread INTEGER NOT NULL,
    previous INTEGER NOT NULL,
    effective_at INTEGER NOT NULL,
    former TEXT NOT NULL,
    revision INTEGER NOT NULL,
    PRIMARY KEY (lane_id)
) STRICT;
