"""The Valkey store and its client, for tests of their internals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from flowfabric.clock import ManualClock
from flowfabric.settings import Deadlines
from flowfabric.stores.valkey import ValkeyClient, parse_url
from flowfabric.stores.valkey.store import ValkeyStore


@pytest.fixture
async def vk(valkey_url: str, clock: ManualClock) -> AsyncIterator[ValkeyStore]:
    """The Valkey store, open and empty."""
    store = ValkeyStore(parse_url(valkey_url), clock)
    await store.open(migrate=True)
    yield store
    await store.close()


@asynccontextmanager
async def connected(url: str, deadlines: Deadlines | None = None) -> AsyncIterator[ValkeyClient]:
    """Yield a client, which is closed after the block."""
    client = ValkeyClient(parse_url(url), deadlines)
    try:
        await client.open()
        yield client
    finally:
        await client.close()
