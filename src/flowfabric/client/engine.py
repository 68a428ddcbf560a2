"""The remote engine: fits `EngineAPI`, and each operation is a request to a server.

It decides and stores nothing: rules, store and sweeps are on the server. Operations of `Engine` without a route raise
`Unavailable`.
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
from flowfabric.client.stream_writer import ClientStreamWriter, frame_batcher
from flowfabric.client.transport import RETRY_FOR_S, HttpTransport
from flowfabric.clock import StoreClockEstimate
from flowfabric.engine.engine import Capabilities, Engine, SchemaVersion
from flowfabric.engine.metrics.registry import Metrics
from flowfabric.ids import ExecutionId, LaneId, Minter, RandomMinter, mint_solo, parse_lane_id
from flowfabric.settings import Secret, Settings

CONNECT_RETRY_FOR_S = 2.0  # short, so that a wrong address is reported soon


class RemoteEngine(ClientExecutions, ClientDurable, ClientReads, ClientResults, ClientLimits, ClientStreamWriter):
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

    async def ping(self) -> int:
        """Return the clock of the store, in milliseconds since the epoch."""
        info = decode_as(
            (await self.transport.request("GET", "/v1/store", retry_for_s=CONNECT_RETRY_FOR_S)).body, StoreInfo
        )
        self.backend, self.partitions, self.release = info.backend, info.partitions, info.release
        self.schema = SchemaVersion(info.schema_version, info.schema_version)
        self.estimate.update(info.now)
        return info.now

    def capabilities(self) -> Capabilities:
        """Return the operations of the engine that a server offers."""
        operations = (name for name in dir(type(self)) if not name.startswith("_") and hasattr(Engine, name))
        return Capabilities(self.backend, tuple(sorted(operations)))

    def new_execution_id(self, lane_id: str = "default") -> ExecutionId:
        """Mint the id of an execution outside a flow, on the partition of its lane."""
        return mint_solo(LaneId(parse_lane_id(lane_id)), self.partitions, self.minter)

    def limit_commands(self, command_s: float) -> None:
        """Give up on a silent connection after `command_s`, unless a shorter limit is set."""
        if type(command_s) not in (int, float) or not command_s > 0:
            raise errors.InvalidInput("command_s: not a positive number of seconds")
        self.transport.deadlines = self.transport.deadlines.limited(command_s)

    def start_sweeps(self) -> None:
        """Do nothing: the server sweeps."""

    async def close(self) -> None:
        """Finish what is in flight and close the connections. A second call does nothing."""
        for task in self._pollers:
            task.cancel()
        for awaited in self._awaited.values():
            awaited.outcome.cancel()
        if in_flight := (*self._pollers, *self._ending_claims):
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
