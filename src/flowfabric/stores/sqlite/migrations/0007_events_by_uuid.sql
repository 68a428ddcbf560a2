-- The events of one execution are found by the uuid in its name, not by the whole name: that begins with a partition,
-- and would scatter the entries of one moment over as many pages as there are partitions.
DROP INDEX ff_event_execution_id;
CREATE INDEX ff_event_uuid ON ff_event (substr(execution_id, -36));
