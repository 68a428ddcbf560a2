"""Programs in a `World`, whose workers share an engine and are killed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from flowfabric import Retry
from flowfabric.testing.world import World
from tests.sdk.programs.environments import AFTERMATH_S
from tests.sdk.programs.interpreter import BACKOFF, make_app, make_purse
from tests.sdk.programs.journal import Journal
from tests.sdk.programs.model import End, Violation, find_violations
from tests.sdk.programs.outside import collected_alarms, grant_wishes, wait_for_end
from tests.sdk.programs.program import Program, total_minutes


class WorldProcess:
    """The worker of a world, as the journal sees it."""

    is_dead = False


async def run_in_world(program: Program, kills: Sequence[int] = ()) -> tuple[list[Violation], Journal, End]:
    """Run a program in a world whose worker is killed at these of its commits, counted from the kill before."""
    processes = [WorldProcess()]
    loop = asyncio.get_running_loop()
    journal = Journal(lambda: loop.time())
    app = make_app(journal, lambda: processes[-1], program)

    async def kill_workers(world: World) -> None:
        for kill in kills:
            worker = world._workers[-1][0]
            point = world.store.stop_before("commit")
            try:
                for _ in range(kill):
                    await point.reached()
                    before, point = point, world.store.stop_before("commit")
                    before.release()
                await point.reached()
                processes[-1].is_dead = True
                await world.kill(worker)
                processes.append(WorldProcess())
                world.start_worker()
            finally:
                point.release()

    with collected_alarms(journal):
        async with World(app) as world:
            retry = Retry(max=program.retries, base=BACKOFF, jitter=False)
            run = await app.tasks["program"].options(retry=retry).submit()
            helpers = [asyncio.create_task(work) for work in (kill_workers(world), grant_wishes(journal, run))]
            end = await wait_for_end(run, (total_minutes(program.body) + 60) * 60)
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            world.store.heal()
            await asyncio.sleep(AFTERMATH_S)
            usage, _ = await world.engine.read_budget_usage_and_limits(make_purse().id("default"))
            end = msgspec.structs.replace(end, spent=usage.get("tokens", 0))
            world.assert_invariants()
    return find_violations(program, journal, end, faults=len(kills)), journal, end
