"""How a busy loop makes room for the threads that read and write."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from flowfabric.stores.sqlite import desk


async def test_a_loop_steps_aside_once_for_all_work_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again when as much time has gone by."""
    now = 100.0
    naps: list[float] = []
    monkeypatch.setattr(desk, "time", SimpleNamespace(monotonic=lambda: now, sleep=naps.append))
    monkeypatch.setattr(desk._Aside, "until", 0.0)
    loop = asyncio.get_running_loop()
    jobs = [desk.Job(lambda db: None, loop) for _ in range(5)]

    def all_nudge() -> None:
        for job in jobs:
            desk._step_aside(job)
            job.nudge.cancel()

    all_nudge()
    assert naps == [desk.ASIDE_S]
    now += desk.PATIENCE_S
    all_nudge()
    assert naps == [desk.ASIDE_S] * 2
