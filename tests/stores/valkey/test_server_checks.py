"""The checks of servers at open: on real ones with other settings, and on facts that no server here has. Their load."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flowfabric.cli.output import hint_for
from flowfabric.errors import InvalidInput, StoreFault, StoreUnavailable, Unavailable
from flowfabric.settings import Deadlines
from flowfabric.stores.valkey import durability, parse_url
from flowfabric.stores.valkey.node_load import measure_nodes
from flowfabric.stores.valkey.server_checks import (
    ServerFacts,
    check_servers,
    clock_skew_ms,
    inspect_servers,
    refuse_unfit,
    warnings,
)
from flowfabric.stores.valkey.store import ValkeyStore
from tests.conftest import REDIS
from tests.postgres_install import ROOT
from tests.stores.valkey.client.fake_peer import Peer, fake_server, slot_map
from tests.stores.valkey.conftest import connected
from tests.valkey_cluster import own_server
from tests.valkey_servers import ValkeyNode

PARTITIONS = 256
FIT = ServerFacts(
    address="a:1",
    name="Valkey",
    version="7.2.4",
    is_replica=False,
    is_cluster=False,
    maxmemory_policy="noeviction",
    has_aof=True,
    has_waitaof=True,
    replicas=1,
    clock_ms=(0.0, 1.0),
)
ONE = parse_url("valkey://a")
SENTENCES = (
    durability.NO_AOF,
    durability.ON_DISK,
    durability.EVERY_SECOND,
    durability.UNKNOWN,
    durability.FAILOVER_LOSES,
    durability.FAILOVER_SAFE,
)


opened = partial(connected, deadlines=Deadlines(connect_s=2, command_s=5))


@pytest.fixture
def node() -> Iterator[ValkeyNode]:
    """A server whose settings a test may change."""
    yield from own_server("checks")


def url_of(node: ValkeyNode, options: str = "") -> str:
    return f"valkey://127.0.0.1:{node.port}{options}"


@pytest.mark.parametrize("url", ["valkey_url", "valkey_cluster_url"])
async def test_the_servers_of_the_tests_are_fit_and_need_no_warning(url: str, request: pytest.FixtureRequest) -> None:
    async with opened(request.getfixturevalue(url)) as client:
        assert await check_servers(client) == []
        facts = await inspect_servers(client)

    assert all(server.redis_version >= (7, 0) for server in facts)
    assert clock_skew_ms(facts) == 0


@pytest.mark.parametrize(
    ("url", "has_aof", "policies", "words"),
    [
        ("valkey://a", True, {"everysec"}, durability.EVERY_SECOND),
        ("valkey://a", True, {"always"}, durability.ON_DISK),
        ("valkey+cluster://a", True, {"always", "everysec"}, f"{durability.UNKNOWN}; {durability.FAILOVER_LOSES}"),
        ("valkey://a", True, {""}, durability.UNKNOWN),
        ("valkey://a", True, {"no"}, durability.UNKNOWN),
        ("valkey://a", False, {"always"}, durability.NO_AOF),
        ("valkey://a?durability=fsync", True, {"everysec"}, durability.ON_DISK),
        ("valkey+cluster://a?wait=1", True, {"everysec"}, f"{durability.EVERY_SECOND}; {durability.FAILOVER_SAFE}"),
        ("valkey+cluster://a", True, {"everysec"}, f"{durability.EVERY_SECOND}; {durability.FAILOVER_LOSES}"),
    ],
)
def test_what_acknowledged_writes_survive_is_said_as_in_the_docs(
    url: str, has_aof: bool, policies: set[str], words: str
) -> None:
    assert durability.describe(parse_url(url), has_aof=has_aof, policies=policies) == words
    page = (ROOT / "docs" / "valkey.md").read_text()
    assert [one for one in SENTENCES if one in words and f" {one} |" not in page] == []


async def test_the_replicas_of_a_cluster_are_counted(valkey_cluster_url: str) -> None:
    async with opened(valkey_cluster_url) as client:
        assert [server.replicas for server in await inspect_servers(client)] == [1, 1, 1]


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_an_eviction_policy_is_refused_with_the_fix(node: ValkeyNode, policy: str) -> None:
    node.execute("CONFIG", "SET", "maxmemory-policy", policy)

    async with opened(url_of(node)) as client:
        with pytest.raises(Unavailable, match=f"maxmemory-policy is {policy}.*set it to noeviction") as caught:
            await check_servers(client)
    assert hint_for(caught.value) is None, "the message has the fix; `ff migrate` is none"


async def test_a_server_without_an_append_only_file_is_warned_of_and_refused_with_fsync(node: ValkeyNode) -> None:
    node.execute("CONFIG", "SET", "appendonly", "no")

    async with opened(url_of(node)) as client:
        (warning,) = await check_servers(client)
    assert "no append-only file" in warning
    async with opened(url_of(node, "?durability=fsync")) as client:
        with pytest.raises(Unavailable, match="set appendonly to yes"):
            await check_servers(client)


async def test_more_copies_than_there_are_replicas_is_warned_of(node: ValkeyNode) -> None:
    async with opened(url_of(node, "?wait=1")) as client:
        (warning,) = await check_servers(client)

    assert "0 replicas and wait=1" in warning


async def test_a_replica_is_refused(node: ValkeyNode) -> None:
    node.execute("REPLICAOF", "127.0.0.1", 1)

    async with opened(url_of(node)) as client:
        with pytest.raises(Unavailable, match="it is a replica"):
            await check_servers(client)


async def test_a_cluster_whose_slots_are_not_all_served_is_refused() -> None:
    def answer(command: list[bytes], peer: Peer) -> bytes:
        return slot_map((0, 9999, server.port))

    async with fake_server(answer) as server, opened(f"valkey+cluster://127.0.0.1:{server.port}") as client:
        with pytest.raises(StoreUnavailable, match="6384 of 16384 slots") as caught:
            await check_servers(client)

    assert (caught.value.source, caught.value.in_doubt) == (StoreFault.CLUSTER, False)


async def test_a_url_that_says_cluster_of_a_single_server_is_refused_with_the_fix(valkey_url: str) -> None:
    with pytest.raises(InvalidInput, match="is no cluster; write valkey://"):
        async with opened(valkey_url.replace("valkey://", "valkey+cluster://")):
            pass


async def test_a_url_that_says_single_server_of_a_cluster_is_refused_with_the_fix(valkey_cluster_url: str) -> None:
    first = valkey_cluster_url.partition("://")[2].partition(",")[0]
    async with opened(f"valkey://{first}") as client:
        with pytest.raises(InvalidInput, match=r"is a node of a cluster; write valkey\+cluster://"):
            await check_servers(client)


@pytest.mark.parametrize(
    ("changed", "options", "reason"),
    [
        ({"version": "6.2.14", "name": "Redis"}, "", "Redis 6.2.14 has no functions"),
        ({"has_waitaof": False}, "?durability=fsync", "no WAITAOF; leave out durability=fsync"),
    ],
)
def test_a_server_that_is_too_old_is_refused(changed: dict[str, Any], options: str, reason: str) -> None:
    refuse_unfit([FIT], ONE)
    with pytest.raises(Unavailable, match=reason):
        refuse_unfit([FIT, msgspec.structs.replace(FIT, **changed)], parse_url("valkey://a" + options))


async def test_fsync_is_refused_at_open_where_the_server_does_not_know_waitaof(
    node: ValkeyNode, tmp_path: Path
) -> None:
    settings = tmp_path / "more.conf"
    settings.write_text('rename-command WAITAOF ""\n')
    node.kill()
    node.start(include=str(settings))

    refused, accepted = (ValkeyStore(parse_url(url_of(node, options))) for options in ("?durability=fsync", ""))
    with pytest.raises(Unavailable, match="has no WAITAOF; leave out durability=fsync"):
        await refused.open(migrate=True)
    await accepted.open(migrate=True)
    for store in (refused, accepted):
        await store.close()


if REDIS:  # where it is installed

    async def test_fsync_is_refused_by_a_server_that_has_no_waitaof(redis_url: str) -> None:
        async with opened(redis_url) as client:
            (facts,) = await inspect_servers(client)
        assert (facts.name, facts.has_waitaof) == ("Redis", facts.redis_version >= (7, 2))

        store = ValkeyStore(parse_url(f"{redis_url}?durability=fsync"))
        if facts.has_waitaof:
            await store.open(migrate=True)
        else:
            with pytest.raises(Unavailable, match="has no WAITAOF; leave out durability=fsync"):
                await store.open(migrate=True)
        await store.close()


@pytest.mark.parametrize(
    ("skew_ms", "is_refused", "is_warned"),
    [(150, False, False), (250, False, True), (1900, False, True), (2100, True, True)],
)
def test_clocks_that_differ_are_warned_of_or_refused(skew_ms: float, is_refused: bool, is_warned: bool) -> None:
    facts = [FIT, msgspec.structs.replace(FIT, clock_ms=(1.0 + skew_ms, 3.0 + skew_ms))]

    assert clock_skew_ms(facts) == clock_skew_ms(facts[::-1]) == skew_ms
    assert bool(warnings(facts, ONE)) == is_warned
    if is_refused:
        with pytest.raises(Unavailable, match="synchronize them"):
            refuse_unfit(facts, ONE)
    else:
        refuse_unfit(facts, ONE)


def test_a_slow_reply_is_no_difference_of_clocks() -> None:
    slow = msgspec.structs.replace(FIT, clock_ms=(-3000.0, 3000.0))

    assert clock_skew_ms([FIT, slow]) == 0


# --- the load of servers


async def test_every_partition_belongs_to_the_primary_that_serves_it(valkey_cluster_url: str) -> None:
    async with opened(valkey_cluster_url) as client:
        loads = await measure_nodes(client, PARTITIONS)

        held = {partition: load.address for load in loads for partition in load.partitions}
        assert held == {partition: str(client.node_for(f"{{fp:{partition}}}")) for partition in range(PARTITIONS)}
    assert len(loads) == 3
    assert sum(len(load.partitions) for load in loads) == PARTITIONS


async def test_the_cpu_of_a_server_is_that_of_the_moment(node: ValkeyNode) -> None:
    async with opened(url_of(node)) as client:

        async def work() -> None:
            while True:
                await client.call("x", "EVAL", "for i = 1, 300000 do end", 0)

        working = asyncio.create_task(work())
        [busy] = await measure_nodes(client, PARTITIONS)
        working.cancel()
        with suppress(asyncio.CancelledError):
            await working
        [idle] = await measure_nodes(client, PARTITIONS)

    assert 0 <= idle.cpu < busy.cpu / 3, "also beside other processes"
    assert busy.cpu < 1.5
    assert busy.partitions == tuple(range(PARTITIONS))
