"""The engine elsewhere: it looks like the engine to applications and workers, and asks a server for everything.

It decides nothing and keeps nothing: the rules, the store and the sweeps are the server's. What the engine can do and
no route offers is refused by its name.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Any, Self

import httpx2

from flowfabric import errors
from flowfabric.api.admin import StoreInfo
from flowfabric.client.decoding import decode_as
from flowfabric.client.durable import ClientDurable
from flowfabric.client.executions import ClientExecutions
from flowfabric.client.limits import ClientLimits
from flowfabric.client.reads import ClientReads
from flowfabric.client.results import ClientResults
from flowfabric.client.stream_writer import ClientStreamWriter
from flowfabric.client.transport import RETRY_FOR_S, HttpTransport
from flowfabric.clock import StoreClockEstimate
from flowfabric.engine.engine import Capabilities, Engine, SchemaVersion
from flowfabric.engine.metrics.registry import Metrics
from flowfabric.ids import ExecutionId, LaneId, Minter, RandomMinter, mint_solo, parse_lane_id
from flowfabric.settings import Secret, Settings

CONNECT_RETRY_FOR_S = 2.0  # an address that is wrong is told soon


class RemoteEngine(ClientExecutions, ClientDurable, ClientReads, ClientResults, ClientLimits, ClientStreamWriter):
    """The verbs of `Engine` that the SDK uses, with the same signatures. Made with `connect`."""

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
        """`patience_s` is how long a server may be away before callers hear of it."""
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
        self._outgoing, self._senders = {}, {}
        self._awaited, self._unpolled, self._pollers = {}, {}, set()

    @classmethod
    async def connect(cls, url: str, **given: Any) -> Self:
        """One that has heard from its server."""
        engine = cls(url, **given)
        try:
            await engine.ping()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def ping(self) -> int:
        """The store's time, in milliseconds since the epoch."""
        info = decode_as(
            (await self.transport.request("GET", "/v1/store", retry_for_s=CONNECT_RETRY_FOR_S)).body, StoreInfo
        )
        self.backend, self.partitions, self.release = info.backend, info.partitions, info.release
        self.schema = SchemaVersion(info.schema_version, info.schema_version)
        self.estimate.update(info.now)
        return info.now

    def capabilities(self) -> Capabilities:
        """Which operations of the engine there are over a server."""
        mine = (name for name in dir(type(self)) if not name.startswith("_") and hasattr(Engine, name))
        return Capabilities(self.backend, tuple(sorted(mine)))

    def new_execution_id(self, lane_id: str = "default") -> ExecutionId:
        """A fresh id for an execution of its own, on the partition of its lane."""
        return mint_solo(LaneId(parse_lane_id(lane_id)), self.partitions, self.minter)

    def limit_commands(self, command_s: float) -> None:
        """Give up on a silent connection after this long, or sooner."""
        self.transport.deadlines = self.transport.deadlines.limited(command_s)

    def start_sweeps(self) -> None:
        """Nothing: the server sweeps."""

    async def close(self) -> None:
        """Let what is on its way arrive, and let go of the connections. A second call does nothing."""
        for task in self._pollers:
            task.cancel()
        for awaited in self._awaited.values():
            awaited.outcome.cancel()
        if under_way := (*self._pollers, *self._senders.values(), *self._ending_claims):
            await asyncio.wait(under_way)
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
