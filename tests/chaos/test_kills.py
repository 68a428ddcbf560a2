"""Workers are killed with SIGKILL every second: every run finishes once, and no recorded step runs again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos.killed_workers import TTL_MS, Report, Takeover, run_with_kills
from tests.conftest import emptied, emptied_valkey


def store_url(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if kind == "sqlite":
        return f"sqlite:///{folder}/ff.db"
    if kind == "valkey":
        return emptied_valkey()
    return asyncio.run(emptied(request.getfixturevalue("own_database")))


def assert_every_takeover_was_in_time(report: Report) -> None:
    assert report.takeovers, "no kill hit any work"
    late = [one for one in report.takeovers if one.is_late]
    assert not late, late[:5]


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
def test_runs_survive_kills(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = store_url(kind, request, tmp_path)

    report = asyncio.run(run_with_kills(url, tmp_path, orders=250, kills=3, at_work=4, seed=7))

    assert report.kills == 3
    assert_every_takeover_was_in_time(report)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
def test_two_thousand_runs_survive_half_a_minute_of_kills(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = store_url(kind, request, tmp_path)

    report = asyncio.run(run_with_kills(url, tmp_path, orders=2000, kills=30, at_work=3, seed=11))

    print(f"{report.kills} kills, {report.reruns} steps ran twice before their result was recorded,", end=" ")
    print(f"{len(report.takeovers)} takeovers, the slowest after {max(one.waited_ms for one in report.takeovers)} ms")
    assert report.kills == 30
    assert_every_takeover_was_in_time(report)


@pytest.mark.parametrize(
    ("waited_ms", "stretch", "is_late"),
    [(TTL_MS + 900, 1.0, False), (TTL_MS + 1100, 1.0, True), (TTL_MS + 1900, 2.0, False), (TTL_MS + 2100, 2.0, True)],
)
def test_a_late_takeover_is_noticed_however_slow_the_machine_is(waited_ms: int, stretch: float, is_late: bool) -> None:
    assert Takeover(waited_ms, stretch).is_late is is_late
