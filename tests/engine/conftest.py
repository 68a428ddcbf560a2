"""Fixtures shared by the engine tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.stores.port import Store
from tests.engine.flow_harness import FlowHarness

# Arguments are refused before a store is asked, so these run on Valkey in `./dev soak` only.
REFUSALS = ("test_invalid_arguments", "test_invalid_limits_arguments", "test_invalid_flow_arguments")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_here = Path(__file__).parent in item.path.parents
        if is_here and "valkey" in item.name.partition("[")[2] and item.path.stem in REFUSALS:
            item.add_marker(pytest.mark.soak)


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
