"""Workers: slots, renewal beside a blocked loop, lost leases, draining."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from flowfabric import Context, Fabric, Retry, Run, RunFailed, errors
from flowfabric.engine_protocol import EngineAPI
from flowfabric.model.change import Change
from flowfabric.model.scheduling.worker import WorkerEntry
from flowfabric.model.states import PublicState
from flowfabric.stores.verdicts import Verdict
from tests.conftest import STORES
from tests.executions import new_execution
from tests.sdk.conftest import running_worker, wait_until


async def test_no_more_runs_at_once_than_there_are_slots(app: Fabric) -> None:
    now, most = 0, 0

    @app.task
    async def busy() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1

    runs = [await busy.submit() for _ in range(20)]
    async with running_worker(app, slots=3):
        await asyncio.gather(*(run.result(30) for run in runs))

    assert most == 3


@pytest.mark.parametrize("url", STORES, indirect=True)  # The store of a server is in another process.
async def test_the_next_run_starts_while_the_completion_of_the_last_one_is_in_flight(
    app: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    @app.task
    async def work(number: int) -> int:
        begun.append(number)
        return number

    runs = [await work.submit(number) for number in range(2)]
    engine: Any = await app.engine()
    store = engine.store
    commit, may_land = store.commit, asyncio.Event()

    async def slow(changes: Sequence[Change], *hint: Any) -> list[Verdict]:
        if any(change.template is not None for change in changes):
            await may_land.wait()
        landed: list[Verdict] = await commit(changes, *hint)
        return landed

    monkeypatch.setattr(store, "commit", slow)

    async def both_have_begun() -> bool:
        return len(begun) == 2

    async with running_worker(app, slots=1):
        await wait_until(both_have_begun)
        assert [await run.state() for run in runs] == [PublicState.ACTIVE] * 2, (
            "nothing is reported before it is on disk"
        )
        may_land.set()
        assert [await run.result(20) for run in runs] == [0, 1]


async def test_a_worker_without_a_free_slot_reports_it(app: Fabric) -> None:
    go_on = asyncio.Event()

    @app.task
    async def work(ctx: Context) -> None:
        await go_on.wait()

    engine = await app.engine()
    run = await work.submit()

    async def is_full() -> bool:
        return engine.metrics.counter_value("ff_worker_at_capacity") > 0

    async with running_worker(app, slots=1):
        await wait_until(is_full)
        go_on.set()
        await run.result(20)


async def test_a_loop_that_is_blocked_for_three_leases_does_not_lose_its_work(
    shared_app: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    @shared_app.task
    async def rude(ctx: Context) -> int:
        time.sleep(6)  # noqa: ASYNC251 - three times the lease
        return ctx.attempt

    async with running_worker(shared_app, lease_ttl="2s"):
        run = await rude.submit()
        assert await run.result(20) == 0

    assert len(await run.attempts()) == 1
    assert "time.sleep(6)" in caplog.text, "the blocker is reported with its stack"


async def test_a_loop_that_is_blocked_beyond_its_limit_loses_its_work(
    file_app: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    @file_app.task
    async def dead(ctx: Context) -> int:
        if not ctx.attempt:
            time.sleep(1.5)  # noqa: ASYNC251
        return ctx.attempt

    async with running_worker(file_app, lease_ttl="300ms", stall_limit="500ms"):
        run = await dead.submit()
        assert await run.result(20) == 1, "another worker could have had it"
    assert "no longer renewed" in caplog.text


@pytest.mark.parametrize("how", ["blocks the loop", "does not listen"])
async def test_a_handler_that_runs_after_its_timeout_loses_its_work(
    shared_app: Fabric, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    over = asyncio.Event()
    begun: list[int] = []  # on a busy machine the first lease may expire before its handler begins

    @shared_app.task(timeout="200ms", retry=Retry(max=0))
    async def deaf(ctx: Context) -> int:
        begun.append(ctx.attempt)
        if len(begun) > 1:
            return ctx.attempt
        if how == "blocks the loop":
            time.sleep(4)  # noqa: ASYNC251
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await over.wait()
        return 99

    async with running_worker(shared_app, lease_ttl="1s"):
        run = await deaf.submit()
        try:
            assert await run.result(20) == begun[1] > begun[0], "another worker could have had it"
        finally:
            over.set()

    initial, *later = [attempt.attempt_type.value for attempt in await run.attempts()]
    assert (initial, set(later), len(later)) == ("initial", {"reclaim"}, begun[1])
    assert "is still running after its 0.2 s" in caplog.text


async def test_a_late_completion_keeps_its_lease(file_app: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    @file_app.task(timeout="100ms")
    async def quick(ctx: Context) -> int:
        return ctx.attempt

    engine = await file_app.engine()
    tell, lands = engine.complete_many, asyncio.Event()
    ends: set[int] = set()

    async def slow(*given: Any, **ways: Any) -> Any:
        await lands.wait()
        return await tell(*given, **ways)

    monkeypatch.setattr(engine, "complete_many", slow)
    async with running_worker(file_app, lease_ttl="300ms"):
        run = await quick.submit()

        async def was_renewed_long_after_its_time() -> bool:
            if (lease := (await run.describe()).current_lease) is not None:
                ends.add(lease.expires_at)
            return len(ends) > 8

        await wait_until(was_renewed_long_after_its_time, 20)
        lands.set()
        assert await run.result(20) == 0


async def test_a_heartbeat_survives_a_failure(
    file_app: Fabric, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    faults: list[Exception] = [RuntimeError("a bug"), errors.StoreUnavailable("away", backend="x", source="other")]

    connect = file_app.connect

    async def connecting(**ways: Any) -> EngineAPI:
        engine = await connect(**ways)
        if faults:
            fault = faults.pop()
            if isinstance(fault, errors.StoreUnavailable):
                await engine.close()
                raise fault
            monkeypatch.setattr(engine, "renew_many", _raising(fault))
        return engine

    monkeypatch.setattr(file_app, "connect", connecting)

    @file_app.task
    async def long(ctx: Context) -> int:
        await asyncio.sleep(3.6)
        return ctx.attempt

    async with running_worker(file_app, lease_ttl="3s"):
        assert await (await long.submit()).result(20) == 0
    assert not faults
    assert "no connection" in caplog.text
    assert "the heartbeat failed" in caplog.text


def _raising(fault: Exception) -> Any:
    async def call(*args: Any, **kwargs: Any) -> None:
        raise fault

    return call


async def test_a_worker_is_in_the_registry_while_it_works(app: Fabric) -> None:
    @app.task(lane="mail")
    async def send() -> None: ...

    engine = await app.engine()
    async with running_worker(app, capabilities={"smtp"}, presence_ttl="150ms") as worker:
        listed: list[WorkerEntry] = []

        async def is_listed() -> bool:
            listed[:] = (await engine.list_workers(app.namespace)).entries
            return bool(listed)

        await wait_until(is_listed)
        [entry] = listed
        assert (entry.worker_instance_id, entry.worker_id) == (worker.instance_id, worker.worker_id)
        assert set(entry.lanes) == {"mail"}
        assert set(entry.capabilities) == {"smtp"}

        async def has_beaten_since() -> bool:
            page = await engine.list_workers(app.namespace)
            return bool(page.entries) and page.entries[0].last_heartbeat_ms >= entry.last_heartbeat_ms + 150

        await wait_until(has_beaten_since)
    assert (await engine.list_workers(app.namespace)).entries == []


@pytest.mark.parametrize(("lease_ttl", "stays_ms"), [("15s", 30_000), ("200ms", 1000)])
async def test_a_worker_stays_in_the_registry_for_two_leases(app: Fabric, lease_ttl: str, stays_ms: int) -> None:
    @app.task
    async def send() -> None: ...

    engine = await app.engine()
    async with running_worker(app, lease_ttl=lease_ttl):
        ttls: list[int] = []

        async def is_listed() -> bool:
            ttls[:] = [entry.liveness_ttl_ms for entry in (await engine.list_workers(app.namespace)).entries]
            return bool(ttls)

        await wait_until(is_listed)
    assert ttls == [stays_ms]


async def test_a_worker_that_the_registry_lost_registers_again(app: Fabric) -> None:
    @app.task
    async def send() -> None: ...

    engine = await app.engine()
    async with running_worker(app, presence_ttl="150ms") as worker:

        async def is_listed() -> bool:
            return bool((await engine.list_workers(app.namespace)).entries)

        await wait_until(is_listed)
        await engine.mark_worker_dead(namespace=app.namespace, worker_instance_id=worker.instance_id)
        await wait_until(is_listed)


async def test_a_thread_that_ignores_cancellation_keeps_its_slot_until_it_returns(
    app: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    heard, go_on = threading.Event(), threading.Event()
    left: list[bool] = []

    @app.task(timeout="50ms")
    def deaf(ctx: Context) -> None:
        go_on.wait(20)
        left.append(ctx.cancelled)
        heard.set()

    @app.task
    async def quick() -> str:
        return "ran"

    async with running_worker(app, slots=1):
        run = await deaf.submit()
        with pytest.raises(RunFailed, match="has not returned after 0.05 s"):
            await run.result(20)
        later = await quick.submit()
        with pytest.raises(TimeoutError):
            await later.result(0.1)
        go_on.set()
        assert await later.result(20) == "ran"
    assert heard.is_set()
    assert left == [True]
    assert "keeps its slot" in caplog.text


async def test_a_handler_knows_how_long_its_lease_lasts(app: Fabric) -> None:
    @app.task
    async def look(ctx: Context) -> float:
        assert not ctx.cancelled
        return ctx.lease_seconds_left

    async with running_worker(app, lease_ttl="20s"):
        assert 15 < await (await look.submit()).result(20) <= 20


async def test_a_handler_whose_lease_was_revoked_is_cancelled(app: Fabric) -> None:
    cancelled = asyncio.Event()

    @app.task
    async def long(ctx: Context) -> int:
        if ctx.attempt:
            return ctx.attempt
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return 0

    async with running_worker(app, lease_ttl="300ms"):
        run = await long.submit()
        engine = await app.engine()
        await wait_until(lambda: _is(run, PublicState.ACTIVE))
        await engine.revoke_lease(run.id, reason="bad node")
        await asyncio.wait_for(cancelled.wait(), 10)
        assert await run.result(20) == 1


async def test_draining_finishes_running_handlers_and_releases_the_rest_without_costing_an_attempt(app: Fabric) -> None:
    running: list[str] = []

    @app.task
    async def quick(ctx: Context) -> str:
        running.append("quick")
        await asyncio.sleep(0.05)
        return "done"

    @app.task
    async def endless(ctx: Context) -> str:
        running.append("endless")
        if running.count("endless") == 1:
            await asyncio.sleep(3600)
        return f"attempt {ctx.attempt}"

    async def both_run() -> bool:
        return len(running) == 2

    first, second = await quick.submit(), await endless.submit()
    async with running_worker(app, grace="300ms"):
        await wait_until(both_run)
    assert await first.result(5) == "done"
    assert await second.state() in (PublicState.DELAYED, PublicState.WAITING)

    async with running_worker(app):
        assert await second.result(20) == "attempt 0"
    assert len(await second.attempts()) == 1


async def test_work_of_an_unknown_kind_is_left_to_others(app: Fabric, caplog: pytest.LogCaptureFixture) -> None:
    @app.task
    async def known() -> None: ...

    engine = await app.engine()
    stranger = await new_execution(engine, execution_kind="not.here")

    async def delayed() -> bool:
        return await engine.read_execution_state(stranger) is PublicState.DELAYED

    async with running_worker(app):
        await wait_until(delayed)
    assert "no task 'not.here' here" in caplog.text
    assert "the worker that had it knows no task 'not.here'" in (await engine.explain(stranger)).sentence
    assert await engine.read_total_attempt_count(stranger) == 1


async def _is(run: Run[Any], state: PublicState) -> bool:
    return await run.state() is state


async def fail_in_a_task_group() -> None:
    """Catch the failure of a task group. Before Python 3.13 it leaves the task with a request to cancel it."""

    async def fail() -> None:
        raise LookupError

    with contextlib.suppress(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())


async def test_a_cancelled_future_after_a_failed_task_group_is_a_failure_of_the_attempt(app: Fabric) -> None:
    @app.task(retry=Retry(max=1, base="10ms"))
    async def confused() -> None:
        await fail_in_a_task_group()
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async with running_worker(app):
        run = await confused.submit()
        with pytest.raises(RunFailed, match="CancelledError"):
            await run.result(20)
        assert len(await run.attempts()) == 2


async def test_a_timeout_after_a_failed_task_group_is_a_timeout(app: Fabric) -> None:
    @app.task(timeout="100ms", retry=Retry(max=0))
    async def slow() -> None:
        await fail_in_a_task_group()
        await asyncio.sleep(60)

    async with running_worker(app):
        with pytest.raises(RunFailed, match="has not returned after"):
            await (await slow.submit()).result(20)
