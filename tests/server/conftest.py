"""A server on SQLite, on Postgres and on Valkey. Requests are made in-process unless a test needs a real connection."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from tests.conftest import open_store
from tests.server.api_client import SECRET, ApiClient


@pytest.fixture(params=("sqlite", "postgres", "valkey"))
async def store(request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store(request, clock, tmp_path) as store:
        yield store


@pytest.fixture
async def engine(store: Store) -> AsyncIterator[Engine]:
    engine = Engine(store, settings=Settings(max_concurrent_stream_ops=4))
    await engine.seed_waitpoint_hmac_secret("k1", SECRET)
    yield engine
    await engine.dispatcher.wait_idle()
    await engine.bulk_canceller.close()


@pytest.fixture
def api(engine: Engine) -> ApiClient:
    """A client of a server without tokens."""
    return ApiClient(engine)
