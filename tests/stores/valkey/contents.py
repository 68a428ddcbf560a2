"""What a partition of the Valkey store holds, and stores whose functions differ."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import time
from typing import Any

from flowfabric.clock import ManualClock
from flowfabric.stores.valkey import library as library_module
from flowfabric.stores.valkey.library import library, make_library
from flowfabric.stores.valkey.library_use import delete_unused_libraries
from flowfabric.stores.valkey.store import ValkeyStore

NEXT_YEAR_MS = int(time() + 365 * 86400) * 1000  # when no library is in use that others loaded


async def contents(store: ValkeyStore, home: str, *, feed_ids: bool) -> dict[bytes, Any]:
    """Return all keys of a partition with what they hold; without the ids of feed entries if two runs are compared."""
    read, found = store.client.read, dict[bytes, Any]()
    for key in sorted(await read(home, "KEYS", f"{home}*")):
        kind = await read(home, "TYPE", key)
        if kind == b"hash":
            flat = await read(home, "HGETALL", key)
            found[key] = dict(zip(flat[::2], flat[1::2], strict=True))
            if key.endswith(b":h") and not feed_ids:
                found[key] = {name: len(ids) for name, ids in found[key].items()}
        elif kind == b"zset":
            found[key] = await read(home, "ZRANGE", key, 0, -1, "WITHSCORES")
        else:
            found[key] = [(id_ if feed_ids else None, said) for id_, said in await read(home, "XRANGE", key, "-", "+")]
    return {key: value for key, value in found.items() if value}  # a stream without entries is none


def library_body() -> str:
    """Return the Lua code of the library without the catalog."""
    folder = Path(library_module.__file__).with_name("lua")
    return "\n".join(folder.joinpath(f"{name}.lua").read_text() for name in library_module._FILES)


@asynccontextmanager
async def opened(vk: ValkeyStore, clock: ManualClock, body: str) -> AsyncIterator[ValkeyStore]:
    """Open another store on the same database, whose functions are these."""
    other = ValkeyStore(vk.client.address, clock)
    other._library = make_library(body)
    other.client.library = other._library.text
    for part in (other, other._claimer):
        part._functions = other._library.functions.__getitem__
    await other.open(migrate=False)
    try:
        yield other
    finally:
        await delete_unused_libraries(other.client, library(), NEXT_YEAR_MS)
        await other.close()


def replaced(*fragments: tuple[str, str]) -> str:
    """Return the Lua code with these fragments replaced, each of which occurs once."""
    body = library_body()
    for old, new in fragments:
        assert body.count(old) == 1, old
        body = body.replace(old, new)
    return body
