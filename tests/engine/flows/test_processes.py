"""Four processes complete the thousand parents of one join concurrently: it fires once and strands no execution."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from time import perf_counter
from uuid import uuid4

import pytest

from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.engine.runtime.wakeups import lane_topic
from flowfabric.ids import FlowId, mint_for_flow
from flowfabric.model.flow import EdgeGroup
from flowfabric.stores.queries import Read
from flowfabric.testing.flow_invariants import check_flow_invariants
from tests.executions import create_request

PARENTS, PROCESSES = 1000, 4


async def start_completer(url: str, lane: str, count: int = PARENTS // PROCESSES, ttl_ms: int = 60_000) -> Process:
    command = (sys.executable, "-m", "tests.engine.completer", url, lane, str(count), str(ttl_ms))
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return process


async def wait_for_join(engine: Engine, flow: FlowId, join: str) -> EdgeGroup:
    """Return the group once it has fired; load it again at every wakeup."""
    async with asyncio.timeout(30):
        while True:
            hint = engine.runtime.wakeups.subscribe(lane_topic("join"))
            found = (await engine.runtime.load((Read(EdgeGroup, (flow, join)),))).rows[0]
            group: EdgeGroup = found[0]
            if group.group_state != "pending":
                hint.cancel()
                return group
            await asyncio.wait((hint,), timeout=0.02)


async def create_fan_in(engine: Engine, flow: FlowId, count: int) -> str:
    """Create a join with this number of parents and return its id."""
    *parents, join = (mint_for_flow(flow, engine.partitions, engine.minter) for _ in range(count + 1))
    nodes = [create_request(name, "join" if name == join else "parents") for name in (*parents, join)]
    await engine.create_flow_graph(flow, nodes, [GraphEdge(parent, join) for parent in parents])
    return join


@pytest.mark.serial
async def test_a_thousand_parents_finished_by_four_processes_fire_their_join_once(database: str) -> None:
    flow = FlowId(str(uuid4()))
    async with await open_engine(database, migrate=False) as engine:
        join = await create_fan_in(engine, flow, PARENTS)
        processes = await asyncio.gather(*(start_completer(database, "parents") for _ in range(PROCESSES)))

        began = perf_counter()
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        group = await wait_for_join(engine, flow, join)
        took = perf_counter() - began
        outputs = [(await process.communicate())[0] for process in processes]

        assert outputs == [b'{"finished": 250}\n'] * PROCESSES
        assert (group.succeeded, group.n, group.group_state) == (PARENTS, PARENTS, "satisfied")
        claimed = await engine.claim_many("join", 10, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=60_000)
        assert [one.execution_id for one in claimed] == [join]
        await check_flow_invariants(engine)
        print(f"{PARENTS} parents, {PROCESSES} processes: {took:.2f} s")  # The benchmark measures how fast it is.
