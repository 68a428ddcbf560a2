"""Hints between processes: LISTEN and NOTIFY, on a connection beside the others.

A hint is sent after the commit, never with it: a transaction that notifies queues behind all others that do, through
their fsync. Hints of one moment travel together, in transactions that do not wait for the disk. Losing one costs the
others a poll interval, so every failure here is met by trying again later, or not at all. Where LISTEN is not possible
(a pooler), nothing is ever heard and everything else works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import asyncpg
import msgspec

from flowfabric.errors import FabricError
from flowfabric.stores.postgres.faults import BROKEN
from flowfabric.stores.postgres.links import Links, in_transaction

CHANNEL = "ff_wake"
MOST_BYTES = 7900  # the server refuses 8000 and more
_SEND = f"select set_config('synchronous_commit', 'off', true), pg_notify('{CHANNEL}', $1)"

Callback = Callable[[frozenset[str]], None]


class Wake:
    """Sends the hints of this process and hears those of others."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._callbacks: list[Callback] = []
        self._unsent: set[str] = set()
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def send(self, topics: frozenset[str]) -> None:
        """Tell other processes, soon."""
        if topics:
            self._unsent |= topics
            self._stir()

    def on_wake(self, callback: Callback) -> None:
        """Call back whenever another process sent something."""
        self._callbacks.append(callback)
        self._stir()

    async def close(self) -> None:
        """Stop; what was not sent yet is lost."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def _stir(self) -> None:
        self._work.set()
        if self._task is None and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="flowfabric-wake")

    async def _run(self) -> None:
        while True:
            with suppress(FabricError, *BROKEN):
                connection = await self._links.connect()
                try:
                    await self._serve(connection)
                finally:
                    connection.terminate()
            await asyncio.sleep(0.2)

    async def _serve(self, connection: Any) -> None:
        """Listen and send until the connection ends."""
        connection.add_termination_listener(lambda _: self._work.set())
        hear = partial(self._heard, connection.get_server_pid())
        listening = False
        while not connection.is_closed():
            self._work.clear()
            if self._callbacks and not listening:
                listening = True
                with suppress(asyncpg.PostgresError):
                    await connection.add_listener(CHANNEL, hear)
            topics, self._unsent = self._unsent, set()
            for payload in payloads(topics):
                if self._links.cached:
                    await _notify(connection, payload)
                else:
                    await in_transaction(connection, partial(_notify, payload=payload))
            await self._work.wait()

    def _heard(self, own: int, connection: Any, pid: int, channel: str, payload: str) -> None:
        """A message came, perhaps one that was on its way when the connection ended."""
        if pid == own:
            return
        with suppress(msgspec.DecodeError):
            topics = frozenset(msgspec.json.decode(payload, type=list[str]))
            for callback in self._callbacks:
                callback(topics)


async def _notify(connection: Any, payload: str) -> None:
    await connection.execute(_SEND, payload)


def payloads(topics: Iterable[str]) -> Iterator[str]:
    """The topics as messages that are short enough; a topic that is too long on its own is left out."""
    some: list[str] = []
    size = 2
    for topic in sorted(topics):
        bytes_ = len(msgspec.json.encode(topic)) + 1
        if bytes_ > MOST_BYTES:
            continue
        if some and size + bytes_ > MOST_BYTES:
            yield msgspec.json.encode(some).decode()
            some, size = [], 2
        some.append(topic)
        size += bytes_
    if some:
        yield msgspec.json.encode(some).decode()
