"""Workers die with SIGKILL every second, and every run ends once, with no step done twice after it was done."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.conftest import emptied
from tests.kill.killing import TAKEOVER_MS, Tale, survive


def address(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if kind == "sqlite":
        return f"sqlite:///{folder}/ff.db"
    return asyncio.run(emptied(request.getfixturevalue("own_database")))


def assert_all_was_taken_over(tale: Tale) -> None:
    assert tale.takeovers_ms, "no kill hit any work"
    assert max(tale.takeovers_ms) <= TAKEOVER_MS, sorted(tale.takeovers_ms)[-5:]


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_runs_survive_kills(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    url = address(kind, request, tmp_path)

    tale = asyncio.run(survive(url, tmp_path, orders=250, kills=3, at_work=4, seed=7))

    assert tale.kills == 3
    assert_all_was_taken_over(tale)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_two_thousand_runs_survive_half_a_minute_of_kills(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = address(kind, request, tmp_path)

    tale = asyncio.run(survive(url, tmp_path, orders=2000, kills=30, at_work=3, seed=11))

    print(f"{tale.kills} kills, {tale.reruns} steps ran twice before they were kept,", end=" ")
    print(f"{len(tale.takeovers_ms)} takeovers, the slowest after {max(tale.takeovers_ms)} ms")
    assert tale.kills == 30
    assert_all_was_taken_over(tale)
