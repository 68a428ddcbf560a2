"""The event log: committed events in an order that never changes, whatever transactions are in flight.

Each statement that emits events inserts one row into `ff_batch`, which holds all its events. The batch draws its id
from a sequence, in the same statement and only when all its row locks are held. So two batches about one execution have
ids in the order of their commits: the second one gets its locks, and then its id, after the first has committed.

A batch id is not a position in the feed. A batch may commit long after a later one did, and a reader that follows the
ids would have passed it. The usual remedies inspect the transactions in flight; then one idle transaction, even in
another database, stalls every reader, and their state means nothing after a dump and restore. Here batches are numbered
a second time, after their commit: a reader assigns the next positions to the committed batches that have none, in the
order of their ids (`assign_positions` in event_log.sql). A batch that commits late gets a late position. An assigned
position never changes. It is an ordinary column, so it survives dump and restore.

Positions never restart. After a failover that lost the newest batches, or after a restore, later batches get higher
positions than the lost ones had. A cursor into the lost part is detected, because no batch has its position. The reader
continues with everything since, and is informed of the gap.

The order holds for each execution: a snapshot that contains a batch contains all that were committed before it. So the
earlier batch of an execution is numbered together with the second or before it, and in the order of their ids.

A feed position is (position of the batch, index in the batch) as one integer, so a cursor is a plain number.

No index leads to the events of one execution. Instead a writer stores a pointer, the batch id: claims and completions
in the execution's row, which they write anyway (`told`, which is not in the catalog), everything else in a row of
`ff_told_in`. A delete of the execution moves its pointers there. Pointers are deleted when their batch is trimmed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from flowfabric.model.event import TOPIC_FIELDS, Event, FeedEvent, Topic
from flowfabric.stores.postgres.commit.plan import MAX_EVENTS_PER_BATCH
from flowfabric.stores.postgres.pool import ConnectionPool, in_transaction
from flowfabric.stores.postgres.sql import column_list, load_statements, number_parameters
from flowfabric.stores.queries import FeedPage

_STATEMENTS = load_statements("event_log.sql")
_NAMES = column_list(Event.__struct_fields__)
TRIM = number_parameters(_STATEMENTS["trim_batches"].format(names=_NAMES), ("limit", "before", "max_events"))
DELETE_POINTERS = number_parameters(_STATEMENTS["delete_pointers"], ("executions", "batches"))
_WINDOW = 1000  # batches that are read in one round trip


class EventLog:
    """Reads, numbers and trims the feed."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool

    async def read(self, topic: Topic, after: int, limit: int) -> FeedPage:
        """Return events of a topic strictly after a position, and the position to continue from."""
        sql = statement("read_events", topic)
        has_gap = diverged = False
        while True:
            first, index = divmod(after, MAX_EVENTS_PER_BATCH)
            row = await self._fetchrow(sql, first, index, _WINDOW, limit)
            has_gap = has_gap or after < row["last_trimmed"]
            diverged = diverged or not row["known"]
            events = [_event(record) for record in row["events"]]
            if len(events) >= limit:
                return FeedPage(events, events[-1].position if events else after, has_gap, diverged)
            if row["last"] is not None:
                after = _end(row["last"])
                if events:
                    return FeedPage(events, after, has_gap, diverged)
            elif row["unnumbered"]:
                await self._assign_positions()
            else:
                end = _end(row["numbered"])
                return FeedPage(events, end if first > row["numbered"] else max(after, end), has_gap, diverged)

    async def end(self) -> int:
        """Return a position such that everything committed from now on lies strictly after it."""
        while True:
            row = await self._fetchrow(_STATEMENTS["read_end"])
            if not row["unnumbered"]:
                return _end(row["numbered"])
            await self._assign_positions()

    async def trim(self, before: int, limit: int) -> int:
        """Delete the oldest events emitted before an instant; return the number of deleted events."""
        await self.end()  # assigns all positions: a gap can only be reported for batches that have one

        async def trim(connection: Any) -> int:
            trimmed = await connection.fetchrow(TRIM, limit, before, MAX_EVENTS_PER_BATCH)
            if trimmed["events"]:
                await connection.execute(DELETE_POINTERS, trimmed["executions"], trimmed["batches"])
            return int(trimmed["events"])

        return await self._pool.write(lambda connection: in_transaction(connection, trim), own_transaction=True)

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str) -> list[FeedEvent]:
        """Return the newest events of an execution, oldest first, except those that the topic names `without`."""
        sql = statement("history", topic)
        while True:
            records = await self._pool.read(lambda connection: connection.fetch(sql, execution_id, limit, without))
            if all(record[0] is not None for record in records):
                return sorted((_event(record) for record in records), key=lambda event: event.position)
            await self._assign_positions()

    async def _assign_positions(self) -> None:
        assign = _STATEMENTS["assign_positions"]
        await self._pool.write(lambda connection: connection.execute(assign), own_transaction=True)

    async def _fetchrow(self, sql: str, *values: Any) -> Any:
        return await self._pool.read(lambda connection: connection.fetchrow(sql, *values))


@cache
def statement(name: str, topic: Topic) -> str:
    """Return a statement that reads one topic."""
    events = column_list(Event.__struct_fields__, "e.")
    sql = _STATEMENTS[name].format(events=events, names=_NAMES, topic=TOPIC_FIELDS[topic])
    parameters = {"read_events": ("first", "ord", "window", "limit"), "history": ("execution_id", "limit", "without")}
    return number_parameters(sql, parameters[name])


def _end(position: int) -> int:
    """Return the last feed position of a batch."""
    return position * MAX_EVENTS_PER_BATCH + MAX_EVENTS_PER_BATCH - 1


def _event(record: Any) -> FeedEvent:
    position, index, at, *fields = record
    return FeedEvent(position * MAX_EVENTS_PER_BATCH + index, at, Event(*fields))
