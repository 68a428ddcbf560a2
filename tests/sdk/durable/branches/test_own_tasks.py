"""Tasks that a durable function makes itself are branches: what they did is found by who did it."""

from __future__ import annotations

import asyncio
from typing import Any

import anyio
import pytest

from flowfabric import Context, Fabric
from flowfabric.model.states import PublicState
from flowfabric.sdk.durable import branches, parker
from flowfabric.sdk.durable.ledger import Ledger, branch_of
from flowfabric.testing import World
from tests.sdk.conftest import running_worker, wait_until_suspended, wait_until_true
from tests.sdk.durable.branches.steps import check, effects, pay
from tests.sdk.durable.crashes import Crashes

IS_FOR_EVERY_STORE = True

world_app = Fabric("sqlite:////nowhere/at/all.db")


# -- the four programs -------------------------------------------------------------------------------------------------


@world_app.task
async def two_reminders(ctx: Context) -> list[int]:
    begun = await ctx.now()

    async def late() -> int:
        await ctx.step(check)
        await ctx.sleep("20m")
        return await ctx.now() - begun

    async def soon() -> int:
        await asyncio.sleep(0.01)
        await ctx.sleep("1m")
        return await ctx.now() - begun

    return list(await asyncio.gather(late(), soon()))


async def test_two_tasks_keep_their_own_sleeps() -> None:
    async with World(world_app) as world:
        lengths = await (await two_reminders.submit()).result()
        assert [round(length / 60_000) for length in lengths] == [20, 1]
        world.assert_invariants()


async def test_two_tasks_keep_their_own_messages(app: Fabric) -> None:
    @app.task
    async def letters(ctx: Context) -> list[str]:
        async def late() -> str:
            await ctx.step(check)
            return await ctx.receive("mail", str)

        async def early() -> str:
            await asyncio.sleep(0.01)
            first = await ctx.receive("mail", str)
            return f"{first} then {await ctx.receive('mail', str)}"

        return list(await asyncio.gather(late(), early()))

    async with running_worker(app):
        run = await letters.submit()
        for letter in ("a", "b", "c"):
            await wait_until_suspended(run)
            await run.signal("mail", letter)
        assert await run.result(20) == ["b", "a then c"]


async def test_two_tasks_keep_their_own_children(app: Fabric) -> None:
    @app.task
    async def child(ctx: Context, name: str) -> str:
        return name

    @app.task
    async def parent(ctx: Context) -> list[str]:
        async def late() -> str:
            await ctx.step(check)
            return await (await ctx.spawn(child, "late")).result()

        async def early() -> str:
            await asyncio.sleep(0.01)
            name = await (await ctx.spawn(child, "early")).result()
            await ctx.receive("go")
            return name

        return list(await asyncio.gather(late(), early()))

    async with running_worker(app):
        run = await parent.submit()
        await wait_until_suspended(run)
        await run.signal("go")
        assert await run.result(20) == ["late", "early"]


async def test_two_tasks_pay_once_each_although_the_process_dies_between_them(app: Fabric) -> None:
    @app.task
    async def wages(ctx: Context) -> list[str]:
        async def ana() -> str:
            await ctx.step(check)
            return await ctx.step(pay, "ana")

        async def bo() -> str:
            await asyncio.sleep(0.01)
            return await ctx.step(pay, "bo")

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ana()), group.create_task(bo())]
        return [task.result() for task in tasks]

    crashes = Crashes(app, [("step:check", "after_commit")])
    async with running_worker(app):
        assert await (await wages.submit()).result(20) == ["ana is paid", "bo is paid"]
    assert sorted(effects) == ["ana", "bo"]
    assert not crashes.left


async def test_a_run_does_not_park_under_a_task_that_works(app: Fabric) -> None:
    rounds: list[int] = []

    @app.task
    async def beside(ctx: Context) -> str:
        rounds.append(1)

        async def working() -> str:
            await asyncio.sleep(0.05)
            return await ctx.receive("soon", str)

        _, soon = await asyncio.gather(ctx.receive("never", str, timeout="7d"), working(), return_exceptions=False)
        return str(soon)

    async with running_worker(app):
        run = await beside.submit()
        await wait_until_suspended(run)
        await run.signal("soon", "now")
        await wait_until_suspended(run)
        await run.signal("never", "after all")
        assert await run.result(20) == "now"
    assert len(rounds) <= 3


# -- names -------------------------------------------------------------------------------------------------------------


