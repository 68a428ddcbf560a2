"""An engine on each store, under watch, with a seeded minter, a clock that the test moves, and a signing key `k1`."""

from __future__ import annotations

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from tests.scenarios.flowing import Flowing
from tests.scenarios.functions import Function
from tests.scenarios.play import Play
from tests.scenarios.waits import Waits
from tests.scenarios.watched import Watched


@pytest.fixture
async def keyless(store: Store) -> Engine:
    """An engine whose keystore is empty."""
    return Engine(Watched(store), minter=SeededMinter(1))


@pytest.fixture
async def engine(keyless: Engine) -> Engine:
    await keyless.seed_waitpoint_hmac_secret("k1", "00112233445566778899aabbccddeeff" * 2)
    return keyless


@pytest.fixture
def play(engine: Engine, clock: ManualClock) -> Play:
    return Play(engine, clock)


@pytest.fixture
def waits(play: Play) -> Waits:
    return Waits(play)


@pytest.fixture
async def function(play: Play, waits: Waits) -> Function:
    held = await play.claimed()
    return Function(play, waits, held.execution_id, held)


@pytest.fixture
async def flow(store: Store, clock: ManualClock) -> Flowing:
    """A flow on an engine whose dispatch is stopped: a scenario delivers what it wants to see delivered."""
    engine = Engine(Watched(store), minter=SeededMinter(1), settings=Settings(dispatch=False))
    await engine.seed_waitpoint_hmac_secret("k1", "00112233445566778899aabbccddeeff" * 2)
    return Flowing(engine, clock)
