"""Feeds are trimmed by the settings of their process, whichever other process sweeps."""

from __future__ import annotations

import asyncio
from typing import Any

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.deployment import SweepLease
from flowfabric.model.event import Topic
from flowfabric.server.settings import from_environment
from flowfabric.settings import FEED_RETENTION_MS, Settings, Sweeps
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Scan
from tests.executions import new_execution

KEPT_MS = 1000
QUIET: dict[str, Any] = {field: 0 for field in Sweeps.__struct_fields__ if field.endswith("_ms")}
TRIMMER = Sweeps(**{**QUIET, "feed_trimmer_ms": 100})


async def wait_for_leases(engine: Engine, count: int) -> list[str]:
    """Wait until this many trimmer leases are held and return their names."""
    async with asyncio.timeout(20):
        while True:
            rows = await engine.store.scan(Scan(SweepLease))
            names = [row.sweep for row in rows if row.sweep.startswith("feed_trimmer")]
            if len(names) >= count:
                return sorted(names)
            await asyncio.sleep(0.01)


async def test_a_feed_is_trimmed_beside_a_server_that_keeps_events_longer(store: Store, clock: ManualClock) -> None:
    serving = Engine(store, minter=SeededMinter(1), settings=Settings(sweeps=TRIMMER))
    own = Engine(store, minter=SeededMinter(2), settings=Settings(sweeps=TRIMMER, feed_retention_ms=KEPT_MS))
    serving.start_sweeps()
    try:
        await wait_for_leases(serving, 1)
        e = await new_execution(own)
        await own.cancel_execution(e)
        clock.advance_ms(KEPT_MS + 1)
        own.start_sweeps()

        async with asyncio.timeout(20):
            while (await store.feed(Topic.COMPLETION, 0, 10)).events:  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.01)
        assert await wait_for_leases(own, 2) == ["feed_trimmer", f"feed_trimmer:{KEPT_MS}"]
    finally:
        await own.stop_sweeps()
        await serving.stop_sweeps()


def test_a_server_setting_decides_how_long_events_are_kept() -> None:
    assert from_environment({"FF_FEED_RETENTION_MS": "5000"}).engine.feed_retention_ms == 5000
    assert from_environment({}).engine.feed_retention_ms == FEED_RETENTION_MS
