"""The schema version, and the functions on the servers.

Blobs carry columns that a release does not know, so most schemas need no migration (`layout.py`). The version is raised
if a release cannot read what an earlier one wrote, or the other way round. It is kept in `{ff}:schema` with the
declaration whether the previous release may keep running (`stores/compatibility.py`).
"""

from __future__ import annotations

import asyncio

from flowfabric import errors
from flowfabric.stores.compatibility import refuse_newer
from flowfabric.stores.port import SchemaVersion
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.library import PREFIX, Library
from flowfabric.stores.valkey.node import Node

SCHEMA = "{ff}:schema"
VERSION = 1  # of this release
COMPATIBLE = True  # whether the release before may run on it


async def ensure_schema(client: ValkeyClient, *, migrate: bool) -> SchemaVersion:
    """Write the version if `migrate` is set; refuse a newer one, and an older one otherwise."""
    version, compatible = await client.read(SCHEMA, "HMGET", SCHEMA, "version", "compatible")
    found = int(version or 0)
    refuse_newer(found, VERSION, compatible=compatible == b"1")
    if found < VERSION:
        if not migrate:
            raise errors.Unavailable(
                "open", f"the store has schema version {found}, this release needs {VERSION}: migrate first"
            )
        await client.call(SCHEMA, "HSET", SCHEMA, "version", VERSION, "compatible", int(COMPATIBLE))
    return SchemaVersion(found, max(found, VERSION), COMPATIBLE or not found)


async def ensure_library(client: ValkeyClient, library: Library) -> None:
    """Load the functions on every primary that does not have them."""
    await asyncio.gather(*(_load(node, library) for node in client.primaries()))


async def _load(node: Node, library: Library) -> None:
    if not await node.read("FUNCTION", "LIST", "LIBRARYNAME", library.name):
        await node.load_library(library.text)


async def delete_other_libraries(client: ValkeyClient, library: Library) -> list[str]:
    """Delete the functions of other releases; return the names of their libraries. No such release may be running."""
    deleted: set[str] = set()
    for node in client.primaries():
        for described in await node.read("FUNCTION", "LIST", "LIBRARYNAME", f"{PREFIX}*"):
            name = described[described.index(b"library_name") + 1].decode()
            if name != library.name:
                await node.call("FUNCTION", "DELETE", name)
                deleted.add(name)
    return sorted(deleted)
