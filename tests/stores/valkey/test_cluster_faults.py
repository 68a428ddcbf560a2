"""Faults of a real cluster under load: each shows what was acknowledged and what survived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from flowfabric.errors import StoreUnavailable
from flowfabric.model.change import Insert
from flowfabric.model.event import Topic
from flowfabric.model.execution import Execution
from flowfabric.settings import Deadlines
from flowfabric.stores.queries import Read
from flowfabric.stores.valkey import ValkeyClient, parse_url
from flowfabric.stores.valkey.slots import slot_of
from flowfabric.stores.valkey.store import ValkeyStore
from tests import valkey_cluster
from tests.stores.sample_rows import change, claim_request, event, execution, payload, queued
from tests.stores.unavailable import unavailable
from tests.stores.valkey.client.fake_peer import until
from tests.stores.valkey.conftest import connected
from tests.stores.valkey.history import TAGS, under_load
from tests.valkey_cluster import primary_of, replica_of, until_it_takes_over
from tests.valkey_servers import ValkeyNode, ValkeyServers

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(120)]

DEADLINES = Deadlines(connect_s=1, command_s=8)
LIBRARY = """#!lua name=ff_fault_test
redis.register_function('ff_test_both', function(keys)
  return redis.call('INCR', keys[1]) + redis.call('INCR', keys[2])
end)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyServers]:
    yield from valkey_cluster.own_cluster("faults")


@pytest.fixture
def servers(cluster: ValkeyServers) -> Iterator[ValkeyServers]:
    yield from valkey_cluster.healthy(cluster)


def opened(servers: ValkeyServers, options: str = "") -> AbstractAsyncContextManager[ValkeyClient]:
    return connected(servers.url(0, options), DEADLINES)


@asynccontextmanager
async def opened_store(servers: ValkeyServers) -> AsyncIterator[ValkeyStore]:
    store = ValkeyStore(parse_url(servers.url()), deadlines=DEADLINES)
    await store.open(migrate=True)
    try:
        yield store
    finally:
        await store.close()


async def test_a_manual_failover_under_load_loses_nothing_and_refuses_nothing(servers: ValkeyServers) -> None:
    async with opened(servers) as client:
        async with under_load(client) as history:
            primary = primary_of(servers, client, TAGS[0])
            replica = replica_of(servers, primary)
            replica.execute("CLUSTER", "FAILOVER")
            await until_it_takes_over(replica)

        assert await history.survivors() == history.acknowledged
        assert not history.refused
        assert not history.in_doubt
        assert client.node_for(TAGS[0]).location[1] == replica.port


async def test_slots_that_are_moved_as_a_whole_under_load_lose_nothing(servers: ValkeyServers) -> None:
    async with opened(servers) as client:
        async with under_load(client) as history:
            source = primary_of(servers, client, TAGS[0])
            target = next(node for node in servers.primaries() if node.port != source.port)
            moved = [tag for tag in TAGS if primary_of(servers, client, tag) is source]
            slots = [slot_of(tag) for tag in moved]
            await valkey_cluster.move_slots(source, target, *slots)
            await history.wait_for_more(20)

        assert await history.survivors() == history.acknowledged
        assert not history.in_doubt
        assert {client.node_for(tag).location[1] for tag in moved} == {target.port}
        await valkey_cluster.move_slots(target, source, *slots)


async def test_a_call_to_a_slot_that_is_moved_key_by_key_waits_and_is_executed_once(servers: ValkeyServers) -> None:
    async with opened(servers) as client:
        client.library = LIBRARY
        tag = TAGS[0]
        keys = (f"{tag}:a", f"{tag}:b")
        assert await client.call(tag, "FCALL", "ff_test_both", 2, *keys) == 2
        source = primary_of(servers, client, tag)
        target = next(node for node in servers.primaries() if node.port != source.port)
        valkey_cluster.begin_moving_keys(source, target, slot_of(tag))
        valkey_cluster.move_keys(source, target, keys[0])

        call = client.call(tag, "FCALL", "ff_test_both", 2, *keys)
        done, _ = await asyncio.wait([call], timeout=0.5)
        assert not done
        valkey_cluster.move_keys(source, target, keys[1])
        valkey_cluster.assign_slot(slot_of(tag), target, source)

        assert await call == 4
        assert client.node_for(tag).location[1] == target.port
        await client.call(tag, "DEL", *keys)
        valkey_cluster.assign_slot(slot_of(tag), source, target)


