-- The statements of the SQLite store. {braces} are filled from the catalog. {rows} stands for as many rows of
-- placeholders as are written at once, padded with rows of NULLs, which every such statement skips.
--
-- Statements process many rows because each step of a statement releases and reacquires the GIL, which costs
-- milliseconds while other threads compute.

-- name: failed_guards
-- The number of each guard that does not hold, among rows of (number, key…, revision).
SELECT g.column1
  FROM (VALUES {rows}) AS g
  LEFT JOIN {table} AS r ON {same_key}
 WHERE g.column1 IS NOT NULL
   AND CASE WHEN g.column{revision} IS NULL THEN r.{first_key} IS NOT NULL
            ELSE r.revision IS NOT g.column{revision} END;

-- name: failed_lease_guards
-- The same with a lease, among rows of (number, key…, revision, is live required, lease id, epoch); then the time.
SELECT g.column1
  FROM (VALUES {rows}) AS g
  LEFT JOIN {table} AS r ON {same_key}
 WHERE g.column1 IS NOT NULL
   AND (r.revision IS NOT g.column{revision}
        OR r.lease_id IS NOT g.column{lease_id}
        OR r.lease_epoch IS NOT g.column{lease_epoch}
        OR (r.lease_expires_at > ?) IS NOT g.column{live});

-- name: failed_expectations
-- The number of each row that differs from its expected values, among rows of (number, key…, expected per-row value…).
SELECT g.column1
  FROM (VALUES {rows}) AS g
  LEFT JOIN {table} AS r ON {same_key}
 WHERE g.column1 IS NOT NULL
   AND NOT (r.{first_key} IS NOT NULL AND {expectations});

-- name: insert
INSERT INTO {table} ({columns}) SELECT * FROM (VALUES {rows}) WHERE column1 IS NOT NULL;

-- name: upsert
-- Not OR REPLACE, which deletes the row from every index and inserts it again.
INSERT INTO {table} ({columns}) SELECT * FROM (VALUES {rows}) WHERE column1 IS NOT NULL
    ON CONFLICT ({key}) DO UPDATE SET {settings};

-- name: update
-- Rows of (value…, key…).
UPDATE {table} AS r
   SET {settings}
  FROM (VALUES {rows}) AS g
 WHERE {same_key}{unless_set};

-- name: update_by_template
-- Rows of (key…, parameter…), after the time and the parameters for all rows.
UPDATE {table} AS r SET {settings} FROM (VALUES {rows}) AS g WHERE {same_key};

-- name: insert_template_events
-- One event per row of (key…), in order, with values from its columns; after the time.
INSERT INTO ff_event (at, {columns}) SELECT ?1, {values} FROM (VALUES {rows}) AS g CROSS JOIN {table} AS r ON {same_key};

-- name: failed_conditions
-- The number of each row that does not meet a template's condition, among rows of (key…, parameter…, number); after the
-- time.
SELECT g.column{number}
  FROM (VALUES {rows}) AS g
  LEFT JOIN {table} AS r ON {same_key}
 WHERE g.column{number} IS NOT NULL AND NOT ({conditions});

-- name: delete
DELETE FROM {table} WHERE ({key}) IN (VALUES {rows});

-- name: insert_events
INSERT INTO ff_event (at, {events}) SELECT * FROM (VALUES {rows}) WHERE column1 IS NOT NULL;

-- name: queue_heads
-- The first rows of some queues without an unexpired grant, by position.
SELECT json_group_array(row) FROM ({queues} ORDER BY rank, execution_id LIMIT ?);

-- name: heads_of_one_queue
SELECT rowid AS row, rank, execution_id FROM ff_exec_core
 WHERE line = ? AND (granted_until IS NULL OR granted_until <= ?)

