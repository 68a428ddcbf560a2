"""Wakeups: tasks that wait for a topic, and the topics of a change. A lost wakeup costs at most a poll interval."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import Any

from flowfabric.model.change import Change, Patch, Write
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.gate import Fact, Reply, ReplyState
from flowfabric.model.stream import Stream


class Wakeups:
    """The waiting tasks of this process, by topic."""

    def __init__(self) -> None:
        # In order of arrival: the task that is woken first claims first, and simulations have to be reproducible.
        self._waiters: dict[str, dict[asyncio.Future[None], None]] = {}
        self.completion_count = 0  # completions of any execution that this process was notified of
        self._completion_waiters = 0

    def __bool__(self) -> bool:
        """Return whether any task waits."""
        return bool(self._waiters)

    def notify(self, topics: Iterable[str]) -> None:
        """Wake the tasks that wait for one of these topics."""
        for topic in topics:
            if topic.startswith(COMPLETION_PREFIX):
                self.completion_count += 1
            for waiter in self._waiters.pop(topic, ()):
                if not waiter.done():
                    waiter.set_result(None)

    def notify_completions(self, execution_ids: Collection[str]) -> None:
        """Wake the tasks that wait for the completion of one of these, or for the feed."""
        if self._completion_waiters:
            self.notify(map(completion_topic, execution_ids))
        else:  # the usual case in a worker process: no topic has to be built
            self.completion_count += len(execution_ids)
        self.notify((FEED_TOPIC,))

    def notify_prefix(self, prefix: str) -> None:
        """Wake the tasks that wait for a topic with this prefix."""
        self.notify([topic for topic in self._waiters if topic.startswith(prefix)])

    def subscriber_count(self, topic: str) -> int:
        """Return how many tasks wait for this topic."""
        return len(self._waiters.get(topic, ()))

    def subscribe(self, *topics: str) -> asyncio.Future[None]:
        """Return a future for the next wakeup. Subscribe before you poll, so that none is lost in between."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for topic in topics:
            self._waiters.setdefault(topic, {})[waiter] = None
            self._completion_waiters += topic.startswith(COMPLETION_PREFIX)
        waiter.add_done_callback(lambda done: self._forget(topics, done))
        return waiter

    def _forget(self, topics: tuple[str, ...], waiter: asyncio.Future[None]) -> None:
        for topic in topics:
            self._completion_waiters -= topic.startswith(COMPLETION_PREFIX)
            waiters = self._waiters.get(topic)
            if waiters is not None:
                waiters.pop(waiter, None)
                if not waiters:
                    del self._waiters[topic]


async def wait_for_wakeup(waiter: asyncio.Future[None], timeout_s: float) -> bool:
    """Wait for a wakeup; return False after the timeout."""
    try:
        async with asyncio.timeout(timeout_s):  # `wait_for` may swallow a cancellation that races with the wakeup
            await waiter
    except TimeoutError:
        return False
    return True


def lane_topic(lane_id: str) -> str:
    """Return the topic of a lane: work became claimable there."""
    return f"{LANE_PREFIX}{lane_id}"


def stream_topic(execution_id: str) -> str:
    """Return the topic of an execution's stream: it got frames, or was closed."""
    return f"stream:{execution_id}"


def completion_topic(execution_id: str) -> str:
    """Return the topic of an execution's completion. It is short, because it is sent; a collision costs one poll."""
    return f"{COMPLETION_PREFIX}{execution_id[-8:]}"


def fact_topic(execution_id: str) -> str:
    """Return the topic of an execution's facts: one was set."""
    return f"fact:{execution_id}"


def reply_topic(execution_id: str) -> str:
    """Return the topic of an execution's replies: one was given."""
    return f"reply:{execution_id}"


def due_topic(row: type, column: str) -> str:
    """Return the topic of a sweep: a row falls due before its next planned pass."""
    return f"due:{row.__name__}.{column}"


# Rows that are queued, or that readers wait for.
AWAITED_ROWS = frozenset({Execution, Stream, Fact, Reply})
FEED_TOPIC = "feed"
LANE_PREFIX = "lane:"
COMPLETION_PREFIX = "end:"


def queues_written(change: Change) -> set[QueueKey]:
    """Return the queues that a change enqueues executions in."""
    queues: set[QueueKey] = set()
    _collect(change.writes, queues, set())
    return queues


def _collect(writes: Iterable[Write], queues: set[QueueKey], topics: set[str]) -> None:
    """Add the queues that writes enqueue executions in, and the topics of what readers wait for."""
    for write in writes:  # hot path, a graph has thousands of writes: types are compared, not matched
        row: Any = write.row
        is_patch = type(write) is Patch
        kind = row if is_patch else type(row)
        if kind not in AWAITED_ROWS:
            continue
        if kind is Execution:
            queue = write.fields.get("line") if type(write) is Patch else row.line
            if queue is not None:
                queues.add(queue)
        elif kind is Stream:
            topics.add(stream_topic(write.key[0] if type(write) is Patch else row.execution_id))
        elif is_patch:
            continue
        elif kind is Fact:
            topics.add(fact_topic(row.execution_id))
        elif row.state is not ReplyState.OPEN:
            topics.add(reply_topic(row.execution_id))


def executions_enqueued(change: Change) -> set[str]:
    """Return the executions that a change enqueues."""
    enqueued: set[str] = set()
    for write in change.writes:
        row: Any = write.row
        if type(row) is Execution:
            if row.line is not None:
                enqueued.add(row.execution_id)
        elif type(write) is Patch and row is Execution and write.fields.get("line") is not None:
            enqueued.add(write.key[0])
    return enqueued


def topics_of(changes: Collection[Change]) -> set[str]:
    """Return the topics to notify of these changes."""
    topics: set[str] = set()
    queues: set[QueueKey] = set()
    for change in changes:
        completed = [event.execution_id for event in change.events if event.outcome is not None]
        if change.template is not None:
            completed.append(change.guards[0].key[0])
        if completed or change.events:
            topics.add(FEED_TOPIC)
            topics.update(map(completion_topic, completed))
        _collect(change.writes, queues, topics)
    topics.update([lane_topic(queue.lane_id) for queue in queues])
    return topics
