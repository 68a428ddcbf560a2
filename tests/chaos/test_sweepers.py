"""Sweeps in two processes: what falls due is done once, and goes on being done when one of them is killed."""

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
from tests.chaos.crew import crew

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

COUNT = 20
ME: dict[str, Any] = {"worker_id": "wa", "worker_instance_id": "wa-1"}


async def fall_due(engine: Engine, when: str) -> None:
    """Executions of each kind for which something falls due in a moment, in lanes of their own."""
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


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    pause = 0.02
    async with asyncio.timeout(40):
        while not await condition():
            await asyncio.sleep(pause)
            pause = min(0.2, pause * 1.5)


async def test_two_sweepers_do_everything_once_and_one_goes_on_alone(url: str) -> None:
    async with await open_engine(url) as engine:
        with crew() as hire:
            sweepers = [hire("sweep", url) for _ in range(2)]
            for sweeper in sweepers:
                await asyncio.to_thread(sweeper.until, lambda: bool(sweeper.heard("sweeping")))  # noqa: B023
            await fall_due(engine, "first")
            await until(lambda: is_all_done(engine))
            await check_invariants(engine)  # one completion an end, one mark a lapse

            await asyncio.to_thread(sweepers[0].kill)
            await fall_due(engine, "then")
            await until(lambda: is_all_done(engine))
            await check_invariants(engine)
        assert [sweeper.complaints for sweeper in sweepers] == [[], []]