-- name: claimed_rows
-- The rows as one JSON array, in order. Rarely set columns are one list in front, if any of them is set. The payloads
-- follow as one concatenated blob; the length of each is in its row.
SELECT json_group_array(json_array(iif(coalesce({sparse}) IS NULL, NULL, json_array({sparse})), {columns},
                                   {payload_columns})), CAST(group_concat(p.input_payload, '') AS BLOB)
  FROM (VALUES {rows}) AS g
 CROSS JOIN ff_exec_core AS r ON r.rowid = g.column1
 CROSS JOIN ff_payload AS p ON p.execution_id = r.execution_id;

-- name: add_queue
INSERT INTO ff_line (lane_id, required, fairness_key, fairness_weight, decided) VALUES (?, ?, ?, ?, ?)
    ON CONFLICT DO NOTHING;

-- name: find_queue_id
SELECT line_id FROM ff_line
 WHERE lane_id = ? AND required = ? AND fairness_key = ? AND fairness_weight = ? AND decided = ?;

-- name: queue_by_id
SELECT lane_id, required, fairness_key, fairness_weight, decided FROM ff_line WHERE line_id = ?;

-- name: queues
SELECT lane_id, required, fairness_key, fairness_weight, decided FROM ff_line
 WHERE ?1 IS NULL OR lane_id = ?1
 ORDER BY lane_id, required, fairness_key, fairness_weight, decided;

-- name: nonempty_queues
-- The nonempty queues of a lane. A loose index scan steps from queue to queue.
WITH RECURSIVE occupied (line) AS (
    SELECT min(line) FROM ff_exec_core WHERE line > 0
    UNION ALL
    SELECT (SELECT min(e.line) FROM ff_exec_core AS e WHERE e.line > occupied.line) FROM occupied WHERE occupied.line IS NOT NULL
)
SELECT l.lane_id, l.required, l.fairness_key, l.fairness_weight, l.decided
  FROM occupied
 CROSS JOIN ff_line AS l ON l.line_id = occupied.line
 WHERE l.lane_id = ?
 ORDER BY l.lane_id, l.required, l.fairness_key, l.fairness_weight, l.decided;

-- name: executions_in_missing_queues
-- Executions in queues that have no row. A loose index scan steps from queue to queue.
WITH RECURSIVE occupied (line) AS (
    SELECT min(line) FROM ff_exec_core WHERE line IS NOT NULL
    UNION ALL
    SELECT (SELECT min(e.line) FROM ff_exec_core AS e WHERE e.line > occupied.line) FROM occupied WHERE occupied.line IS NOT NULL
)
SELECT e.execution_id
  FROM occupied
 CROSS JOIN ff_exec_core AS e ON e.line = occupied.line
 WHERE NOT EXISTS (SELECT 1 FROM ff_line AS l WHERE l.line_id = occupied.line)
 LIMIT ?;

-- name: lanes
SELECT DISTINCT lane_id FROM ff_line WHERE ?1 IS NULL OR lane_id > ?1 ORDER BY lane_id LIMIT ?2;

-- name: select_rows
SELECT {columns} FROM {table}{where}{order}{limit};

-- name: rows_by_key
-- The rows with some keys as one JSON array, each preceded by its number, among rows of (number, key…).
SELECT json_group_array(json_array(g.column1, {columns}))
  FROM (VALUES {rows}) AS g
 CROSS JOIN {table} AS r ON {same_key};

-- name: one_row_of_table
-- The row with a key, as a list.
(SELECT json_array(json_array({columns})) FROM {table} WHERE {same_key})

-- name: rows_of_table_by_prefix
-- The rows with a key prefix, in key order.
(SELECT json_group_array(json_array({columns})) FROM (SELECT * FROM {table} WHERE {same_key} ORDER BY {order}))

-- name: distinct_values
-- The distinct values of an indexed column in a range, in order. Each costs one index search, however many rows share it.
WITH RECURSIVE found(value) AS (
  SELECT min({column}) FROM {table} WHERE {column} {lower_op} ?1 AND {column} < ?2
  UNION ALL
  SELECT (SELECT min({column}) FROM {table} WHERE {column} > value AND {column} < ?2) FROM found WHERE value IS NOT NULL
)
SELECT value FROM found WHERE value IS NOT NULL LIMIT ?3;

