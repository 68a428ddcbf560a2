"""A client of a Valkey server that is closed after its block."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from flowfabric.settings import Deadlines
from flowfabric.stores.valkey import ValkeyClient, parse_url


@asynccontextmanager
async def connected(url: str, deadlines: Deadlines | None = None) -> AsyncIterator[ValkeyClient]:
    client = ValkeyClient(parse_url(url), deadlines)
    try:
        await client.open()
        yield client
    finally:
        await client.close()
