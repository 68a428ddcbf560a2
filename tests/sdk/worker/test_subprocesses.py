"""Handlers in subprocesses: they use several processors, can be killed, and their death is reported."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flowfabric import Fabric, RunFailed, errors
from flowfabric.model.states import PublicState
from flowfabric.sdk.worker import subprocesses
from tests.sdk import service
from tests.sdk.conftest import running_worker, wait_until, wait_until_true


@pytest.fixture
async def local(file_app: Fabric, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    """The service's app on a file."""
    monkeypatch.setattr(service.app, "url", file_app.url)
    async with service.app as app:
        yield app


@pytest.fixture
async def shared(shared_app: Fabric, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fabric]:
    """The service's app on a store that its processes can open."""
    monkeypatch.setattr(service.app, "url", shared_app.url)
    async with service.app as app:
        yield app


async def test_a_handler_runs_in_a_process_and_its_context_works_there(shared: Fabric) -> None:
    async with running_worker(shared, slots=2):
        total, pid = await (await service.squares.submit(1000)).result(30)
        again, same = await (await service.squares.submit(1000)).result(30)
    assert total == again == 2 * sum(n * n for n in range(1000))
    assert pid == same != os.getpid(), "a process is used again"


async def test_a_run_of_a_schedule_knows_its_instant_in_a_process(shared: Fabric) -> None:
    leap_days = await shared.schedules.create("leap days", service.scheduled_for.s(), cron="30 2 29 2 *")
    await leap_days.backfill(datetime(2024, 1, 1, tzinfo=UTC), datetime(2024, 12, 31, tzinfo=UTC))
    async with running_worker(shared):
        [run] = (await leap_days.describe()).runs
        assert await service.scheduled_for.run(run.execution_id).result(30) == "leap days 2024-02-29 02:30"
        assert await (await service.scheduled_for.submit()).result(30) is None


