"""Flow races on Postgres, where a statement sees rows as they were when it began, however long it waited."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.settings import Settings
from flowfabric.stores.postgres import PostgresStore
from tests.conftest import Rival
from tests.scenarios.flow_env import FlowEnv

pytestmark = pytest.mark.timeout(60)


async def test_a_completion_that_waits_for_the_replay_of_its_dependent_reaches_it(
    pg: PostgresStore, database: str, clock: ManualClock, rival: Rival
) -> None:
    flow = FlowEnv(Engine(pg, minter=SeededMinter(1), settings=Settings(dispatch=False)), clock)
    await flow.begin("abc")
    await flow.join("ac", "b")
    await flow.fail("a")
    await flow.cascade("a")
    await flow.engine.replay_execution(flow.names["a"])
    held = await flow.claim("a")
    other = PostgresStore(database, clock)
    await other.open(migrate=False)
    replayer = Engine(other, minter=SeededMinter(2), settings=Settings(dispatch=False))

    await rival.begin(f"select 1 from ff_dependency where edge_id = '{flow.edges['a', 'b']}' for update")
    replaying = asyncio.create_task(replayer.replay_execution(flow.names["b"]))
    [waiting] = await rival.blocks()
    ending = asyncio.create_task(flow.engine.complete(held.handle))
    while not await rival.fetch("select 1 from pg_stat_activity where $1 = any(pg_blocking_pids(pid))", waiting):
        await rival.fetch("select pg_sleep(0.005)")
    await rival.end()
    await asyncio.gather(replaying, ending)
    await other.close()

    assert await flow.state("a", "b") == "completed waiting_children"
    assert (await flow.dependency("a", "b")).outcome == "success"
    await flow.sweep("completion_dispatch")
    assert await flow.counts("b") == "1/0/0 of 2 pending"