async def test_a_task_of_a_task_keeps_its_own_steps(app: Fabric) -> None:
    @app.task
    async def nested(ctx: Context) -> list[Any]:
        async def inner(name: str) -> str:
            paid = await ctx.step(pay, name)
            await ctx.receive("go")
            return paid

        async def outer(name: str) -> list[str]:
            return list(await asyncio.gather(inner(f"{name}1"), inner(f"{name}2")))

        return list(await asyncio.gather(outer("a"), outer("b")))

    async with running_worker(app):
        run = await nested.submit()
        for _ in range(4):
            await wait_until_suspended(run)
            await run.signal("go")
        assert await run.result(20) == [["a1 is paid", "a2 is paid"], ["b1 is paid", "b2 is paid"]]
    assert sorted(effects) == ["a1", "a2", "b1", "b2"]


@pytest.mark.parametrize("cold", [0, 1, 5])
async def test_tasks_of_a_library_do_not_shift_other_branches(app: Fabric, cold: int) -> None:
    made = [cold]

    async def keep_alive() -> None:
        await asyncio.sleep(0)

    async def connect() -> None:
        connections = [asyncio.create_task(keep_alive()) for _ in range(made[0])]
        made[0] = 0  # the pool is warm in the next attempt
        await asyncio.gather(*connections)

    @app.task
    async def pooled(ctx: Context) -> list[str]:
        async def member(name: str) -> str:
            await connect()
            paid = await ctx.step(pay, name)
            await ctx.receive("go")
            return paid

        first = asyncio.create_task(member("a"))
        await connect()
        return list(await asyncio.gather(first, asyncio.create_task(member("b"))))

    async with running_worker(app):
        run = await pooled.submit()
        for _ in range(2):
            await wait_until_suspended(run)
            await run.signal("go")
        assert await run.result(20) == ["a is paid", "b is paid"]
    assert effects == ["a", "b"]


async def test_a_task_that_outlives_its_maker_is_waited_for(app: Fabric) -> None:
    @app.task
    async def outliving(ctx: Context) -> str:
        found: list[asyncio.Task[str]] = []

        async def long() -> str:
            await asyncio.sleep(0.05)
            await ctx.step(pay, "late")
            return await ctx.receive("go", str)

        async def maker() -> None:
            found.append(asyncio.create_task(long()))

        await asyncio.create_task(maker())
        return await found[0]

    async with running_worker(app):
        run = await outliving.submit()
        await wait_until_suspended(run)
        await run.signal("go", "on")
        assert await run.result(20) == "on"
    assert effects == ["late"]


async def test_wait_for_around_a_receive_leaves_the_message_for_the_next(app: Fabric) -> None:
    @app.task
    async def impatient(ctx: Context) -> list[Any]:
        async def waiting() -> str | None:
            try:
                return await asyncio.wait_for(ctx.receive("go", str), 0.05)
            except TimeoutError:
                return None

        # The step keeps the run from parking, so that the time runs out.
        first, _ = await asyncio.gather(waiting(), ctx.step(check, 300))
        return [first, await ctx.receive("go", str)]

    async with running_worker(app):
        run = await impatient.submit()
        await wait_until_suspended(run)
        await run.signal("go", "one")
        assert await run.result(20) == [None, "one"]


async def test_the_branches_of_anyio_keep_their_own_steps(app: Fabric) -> None:
    @app.task
    async def grouped(ctx: Context) -> dict[str, str]:
        paid: dict[str, str] = {}

        async def member(name: str, ms: int) -> None:
            await anyio.sleep(ms / 1000)
            paid[name] = await ctx.step(pay, name)
            await ctx.receive("go")

        async with anyio.create_task_group() as group:
            group.start_soon(member, "a", 40)
            group.start_soon(member, "b", 1)
        return paid

    async with running_worker(app):
        run = await grouped.submit()
        for _ in range(2):
            await wait_until_suspended(run)
            await run.signal("go")
        assert await run.result(20) == {"a": "a is paid", "b": "b is paid"}
    assert sorted(effects) == ["a", "b"]


# -- parking -----------------------------------------------------------------------------------------------------------


@world_app.task
async def with_a_keeper(ctx: Context) -> str:
    async def pump() -> None:
        await asyncio.Event().wait()

    keeper = asyncio.create_task(pump())
    await ctx.sleep("1h")
    keeper.cancel()
    return await ctx.step(pay, "rent")


async def test_a_task_that_never_waits_is_cut_off_after_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    async with World(world_app) as world:
        run = await with_a_keeper.submit()
        await world.advance("9s")
        assert await run.state() is PublicState.ACTIVE
        await world.advance("2s")
        assert await run.state() is PublicState.SUSPENDED
        assert await run.result() == "rent is paid"
    stalls = [record.getMessage() for record in caplog.records if record.getMessage().startswith("stall:")]
    task = "'with_a_keeper.<locals>.pump'"
    assert stalls == [f"stall: task {task} of run {run.id} went on for 10 s beside waits; it was cut off"]