-- name: next_instant
SELECT min({column}) FROM {table}{where};

-- name: kinds
SELECT p.execution_id, p.execution_kind FROM json_each(?) AS i CROSS JOIN ff_payload AS p ON p.execution_id = i.value;

-- name: search
-- The subquery stops at the budget and yields its rows one by one, in the order of the index: an outer ORDER BY would
-- read all of them first.
SELECT {columns},
       coalesce((SELECT p.execution_kind FROM ff_payload AS p WHERE p.execution_id = r.execution_id), '') AS kind
  FROM (SELECT * FROM ff_exec_core {bounds} ORDER BY created_at DESC, execution_id DESC LIMIT ?) AS r
 {filters}
 LIMIT ?;

-- name: search_end
SELECT created_at, execution_id FROM ff_exec_core {bounds}
 ORDER BY created_at DESC, execution_id DESC LIMIT 1 OFFSET ?;

-- name: count_executions
SELECT {group_by}, count(*) FROM (SELECT {group_by} FROM {table} WHERE {where} ORDER BY {order} LIMIT ?) GROUP BY {group_by};

-- name: count_by_execution
-- The same for rows that refer to an execution.
SELECT {group_by}, count(*)
  FROM (SELECT {execution_column} AS owner_id FROM {table} WHERE {where} ORDER BY {order} LIMIT ?)
 CROSS JOIN ff_exec_core ON execution_id = owner_id
 GROUP BY {group_by};

-- name: feed_end
SELECT coalesce((SELECT max(position) FROM ff_event), (SELECT seq FROM sqlite_sequence WHERE name = 'ff_event'), 0);

-- name: advance_positions
-- Raise the last position to at least this one.
UPDATE sqlite_sequence SET seq = max(seq, ?1) WHERE name = 'ff_event';

-- name: start_positions
INSERT INTO sqlite_sequence (name, seq)
SELECT 'ff_event', ?1 WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'ff_event');

-- name: position_exists
-- True if a position was assigned: its event exists, unless it was trimmed.
SELECT EXISTS (SELECT 1 FROM ff_event WHERE position = ?1)
    OR ?1 < coalesce((SELECT min(position) FROM ff_event), 9223372036854775807);

-- name: feed
SELECT position, at, {events} FROM ff_event
 WHERE position > ? AND position <= ? AND {topic} IS NOT NULL
 ORDER BY position LIMIT ?;

-- name: history
SELECT position, at, {events} FROM ff_event
 WHERE substr(execution_id, -36) = substr(?1, -36) AND execution_id = ?1 AND {topic} <> ?3
 ORDER BY position DESC LIMIT ?2;

-- name: last_trimmed_position
-- The last position of a topic that was trimmed.
SELECT lost_{topic} FROM ff_feed_trim;

-- name: last_to_trim
-- Among the oldest events, the last one before the first that is too recent to be trimmed.
WITH oldest AS (SELECT position, at FROM ff_event ORDER BY position LIMIT ?1)
SELECT max(position) FROM oldest
 WHERE position < coalesce((SELECT min(position) FROM oldest WHERE at >= ?2), 9223372036854775807);

-- name: record_trimmed
UPDATE ff_feed_trim
   SET lost_lease = max(lost_lease, coalesce(trimmed.lease, 0)),
       lost_outcome = max(lost_outcome, coalesce(trimmed.outcome, 0)),
       lost_operator = max(lost_operator, coalesce(trimmed.operator, 0)),
       lost_signal = max(lost_signal, coalesce(trimmed.signal, 0))
  FROM (SELECT max(position) FILTER (WHERE lease IS NOT NULL) AS lease,
               max(position) FILTER (WHERE outcome IS NOT NULL) AS outcome,
               max(position) FILTER (WHERE operator IS NOT NULL) AS operator,
               max(position) FILTER (WHERE signal IS NOT NULL) AS signal
          FROM ff_event WHERE position <= ?) AS trimmed;

-- name: delete_events_up_to
DELETE FROM ff_event WHERE position <= ?;
