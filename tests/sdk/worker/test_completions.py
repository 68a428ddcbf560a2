"""How a worker reports completions: in batches, once, and never for an execution whose lease it lost."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from flowfabric import Context, Fabric, Run, RunFailed, current
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.change import Change
from flowfabric.model.states import PublicState
from flowfabric.rules import validation
from flowfabric.sdk.worker.completions import LARGE_BATCH
from flowfabric.sdk.worker.outcome import Outcome
from flowfabric.sdk.worker.runner import AttemptRunner
from flowfabric.sdk.worker.worker import Worker
from flowfabric.stores.verdicts import Verdict
from tests.conftest import STORES
from tests.executions import claim_one
from tests.sdk.conftest import running_worker, wait_until_suspended, wait_until_true

on_stores = pytest.mark.parametrize("url", STORES, indirect=True)  # The store of a server is in another process.

OTHERS: contextvars.ContextVar[str] = contextvars.ContextVar("others", default="nobody's")


async def store_of(app: Fabric) -> Any:
    engine: Any = await app.engine()
    return engine.store


def intercept_completions(store: Any, monkeypatch: pytest.MonkeyPatch, before: Callable[[int], Any]) -> None:
    """Await `before` ahead of every commit that completes executions, with their number."""
    commit = store.commit

    async def committing(changes: Sequence[Change], *hint: Any) -> list[Verdict]:
        if ends := sum(change.template is not None for change in changes):
            await before(ends)
        result: list[Verdict] = await commit(changes, *hint)
        return result

    monkeypatch.setattr(store, "commit", committing)


class HeldCompletions:
    """The completions that wait for an event to be committed: how many runs each of them ends."""

    def __init__(self) -> None:
        self.reported: list[int] = []
        self.may_land = asyncio.Event()

    async def hold(self, ends: int) -> None:
        self.reported.append(ends)
        await self.may_land.wait()


async def hold_completions(app: Fabric, monkeypatch: pytest.MonkeyPatch) -> HeldCompletions:
    held = HeldCompletions()
    intercept_completions(await store_of(app), monkeypatch, held.hold)
    return held


@on_stores
async def test_completions_of_one_moment_are_one_commit(app: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task
    async def work(number: int) -> int:
        return number

    reported: list[int] = []

    async def count(ends: int) -> None:
        reported.append(ends)

    runs = await work.submit_many(range(20))
    intercept_completions(await store_of(app), monkeypatch, count)
    async with running_worker(app, slots=20):
        assert [await run.result(20) for run in runs] == [*range(20)]
    assert reported == [20]


@on_stores
async def test_single_completions_are_batched_while_others_are_in_flight(
    app: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = [asyncio.Event() for _ in range(6)]

    @app.task
    async def work(number: int) -> int:
        await may_end[number].wait()
        return number

    runs = await work.submit_many(range(6))
    held = await hold_completions(app, monkeypatch)
    async with running_worker(app, slots=6) as worker:
        for number, event in enumerate(may_end[:2]):
            event.set()
            await wait_until_true(lambda count=number + 1: len(held.reported) == count)  # type: ignore[misc]
        for event in may_end[2:]:
            event.set()
        await wait_until_true(lambda: worker.running == 0)
        assert held.reported == [1, 1], "two are under way, and the others wait for them"
        held.may_land.set()
        assert [await run.result(20) for run in runs] == [*range(6)]
    assert held.reported == [1, 1, 4]


@on_stores
async def test_completions_wait_for_each_other_behind_a_large_batch_in_flight(
    app: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    may_end = [asyncio.Event() for _ in range(3)]

    @app.task
    async def work(number: int) -> int:
        begun.append(number)
        await may_end[max(0, number - 9)].wait()
        return number

    runs = await work.submit_many(range(12))
    held = await hold_completions(app, monkeypatch)
    async with running_worker(app, slots=12) as worker:
        await wait_until_true(lambda: len(begun) == 12)
        may_end[0].set()
        await wait_until_true(lambda: held.reported == [10])
        for event in may_end[1:]:
            event.set()
            for _ in range(100):  # enough loop iterations to be sent alone
                await asyncio.sleep(0)
        await wait_until_true(lambda: worker.running == 0)
        assert held.reported == [10]
        held.may_land.set()
        assert [await run.result(20) for run in runs] == [*range(12)]
    assert held.reported == [10, 2]


@on_stores
async def test_as_many_completions_as_are_in_flight_are_sent_beside_them(
    app: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    may_end = [asyncio.Event() for _ in range(3)]

    @app.task
    async def work(number: int) -> int:
        begun.append(number)
        await may_end[number // LARGE_BATCH].wait()
        return number

    runs = await work.submit_many(range(3 * LARGE_BATCH))
    held = await hold_completions(app, monkeypatch)
    async with running_worker(app, slots=len(runs)) as worker:
        await wait_until_true(lambda: len(begun) == len(runs))
        for event, sent in zip(may_end, (1, 2, 2), strict=True):
            left = worker.running - LARGE_BATCH
            event.set()
            await wait_until_true(lambda left=left: worker.running == left)  # type: ignore[misc]
            await wait_until_true(lambda sent=sent: len(held.reported) == sent)  # type: ignore[misc]
        assert held.reported == [LARGE_BATCH, LARGE_BATCH], "two are under way, and the others wait for them"
        held.may_land.set()
        assert [await run.result(20) for run in runs] == [*range(len(runs))]
    assert held.reported == [LARGE_BATCH] * 3


@on_stores
async def test_a_worker_claims_no_more_while_too_many_completions_are_unsent(
    app: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    @app.task
    async def work(number: int) -> int:
        started.append(number)
        return number

    runs = await work.submit_many(range(20))
    engine: Any = await app.engine()
    held = await hold_completions(app, monkeypatch)
    async with running_worker(app, slots=2):
        await wait_until_true(lambda: len(started) == 6)
        await wait_until_true(lambda: engine.metrics.counter_value("ff_worker_at_capacity") > 0)
        for _ in range(10):  # It had this many opportunities to claim more.
            assert await engine.claim("another", worker_id="w", worker_instance_id="w-1") is None
        assert len(started) == 6, "two rounds are not reported, and the third one was begun when there was one less"
        held.may_land.set()
        assert [await run.result(20) for run in runs] == [*range(20)]


async def test_a_result_that_is_too_large_fails_its_run_only(app: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_PAYLOAD_BYTES", 1000)

    @app.task
    async def say(length: int) -> str:
        return "x" * length

    async with running_worker(app):
        large, small = await say.submit_many([2000, 3])
        with pytest.raises(RunFailed, match="result_payload: 2002 bytes, the limit is 1000"):
            await large.result(20)
        assert await small.result(20) == "xxx"
        assert len(await large.attempts()) == 1


@on_stores
async def test_a_stopping_worker_waits_for_completions_in_flight(app: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    run, worker, working, held = await _with_completion_in_flight(app, monkeypatch)
    worker.stop()
    done, _ = await asyncio.wait((working,), timeout=0.05)
    assert not done
    held.may_land.set()
    await working
    assert await run.result(5) == "done"


@on_stores
async def test_a_completion_that_does_not_arrive_is_abandoned_at_a_fast_stop_and_the_run_released(
    app: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, worker, working, held = await _with_completion_in_flight(app, monkeypatch)
    worker.stop()
    worker.stop()
    await working
    assert await run.state() in (PublicState.DELAYED, PublicState.WAITING)
    held.may_land.set()
    again = asyncio.create_task((other := Worker(app)).work())
    assert await run.result(20) == "done"
    assert len(await run.attempts()) == 1
    other.stop()
    await again


async def _with_completion_in_flight(
    app: Fabric, monkeypatch: pytest.MonkeyPatch
) -> tuple[Run[str], Worker, asyncio.Task[None], HeldCompletions]:
    """A run whose handler has finished and whose completion is held."""

    @app.task
    async def work() -> str:
        return "done"

    run = await work.submit()
    held = await hold_completions(app, monkeypatch)
    worker = Worker(app)
    task = asyncio.create_task(worker.work())
    await wait_until_true(lambda: bool(held.reported), 20)
    return run, worker, task, held


# -- one attempt ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begun", [False, True])
async def test_a_cancelled_attempt_finishes_once_whether_or_not_it_had_started(file_app: Fabric, begun: bool) -> None:
    ran: list[str] = []

    @file_app.task
    async def endless() -> None:
        ran.append("began")
        await asyncio.sleep(3600)

    ended: list[tuple[Claimed, Outcome | None]] = []
    engine: Any = await file_app.engine()
    await endless.submit()
    claimed = await claim_one(engine)
    attempts = AttemptRunner(
        file_app,
        engine,
        lease_expires_at=lambda _: claimed.lease_expires_at,
        on_outcome=lambda *outcome: ended.append(outcome),
        on_slot_freed=lambda: None,
    )
    [own] = attempts.start([claimed])
    if begun:
        await wait_until_true(lambda: bool(ran))
    attempts.cancel(own, "lease lost")
    await wait_until_true(lambda: bool(ended))
    await asyncio.sleep(0)
    assert ended == [(claimed, None)]
    assert bool(ran) is begun
    attempts.close()


async def test_a_context_variable_of_a_handler_stays_in_it(app: Fabric) -> None:
    seen: list[str] = []

    @app.task
    async def work(name: str) -> None:
        seen.append(OTHERS.get())
        OTHERS.set(name)

    async with running_worker(app, slots=1):
        for name in ("ana", "bo"):
            await (await work.submit(name)).result(20)
    assert seen == ["nobody's"] * 2
    assert OTHERS.get() == "nobody's"


async def test_the_current_context_exists_for_a_handler_that_did_not_request_it(app: Fabric) -> None:
    @app.task
    async def below() -> tuple[str, bool]:
        from_threads: list[Context] = []
        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(lambda: from_threads.append(current()),))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        here = await asyncio.create_task(_deep_down())
        return here.run_id, all(one is here for one in from_threads) and current() is here

    async def _deep_down() -> Context:
        return current()

    async with running_worker(app):
        run = await below.submit()
        assert await run.result(20) == (run.id, True)


async def test_a_durable_function_that_uses_the_current_context_parks(app: Fabric) -> None:
    @app.task
    async def wait() -> str:
        got = await asyncio.create_task(_receive())
        return got or "silence"

    async def _receive() -> str | None:
        return await current().receive("word", str)

    async with running_worker(app, slots=1):
        run = await wait.submit()
        await wait_until_suspended(run)
        await run.signal("word", "go")
        assert await run.result(20) == "go"
