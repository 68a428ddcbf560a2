"""The feed of Valkey: numbered by its readers, also after a failover that lost entries."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Delete, Insert
from flowfabric.model.event import Topic
from flowfabric.model.execution import Execution
from flowfabric.rules.execution.lease import RENEWAL
from flowfabric.stores.claims import LeaseRef
from flowfabric.stores.valkey.address import parse_url
from flowfabric.stores.valkey.feed import FROM
from flowfabric.stores.valkey.store import ValkeyStore
from tests.stores.sample_rows import claim_request, event, execution, insert_queued, queued, write


async def details(store: ValkeyStore, after: int = 0) -> list[str | None]:
    return [fed.event.details for fed in (await store.feed(Topic.LEASE, after, 1000)).events]


async def emit(store: ValkeyStore, *texts: str, name: str = "a") -> None:
    await write(store, events=[event(name, lease="x", details=text) for text in texts])


async def test_events_come_although_a_failover_made_the_ids_of_a_partition_go_back(vk: ValkeyStore) -> None:
    await emit(vk, "before")
    assert await details(vk) == ["before"]
    end = await vk.feed_end()
    ahead = str(int((await vk.client.read("{ff}", "TIME"))[0]) * 1000 + 30_000)
    await vk.client.call("{ff}", "HSET", FROM, "{fp:0}", f"{ahead}-0")  # as if later entries had been numbered and lost
    await emit(vk, "after the failover")
    assert await details(vk, end) == [], "its id seems numbered"

    vk._feed._checked_at = 0.0

    assert await details(vk, end) == ["after the failover"]
    await emit(vk, "later")
    assert await details(vk, end) == ["after the failover", "later"]


async def test_a_partition_that_lost_its_whole_stream_continues(vk: ValkeyStore) -> None:
    await emit(vk, "before")
    end = await vk.feed_end()
    await vk.client.call("{fp:0}", "DEL", "{fp:0}:f")
    vk._feed._checked_at = 0.0
    await vk.feed_end()

    await emit(vk, "after")

    assert await details(vk, end) == ["after"]
    assert (await vk.feed(Topic.LEASE, 0, 10)).has_gap, "a numbered event is gone"


async def test_references_that_a_failover_lost_are_made_again_with_higher_positions(vk: ValkeyStore) -> None:
    await emit(vk, "one")
    before = (await vk.feed(Topic.LEASE, 0, 10)).events[0].position
    saved = await vk.client.read("{ff}", "HGETALL", FROM)
    await emit(vk, "two")
    lost = await vk.feed_end()
    await vk.client.call("{ff}", "XTRIM", "{ff}:feed", "MAXLEN", 0)
    await vk.client.call("{ff}", "HSET", FROM, *saved)
    await emit(vk, "three")

    events = (await vk.feed(Topic.LEASE, before, 10)).events

    assert [fed.event.details for fed in events] == ["two", "three"]
    assert all(fed.position >= lost for fed in events)


async def test_readers_that_number_at_once_give_every_event_one_position(valkey_url: str) -> None:
    stores = [ValkeyStore(parse_url(valkey_url)) for _ in range(3)]
    for store in stores:
        await store.open(migrate=True)
    names = [f"{{fp:{number}}}:a" for number in range(5)]

    async def tell() -> None:
        for number in range(20):
            await asyncio.gather(*(emit(stores[0], str(number), name=name) for name in names))

    async def read(store: ValkeyStore) -> list[tuple[int, str, str | None]]:
        seen, position = list[tuple[int, str, str | None]](), 0
        async with asyncio.timeout(60):
            while len(seen) < 100:
                page = await store.feed(Topic.LEASE, position, 7)
                seen += [(fed.position, fed.event.execution_id, fed.event.details) for fed in page.events]
                position = page.position
        return seen

    first, second, _ = await asyncio.gather(read(stores[1]), read(stores[2]), tell())
    for store in stores:
        await store.close()

    assert first == second
    assert len({position for position, _, _ in first}) == 100
    for name in names:
        assert [text for _, owner, text in first if owner == name] == [str(number) for number in range(20)]


async def test_a_trim_leaves_at_most_so_many_entries_of_a_partition(vk: ValkeyStore, clock: ManualClock) -> None:
    vk._feed.max_entries = 3
    for number in range(6):
        await emit(vk, str(number))
        await emit(vk, f"cold {number}", name="{fp:7}:b") if number < 2 else None

    assert await vk.trim_feed(0, 100) == 3

    page = await vk.feed(Topic.LEASE, 0, 100)
    assert sorted(fed.event.details or "" for fed in page.events) == ["3", "4", "5", "cold 0", "cold 1"]
    assert page.has_gap
    assert await vk.client.read("{fp:0}", "XLEN", "{fp:0}:f") == 3
    assert await vk.trim_feed(0, 100) == 0


async def test_renewals_do_not_push_other_events_out_of_a_history(vk: ValkeyStore) -> None:
    await insert_queued(vk, queued("a"))
    ((row, _),) = (await vk.claim_rows(claim_request(1))).rows
    lease = LeaseRef("a", row.attempt_index or 0, row.attempt_id or "", row.lease_id or "", row.lease_epoch, 1000)
    for _ in range(200):
        assert await vk.renew([lease], RENEWAL) != [None]
    await emit(vk, "released")

    history = await vk.history("a", Topic.LEASE, 3, "renewed")

    assert [fed.event.lease for fed in history] == ["acquired", "x"]
    assert len(await vk.history("a", Topic.LEASE, 1000)) == 128


@pytest.mark.parametrize("name", ["a", "{fp:7}:b"])
async def test_the_history_goes_with_its_execution(vk: ValkeyStore, name: str) -> None:
    await write(vk, Insert(execution(name)), events=[event(name, lease="x")])
    assert len(await vk.history(name, Topic.LEASE, 10)) == 1

    await write(vk, Delete(Execution, (name,)))

    assert await vk.history(name, Topic.LEASE, 10) == []
