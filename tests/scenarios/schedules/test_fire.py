"""Schedules fire each instant once, whatever processes, pauses, deploys and clocks do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.runtime.read_set import load_one
from flowfabric.ids import SeededMinter
from flowfabric.model.execution import Payload
from flowfabric.model.scheduling.schedule import Overlap, PausedBy, Schedule, ScheduleSpec
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.schedules.identity import run_id
from flowfabric.rules.schedules.views import ScheduleDescription
from flowfabric.testing import FlakyStore, Loss
from tests.executions import create_request
from tests.scenarios.env import Env

MINUTE = 60_000
NAME = "nightly"
MINUTELY = ScheduleSpec(cron="* * * * *")


def run_of(env: Env, **fields: Any) -> CreateExecution:
    given: dict[str, Any] = {"namespace": "default", "lane_id": "default", "execution_kind": "report"} | fields
    return create_request(env.engine.new_execution_id(), **given)


async def put(env: Env, spec: ScheduleSpec = MINUTELY, name: str = NAME, **options: Any) -> str:
    return await env.engine.put_schedule(name, spec, run_of(env, input_payload=b'{"region":"eu"}'), **options)


async def described(env: Env, name: str = NAME) -> ScheduleDescription:
    return await env.engine.describe_schedule(name)


async def row_of(env: Env, name: str = NAME) -> Schedule:
    found = (await described(env, name)).status
    row = await load_one(env.engine.runtime, Schedule, found.schedule_id)
    assert row is not None
    return row


async def to_next_instant(env: Env, name: str = NAME) -> int:
    """Advance the clock to the next instant of a schedule."""
    at = (await described(env, name)).next_instants[0]
    env.clock.advance_ms(max(0, at - env.now))
    return at


async def fire(env: Env) -> None:
    await env.engine.sweep_once("schedules")


async def fire_next(env: Env) -> int:
    """Advance the clock to the next instant of the schedule and fire what is due; return the instant."""
    at = await to_next_instant(env)
    await fire(env)
    return at


async def runs(env: Env, name: str = NAME) -> list[str]:
    return [run.execution_id for run in (await described(env, name)).runs]


async def complete(env: Env, run: str) -> None:
    """Claim and complete a run."""
    claim = await env.grant_and_claim(run)
    await env.engine.complete(claim.handle)
    await env.engine.child_completions.drain()


async def test_an_instant_creates_one_run_like_its_template(env: Env) -> None:
    assert await put(env) == "created"
    await fire(env)
    assert await runs(env) == []

    at = await fire_next(env)

    [run] = await runs(env)
    row = await row_of(env)
    assert run == run_id(row.schedule_id, at)
    assert (row.fired, row.last_run_id, row.next_instant) == (1, run, at + MINUTE)
    payload = await load_one(env.engine.runtime, Payload, run)
    assert payload is not None
    assert (payload.input_payload, (await env.row(run)).parent_id) == (b'{"region":"eu"}', row.schedule_id)


async def test_two_workers_fire_one_instant_once(env: Env) -> None:
    await put(env)
    other = Engine(env.store, minter=SeededMinter(2))
    await to_next_instant(env)
    key = (await row_of(env)).schedule_id

    fired = await asyncio.gather(*(engine.scheduler.fire(key) for engine in (env.engine, other) for _ in range(3)))

    assert sum(fired) == 1
    assert len(await runs(env)) == 1


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_fire_whose_reply_is_lost_is_found(env: Env, loss: Loss) -> None:
    await put(env)
    await to_next_instant(env)
    flaky = FlakyStore(env.store)
    other = Engine(flaky, minter=SeededMinter(2))
    key = (await row_of(env)).schedule_id
    flaky.lose("commit", loss)

    await other.scheduler.fire(key)

    assert len(await runs(env)) == 1
    assert (await row_of(env)).fired == 1
    await fire(env)
    assert len(await runs(env)) == 1


@pytest.mark.parametrize("made", [0, 1])
async def test_a_pause_as_it_fires_decides_who_was_first(env: Env, made: int) -> None:
    await put(env, ScheduleSpec(cron="* * * * *", overlap=Overlap.ALLOW))
    await to_next_instant(env)
    key = (await row_of(env)).schedule_id

    other = Engine(env.store, minter=SeededMinter(2))

    async def pause() -> bool:
        return await other.pause_schedule(NAME, note="look at this")

    if made:
        await env.race(pause(), lambda: env.engine.scheduler.fire(key))
    else:
        await env.race(env.engine.scheduler.fire(key), pause)

    row = await row_of(env)
    assert len(await runs(env)) == made
    assert (row.fired, row.paused_by, row.note, row.next_at) == (made, PausedBy.PERSON, "look at this", None)
    env.clock.advance_ms(10 * MINUTE)
    await fire(env)
    assert len(await runs(env)) == made

    assert await env.engine.resume_schedule(NAME)
    await fire_next(env)
    assert (await row_of(env)).fired == made + 1
    assert (await row_of(env)).missed == 0


@pytest.mark.parametrize("overlap", list(Overlap))
@pytest.mark.parametrize("catch_up_ms", [5 * MINUTE, 3 * 24 * 60 * MINUTE])
async def test_a_weekend_down(env: Env, overlap: Overlap, catch_up_ms: int) -> None:
    await put(env, ScheduleSpec(every_ms=15 * MINUTE, overlap=overlap, catch_up_ms=catch_up_ms))
    first = (await row_of(env)).next_instant
    assert first is not None
    env.clock.advance_ms(first - env.now + 60 * 60 * MINUTE)  # 241 instants
    await fire(env)

    instants = 241
    made_up = 1 if catch_up_ms == 5 * MINUTE else instants
    row = await row_of(env)
    assert row.missed == instants - made_up
    expected = {
        Overlap.SKIP: (1, made_up - 1, 0),
        Overlap.QUEUE_ONE: (1, max(0, made_up - 2), min(1, made_up - 1)),
        Overlap.QUEUE: (1, max(0, made_up - 101), min(100, made_up - 1)),
        Overlap.CANCEL: (-1, -1, 0),
        Overlap.ALLOW: (made_up, 0, 0),
    }[overlap]
    queued = (await described(env)).status.queued
    if overlap is Overlap.CANCEL:  # the last one is left, and each change has begun at most one of the others
        assert row.fired + row.skipped == made_up
        assert row.last_instant == first + 240 * 15 * MINUTE
    else:
        assert (row.fired, row.skipped, queued) == expected
    assert row.next_instant == first + 241 * 15 * MINUTE


@pytest.mark.parametrize("fires_late", [False, True])
async def test_a_redeploy_with_another_cron_at_the_instant_fires_it_once(env: Env, fires_late: bool) -> None:
    await put(env, ScheduleSpec(cron="0 * * * *"))
    at = await to_next_instant(env)
    key = (await row_of(env)).schedule_id

    other = Engine(env.store, minter=SeededMinter(2))

    async def redeploy() -> str:
        return await other.put_schedule(NAME, ScheduleSpec(cron="0,30 * * * *"), run_of(env))

    if fires_late:
        _, outcome = await env.race(env.engine.scheduler.fire(key), redeploy)
    else:
        outcome, _ = await env.race(redeploy(), lambda: env.engine.scheduler.fire(key))

    assert outcome == "changed"
    row = await row_of(env)
    assert await runs(env) == [run_id(row.schedule_id, at)]
    assert (row.fired, row.next_instant) == (1, at + 30 * MINUTE)
    await fire(env)
    assert len(await runs(env)) == 1


async def test_a_redeploy_a_moment_before_the_instant_fires_it_by_the_new_cron(env: Env) -> None:
    await put(env, ScheduleSpec(cron="0 * * * *"))
    at = (await described(env)).next_instants[0]
    env.clock.advance_ms(at - env.now - 1)
    assert await put(env, ScheduleSpec(cron="0,30 * * * *")) == "changed"
    env.clock.advance_ms(1)
    await fire(env)
    assert await runs(env) == [run_id((await row_of(env)).schedule_id, at)]


@pytest.mark.parametrize(("catch_up", "made"), [(300, 250), (10, 11)])
async def test_a_redeploy_after_a_long_outage_loses_no_instant(env: Env, catch_up: int, made: int) -> None:
    """They are more than the change decides that puts the other definition in place."""
    instants = 250 if made == 250 else 2500
    missed_by = ScheduleSpec(cron="* * * * *", overlap=Overlap.ALLOW, catch_up_ms=catch_up * MINUTE)
    await put(env, missed_by)
    first = await to_next_instant(env)
    env.clock.advance_ms((instants - 1) * MINUTE)

    assert await put(env, ScheduleSpec(cron="0 * * * *")) == "changed"

    row = await row_of(env)
    assert (row.fired, row.missed) == (made, instants - made)
    assert row.last_instant == first + (instants - 1) * MINUTE
    assert (await described(env)).status.spec.cron == "0 * * * *"


@pytest.mark.parametrize("fires_late", [False, True])
async def test_the_queued_run_begins_when_the_run_ends_as_it_fires(env: Env, fires_late: bool) -> None:
    await put(env, ScheduleSpec(cron="* * * * *", overlap=Overlap.QUEUE_ONE))
    first = await fire_next(env)
    row = await row_of(env)
    claim = await env.grant_and_claim(run_id(row.schedule_id, first), ttl=5 * MINUTE)
    env.clock.advance_ms(MINUTE)

    other = Engine(env.store, minter=SeededMinter(2))

    async def end() -> None:
        await other.complete(claim.handle)
        await other.child_completions.drain()

    fire_now = env.engine.scheduler.fire(row.schedule_id)
    if fires_late:
        await env.race(fire_now, end)
    else:
        await env.race(end(), lambda: fire_now)
    await env.engine.child_completions.drain()

    row = await row_of(env)
    assert (row.fired, row.skipped, row.pending) == (2, 0, None)
    assert row.last_run_id == run_id(row.schedule_id, first + MINUTE)


async def test_the_end_of_a_run_moves_the_queue_although_its_process_died(env: Env) -> None:
    await put(env, ScheduleSpec(cron="* * * * *", overlap=Overlap.QUEUE))
    for _ in range(3):
        await fire_next(env)
    assert [(await row_of(env)).fired, (await described(env)).status.queued] == [1, 2]

    env.engine.runtime.write_listeners.clear()  # a process that dies right after the commit
    claim = await env.grant_and_claim((await runs(env))[0])
    await env.engine.complete(claim.handle)
    assert (await row_of(env)).fired == 1
    await env.engine.sweep_once("child_ends")

    row = await row_of(env)
    assert (row.fired, (await described(env)).status.queued) == (2, 1)


async def test_cancel_ends_the_earlier_run_in_the_change_that_creates_the_next(env: Env) -> None:
    await put(env, ScheduleSpec(cron="* * * * *", overlap=Overlap.CANCEL))
    await fire_next(env)
    [first] = await runs(env)
    await env.grant_and_claim(first)
    await fire_next(env)
    await env.engine.child_completions.drain()

    second, same = await runs(env)
    assert same == first
    assert str(await env.engine.read_execution_state(first)) == "cancelled"
    assert str(await env.engine.read_execution_state(second)) == "waiting"
    assert (await described(env)).status.running == 1


async def test_a_skipped_instant_is_counted_and_the_next_one_fires_after_the_end(env: Env) -> None:
    await put(env)
    for _ in range(3):
        await fire_next(env)
    row = await row_of(env)
    assert (row.fired, row.skipped) == (1, 2)
    [run] = await runs(env)
    await complete(env, run)
    await fire_next(env)
    assert (await row_of(env)).fired == 2


async def test_a_clock_that_is_set_back_repeats_nothing(env: Env) -> None:
    await put(env, ScheduleSpec(cron="* * * * *", overlap=Overlap.ALLOW))
    for _ in range(3):
        await fire_next(env)
    at = (await row_of(env)).decided_until
    env.clock.advance_ms(-10 * MINUTE)
    await fire(env)
    await put(env, ScheduleSpec(cron="*/1 * * * *", overlap=Overlap.ALLOW))
    for _ in range(10):
        await fire(env)
        env.clock.advance_ms(MINUTE)
    assert (await row_of(env)).fired == 3
    env.clock.advance_ms(MINUTE)
    await fire(env)
    row = await row_of(env)
    assert (row.fired, row.last_instant) == (4, at + MINUTE)


async def test_jitter_delays_a_run_by_the_same_time_on_every_machine(env: Env) -> None:
    await put(env, ScheduleSpec(cron="0 * * * *", jitter_ms=10 * MINUTE))
    row = await row_of(env)
    assert row.next_instant is not None
    assert row.next_at is not None
    assert row.next_instant <= row.next_at < row.next_instant + 10 * MINUTE
    env.clock.advance_ms(row.next_at - env.now - 1)
    await fire(env)
    assert await runs(env) == []
    env.clock.advance_ms(1)
    await fire(env)
    assert await runs(env) == [run_id(row.schedule_id, row.next_instant)]


async def test_a_failure_pauses_a_schedule_that_asks_for_it(env: Env) -> None:
    await put(env, ScheduleSpec(cron="* * * * *", pause_on_failure=True))
    await fire_next(env)
    claim = await env.grant_and_claim((await runs(env))[0])
    await env.engine.fail(claim.handle, reason="the disk is full")
    await env.engine.child_completions.drain()

    row = await row_of(env)
    assert row.paused_by is PausedBy.FAILURE
    assert row.note is not None
    assert "the disk is full" in row.note
    assert claim.execution_id in row.note


async def test_an_unknown_schedule_is_not_found(env: Env) -> None:
    for call in (env.engine.describe_schedule, env.engine.pause_schedule, env.engine.trigger_schedule):
        with pytest.raises(errors.NotFound):
            await call("nobody")
    assert not await env.engine.delete_schedule("nobody")
