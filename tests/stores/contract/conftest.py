"""The contract holds on every store, on a cluster, and on Redis where it is installed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flowfabric.clock import ManualClock
from flowfabric.stores.port import Store
from tests.conftest import REDIS, STORES_AND_CLUSTER, open_store

# What depends on the server's functions and streams; the rest of the contract runs on Redis in `./dev soak`.
MODULES_ON_REDIS = ("test_claim", "test_feed", "test_random")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_here = Path(__file__).parent in item.path.parents
        if is_here and "redis" in item.name.partition("[")[2] and item.path.stem not in MODULES_ON_REDIS:
            item.add_marker(pytest.mark.soak)


@pytest.fixture(params=(*STORES_AND_CLUSTER, *REDIS))
async def store(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Store]:
    """A store of each kind, open and empty."""
    async with open_store(request, clock, tmp_path) as store:
        yield store
