"""A program that works on a file which may not grow any further, until it may: the kernel refuses writes in the middle.

Prints as JSON how many changes were written before, why the next ones were not, and what was found afterwards.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from pathlib import Path

import apsw

from flowfabric.errors import StoreUnavailable
from flowfabric.model.change import Change, Insert
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.queries import Read
from flowfabric.stores.sqlite import SQLiteStore
from tests.stores.samples import change, event, execution, payload

ROOM = 400_000  # bytes that the log may have beyond what it has at the beginning


def step(number: int) -> Change:
    name = f"e{number:03}"
    return change(
        Insert(execution(name, line=QueueKey(f"lane-{number}"))),
        Insert(payload(name, b"x" * 20_000)),
        events=[event(name, lease="x")],
    )


def let_grow(path: str, *, by: int | None) -> None:
    """Let no file grow beyond the log as it is and so many bytes; None lifts that."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = most if by is None else Path(f"{path}-wal").stat().st_size + by
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))


async def main(path: str) -> None:
    store = SQLiteStore(path)
    await store.open(migrate=True)
    let_grow(path, by=ROOM)
    written = 0
    causes: list[tuple[str, bool, bool]] = []
    while len(causes) < 3:
        try:
            await store.commit([step(written)])
            written += 1
        except StoreUnavailable as failure:
            causes.append((type(failure.__cause__).__name__, failure.retryable, failure.in_doubt))
    half = [len((await store.load([Read(Execution, ())])).rows[0]), len(await store.queues())]
    let_grow(path, by=None)
    for number in range(written, written + 20):
        await store.commit([step(number)])
    whole = [len((await store.load([Read(Execution, ())])).rows[0]), len(await store.queues())]
    await store.close()
    sound = apsw.Connection(path).pragma("integrity_check")
    print(json.dumps({"written": written, "causes": causes, "half": half, "whole": whole, "sound": sound}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
