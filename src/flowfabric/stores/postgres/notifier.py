"""Notifications between processes: LISTEN and NOTIFY.

A notification that is part of a commit arrives at the instant of that commit. But transactions that notify are
serialized, including their fsync. So only an idle process attaches notifications to its commits: one that has attached
none for a while (longer if commits take longer) and receives few. All other notifications are sent after their commits
on a separate connection, batched, in transactions that do not wait for the disk. A commit with many topics shows that
this process is busy: its notifications wait a little for those of the next commits.

A lost notification delays other processes by a poll interval, so failures are retried later or ignored. Through a
pooler nothing is received, and everything else works: LISTEN would stay in a session that is not ours. Processes that
are connected to the server directly receive what is sent through a pooler.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from secrets import token_hex
from time import monotonic
from typing import Any

import asyncpg
import msgspec

from flowfabric.errors import FabricError
from flowfabric.event_loop import start_task
from flowfabric.stores.postgres.errors import CONNECTION_ERRORS
from flowfabric.stores.postgres.pool import ConnectionPool, in_transaction

CHANNEL = "ff_wake"
MAX_PAYLOAD_BYTES = 7900  # limit of the topics; the server refuses messages of 8000 bytes and more
SENDER_PREFIX = "from:"  # begins what a message says first: who sent it
MIN_IDLE_S = 0.005  # of a process between two commits that carry a hint, at least ...
MIN_IDLE_COMMITS = 4  # ... and so many times as long as its commits take
LOOP_YIELDS = 6  # loop iterations after which the follow-up work of this process has been sent
MANY_TOPICS = 64  # topics of one commit
BATCH_DELAY_S = 0.02  # the longest wait of these
CLOSE_FLUSH_S = 0.2  # the time that a closing store has to send the rest
MAX_RECENT_MESSAGES = 4  # after this many messages within that time, no commit carries one
_SEND = f"select set_config('synchronous_commit', 'off', true), pg_notify('{CHANNEL}', $1)"

Callback = Callable[[frozenset[str]], None]


class PostgresNotifier:
    """Sends the notifications of this process and receives those of others."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._name = SENDER_PREFIX + token_hex(6)
        self._callbacks: list[Callback] = []
        self._commit_s = 0.0  # seconds that commits take of late
        self._attached_at = -inf
        self._heard_at = deque([-inf] * MAX_RECENT_MESSAGES, maxlen=MAX_RECENT_MESSAGES)
        self._unsent: set[str] = set()
        self._later: asyncio.TimerHandle | None = None
        self._work = asyncio.Event()
        self._all_sent = asyncio.Event()
        self._all_sent.set()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def notify(self, topics: frozenset[str]) -> None:
        """Notify other processes soon."""
        if not topics:
            return
        self._unsent |= topics
        self._all_sent.clear()
        if len(topics) < MANY_TOPICS:
            self._stir()
        elif self._later is None:
            self._later = asyncio.get_running_loop().call_later(BATCH_DELAY_S, self._stir)

    @contextmanager
    def attach_to_commit(self, topics: frozenset[str]) -> Iterator[str | None]:
        """Yield the message to send with a commit, or None if the topics have to be sent after it."""
        began = monotonic()
        is_idle = began - max(self._attached_at, self._heard_at[0]) > max(MIN_IDLE_S, MIN_IDLE_COMMITS * self._commit_s)
        messages = list(encode_payloads(topics, self._name)) if is_idle else []
        carries = len(messages) == 1
        if carries:
            self._attached_at = inf  # one at a time
        try:
            yield messages[0] if carries else None
        finally:
            ended = monotonic()
            self._commit_s += (ended - began - self._commit_s) / 8
            if carries:
                self._attached_at = ended

    def on_notify(self, callback: Callback) -> None:
        """Call back for each notification of another process."""
        self._callbacks.append(callback)
        self._stir()

    async def close(self) -> None:
        """Stop; notifications that cannot be sent soon are lost."""
        if not self._all_sent.is_set() and not self._closed:
            self._stir()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_sent.wait(), CLOSE_FLUSH_S)
        self._closed = True
        self._not_later()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def _not_later(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _stir(self) -> None:
        self._not_later()
        self._work.set()
        if self._task is None and not self._closed:
            self._task = start_task(self._run(), name="flowfabric-wake")

    async def _run(self) -> None:
        while True:
            with suppress(FabricError, *CONNECTION_ERRORS):
                connection = await self._pool.connect()
                try:
                    await self._serve(connection)
                finally:
                    connection.terminate()
                    self._pool.report_connection_lost()
            await asyncio.sleep(0.2)

    async def _serve(self, connection: Any) -> None:
        """Listen and send until the connection ends."""
        connection.add_termination_listener(lambda _: self._work.set())
        listening = False
        while not connection.is_closed():
            if self._callbacks and not listening and self._pool.caches_statements:
                listening = True
                with suppress(asyncpg.PostgresError):
                    async with self._pool.command_timeout():
                        await connection.add_listener(CHANNEL, self._heard)
            self._work.clear()  # with nothing awaited before what there is to do is taken
            if connection.is_closed():
                return
            topics, self._unsent = self._unsent, set()
            async with self._pool.command_timeout():
                for payload in encode_payloads(topics, self._name):
                    if self._pool.caches_statements:
                        await _notify(connection, payload)
                    else:
                        await in_transaction(connection, partial(_notify, payload=payload))
            if not self._unsent:
                self._all_sent.set()
            await self._wait_for_work(connection, listening)
            for _ in range(LOOP_YIELDS):
                await asyncio.sleep(0)

    async def _wait_for_work(self, connection: Any, listening: bool) -> None:
        """Wait until there is something to send; check a connection that only listens from time to time."""
        while True:
            try:
                async with asyncio.timeout(self._pool.deadlines.command_s or None if listening else None):
                    await self._work.wait()
                return
            except TimeoutError:
                async with self._pool.command_timeout():
                    await connection.execute("select 1")

    def _heard(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        """Handle a message, which may be our own, or have been in flight when the connection ended."""
        self._heard_at.append(monotonic())
        with suppress(msgspec.DecodeError):
            topics = msgspec.json.decode(payload, type=list[str])
            if self._name in topics:
                return
            received = frozenset(topic for topic in topics if not topic.startswith(SENDER_PREFIX))
            for callback in self._callbacks:
                callback(received)


async def _notify(connection: Any, payload: str) -> None:
    await connection.execute(_SEND, payload)


def encode_payloads(topics: Iterable[str], sender: str = SENDER_PREFIX) -> Iterator[str]:
    """Encode topics as messages within the size limit; a topic that is too long on its own is omitted.

    Without a sender the messages reach all processes, this one included.
    """
    ordered = sorted(topics)
    whole = msgspec.json.encode([sender, *ordered])
    if len(whole) <= MAX_PAYLOAD_BYTES:
        if ordered:
            yield whole.decode()
        return
    batch: list[str] = []
    size = 2
    for topic in ordered:
        bytes_ = len(msgspec.json.encode(topic)) + 1
        if bytes_ > MAX_PAYLOAD_BYTES:
            continue
        if batch and size + bytes_ > MAX_PAYLOAD_BYTES:
            yield msgspec.json.encode([sender, *batch]).decode()
            batch, size = [], 2
        batch.append(topic)
        size += bytes_
    if batch:
        yield msgspec.json.encode([sender, *batch]).decode()
