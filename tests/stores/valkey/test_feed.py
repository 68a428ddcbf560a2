"""The feed of Valkey: numbered by its readers, also after a failover that lost entries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic

import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Delete, Insert
from flowfabric.model.event import Topic
from flowfabric.model.execution import Execution
from flowfabric.rules.execution.lease import RENEWAL
from flowfabric.stores.claims import LeaseRef
from flowfabric.stores.homes import HomeTag
from flowfabric.stores.valkey.address import parse_url
from flowfabric.stores.valkey.feed import FROM
from flowfabric.stores.valkey.server_checks import parse_info
from flowfabric.stores.valkey.store import ValkeyStore
from tests.stores.sample_rows import claim_request, event, execution, insert_queued, queued, write


async def details(store: ValkeyStore, after: int = 0) -> list[str | None]:
    found, page = list[str | None](), await store.feed(Topic.LEASE, after, 1000)
    while page.events:
        found += [fed.event.details for fed in page.events]
        page = await store.feed(Topic.LEASE, page.position, 1000)
    return found


async def emit(store: ValkeyStore, *texts: str, name: str = "a") -> None:
    await write(store, events=[event(name, lease="x", details=text) for text in texts])


async def lineage_of(store: ValkeyStore) -> str:
    return parse_info(await store.client.read("{ff}", "INFO", "replication"))["master_replid"][:16]


async def number_ahead(store: ValkeyStore, home: str, ms: int, lineage: str) -> str:
    """Leave what remains if later entries of a partition had been numbered, and a failover lost them; return the id."""
    ahead = f"{int((await store.client.read('{ff}', 'TIME'))[0]) * 1000 + ms}-0"
    await store.client.call("{ff}", "HSET", FROM, home, f"{ahead} {lineage} 0")
    return ahead


async def test_events_come_although_a_failover_made_the_ids_of_a_partition_go_back(vk: ValkeyStore) -> None:
    await emit(vk, "before")
    assert await details(vk) == ["before"]
    end = await vk.feed_end()
    await number_ahead(vk, "{fp:0}", 30_000, lineage="another")
    await emit(vk, "after the failover")

    assert await details(vk, end) == ["after the failover"]
    await emit(vk, "later")
    assert await details(vk, end) == ["after the failover", "later"]


async def test_ids_that_go_back_are_noticed_even_if_they_have_caught_up_since(vk: ValkeyStore) -> None:
    await emit(vk, "before")
    end = await vk.feed_end()
    vk._feed._checked_at = monotonic() + 1000  # the comparison of the last ids is not what notices it
    await number_ahead(vk, "{fp:0}", 1000, lineage="another")
    await emit(vk, "hidden below the numbered id")
    tail = 0
    async with asyncio.timeout(20):
        numbered = int((await vk.client.read("{ff}", "HGET", FROM, "{fp:0}")).decode().partition("-")[0])
        while tail <= numbered:
            await emit(vk, "filler")
            ((id_, _),) = await vk.client.read("{fp:0}", "XREVRANGE", "{fp:0}:f", "+", "-", "COUNT", 1)
            tail = int(id_.decode().partition("-")[0])

    found = await details(vk, end)

    assert found[0] == "hidden below the numbered id"
    assert len(found) == await vk.client.read("{fp:0}", "XLEN", "{fp:0}:f") - 1, "every entry comes once"


async def test_a_failover_between_two_reads_of_a_reader_hides_nothing(
    vk: ValkeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await emit(vk, "before")
    end = await vk.feed_end()
    vk._feed._checked_at = monotonic() + 1000  # the comparison of the last ids is not what notices it
    ahead = await number_ahead(vk, "{fp:0}", 30_000, lineage="former")
    await emit(vk, "hidden below the numbered id")
    await vk.client.call("{fp:0}", "XSETID", "{fp:0}:f", ahead)  # time passes
    await emit(vk, "above the numbered id")
    current, asked = vk._feed._lineages, list[None]()

    async def lineages(homes: Sequence[HomeTag]) -> dict[HomeTag, str]:
        asked.append(None)  # the first answer is still that of the former server
        return dict.fromkeys(homes, "former") if len(asked) == 1 else await current(homes)

    monkeypatch.setattr(vk._feed, "_lineages", lineages)

    assert sorted(filter(None, await details(vk, end))) == ["above the numbered id", "hidden below the numbered id"]


async def test_a_page_ends_behind_the_events_that_were_numbered_while_it_was_read(
    vk: ValkeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ValkeyStore(vk.client.address, vk.clock)
    await other.open(migrate=False)
    await emit(vk, "first")
    read_end = vk._feed._end

    async def end_then_more() -> int:
        found = await read_end()
        await emit(other, "second")
        await other.feed_end()
        return found

    monkeypatch.setattr(vk._feed, "_end", end_then_more)
    page = await vk.feed(Topic.LEASE, 0, 10)
    monkeypatch.undo()
    await other.close()

    assert [fed.event.details for fed in page.events] == ["first", "second"]
    assert (await vk.feed(Topic.LEASE, page.position, 10)).events == [], "an event would come twice"


async def test_the_comparison_of_last_ids_notices_a_loss_without_another_lineage(vk: ValkeyStore) -> None:
    await emit(vk, "before")
    end = await vk.feed_end()
    await number_ahead(vk, "{fp:0}", 30_000, lineage=await lineage_of(vk))
    await emit(vk, "after")
    vk._feed._checked_at = 0.0

    assert await details(vk, end) == ["after"]


async def test_an_entry_with_the_id_of_a_lost_one_is_reported_and_the_lost_one_is_a_gap(vk: ValkeyStore) -> None:
    await emit(vk, "lost")
    end = await vk.feed_end()
    ((id_, fields),) = await vk.client.read("{fp:0}", "XRANGE", "{fp:0}:f", "-", "+")
    await vk.client.call("{fp:0}", "DEL", "{fp:0}:f")
    blob = fields[3].replace(b"lost", b"same")
    await vk.client.call("{fp:0}", "XADD", "{fp:0}:f", id_, *fields[:3], blob)  # by the new primary
    await vk.client.call("{ff}", "HSET", FROM, "{fp:0}", f"{id_.decode()} another 0")

    assert await details(vk, end) == ["same"]
    page = await vk.feed(Topic.LEASE, 0, 10)
    assert [fed.event.details for fed in page.events] == ["same"]
    assert page.has_gap


async def test_another_lineage_that_lost_nothing_repeats_nothing(vk: ValkeyStore) -> None:
    await emit(vk, "one")
    await emit(vk, "two")
    end = await vk.feed_end()
    value = (await vk.client.read("{ff}", "HGET", FROM, "{fp:0}")).decode()
    await vk.client.call("{ff}", "HSET", FROM, "{fp:0}", value.replace(await lineage_of(vk), "another"))
    await vk.client.call("{ff}", "DEL", "{ff}:feed")  # which is not read for this

    assert await details(vk, end) == []
    assert (await vk.client.read("{ff}", "HGET", FROM, "{fp:0}")).decode() == value
    await emit(vk, "three")
    assert await details(vk, end) == ["three"]


async def test_two_processes_that_notice_a_failover_number_its_entries_once(vk: ValkeyStore) -> None:
    other = ValkeyStore(vk.client.address, vk.clock)
    await other.open(migrate=False)
    await emit(vk, "before")
    end = await vk.feed_end()
    await number_ahead(vk, "{fp:0}", 30_000, lineage="another")
    await emit(vk, "one", "two")

    await asyncio.gather(vk.feed_end(), other.feed_end())
    await other.close()

    assert await details(vk, end) == ["one", "two"]


async def test_no_subscriber_has_passed_the_positions_that_a_new_primary_of_the_feed_gives(vk: ValkeyStore) -> None:
    await emit(vk, "one")
    await vk.feed_end()
    saved = await vk.client.read("{ff}", "HGETALL", FROM)
    now = int((await vk.client.read("{ff}", "TIME"))[0]) * 1000
    await vk.client.call("{ff}", "HSET", FROM, "end", f"{now + 5000}-0")  # the clock of the old primary was ahead
    await emit(vk, "two")
    passed = await vk.feed_end()
    assert await details(vk, passed) == []
    await vk.client.call("{ff}", "DEL", "{ff}:feed")  # the failover loses what was numbered last
    await vk.client.call("{ff}", "HSET", FROM, *saved, "lineage", "another")
    await emit(vk, "three")

    assert await details(vk, passed) == ["two", "three"], "an event again, and none skipped"


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
    await vk.client.call("{ff}", "DEL", "{ff}:feed")
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
