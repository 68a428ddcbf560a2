"""An engine in memory, and callers of it: directly, and through a server and its client."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest

from flowfabric.client import RemoteEngine
from flowfabric.engine.engine import Engine
from flowfabric.server import create_app
from flowfabric.stores.memory.store import MemoryStore


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    store = MemoryStore()
    await store.open(migrate=True)
    async with Engine(store) as engine:
        await engine.ensure_signing_key("00" * 32)
        yield engine


@pytest.fixture(params=["on a store", "through a server"])
async def caller(request: pytest.FixtureRequest, engine: Engine) -> AsyncIterator[Engine | RemoteEngine]:
    if request.param == "on a store":
        yield engine
        return
    async with RemoteEngine("http://ff", transport=httpx2.ASGITransport(app=create_app(engine))) as remote:
        yield remote
