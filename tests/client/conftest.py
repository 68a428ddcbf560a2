"""An engine for those who ask it through a server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.stores.memory.store import MemoryStore


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    store = MemoryStore()
    await store.open(migrate=True)
    async with Engine(store) as engine:
        await engine.ensure_signing_key("00" * 32)
        yield engine
