"""The round trips of a run: the part of its cost that does not depend on the machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from flowfabric import Context, Fabric, RetryAfter
from flowfabric.model.change import Change
from flowfabric.stores.queries import Read
from tests.conftest import STORES
from tests.sdk.conftest import running_worker, wait_until_suspended, wait_until_true

# The round trips of a server happen in another process.
pytestmark = pytest.mark.parametrize("url", STORES, indirect=True)


class RoundTrips:
    """Records the runs that each store call concerns; sweeps concern none of them."""

    def __init__(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commits: list[str] = []
        self.loads: list[str] = []
        self._commit, self._load = store.commit, store.load
        monkeypatch.setattr(store, "commit", self._committing)
        monkeypatch.setattr(store, "load", self._loading)
        monkeypatch.setattr(store, "try_load_now", lambda _: None)

    async def _committing(self, changes: Sequence[Change], topics: frozenset[str] = frozenset()) -> Any:
        self.commits += {str(guard.key[0]) for change in changes for guard in change.guards}
        return await self._commit(changes, topics)

    async def _loading(self, reads: Sequence[Read]) -> Any:
        self.loads += {str(want.key[0]) for want in reads}
        return await self._load(reads)


async def counted(app: Fabric, monkeypatch: pytest.MonkeyPatch) -> RoundTrips:
    """The round trips from now on, on a registered lane: the first call on a lane loads more."""
    engine: Any = await app.engine()
    await engine.create_execution(execution_id=engine.new_execution_id(), delay_until=await engine.ping() + 10**9)
    return RoundTrips(engine.store, monkeypatch)


async def one(n: int) -> int:
    return n


async def test_a_plain_run_is_created_completed_and_read_once(app: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task
    async def plain(n: int) -> int:
        return n

    trips = await counted(app, monkeypatch)
    async with running_worker(app) as worker:
        run = await plain.submit(1)
        await wait_until_true(lambda: worker.done == 1)
        assert (trips.commits.count(run.id), trips.loads.count(run.id)) == (2, 0)
        assert await run.result(20) == 1
        assert trips.loads.count(run.id) == 1


async def test_a_step_costs_one_commit_and_having_no_recorded_steps_costs_nothing(
    app: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task
    async def ten(ctx: Context) -> int:
        return sum([await ctx.step(one, n) for n in range(10)])

    trips = await counted(app, monkeypatch)
    async with running_worker(app) as worker:
        run = await ten.submit()
        await wait_until_true(lambda: worker.done == 1)
        assert (trips.commits.count(run.id), trips.loads.count(run.id)) == (12, 0), "created, ten steps, completed"
        assert await run.result(20) == 45


async def test_a_second_attempt_loads_all_its_steps_at_once(app: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []

    @app.task
    async def ten(ctx: Context) -> int:
        total = sum([await ctx.step(one, n) for n in range(10)])
        passes.append(total)
        if len(passes) == 1:
            raise RetryAfter(0)
        return total

    trips = await counted(app, monkeypatch)
    async with running_worker(app) as worker:
        run = await ten.submit()
        await wait_until_true(lambda: worker.done == 1, 20)
        assert passes == [45, 45]
        assert trips.commits.count(run.id) <= 14, "created, ten steps, put away, promoted, completed"
        assert trips.loads.count(run.id) <= 2, "one for the steps, one for the sweep that promoted it"


async def test_a_replay_reads_everything_it_remembers_at_once(app: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    @app.task
    async def waiting(ctx: Context) -> list[str]:
        await ctx.gather(*(ctx.step(one, n) for n in range(10)))
        return [await ctx.receive("mail", str) for _ in range(3)]

    async with running_worker(app):
        run = await waiting.submit()
        for letter in ("a", "b"):
            await wait_until_suspended(run)
            await run.signal("mail", letter)
        await wait_until_suspended(run)
        trips = await counted(app, monkeypatch)
        await run.signal("mail", "c")
        await wait_until_true(lambda: trips.commits.count(run.id) >= 2)
        assert await run.result(20) == ["a", "b", "c"]
    assert trips.commits.count(run.id) == 2, "the message, which resumes it, and the completion"
    assert trips.loads.count(run.id) <= 5, "the message, the claim, everything that it remembers, and its result"


async def test_a_caught_failure_costs_one_record(app: Fabric, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail() -> None:
        raise LookupError("no")

    @app.task
    async def catching(ctx: Context) -> int:
        try:
            await ctx.step(fail)
        except LookupError:
            return await ctx.step(one, 1)
        return 0

    trips = await counted(app, monkeypatch)
    async with running_worker(app) as worker:
        run = await catching.submit()
        await wait_until_true(lambda: worker.done == 1)
        assert trips.commits.count(run.id) == 4, "created, failed, done, completed"
        assert trips.loads.count(run.id) <= 2, "before the failure is recorded, and before the next result"


@pytest.mark.parametrize("branches", [10, 100])
async def test_branches_that_spawn_and_await_cost_round_trips_in_proportion_to_their_number(
    app: Fabric, monkeypatch: pytest.MonkeyPatch, branches: int
) -> None:
    child = app.task(name="child")(one)

    @app.task
    async def parent(ctx: Context) -> int:
        async def member(n: int) -> int:
            return await (await ctx.spawn(child, n)).result()

        return sum(await ctx.gather(*(member(n) for n in range(branches))))

    trips = await counted(app, monkeypatch)
    async with running_worker(app):
        run = await parent.submit()
        assert await run.result(60) == sum(range(branches))
    # Each child may wake its parent on its own: it is reported, the parent is claimed, reads and parks. A report that
    # meets the park of its parent is decided again.
    assert trips.commits.count(run.id) <= 5 * branches + 10
    assert trips.loads.count(run.id) <= 5 * branches + 10
