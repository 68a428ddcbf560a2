"""The Postgres store behind a pooler in transaction mode: each transaction may use another server process."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from urllib.parse import urlsplit, urlunsplit

import pytest

from flowfabric.bench.postgres import postgres_scratch_store
from flowfabric.clock import ManualClock
from flowfabric.connector import open_engine
from flowfabric.errors import InvalidInput, StoreFault, StoreUnavailable
from flowfabric.model.change import Delete, Guard, Insert, Patch, Upsert
from flowfabric.model.event import Topic
from flowfabric.model.execution import Attempt, Execution, Result
from flowfabric.rules.execution.lease import RENEWAL
from flowfabric.stores.claims import LeaseRef
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.queries import Read, Scan
from flowfabric.stores.verdicts import Unstorable
from tests.servers import postgres
from tests.stores.sample_rows import change, claim_request, event, execution, insert_queued, one, queued, write

Message = tuple[bytes, bytes]

# settings that such poolers accept in a startup message
KNOWN = {"user", "database", "client_encoding", "application_name"}
END = (b"X", b"")


class Peer:
    """A client or a server; its messages are read from a queue."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.said: asyncio.Queue[Message] = asyncio.Queue()
        self._hearing: asyncio.Task[None] | None = None

    def receive(self) -> None:
        self._hearing = asyncio.ensure_future(self._receive())

    async def _receive(self) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                kind, size = struct.unpack("!ci", await self.reader.readexactly(5))
                self.said.put_nowait((kind, await self.reader.readexactly(size - 4)))
        self.said.put_nowait(END)

    def send(self, kind: bytes, body: bytes) -> None:
        self.writer.write(kind + struct.pack("!i", len(body) + 4) + body)

    def close(self) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
        self.writer.close()


