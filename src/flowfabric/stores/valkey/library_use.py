"""The functions on the servers: which releases use theirs, and which libraries can be deleted.

`{ff}:libraries` has the last use of each library. Every process notes its own when it opens the store and once an hour
while it works. `migrate` deletes libraries that nobody has noted for a day. That is safe even if such a release still
runs: a call of a function that is not there loads the library of its release and is repeated (`cluster.py`).
"""

from __future__ import annotations

import asyncio
from time import monotonic, time
from typing import Any

from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.library import PREFIX, Library
from flowfabric.stores.valkey.node import Node

LIBRARIES = "{ff}:libraries"
KEEP_MS = 24 * 60 * 60 * 1000
NOTE_S = 60 * 60.0


class LibraryUse:
    """Notes that a library is in use."""

    def __init__(self, client: ValkeyClient, library: Library) -> None:
        self._client = client
        self._library = library
        self._noted_at: float | None = None

    def note(self) -> None:
        """Note the use in the background, unless that was done within the last hour."""
        now = monotonic()
        if self._noted_at is None or now - self._noted_at > NOTE_S:
            self._noted_at = now
            noted = self._client.call(LIBRARIES, "HSET", LIBRARIES, self._library.name, int(time() * 1000))
            noted.add_done_callback(self._check)

    def _check(self, noted: asyncio.Future[Any]) -> None:
        if noted.cancelled() or noted.exception() is not None:
            self._noted_at = None  # with the next call


async def ensure_library(client: ValkeyClient, library: Library) -> None:
    """Load the functions on every primary that does not have them."""
    await asyncio.gather(*(_load(node, library) for node in client.primaries()))


async def _load(node: Node, library: Library) -> None:
    if not await node.read("FUNCTION", "LIST", "LIBRARYNAME", library.name):
        await node.load_library(library.text)


async def delete_unused_libraries(client: ValkeyClient, library: Library, now_ms: int | None = None) -> list[str]:
    """Delete the libraries of other releases that were not used for a day; return their names.

    One whose use nobody has noted yet is noted now, and deleted a day later.
    """
    now = int(time() * 1000) if now_ms is None else now_ms
    found = await asyncio.gather(*(_libraries(node) for node in client.primaries()))
    others = sorted({name for names in found for name in names if name != library.name})
    if not others:
        return []
    used = await client.read(LIBRARIES, "HMGET", LIBRARIES, *others)
    unknown = [name for name, at in zip(others, used, strict=True) if at is None]
    for name in unknown:
        await client.call(LIBRARIES, "HSETNX", LIBRARIES, name, now)
    unused = [name for name, at in zip(others, used, strict=True) if at is not None and now - int(at) > KEEP_MS]
    for node, names in zip(client.primaries(), found, strict=False):
        for name in unused:
            if name in names:
                await _delete(node, name)
    if unused:
        await client.call(LIBRARIES, "HDEL", LIBRARIES, *unused)
    return unused


async def _libraries(node: Node) -> list[str]:
    described = await node.read("FUNCTION", "LIST", "LIBRARYNAME", f"{PREFIX}*")
    return [one[one.index(b"library_name") + 1].decode() for one in described]


async def _delete(node: Node, name: str) -> None:
    if name in await _libraries(node):  # another process may be migrating, too
        await node.call("FUNCTION", "DELETE", name)
