"""Several processes complete the parents of a join and one is killed: the join fires once and strands no execution."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from flowfabric.connector import open_engine
from flowfabric.ids import FlowId
from flowfabric.model.flow import EdgeGroup
from flowfabric.settings import Settings
from flowfabric.stores.queries import Read
from flowfabric.testing.flow_invariants import check_flow_invariants
from flowfabric.testing.invariants import check_invariants
from tests.engine.flows.test_processes import PROCESSES, create_fan_in, start_completer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TTL_MS = 1500  # TTL of leases whose holder is killed


async def test_a_process_that_is_killed_while_it_completes_strands_no_execution(url: str) -> None:
    flow, count = FlowId(str(uuid4())), 200
    async with await open_engine(url, settings=Settings(poll_ms=100)) as engine:
        join = await create_fan_in(engine, flow, count)
        others = await asyncio.gather(
            *(start_completer(url, "parents", count // PROCESSES) for _ in range(PROCESSES - 1))
        )
        victim = await start_completer(url, "parents", count // PROCESSES, TTL_MS)
        for process in (victim, *others):
            assert process.stdin is not None
            process.stdin.write(b"go\n")
        await asyncio.sleep(0.02)
        victim.kill()
        await asyncio.gather(*(process.communicate() for process in (victim, *others)))

        async with asyncio.timeout(60):
            while (await engine.runtime.load((Read(EdgeGroup, (flow, join)),))).rows[0][0].group_state == "pending":
                for sweep in ("lease_expiry", "completion_dispatch"):
                    await engine.sweep_once(sweep)
                left = await engine.claim_many(
                    "parents", count, worker_id="w", worker_instance_id="w-2", lease_ttl_ms=60_000, max_wait_ms=100
                )
                await asyncio.gather(*(engine.complete(one.handle) for one in left))
                await engine.dispatcher.wait_idle()

        [group] = (await engine.runtime.load((Read(EdgeGroup, (flow, join)),))).rows[0]
        assert (group.succeeded, group.n, group.group_state) == (count, count, "satisfied")
        claimed = await engine.claim_many("join", 10, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=60_000)
        assert [one.execution_id for one in claimed] == [join]
        await check_flow_invariants(engine)
        await check_invariants(engine)
