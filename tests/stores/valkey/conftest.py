"""The Valkey store on one server, for tests of its internals."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from flowfabric.clock import ManualClock
from flowfabric.stores.valkey.address import parse_url
from flowfabric.stores.valkey.store import ValkeyStore


@pytest.fixture
async def vk(valkey_url: str, clock: ManualClock) -> AsyncIterator[ValkeyStore]:
    """The Valkey store, open and empty."""
    store = ValkeyStore(parse_url(valkey_url), clock)
    await store.open(migrate=True)
    yield store
    await store.close()