async def test_a_timeout_kills_the_process(local: Fabric, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running_worker(local):
        run = await service.stubborn.submit(str(tmp_path / "pid"))
        with pytest.raises(RunFailed, match="has not returned after 0.7 s; its process was killed"):
            await run.result(30)
        [attempt] = await run.attempts()
        assert attempt.failure_category == "timeout"
        await wait_until_true(lambda: _is_gone(tmp_path / "pid"))
    assert f"{run.id}: attempt 0 of {service.stubborn.name} failed: TimeoutError" in caplog.text


async def test_a_cancelled_run_kills_its_process(
    local: Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.stubborn, "timeout_s", None)
    async with running_worker(local, lease_ttl="300ms"):
        run = await service.stubborn.submit(str(tmp_path / "pid"))
        await wait_until_true(lambda: _is_written(tmp_path / "pid"), 30)
        await run.cancel("no longer needed")
        await wait_until_true(lambda: _is_gone(tmp_path / "pid"))


async def test_a_killed_process_leaves_nothing_behind(local: Fabric, tmp_path: Path) -> None:
    """Its resources are released at once, not at the next garbage collection, which is rare in a worker."""
    gc.disable()
    try:
        async with running_worker(local):
            await _is_killed_by_its_timeout(tmp_path / "pid")
            before = _open_files()
            for _ in range(3):
                await _is_killed_by_its_timeout(tmp_path / "pid")
            await wait_until_true(lambda: _open_files() <= before)
            await wait_until_true(lambda: not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists())
    finally:
        gc.enable()


async def test_a_process_whose_caller_left_is_killed_once_it_has_started(
    local: Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, may_start = threading.Event(), threading.Event()
    made: list[int] = []

    class Slow(subprocesses._Subprocess):
        def __init__(self) -> None:
            asked.set()
            may_start.wait(30)
            super().__init__()
            made.append(self._process.pid or 0)

    monkeypatch.setattr(subprocesses, "_Subprocess", Slow)
    async with running_worker(local, lease_ttl="300ms") as worker:
        run = await service.stubborn.submit(str(tmp_path / "pid"))
        await wait_until_true(asked.is_set, 30)
        await run.cancel("no longer needed")
        await wait_until_true(lambda: not worker.running)
        may_start.set()
        await wait_until_true(lambda: bool(made) and not Path(f"/proc/{made[0]}").exists())


async def test_the_start_of_a_process_does_not_count_against_the_timeout(
    local: Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_begin = threading.Event()
    begin = subprocesses._Subprocess.start_call

    def slow(cell: subprocesses._Subprocess, order: subprocesses.SubprocessCall) -> bool:
        return may_begin.wait(30) and begin(cell, order)

    monkeypatch.setattr(subprocesses._Subprocess, "start_call", slow)
    ttl_ms = 3000  # renewed every second; a busy machine must not cost the lease
    async with running_worker(local, lease_ttl=f"{ttl_ms}ms"):
        run = await service.stubborn.submit(str(tmp_path / "pid"))
        began = await (await local.engine()).ping()

        async def is_renewed_after_the_timeout() -> bool:
            lease = (await run.describe()).current_lease
            return lease is not None and lease.expires_at > began + 700 + ttl_ms

        await wait_until(is_renewed_after_the_timeout, 30)
        may_begin.set()
        with pytest.raises(RunFailed, match="has not returned after 0.7 s; its process was killed"):
            await run.result(30)
    assert len(await run.attempts()) == 1


async def test_a_process_that_never_starts_its_handler_is_killed(
    local: Fabric, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()
    monkeypatch.setattr(subprocesses, "START_TIMEOUT_S", 0.2)
    monkeypatch.setattr(subprocesses._Subprocess, "start_call", lambda *_: over.wait(30) and False)
    async with running_worker(local):
        run = await service.stubborn.submit(str(tmp_path / "pid"))
        with pytest.raises(RunFailed, match=r"the process of .*stubborn has not begun after 0.2 s; it was killed"):
            await run.result(30)
        over.set()


async def test_a_failure_and_the_death_of_a_process_are_reported_with_their_reasons(local: Fabric) -> None:
    async with running_worker(local, slots=1):
        failed = await service.wrong.submit()
        with pytest.raises(RunFailed, match="ValueError: no good"):
            await failed.result(30)
        assert [attempt.failure_category for attempt in await failed.attempts()] == ["ValueError"]
        left = await service.leaving.submit()
        with pytest.raises(RunFailed, match="SystemExit: 3"):
            await left.result(30)
        run = await service.hopeless.submit()
        with pytest.raises(RunFailed, match=r"died \(exit code 7\)"):
            await run.result(30)
        assert [attempt.failure_category for attempt in await run.attempts()] == ["infra_crash"]
        assert (await (await service.squares.submit(3)).result(30))[0] == 10


async def test_a_durable_function_parks_in_its_process_and_resumes(local: Fabric, tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    async with running_worker(local):
        run = await service.sleeper.submit(str(marks))

        async def suspended() -> bool:
            return await run.state() is PublicState.SUSPENDED

        await wait_until(suspended, 30)
        await run.signal("go", "hello")
        assert await run.result(30) == "slept after hello"
    assert marks.read_text() == "step\n"


async def test_async_handlers_may_run_in_processes_and_two_run_at_once(local: Fabric) -> None:
    async with running_worker(local, slots=2):
        runs = [await service.awaiting.submit(0.05) for _ in range(2)]
        pids = await asyncio.gather(*(run.result(30) for run in runs))
    assert len({*pids, os.getpid()}) == 3


def test_a_function_that_a_process_could_not_import_is_refused() -> None:
    app = Fabric("memory://")
    with pytest.raises(errors.InvalidInput, match="top level of a module"):

        @app.task(isolation="process")
        def inner() -> None: ...


async def _is_killed_by_its_timeout(pid_file: Path) -> None:
    run = await service.stubborn.submit(str(pid_file))
    with pytest.raises(RunFailed, match="its process was killed"):
        await run.result(30)


def _open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def _is_written(file: Path) -> bool:
    return file.exists() and bool(file.read_text())


def _is_gone(file: Path) -> bool:
    pid = file.read_text()
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it may go between the open and the read
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"
