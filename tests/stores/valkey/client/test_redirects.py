"""Routing in a cluster of fake nodes: redirects, slots that nobody serves, nodes that vanish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.settings import Deadlines
from flowfabric.stores.valkey import ChannelSubscription, ValkeyClient, parse_url, session
from flowfabric.stores.valkey import cluster as cluster_module
from flowfabric.stores.valkey.slots import slot_of
from tests.stores.unavailable import unavailable
from tests.stores.valkey.client.fake_peer import FakeServer, Peer, fake_server, slot_map, until

DEADLINES = Deadlines(connect_s=0.5, command_s=0.6)
TAG = "{fp:1}"
SLOT = slot_of(TAG)

Respond = Callable[["FakeCluster", int, list[bytes], Peer], bytes | None]


class FakeCluster:
    """Fake nodes; the first one serves all slots until the test says otherwise."""

    def __init__(self) -> None:
        self.nodes: list[FakeServer] = []
        self.owner: int | None = 0
        self.knows_slots = True  # else it does not answer the question for the slot map
        self.client: ValkeyClient

    def slots(self) -> bytes | None:
        if not self.knows_slots:
            return None
        return b"*0\r\n" if self.owner is None else slot_map((0, 16383, self.nodes[self.owner].port))

    def moved(self, target: int, code: str = "MOVED") -> bytes:
        return f"-{code} {SLOT} 127.0.0.1:{self.nodes[target].port}\r\n".encode()

    def received(self, node: int) -> list[bytes]:
        """Return the names of the commands that a node got, without the client's own questions."""
        return [command[0] for command in self.nodes[node].commands if command[0] not in (b"HELLO", b"CLUSTER")]


@asynccontextmanager
async def cluster(respond: Respond, number: int = 2) -> AsyncIterator[FakeCluster]:
    fake = FakeCluster()

    def answer(node: int) -> Callable[[list[bytes], Peer], bytes | None]:
        def answer_one(command: list[bytes], peer: Peer) -> bytes | None:
            return fake.slots() if command[0] == b"CLUSTER" else respond(fake, node, command, peer)

        return answer_one

    async with AsyncExitStack() as stack:
        for index in range(number):
            fake.nodes.append(await stack.enter_async_context(fake_server(answer(index))))
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in fake.nodes)
        fake.client = ValkeyClient(parse_url(f"valkey+cluster://{hosts}"), DEADLINES)
        stack.push_async_callback(fake.client.close)
        await fake.client.open()
        yield fake


async def test_a_moved_slot_is_followed_and_remembered() -> None:
    def respond(fake: FakeCluster, node: int, command: list[bytes], peer: Peer) -> bytes:
        return fake.moved(1) if node == 0 else b":1\r\n"

    async with cluster(respond) as fake:
        fake.knows_slots = False
        assert await fake.client.call(TAG, "INCR", TAG) == 1
        assert await fake.client.call(TAG, "INCR", TAG) == 1

        assert fake.received(0) == [b"INCR"]
        assert fake.received(1) == [b"INCR", b"INCR"]


async def test_a_slot_that_moves_in_the_middle_of_a_pipeline_loses_no_command_and_repeats_none() -> None:
    def respond(fake: FakeCluster, node: int, command: list[bytes], peer: Peer) -> bytes:
        if node == 0 and len(fake.received(0)) > 40:
            fake.owner = 1
            return fake.moved(1)
        executed.append(command[2])
        return b":%d\r\n" % len(executed)

    executed: list[bytes] = []
    async with cluster(respond) as fake:
        calls = [fake.client.call(TAG, "APPEND", TAG, number) for number in range(100)]
        await asyncio.gather(*calls)

        assert executed == [b"%d" % number for number in range(100)]


async def test_an_ask_is_followed_once_with_asking_in_front_and_not_remembered() -> None:
    def respond(fake: FakeCluster, node: int, command: list[bytes], peer: Peer) -> bytes:
        if command[0] == b"ASKING":
            return b"+OK\r\n"
        return fake.moved(1, "ASK") if node == 0 else b":1\r\n"

    async with cluster(respond) as fake:
        assert [await fake.client.call(TAG, "INCR", TAG) for _ in range(2)] == [1, 1]

        assert fake.received(0) == [b"INCR", b"INCR"]
        assert fake.received(1) == [b"ASKING", b"INCR"] * 2


async def test_two_nodes_that_redirect_to_each_other_fail_the_call_at_its_deadline_not_in_doubt() -> None:
    async with cluster(lambda fake, node, command, peer: fake.moved(1 - node)) as fake:
        began = asyncio.get_running_loop().time()
        with unavailable("MOVED", in_doubt=False, source=StoreFault.CLUSTER):
            await fake.client.call(TAG, "INCR", TAG)

        assert asyncio.get_running_loop().time() - began < 3 * DEADLINES.command_s
        assert len(fake.received(0)) + len(fake.received(1)) < 50  # with a backoff


