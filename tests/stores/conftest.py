"""The stores under contract, each empty, with a clock that the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flowfabric.clock import ManualClock
from flowfabric.stores.base import Store
from flowfabric.stores.memory import MemoryStore
from flowfabric.stores.sqlite import SQLiteStore


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Store]:
    store: Store
    match request.param:
        case "memory":
            store = MemoryStore(clock)
        case _:
            store = SQLiteStore(tmp_path / "ff.db", clock)
    await store.open(migrate=True)
    yield store
    await store.close()
