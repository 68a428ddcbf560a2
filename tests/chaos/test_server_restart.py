"""The server goes away in mid-run: callers meet `StoreUnavailable` at worst, and nothing is half-written."""

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


class Shift:
    """What was done so far, and what went wrong meanwhile."""

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
                return  # the outage was longer than the lease: somebody else has it by now

    async def when(self, count: int) -> None:
        """Wait until so many are done."""
        pause = 0.005
        while len(self.completed) < count:
            await asyncio.sleep(pause)
            pause = min(0.02, pause * 1.1)


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of our own, to be stopped and killed."""
    yield postgres(SERVER)
    leave(SERVER)


async def test_a_restart_and_a_crash_in_mid_run_lose_nothing(server: PostgresServer) -> None:
    url = server.create_database("work")
    shift = Shift()
    async with await open_engine(url) as engine, await open_engine(url) as other:
        async with asyncio.timeout(120), asyncio.TaskGroup() as group:
            group.create_task(shift.submit(other))
            for number in range(3):
                group.create_task(shift.work(engine if number else other, f"wa-{number}"))
            await shift.when(COUNT // 4)
            await asyncio.to_thread(server.restart)
            await shift.when(COUNT // 2)
            await asyncio.to_thread(server.kill)  # as a power cut does
            await asyncio.to_thread(server.start)

        rows: list[Execution] = await scan_all(engine.store, Execution)
        assert {row.execution_id for row in rows} == set(shift.submitted)
        assert all(row.public_state is PublicState.COMPLETED for row in rows)
        assert set(shift.completed.values()) == {1}
        await check_invariants(engine)
