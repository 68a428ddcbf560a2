"""A process is killed while it works off a bulk operation: another one continues it, and acts on each run once."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.connector import open_engine
from flowfabric.model.bulk_operation import BulkState
from flowfabric.model.execution import Execution
from flowfabric.stores.queries import Scan, Where
from tests.chaos.test_sweepers import wait_until
from tests.chaos.worker_processes import worker_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

RUNS = 1000


async def test_a_bulk_replay_survives_the_death_of_its_process(url: str) -> None:
    async with await open_engine(url) as engine:
        names = [engine.new_execution_id("mail") for _ in range(RUNS)]
        await asyncio.gather(*(engine.create_execution(execution_id=name, lane_id="mail") for name in names))
        await asyncio.gather(*(engine.cancel_execution(name, reason="wrong price") for name in names))
        operation = (await engine.start_operation("replay", {"lane_id": "mail"}, reason="right price")).operation_id

        async def has_begun() -> bool:
            return (await engine.read_operation(operation)).changed > 0

        async def has_ended() -> bool:
            return (await engine.read_operation(operation)).state is not BulkState.RUNNING

        with worker_processes() as start_worker:
            victim = start_worker("sweep", url)
            await wait_until(has_begun)
            await asyncio.to_thread(victim.kill)
            at_death = await engine.read_operation(operation)
            assert at_death.state is BulkState.RUNNING, "it was killed before it had ended"
            start_worker("sweep", url)
            await wait_until(has_ended)
        ended = await engine.read_operation(operation)
        rows = await engine.runtime.scan(Scan(Execution, (Where("lane_id", "=", "mail"),), limit=RUNS + 1))
    assert 0 < at_death.changed < RUNS
    assert (ended.state, ended.changed, ended.refused) == (BulkState.COMPLETED, RUNS, 0)
    assert [row.replay_count for row in rows] == [1] * RUNS
