"""The remote engine: fits `EngineAPI`, and each operation is a request to a server.

It decides and stores nothing: rules, store and sweeps are on the server. Operations of `Engine` without a route raise
`Unavailable`. `Engine` documents the operations; here only those have a docstring that differ.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import httpx2

from flowfabric import errors
from flowfabric.client.bulk import ClientBulk
from flowfabric.client.durable import ClientDurable
from flowfabric.client.executions import ClientExecutions
from flowfabric.client.limits import ClientLimits
from flowfabric.client.overview import ClientOverview
from flowfabric.client.reads import ClientReads
from flowfabric.client.results import ClientResults
from flowfabric.client.schedules import ClientSchedules
from flowfabric.client.stream_writer import ClientStreamWriter, frame_batcher
from flowfabric.client.transport import RETRY_FOR_S, HttpTransport
from flowfabric.clock import StoreClockEstimate
from flowfabric.engine.engine import Capabilities, Engine, SchemaVersion
from flowfabric.engine.metrics.recorder import Metrics
from flowfabric.ids import Minter, RandomMinter
from flowfabric.settings import Secret, Settings


class RemoteEngine(
    ClientExecutions,
    ClientDurable,
    ClientReads,
    ClientOverview,
    ClientBulk,
    ClientSchedules,
    ClientResults,
    ClientLimits,
    ClientStreamWriter,
):
    """An engine behind a server, with the signatures of `Engine`. Use `connect` to create one."""

    is_shared = True  # other processes, threads and loops reach the same store

    def __init__(
        self,
        url: str,
        *,
        token: Secret | None = None,
        settings: Settings | None = None,
        minter: Minter | None = None,
        retry_for_s: float = RETRY_FOR_S,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """`retry_for_s` is how long requests are retried while the server is unavailable."""
        self.minter = minter or RandomMinter()
        self.settings = settings or Settings()
        self.partitions = self.settings.partitions
        self.estimate = StoreClockEstimate()
        self.backend = self.release = ""
        self.schema = SchemaVersion(0, 0)
        self.metrics = Metrics()
        deadlines = self.settings.deadlines
        self.transport = HttpTransport(
            url, token=token, minter=self.minter, retry_for_s=retry_for_s, deadlines=deadlines, transport=transport
        )
        self._claim_keys, self._waiting_claims, self._ending_claims = {}, {}, set()
        self._frames = frame_batcher(self.transport)
        self._awaited, self._unpolled, self._pollers = {}, {}, set()
        self.spreads, self._spreads_read_at, self._reading_spreads = {}, None, None

    @classmethod
    async def connect(cls, url: str, **options: Any) -> Self:
        """Create a remote engine and check that its server answers."""
        engine = cls(url, **options)
        try:
            await engine.ping()
        except BaseException:
            await engine.close()
            raise
        return engine

    def capabilities(self) -> Capabilities:
        """Return the operations of the engine that a server offers."""
        operations = (name for name in dir(type(self)) if not name.startswith("_") and hasattr(Engine, name))
        return Capabilities(self.backend, tuple(sorted(operations)))

    def limit_commands(self, command_s: float) -> None:
        if type(command_s) not in (int, float) or not command_s > 0:
            raise errors.InvalidInput("command_s: not a positive number of seconds")
        self.transport.deadlines = self.transport.deadlines.limited(command_s)

    def start_sweeps(self) -> None:
        """Do nothing: the server sweeps."""

    async def close(self) -> None:
        for task in self._pollers:
            task.cancel()
        for awaited in self._awaited.values():
            awaited.outcome.cancel()
        reading = () if self._reading_spreads is None else (self._reading_spreads,)
        if in_flight := (*self._pollers, *self._ending_claims, *reading):
            await asyncio.wait(in_flight)
        await self._frames.drain()
        await self.transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(Engine, name):
            raise errors.Unavailable(name, "this needs the store itself; a server does not offer it to its clients")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
