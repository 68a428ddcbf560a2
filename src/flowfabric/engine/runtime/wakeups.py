"""Hints: "look now", and what a change has to tell. Losing one costs at most a poll interval."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import Any

from flowfabric.model.change import Change, Patch, Write
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.stream import Stream


class Wakeups:
    """Waiting tasks of this process, by topic."""

    def __init__(self) -> None:
        # In the order in which they came: who is woken first claims first, and worlds of one seed must be alike.
        self._waiters: dict[str, dict[asyncio.Future[None], None]] = {}
        self.completion_count = 0  # how often it was told that an execution ended, whichever
        self._for_ends = 0  # how many wait for the end of one

    def __bool__(self) -> bool:
        """Whether anyone waits for anything."""
        return bool(self._waiters)

    def notify(self, topics: Iterable[str]) -> None:
        """Wake everyone who waits for one of these."""
        for topic in topics:
            if topic.startswith(COMPLETION_PREFIX):
                self.completion_count += 1
            for waiter in self._waiters.pop(topic, ()):
                if not waiter.done():
                    waiter.set_result(None)

    def notify_completions(self, execution_ids: Collection[str]) -> None:
        """Wake everyone who waits for the end of one of these, or for the feed, which tells of it."""
        if self._for_ends:
            self.notify(map(completion_topic, execution_ids))
        else:  # so it is where the work is done; then nobody needs their names
            self.completion_count += len(execution_ids)
        self.notify((FEED_TOPIC,))

    def notify_prefix(self, prefix: str) -> None:
        """Wake everyone who waits for a topic that begins like this."""
        self.notify([topic for topic in self._waiters if topic.startswith(prefix)])

    def subscriber_count(self, topic: str) -> int:
        """How many wait for a hint about this."""
        return len(self._waiters.get(topic, ()))

    def subscribe(self, *topics: str) -> asyncio.Future[None]:
        """A future for the next hint. Ask for it before looking, so that nothing falls between look and wait."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for topic in topics:
            self._waiters.setdefault(topic, {})[waiter] = None
            self._for_ends += topic.startswith(COMPLETION_PREFIX)
        waiter.add_done_callback(lambda done: self._forget(topics, done))
        return waiter

    def _forget(self, topics: tuple[str, ...], waiter: asyncio.Future[None]) -> None:
        for topic in topics:
            self._for_ends -= topic.startswith(COMPLETION_PREFIX)
            waiters = self._waiters.get(topic)
            if waiters is not None:
                waiters.pop(waiter, None)
                if not waiters:
                    del self._waiters[topic]


async def wait_for_wakeup(waiter: asyncio.Future[None], timeout_s: float) -> bool:
    """Wait for a hint; False when none came in time."""
    try:
        async with asyncio.timeout(timeout_s):  # `wait_for` may forget that it was cancelled when a hint comes as well
            await waiter
    except TimeoutError:
        return False
    return True


def lane_topic(lane_id: str) -> str:
    """Work became claimable in this lane."""
    return f"{LANE_PREFIX}{lane_id}"


def stream_topic(execution_id: str) -> str:
    """This execution put something out, or will no more."""
    return f"stream:{execution_id}"


def completion_topic(execution_id: str) -> str:
    """This execution ended."""
    return (
        f"{COMPLETION_PREFIX}{execution_id[-8:]}"  # short, since it travels; a stranger that shares it costs one look
    )


def due_topic(row: type, column: str) -> str:
    """Something falls due earlier than the sweep of this process expected."""
    return f"due:{row.__name__}.{column}"


FEED_TOPIC = "feed"
LANE_PREFIX = "lane:"
COMPLETION_PREFIX = "end:"


def queues_written(change: Change) -> set[QueueKey]:
    """The lines that a change puts executions into."""
    found: set[QueueKey] = set()
    _look_at(change.writes, found, set())
    return found


def _look_at(writes: Iterable[Write], lines: set[QueueKey], topics: set[str]) -> None:
    """Add the lines that writes put executions into, and the topics of the streams that they are about."""
    for write in writes:  # compared by type: this runs for every write, of which a graph has thousands
        row: Any = write.row
        kind = type(row)
        if kind is Execution:
            if row.line is not None:
                lines.add(row.line)
        elif kind is Stream:
            topics.add(stream_topic(row.execution_id))
        elif type(write) is Patch:
            if row is Execution:
                if (line := write.fields.get("line")) is not None:
                    lines.add(line)
            elif row is Stream:
                topics.add(stream_topic(write.key[0]))


def executions_enqueued(change: Change) -> set[str]:
    """The executions that a change puts into lines."""
    found: set[str] = set()
    for write in change.writes:
        row: Any = write.row
        if type(row) is Execution:
            if row.line is not None:
                found.add(row.execution_id)
        elif type(write) is Patch and row is Execution and write.fields.get("line") is not None:
            found.add(write.key[0])
    return found


def topics_of(changes: Collection[Change]) -> set[str]:
    """What there is to look at once these changes are written."""
    ended = [change.guards[0].key[0] for change in changes if change.template is not None]
    events = [event for change in changes for event in change.events]
    ended += [event.execution_id for event in events if event.outcome is not None]
    topics = set(map(completion_topic, ended))
    if ended or events:
        topics.add(FEED_TOPIC)
    lines: set[QueueKey] = set()
    _look_at([write for change in changes for write in change.writes], lines, topics)
    topics.update([lane_topic(line.lane_id) for line in lines])
    return topics
