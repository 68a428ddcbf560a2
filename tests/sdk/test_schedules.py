"""Schedules of an application: declared in code, created at run time, and what their runs know."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from flowfabric import Calendar, Context, Fabric, InvalidInput, errors
from flowfabric.model.scheduling.schedule import PausedBy
from flowfabric.testing import World

IS_FOR_EVERY_STORE = True

app = Fabric("memory://")
seen: list[tuple[str | None, datetime | None, str]] = []


@app.task
async def report(ctx: Context, region: str) -> str:
    seen.append((ctx.schedule, ctx.scheduled_at, region))
    return f"report of {region}"


@app.task
async def slow(ctx: Context) -> str:
    await ctx.sleep("90m")
    return "done"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    seen.clear()
    monkeypatch.setattr(app, "declared_schedules", {})


def instant(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


async def test_a_declared_schedule_runs_at_its_instants_and_its_runs_know_them() -> None:
    nightly = app.schedule("hourly", report.s("eu"), cron="0 * * * *")
    async with World(app) as world:
        begin = instant(world.now_ms())
        await world.advance("3h")
        described = await nightly.describe()
        await world.assert_invariants()

    first = begin.replace(minute=0, second=0, microsecond=0) + timedelta(hours=1)
    assert seen == [("hourly", first + timedelta(hours=n), "eu") for n in range(3)]
    assert (described.status.fired, len(described.runs), len(described.next_instants)) == (3, 3, 10)
    assert described.status.task == report.name


async def test_a_run_without_a_schedule_has_no_instant() -> None:
    async with World(app):
        await (await report.submit("us")).result()
    assert seen == [(None, None, "us")]


async def test_a_person_pauses_resumes_and_triggers() -> None:
    handle = app.schedule("hourly", report.s("eu"), cron="0 * * * *")
    async with World(app) as world:
        await world.settle()
        assert await handle.pause("until the migration is done")
        assert not await handle.pause("until the migration is done")
        await world.advance("5h")
        assert seen == []
        run = await handle.trigger()
        assert await run.result() == "report of eu"
        paused = await handle.describe()
        assert await handle.resume()
        assert not await handle.resume()
        await world.advance("1h")

    assert (paused.status.note, paused.status.paused_by) == ("until the migration is done", PausedBy.PERSON)
    assert len(seen) == 2


async def test_a_backfill_passes_over_instants_that_ran() -> None:
    handle = app.schedule("hourly", report.s("eu"), cron="0 * * * *")
    async with World(app) as world:
        await world.advance("2h")
        end = instant(world.now_ms())
        done = await handle.backfill(end - timedelta(hours=5), end, overlap="queue")
        await world.advance("10m")
        again = await handle.backfill(end - timedelta(hours=5), end, overlap="allow")

    assert (done.created, done.queued, done.known) == (1, 2, 2)
    assert (again.created, again.known) == (0, 5)
    assert len({at for _, at, _ in seen}) == len(seen) == 5


async def test_deploys_change_pause_and_bring_back_what_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    app.schedule("kept", report.s("eu"), cron="0 * * * *")
    app.schedule("gone", report.s("us"), cron="0 * * * *")
    async with World(app) as world:
        await world.settle()
        await app.schedules.get("kept").pause("look at this")
        await app.schedules.create("of a person", report.s("de"), cron="@daily")

        monkeypatch.setattr(app, "declared_schedules", {})
        app.schedule("kept", report.s("eu"), cron="30 * * * *")
        world.start_worker()
        await world.settle()
        deployed = {one.name: one for one in await app.schedules.list()}

        app.schedule("gone", report.s("us"), cron="0 * * * *")
        world.start_worker()
        await world.settle()
        back = {one.name: one for one in await app.schedules.list()}

        monkeypatch.setattr(app, "declared_schedules", {})
        monkeypatch.setattr(app, "prune_schedules", True)
        world.start_worker()
        await world.settle()
        left = [one.name for one in await app.schedules.list()]

    assert (deployed["kept"].spec.cron, deployed["kept"].note) == ("30 * * * *", "look at this")
    assert (deployed["gone"].paused_by, deployed["gone"].note) == (
        PausedBy.DEPLOY,
        "it is no longer declared in the code",
    )
    assert back["gone"].paused_at is None
    assert left == ["of a person"]


async def test_a_schedule_that_exists_with_another_definition_is_not_created_again() -> None:
    async with World(app) as world:
        await world.settle()
        create = app.schedules.create
        await create("tenant-7", report.s("eu"), cron="@daily")
        await create("tenant-7", report.s("eu"), cron="@daily")
        with pytest.raises(errors.ScheduleExists):
            await create("tenant-7", report.s("us"), cron="@daily")
        handle = app.schedules.get("tenant-7")
        assert await handle.delete()
        assert not await handle.delete()
        with pytest.raises(errors.NotFound):
            await handle.describe()
        assert await app.schedules.list() == []


async def test_an_instant_is_passed_over_while_the_last_run_is_under_way() -> None:
    handle = app.schedule("slow", slow.s(), every="1h")
    async with World(app) as world:
        await world.advance("4h")
        described = await handle.describe()
    assert (described.status.fired, described.status.skipped) == (2, 2)


@pytest.mark.parametrize(
    ("declare", "wrong"),
    [
        (lambda: app.schedule("x", report.s("eu"), cron="61 * * * *"), "cron: .*cannot be read: bad minute"),
        (lambda: app.schedule("x", report.s("eu"), cron="* * *"), "needs five"),
        (lambda: app.schedule("x", report.s("eu"), cron="0 0 30 2 *"), "cron: "),
        (lambda: app.schedule("x", report.s("eu"), cron="@daily", tz="Mars/Base"), "write one like Europe/Berlin"),
        (lambda: app.schedule("x", report.s("eu")), "give one of cron=, every= and at="),
        (lambda: app.schedule("x", report.s("eu"), cron="@daily", every="5s"), "it has cron and every"),
        (lambda: app.schedule("x", report.s("eu"), every="10ms"), "every: "),
        (lambda: app.schedule("x", report.s("eu"), every="5s", offset="7s"), "offset: "),
        (lambda: app.schedule("x", report.s("eu"), at=Calendar(day=31, month=2)), "no day that exists"),
        (lambda: app.schedule("x", report.s("eu"), at=Calendar(weekdays="mon-fry")), 'write "mon-fri,sun"'),
        (lambda: app.schedule("x", report.s("eu"), cron="@daily", overlap="often"), "overlap: "),  # type: ignore[arg-type]
        (lambda: app.schedule("x", report.s("eu"), cron="@daily", catch_up="1s"), "catch_up: "),
        (lambda: app.schedule("x", report.s("eu"), cron="@daily", jitter=-5), "jitter: "),
        (lambda: app.schedule("x", report.s("eu"), cron="@daily", jitter="-5s"), "jitter: "),
        (lambda: app.schedule("x", report, cron="@daily"), "no call of a task"),  # type: ignore[arg-type]
        (lambda: app.schedule("", report.s("eu"), cron="@daily"), "is no name"),
        (lambda: app.schedule("x", report.options(key="k").s("eu"), cron="@daily"), "key, delay and deadline"),
        (lambda: app.schedule("x", report.s(7), cron="@daily"), "region"),  # type: ignore[arg-type]
    ],
)
def test_bad_input_is_refused_with_its_fix_where_it_is_declared(declare: Callable[[], Any], wrong: str) -> None:
    with pytest.raises(InvalidInput, match=wrong):
        declare()
    assert app.declared_schedules == {}


def test_two_schedules_of_one_name_are_refused() -> None:
    app.schedule("x", report.s("eu"), cron="@daily")
    with pytest.raises(InvalidInput, match="declared twice"):
        app.schedule("x", report.s("us"), cron="@daily")


@pytest.mark.parametrize("moment", ["before_effect", "after_commit"])
async def test_a_process_that_dies_as_it_fires_leaves_one_run(moment: Any) -> None:
    app.schedule("hourly", report.s("eu"), cron="0 * * * *")
    async with World(app) as world:
        await world.settle()
        world.crash_at("fire:hourly", moment)
        await world.advance("3h")
        await world.assert_invariants()
    assert len(seen) == 3
    assert len({at for _, at, _ in seen}) == 3


async def test_a_weekend_without_workers_is_made_up_for_as_far_as_the_schedule_asks() -> None:
    handle = app.schedule("hourly", report.s("eu"), cron="0 * * * *", overlap="allow", catch_up="3h")
    async with World(app) as world:
        await world.advance("1s")  # the worker has started, which starts the sweeps
        await world.engine.stop_sweeps()
        await world.advance("48h")
        world.engine.start_sweeps()
        await world.advance("1m")
        described = await handle.describe()
        await world.assert_invariants()
    assert (described.status.fired, described.status.missed) == (3, 45)


async def test_a_schedule_of_a_plain_function_knows_its_instant_in_a_thread() -> None:
    @app.task(name="plain")
    def plain(ctx: Context) -> None:
        seen.append((ctx.schedule, ctx.scheduled_at, "plain"))

    app.schedule("minutely", plain.s(), every="1m", offset="5s")
    async with World(app) as world:
        await world.advance("2m")
    assert [name for name, _, _ in seen] == ["minutely", "minutely"]
    assert {at.second for _, at, _ in seen if at is not None} == {5}
