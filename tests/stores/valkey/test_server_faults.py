"""Faults of one real server under load: each shows what was acknowledged and what survived."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager

import pytest

from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.settings import Deadlines
from flowfabric.stores.valkey import ChannelSubscription, ValkeyClient
from tests.blackhole import black_hole
from tests.processes import wait_for
from tests.stores.unavailable import unavailable
from tests.stores.valkey.client.fake_peer import until
from tests.stores.valkey.conftest import connected
from tests.stores.valkey.history import under_load
from tests.valkey_cluster import own_server
from tests.valkey_servers import ValkeyNode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

DEADLINES = Deadlines(connect_s=1, command_s=2)


@pytest.fixture
def node() -> Iterator[ValkeyNode]:
    """A server that a test may kill."""
    yield from own_server("faults")


def opened(port: int, options: str = "") -> AbstractAsyncContextManager[ValkeyClient]:
    return connected(f"valkey://127.0.0.1:{port}{options}", DEADLINES)


async def test_acknowledged_writes_survive_the_death_of_the_server(node: ValkeyNode) -> None:
    async with opened(node.port) as client:
        async with under_load(client, 50) as history:
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start)

        assert await history.survivors() >= history.acknowledged


async def test_acknowledged_writes_survive_a_death_during_a_rewrite_of_the_append_only_file(node: ValkeyNode) -> None:
    async with opened(node.port) as client:
        filler = "x" * 20_000
        await asyncio.gather(*[client.call("a", "SET", f"a:{number}", filler) for number in range(2000)])
        async with under_load(client, 50) as history:
            node.execute("BGREWRITEAOF")
            await history.wait_for_more(20)
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start)
            node.execute("BGREWRITEAOF")
            await asyncio.to_thread(
                wait_for, lambda: node.info("persistence")["aof_rewrite_in_progress"] == "0", "the rewrite"
            )
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start)

        assert await history.survivors() >= history.acknowledged


async def test_a_full_memory_refuses_writes_with_a_known_outcome_and_reads_continue(node: ValkeyNode) -> None:
    async with opened(node.port) as client:
        await client.call("a", "SET", "a", 1)
        node.execute("CONFIG", "SET", "maxmemory", 1)
        with unavailable("OOM", in_doubt=False, source=StoreFault.TRANSPORT):
            await client.call("a", "SET", "a", 2)

        assert await client.read("a", "GET", "a") == b"1"
        node.execute("CONFIG", "SET", "maxmemory", 0)
        assert await client.call("a", "SET", "a", 3) == b"OK"


async def test_a_server_that_loads_its_data_is_waited_for(node: ValkeyNode) -> None:
    async with opened(node.port) as client:
        await asyncio.gather(*[client.call("a", "SET", f"a:{number}", number) for number in range(3000)])
        await asyncio.to_thread(node.kill)
        starting = asyncio.create_task(asyncio.to_thread(node.start, key_load_delay="300"))
        while "loading:1" not in await _persistence(client):  # noqa: ASYNC110 - the server is not up yet
            await asyncio.sleep(0.01)

        assert await client.read("a", "GET", "a:2999") == b"2999"
        await starting


async def _persistence(client: ValkeyClient) -> str:
    try:
        text: bytes = await client.node_for("a").read("INFO", "persistence")
    except StoreUnavailable:
        return ""
    return text.decode()


async def test_a_black_hole_is_noticed_within_the_timeout_and_left(node: ValkeyNode) -> None:
    loop = asyncio.get_running_loop()
    async with black_hole("127.0.0.1", node.port) as hole, opened(hole.port) as client:
        await client.call("a", "SET", "a", 1)
        hole.swallow()
        began = loop.time()
        write, read = client.call("a", "SET", "a", 2), client.read("a", "GET", "a")

        with unavailable("no reply within 2 s", in_doubt=True, source=StoreFault.TIMEOUT):
            await write
        assert loop.time() - began < 1.5 * DEADLINES.command_s
        assert not (await asyncio.gather(read, return_exceptions=True))[0].in_doubt  # type: ignore[union-attr]
        assert await client.call("a", "SET", "a", 3) == b"OK"


async def test_a_subscription_in_a_black_hole_is_renewed_and_reported(node: ValkeyNode) -> None:
    heard: list[bytes] = []
    reconnects: list[None] = []
    async with black_hole("127.0.0.1", node.port) as hole, opened(hole.port) as client:
        subscription = ChannelSubscription(
            "wake",
            on_message=lambda channel, payload: heard.append(payload),
            on_reconnect=lambda: reconnects.append(None),
        )
        client.subscribe(subscription)
        await until(subscription.ready.is_set)
        hole.swallow()
        await until(lambda: bool(reconnects))
        node.execute("PUBLISH", "wake", "again")
        await until(lambda: heard == [b"again"])


async def test_a_batch_is_on_disk_when_fsync_acknowledges_it(node: ValkeyNode) -> None:
    async with opened(node.port, "?durability=fsync") as client:
        await asyncio.gather(*[client.call("a", "SET", f"a:{number}", number) for number in range(100)])

        assert int(node.info("persistence")["aof_pending_bio_fsync"]) == 0
        assert node.execute("CONFIG", "GET", "appendfsync")[1] == "everysec"
        node.execute("CONFIG", "SET", "appendfsync", "no")  # nothing is written to disk any more
        with unavailable("WAITAOF", in_doubt=True):
            await client.call("a", "SET", "a", 1)
