"""`ff bench suspend` measures waits and streams on every store, and leaves no files."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from flowfabric.bench.suspend import SuspendReport, suspend
from tests.cli.terminal import Terminal


def assert_sensible(report: SuspendReport) -> None:
    parts = (report.suspend_p50_ms, report.signal_p50_ms, report.running_p50_ms, report.commit_p50_ms)
    assert all(part > 0 for part in parts)
    assert max(parts) <= report.resume_p99_ms
    assert report.resume_p50_ms <= report.resume_p99_ms
    assert report.frames_per_s > 0
    assert 0 < report.tail_p50_ms <= report.tail_p99_ms


async def test_waits_and_streams_are_measured_in_memory() -> None:
    report = await suspend("memory://", rounds=5, frames=256, tails=3)

    assert_sensible(report)
    assert (report.rounds, report.frames, report.tails) == (5, 256, 3)


def test_waits_and_streams_are_measured_on_sqlite(tmp_path: Path) -> None:
    report = asyncio.run(suspend(f"sqlite:///{tmp_path}/app.db", rounds=5, frames=256, tails=3))

    assert_sensible(report)
    assert list(tmp_path.iterdir()) == []


async def test_waits_and_streams_are_measured_on_postgres(database: str) -> None:
    report = await suspend(database, rounds=5, frames=256, tails=3)

    assert_sensible(report)


@pytest.mark.slow
def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    ff = Terminal(f"sqlite:///{tmp_path}/named.db")
    arguments = ("bench", "suspend", "--rounds", "3", "--frames", "256", "--tails", "2")

    document = ff.document(*arguments)
    table = ff.stdout(*arguments)

    assert (document["frames"], document["store"]) == (256, "sqlite")
    assert "suspend → signal → running again" in table
    assert "durability: WAL, synchronous=FULL" in table
