"""A load on an engine over Valkey, and an independent history of what was acknowledged to its callers."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from flowfabric.cursors import FROM_THE_START
from flowfabric.engine.engine import Engine
from flowfabric.errors import (
    ExecutionNotActive,
    LeaseExpired,
    NotFound,
    StaleLease,
    StoreUnavailable,
    StreamBackpressure,
)
from flowfabric.model.execution import Attempt, Execution
from flowfabric.model.states import PublicState
from flowfabric.testing.invariants import attempt_violations, check_invariants, row_violations, scan_all

LANES = tuple(f"lane-{number}" for number in range(9))  # on partitions of every node of three
TTL_MS = 4000
WAIT_S = 60.0


class Load:
    """Submitters and workers of all lanes, and the answers they got."""

    def __init__(self, *engines: Engine) -> None:
        self._engines = engines
        self._is_over = False
        self._progress = asyncio.Event()
        self.created: dict[str, list[str]] = defaultdict(list)  # by lane, in the order of their acknowledgements
        self.completed: Counter[str] = Counter()
        self.outages = 0

    async def submit(self, engine: Engine, lane: str) -> None:
        """Create executions, one after the other; an unclear one is created again until it is acknowledged."""
        while not self._is_over:
            execution_id = engine.new_execution_id(lane)
            while True:
                try:
                    await engine.create_execution(execution_id=execution_id, lane_id=lane, input_payload=b"x" * 100)
                    break
                except StoreUnavailable:
                    self.outages += 1
            self.created[lane].append(execution_id)
            self._progress.set()
            await asyncio.sleep(0.002)

    async def work(self, engine: Engine, lane: str) -> None:
        """Claim and complete until everything that was acknowledged is completed."""
        who: dict[str, Any] = {"worker_id": "chaos", "worker_instance_id": f"chaos-{lane}-{id(engine)}"}
        while not self._is_over:
            try:
                claimed = await engine.claim_many(lane, 5, **who, lease_ttl_ms=TTL_MS, max_wait_ms=200)
            except StoreUnavailable:
                self.outages += 1
                continue
            for one in claimed:
                try:
                    await engine.complete(one.handle, result=one.execution_id.encode())
                    self.completed[one.execution_id] += 1
                    self._progress.set()
                except StoreUnavailable:
                    self.outages += 1  # the lease expires, and another claim gets it
                except (LeaseExpired, StaleLease, ExecutionNotActive, NotFound):
                    pass  # the outage was longer than the lease, or the failover lost the execution

    async def wait_for_more(self, count: int) -> None:
        """Wait until so many more executions of each lane were created and then completed."""
        before = {lane: len(self.created[lane]) for lane in LANES}
        async with asyncio.timeout(WAIT_S):
            while not all(self._has_more(lane, before[lane], count) for lane in LANES):
                self._progress.clear()
                await self._progress.wait()

    def _has_more(self, lane: str, before: int, count: int) -> bool:
        return sum(self.completed[one] > 0 for one in self.created[lane][before:]) >= count

    def acknowledged(self) -> set[str]:
        """Return the executions whose creation was acknowledged."""
        return {one for created in self.created.values() for one in created}

    def end(self) -> None:
        self._is_over = True


@asynccontextmanager
async def under_load(*engines: Engine, count: int = 15) -> AsyncIterator[Load]:
    """Run a load around a block; before and after it, `count` executions of each lane are created and completed."""
    load = Load(*engines)
    async with asyncio.TaskGroup() as group:
        for number, lane in enumerate(LANES):
            group.create_task(load.submit(engines[number % len(engines)], lane))
            for engine in engines:
                group.create_task(load.work(engine, lane))
        try:
            await load.wait_for_more(count)
            yield load
            await load.wait_for_more(count)
        finally:
            load.end()


async def drain(engine: Engine) -> None:
    """Complete what is left, claims whose worker was interrupted included."""
    who: dict[str, Any] = {"worker_id": "drain", "worker_instance_id": "drain-1", "lease_ttl_ms": TTL_MS}
    async with asyncio.timeout(WAIT_S):
        while True:
            for lane in LANES:
                for one in await engine.claim_many(lane, 50, **who):
                    await engine.complete(one.handle, result=one.execution_id.encode())
            rows: list[Execution] = await scan_all(engine.store, Execution)
            if all(row.public_state is PublicState.COMPLETED for row in rows):
                return
            await asyncio.sleep(0.1)


async def reported(engine: Engine) -> tuple[Counter[str], int]:
    """Return how often the feed reports each completion, from its start to its end, and the number of reported gaps."""
    feed = await engine.subscribe_completion(FROM_THE_START)
    found, gaps = Counter[str](), 0
    while True:
        try:
            entry = await feed.next(timeout_s=0)
        except StreamBackpressure:
            gaps += 1
            continue
        if entry is None:
            return found, gaps
        found[entry.execution_id] += 1


async def check_rows(engine: Engine) -> None:
    """Check rows and attempts; a failover that lost writes may leave events of what then happened again."""
    attempts: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in await scan_all(engine.store, Attempt):
        attempts[attempt.execution_id].append(attempt)
    for row in await scan_all(engine.store, Execution):
        assert not list(row_violations(row))
        assert not list(attempt_violations(row, attempts.pop(row.execution_id, [])))
    assert not attempts, "attempts without an execution"


async def check_that_nothing_was_lost(engine: Engine, load: Load) -> None:
    """Compare the history with the rows and the feed; every execution was completed by exactly one caller."""
    await drain(engine)
    rows: list[Execution] = await scan_all(engine.store, Execution)
    assert load.acknowledged() <= {row.execution_id for row in rows}, "an acknowledged execution is gone"
    assert set(load.completed.values()) == {1}, "a completion was acknowledged twice"
    found, gaps = await reported(engine)
    assert set(found) == {row.execution_id for row in rows}, "the feed misses a completion"
    assert set(found.values()) == {1}
    assert gaps == 0
    await check_invariants(engine)
