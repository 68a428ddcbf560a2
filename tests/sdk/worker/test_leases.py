"""The lease expiries that a worker knows: as claimed, then as renewed, and none after the release."""

from __future__ import annotations

from typing import Any

from flowfabric import Engine
from flowfabric.sdk.worker.heartbeat import HeldLeases
from flowfabric.stores.port import Store

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}


async def test_the_expiry_of_a_lease_is_that_of_its_claim_then_of_its_renewal_then_none(store: Store) -> None:
    engine = Engine(store)
    for _ in range(2):
        await engine.create_execution(execution_id=engine.new_execution_id())
    one, other = await engine.claim_many("default", 2, lease_ttl_ms=30_000, **WORKER)
    leases = HeldLeases(lambda _: None)
    leases.add([one, other])
    assert [leases.expires_at(held.lease_id) for held in (one, other)] == [one.lease_expires_at, other.lease_expires_at]

    assert await leases.renew_all(engine, 90_000) == []
    renewed = await engine.describe_execution(one.execution_id)
    assert renewed is not None
    assert renewed.current_lease is not None
    assert leases.expires_at(one.lease_id) == renewed.current_lease.expires_at >= one.lease_expires_at + 60_000

    leases.remove([one])
    assert leases.expires_at(one.lease_id) == 0
    assert leases.expires_at(other.lease_id) >= other.lease_expires_at + 60_000
