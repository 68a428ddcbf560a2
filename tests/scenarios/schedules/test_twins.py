"""Two processes create a schedule of one name for tasks of two lanes at the same moment: there is one schedule."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.schedules.operator import ScheduleOperator
from flowfabric.ids import SeededMinter
from tests.scenarios.checked_store import CheckedStore
from tests.scenarios.env import Env
from tests.scenarios.schedules.test_fire import MINUTELY, NAME, fire_next, run_of, runs

LANES = [("default", "other"), ("other", "default")]


async def put(env: Env, engine: Engine, lane: str, *, only_new: bool = False) -> str:
    run = run_of(env, lane_id=lane, execution_kind="report")
    return await engine.put_schedule(NAME, MINUTELY, run, owner=None, only_new=only_new)


def second_engine(env: Env) -> Engine:
    assert isinstance(env.store, CheckedStore)
    return Engine(CheckedStore(env.store.store), minter=SeededMinter(2))


@pytest.mark.parametrize(("slow", "fast"), LANES)
async def test_two_first_puts_for_two_lanes_are_one_schedule(env: Env, slow: str, fast: str) -> None:
    other = second_engine(env)

    late, early = await env.race(put(env, env.engine, slow), lambda: put(env, other, fast))

    assert early == "created"
    assert late in ("created", "changed")
    [found] = (await env.engine.list_schedules()).schedules
    assert found.lane == slow, "the last put counts"
    await fire_next(env)
    assert len(await runs(env)) == found.fired + 1


@pytest.mark.parametrize(("slow", "fast"), LANES)
async def test_of_two_creates_at_once_one_is_refused_or_replaces_the_other(env: Env, slow: str, fast: str) -> None:
    other = second_engine(env)
    late, _ = await env.race(put(env, env.engine, slow, only_new=True), lambda: put(env, other, fast, only_new=True))
    [found] = (await env.engine.list_schedules()).schedules
    assert found.lane == (fast if isinstance(late, errors.ScheduleExists) else slow)


@pytest.mark.parametrize(("slow", "fast"), LANES)
async def test_a_duplicate_left_by_a_process_that_died_is_deleted_by_the_next_put(
    env: Env, monkeypatch: pytest.MonkeyPatch, slow: str, fast: str
) -> None:
    other = second_engine(env)

    begun: set[ScheduleOperator] = set()

    async def dies(self: ScheduleOperator, namespace: str, name: str) -> str | None:
        if self in begun:
            raise ConnectionError("the process has died")
        begun.add(self)
        return None

    with monkeypatch.context() as patch:
        patch.setattr(ScheduleOperator, "_keep_one", dies)
        for engine, lane in ((env.engine, slow), (other, fast)):
            with pytest.raises(ConnectionError):
                await put(env, engine, lane)
    assert len((await env.engine.list_schedules()).schedules) == 2
    described = (await env.engine.describe_schedule(NAME)).status

    assert await put(env, env.engine, described.lane) == "unchanged"

    assert (await env.engine.list_schedules()).schedules == [described]
