"""How a busy loop makes room for the threads that read and write, and what they do together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from flowfabric.model.change import Insert
from flowfabric.stores.sqlite import SQLiteStore, connection_thread
from tests.stores.samples import change, execution


class StillLoop(asyncio.SelectorEventLoop):
    """Time passes when it is told to."""

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
    taken: list[float] = []
    monkeypatch.setattr(connection_thread, "time", SimpleNamespace(sleep=taken.append))
    return taken


def passes(loop: StillLoop, seconds: float) -> None:
    """Let time pass, and have done what falls due."""
    loop.now += seconds
    loop.run_until_complete(asyncio.sleep(0))
    loop.run_until_complete(asyncio.sleep(0))


def some_jobs(loop: StillLoop, number: int) -> list[connection_thread.ConnectionJob]:
    return [connection_thread.ConnectionJob(lambda db: None, loop) for _ in range(number)]


def test_a_loop_steps_aside_once_for_all_work_that_waits(loop: StillLoop, naps: list[float]) -> None:
    """Again when as much time has gone by, and no more once nothing waits."""
    patience, jobs = connection_thread.GilYielder(), some_jobs(loop, 5)
    for job in jobs:
        patience.add(job)

    passes(loop, connection_thread.YIELD_AFTER_S * 1.01)
    assert naps == [connection_thread.YIELD_S]
    for job in jobs[1:]:
        patience.remove(job)
    passes(loop, connection_thread.YIELD_AFTER_S * 1.01)
    assert naps == [connection_thread.YIELD_S] * 2
    patience.remove(jobs[0])
    passes(loop, connection_thread.YIELD_AFTER_S * 1.01)
    assert naps == [connection_thread.YIELD_S] * 2


def test_a_loop_does_not_step_aside_for_work_that_comes_and_goes(loop: StillLoop, naps: list[float]) -> None:
    """However long there is something that waits, if none of it waits for long."""
    patience, before = connection_thread.GilYielder(), some_jobs(loop, 1)[0]
    patience.add(before)
    for job in some_jobs(loop, 10):
        passes(loop, connection_thread.YIELD_AFTER_S * 0.2)
        patience.add(job)
        passes(loop, connection_thread.YIELD_AFTER_S * 0.2)
        patience.remove(before)
        before = job

    assert naps == []


@pytest.mark.parametrize(("patience_s", "transactions"), [(60.0, 1), (0.0, 5)])
async def test_what_came_together_is_written_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float, transactions: int
) -> None:
    """Even by a transaction that is too old for anything new, unless that takes far too long."""
    monkeypatch.setattr(connection_thread, "MAX_JOIN_AGE_S", 0.0)
    monkeypatch.setattr(connection_thread, "MAX_JOIN_AGE_QUEUED_S", patience_s)
    store = SQLiteStore(tmp_path / "ff.db")
    await store.open(migrate=True)
    commits: list[bool] = []

    def hook() -> bool:
        commits.append(True)
        return False  # let it pass

    await store._writer.run(lambda db: db.set_commit_hook(hook))
    commits.clear()

    changes = [change(Insert(execution(f"n{number}"))) for number in range(5)]
    answers = await asyncio.gather(*(store.commit([one]) for one in changes))
    assert [None] not in answers
    assert len(commits) == transactions
    await store.close()
