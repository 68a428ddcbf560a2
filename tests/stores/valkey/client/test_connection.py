"""What a connection does when its server misbehaves: a fake server does what a real one cannot be made to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from flowfabric.errors import Corruption, StoreFault, StoreUnavailable
from flowfabric.settings import Deadlines
from flowfabric.stores.valkey import ValkeyClient, connection, parse_url, session
from tests.stores.unavailable import unavailable
from tests.stores.valkey.client.fake_peer import Answer, FakeServer, Peer, fake_server, until

DEADLINES = Deadlines(connect_s=0.5, command_s=0.4)


@asynccontextmanager
async def connected(answer: Answer, options: str = "") -> AsyncIterator[tuple[FakeServer, ValkeyClient]]:
    """Run a fake server that answers PING, and a client of it."""

    def answer_all(command: list[bytes], peer: Peer) -> bytes | None:
        return b"+PONG\r\n" if command == [b"PING"] else answer(command, peer)

    async with fake_server(answer_all) as server:
        client = ValkeyClient(parse_url(server.url + options), DEADLINES)
        try:
            await client.open()
            yield server, client
        finally:
            await client.close()


def close_without_reply(command: list[bytes], peer: Peer) -> bytes:
    peer.end()
    return b""


def close_within_reply(command: list[bytes], peer: Peer) -> bytes:
    peer.send(b"$10\r\nhalf")
    peer.end()
    return b""


def keep_silent(command: list[bytes], peer: Peer) -> None:
    return None


def stop_within_reply(command: list[bytes], peer: Peer) -> bytes:
    return b"$10\r\nhalf"


def send_nonsense(command: list[bytes], peer: Peer) -> bytes:
    return b"HTTP/1.1 400 Bad Request\r\n"


@pytest.mark.parametrize(
    ("answer", "source"),
    [
        (close_without_reply, StoreFault.TRANSPORT),
        (close_within_reply, StoreFault.TRANSPORT),
        (keep_silent, StoreFault.TIMEOUT),
        (stop_within_reply, StoreFault.TIMEOUT),
        (send_nonsense, StoreFault.PROTOCOL),
    ],
)
async def test_a_write_without_a_whole_reply_is_in_doubt_and_never_sent_twice(
    answer: Callable[[list[bytes], Peer], bytes | None], source: StoreFault
) -> None:
    async with connected(answer) as (server, client):
        began = asyncio.get_running_loop().time()
        with pytest.raises(StoreUnavailable) as caught:
            await client.call("{fp:1}", "INCR", "{fp:1}:key")
        took_s = asyncio.get_running_loop().time() - began

        assert (caught.value.in_doubt, caught.value.source, caught.value.backend) == (True, source, "Valkey")
        assert took_s < 2 * DEADLINES.command_s
        assert len(server.named(b"INCR")) == 1


async def test_replies_that_arrive_byte_by_byte_reach_their_callers_in_order() -> None:
    async def trickle(reply: bytes, peer: Peer) -> None:
        for position in range(len(reply)):
            peer.send(reply[position : position + 1])
            await asyncio.sleep(0)

    replies: list[bytes] = []
    tasks: list[asyncio.Task[None]] = []

    def answer(command: list[bytes], peer: Peer) -> None:
        replies.append(b"*2\r\n$%d\r\n%s\r\n:7\r\n" % (len(command[1]), command[1]))
        if len(replies) == 3:
            tasks.append(asyncio.create_task(trickle(b"".join(replies), peer)))

    async with connected(answer) as (_, client):
        assert await asyncio.gather(*[client.call("a", "ECHO", text) for text in ("one", "two", "three")]) == [
            [b"one", 7],
            [b"two", 7],
            [b"three", 7],
        ]


async def test_a_read_whose_reply_was_lost_is_sent_again_on_a_new_connection() -> None:
    def answer(command: list[bytes], peer: Peer) -> bytes | None:
        if len(server.named(b"GET")) == 1:
            return close_within_reply(command, peer)
        return b"$5\r\nvalue\r\n"

    async with connected(answer) as (server, client):
        assert await client.read("a", "GET", "a") == b"value"
        assert len(server.named(b"GET")) == 2


async def test_a_read_that_is_never_answered_fails_in_the_end_and_is_not_in_doubt() -> None:
    async with connected(close_without_reply) as (server, client):
        with unavailable(in_doubt=False):
            await client.read("a", "GET", "a")

        assert len(server.named(b"GET")) < 10


async def test_calls_of_one_turn_of_the_loop_leave_in_one_write() -> None:
    async with connected(lambda command, peer: b"+OK\r\n") as (server, client):
        await client.call("a", "DEL", "a")
        current = client.node_for("a").writes._session
        assert current is not None
        assert current._transport is not None
        writes: list[bytes] = []
        write = current._transport.write

        def counted(data: bytes) -> None:
            writes.append(data)
            write(data)

        current._transport.write = counted  # type: ignore[method-assign,assignment]

        await asyncio.gather(*[client.call("a", "SET", "a", number) for number in range(100)])

        assert len(writes) == 1
        assert [command[2] for command in server.named(b"SET")] == [b"%d" % number for number in range(100)]


async def test_the_first_call_on_a_lost_connection_connects_again() -> None:
    async with connected(lambda command, peer: b"+OK\r\n") as (server, client):
        await client.call("a", "SET", "a", 1)
        before = server.connections
        server.close_connections()
        await until(lambda: client.node_for("a").writes._session is None)

        assert await client.call("a", "SET", "a", 2) == b"OK"
        assert server.connections == before + 1


async def test_a_refused_connection_fails_its_calls_at_once_and_they_are_not_in_doubt() -> None:
    async with fake_server(keep_silent) as server:
        url = server.url
    client = ValkeyClient(parse_url(url), DEADLINES)

    with unavailable("connection refused", in_doubt=False, source=StoreFault.TRANSPORT):
        await client.open()

    await client.close()


async def test_a_peer_that_does_not_greet_is_given_up_after_the_connect_timeout() -> None:
    async def accept_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    silent = await asyncio.start_server(accept_only, "127.0.0.1", 0)
    client = ValkeyClient(parse_url(f"valkey://127.0.0.1:{silent.sockets[0].getsockname()[1]}"), DEADLINES)
    with unavailable("no connection within 0.5 s", in_doubt=False, source=StoreFault.TIMEOUT):
        await client.open()

    await client.close()
    silent.close()


async def test_commands_that_wait_for_a_connection_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_WAITING_BYTES", 10_000)
    async with connected(lambda command, peer: b"+OK\r\n") as (server, client):
        await client.call("a", "SET", "a", 0)
        server.close_connections()
        await until(lambda: client.node_for("a").writes._session is None)
        server.commands.clear()
        sent = [client.call("a", "SET", "a", b"x" * 4000) for _ in range(4)]
        replies = await asyncio.gather(*sent, return_exceptions=True)

        assert replies[:2] == [b"OK", b"OK"]
        for refused in replies[2:]:
            assert isinstance(refused, StoreUnavailable)
            assert not refused.in_doubt
        assert len(server.named(b"SET")) == 2


async def test_commands_beyond_the_write_buffer_of_a_silent_peer_are_not_in_doubt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "MAX_WRITE_BYTES", 100_000)
    async with connected(lambda command, peer: peer.stop_reading()) as (_, client):
        calls = [client.call("a", "SET", "a", b"x" * 60_000) for _ in range(500)]
        replies = await asyncio.gather(*calls, return_exceptions=True)

        in_doubt = [reply.in_doubt for reply in replies if isinstance(reply, StoreUnavailable)]
        assert len(in_doubt) == 500
        assert in_doubt == sorted(in_doubt, reverse=True)  # first what was sent
        assert in_doubt[0]
        assert not in_doubt[-1]


async def test_a_call_whose_caller_has_left_does_not_disturb_the_others() -> None:
    async with connected(lambda command, peer: b":%d\r\n" % int(command[1])) as (_, client):
        calls = [client.call("a", "ECHO", number) for number in range(3)]
        calls[1].cancel()

        assert (await calls[0], await calls[2]) == (0, 2)


async def test_closing_ends_calls_without_a_reply() -> None:
    async with connected(keep_silent) as (server, client):
        call = client.call("a", "SET", "a", 1)
        await until(lambda: bool(server.named(b"SET")))
        await client.close()

        with unavailable(in_doubt=True):
            await call
        with pytest.raises(StoreUnavailable, match="closed"):
            await client.call("a", "SET", "a", 1)


@pytest.mark.parametrize("code", ["LOADING", "BUSY", "TRYAGAIN", "CLUSTERDOWN", "NOREPLICAS", "READONLY", "MASTERDOWN"])
async def test_a_command_that_was_not_executed_is_sent_again_until_it_is(code: str) -> None:
    def answer(command: list[bytes], peer: Peer) -> bytes:
        return b":1\r\n" if len(server.named(b"INCR")) == 3 else f"-{code} not now\r\n".encode()

    async with connected(answer) as (server, client):
        assert await client.call("a", "INCR", "a") == 1
        assert len(server.named(b"INCR")) == 3


@pytest.mark.parametrize("code", ["LOADING", "READONLY", "NOREPLICAS"])
async def test_a_command_that_is_refused_until_its_deadline_is_not_in_doubt(code: str) -> None:
    async with connected(lambda command, peer: f"-{code} not now\r\n".encode()) as (_, client):
        with pytest.raises(StoreUnavailable, match=code) as caught:
            await client.call("a", "INCR", "a")

        assert not caught.value.in_doubt
        assert caught.value.source.is_transient


@pytest.mark.parametrize(
    ("reply", "source"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", StoreFault.TRANSPORT),
        ("MISCONF Errors writing to the AOF file", StoreFault.TRANSPORT),
        ("NOAUTH Authentication required.", StoreFault.AUTH),
        ("NOPERM No permissions to run the 'fcall' command", StoreFault.AUTH),
        ("ERR Function not found", StoreFault.SCRIPT_NOT_LOADED),
    ],
)
async def test_a_refusal_is_reported_at_once_and_is_not_in_doubt(reply: str, source: StoreFault) -> None:
    async with connected(lambda command, peer: f"-{reply}\r\n".encode()) as (server, client):
        with unavailable(in_doubt=False, source=source):
            await client.call("a", "FCALL", "f", 1, "a")

        assert len(server.named(b"FCALL")) == 1


@pytest.mark.parametrize(
    "reply",
    [
        "ERR user_function:3: attempt to index a nil value script: f, on @user_function:3.",
        "OOM command not allowed when used memory > 'maxmemory'. script: f, on @user_function:3.",
        "WRONGTYPE Operation against a key holding the wrong kind of value",
    ],
)
async def test_an_error_from_within_a_function_is_corruption_and_is_not_repeated(reply: str) -> None:
    async with connected(lambda command, peer: f"-{reply}\r\n".encode()) as (server, client):
        with pytest.raises(Corruption):
            await client.call("a", "FCALL", "f", 1, "a")

        assert len(server.named(b"FCALL")) == 1


async def test_a_read_only_server_is_left_for_the_one_that_its_name_means_now() -> None:
    def answer(command: list[bytes], peer: Peer) -> bytes:
        return b":1\r\n" if server.connections > 2 else b"-READONLY You can't write against a read only replica.\r\n"

    async with connected(answer) as (server, client):
        assert await client.call("a", "INCR", "a") == 1
        assert server.connections == 3  # one for reads, and two for writes


async def test_replies_are_held_until_enough_replicas_have_the_batch() -> None:
    waits: list[Peer] = []

    def answer(command: list[bytes], peer: Peer) -> bytes | None:
        if command[0] != b"WAIT":
            return b"+OK\r\n"
        waits.append(peer)
        return None

    async with connected(answer, "?wait=1") as (_, client):
        calls = [client.call("a", "SET", "a", number) for number in range(3)]
        done, _ = await asyncio.wait(calls, timeout=0.1)
        assert not done

        (waiting,) = waits
        waiting.send(b":2\r\n")
        assert await asyncio.gather(*calls) == [b"OK"] * 3


@pytest.mark.parametrize("reply", [b":0\r\n", b"-UNBLOCKED force unblock from blocking operation\r\n"])
async def test_a_batch_with_too_few_copies_is_in_doubt_though_the_server_executed_it(reply: bytes) -> None:
    def answer(command: list[bytes], peer: Peer) -> bytes:
        return reply if command[0] == b"WAIT" else b"+OK\r\n"

    async with connected(answer, "?wait=1") as (_, client):
        outcomes = await asyncio.gather(*[client.call("a", "SET", "a", n) for n in range(3)], return_exceptions=True)

        for outcome in outcomes:
            assert isinstance(outcome, StoreUnavailable)
            assert outcome.in_doubt


async def test_a_command_that_was_refused_in_a_short_batch_is_not_in_doubt() -> None:
    def answer(command: list[bytes], peer: Peer) -> bytes:
        return b":0\r\n" if command[0] == b"WAIT" else b"-OOM command not allowed\r\n"

    async with connected(answer, "?wait=1") as (_, client):
        with unavailable("OOM", in_doubt=False):
            await client.call("a", "SET", "a", 1)


async def test_a_connection_lost_before_the_confirmation_leaves_the_batch_in_doubt() -> None:
    def answer(command: list[bytes], peer: Peer) -> bytes | None:
        return close_without_reply(command, peer) if command[0] == b"WAIT" else b"+OK\r\n"

    async with connected(answer, "?wait=1") as (_, client):
        with unavailable(in_doubt=True):
            await client.call("a", "SET", "a", 1)


async def test_with_fsync_a_batch_is_confirmed_by_the_disk() -> None:
    def answer(command: list[bytes], peer: Peer) -> bytes:
        if command[0] != b"WAITAOF":
            return b"+OK\r\n"
        return b"*2\r\n:1\r\n:0\r\n" if len(server.named(b"WAITAOF")) == 1 else b"*2\r\n:0\r\n:0\r\n"

    async with connected(answer, "?durability=fsync") as (server, client):
        assert await client.call("a", "SET", "a", 1) == b"OK"
        with unavailable(in_doubt=True):
            await client.call("a", "SET", "a", 2)


async def test_a_read_after_a_write_in_doubt_waits_for_a_confirmed_write_to_its_slot() -> None:
    def answer(command: list[bytes], peer: Peer) -> bytes:
        return b":%d\r\n" % copies if command[0] == b"WAIT" else b"+OK\r\n"

    copies = 0
    async with connected(answer, "?wait=1") as (server, client):
        with pytest.raises(StoreUnavailable):
            await client.call("{fp:1}", "SET", "{fp:1}:a", 1)
        with unavailable("an earlier write is not confirmed yet", in_doubt=False):
            await client.read("{fp:1}", "GET", "{fp:1}:a")
        assert not server.named(b"GET")

        copies = 1
        assert await asyncio.gather(*[client.read("{fp:1}", "GET", "{fp:1}:a") for _ in range(3)]) == [b"OK"] * 3
        barriers = [command for command in server.named(b"SET") if command[1] == b"{fp:1}:barrier"]
        assert len(barriers) == 2  # the refused one, and one for three reads
        await client.read("{fp:1}", "GET", "{fp:1}:a")
        assert len(server.named(b"SET")) == 3


async def test_a_timeout_that_is_lowered_later_holds_for_open_connections() -> None:
    async with connected(keep_silent) as (_, client):
        client.deadlines = Deadlines(connect_s=0.5, command_s=0.05)
        with pytest.raises(StoreUnavailable, match="no reply within 0.05 s"):
            await client.call("a", "SET", "a", 1)
