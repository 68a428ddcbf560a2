"""A flow on each store, with dispatch and sweeps stopped and a clock that the test moves."""

from __future__ import annotations

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.settings import Settings
from flowfabric.stores.base import Store
from tests.scenarios.flowing import Flowing


@pytest.fixture
async def flow(store: Store, clock: ManualClock) -> Flowing:
    return Flowing(Engine(store, minter=SeededMinter(1), settings=Settings(dispatch=False)), clock)
