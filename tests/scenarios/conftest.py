"""An engine on each store behind the checked store, with a seeded minter, a manual clock and a signing key `k1`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from tests.conftest import STORES_AND_CLUSTER, open_store
from tests.scenarios.checked_store import CheckedStore
from tests.scenarios.durable_function import DurableFunction
from tests.scenarios.env import Env
from tests.scenarios.flow_env import FlowEnv
from tests.scenarios.waits import Waits

# What spans partitions, and so nodes; the other scenarios run on the cluster in `./dev soak`, the contract always.
FOLDERS_ON_CLUSTER = ("flow", "limits")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        is_here = Path(__file__).parent in item.path.parents
        if is_here and "[valkey-cluster" in item.name and item.path.parent.name not in FOLDERS_ON_CLUSTER:
            item.add_marker(pytest.mark.soak)


@pytest.fixture(params=STORES_AND_CLUSTER)
async def store(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Store]:
    """A store of each kind, open and empty."""
    async with open_store(request, clock, tmp_path) as store:
        yield store


@pytest.fixture
async def keyless(store: Store) -> Engine:
    """An engine whose keystore is empty."""
    return Engine(CheckedStore(store), minter=SeededMinter(1))


@pytest.fixture
async def engine(keyless: Engine) -> Engine:
    await keyless.seed_waitpoint_hmac_secret("k1", "00112233445566778899aabbccddeeff" * 2)
    return keyless


@pytest.fixture
def env(engine: Engine, clock: ManualClock) -> Env:
    return Env(engine, clock)


@pytest.fixture
def waits(env: Env) -> Waits:
    return Waits(env)


@pytest.fixture
async def function(env: Env, waits: Waits) -> DurableFunction:
    claim = await env.create_and_claim()
    return DurableFunction(env, waits, claim.execution_id, claim)


@pytest.fixture
async def flow(store: Store, clock: ManualClock) -> FlowEnv:
    """A flow on an engine without dispatch: a scenario delivers completions itself."""
    engine = Engine(CheckedStore(store), minter=SeededMinter(1), settings=Settings(dispatch=False))
    await engine.seed_waitpoint_hmac_secret("k1", "00112233445566778899aabbccddeeff" * 2)
    return FlowEnv(engine, clock)
