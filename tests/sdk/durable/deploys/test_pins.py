"""Pinned tasks: a run ends with the version of the code it began with."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import Context, Fabric
from flowfabric.errors import InvalidInput
from flowfabric.model.obstacles import Pinned
from flowfabric.sdk.worker.worker import Worker
from flowfabric.testing import World

IS_FOR_EVERY_STORE = True


def versioned(version: str, *, pins_both: bool = False) -> tuple[Fabric, Any, Any]:
    """Return an app of a version, and two tasks that say which version ran them; the first one is pinned."""
    app = Fabric("memory://", version=version)

    async def say(word: str) -> str:
        return f"{word} by {version}"

    async def report(ctx: Context) -> list[str]:
        said = [await ctx.step(say, "begun")]
        await ctx.sleep("1h")
        said.append(await ctx.step(say, "waited"))
        await ctx.sleep("1h")
        return [*said, f"ended by {version}"]

    return app, app.task(name="pinned", pin=True)(report), app.task(name="free", pin=pins_both)(report)


async def test_a_pinned_run_waits_for_a_worker_of_its_version_and_others_do_not() -> None:
    older, pinned, free = versioned("1")
    newer, _, _ = versioned("2")
    async with World(older) as world:
        runs = [await pinned.submit(), await free.submit()]
        await world.advance("1m")
        await world.deploy(newer)
        await world.advance("3h")
        assert await runs[1].result() == ["begun by 1", "waited by 2", "ended by 2"]
        assert (await runs[0].explain()).obstacle == Pinned("1", "default")
        assert (await (await newer.engine()).count_old_ways()).pinned == {"1": 1}

        await world.deploy(older)
        assert await runs[0].result() == ["begun by 1", "waited by 1", "ended by 1"]
        world.assert_invariants()


async def test_an_unpinned_run_continues_with_any_version_and_is_not_pinned_again() -> None:
    older, pinned, _ = versioned("1")
    newer, _, _ = versioned("2")
    newest, _, _ = versioned("3")
    async with World(older) as world:
        run = await pinned.submit()
        await world.advance("1m")
        await world.deploy(newer)
        await world.advance("90m")
        assert await run.unpin()
        assert not await run.unpin()
        await world.settle()
        await world.deploy(newest)
        assert await run.result("1d") == ["begun by 1", "waited by 2", "ended by 3"]


async def test_a_pinned_run_is_moved_to_another_version() -> None:
    older, pinned, _ = versioned("1")
    newer, _, _ = versioned("2")
    async with World(older) as world:
        run = await pinned.submit()
        await world.advance("1m")
        assert await run.unpin(to="2")
        await world.advance("90m")
        assert (await run.explain()).obstacle == Pinned("2", "default")
        await world.deploy(newer)
        assert await run.result("1d") == ["begun by 1", "waited by 2", "ended by 2"]


async def test_a_run_that_has_not_begun_is_not_pinned() -> None:
    older, pinned, _ = versioned("1")
    newer, _, _ = versioned("2")
    async with World(older, workers=0) as world:
        run = await pinned.submit()
        await run.signal("early", "mail")  # a message from outside is no operation of the function
        await world.deploy(newer)
        world.start_worker()
        assert await run.result("1d") == ["begun by 2", "waited by 2", "ended by 2"]


async def test_a_run_that_began_before_its_task_was_pinned_is_not_pinned() -> None:
    older, _, free = versioned("1")
    newer, _, _ = versioned("2", pins_both=True)
    newest, _, _ = versioned("3")
    async with World(older) as world:
        run = await free.submit()
        await world.advance("1m")
        await world.deploy(newer)
        await world.advance("70m")
        await world.deploy(newest)
        assert await run.result("1d") == ["begun by 1", "waited by 2", "ended by 3"]


@pytest.mark.parametrize("moment", ["before_effect", "after_commit"])
async def test_a_crash_in_the_first_operation_keeps_the_pin(moment: Any) -> None:
    older, pinned, _ = versioned("1")
    newer, _, _ = versioned("2")
    async with World(older) as world:
        world.crash_at("step:say", moment)
        run = await pinned.submit()
        await world.settle()
        await world.deploy(newer)
        await world.advance("3h")
        assert (await run.explain()).obstacle == Pinned("1", "default")
        await world.deploy(older)
        assert await run.result("1d") == ["begun by 1", "waited by 1", "ended by 1"]


async def test_branches_that_begin_together_pin_the_run_once() -> None:
    app = Fabric("memory://", version="1")

    async def say(word: str) -> str:
        return word

    @app.task(pin=True)
    async def together(ctx: Context) -> list[str]:
        return await ctx.gather(*(ctx.step(say, word) for word in ("a", "b", "c")))

    async with World(app) as world:
        run = await together.submit()
        assert await run.result("1d") == ["a", "b", "c"]
        assert [entry.kind for entry in await world.timeline(run)].count("pinned") == 1


def test_a_pinned_task_needs_an_explicit_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLOWFABRIC_VERSION", raising=False)
    with pytest.raises(InvalidInput, match="pin: the app has no version"):
        Fabric("memory://").task(name="t", pin=True)
    monkeypatch.setenv("FLOWFABRIC_VERSION", "7")
    Fabric("memory://").task(name="t", pin=True)


@pytest.mark.parametrize("version", ["a b", "a,b", "a\n", "x" * 201])
def test_a_version_has_no_blanks_and_commas(version: str) -> None:
    with pytest.raises(InvalidInput, match="version: "):
        Fabric("memory://", version=version)


def test_a_worker_offers_its_version() -> None:
    app, _, _ = versioned("1")
    assert Worker(app, capabilities=["gpu"])._capabilities == ("ff.version=1", "gpu")
    assert Worker(Fabric("memory://"), lanes=["default"])._capabilities == ()