class Pooler:
    """A minimal pooler in transaction mode: clients share a few servers.

    A client keeps its server until the server reports that no transaction is open; the next client gets the server that
    was free for longest, so that a client rarely gets the same one twice in a row. Like some real poolers it treats a
    flush outside of a transaction as the end of one. With `sessions` a client keeps its server for good. Unknown
    settings are refused, or with `ignores` silently ignored. It may report another `version` of its servers.
    """

    def __init__(self, dsn: str, *, sessions: bool = False, ignores: bool = False, version: str | None = None) -> None:
        self._to = urlsplit(dsn)
        self._sessions = sessions
        self._ignores = ignores
        self._version = version
        self.is_full = False
        self._free: asyncio.Queue[Peer] = asyncio.Queue()
        self._peers: list[Peer] = []
        self._greeting: list[Message] = []
        self._turns: set[asyncio.Task[None]] = set()

    async def start(self, servers: int) -> str:
        """Listen and return the URL for clients."""
        for _ in range(servers):
            self._free.put_nowait(await self._connect())
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        place = f"{self._to.username}:{self._to.password}@127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return urlunsplit(self._to._replace(netloc=place))

    async def stop(self) -> None:
        self._listener.close()
        for turn in self._turns:
            turn.cancel()
        await asyncio.gather(*self._turns, return_exceptions=True)
        for peer in self._peers:
            peer.close()

    async def _connect(self) -> Peer:
        server = Peer(*await asyncio.open_connection(self._to.hostname, self._to.port))
        self._peers.append(server)
        startup = b"user\0%b\0database\0%b\0\0" % ((self._to.username or "").encode(), self._to.path[1:].encode())
        server.writer.write(struct.pack("!ii", len(startup) + 8, 196608) + startup)
        server.receive()
        self._greeting = []
        while (message := await server.said.get())[0] != b"Z":
            if message[0] == b"R" and message[1][:4] == b"\0\0\0\3":
                server.send(b"p", (self._to.password or "").encode() + b"\0")
            elif message[0] in b"SK":
                self._greeting.append(message)
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Peer(reader, writer)
        self._peers.append(client)
        turns = asyncio.ensure_future(self._serve_turns(client))
        self._turns.add(turns)
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            await turns
        client.close()

    async def _greet(self, client: Peer) -> bool:
        while True:
            (size,) = struct.unpack("!i", await client.reader.readexactly(4))
            startup = await client.reader.readexactly(size - 4)
            if startup[:4] == struct.pack("!i", 80877103):  # an encryption request
                client.writer.write(b"N")
                continue
            if startup[:4] == struct.pack("!i", 80877102):  # a cancel request
                return False
            names = {name.decode() for name in startup[4:].split(b"\0")[0::2] if name}
            text = "no more connections allowed (max_client_conn)" if self.is_full else None
            if (unknown := names - KNOWN) and not self._ignores:
                text = f"unsupported startup parameter: {min(unknown)}"
            if text is not None:
                client.send(b"E", b"SFATAL\0VFATAL\0C08P01\0M" + text.encode() + b"\0\0")
                return False
            client.send(b"R", b"\0\0\0\0")
            for message in self._greeting:
                client.send(*message)
            if self._version is not None:
                client.send(b"S", b"server_version\0%b\0" % self._version.encode())
            client.send(b"Z", b"I")
            return True

    async def _serve_turns(self, client: Peer) -> None:
        if not await self._greet(client):
            return
        client.receive()
        while (message := await client.said.get()) != END:
            server = await self._free.get()
            try:
                await self._run_turn(client, server, message)
            finally:
                self._free.put_nowait(server)

    async def _run_turn(self, client: Peer, server: Peer, message: Message) -> None:
        """Forward messages until the server is ready for another client."""
        unanswered, status, flushed = 0, b"I", False
        asked, answered = asyncio.ensure_future(_now(message)), asyncio.ensure_future(server.said.get())
        try:
            while True:
                await asyncio.wait({asked, answered}, return_when=asyncio.FIRST_COMPLETED)
                if asked.done():
                    if asked.result() == END:
                        return
                    # The server answers each sync and each query with "ready".
                    unanswered += asked.result()[0] in b"SQ"
                    flushed = asked.result()[0] == b"H"
                    server.send(*asked.result())
                    asked = asyncio.ensure_future(client.said.get())
                elif answered.done():
                    kind, body = answered.result()
                    client.send(kind, body)
                    if kind == b"Z":
                        unanswered, status = unanswered - 1, body
                        if not unanswered and status == b"I" and not self._sessions:
                            return
                    elif flushed and kind in b"Tn" and status == b"I" and not self._sessions:
                        server.send(b"S", b"")
                        while (await server.said.get())[0] != b"Z":
                            pass
                        return
                    answered = asyncio.ensure_future(server.said.get())
        finally:
            if asked.done() and asked.result() != END:
                client.said.put_nowait(asked.result())
            asked.cancel()
            answered.cancel()


async def _now(message: Message) -> Message:
    return message


@pytest.fixture
async def pooled(database: str) -> AsyncIterator[str]:
    """The URL of a pooler with two servers behind it."""
    pooler = Pooler(database)
    yield await pooler.start(2)
    await pooler.stop()


@pytest.fixture
async def pooled_ignoring_settings(database: str) -> AsyncIterator[str]:
    """The URL of a pooler that ignores unknown settings."""
    pooler = Pooler(database, ignores=True)
    yield await pooler.start(2)
    await pooler.stop()


