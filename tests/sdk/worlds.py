"""Worlds on other stores than the one in memory: their calls take real time, and none of the world's."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import pytest

from flowfabric import Engine
from flowfabric.ids import DEFAULT_PARTITIONS, PartitionCounts
from flowfabric.stores.port import SchemaVersion, Store
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.sqlite import SQLiteStore
from flowfabric.stores.valkey.address import parse_url
from flowfabric.stores.valkey.store import ValkeyStore
from flowfabric.testing.flaky_store import FlakyStore
from flowfabric.testing.flow_invariants import check_flow_invariants
from flowfabric.testing.invariants import check_invariants
from flowfabric.testing.stubs import CompletedChecks
from flowfabric.testing.virtual_time import VirtualTime
from flowfabric.testing.world import World
from tests.conftest import emptied, emptied_valkey

T = TypeVar("T")


class TimelessStore(FlakyStore):
    """A store during whose calls the clock of the world stands still."""

    def __init__(self, store: Store, time: VirtualTime, empty: Callable[[], Awaitable[object]]) -> None:
        super().__init__(store)
        self._time = time
        self._empty = empty

    async def open(self, *, migrate: bool, partitions: PartitionCounts = DEFAULT_PARTITIONS) -> SchemaVersion:
        with self._time.stopped():
            await self._empty()
            return await self.inner.open(migrate=migrate, partitions=partitions)

    async def close(self) -> None:
        with self._time.stopped():
            await self.inner.close()

    def on_notify(self, callback: Callable[[frozenset[str]], None]) -> None:
        """Listen to nobody: a world is one process, and the timeouts of a connection would pass at once."""

    def notify(self, topics: frozenset[str]) -> None:
        """Notify nobody."""

    async def _call(self, verb: str, call: Callable[[], Awaitable[T]]) -> T:
        async def call_inner() -> T:
            with self._time.stopped():
                return await call()

        return await super()._call(verb, call_inner)


class WorldEngine(Engine):
    """An engine whose leases are renewed on the loop, in the time of the world."""

    @property
    def is_shared(self) -> bool:
        return False


def use_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kind: str, folder: Path) -> None:
    """Give all worlds of a test an empty store of this kind."""
    numbers = itertools.count()
    dsn = request.getfixturevalue("own_database") if kind == "postgres" else ""

    async def empty() -> None:
        if kind == "postgres":
            await emptied(dsn)

    def make(clock: Callable[[], int]) -> Store:
        match kind:
            case "sqlite":
                return SQLiteStore(folder / f"world-{next(numbers)}.db", clock)
            case "valkey":
                return ValkeyStore(parse_url(emptied_valkey()), clock)
            case _:
                return PostgresStore(dsn, clock)

    def new_store(world: World) -> FlakyStore:
        return TimelessStore(make(world.now_ms), world._time, empty)

    leave = World.__aexit__

    async def check_and_leave(
        world: World, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Check the invariants at the end: a test may ask for them without an await."""
        try:
            if kind is None:
                world.store.heal()
                await check_invariants(world.engine)
                await check_flow_invariants(world.engine)
        finally:
            await leave(world, kind, error, trace)

    def check_later(world: World) -> Any:
        return CompletedChecks()

    monkeypatch.setattr("flowfabric.testing.world.Engine", WorldEngine)
    monkeypatch.setattr(World, "new_store", new_store)
    monkeypatch.setattr(World, "__aexit__", check_and_leave)
    monkeypatch.setattr(World, "assert_invariants", check_later)
    monkeypatch.setattr(World, "_note_repeated", lambda *_: None)