@pytest.mark.parametrize("moved_key", ["exec_core", "exec_core:line", "payload", "f"])
async def test_a_commit_and_a_claim_of_a_partition_of_which_one_key_is_moved_change_nothing_until_it_is_whole(
    servers: ValkeyServers, moved_key: str
) -> None:
    async with opened_store(servers) as store:
        client, name, other = store.client, f"{TAGS[0]}:a", f"{TAGS[0]}:b"
        await store.commit([change(Insert(queued(name)), Insert(payload(name)), events=[event(name)])])
        source = primary_of(servers, client, TAGS[0])
        target = next(node for node in servers.primaries() if node.port != source.port)
        slot = slot_of(TAGS[0])
        valkey_cluster.begin_moving_keys(source, target, slot)
        valkey_cluster.move_keys(source, target, f"{TAGS[0]}:{moved_key}")
        source.execute("CONFIG", "RESETSTAT")
        before = dump(source, slot)

        inserted = change(Insert(queued(other)), Insert(payload(other)), events=[event(other)])
        commit = asyncio.create_task(store.commit([inserted]))
        claim = asyncio.create_task(store.claim_rows(claim_request(1)))
        await valkey_cluster.until(lambda: refusals(source, "TRYAGAIN") > 4, "both calls to be refused several times")
        assert not commit.done()
        assert not claim.done()
        assert dump(source, slot) == before
        assert target.execute("CLUSTER", "GETKEYSINSLOT", slot, 100) == [f"{TAGS[0]}:{moved_key}"]
        while keys := source.execute("CLUSTER", "GETKEYSINSLOT", slot, 100):
            valkey_cluster.move_keys(source, target, *keys)
        valkey_cluster.assign_slot(slot, target, source)

        assert await commit != [None]
        assert len((await claim).rows) == 1
        assert len((await store.claim_rows(claim_request(5, prefix="again"))).rows) == 1
        rows = (await store.load([Read(Execution, ())])).rows[0]
        assert sorted(row.execution_id for row in rows) == [name, other]
        assert len((await store.feed(Topic.LEASE, 0, 10)).events) == 2  # those of the claims
        target.execute("DEL", *target.execute("CLUSTER", "GETKEYSINSLOT", slot, 100))
        valkey_cluster.assign_slot(slot, source, target)


def dump(node: ValkeyNode, slot: int) -> dict[str, Any]:
    """Return what a node has of a slot."""
    return {key: node.execute("DUMP", key) for key in node.execute("CLUSTER", "GETKEYSINSLOT", slot, 100)}


def refusals(node: ValkeyNode, code: str) -> int:
    """Return how often a node has answered with an error code."""
    return int(node.info("errorstats").get(f"errorstat_{code}", "count=0").partition("=")[2])


@pytest.mark.parametrize("moved", [True, False], ids=["redirected", "on another node"])
async def test_a_notification_follows_every_commit_of_its_batch(servers: ValkeyServers, moved: bool) -> None:
    async with opened_store(servers) as store, opened_store(servers) as listener:
        source = primary_of(servers, store.client, TAGS[0])
        target = next(node for node in servers.primaries() if node.port != source.port)
        far = TAGS[0] if moved else next(tag for tag in TAGS if primary_of(servers, store.client, tag) is target)
        near = next(tag for tag in TAGS if primary_of(servers, store.client, tag) is source and tag != far)
        slot, key, heard = slot_of(far), f"{far}:exec_core", list[bool]()
        listener.on_notify(lambda topics: heard.append(bool(target.execute("EXISTS", key))))
        subscription = listener._notifier._subscription
        assert subscription is not None
        await until(subscription.ready.is_set)
        if moved:  # which the store does not know
            await valkey_cluster.move_slots(source, target, slot)
        target.execute("CLIENT", "PAUSE", 1000, "WRITE")  # so the commit there is the last one that is executed

        changes = [change(Insert(execution(f"{tag}:a"))) for tag in ((far,) if moved else (far, near))]
        assert None not in await store.commit(changes, frozenset({"lane:mail"}))

        await until(lambda: True in heard)
        if moved:
            await valkey_cluster.move_slots(target, source, slot)