@pytest.mark.parametrize("cache", [None, False])
async def test_every_store_operation_works_through_a_pooler(
    pooled: str, clock: ManualClock, cache: bool | None
) -> None:
    store = PostgresStore(pooled, clock, statement_cache=cache)
    await store.open(migrate=True)
    assert await store.ping() == clock.now
    await insert_queued(store, *(queued(name, rank) for rank, name in enumerate("abcd")))

    ((row, _), *_) = (await store.claim_rows(claim_request(3))).rows
    held = LeaseRef(row.execution_id, 0, row.attempt_id or "", row.lease_id or "", row.lease_epoch, 500)
    assert await store.renew([held], RENEWAL) == [clock.now + 500]
    ended = change(
        Patch(Execution, ("a",), {"priority": 5}),
        Upsert(Result("a", b"done")),
        Delete(Attempt, ("a",)),
        guards=[Guard(Execution, ("a",), row.revision)],
        events=[event("a", lease="released")],
    )
    assert await store.commit([ended]) == [clock.now]
    assert await store.commit([ended]) == [None]
    assert await one(store, Result, "a") == Result("a", b"done")
    clock.advance_ms(500)
    assert [late.execution_id for late in (await store.due(Execution, "lease_expires_at", limit=9)).rows] == ["a"]
    assert len(await store.scan(Scan(Execution))) == 4
    assert [line.lane_id for line in await store.queues()] == await store.lanes(None, 5) == ["mail"]
    events = [one.event.lease for one in (await store.feed(Topic.LEASE, 0, 10)).events]
    assert events == ["acquired", "acquired", "acquired", "renewed", "released"]
    assert len(await store.history("a", Topic.LEASE, 10)) == 3
    await store.close()


async def test_many_callers_share_few_servers(pooled: str, clock: ManualClock) -> None:
    stores = [PostgresStore(pooled, clock, statement_cache=False, pool_size=3) for _ in range(3)]
    await insert_queued(stores[0], *(queued(f"{rank:02}", rank) for rank in range(60)))

    async def drain(store: PostgresStore, worker: int) -> int:
        done = 0
        while rows := (await store.claim_rows(claim_request(5, prefix=f"{worker}-{done}-"))).rows:
            finishes = [
                change(
                    Patch(Execution, (row.execution_id,), {"priority": 5}),
                    guards=[Guard(Execution, (row.execution_id,), row.revision)],
                    events=[event(row.execution_id, lease="released")],
                )
                for row, _ in rows
            ]
            assert None not in await store.commit(finishes)
            done += len(rows)
        return done

    assert sum(await asyncio.gather(*(drain(store, n) for n, store in enumerate(stores * 2)))) == 60
    assert len((await stores[0].feed(Topic.LEASE, 0, 500)).events) == 120
    for store in stores:
        await store.close()


async def test_refusals_leave_the_servers_unchanged(pooled: str, clock: ManualClock) -> None:
    store = PostgresStore(pooled, clock, statement_cache=False)
    await write(store, Insert(execution("a")))

    for _ in range(5):
        batch = [change(Insert(execution("a"))), change(Insert(execution("b", tags="a\0b")))]
        assert [type(verdict) for verdict in await store.commit(batch)] == [type(None), Unstorable]
        assert await store.commit([change(Insert(execution("c")), Delete(Execution, ("c",)))]) == [clock.now]

    assert [len(rows) for rows in (await store.load([Read(Execution, ())])).rows] == [1]
    await store.close()


async def test_notifications_do_no_harm(pooled: str, clock: ManualClock) -> None:
    store = PostgresStore(pooled, clock, statement_cache=False)
    store.on_notify(lambda topics: None)
    for number in range(20):
        store.notify(frozenset({f"lane-{number}"}))
        assert await store.ping() == clock.now
    await store.close()


async def test_notifications_are_sent_through_a_pooler_and_no_session_is_left_listening(
    pooled: str, database: str
) -> None:
    store, direct, heard = PostgresStore(pooled), PostgresStore(database), asyncio.Event()
    direct.on_notify(lambda topics: heard.set())
    store.on_notify(lambda topics: None)
    async with asyncio.timeout(20):
        while not heard.is_set():
            store.notify(frozenset({"mail"}))
            await asyncio.wait([asyncio.ensure_future(heard.wait())], timeout=0.05)

    listening = "select count(*) from pg_listening_channels()"
    assert [await store._pool.read(lambda own: own.fetchval(listening)) for _ in range(4)] == [0] * 4
    await store.close()
    await direct.close()