async def test_a_member_of_gather_that_works_long_is_waited_for() -> None:
    async def slow() -> str:
        await asyncio.sleep(60)
        return "done"

    own_app = Fabric("memory://")

    @own_app.task
    async def gathering(ctx: Context) -> list[Any]:
        return await ctx.gather(ctx.sleep("1h"), slow())

    async with World(own_app) as world:
        run = await gathering.submit()
        await world.advance("59s")
        assert await run.state() is PublicState.ACTIVE
        assert await run.result() == [None, "done"]


async def test_a_worker_inside_a_handler_has_branches_of_its_own(app: Fabric) -> None:
    """The tasks of a worker that a handler starts are no tasks of that handler."""
    other = Fabric("memory://")

    @other.task
    async def below(ctx: Context) -> str:
        async def member() -> str:
            return await ctx.step(pay, "below")

        [paid] = await asyncio.gather(member())
        return paid

    @app.task
    async def above(ctx: Context) -> str:
        async def member() -> str:
            async with running_worker(other):
                paid = await (await below.submit()).result(20)
                steps = await (await other.engine()).read_steps((await below.submit()).id)
                assert steps == []
                return paid

        [paid] = await asyncio.gather(member())
        return paid + await ctx.receive("go", str)

    async with other, running_worker(app):
        run = await above.submit()
        await run.signal("go", "!")
        assert await run.result(20) == "below is paid!"


async def test_a_refused_park_is_raised_where_the_function_waits(
    app: Fabric, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lease that is lost while the run parks ends the attempt, and nothing is logged as never retrieved."""

    @app.task
    async def waiting(ctx: Context) -> str:
        return str((await asyncio.gather(ctx.receive("go", str), ctx.receive("on", str)))[0])

    engine = await app.engine()
    revoked: list[str] = []
    original = parker.Parker._try_to_park

    async def lose_lease_first(self: parker.Parker) -> None:
        if not revoked:
            revoked.append(run.id)
            await engine.revoke_lease(run.id)
        await original(self)

    monkeypatch.setattr(parker.Parker, "_try_to_park", lose_lease_first)
    async with running_worker(app):
        run = await waiting.submit()
        await wait_until_true(lambda: bool(revoked))
        await run.signal("on", "on")
        await run.signal("go", "went")
        assert await run.result(20) == "went"
    assert revoked
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]


async def test_gather_leaves_no_coroutine_unawaited() -> None:
    """A member that is cancelled before it begins is closed; a warning of asyncio would fail this test."""
    begun: list[str] = []

    async def member(name: str) -> None:
        begun.append(name)

    own_app = Fabric("memory://")

    @own_app.task
    async def cancelled_gather(ctx: Context) -> str:
        gathering = asyncio.ensure_future(ctx.gather(member("a"), member("b")))
        await asyncio.sleep(0)
        gathering.cancel()
        await asyncio.gather(gathering, return_exceptions=True)
        return "closed"

    async with World(own_app):
        assert await (await cancelled_gather.submit()).result() == "closed"
    assert begun == []


def test_the_names_of_branches_are_short_enough_for_a_store() -> None:
    tree = branches.BranchTree()
    tree.by_arrival = False
    branch = tree.root

    async def with_a_rather_long_name() -> None:
        pass

    for _ in range(100):
        coroutine = with_a_rather_long_name()
        branch = branch.make_own(coroutine)
        coroutine.close()
    assert len(branch.name.encode()) < 700


def test_the_branch_of_an_operation_is_in_its_name() -> None:
    nested = "gather#0.1/task:main.<locals>.pay#2/race#0.late/"
    for label in ("charge", "sleep#0", "key:7"):
        assert branch_of(f"{nested}{label}") == nested
    assert branch_of(f"race:{nested}race") == nested
    assert branch_of("charge") == branch_of("race:race") == ""


async def test_a_run_of_before_branches_keeps_its_names(app: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records have no numbers; its tasks are identified by their arrival until it ends."""
    fill = Ledger._fill

    def fill_as_before(self: Ledger, remembered: Any) -> None:
        fill(self, remembered)
        self._branches.by_arrival = True

    @app.task
    async def old(ctx: Context) -> list[str]:
        async def member(name: str) -> str:
            paid = await ctx.step(pay, name)
            return paid + await ctx.receive("go", str)

        return list(await asyncio.gather(member("a"), member("b")))

    with monkeypatch.context() as before:
        before.setattr(Ledger, "_fill", fill_as_before)
        before.setattr(Ledger, "next_number", lambda _: None)
        async with running_worker(app):
            run = await old.submit()
            await wait_until_suspended(run)
    memos = await (await app.engine()).read_steps(run.id)
    assert [(memo.name, memo.number) for memo in memos] == [("pay", None), ("pay", None)]
    async with running_worker(app):
        for _ in range(2):
            await wait_until_suspended(run)
            await run.signal("go", "!")
        assert await run.result(20) == ["a is paid!", "b is paid!"]
    assert effects == ["a", "b"]
