"""Worlds whose app uses the engine through the server and the client, in memory and in virtual time."""

from __future__ import annotations

from typing import cast

import httpx2
import pytest

from flowfabric.client import RemoteEngine, leases, results
from flowfabric.clock import StoreClockEstimate
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.server import create_app
from flowfabric.server.routes import client, workers
from flowfabric.testing.world import RARE_INTERVAL_MS, WORLD_SETTINGS, World

TURNS = 2000  # iterations of the loop: a request takes more of them than a call


class ExactClock(StoreClockEstimate):
    """The store's time itself: tests check durations to the millisecond, which two clocks may round differently."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def now(self) -> int:
        return self._world.now_ms()


def see_through_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a server and its client between the apps of all worlds and their engines."""

    async def remote_engine(self: World) -> Engine:
        wire = httpx2.ASGITransport(app=create_app(self.engine))
        engine = RemoteEngine("http://world", settings=WORLD_SETTINGS, minter=SeededMinter(7), transport=wire)
        engine.estimate = ExactClock(self)
        engine.is_shared = False  # leases are renewed on the loop with virtual time
        await engine.ping()
        self.engine.start_sweeps()  # as servers do
        return cast("Engine", engine)

    monkeypatch.setattr(World, "engine_for_app", remote_engine)
    monkeypatch.setattr("flowfabric.testing.world.SETTLE_YIELDS", TURNS)
    for module in (client, workers, results, leases):  # polling is not needed here
        monkeypatch.setattr(module, "MAX_WAIT_MS", RARE_INTERVAL_MS)
