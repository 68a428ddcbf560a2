"""Bulk operations: a filter, a preview, and a durable record that sweeps work off in pages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.sweeps import bulk_operations
from flowfabric.engine.sweeps.bulk_operations import BulkWorker
from flowfabric.ids import SeededMinter
from flowfabric.model.bulk_operation import BulkOperation, BulkState, PinnedExecution
from flowfabric.rules.bulk_operation import RETENTION_MS, BulkStatus
from flowfabric.testing import Loss
from tests.scenarios.env import Env
from tests.scenarios.execution.test_finish import retries
from tests.scenarios.lossy_engine import lossy_engine

SWEEP = "bulk_operations"
OPERATION = "33333333-3333-4333-8333-333333333333"


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_operations, "PAGE_SIZE", 3)


async def waiting(env: Env, count: int, **options: Any) -> list[str]:
    return [await env.create(**options) for _ in range(count)]


async def failed(env: Env, count: int) -> list[str]:
    made = []
    for _ in range(count):
        claim = await env.create_and_claim(policy=retries(0))
        await env.engine.fail(claim.handle, reason="boom")
        made.append(claim.execution_id)
    return made


async def states(env: Env, names: list[str]) -> set[str]:
    return {str(await env.engine.read_execution_state(name)) for name in names}


async def lives(env: Env, names: list[str]) -> list[int]:
    return [(await env.row(name)).replay_count for name in names]


async def work_off(engine: Engine, operation_id: str) -> BulkStatus:
    for _ in range(20):
        await engine.sweep_once(SWEEP)
        status = await engine.read_operation(operation_id)
        if status.state is not BulkState.RUNNING:
            return status
    raise AssertionError("it goes on and on")


async def test_a_preview_counts_and_shows_and_changes_nothing(env: Env) -> None:
    names = await waiting(env, 12, execution_kind="mail")
    await waiting(env, 2, execution_kind="print")
    await env.engine.cancel_execution(names[0])

    async with env.unchanged():
        preview = await env.engine.preview_operation("cancel", {"kind": "mail"})
        replays = await env.engine.preview_operation("replay", {"kind": "mail"})

    assert (preview.count, preview.refused, preview.complete) == (11, 1, True)
    assert len(preview.sample) == 10
    assert {one.execution_kind for one in preview.sample} == {"mail"}
    assert (replays.count, replays.refused) == (1, 11)


async def test_everything_that_matches_is_cancelled_in_pages(env: Env) -> None:
    names, others = await waiting(env, 8, execution_kind="mail"), await waiting(env, 2, execution_kind="print")
    held = await env.create_and_claim(execution_kind="mail")

    started = await env.engine.start_operation("cancel", {"kind": "mail"}, reason="wrong price", requested_by="ana")
    assert (started.state, started.changed, started.requested_by) == (BulkState.RUNNING, 0, "ana")
    done = await work_off(env.engine, started.operation_id)

    assert (done.state, done.changed, done.refused, done.ended_at) == (BulkState.COMPLETED, 9, 0, env.now)
    assert await states(env, [*names, held.execution_id]) == {"cancelled"}
    assert await states(env, others) == {"waiting"}
    assert (await env.core(names[0]))["cancellation_reason"] == "wrong price"
    assert [one.operation_id for one in (await env.engine.list_operations()).operations] == [done.operation_id]


async def test_failed_executions_are_replayed_and_priorities_changed(env: Env) -> None:
    names = await failed(env, 4)
    replays = await env.engine.start_operation("replay", {"public_state": ["failed"]}, reason="fixed")
    assert (await work_off(env.engine, replays.operation_id)).changed == 4
    assert await lives(env, names) == [1] * 4

    raised = await env.engine.start_operation("priority", {"lane_id": "default"}, reason="first", priority=7)
    assert (await work_off(env.engine, raised.operation_id)).changed == 4
    assert {(await env.row(name)).priority for name in names} == {7}


async def test_the_ceiling_bounds_an_operation(env: Env) -> None:
    names = await waiting(env, 8)

    started = await env.engine.start_operation("cancel", {"lane_id": "default"}, reason="x", ceiling=5)
    done = await work_off(env.engine, started.operation_id)

    assert (done.changed, done.state) == (5, BulkState.COMPLETED)
    assert [await env.engine.read_execution_state(name) for name in names].count("cancelled") == 5  # type: ignore[arg-type]


async def test_a_cancelled_operation_begins_no_further_page(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_operations, "PAGES_PER_PASS", 2)
    names = await waiting(env, 8)
    started = await env.engine.start_operation("cancel", {"lane_id": "default"}, reason="x")
    await env.engine.sweep_once(SWEEP)

    stopped = await env.engine.cancel_operation(started.operation_id)
    again = await env.engine.cancel_operation(started.operation_id)
    await env.engine.sweep_once(SWEEP)

    assert (stopped.state, stopped.changed) == (BulkState.CANCELLED, 3)
    assert again == stopped
    assert len([name for name in names if str(await env.engine.read_execution_state(name)) == "waiting"]) == 5


async def test_a_sweep_that_dies_in_the_middle_of_a_page_acts_on_each_life_once(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = await failed(env, 7)
    started = await env.engine.start_operation("replay", {"public_state": "failed"}, reason="fixed")
    act, begun, done, two_are_done = BulkWorker._act, list[str](), list[str](), asyncio.Event()

    async def dying(self: BulkWorker, row: Any, pinned: PinnedExecution) -> str | None:
        """Act on the first two; the process dies before all others, which are under way at the same time."""
        begun.append(pinned.execution_id)
        if len(begun) > 2:
            await two_are_done.wait()
            raise asyncio.CancelledError
        refusal = await act(self, row, pinned)
        done.append(pinned.execution_id)
        if len(done) == 2:
            two_are_done.set()
        return refusal

    monkeypatch.setattr(BulkWorker, "_act", dying)
    with pytest.raises(asyncio.CancelledError):
        await env.engine.sweep_once(SWEEP)
    monkeypatch.setattr(BulkWorker, "_act", act)
    replayed = [name for name, life in zip(names, await lives(env, names), strict=True) if life]
    assert len(replayed) == 2
    for name in replayed:  # their new lives end before the page is worked off again
        claim = await env.grant_and_claim(name)
        await env.engine.fail(claim.handle, reason="boom again")

    ended = await work_off(env.engine, started.operation_id)

    assert await lives(env, names) == [1] * 7
    assert (ended.changed, ended.refused) == (7, 0)


@pytest.mark.parametrize("losses", [1, 2, 3, 5])
async def test_lost_replies_count_nothing_twice(env: Env, losses: int) -> None:
    names = await failed(env, 5)
    engine = lossy_engine(env.store, Loss.REPLY, times=losses)

    started = await engine.start_operation("replay", {"public_state": "failed"}, reason="x", operation_id=OPERATION)
    again = await engine.start_operation("replay", {"public_state": "failed"}, reason="x", operation_id=OPERATION)
    done = await work_off(engine, started.operation_id)

    assert again.operation_id == started.operation_id
    assert (done.changed, done.refused) == (5, 0)
    assert await lives(env, names) == [1] * 5


async def test_two_sweepers_at_once_do_everything_once(env: Env) -> None:
    names = await failed(env, 11)
    started = await env.engine.start_operation("replay", {"public_state": "failed"}, reason="x")
    engines = [Engine(env.store, minter=SeededMinter(seed)) for seed in (21, 22)]

    async def drive(engine: Engine) -> None:
        worker = BulkWorker(engine)
        for _ in range(10):
            due = await engine.store.due(BulkOperation, "due_at", limit=5)
            for found in due.rows:
                await worker.work_off(found)

    await asyncio.gather(*(drive(engine) for engine in engines))

    done = await env.engine.read_operation(started.operation_id)
    assert (done.state, done.changed, done.refused) == (BulkState.COMPLETED, 11, 0)
    assert await lives(env, names) == [1] * 11


async def test_refusals_are_counted_and_shown(env: Env) -> None:
    [name] = await failed(env, 1)
    claim = await env.create_and_claim(policy={"max_replay_count": 0})
    await env.engine.complete(claim.handle)

    started = await env.engine.start_operation("replay", {"lane_id": "default"}, reason="x")
    done = await work_off(env.engine, started.operation_id)

    assert (done.changed, done.refused) == (1, 1)
    assert done.last_refusal is not None
    assert claim.execution_id in done.last_refusal
    assert await lives(env, [name]) == [1]


async def test_an_ended_operation_is_deleted_after_its_retention(env: Env) -> None:
    started = await env.engine.start_operation("cancel", {"kind": "nothing"}, reason="x")
    await work_off(env.engine, started.operation_id)
    await env.sweep(SWEEP, after_ms=RETENTION_MS - 1)
    assert (await env.engine.read_operation(started.operation_id)).changed == 0
    await env.sweep(SWEEP, after_ms=1)

    with pytest.raises(errors.NotFound):
        await env.engine.read_operation(started.operation_id)


@pytest.mark.parametrize(
    ("verb", "criteria", "options"),
    [
        ("purge", {"kind": "a"}, {}),
        ("cancel", {}, {}),
        ("cancel", {"color": "a"}, {}),
        ("cancel", {"kind": 5}, {}),
        ("cancel", {"kind": "a"}, {"reason": " "}),
        ("cancel", {"kind": "a"}, {"ceiling": 0}),
        ("cancel", {"kind": "a"}, {"priority": 5}),
        ("priority", {"kind": "a"}, {}),
        ("cancel", {"kind": "a"}, {"operation_id": "x"}),
    ],
)
async def test_a_malformed_operation_is_refused_and_changes_nothing(
    env: Env, verb: str, criteria: dict[str, Any], options: dict[str, Any]
) -> None:
    async with env.unchanged():
        with pytest.raises(errors.InvalidInput):
            await env.engine.start_operation(verb, criteria, **{"reason": "x"} | options)


async def test_an_id_in_use_for_another_operation_is_a_conflict(env: Env) -> None:
    await env.engine.start_operation("cancel", {"kind": "a"}, reason="x", operation_id=OPERATION)

    with pytest.raises(errors.IdempotencyConflict):
        await env.engine.start_operation("cancel", {"kind": "b"}, reason="x", operation_id=OPERATION)
