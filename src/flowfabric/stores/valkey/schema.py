"""The schema version of the store.

Blobs carry columns that a release does not know, so most schemas need no migration (`layout.py`). The version is raised
if a release cannot read what an earlier one wrote, or the other way round. It is kept in `{ff}:schema` with the
declaration whether the previous release may keep running (`stores/compatibility.py`).
"""

from __future__ import annotations

import asyncio
from time import monotonic

from flowfabric import errors
from flowfabric.stores.compatibility import refuse_newer
from flowfabric.stores.port import SchemaVersion
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.session import Reply

SCHEMA = "{ff}:schema"
VERSION = 1  # schema version of this release
COMPATIBLE = True  # True if the previous release may run on it
CHECK_INTERVAL_S = 5.0


async def ensure_schema(client: ValkeyClient, *, migrate: bool) -> SchemaVersion:
    """Write the version if `migrate` is set; refuse a newer one, and an older one otherwise."""
    found = _accepted(await _read(client))
    if found < VERSION:
        if not migrate:
            raise errors.Unavailable(
                "open", f"the store has schema version {found}, this release needs {VERSION}: migrate first"
            )
        await client.call(SCHEMA, "HSET", SCHEMA, "version", VERSION, "compatible", int(COMPATIBLE))
    return SchemaVersion(found, max(found, VERSION), COMPATIBLE or not found)


class SchemaWatch:
    """Detects that the schema has become too new for this release while it is running.

    The version is read in the background: a commit must be sent before the claim that is called next, so it cannot
    wait. Calls of the time between two checks, and of the round trip of a check, are still executed.
    """

    def __init__(self, client: ValkeyClient) -> None:
        self._client = client
        self._check_at = monotonic() + CHECK_INTERVAL_S
        self._refusal: errors.SchemaTooNew | None = None

    def check(self) -> None:
        """Raise `SchemaTooNew` if an earlier check has found it; start the next check if it is due."""
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        now = monotonic()
        if now >= self._check_at:
            self._check_at = now + CHECK_INTERVAL_S
            _read(self._client).add_done_callback(self._judge)

    def _judge(self, read: asyncio.Future[Reply]) -> None:
        if read.cancelled() or read.exception() is not None:
            return  # the server is away: the next check reads it
        try:
            _accepted(read.result())
        except errors.SchemaTooNew as refusal:
            self._refusal = refusal


def _read(client: ValkeyClient) -> asyncio.Future[Reply]:
    return client.read(SCHEMA, "HMGET", SCHEMA, "version", "compatible")


def _accepted(reply: Reply) -> int:
    """Return the version, 0 for none; raise `SchemaTooNew` unless this release runs on it."""
    version, compatible = reply
    found = int(version or 0)
    refuse_newer(found, VERSION, compatible=compatible == b"1")
    return found
