"""Sweeps in two processes: what falls due is done once, also after one of them is killed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.model.execution import Execution
from flowfabric.model.states import OwnershipState, PublicState
from flowfabric.testing.invariants import check_invariants, scan_all
from tests.chaos.worker_processes import worker_processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

COUNT = 20
ME: dict[str, Any] = {"worker_id": "wa", "worker_instance_id": "wa-1"}


async def create_due_work(engine: Engine, when: str) -> None:
    """Create executions of each kind for which something falls due in a moment, in separate lanes."""
    soon = await engine.ping() + 300
    kinds: dict[str, dict[str, Any]] = {
        "delayed": {"delay_until": soon},
        "late": {"execution_deadline_at": soon},
        "lapsing": {},
        "slow": {"policy": {"timeout_policy": {"attempt_timeout_ms": 200}}},
    }
    for kind, asked in kinds.items():
        lane = f"{kind}-{when}"
        for _ in range(COUNT):
            await engine.create_execution(execution_id=engine.new_execution_id(lane), lane_id=lane, **asked)
    assert len(await engine.claim_many(f"lapsing-{when}", COUNT, **ME, lease_ttl_ms=200)) == COUNT
    assert len(await engine.claim_many(f"slow-{when}", COUNT, **ME, lease_ttl_ms=60_000)) == COUNT


async def is_all_done(engine: Engine) -> bool:
    rows: list[Execution] = await scan_all(engine.store, Execution)
    return all(is_done(row) for row in rows)


def is_done(row: Execution) -> bool:
    match row.lane_id.partition("-")[0]:
        case "delayed":
            return row.public_state is PublicState.WAITING
        case "lapsing":
            return row.ownership_state is OwnershipState.LEASE_EXPIRED_RECLAIMABLE
        case _:
            return row.public_state is PublicState.EXPIRED


async def wait_until(condition: Callable[[], Awaitable[bool]]) -> None:
    pause = 0.02
    async with asyncio.timeout(40):
        while not await condition():
            await asyncio.sleep(pause)
            pause = min(0.2, pause * 1.5)


async def test_two_sweepers_do_everything_once_and_one_continues_alone(url: str) -> None:
    async with await open_engine(url) as engine:
        with worker_processes() as start_worker:
            sweepers = [start_worker("sweep", url) for _ in range(2)]
            for sweeper in sweepers:
                await asyncio.to_thread(sweeper.wait_until, lambda: bool(sweeper.lines("sweeping")))  # noqa: B023
            await create_due_work(engine, "first")
            await wait_until(lambda: is_all_done(engine))
            await check_invariants(engine)  # one completion per outcome, one mark per expiry

            await asyncio.to_thread(sweepers[0].kill)
            await create_due_work(engine, "then")
            await wait_until(lambda: is_all_done(engine))
            await check_invariants(engine)
        assert [sweeper.errors for sweeper in sweepers] == [[], []]
