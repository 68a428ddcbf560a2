"""The scratch store that is measured, and the control beside it: a bare table to compare with."""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec

from flowfabric import __version__
from flowfabric.connector import VALKEY_SCHEMES
from flowfabric.errors import InvalidInput

BATCH = 100  # rows that the control inserts, claims and finishes at a time


class Control(Protocol):
    """A bare table through the same driver, without fences, history or events: the best that the server can do."""

    async def insert(self, payloads: Sequence[bytes]) -> None:
        """Insert these, `BATCH` at a time, each batch durable before the next."""
        ...

    async def drain(self) -> int:
        """Claim and finish `BATCH` rows at a time until none is left; return how many there were."""
        ...

    async def latencies(self, payload: bytes, *, count: int, per_second: int) -> list[float]:
        """Return the milliseconds from the insert of a row to its claim by a notified worker, at a low rate."""
        ...

    async def chains(self, chains: int, steps: int, in_flight: int) -> int:
        """Create and run chains of steps, `in_flight` at a time; return how many steps were finished."""
        ...

    async def cancel(self, rows: int) -> float:
        """Return the seconds that it takes to cancel this many waiting rows."""
        ...

    async def vacuum(self) -> None:
        """Remove dead rows now, which the server does by itself within a minute."""
        ...


async def paced(count: int, per_second: int) -> AsyncIterator[int]:
    """Yield the numbers up to `count`, at a rate of `per_second`."""
    started = perf_counter()
    for number in range(count):
        await asyncio.sleep(max(0.0, started + number / per_second - perf_counter()))
        yield number


def per_job(before_us: float | None, after_us: float | None, jobs: int) -> float | None:
    """Return the CPU of the servers for each of so many jobs, in microseconds."""
    return None if before_us is None or after_us is None else (after_us - before_us) / jobs


class BenchReport(msgspec.Struct, frozen=True):
    """The fields of every report: what was measured, on which machine."""

    store: str
    durability: str
    versions: dict[str, str]
    cores: int


class ScratchStore(msgspec.Struct, frozen=True):
    """An empty store to measure on."""

    url: str
    durability: str
    versions: dict[str, str]
    control: Control | None = None
    shared: bool = True  # True if a second engine on this URL sees the same rows
    server_cpu_s: Callable[[], Awaitable[float]] | None = None  # CPU that all servers have used, if they know it

    @property
    def kind(self) -> str:
        """The scheme of its URL."""
        return self.url.partition("://")[0]

    @property
    def all_versions(self) -> dict[str, str]:
        """The versions of FlowFabric, Python, and of the server and driver."""
        return {"flowfabric": __version__, "python": platform.python_version(), **self.versions}

    def report_fields(self) -> dict[str, Any]:
        """Return the fields of `BenchReport`."""
        return {
            "store": self.kind,
            "durability": self.durability,
            "versions": self.all_versions,
            "cores": os.cpu_count() or 1,
        }

    async def server_us(self) -> float | None:
        """The microseconds of CPU that all servers have used so far; None where they do not know it."""
        return None if self.server_cpu_s is None else await self.server_cpu_s() * 1e6


def scratch_store(url: str) -> AbstractAsyncContextManager[ScratchStore]:
    """Create an empty store of the same kind, on the same server or disk; it is removed at the end."""
    match url.partition("://")[0]:
        case "sqlite":
            return _sqlite(url)
        case "postgresql" | "postgres":
            try:
                from flowfabric.bench.postgres import postgres_scratch_store
            except ImportError as missing:
                raise InvalidInput("url: Postgres needs its driver: pip install 'flowfabric[postgres]'") from missing

            return postgres_scratch_store(url)
        case scheme if scheme.removesuffix("+cluster") in VALKEY_SCHEMES:
            try:
                from flowfabric.bench.valkey import valkey_scratch_store
            except ImportError as missing:
                raise InvalidInput("url: Valkey needs its driver: pip install 'flowfabric[valkey]'") from missing

            return valkey_scratch_store(url)
        case _:
            return _as_named(url)


@asynccontextmanager
async def _as_named(url: str) -> AsyncIterator[ScratchStore]:
    yield ScratchStore(url, "none: rows are in the memory of the process", {}, shared=False)


@asynccontextmanager
async def _sqlite(url: str) -> AsyncIterator[ScratchStore]:
    from flowfabric.bench.sqlite import SQLiteControl, sqlite_versions

    parts = urlsplit(url)
    with tempfile.TemporaryDirectory(prefix="ff-bench-", dir=Path(parts.path[1:]).parent) as folder:
        control = SQLiteControl(Path(folder) / "control.db")
        scratch_url = f"sqlite:///{folder}/scratch.db" + (f"?{parts.query}" if parts.query else "")
        level = "NORMAL" if "synchronous=normal" in parts.query.lower() else "FULL"
        try:
            yield ScratchStore(
                scratch_url,
                f"WAL, synchronous={level}; acknowledged after the shared commit",
                sqlite_versions(),
                control,
            )
        finally:
            control.close()
