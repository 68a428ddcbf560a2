"""The contract holds on every store, and on a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flowfabric.clock import ManualClock
from flowfabric.stores.port import Store
from tests.conftest import STORES_AND_CLUSTER, open_store


@pytest.fixture(params=STORES_AND_CLUSTER)
async def store(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Store]:
    """A store of each kind, open and empty."""
    async with open_store(request, clock, tmp_path) as store:
        yield store
