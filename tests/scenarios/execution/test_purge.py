"""Purging an execution: which rows are deleted and which are kept."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Duplicate
from flowfabric.model.change import Change, Insert, Upsert, Write
from flowfabric.model.stream import Frame, FrameMode, Stream
from flowfabric.rules import retention
from flowfabric.rules.stream.append import PAGE
from flowfabric.rules.suspension.arguments import FreshWaitpoint
from flowfabric.stores.queries import Read
from flowfabric.testing.flaky_store import FlakyStore, Loss
from tests.scenarios.env import Env
from tests.scenarios.limits.test_budgets import B, budget
from tests.scenarios.limits.test_quotas import Q, policy
from tests.scenarios.limits.test_slots import claim_admitted_one
from tests.scenarios.waits import ANY, SATISFIED, Waits

KEPT_TABLES = {"ff_idempotency", "ff_budget_usage_by_exec", "ff_quota_window", "events"}
RETRY = {"retry_policy": {"max_retries": 5, "backoff": {"type": "fixed", "delay_ms": 1}}}
SOON = {"stream_policy": {"retention_ttl_ms": 100}}


async def test_a_purge_deletes_every_row_of_the_execution(env: Env, waits: Waits) -> None:
    engine = env.engine
    await policy(env, cap=5)
    await budget(env, tokens=100)
    terms = {"quota_policy_id": Q, "budget_ids": [B]} | RETRY | SOON
    e = await env.create(policy=terms, idempotency_key="once", tags={"app.x": "1"}, input_payload=b"in")
    claim = await claim_admitted_one(env)
    await engine.record_spend(B, e, {"tokens": 4})
    await engine.record_step(claim.handle, "step", 0, b"done")
    await engine.append_frame(claim.handle, b"out")
    await engine.append_frame(claim.handle, b'{"sum":1}', mode=FrameMode.SUMMARY)
    details = await waits.suspend(claim)
    await waits.send(e, "go", details)
    await engine.fail((await claim_admitted_one(env)).handle, reason="once more")
    await env.promote(e)
    await env.expire_lease(await claim_admitted_one(env))
    await engine.complete((await env.grant_and_reclaim(e)).handle, result=b"result")
    await engine.outbox.wait_for_deliveries()
    owned = {table for table, rows in (await env.dump()).items() if any(e in repr(row) for row in rows)}
    assert owned > KEPT_TABLES

    env.clock.advance_ms(100)
    assert (await engine.sweep_once("retention_trimmer")).processed == 1

    left = {table for table, rows in (await env.dump()).items() if any(e in repr(row) for row in rows)}
    assert left == KEPT_TABLES
    assert (await engine.describe_execution(e), await engine.read_state_vector(e)) == (None, None)
    assert (await engine.lease_history(e), await engine.attempt_history(e)) == ([], [])
    assert (await engine.get_budget_status(B)).usage == {"tokens": 4}
    again = await engine.create_execution(execution_id=engine.new_execution_id(), idempotency_key="once")
    assert again == Duplicate(e)


async def test_a_purge_keeps_a_waitpoint_of_the_same_id_on_another_execution(env: Env, waits: Waits) -> None:
    purged, kept = await env.create_and_claim(policy=SOON), await env.create_and_claim(lane="other")
    fresh = FreshWaitpoint(waits.new_id(), "k")
    await waits.suspend(purged, ANY, fresh)
    details = await waits.suspend(kept, ANY, fresh)
    await env.engine.cancel_execution(purged.execution_id)
    assert await env.sweep("retention_trimmer", after_ms=100) == 1

    assert await waits.effect(kept.execution_id, "go", details) == SATISFIED


async def test_a_purge_of_the_parent_deletes_child_completions_that_no_gate_awaited(env: Env) -> None:
    engine = env.engine
    e = await env.create(policy=SOON)
    parent = await env.grant_and_claim(e, "wa")
    child = await env.grant_and_claim(await env.create(parent_id=e), "wc")
    await engine.complete(child.handle)
    await engine.child_completions.drain()
    await engine.complete(parent.handle)
    env.clock.advance_ms(100)
    assert (await engine.sweep_once("retention_trimmer")).processed == 1

    assert (await env.dump())["ff_child_end"] == []


async def test_the_frames_of_long_streams_are_deleted_in_several_changes(env: Env) -> None:
    engine, claim = env.engine, await env.create_and_claim(policy=SOON)
    e = claim.execution_id
    await engine.append_frame(claim.handle, b"first")
    await insert_pages(env, e, 5)
    await engine.complete(claim.handle)
    env.clock.advance_ms(100)
    before = env.store.calls["commit"]

    assert (await engine.sweep_once("retention_trimmer")).processed == 1

    assert env.store.calls["commit"] - before >= 5
    dumped = await env.dump()
    assert (dumped["ff_frame"], dumped["ff_stream"], dumped["ff_exec_core"]) == ([], [], [])


async def test_a_purge_that_ends_between_two_changes_is_continued_and_readers_see_a_trimmed_stream(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, claim = env.engine, await env.create_and_claim(policy=SOON)
    e = claim.execution_id
    await engine.append_frame(claim.handle, b"first")
    await insert_pages(env, e, 5)
    await engine.complete(claim.handle)
    env.clock.advance_ms(100)

    await purge_one_part(env, e, monkeypatch)

    page = await engine.read_stream(e, 0, "start", "end", 100)
    assert [frame.fields["payload"] for frame in page.frames] == ["page 1", "page 2", "page 3", "page 4"]
    assert (await engine.sweep_once("retention_trimmer")).processed == 1
    dumped = await env.dump()
    assert (dumped["ff_frame"], dumped["ff_stream"], dumped["ff_exec_core"]) == ([], [], [])


async def test_many_rows_are_deleted_in_parts_and_what_is_left_is_not_replayed(
    env: Env, waits: Waits, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = env.engine
    monkeypatch.setattr(engine.store, "deletes_in_pages", True, raising=False)
    monkeypatch.setattr(retention, "MAX_PURGED_ROWS", 3)
    claim = await env.create_and_claim(policy=SOON)
    e = claim.execution_id
    for number in range(10):
        await engine.record_step(claim.handle, f"step{number}", 0, b"done")
        child = await env.grant_and_claim(await env.create(parent_id=e), "wc")
        await engine.complete(child.handle)
    await engine.child_completions.drain()
    await waits.send(e, "go", await waits.suspend(claim))
    await engine.cancel_execution(e)
    env.clock.advance_ms(100)

    await purge_one_part(env, e, monkeypatch)

    dumped = await env.dump()
    assert 0 < len(dumped["ff_step"]) + len(dumped["ff_child_end"]) < 20
    with pytest.raises(errors.NotFound):
        await engine.replay_execution(e)
    assert (await engine.sweep_once("retention_trimmer")).processed == 1
    left = {table for table, rows in (await env.dump()).items() if any(e in repr(row) for row in rows)}
    assert left <= KEPT_TABLES | {"ff_exec_core"}, "children still name their parent"
    assert await engine.describe_execution(e) is None


@pytest.mark.parametrize("loss", [Loss.REQUEST, Loss.UNSURE, Loss.REPLY])
@pytest.mark.parametrize("lost", range(4))
async def test_a_purge_in_parts_ends_despite_a_lost_message(
    env: Env, monkeypatch: pytest.MonkeyPatch, loss: Loss, lost: int
) -> None:
    monkeypatch.setattr(retention, "MAX_PURGED_ROWS", 3)
    claim = await env.create_and_claim(policy=SOON)
    for number in range(10):
        await env.engine.record_step(claim.handle, f"step{number}", 0, b"done")
    await env.engine.complete(claim.handle)
    env.clock.advance_ms(100)
    store = FlakyStore(env.engine.store)
    store.deletes_in_pages = True
    store.lose("commit", loss, after=lost)

    assert await Engine(store, minter=SeededMinter(7)).purge_execution(claim.execution_id)

    dumped = await env.dump()
    assert (dumped["ff_step"], dumped["ff_exec_core"]) == ([], [])


async def purge_one_part(env: Env, execution_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin to purge, and die after the first part."""
    purger = env.engine.purger

    async def die_after_one(*arguments: Any) -> Any:
        assert await purge_rows(*arguments) == retention.RowsRemain()
        raise asyncio.CancelledError

    with monkeypatch.context() as patch:
        purge_rows = purger._purge_rows
        patch.setattr(purger, "_purge_rows", die_after_one)
        with pytest.raises(asyncio.CancelledError):
            await purger.purge_execution(execution_id, None)


async def insert_pages(env: Env, execution_id: str, pages: int) -> None:
    """Give a stream the first frame of each of these pages."""
    [[stream]] = (await env.store.load([Read(Stream, (execution_id, 0))])).rows
    kept = [[page, stream.last_ms, page] for page in range(pages)]
    longer = msgspec.structs.replace(stream, pages=str(kept), frame_count=(pages - 1) * PAGE + 1, last_seq=pages - 1)
    frames = [
        Frame(execution_id, 0, page, stream.last_ms, page, page * PAGE + 1, env.now, FrameMode.DURABLE, "log", text)
        for page, text in ((page, f"page {page}".encode()) for page in range(1, pages))
    ]
    writes: tuple[Write, ...] = (Upsert(longer), *map(Insert, frames))
    assert await env.store.commit([Change((), writes, id=7)]) != [None]