async def test_stale_prepared_statements_are_distinguished_from_other_errors(pooled: str, clock: ManualClock) -> None:
    store = PostgresStore(pooled, clock, statement_cache=True)

    with pytest.raises(StoreUnavailable, match="statement_cache=off") as error:
        await insist(store)
    assert error.value.source is StoreFault.PROTOCOL
    assert "\n" not in error.value.detail
    await store.close()


async def insist(store: PostgresStore) -> None:
    for _ in range(20):
        await asyncio.gather(*(store.load([Read(Execution, (name,))]) for name in "abc"))


async def test_a_pooler_that_ignores_settings_is_detected(pooled_ignoring_settings: str, clock: ManualClock) -> None:
    store = PostgresStore(pooled_ignoring_settings, clock)

    await asyncio.gather(*(insist(store) for _ in range(3)))

    assert await store.commit([change(Insert(execution("a")))]) == [clock.now]
    await store.close()


async def test_statements_are_cached_without_a_pooler(database: str, clock: ManualClock) -> None:
    store = PostgresStore(database, clock, pool_size=1)
    await insist(store)

    kept = await store._pool.read(lambda own: own.fetchval("select count(*) from pg_prepared_statements"))

    assert kept > 1
    await store.close()


async def test_a_url_option_declares_an_undetectable_pooler(pooled: str, pooled_ignoring_settings: str) -> None:
    for said in ("", "?statement_cache=off", "?application_name=mine&statement_cache=off"):
        engine = await open_engine(pooled_ignoring_settings + said)
        assert await engine.list_lanes() is not None
        await engine.close()

    with pytest.raises(InvalidInput, match="statement_cache is on or off, not 'maybe'"):
        await open_engine(pooled + "?statement_cache=maybe")


async def test_a_pooler_without_a_free_connection_is_reported_and_retryable(database: str, clock: ManualClock) -> None:
    pooler = Pooler(database)
    store = PostgresStore(await pooler.start(2), clock)
    pooler.is_full = True
    with pytest.raises(StoreUnavailable, match="no more connections") as error:
        await store.ping()
    pooler.is_full = False

    assert (error.value.source, error.value.retryable) == (StoreFault.TRANSPORT, True)
    assert await store.ping() == clock.now
    await store.close()
    await pooler.stop()


async def test_a_benchmark_through_a_pooler_omits_the_bare_table(pooled: str) -> None:
    async with postgres_scratch_store(f"{pooled}?statement_cache=off") as place:
        assert place.control is None
        assert urlsplit(place.url).query == "statement_cache=off"


async def test_a_server_that_is_too_old_is_refused(database: str) -> None:
    pooler = Pooler(database, version="12.4 (Debian 12.4-1)")
    dsn = await pooler.start(1)

    with pytest.raises(InvalidInput, match="PostgreSQL 12; the store needs 13 or newer"):
        await open_engine(dsn)
    await pooler.stop()


@pytest.mark.parametrize("cache", [True, False])
async def test_transactions_read_committed_rows_whatever_the_default_isolation(database: str, cache: bool) -> None:
    name = urlsplit(database).path[1:]
    postgres().execute(f'alter database "{name}" set default_transaction_isolation = serializable')
    store = PostgresStore(database, statement_cache=cache)
    try:
        found = await store._pool.read(lambda own: own.fetchval("show transaction_isolation"))
    finally:
        await store.close()
        postgres().execute(f'alter database "{name}" reset default_transaction_isolation')

    assert found == "read committed"


async def test_a_pooler_that_refuses_settings_is_used_without_them(database: str, clock: ManualClock) -> None:
    pooler = Pooler(database, sessions=True)
    store = PostgresStore(await pooler.start(3), clock, pool_size=2)

    assert await asyncio.gather(*(store.ping() for _ in range(4))) == [clock.now] * 4

    await store.close()
    await pooler.stop()
