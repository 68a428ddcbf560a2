"""What others create changes no schedule: not under its id, not as its child, not under the ids of its runs."""

from __future__ import annotations

import pytest

from flowfabric.engine.runtime.read_set import load_one
from flowfabric.model.change import Change, Patch
from flowfabric.model.scheduling.schedule import Overlap, PausedBy, Schedule, ScheduleSpec
from flowfabric.rules.schedules.identity import run_id
from tests.scenarios.env import Env
from tests.scenarios.schedules.test_fire import MINUTE, fire, fire_next, put, row_of, runs, to_next_instant

CAREFUL = ScheduleSpec(cron="* * * * *", pause_on_failure=True)


async def fail(env: Env, run: str) -> None:
    claim = await env.grant_and_claim(run)
    await env.engine.fail(claim.handle, reason="broken")
    await env.engine.child_completions.drain()


async def test_a_run_under_the_id_of_a_schedule_does_not_hide_the_ends_of_its_runs(env: Env) -> None:
    await put(env, CAREFUL)
    await fire_next(env)
    await env.create(execution_id=(await row_of(env)).schedule_id, namespace="other")

    await fail(env, (await runs(env))[0])

    assert (await row_of(env)).paused_by is PausedBy.FAILURE


@pytest.mark.parametrize("parent_exists", [False, True])
async def test_a_run_of_another_namespace_does_not_belong_to_the_schedule(env: Env, *, parent_exists: bool) -> None:
    await put(env, CAREFUL)
    key = (await row_of(env)).schedule_id
    if parent_exists:
        await env.create(execution_id=key, namespace="other")
    child = await env.create(namespace="other", parent_id=key)
    assert await runs(env) == []

    await fail(env, child)

    assert (await row_of(env)).paused_by is None
    assert [one for one in (await env.dump())["ff_child_end"] if one.due_at is not None] == []


async def test_a_foreign_run_under_the_id_of_an_instant_costs_that_instant_only(env: Env) -> None:
    await put(env)
    row = await row_of(env)
    assert row.next_instant is not None
    await env.create(execution_id=run_id(row.schedule_id, row.next_instant), namespace="other")
    await fire_next(env)
    after = await row_of(env)
    assert (after.fired, after.skipped, await runs(env)) == (0, 1, [])

    await fire_next(env)
    assert (await row_of(env)).fired == 1


async def test_a_schedule_whose_run_cannot_be_created_blocks_no_other_and_is_tried_again(env: Env) -> None:
    await put(env)
    await put(env, name="other")
    row = await row_of(env)
    runtime = env.engine.runtime
    broken = row.template[:-1] + ',"tags":{"NOT A TAG":"x"}}'
    await _write(env, row.schedule_id, broken)
    await to_next_instant(env)

    done = await env.engine.sweep_once("schedules")

    assert (done.processed, done.errors) == (1, 1)
    assert done.next_at is None or done.next_at > done.now, "the sweep does not spin"
    assert (len(await runs(env)), len(await runs(env, "other"))) == (0, 1)
    await _write(env, row.schedule_id, row.template)
    await fire(env)
    assert len(await runs(env)) == 1
    assert await load_one(runtime, Schedule, row.schedule_id) is not None


async def _write(env: Env, schedule: str, template: str) -> None:
    runtime = env.engine.runtime
    change = Change((), (Patch(Schedule, (schedule,), {"template": template}),), id=runtime.minter.change_id())
    assert await runtime.commit_queue.add(change) is not None


async def test_a_clock_that_goes_back_fires_nothing_twice(env: Env) -> None:
    await put(env, ScheduleSpec(cron="* * * * *", overlap=Overlap.ALLOW))
    at = await fire_next(env)
    env.clock.advance_ms(-3 * MINUTE)
    await fire(env)
    assert (len(await runs(env)), (await row_of(env)).next_instant) == (1, at + MINUTE)
    env.clock.advance_ms(4 * MINUTE)
    await fire(env)
    assert len(await runs(env)) == 2
