"""The client on real servers: calls, order, errors, subscriptions; on one server and on a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from flowfabric.errors import Corruption
from flowfabric.stores.valkey import ChannelSubscription, ReplyError, ValkeyClient, parse_url

LIBRARY = """#!lua name=ff_client_test
redis.register_function('ff_test_refuse', function() return redis.error_reply('FFNO a refusal') end)
redis.register_function('ff_test_break', function(keys) redis.call('SET', keys[1], 'half') error('broken') end)
"""
TAGS = [f"{{fp:{number}}}" for number in range(32)]


@pytest.fixture(params=["valkey_url", "valkey_cluster_url"])
async def client(request: pytest.FixtureRequest) -> AsyncIterator[ValkeyClient]:
    client = ValkeyClient(parse_url(request.getfixturevalue(request.param)))
    await client.open()
    yield client
    await client.close()


async def test_a_read_sees_what_was_written_on_every_partition(client: ValkeyClient) -> None:
    await asyncio.gather(*[client.call(tag, "SET", f"{tag}:key", number) for number, tag in enumerate(TAGS)])

    replies = await asyncio.gather(*[client.read(tag, "GET", f"{tag}:key") for tag in TAGS])

    assert replies == [str(number).encode() for number in range(len(TAGS))]


async def test_calls_to_one_node_are_executed_in_the_order_of_the_calls(client: ValkeyClient) -> None:
    tag = TAGS[0]
    calls = [client.call(tag, "APPEND", f"{tag}:log", f"{number},") for number in range(500)]
    last = client.node_for(tag).call("GET", f"{tag}:log")

    assert await last == b"".join(b"%d," % number for number in range(500))
    assert await calls[0] == 2


async def test_values_of_all_sizes_arrive_unchanged(client: ValkeyClient) -> None:
    values = [b"", b"\r\n$3\r\n", bytes(range(256)), b"x" * (5 << 20)]

    for number, value in enumerate(values):
        await client.call(TAGS[number], "SET", f"{TAGS[number]}:value", value)

    assert [await client.read(TAGS[number], "GET", f"{TAGS[number]}:value") for number in range(4)] == values


async def test_every_primary_answers_once(client: ValkeyClient) -> None:
    replies = await client.for_each_primary("PING")

    assert replies == [b"PONG"] * len(client.primaries())
    assert {client.node_for(tag) for tag in TAGS} == set(client.primaries())


async def test_a_missing_library_is_loaded_where_it_is_called(client: ValkeyClient) -> None:
    await client.for_each_primary("FUNCTION", "FLUSH", "SYNC")
    client.library = LIBRARY

    for tag in TAGS:
        with pytest.raises(ReplyError, match="FFNO a refusal"):
            await client.call(tag, "FCALL", "ff_test_refuse", 1, f"{tag}:key")


async def test_an_error_inside_a_function_is_reported_as_corruption(client: ValkeyClient) -> None:
    client.library = LIBRARY

    with pytest.raises(Corruption, match="broken"):
        await client.call(TAGS[0], "FCALL", "ff_test_break", 1, f"{TAGS[0]}:key")


async def test_messages_published_on_any_node_reach_a_subscription(client: ValkeyClient) -> None:
    received: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
    subscription = ChannelSubscription(
        "ff:0:wake", on_message=lambda *message: received.put_nowait(message), on_reconnect=lambda: None
    )
    client.subscribe(subscription)
    async with asyncio.timeout(10):
        await subscription.ready.wait()

        for tag in TAGS[:8]:
            await client.call(tag, "PUBLISH", "ff:0:wake", tag)
        heard = [await received.get() for _ in range(8)]

    assert sorted(heard) == sorted((b"ff:0:wake", tag.encode()) for tag in TAGS[:8])