async def test_a_redirect_without_a_host_means_the_host_that_answered() -> None:
    def respond(fake: FakeCluster, node: int, command: list[bytes], peer: Peer) -> bytes:
        return b"-MOVED %d :%d\r\n" % (SLOT, fake.nodes[1].port) if node == 0 else b":1\r\n"

    async with cluster(respond) as fake:
        assert await fake.client.call(TAG, "INCR", TAG) == 1


async def test_a_call_for_a_slot_without_a_node_waits_until_one_serves_it() -> None:
    async with cluster(lambda fake, node, command, peer: b":1\r\n") as fake:
        fake.client._use_slots([None] * 16384)
        fake.owner = None
        call = fake.client.call(TAG, "INCR", TAG)
        asked = len(fake.nodes[0].named(b"CLUSTER"))
        await until(lambda: len(fake.nodes[0].named(b"CLUSTER")) > asked)
        fake.owner = 1

        assert await call == 1


async def test_a_call_for_a_slot_without_a_node_fails_at_its_deadline_with_a_known_outcome() -> None:
    async with cluster(lambda fake, node, command, peer: b":1\r\n") as fake:
        fake.client._use_slots([None] * 16384)
        fake.owner = None
        with pytest.raises(StoreUnavailable, match="no node serves slot"):
            fake.client.node_for(TAG)
        with unavailable("no node serves slot", in_doubt=False):
            await fake.client.call(TAG, "INCR", TAG)


async def test_calls_that_wait_for_the_slot_map_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "MAX_WAITING_BYTES", 10_000)
    async with cluster(lambda fake, node, command, peer: b":1\r\n") as fake:
        fake.client._use_slots([None] * 16384)
        fake.owner = None
        calls = [fake.client.call(TAG, "APPEND", TAG, b"x" * 4000) for _ in range(4)]
        with unavailable("bytes of commands wait for the slot map", in_doubt=False):
            await calls[2]
        fake.owner = 1

        replies = await asyncio.gather(*calls, return_exceptions=True)
        assert replies[:2] == [1, 1]
        assert isinstance(replies[3], StoreUnavailable)


async def test_calls_to_a_dead_node_go_to_its_successor_in_their_order() -> None:
    def respond(fake: FakeCluster, node: int, command: list[bytes], peer: Peer) -> bytes:
        executed.append((node, command[2]))
        return b":1\r\n"

    executed: list[tuple[int, bytes]] = []
    async with AsyncExitStack() as stack:
        fake = await stack.enter_async_context(cluster(respond))
        first = await stack.enter_async_context(fake_server(lambda command, peer: b"+OK\r\n"))
        gone = fake.nodes[0]
        fake.nodes[0] = first
        fake.client._use_slots([fake.client._node(("127.0.0.1", first.port))] * 16384)
        fake.owner = 0
        await fake.client.call(TAG, "INCR", TAG)
        fake.nodes[0] = gone
        first.close_connections()
        first.stop_listening()
        await until(lambda: fake.client.node_for(TAG).writes._session is None)
        calls = [fake.client.call(TAG, "APPEND", TAG, number) for number in range(20)]
        await asyncio.sleep(0)
        fake.owner = 1
        await asyncio.gather(*calls)

        assert executed == [(1, b"%d" % number) for number in range(20)]


async def test_a_slow_node_that_has_lost_its_slots_is_left_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "SLOW_S", 0.05)

    def respond(fake: FakeCluster, node: int, command: list[bytes], peer: Peer) -> bytes | None:
        return None if node == 0 else b":1\r\n"

    async with cluster(respond) as fake:
        fake.client.deadlines = Deadlines(connect_s=0.5, command_s=30)
        sent = fake.client.call(TAG, "INCR", TAG)
        await until(lambda: bool(fake.received(0)))
        fake.owner = 1

        async with asyncio.timeout(5):
            with unavailable(in_doubt=True):
                await sent
            assert await fake.client.call(TAG, "INCR", TAG) == 1


async def test_a_cluster_without_a_reachable_node_fails_at_open_not_in_doubt() -> None:
    async with fake_server(lambda command, peer: None) as one, fake_server(lambda command, peer: None) as other:
        url = f"valkey+cluster://127.0.0.1:{one.port},127.0.0.1:{other.port}"
        client = ValkeyClient(parse_url(url), Deadlines(connect_s=0.1, command_s=0.1))
        with unavailable(in_doubt=False):
            await client.open()

        assert (one.named(b"CLUSTER"), other.named(b"CLUSTER")) == ([[b"CLUSTER", b"SLOTS"]], [[b"CLUSTER", b"SLOTS"]])
        await client.close()


