"""Several processes on one store: each execution is done once, whichever process is killed, and without a sweeper."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from flowfabric.connector import open_engine
from flowfabric.cursors import FROM_THE_START
from flowfabric.engine.engine import Engine
from flowfabric.model.execution import Execution
from flowfabric.model.states import AttemptType, PublicState
from flowfabric.testing.invariants import check_invariants, scan_all
from tests.chaos.worker import submit
from tests.chaos.worker_processes import WorkerProcess, worker_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


async def rows_and_outcomes(engine: Engine) -> tuple[list[Execution], Counter[str]]:
    """Return every execution, and how many completion events each has."""
    rows: list[Execution] = await scan_all(engine.store, Execution)
    outcomes: Counter[str] = Counter()
    submit_until = await engine.subscribe_completion(FROM_THE_START)
    while news := await submit_until.next(timeout_s=0):
        outcomes[news.execution_id] += 1
    return rows, outcomes


def ids(workers: list[WorkerProcess], event: str) -> Counter[str]:
    return Counter(words[0] for worker in workers for words in worker.lines(event))


async def run_four_processes(url: str, count: int) -> None:
    async with await open_engine(url) as engine:  # Create the schema before the processes start.
        with worker_processes() as start_worker:
            workers = [start_worker("drain", url, "--submit", count // 4) for _ in range(4)]
            codes = [await asyncio.to_thread(worker.join, 240) for worker in workers]

        assert codes == [0, 0, 0, 0], "".join(workers[0].errors)
        assert [worker.errors for worker in workers] == [[], [], [], []]  # No process met a lock or any other error.
        rows, outcomes = await rows_and_outcomes(engine)
        submitted = ids(workers, "submitted")
        assert len(rows) == len(submitted) == count
        assert ids(workers, "completed") == outcomes == submitted
        assert all(row.public_state is PublicState.COMPLETED and row.lease_epoch == 1 for row in rows)
        assert sum(bool(worker.lines("completed")) for worker in workers) > 1
        await check_invariants(engine)


async def test_four_processes_on_one_file_do_five_thousand_executions_once_each(tmp_path: Path) -> None:
    await run_four_processes(f"sqlite:///{tmp_path / 'ff.db'}", 5000)


async def test_four_processes_on_one_server_do_their_executions_once_each(database: str) -> None:
    await run_four_processes(database, 1000)


async def kill_workers(url: str, deaths: int) -> None:
    """Kill one worker after the other in the middle of its work while two live on."""
    async with await open_engine(url) as engine:
        with worker_processes() as start_worker:
            steady = [start_worker("toil", url, "--ttl", 800) for _ in range(2)]
            dead = []
            for number in range(deaths):
                victim = start_worker("hold" if number % 2 else "toil", url, "--ttl", 800)
                await submit_until(engine, lambda: bool(victim.lines("holding")) or len(victim.lines("completed")) > 12)  # noqa: B023
                await asyncio.to_thread(victim.kill)
                dead.append(victim)
            for row in await scan_all(engine.store, Execution):
                assert await engine.await_end(row.execution_id, max_wait_ms=60_000)

        rows, outcomes = await rows_and_outcomes(engine)
        assert outcomes == dict.fromkeys((row.execution_id for row in rows), 1)
        assert all(row.public_state is PublicState.COMPLETED for row in rows)
        completed = ids([*steady, *dead], "completed")
        assert completed.keys() <= outcomes.keys()
        assert set(completed.values()) == {1}
        assert any(row.attempt_type is AttemptType.RECLAIM for row in rows)  # by ordinary claims: there is no sweeper
        assert all(row.lease_epoch == row.lease_reclaim_count + 1 for row in rows)
        for row in rows:
            assert await engine.get_execution_result(row.execution_id) == row.execution_id.encode()
        assert [worker.errors for worker in (*steady, *dead)] == [[]] * (deaths + 2)
        await check_invariants(engine)


async def submit_until(engine: Engine, condition: Callable[[], bool]) -> None:
    """Submit work, a little at a time, until a condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await submit(engine, 10, reported=False)
            await asyncio.sleep(0.05)


async def test_work_of_killed_processes_is_done_by_others(url: str) -> None:
    await kill_workers(url, deaths=4)


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_work_of_many_killed_processes_is_done_by_others(url: str) -> None:
    await kill_workers(url, deaths=80)
