"""Renewal moves the expiry of a live lease and changes nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Delete, Guard, LeaseCheck, LeaseRequirement, Patch
from flowfabric.model.event import Event, Topic
from flowfabric.model.execution import Execution
from flowfabric.rules.execution.lease import RENEWAL
from flowfabric.stores.claims import LeaseRef
from flowfabric.stores.port import Store
from tests.stores.sample_rows import change, claim_request, insert_queued, one, queued, write


async def held(store: Store, *names: str, ttl: int = 100) -> list[LeaseRef]:
    """Insert claimed rows and return their leases."""
    await insert_queued(store, *(queued(name, rank, tags="{}", flow_id="f") for rank, name in enumerate(names)))
    claimed = await store.claim_rows(claim_request(len(names), ttl=ttl))
    return [
        LeaseRef(
            row.execution_id, row.attempt_index or 0, row.attempt_id or "", row.lease_id or "", row.lease_epoch, ttl
        )
        for row, _ in claimed.rows
    ]


async def test_a_live_lease_gets_a_new_expiry(store: Store, clock: ManualClock) -> None:
    (lease,) = await held(store, "a")
    before = await one(store, Execution, "a")
    clock.advance_ms(60)

    assert await store.renew([lease], RENEWAL) == [clock.now + 100]
    after = await one(store, Execution, "a")
    assert after == msgspec.structs.replace(before, lease_expires_at=clock.now + 100, lease_renewed_at=clock.now)
    assert after.revision == before.revision


async def test_a_lease_can_be_renewed_until_the_last_millisecond(store: Store, clock: ManualClock) -> None:
    early, late = await held(store, "a", "b")

    clock.advance_ms(99)
    assert await store.renew([early], RENEWAL) == [clock.now + 100]
    clock.advance_ms(1)
    assert await store.renew([late], RENEWAL) == [None]
    assert (await one(store, Execution, "b")).lease_expires_at == clock.now


@pytest.mark.parametrize(
    "difference",
    [
        {"execution_id": "none"},
        {"attempt_index": 1},
        {"attempt_id": "other"},
        {"lease_id": "other"},
        {"lease_epoch": 2},
    ],
    ids=lambda difference: next(iter(difference)),
)
async def test_a_lease_that_differs_in_any_field_is_not_renewed(
    store: Store, clock: ManualClock, difference: Any
) -> None:
    (lease,) = await held(store, "a")
    before = await one(store, Execution, "a")
    end = await store.feed_end()
    clock.advance_ms(5)

    assert await store.renew([msgspec.structs.replace(lease, **difference)], RENEWAL) == [None]
    assert await one(store, Execution, "a") == before
    assert (await store.feed(Topic.LEASE, end, 10)).events == []


async def test_a_released_lease_is_not_renewed(store: Store) -> None:
    released, gone = await held(store, "a", "b")
    await write(store, Patch(Execution, ("a",), {"lease_expires_at": None}), Delete(Execution, ("b",)))

    assert await store.renew([released, gone], RENEWAL) == [None, None]
    assert (await one(store, Execution, "a")).lease_expires_at is None


async def test_a_lease_that_was_marked_as_expired_is_not_renewed_even_if_the_clock_went_back(
    store: Store, clock: ManualClock
) -> None:
    (lease,) = await held(store, "a")
    clock.advance_ms(100)
    await write(store, Patch(Execution, ("a",), {"lease_expired_at": clock.now}))
    clock.advance_ms(-50)

    assert await store.renew([lease], RENEWAL) == [None]


async def test_a_renewal_may_shorten_a_lease(store: Store, clock: ManualClock) -> None:
    (lease,) = await held(store, "a", ttl=1000)

    assert await store.renew([msgspec.structs.replace(lease, lease_ttl_ms=10)], RENEWAL) == [clock.now + 10]
    assert (await one(store, Execution, "a")).lease_expires_at == clock.now + 10


async def test_each_lease_of_a_batch_is_renewed_independently(store: Store, clock: ManualClock) -> None:
    leases = await held(store, *(f"n{number:03}" for number in range(150)))
    asked = [
        msgspec.structs.replace(lease, lease_ttl_ms=number + 1, lease_epoch=1 + number % 3 // 2)
        for number, lease in enumerate(leases)
    ]
    clock.advance_ms(7)

    answers = await store.renew(asked, RENEWAL)
    assert answers == [None if number % 3 == 2 else clock.now + number + 1 for number in range(150)]
    ends = [(await one(store, Execution, lease.execution_id)).lease_expires_at for lease in leases]
    assert ends == [answer or clock.now + 93 for answer in answers]
    assert await store.renew([], RENEWAL) == []


async def test_each_renewal_emits_an_event(store: Store, clock: ManualClock) -> None:
    first, second = await held(store, "a", "b")
    end = await store.feed_end()
    clock.advance_ms(5)
    await store.renew([second, first], RENEWAL)

    events = (await store.feed(Topic.LEASE, end, 10)).events
    assert [one.event.execution_id for one in events] == ["b", "a"]
    assert {one.at for one in events} == {clock.now}
    assert events[1].event == Event(
        execution_id="a",
        namespace="default",
        tags="{}",
        flow_id="f",
        lease="renewed",
        lease_id=first.lease_id,
        lease_epoch=1,
        attempt_id=first.attempt_id,
        attempt_index=0,
        worker_id="worker",
        worker_instance_id="worker-1",
    )


async def test_a_change_decided_before_a_renewal_is_still_valid_after_it(store: Store, clock: ManualClock) -> None:
    (lease,) = await held(store, "a")
    row = await one(store, Execution, "a")
    clock.advance_ms(90)
    await store.renew([lease], RENEWAL)
    clock.advance_ms(90)

    guard = Guard(Execution, ("a",), row.revision, LeaseCheck(LeaseRequirement.LIVE, lease.lease_id, 1))
    assert await store.commit([change(Patch(Execution, ("a",), {"tags": "x"}), guards=[guard])]) == [clock.now]
