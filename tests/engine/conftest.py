"""Fixtures shared by the engine tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.stores.port import Store
from tests.engine.flow_harness import FlowHarness


@pytest.fixture
async def harness(store: Store, clock: ManualClock) -> AsyncIterator[FlowHarness]:
    harness = FlowHarness(store)
    yield harness
    await harness.engine.dispatcher.close()


@pytest.fixture
def store_calls(harness: FlowHarness, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The calls to the store from now on: operation and number of items."""
    calls: list[tuple[str, int]] = []

    def record(operation: str) -> Any:
        call = getattr(harness.store, operation)

        async def recorded(items: Any, *more: Any) -> Any:
            calls.append((operation, len(items)))
            return await call(items, *more)

        return recorded

    monkeypatch.setattr(harness.store, "try_load_now", lambda _: None)
    for operation in ("load", "commit"):
        monkeypatch.setattr(harness.store, operation, record(operation))
    return calls
