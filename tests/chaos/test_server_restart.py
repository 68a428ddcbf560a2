"""The server goes down during a run: callers receive at most `StoreUnavailable`, and no change is half-written."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.errors import ExecutionNotActive, LeaseExpired, StaleLease, StoreUnavailable
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.execution import Execution
from flowfabric.model.states import PublicState
from flowfabric.testing.invariants import check_invariants, scan_all
from tests.servers import PostgresServer, leave, postgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SERVER = "restarted"
COUNT = 300
TTL_MS = 3000


class Workload:
    """What was done so far, and the errors meanwhile."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.completed: Counter[str] = Counter()
        self.outages = 0

    async def submit(self, engine: Engine) -> None:
        for _ in range(COUNT):
            execution_id = engine.new_execution_id()
            while execution_id not in self.submitted:
                try:
                    await engine.create_execution(execution_id=execution_id)
                    self.submitted.append(execution_id)
                except StoreUnavailable:
                    self.outages += 1

    async def work(self, engine: Engine, name: str) -> None:
        who: dict[str, Any] = {"worker_id": "wa", "worker_instance_id": name}
        while len(self.completed) < COUNT:
            try:
                for one in await engine.claim_many("default", 5, **who, lease_ttl_ms=TTL_MS, max_wait_ms=100):
                    await self.finish(engine, one)
            except StoreUnavailable:
                self.outages += 1

    async def finish(self, engine: Engine, claimed: Claimed) -> None:
        while True:
            try:
                await engine.complete(claimed.handle, result=b"done")
                self.completed[claimed.execution_id] += 1
                return
            except StoreUnavailable:
                self.outages += 1
            except (LeaseExpired, StaleLease, ExecutionNotActive):
                return  # The outage was longer than the lease: another worker has reclaimed it.

    async def wait_for(self, count: int) -> None:
        """Wait until this many executions are done."""
        pause = 0.005
        while len(self.completed) < count:
            await asyncio.sleep(pause)
            pause = min(0.02, pause * 1.1)


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of its own that can be stopped and killed."""
    yield postgres(SERVER)
    leave(SERVER)


async def test_a_restart_and_a_crash_during_a_run_lose_nothing(server: PostgresServer) -> None:
    url = server.create_database("work")
    workload = Workload()
    async with await open_engine(url) as engine, await open_engine(url) as other:
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            group.create_task(workload.submit(other))
            for number in range(3):
                group.create_task(workload.work(engine if number else other, f"wa-{number}"))
            await workload.wait_for(COUNT // 4)
            await asyncio.to_thread(server.restart)
            await workload.wait_for(COUNT // 2)
            await asyncio.to_thread(server.kill)  # as after a power failure
            await asyncio.to_thread(server.start)

        rows: list[Execution] = await scan_all(engine.store, Execution)
        assert {row.execution_id for row in rows} == set(workload.submitted)
        assert all(row.public_state is PublicState.COMPLETED for row in rows)
        assert set(workload.completed.values()) == {1}
        await check_invariants(engine)
