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


def see_through_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a server and its client between the apps of all worlds and their engines."""

    async def remote_engine(self: World) -> Engine:
        wire = httpx2.ASGITransport(app=create_app(self.engine))
        engine = RemoteEngine("http://world", settings=WORLD_SETTINGS, minter=SeededMinter(7), transport=wire)
        engine.estimate = StoreClockEstimate(self.now_ms)  # exact: two clocks may round a duration differently
        engine.is_shared = False  # leases are renewed on the loop with virtual time
        await engine.ping()
        self.engine.start_sweeps()  # as servers do
        return cast("Engine", engine)

    monkeypatch.setattr(World, "engine_for_app", remote_engine)
    for module in (client, workers, results, leases):  # polling is not needed here
        monkeypatch.setattr(module, "MAX_WAIT_MS", RARE_INTERVAL_MS)