async def test_a_server_in_a_cluster_without_cluster_in_the_url_is_refused_with_the_fix() -> None:
    def answer(command: list[bytes], peer: Peer) -> bytes:
        return b"+PONG\r\n" if command == [b"PING"] else b"-MOVED 3999 127.0.0.1:6381\r\n"

    async with fake_server(answer) as server:
        client = ValkeyClient(parse_url(server.url), DEADLINES)
        await client.open()
        with pytest.raises(StoreUnavailable, match=r"write valkey\+cluster://"):
            await client.call(TAG, "INCR", TAG)
        await client.close()


async def test_a_subscription_reconnects_and_reports_it_once_it_hears_again() -> None:
    def respond(fake: FakeCluster, node: int, command: list[bytes], peer: Peer) -> bytes:
        assert command[0] == b"SUBSCRIBE"
        peers.append((node, peer))
        return b"*3\r\n$9\r\nsubscribe\r\n$4\r\nwake\r\n:1\r\n"

    peers: list[tuple[int, Peer]] = []
    heard: list[tuple[bytes, bytes]] = []
    reconnects: list[int] = []
    async with cluster(respond) as fake:
        subscription = ChannelSubscription(
            "wake",
            on_message=lambda channel, payload: heard.append((channel, payload)),
            on_reconnect=lambda: reconnects.append(len(peers)),
        )
        fake.client.subscribe(subscription)
        await until(lambda: len(peers) == 1 and subscription.ready.is_set())
        assert not reconnects
        peers[0][1].end()
        await until(lambda: reconnects == [2])
        peers[1][1].send(b"*3\r\n$7\r\nmessage\r\n$4\r\nwake\r\n$5\r\nhello\r\n")
        await until(lambda: heard == [(b"wake", b"hello")])


async def test_a_subscription_that_hears_nothing_checks_its_connection_and_leaves_a_silent_node() -> None:
    def respond(fake: FakeCluster, node: int, command: list[bytes], peer: Peer) -> bytes | None:
        names.append(command[0])
        return b"*3\r\n$9\r\nsubscribe\r\n$4\r\nwake\r\n:1\r\n" if command[0] == b"SUBSCRIBE" else None

    names: list[bytes] = []
    reconnects: list[None] = []
    async with cluster(respond) as fake:
        fake.client.subscribe(
            ChannelSubscription("wake", on_message=lambda *message: None, on_reconnect=lambda: reconnects.append(None))
        )
        await until(lambda: bool(reconnects))
        assert names[:3] == [b"SUBSCRIBE", b"PING", b"SUBSCRIBE"]


async def test_a_subscription_leaves_a_node_that_is_not_in_the_cluster_any_more() -> None:
    def respond(fake: FakeCluster, node: int, command: list[bytes], peer: Peer) -> bytes:
        nodes.append(node)
        return b"*3\r\n$9\r\nsubscribe\r\n$4\r\nwake\r\n:1\r\n"

    nodes: list[int] = []
    async with cluster(respond) as fake:
        subscription = ChannelSubscription("wake", on_message=lambda *message: None, on_reconnect=lambda: None)
        fake.client.subscribe(subscription)
        await until(subscription.ready.is_set)
        fake.owner = 1
        fake.client.refresh_soon()
        await until(lambda: nodes == [0, 1])


async def test_a_library_that_is_missing_on_one_node_is_loaded_once_for_many_calls() -> None:
    def respond(fake: FakeCluster, node: int, command: list[bytes], peer: Peer) -> bytes:
        if command[0] == b"FUNCTION":
            loaded.append(command[-1])
            return b"$2\r\nff\r\n"
        return b":1\r\n" if loaded else b"-ERR Function not found\r\n"

    loaded: list[bytes] = []
    async with cluster(respond) as fake:
        fake.client.library = "#!lua name=ff"
        calls = [fake.client.call(TAG, "FCALL", "f", 1, TAG) for _ in range(50)]
        reads = [fake.client.read(TAG, "FCALL_RO", "f", 1, TAG) for _ in range(50)]

        assert await asyncio.gather(*calls, *reads) == [1] * 100
        assert loaded == [b"#!lua name=ff"]


async def test_a_library_that_cannot_be_loaded_fails_the_call_not_in_doubt() -> None:
    def respond(fake: FakeCluster, node: int, command: list[bytes], peer: Peer) -> bytes:
        return b"-ERR Error compiling function\r\n" if command[0] == b"FUNCTION" else b"-ERR Function not found\r\n"

    async with cluster(respond) as fake:
        fake.client.library = "#!lua name=ff"
        with unavailable("Error compiling", in_doubt=False, source=StoreFault.SCRIPT_NOT_LOADED):
            await fake.client.call(TAG, "FCALL", "f", 1, TAG)
