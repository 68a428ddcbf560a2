"""Faults of a Valkey cluster under the load of an engine: what was acknowledged, and what survived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from flowfabric.connector import open_engine
from flowfabric.cursors import FROM_THE_START
from flowfabric.engine.engine import Engine
from flowfabric.engine.streams.subscription import Subscription
from flowfabric.errors import StaleLease, StoreUnavailable, StreamBackpressure
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.execution import Execution
from flowfabric.rules.feed import CompletionFeedEntry
from flowfabric.settings import Deadlines, Settings
from flowfabric.stores.homes import GLOBAL_HOME
from flowfabric.stores.valkey.feed import FROM
from flowfabric.stores.valkey.slots import slot_of
from flowfabric.stores.valkey.store import ValkeyStore
from flowfabric.testing.invariants import scan_all
from tests import valkey_cluster
from tests.chaos.valkey.load import LANES, TTL_MS, check_rows, check_that_nothing_was_lost, drain, reported, under_load
from tests.executions import claim_one
from tests.stores.unavailable import unavailable
from tests.valkey_cluster import is_primary, replica_of, until, until_it_takes_over
from tests.valkey_servers import ReplyFault, ValkeyNode, ValkeyServers

pytestmark = [pytest.mark.slow, pytest.mark.serial, pytest.mark.timeout(180)]

AHEAD_MS = 20_000  # by which the clock of the old primary is ahead
SETTINGS = Settings(deadlines=Deadlines(connect_s=1, command_s=8), poll_ms=200)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyServers]:
    yield from valkey_cluster.own_cluster("chaos")


@pytest.fixture
def servers(cluster: ValkeyServers) -> Iterator[ValkeyServers]:
    yield from valkey_cluster.healthy(cluster)


@asynccontextmanager
async def engines(servers: ValkeyServers, options: str = "") -> AsyncIterator[tuple[Engine, Engine]]:
    """Two engines with connections of their own, as in two processes."""
    url = servers.url(0, options)
    async with await open_engine(url, settings=SETTINGS) as one, await open_engine(url, settings=SETTINGS) as other:
        yield one, other


def tag_of(engine: Engine, lane: str) -> str:
    return engine.new_execution_id(lane).partition("}")[0] + "}"


def primary_of(servers: ValkeyServers, engine: Engine, tag: str) -> ValkeyNode:
    assert isinstance(engine.store, ValkeyStore)
    return valkey_cluster.primary_of(servers, engine.store.client, tag)


async def test_with_wait_the_death_of_a_primary_loses_nothing_that_was_acknowledged(servers: ValkeyServers) -> None:
    async with engines(servers, "wait=1") as (one, other):
        async with under_load(one, other) as load:
            primary = primary_of(servers, one, tag_of(one, LANES[0]))
            replica = replica_of(servers, primary)
            await asyncio.to_thread(primary.kill)
            await until_it_takes_over(replica)
            await asyncio.to_thread(primary.start)  # as its replica

        await check_that_nothing_was_lost(one, load)


@pytest.mark.parametrize("home", ["lane", "feed"])
async def test_without_wait_a_failover_loses_what_its_replica_had_not_and_nothing_that_is_acknowledged_afterwards(
    servers: ValkeyServers, home: str
) -> None:
    async with engines(servers) as (one, other), subscriber(other) as seen:
        async with under_load(one, other) as load:
            tag = tag_of(one, LANES[0]) if home == "lane" else GLOBAL_HOME
            primary = primary_of(servers, one, tag)
            hit = tuple(name for lane in LANES if primary_of(servers, one, name := tag_of(one, lane)) is primary)
            replica = replica_of(servers, primary)
            replica.pause()
            primary.execute("CLIENT", "KILL", "TYPE", "replica")
            await load.wait_for_more(3)  # which the replica does not get
            await asyncio.to_thread(primary.kill)
            for _ in range(100):  # iterations of the loop, which read what the server had sent before
                await asyncio.sleep(0)
            before, completed_before = load.acknowledged(), set(load.completed)
            replica.resume()
            await until_it_takes_over(replica)
        await drain(one)

        rows: list[Execution] = await scan_all(one.store, Execution)
        kept = {row.execution_id for row in rows}
        lost = load.acknowledged() - kept
        assert lost <= before, "an execution that was acknowledged after the failover is gone"
        assert all(execution_id.startswith(hit) for execution_id in lost), "another node lost something"
        assert bool(lost) == bool(hit)
        twice = {execution_id for execution_id, times in load.completed.items() if times > 1}
        assert twice <= completed_before, "a completion was acknowledged twice after the failover"
        assert all(execution_id.startswith(hit) for execution_id in twice)
        found, _ = await reported(one)
        assert kept <= set(found), "the feed misses a completion"
        await until(lambda: kept <= seen, "a subscriber to see every completion that survived")
        await check_rows(one)


@asynccontextmanager
async def subscriber(engine: Engine) -> AsyncIterator[set[str]]:
    """Follow the feed of completions through whatever happens; yield what it has reported."""
    seen: set[str] = set()
    feed = await engine.subscribe_completion(FROM_THE_START)

    async def follow() -> None:
        while True:
            with suppress(StreamBackpressure, StoreUnavailable):
                if (entry := await feed.next(timeout_s=0.2)) is not None:
                    seen.add(entry.execution_id)

    task = asyncio.create_task(follow())
    try:
        yield seen
    finally:
        task.cancel()


@asynccontextmanager
async def failover_without_the_last_writes(primary: ValkeyNode, replica: ValkeyNode) -> AsyncIterator[None]:
    """Kill a primary after a block whose writes its replica does not get, and wait until the replica serves."""
    written = int(primary.info("replication")["master_repl_offset"])
    await until(lambda: int(replica.info("replication")["slave_repl_offset"]) >= written, "the replica to follow")
    replica.pause()
    primary.execute("CLIENT", "KILL", "TYPE", "replica")
    yield
    await asyncio.to_thread(primary.kill)
    replica.resume()
    await until_it_takes_over(replica)


async def test_what_a_failover_lost_is_done_again_and_only_by_its_second_holder(servers: ValkeyServers) -> None:
    async with engines(servers) as (one, other):
        ended, waiting = one.new_execution_id("mail"), one.new_execution_id("mail")
        await one.create_execution(execution_id=ended, lane_id="mail")
        held = await one.claim("mail", worker_id="w", worker_instance_id="w-1", lease_ttl_ms=TTL_MS)
        await one.create_execution(execution_id=waiting, lane_id="mail")
        assert held is not None
        primary = primary_of(servers, one, ended)
        async with failover_without_the_last_writes(primary, replica_of(servers, primary)):
            await one.complete(held.handle, result=b"first")
            lost = await claim_one(one, "mail", lease_ttl_ms=60_000)
        again: dict[str, Claimed] = {}
        async with asyncio.timeout(30):
            while len(again) < 2:
                for claim in await other.claim_many(
                    "mail", 2, worker_id="v", worker_instance_id="v-1", max_wait_ms=500
                ):
                    again[claim.execution_id] = claim

        assert again[waiting].lease_epoch == lost.lease_epoch, "two holders of one epoch"
        assert again[ended].lease_epoch == held.lease_epoch + 1, "its lease has expired"
        for former in (held, lost):
            with pytest.raises(StaleLease):
                await one.complete(former.handle, result=b"first")
            await other.complete(again[former.execution_id].handle, result=b"second")
            assert await one.get_execution_result(former.execution_id) == b"second"
        assert (await reported(one))[0] == {ended: 1, waiting: 1}
        await check_rows(one)


async def test_with_wait_a_write_without_a_copy_is_not_acknowledged_and_found_missing_after_the_failover(
    servers: ValkeyServers,
) -> None:
    async with engines(servers, "wait=1") as (one, other):
        name, kept = one.new_execution_id("mail"), one.new_execution_id("mail")
        await one.create_execution(execution_id=kept, lane_id="mail")
        primary = primary_of(servers, one, name)
        async with failover_without_the_last_writes(primary, replica_of(servers, primary)):
            with unavailable(in_doubt=True):
                await one.create_execution(execution_id=name, lane_id="mail")
        await asyncio.to_thread(primary.start)  # without a second copy nothing is confirmed
        await until(lambda: not is_primary(primary), "the old primary to follow")

        async with asyncio.timeout(30):
            while True:
                try:
                    assert await one.describe_execution(name) is None
                    break
                except StoreUnavailable:
                    pass
        assert await one.describe_execution(kept) is not None
        await one.create_execution(execution_id=name, lane_id="mail")
        assert await other.describe_execution(name) is not None


@pytest.mark.parametrize("ahead", ["partition", "feed"])
async def test_a_subscriber_misses_nothing_though_the_clock_of_the_new_primary_is_behind(
    servers: ValkeyServers, ahead: str
) -> None:
    async with engines(servers) as (one, other):
        feed = await other.subscribe_completion(FROM_THE_START)
        feed_node = primary_of(servers, one, GLOBAL_HOME)
        lane = next(lane for lane in LANES if primary_of(servers, one, tag_of(one, lane)) is not feed_node)
        before = await complete_some(one, lane)
        assert {entry.execution_id for entry in [await next_entry(feed) for _ in before]} == before
        tag = tag_of(one, lane) if ahead == "partition" else GLOBAL_HOME
        primary = primary_of(servers, one, tag)
        replica = replica_of(servers, primary)
        async with failover_without_the_last_writes(primary, replica):
            future_id = f"{int(primary.execute('TIME')[0]) * 1000 + AHEAD_MS}-0"
            if ahead == "partition":
                primary.execute("XSETID", f"{tag}:f", future_id)
            else:
                primary.execute("HSET", FROM, "end", future_id)
            lost = await complete_some(one, lane)
            assert {entry.execution_id for entry in [await next_entry(feed) for _ in lost]} == lost
        after = await complete_some(one, lane)  # before anybody reads the feed
        if ahead == "partition":
            (newest, _), *_ = replica.execute("XREVRANGE", f"{tag}:f", "+", "-", "COUNT", 1)
            numbered = primary_of(servers, one, GLOBAL_HOME).execute("HGET", FROM, tag)
            assert int(newest.partition("-")[0]) < int(numbered.partition("-")[0]), "its ids went back"

        seen = set[str]()
        async with asyncio.timeout(30):
            while not after <= seen:
                with suppress(StreamBackpressure):
                    if (entry := await feed.next(timeout_s=1)) is not None:
                        seen.add(entry.execution_id)
        await check_rows(one)


async def complete_some(engine: Engine, lane: str) -> set[str]:
    """Create, claim and complete three executions."""
    names: set[str] = {engine.new_execution_id(lane) for _ in range(3)}
    for name in names:
        await engine.create_execution(execution_id=name, lane_id=lane)
    who: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1"}
    claimed = await engine.claim_many(lane, 3, **who)
    for one in claimed:
        await engine.complete(one.handle, result=b"done")
    assert {one.execution_id for one in claimed} == names
    return names


async def next_entry(feed: Subscription[CompletionFeedEntry]) -> CompletionFeedEntry:
    entry = await feed.next(timeout_s=20)
    assert entry is not None
    return entry


async def test_a_manual_failover_loses_nothing(servers: ValkeyServers) -> None:
    async with engines(servers) as (one, other):
        async with under_load(one, other) as load:
            replica = replica_of(servers, primary_of(servers, one, tag_of(one, LANES[0])))
            replica.execute("CLUSTER", "FAILOVER")
            await until_it_takes_over(replica)

        await check_that_nothing_was_lost(one, load)


async def test_slots_that_are_moved_to_a_new_node_without_functions_lose_nothing(servers: ValkeyServers) -> None:
    async with engines(servers) as (one, other):
        async with under_load(one, other) as load:
            source = primary_of(servers, one, tag_of(one, LANES[0]))
            lanes = [lane for lane in LANES if primary_of(servers, one, tag_of(one, lane)) is source]
            slots = sorted({slot_of(tag_of(one, lane)) for lane in lanes})
            joined = await asyncio.to_thread(servers.add_node)
            joined.execute("FUNCTION", "FLUSH", "SYNC")
            await valkey_cluster.move_slots(source, joined, *slots)
            await load.wait_for_more(10)
            await valkey_cluster.move_slots(joined, source, *slots)

        await check_that_nothing_was_lost(one, load)
        await asyncio.to_thread(servers.remove_node, joined)


async def test_a_slot_that_is_moved_key_by_key_loses_nothing(servers: ValkeyServers) -> None:
    async with engines(servers) as (one, other):
        async with under_load(one, other) as load:
            source = primary_of(servers, one, tag_of(one, LANES[0]))
            target = next(node for node in servers.primaries() if node is not source and node.execute("DBSIZE"))
            slot = slot_of(tag_of(one, LANES[0]))
            for giver, taker in ((source, target), (target, source)):
                await asyncio.to_thread(move_key_by_key, giver, taker, slot)
                await load.wait_for_more(5)

        await check_that_nothing_was_lost(one, load)


def move_key_by_key(source: ValkeyNode, target: ValkeyNode, slot: int) -> None:
    valkey_cluster.begin_moving_keys(source, target, slot)
    while keys := source.execute("CLUSTER", "GETKEYSINSLOT", slot, 1):
        valkey_cluster.move_keys(source, target, *keys)
    valkey_cluster.assign_slot(slot, target, source)


async def test_a_paused_primary_that_comes_back_after_its_failover_is_refused(servers: ValkeyServers) -> None:
    async with engines(servers, "wait=1") as (one, other):
        async with under_load(one, other) as load:
            primary = primary_of(servers, one, tag_of(one, LANES[0]))
            replica = replica_of(servers, primary)
            primary.pause()
            await until_it_takes_over(replica)
            primary.resume()
            await until(lambda: not is_primary(primary), "the old primary to become a replica")

        await check_that_nothing_was_lost(one, load)


async def test_a_primary_that_is_cut_off_from_the_other_nodes_acknowledges_nothing_that_is_lost(
    servers: ValkeyServers,
) -> None:
    async with engines(servers, "wait=1") as (one, other):
        async with under_load(one, other) as load:
            tag = tag_of(one, LANES[0])
            primary = primary_of(servers, one, tag)
            replica = replica_of(servers, primary)
            primary.cut_off(replica)
            await until_it_takes_over(replica)
            await until(lambda: primary_of(servers, one, tag) is replica, "the client to follow")
            assert is_primary(primary)
            with pytest.raises(ReplyFault, match="CLUSTERDOWN"):
                primary.execute("SET", f"{tag}:cut-off", 1)
            primary.reconnect(replica)
            await until(lambda: not is_primary(primary), "the old primary to become a replica")

        await check_that_nothing_was_lost(one, load)


async def test_a_full_memory_refuses_work_and_leaves_no_half_change(servers: ValkeyServers) -> None:
    async with engines(servers) as (one, other):
        async with under_load(one, other) as load:
            full = primary_of(servers, one, tag_of(one, LANES[0]))
            full.execute("CONFIG", "RESETSTAT")
            full.execute("CONFIG", "SET", "maxmemory", 1)
            await until(lambda: "errorstat_OOM" in full.info("errorstats"), "work to be refused")
            full.execute("CONFIG", "SET", "maxmemory", 0)

        await check_that_nothing_was_lost(one, load)
