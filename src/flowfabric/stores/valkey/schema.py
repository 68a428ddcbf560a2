"""The schema version of the store.

Blobs carry columns that a release does not know, so most schemas need no migration (`layout.py`). The version is raised
if a release cannot read what an earlier one wrote, or the other way round. It is kept in `{ff}:schema` with the
declaration whether the previous release may keep running (`stores/compatibility.py`).
"""

from __future__ import annotations

from flowfabric import errors
from flowfabric.stores.compatibility import refuse_newer
from flowfabric.stores.port import SchemaVersion
from flowfabric.stores.valkey.cluster import ValkeyClient

SCHEMA = "{ff}:schema"
VERSION = 1  # schema version of this release
COMPATIBLE = True  # True if the previous release may run on it


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
