"""A claim that was abandoned and is executed late does not keep its lease: the claimed rows are released soon."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.stores.claims import ClaimedRows, ClaimRequest
from flowfabric.stores.port import Store
from flowfabric.testing.flaky_store import FlakyStore, Loss
from tests.executions import claim_one, new_execution

LEASE_MS = 60_000
W: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1", "lease_ttl_ms": LEASE_MS}


class LateStore(FlakyStore):
    """A store whose next claim has an unknown outcome and is executed only when a gate opens."""

    late: asyncio.Task[ClaimedRows] | None = None
    gate: asyncio.Event | None = None

    async def claim_rows(self, request: ClaimRequest) -> ClaimedRows:
        if self.gate is None or self.late is not None:
            return await super().claim_rows(request)
        self.late = asyncio.create_task(self._execute_late(request, self.gate))
        raise errors.StoreUnavailable("gone", backend="test", in_doubt=True)

    async def _execute_late(self, request: ClaimRequest, gate: asyncio.Event) -> ClaimedRows:
        await gate.wait()
        return await self.inner.claim_rows(request)


async def wait_for_state(engine: Engine, e: str, wanted: str) -> None:
    """Wait until an execution is in the given state."""
    async with asyncio.timeout(20):
        while str(await engine.read_execution_state(e)) != wanted:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


async def test_an_execution_claimed_by_a_late_request_is_claimable_again_soon(store: Store) -> None:
    late = LateStore(store)
    engine, other = Engine(late, minter=SeededMinter(1)), Engine(store, minter=SeededMinter(2))
    first, second = [engine.new_execution_id() for _ in range(2)]
    await engine.create_execution(execution_id=first, priority=9)
    await engine.claim("idle", **W)  # Register the queue first, so that the claim below has nothing to load.
    late.gate = asyncio.Event()
    got = await claim_one(engine, **W)
    assert got.execution_id == first
    await engine.create_execution(execution_id=second)

    late.gate.set()
    assert late.late is not None
    taken = await late.late
    assert [row.execution_id for row, _ in taken.rows] == [second]

    await wait_for_state(other, second, "waiting")
    [again] = await other.claim_many("default", 5, **W)
    assert again.execution_id == second
    await other.complete(again.handle)
    await engine.complete(got.handle)
    await engine.fast_claims.late_claims.close()


async def test_an_execution_claimed_by_a_cancelled_claim_is_claimable_again_soon(store: Store) -> None:
    flaky = FlakyStore(store)
    engine, other = Engine(flaky, minter=SeededMinter(1)), Engine(store, minter=SeededMinter(2))
    e = await new_execution(engine)
    answered = flaky.stop_after("take")
    claiming = asyncio.create_task(engine.claim("default", **W))
    await answered.reached()
    assert str(await other.read_execution_state(e)) == "active"

    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming

    await wait_for_state(other, e, "waiting")
    await engine.fast_claims.late_claims.close()


async def test_an_execution_that_reached_its_caller_is_not_released(store: Store) -> None:
    flaky = FlakyStore(store)
    engine = Engine(flaky, minter=SeededMinter(1))
    await new_execution(engine)

    flaky.lose("take", Loss.REPLY)
    got = await claim_one(engine, **W)
    assert not engine.fast_claims.late_claims._watches
    await engine.complete(got.handle)
