"""How a busy event loop yields to the threads that read and write, and how they batch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowfabric.model.change import Insert
from flowfabric.stores.sqlite import SQLiteStore, connection_thread
from tests.stores.sample_rows import change, execution


class StillLoop(asyncio.SelectorEventLoop):
    """A loop whose time the test advances."""

    now = 100.0

    def time(self) -> float:
        return self.now


@pytest.fixture
def loop() -> Iterator[StillLoop]:
    still = StillLoop()
    yield still
    still.close()


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    claimed: list[float] = []
    monkeypatch.setattr(connection_thread, "time", SimpleNamespace(sleep=claimed.append))
    return claimed


def advance(loop: StillLoop, seconds: float) -> None:
    """Let time pass and run what falls due."""
    loop.now += seconds
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))


def some_jobs(loop: StillLoop, number: int) -> list[connection_thread.ConnectionJob]:
    return [connection_thread.ConnectionJob(lambda db: None, loop) for _ in range(number)]


def test_a_loop_yields_once_for_all_waiting_jobs(loop: StillLoop, naps: list[float]) -> None:
    """It yields again after the same time, and no more once nothing waits."""
    patience, jobs = connection_thread.GilYielder(), some_jobs(loop, 5)
    for job in jobs:
        patience.add(job)

    advance(loop, connection_thread.YIELD_AFTER_S * 1.01)
    assert naps == [connection_thread.YIELD_S]
    for job in jobs[1:]:
        patience.remove(job)
    advance(loop, connection_thread.YIELD_AFTER_S * 1.01)
    assert naps == [connection_thread.YIELD_S] * 2
    patience.remove(jobs[0])
    advance(loop, connection_thread.YIELD_AFTER_S * 1.01)
    assert naps == [connection_thread.YIELD_S] * 2


def test_a_loop_does_not_yield_for_jobs_that_finish_quickly(loop: StillLoop, naps: list[float]) -> None:
    """This holds however long some job waits, if none waits for long."""
    patience, before = connection_thread.GilYielder(), some_jobs(loop, 1)[0]
    patience.add(before)
    for job in some_jobs(loop, 10):
        advance(loop, connection_thread.YIELD_AFTER_S * 0.2)
        patience.add(job)
        advance(loop, connection_thread.YIELD_AFTER_S * 0.2)
        patience.remove(before)
        before = job

    assert naps == []


@pytest.mark.parametrize(("patience_s", "transactions"), [(60.0, 1), (0.0, 5)])
async def test_jobs_that_arrive_together_are_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float, transactions: int
) -> None:
    """This holds even for a transaction that is too old for new jobs, unless that takes far too long."""
    monkeypatch.setattr(connection_thread, "MAX_JOIN_AGE_S", 0.0)
    monkeypatch.setattr(connection_thread, "MAX_JOIN_AGE_QUEUED_S", patience_s)
    store = SQLiteStore(tmp_path / "ff.db")
    await store.open(migrate=True)
    commits: list[bool] = []

    def hook() -> bool:
        commits.append(True)
        return False  # Let the transaction pass.

    await store._writer.run(lambda db: db.set_commit_hook(hook))
    commits.clear()

    changes = [change(Insert(execution(f"n{number}"))) for number in range(5)]
    answers = await asyncio.gather(*(store.commit([one]) for one in changes))
    assert [None] not in answers
    assert len(commits) == transactions
    await store.close()
