"""The ground that is measured on: a scratch store, and a bare table beside it to compare with."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Protocol
from urllib.parse import urlsplit

import msgspec

from flowfabric.errors import InvalidInput

BATCH = 100  # rows that the control inserts, claims and finishes at a time


class Control(Protocol):
    """A bare table through the same driver: no fence, no history, no events; what the server can do at best."""

    async def insert(self, payloads: Sequence[bytes]) -> None:
        """Insert these, `BATCH` at a time, each batch durable before the next."""
        ...

    async def drain(self) -> int:
        """Claim `BATCH` rows, finish them with a result, until none is left; how many there were."""
        ...

    async def latencies(self, payload: bytes, *, count: int, per_second: int) -> list[float]:
        """Milliseconds from the insert of one row to its claim by whoever was told of it, at a low rate."""
        ...

    async def chains(self, chains: int, steps: int, in_flight: int) -> int:
        """Create chains and work them off, so many at a time: each end starts the next step; how many steps ended."""
        ...

    async def cancel(self, rows: int) -> float:
        """Seconds that it takes to cancel so many rows that wait."""
        ...

    async def vacuum(self) -> None:
        """Do now what the server does by itself within a minute: clear away rows that are dead."""
        ...


async def paced(count: int, per_second: int) -> AsyncIterator[int]:
    """So many numbers, so many of them a second."""
    begun = perf_counter()
    for number in range(count):
        await asyncio.sleep(max(0.0, begun + number / per_second - perf_counter()))
        yield number


class ScratchStore(msgspec.Struct, frozen=True):
    """Where to measure."""

    url: str
    durability: str
    versions: dict[str, str]
    control: Control | None = None
    shared: bool = True  # whether a second engine on this address sees the same rows


def scratch_store(url: str) -> AbstractAsyncContextManager[ScratchStore]:
    """An empty store of the named kind, on the same server or disk; removed at the end."""
    match url.partition("://")[0]:
        case "sqlite":
            return _sqlite(url)
        case "postgresql" | "postgres":
            try:
                from flowfabric.bench.postgres import postgres_scratch_store
            except ImportError as missing:
                raise InvalidInput("url: Postgres needs its driver: pip install 'flowfabric[postgres]'") from missing

            return postgres_scratch_store(url)
        case _:
            return _as_named(url)


@asynccontextmanager
async def _as_named(url: str) -> AsyncIterator[ScratchStore]:
    yield ScratchStore(url, "none: rows live and die with the process", {}, shared=False)


@asynccontextmanager
async def _sqlite(url: str) -> AsyncIterator[ScratchStore]:
    from flowfabric.bench.sqlite import SQLiteControl, sqlite_versions

    parts = urlsplit(url)
    with tempfile.TemporaryDirectory(prefix="ff-bench-", dir=Path(parts.path[1:]).parent) as folder:
        control = SQLiteControl(Path(folder) / "control.db")
        own = f"sqlite:///{folder}/scratch.db" + (f"?{parts.query}" if parts.query else "")
        level = "NORMAL" if "synchronous=normal" in parts.query.lower() else "FULL"
        try:
            yield ScratchStore(
                own, f"WAL, synchronous={level}; acknowledged after the shared commit", sqlite_versions(), control
            )
        finally:
            control.close()
