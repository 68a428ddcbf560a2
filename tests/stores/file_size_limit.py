"""A program that writes to a file whose growth the kernel limits for a while.

It prints as JSON how many changes were written before, why the next ones failed, and what was found afterwards.
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
from tests.stores.sample_rows import change, event, execution, payload

GROWTH_BYTES = 400_000  # bytes by which the log may grow


def step(number: int) -> Change:
    name = f"e{number:03}"
    return change(
        Insert(execution(name, line=QueueKey(f"lane-{number}"))),
        Insert(payload(name, b"x" * 20_000)),
        events=[event(name, lease="x")],
    )


def limit_growth(path: str, *, by: int | None) -> None:
    """Let no file grow beyond the present log and this many bytes; None removes the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = most if by is None else Path(f"{path}-wal").stat().st_size + by
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))


async def main(path: str) -> None:
    store = SQLiteStore(path)
    await store.open(migrate=True)
    limit_growth(path, by=GROWTH_BYTES)
    written = 0
    causes: list[tuple[str, bool, bool]] = []
    while len(causes) < 3:
        try:
            await store.commit([step(written)])
            written += 1
        except StoreUnavailable as failure:
            causes.append((type(failure.__cause__).__name__, failure.retryable, failure.in_doubt))
    half = [len((await store.load([Read(Execution, ())])).rows[0]), len(await store.queues())]
    limit_growth(path, by=None)
    for number in range(written, written + 20):
        await store.commit([step(number)])
    whole = [len((await store.load([Read(Execution, ())])).rows[0]), len(await store.queues())]
    await store.close()
    sound = apsw.Connection(path).pragma("integrity_check")
    print(json.dumps({"written": written, "causes": causes, "half": half, "whole": whole, "sound": sound}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
