"""Four worker processes of which one is killed every second, and the checks afterwards."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from flowfabric import Engine, Run
from flowfabric.cursors import FROM_THE_START
from tests.chaos import app as killed_app
from tests.chaos.app import STEPS, TRACE_VARIABLE, traces
from tests.chaos.control import Sample, samples, stretch_between
from tests.postgres_install import ROOT

WORKERS = 4
SLOTS = 60  # More than the work needs: a takeover should wait for a lease, not for a slot.
TTL_MS = 2000
SCAN_MS = 1000  # On an idle machine, a takeover follows the expiry of a lease within this time.
STEP_S = 0.2
TIMEOUT_S = 60


class WorkerPool:
    """Workers that are replaced when they are killed, and the time of each kill."""

    def __init__(self, url: str, folder: Path) -> None:
        self._command = [sys.executable, "-m", "flowfabric.cli", "worker", "tests.chaos.app:app", "--store", url]
        self._command += ["--slots", str(SLOTS), "--lease-ttl", f"{TTL_MS}ms"]
        self._environ = {**os.environ, TRACE_VARIABLE: str(folder / "traces")}
        self._environ["PYTHONPATH"] = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        self._folder = folder
        self._log = (folder / "log").open("wb")
        self._workers: list[subprocess.Popen[bytes]] = []
        self.control = folder / "control"
        self._control = subprocess.Popen([sys.executable, "-m", "tests.chaos.control", str(self.control)], cwd=ROOT)
        self.killed_at: dict[int, int] = {}

    def start(self) -> None:
        """Start one more worker."""
        self._workers.append(
            subprocess.Popen(
                self._command,
                cwd=ROOT,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
        )

    def kill_one(self, chance: random.Random, at_work: int, now: int) -> bool:
        """Kill a worker at the store's time `now` and start another; return False if fewer than `at_work` work."""
        busy = {trace.pid for trace in traces(self._folder / "traces")}
        found = [worker for worker in self._workers if worker.pid in busy]
        if len(found) < at_work:
            return False
        worker = chance.choice(found)
        assert worker.poll() is None, "a worker ended by itself"
        worker.kill()
        self.killed_at[worker.pid] = now
        worker.wait()
        self._workers.remove(worker)
        self.start()
        return True

    def close(self) -> None:
        """Stop all workers."""
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.wait(TIMEOUT_S)
        self._control.kill()
        self._control.wait()
        self._log.close()


@contextmanager
def worker_pool(url: str, folder: Path) -> Iterator[WorkerPool]:
    """Run workers and stop them at the end."""
    pool = WorkerPool(url, folder)
    try:
        for _ in range(WORKERS):
            pool.start()
        yield pool
    finally:
        pool.close()


class Takeover(msgspec.Struct, frozen=True):
    """How long the work of a killed worker waited for another one, and how much slower the machine was meanwhile."""

    waited_ms: int
    stretch: float

    @property
    def is_late(self) -> bool:
        return self.waited_ms > TTL_MS + SCAN_MS * self.stretch


class Report(msgspec.Struct, frozen=True):
    """The numbers of a run."""

    kills: int
    reruns: int  # steps that had run when their worker was killed, before their result was recorded
    takeovers: list[Takeover]


async def run_with_kills(url: str, folder: Path, *, orders: int, kills: int, at_work: int, seed: int) -> Report:
    """Kill a worker every second, `kills` times, wait until all runs have finished, and check the outcome.

    At least `orders` runs are submitted as a stream, which continues until all kills are done. Processes take time to
    start, and only running ones can take work over: no worker is killed while fewer than `at_work` are working.
    """
    app, chance = killed_app.app, random.Random(seed)
    app.url = url
    async with app:
        engine: Any = await app.engine()
        feed = await engine.subscribe_completion(FROM_THE_START)
        runs: list[Run[int]] = []
        with worker_pool(url, folder) as pool:
            ended: Counter[str] = Counter()
            began = kill_at = last_event_at = time.monotonic()
            while len(pool.killed_at) < kills or len(ended) < max(orders, len(runs)):
                due = 1 + int((time.monotonic() - began) * orders / kills)
                if due > len(runs) and (len(pool.killed_at) < kills or len(runs) < orders):
                    some = (killed_app.order.s(number, STEP_S) for number in range(len(runs), due))
                    runs += await killed_app.order.submit_many(some)
                is_due = len(pool.killed_at) < kills and time.monotonic() >= kill_at
                if is_due and pool.kill_one(chance, at_work, await engine.ping()):
                    kill_at = time.monotonic() + 1
                if (end := await feed.next(timeout_s=0.05)) is not None:
                    ended[end.execution_id] += 1
                    last_event_at = time.monotonic()
                assert time.monotonic() - last_event_at < TIMEOUT_S, f"{len(runs) - len(ended)} did not end"
        while (end := await feed.next(timeout_s=0)) is not None:
            ended[end.execution_id] += 1
        assert ended == {run.id: 1 for run in runs}
        assert [await run.result() for run in runs] == [number + len(STEPS) for number in range(len(runs))]
        taken_over = await _takeovers(engine, [run.id for run in runs], pool.killed_at, samples(pool.control))
        reruns = await _count_reruns(engine, [run.id for run in runs], folder)
        return Report(len(pool.killed_at), reruns, taken_over)


async def _count_reruns(engine: Engine, runs: list[str], folder: Path) -> int:
    """Check that each step ran and did not run again after its result was recorded; return the reruns before that."""
    ran: dict[tuple[str, str], list[int]] = defaultdict(list)  # the attempts of each step
    for trace in traces(folder / "traces"):
        ran[trace.run, trace.step].append(trace.attempt)
    reruns = 0
    for run in runs:
        memos = await engine.read_steps(run)
        assert [memo.name for memo in sorted(memos, key=lambda memo: memo.recorded_at)] == list(STEPS)
        for memo in memos:
            attempts = ran[run, memo.name]
            assert memo.attempt_index in attempts, f"{memo.name} of {run} never ran in the attempt that recorded it"
            assert max(attempts) == memo.attempt_index, f"{memo.name} of {run} ran again after its result was recorded"
            assert len(set(attempts)) == len(attempts), f"{memo.name} of {run} ran twice in one attempt"
            reruns += len(attempts) - 1
    return reruns


async def _takeovers(
    engine: Engine, runs: list[str], killed_at: dict[int, int], control: list[Sample]
) -> list[Takeover]:
    """Return how long the work of killed workers waited; check that no work was taken from a living one."""
    found = []
    for run in runs:
        attempts = await engine.attempt_history(run)
        for before, after in pairwise(attempts):
            pid = int(before.worker_instance_id.split(":")[1])
            assert after.attempt_type.value == "reclaim", f"{run} was retried, though nothing failed"
            assert pid in killed_at, f"{run} was taken from {before.worker_instance_id}, which lives"
            stretch = stretch_between(control, killed_at[pid], after.started_at)
            found.append(Takeover(after.started_at - killed_at[pid], stretch))
    return found
