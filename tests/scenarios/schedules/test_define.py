"""Schedules are put in place, listed, triggered, made up for and deleted; lost replies and bad input change nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.schedules import operator
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Created, Duplicate
from flowfabric.model.scheduling.schedule import Calendar, Overlap, PausedBy, ScheduleSpec
from flowfabric.rules.schedules.identity import run_id
from flowfabric.testing import FlakyStore, Loss
from tests.scenarios.env import Env
from tests.scenarios.lossy_engine import lossy_engine
from tests.scenarios.schedules.test_fire import (
    MINUTE,
    MINUTELY,
    NAME,
    complete,
    described,
    fire,
    fire_next,
    put,
    row_of,
    run_of,
    runs,
)

TRIGGER = "0191f0e2-7c3a-7b1d-8e5f-123456789abc"
HOURLY = ScheduleSpec(every_ms=60 * MINUTE)


async def test_the_same_definition_changes_nothing_and_another_one_does(env: Env) -> None:
    assert await put(env, owner="shop") == "created"
    async with env.unchanged():
        assert await put(env, owner="shop") == "unchanged"
    assert await put(env, HOURLY, owner="shop") == "changed"
    assert (await described(env)).status.spec == HOURLY


async def test_a_schedule_keeps_its_place_when_its_task_moves_to_another_lane(env: Env) -> None:
    await put(env)
    before = (await row_of(env)).schedule_id
    await env.engine.put_schedule(NAME, MINUTELY, run_of(env, lane_id="other"))
    assert (await row_of(env)).schedule_id == before
    await fire_next(env)
    assert (await env.row((await runs(env))[0])).lane_id == "other"


async def test_a_put_beside_one_of_another_lane_is_the_same_schedule(env: Env) -> None:
    other = Engine(env.store, minter=SeededMinter(2))
    await put(env)
    await other.put_schedule(NAME, MINUTELY, run_of(env, lane_id="other"))
    assert [one.lane for one in (await env.engine.list_schedules()).schedules] == ["other"]


@pytest.mark.parametrize("loss", list(Loss))
@pytest.mark.parametrize(
    ("call", "writes"),
    [
        (lambda e, run: e.put_schedule(NAME, HOURLY, run), "changed"),
        (lambda e, run: e.pause_schedule(NAME, note="n"), True),
        (lambda e, run: e.delete_schedule(NAME), True),
    ],
    ids=["put", "pause", "delete"],
)
async def test_a_lost_reply_is_found_again(
    env: Env, loss: Loss, call: Callable[[Engine, Any], Awaitable[object]], writes: object
) -> None:
    await put(env)
    other = lossy_engine(env.store, loss)
    # The outcome of a delete whose reply is lost cannot be distinguished from that of another caller's.
    assert await call(other, run_of(env)) in (writes, False)
    found = (await env.engine.list_schedules()).schedules
    match writes:
        case "changed":
            assert found[0].spec == HOURLY
        case _:
            assert found == [] or found[0].note == "n"


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_trigger_whose_reply_is_lost_creates_one_run(env: Env, loss: Loss) -> None:
    await put(env)
    other = lossy_engine(env.store, loss)
    first = await other.trigger_schedule(NAME, trigger_id=TRIGGER)
    async with env.unchanged():
        again = await env.engine.trigger_schedule(NAME, trigger_id=TRIGGER)
    assert isinstance(again, Duplicate)
    assert again.execution_id == first.execution_id
    assert await runs(env) == [first.execution_id]
    assert (await row_of(env)).fired == 1


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_backfill_whose_reply_is_lost_creates_each_run_once(env: Env, loss: Loss) -> None:
    await put(env)
    other = lossy_engine(env.store, loss)
    end = env.now - env.now % MINUTE
    await other.backfill_schedule(NAME, end - 5 * MINUTE, end, overlap="allow")
    row = await row_of(env)
    assert sorted(await runs(env)) == sorted(run_id(row.schedule_id, end - n * MINUTE) for n in range(1, 6))
    assert row.fired == 5


async def test_a_resume_whose_reply_is_lost_resumes(env: Env) -> None:
    await put(env)
    await env.engine.pause_schedule(NAME)
    await lossy_engine(env.store, Loss.REPLY).resume_schedule(NAME)
    row = await row_of(env)
    assert (row.paused_at, row.next_at) == (None, row.next_instant)


async def test_a_long_backfill_that_died_is_finished_by_the_next_one(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "MAX_INSTANTS", 10)
    await put(env, ScheduleSpec(cron="* * * * *", overlap=Overlap.ALLOW))
    end = env.now - env.now % MINUTE
    flaky = FlakyStore(env.store)
    dying = Engine(flaky, minter=SeededMinter(2))
    # The first page is written, and then the process is cut off.
    flaky.lose("commit", Loss.REQUEST, times=1000, after=1)
    monkeypatch.setattr("flowfabric.engine.runtime.backoff.StoreBackoff.__init__.__defaults__", (0.05,))
    with pytest.raises(errors.StoreUnavailable):
        await dying.backfill_schedule(NAME, end - 25 * MINUTE, end, overlap="allow")
    assert (await row_of(env)).fired == 10

    done = await env.engine.backfill_schedule(NAME, end - 25 * MINUTE, end, overlap="allow")
    assert (done.created, done.known) == (15, 10)


async def test_a_triggered_run_counts_as_under_way(env: Env) -> None:
    await put(env)
    triggered = await env.engine.trigger_schedule(NAME)
    assert isinstance(triggered, Created)
    await fire_next(env)
    assert ((await row_of(env)).fired, (await row_of(env)).skipped) == (1, 1)
    await complete(env, triggered.execution_id)
    await fire_next(env)
    assert (await row_of(env)).fired == 2


async def test_too_many_triggered_runs_are_refused(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.rules.schedules.define.MAX_ACTIVE", 2)
    await put(env)
    for _ in range(2):
        await env.engine.trigger_schedule(NAME)
    async with env.unchanged():
        with pytest.raises(errors.ScheduleBusy, match="wait for them, or cancel some"):
            await env.engine.trigger_schedule(NAME)


async def test_a_run_that_is_replayed_is_under_way_again(env: Env) -> None:
    await put(env)
    await fire_next(env)
    [run] = await runs(env)
    await complete(env, run)
    await env.engine.replay_execution(run)
    await fire_next(env)
    assert ((await row_of(env)).fired, (await row_of(env)).skipped) == (1, 1)


async def test_queued_instants_of_a_backfill_run_one_after_another(env: Env) -> None:
    await put(env, HOURLY)
    end = env.now - env.now % (60 * MINUTE)
    done = await env.engine.backfill_schedule(NAME, end - 180 * MINUTE, end)
    assert (done.created, done.queued) == (1, 2)
    seen = []
    for _ in range(3):
        row = await row_of(env)
        assert row.last_run_id is not None
        seen.append(row.last_instant)
        await complete(env, row.last_run_id)
    assert seen == [end - n * 60 * MINUTE for n in (3, 2, 1)]
    assert (await row_of(env)).pending is None


async def test_a_paused_schedule_starts_nothing_of_its_queue(env: Env) -> None:
    await put(env, ScheduleSpec(cron="* * * * *", overlap=Overlap.QUEUE))
    for _ in range(2):
        await fire_next(env)
    await env.engine.pause_schedule(NAME)
    row = await row_of(env)
    assert row.last_run_id is not None
    await complete(env, row.last_run_id)
    assert (await row_of(env)).fired == 1
    with pytest.raises(errors.SchedulePaused, match="resume it first"):
        await env.engine.backfill_schedule(NAME, 0, MINUTE)
    await env.engine.resume_schedule(NAME)
    assert ((await row_of(env)).fired, (await row_of(env)).pending) == (2, None)


async def test_a_deleted_schedule_fires_no_more_and_its_runs_continue(env: Env) -> None:
    await put(env)
    await fire_next(env)
    [run] = await runs(env)
    key = (await row_of(env)).schedule_id
    assert await env.engine.delete_schedule(NAME)
    assert not await env.engine.scheduler.fire(key)
    await complete(env, run)
    assert await env.engine.child_completions.deliver(key) == 0
    assert str(await env.engine.read_execution_state(run)) == "completed"

    await put(env)  # the same name has the same ids, so an instant that ran does not run again
    env.clock.advance_ms(-MINUTE)
    await fire(env)
    end = env.now - env.now % MINUTE + MINUTE
    env.clock.advance_ms(2 * MINUTE)
    done = await env.engine.backfill_schedule(NAME, end, end + MINUTE, overlap="allow")
    assert (done.created, done.known) == (0, 1)


async def test_a_run_of_a_schedule_is_removed_when_its_retention_is_over(env: Env) -> None:
    await put(env)
    await fire_next(env)
    [run] = await runs(env)
    await complete(env, run)
    env.clock.advance_ms(25 * 60 * MINUTE)
    assert await env.engine.purge_execution(run)
    assert await runs(env) == []
    await fire(env)
    assert len(await runs(env)) == 1


async def test_an_application_retires_only_its_own_schedules(env: Env) -> None:
    await put(env, owner="shop", name="mine")
    await put(env, owner="shop", name="kept")
    await put(env, owner="mail", name="theirs")
    await put(env, name="of a person")
    retire = env.engine.retire_schedules
    assert await retire("shop", keep=["kept"], note="gone") == ["mine"]
    assert await retire("shop", keep=["kept"], note="gone") == []
    states = {one.name: one.paused_by for one in (await env.engine.list_schedules()).schedules}
    assert states == {"mine": PausedBy.DEPLOY, "kept": None, "theirs": None, "of a person": None}
    assert await put(env, owner="shop", name="mine") == "changed"
    assert (await described(env, "mine")).status.paused_at is None
    assert await retire("shop", keep=[], remove=True) == ["kept", "mine"]


async def test_schedules_are_listed_by_name_in_pages_and_namespaces(env: Env) -> None:
    for name in ("b", "a", "c"):
        await put(env, name=name)
    await env.engine.put_schedule("a", MINUTELY, run_of(env, namespace="other"))
    listing = env.engine.list_schedules
    first = await listing(namespace="default", limit=2)
    assert [one.name for one in first.schedules] == ["a", "b"]
    rest = await listing(namespace="default", cursor=first.next_cursor, limit=2)
    assert ([one.name for one in rest.schedules], rest.next_cursor) == (["c"], None)
    assert len((await listing()).schedules) == 4
    assert [one.namespace for one in (await listing(namespaces=["other"])).schedules] == ["other"]
    assert await env.engine.delete_schedule("a", namespace="other")
    assert len((await listing(namespace="default")).schedules) == 3


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        (lambda env: put(env, ScheduleSpec(cron="61 * * * *")), "cron: "),
        (lambda env: put(env, ScheduleSpec(cron="@daily", tz="Mars/X")), "tz: "),
        (lambda env: put(env, ScheduleSpec(calendar=Calendar(day=31, month=4))), "at: "),
        (lambda env: put(env, ScheduleSpec()), "give one of"),
        (lambda env: put(env, name="a/b"), "is no name"),
        (lambda env: put(env, name=""), "is no name"),
        (lambda env: env.engine.put_schedule(NAME, MINUTELY, run_of(env, idempotency_key="k")), "key: "),
        (lambda env: env.engine.put_schedule(NAME, MINUTELY, run_of(env, delay_until=env.now + 5)), "delay"),
        (lambda env: env.engine.put_schedule(NAME, "@daily", run_of(env)), "ScheduleSpec"),
        (lambda env: env.engine.backfill_schedule(NAME, 5, 5), "start is not before end"),
        (lambda env: env.engine.backfill_schedule(NAME, env.now, env.now + MINUTE), "in the future"),
        (lambda env: env.engine.backfill_schedule(NAME, 0, env.now, overlap="allow"), "more than 1000 instants"),
        (lambda env: env.engine.backfill_schedule(NAME, env.now - 200 * MINUTE, env.now), 'overlap="allow"'),
        (lambda env: env.engine.backfill_schedule(NAME, 0, 1, overlap="often"), "overlap: "),
        (lambda env: env.engine.list_schedules(cursor="x"), "cursor: "),
        (lambda env: env.engine.trigger_schedule(NAME, trigger_id="x"), "trigger_id"),
    ],
)
async def test_bad_input_is_refused_with_its_fix_and_changes_nothing(
    env: Env, call: Callable[[Env], Awaitable[object]], wrong: str
) -> None:
    await put(env)
    async with env.unchanged():
        with pytest.raises(errors.InvalidInput, match=wrong):
            await call(env)


async def test_a_policy_that_cannot_be_used_is_refused_when_the_schedule_is_defined(env: Env) -> None:
    with pytest.raises(errors.InvalidPolicyJson):
        await env.engine.put_schedule(NAME, MINUTELY, run_of(env, policy='{"retry_policy": 7}'))
    assert (await env.engine.list_schedules()).schedules == []
