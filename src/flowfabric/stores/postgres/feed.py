"""The feed: committed events in an order that never changes, without a word about transactions.

Each statement that has something to tell inserts one row into `ff_batch`, which holds all its events. The batch takes
its number from a sequence, in the same statement and only when all its row locks are held. So two batches that touch
one execution have numbers in the order of their commits: the second gets its locks, and then its number, after the
first has committed.

A number of a sequence is no place in a feed. A batch may commit long after a later one did; a reader that went by the
number would have passed it. The usual cures look at what transactions are under way, and then one idle transaction,
even in another database, stalls every reader; and what they remember means nothing after a dump and restore. Here
batches are numbered a second time, after the fact: whoever reads gives the committed batches that have no position yet
the next positions, in the order of their numbers (`number` in feed.sql). A batch that commits late gets a late
position. Once given a position never changes; it is a column like any other, so it survives dump and restore.

Positions never restart. After a failover that lost the newest batches, or a restore, later ones get higher positions
than those had. A cursor into what was lost is noticed: no batch has its position. It goes on with everything that came
since, and its holder is told of the gap.

Why the order holds for each execution: a snapshot that sees a batch sees all that were committed before it, so the
numberer meets the earlier batch of an execution not later than the second, and puts them in the order of their
numbers.

A place in the feed is (position of the batch, place in the batch) as one integer, so a cursor is a plain number.

No index leads to the events of one execution. Whoever tells of it leaves the number of the batch: a claim or an end in
the row that it writes anyway (`told`, which is no column of the catalogue), everything else in a row of `ff_told_in`,
and so does whoever deletes the row. What points to a batch goes when the batch is trimmed.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from flowfabric.model.event import TOPIC_FIELDS, Event, FeedEvent, Topic
from flowfabric.stores.base import FeedPage
from flowfabric.stores.postgres.batch import MOST_EVENTS
from flowfabric.stores.postgres.links import Links, in_transaction
from flowfabric.stores.postgres.sql import numbered, pieces, quoted

_STATEMENTS = pieces("feed.sql")
_NAMES = quoted(Event.__struct_fields__)
TRIM = numbered(_STATEMENTS["trim"].format(names=_NAMES), ("limit", "before", "most"))
DROP_POINTERS = numbered(_STATEMENTS["drop_pointers"], ("executions", "batches"))
_WINDOW = 1000  # batches that are looked through in one trip


class Feed:
    """The readers' side of the feed."""

    def __init__(self, links: Links) -> None:
        self._links = links

    async def read(self, topic: Topic, after: int, limit: int) -> FeedPage:
        """Events of a topic strictly after a place; how far was read."""
        words = statement("read", topic)
        lost = diverged = False
        while True:
            first, ord_ = divmod(after, MOST_EVENTS)
            answer = await self._fetchrow(words, first, ord_, _WINDOW, limit)
            lost = lost or after < answer["lost"]
            diverged = diverged or not answer["known"]
            events = [_event(record) for record in answer["events"]]
            if len(events) >= limit:
                return FeedPage(events, events[-1].position if events else after, lost, diverged)
            if answer["last"] is not None:
                after = _end(answer["last"])
                if events:
                    return FeedPage(events, after, lost, diverged)
            elif answer["news"]:
                await self._number()
            else:
                end = _end(answer["numbered"])
                return FeedPage(events, end if first > answer["numbered"] else max(after, end), lost, diverged)

    async def end(self) -> int:
        """A place that everything committed so far does not lie after, and everything later does."""
        while True:
            answer = await self._fetchrow(_STATEMENTS["end"])
            if not answer["news"]:
                return _end(answer["numbered"])
            await self._number()

    async def trim(self, before: int, limit: int) -> int:
        """Drop the oldest events that were told before an instant; how many went."""
        await self.end()  # whatever is committed has its position then, and only what has one can be told to be lost

        async def trim(connection: Any) -> int:
            dropped = await connection.fetchrow(TRIM, limit, before, MOST_EVENTS)
            if dropped["events"]:
                await connection.execute(DROP_POINTERS, dropped["executions"], dropped["batches"])
            return int(dropped["events"])

        return await self._links.write(lambda connection: in_transaction(connection, trim), alone=True)

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str) -> list[FeedEvent]:
        """The newest events of one execution, oldest first; those that the topic calls `without` do not count."""
        words = statement("history", topic)
        while True:
            found = await self._links.read(lambda connection: connection.fetch(words, execution_id, limit, without))
            if all(record[0] is not None for record in found):
                return sorted((_event(record) for record in found), key=lambda one: one.position)
            await self._number()

    async def _number(self) -> None:
        await self._links.write(lambda connection: connection.execute(_STATEMENTS["number"]), alone=True)

    async def _fetchrow(self, words: str, *values: Any) -> Any:
        return await self._links.read(lambda connection: connection.fetchrow(words, *values))


@cache
def statement(name: str, topic: Topic) -> str:
    """The words to read one topic."""
    events = quoted(Event.__struct_fields__, "e.")
    words = _STATEMENTS[name].format(events=events, names=_NAMES, topic=TOPIC_FIELDS[topic])
    parameters = {"read": ("first", "ord", "window", "limit"), "history": ("execution_id", "limit", "without")}
    return numbered(words, parameters[name])


def _end(position: int) -> int:
    """The last place of a batch."""
    return position * MOST_EVENTS + MOST_EVENTS - 1


def _event(record: Any) -> FeedEvent:
    position, ord_, at, *fields = record
    return FeedEvent(position * MOST_EVENTS + ord_, at, Event(*fields))
