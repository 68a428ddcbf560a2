"""The fault-injecting store injects exactly the requested faults."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from flowfabric.clock import ManualClock
from flowfabric.errors import StoreUnavailable
from flowfabric.model.change import Change, Upsert
from flowfabric.model.deployment import SweepLease
from flowfabric.model.execution import Execution
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.queries import Read, Scan
from flowfabric.testing.flaky_store import FlakyStore, Loss


def a_change(name: str = "sweep") -> Change:
    return Change((), (Upsert(SweepLease(name, "me", 5)),), id=1)


async def names(store: FlakyStore) -> list[str]:
    return [row.sweep for row in await store.inner.scan(Scan(SweepLease))]


@pytest.mark.parametrize(
    ("loss", "in_doubt", "written"), [(Loss.REQUEST, False, []), (Loss.UNSURE, True, []), (Loss.REPLY, True, ["sweep"])]
)
async def test_a_lost_call_is_lost_as_requested(loss: Loss, in_doubt: bool, written: list[str]) -> None:
    store = FlakyStore(MemoryStore(ManualClock()))
    store.lose("commit", loss)

    with pytest.raises(StoreUnavailable) as lost:
        await store.commit([a_change()])

    assert lost.value.in_doubt is in_doubt
    assert lost.value.retryable
    assert await names(store) == written
    assert store.losses == [("commit", loss)]
    assert await store.commit([a_change("other")]) != [None]


async def test_losses_start_after_some_calls_and_stop_after_some_more() -> None:
    store = FlakyStore(MemoryStore(ManualClock()))
    store.lose("load", Loss.REPLY, after=1, times=2)
    wants = (Read(Execution, ("e",)),)

    await store.load(wants)
    for _ in range(2):
        with pytest.raises(StoreUnavailable) as lost:
            await store.load(wants)
        assert not lost.value.in_doubt  # Nothing could have been written.
    await store.load(wants)


async def test_a_held_call_waits_until_it_is_released() -> None:
    store = FlakyStore(MemoryStore(ManualClock()))
    before, after = store.stop_before("commit"), store.stop_after("commit")
    committing = asyncio.create_task(store.commit([a_change()]))

    await before.reached()
    assert await names(store) == []
    before.release()
    await after.reached()
    assert await names(store) == ["sweep"]
    assert not committing.done()
    after.release()
    assert await committing != [None]


async def test_random_losses_hit_only_writes_and_the_same_ones_for_the_same_seed() -> None:
    stores = [FlakyStore(MemoryStore(ManualClock()), rng=random.Random(3), rate=0.5) for _ in range(2)]
    for store in stores:
        for number in range(60):
            await store.ping()
            with contextlib.suppress(StoreUnavailable):
                await store.commit([a_change(str(number))])

    assert stores[0].losses == stores[1].losses
    assert {verb for verb, _ in stores[0].losses} == {"commit"}
    assert {loss for _, loss in stores[0].losses} == set(Loss)
    stores[0].heal()
    await stores[0].commit([a_change("healed")])
    assert "healed" in await names(stores[0])