@pytest.mark.parametrize("options", ["", "wait=1"])
async def test_the_death_of_a_primary_under_load_ends_with_its_replica_serving(
    servers: ValkeyServers, options: str
) -> None:
    async with opened(servers, options) as client:
        async with under_load(client) as history:
            primary = primary_of(servers, client, TAGS[0])
            replica = replica_of(servers, primary)
            await asyncio.to_thread(primary.kill)
            await until_it_takes_over(replica)
            await asyncio.to_thread(primary.start)  # until it is back as a replica, wait=1 leaves every write in doubt

        survivors = await history.survivors()
        assert client.node_for(TAGS[0]).location[1] == replica.port
        assert not history.refused  # calls that were not sent wait for the failover
        lost = history.acknowledged - survivors
        if options:
            assert not lost
        else:
            assert {tag for tag, _ in lost} <= {tag for tag in TAGS if client.node_for(tag).location[1] == replica.port}


async def test_a_write_that_no_replica_has_is_in_doubt_and_vanishes_with_its_primary(
    servers: ValkeyServers,
) -> None:
    async with opened(servers, "wait=1&command_timeout=2") as client:
        tag = TAGS[0]
        await client.call(tag, "SET", f"{tag}:note", "old")
        primary = primary_of(servers, client, tag)
        replica = replica_of(servers, primary)
        replica.pause()
        primary.execute("CLIENT", "KILL", "TYPE", "replica")  # else its socket would still receive the write

        with unavailable("fewer copies than asked", in_doubt=True):
            await client.call(tag, "SET", f"{tag}:note", "new")
        assert primary.execute("GET", f"{tag}:note") == "new"
        await asyncio.to_thread(primary.kill)
        replica.resume()

        await until_it_takes_over(replica)
        with pytest.raises(StoreUnavailable, match="an earlier write is not confirmed yet"):
            await client.read(tag, "GET", f"{tag}:note")  # there is no second copy of anything
        await asyncio.to_thread(primary.start)
        # It is connected before it has the data; until then it confirms no write.
        await valkey_cluster.until(
            lambda: "state=online" in replica.info("replication").get("slave0", ""), "the old primary"
        )
        assert await client.read(tag, "GET", f"{tag}:note") == b"old"


async def test_a_paused_primary_is_left_once_its_replica_serves_and_long_before_the_timeout(
    servers: ValkeyServers,
) -> None:
    async with opened(servers, "command_timeout=60") as client:
        tag = TAGS[0]
        primary = primary_of(servers, client, tag)
        others = [one for one in TAGS if primary_of(servers, client, one) is not primary]
        await client.call(tag, "SET", f"{tag}:note", 1)
        primary.pause()
        stuck = client.call(tag, "SET", f"{tag}:note", 2)
        for other in others:  # the other nodes go on
            await client.call(other, "SET", f"{other}:note", 1)

        async with asyncio.timeout(20):
            with unavailable(in_doubt=True):
                await stuck
            assert await client.call(tag, "SET", f"{tag}:note", 3) == b"OK"
            assert await client.read(tag, "GET", f"{tag}:note") == b"3"


async def test_a_node_that_joins_without_functions_gets_them_with_its_first_call(servers: ValkeyServers) -> None:
    async with opened(servers) as client:
        client.library = LIBRARY
        tag = TAGS[0]
        keys = (f"{tag}:a", f"{tag}:b")
        await client.call(tag, "FCALL", "ff_test_both", 2, *keys)
        source = primary_of(servers, client, tag)
        joined = await asyncio.to_thread(servers.add_node)
        slot = slot_of(tag)
        await valkey_cluster.move_slots(source, joined, slot)
        joined.execute("FUNCTION", "FLUSH", "SYNC")

        assert await client.call(tag, "FCALL", "ff_test_both", 2, *keys) == 4
        assert await client.read(tag, "GET", keys[0]) == b"2"
        assert client.node_for(tag).location[1] == joined.port
        assert len(client.primaries()) == 4
        await valkey_cluster.move_slots(joined, source, slot)
        await asyncio.to_thread(servers.remove_node, joined)
