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
from flowfabric.client.decoding import read
from flowfabric.client.durable import Waiting
from flowfabric.client.executions import Submitting
from flowfabric.client.limits import Spending
from flowfabric.client.reads import Reading
from flowfabric.client.results import Ending
from flowfabric.client.stream_writer import Frames
from flowfabric.client.transport import PATIENCE_S, Wire
from flowfabric.clock import Estimate
from flowfabric.engine.engine import Capabilities, Engine, Schema
from flowfabric.engine.metrics.registry import Meters
from flowfabric.ids import ExecutionId, LaneId, Minter, RandomMinter, mint_solo, parse_lane_id
from flowfabric.server.routes.client import StoreInfo
from flowfabric.settings import Secret, Settings

FIRST_PATIENCE_S = 2.0  # an address that is wrong is told soon


class RemoteEngine(Submitting, Waiting, Reading, Ending, Spending, Frames):
    """The verbs of `Engine` that the SDK uses, with the same signatures. Made with `connect`."""

    is_shared = True  # other processes, threads and loops reach the same store

    def __init__(
        self,
        url: str,
        *,
        token: Secret | None = None,
        settings: Settings | None = None,
        minter: Minter | None = None,
        patience_s: float = PATIENCE_S,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """`patience_s` is how long a server may be away before callers hear of it."""
        self.minter = minter or RandomMinter()
        self.settings = settings or Settings()
        self.partitions = self.settings.partitions
        self.estimate = Estimate()
        self.backend = self.release = ""
        self.schema = Schema(0, 0)
        self.meters = Meters()
        deadlines = self.settings.deadlines
        self.wire = Wire(
            url, token=token, minter=self.minter, patience_s=patience_s, deadlines=deadlines, transport=transport
        )
        self._claim_keys, self._claiming, self._ending = {}, {}, set()
        self._outgoing, self._senders = {}, {}
        self._awaited, self._fresh, self._seeing_to = {}, {}, set()

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
        info = read((await self.wire.ask("GET", "/v1/store", patience_s=FIRST_PATIENCE_S)).body, StoreInfo)
        self.backend, self.partitions, self.release = info.backend, info.partitions, info.release
        self.schema = Schema(info.schema_version, info.schema_version)
        self.estimate.hear(info.now)
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
        self.wire.deadlines = self.wire.deadlines.limited(command_s)

    def start_sweeps(self) -> None:
        """Nothing: the server sweeps."""

    async def close(self) -> None:
        """Let what is on its way arrive, and let go of the connections. A second call does nothing."""
        for task in self._seeing_to:
            task.cancel()
        for awaited in self._awaited.values():
            awaited.end.cancel()
        if under_way := (*self._seeing_to, *self._senders.values(), *self._ending):
            await asyncio.wait(under_way)
        await self.wire.close()

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
