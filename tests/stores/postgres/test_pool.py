"""Connections of the Postgres store: what a caller receives when one breaks, and that the store recovers."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from flowfabric import connect
from flowfabric.clock import ManualClock
from flowfabric.errors import InvalidInput, StoreFault, StoreUnavailable
from flowfabric.model.change import Guard, Insert, Patch
from flowfabric.model.event import Topic
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.claims import ClaimedRows, ClaimRequest
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.postgres.commit.plan import CommitPlan
from flowfabric.stores.queries import Read
from flowfabric.stores.verdicts import Unstorable, Verdict
from tests.conftest import Rival, migrate
from tests.executions import new_execution
from tests.servers import PostgresServer, leave, postgres
from tests.stores.sample_rows import (
    MAIL,
    change,
    claim_request,
    event,
    execution,
    insert_queued,
    one,
    payload,
    queued,
    write,
)

OURS = "select pid from pg_stat_activity where application_name = 'flowfabric' and datname = current_database()"
NOBODY = "postgresql://postgres@127.0.0.1:{}/none"


def unknown_outcome(error: pytest.ExceptionInfo[StoreUnavailable]) -> object:
    return error.value.facts["in_doubt"]


async def until_it_answers(store: PostgresStore) -> None:
    """Retry until the store answers; check that each refusal is retryable."""
    refusals: list[StoreUnavailable] = []
    async with asyncio.timeout(20):
        while True:
            try:
                await store.ping()
                break
            except StoreUnavailable as error:
                refusals.append(error)
    assert all(error.retryable for error in refusals)


async def claim_in_two_reads(store: PostgresStore, rival: Rival) -> tuple[ClaimRequest, asyncio.Task[ClaimedRows]]:
    """Start a claim that has claimed one row and is blocked while it reads another one."""
    await insert_queued(store, *(queued(f"{rank:02}", rank) for rank in range(10)))
    await rival.begin(
        "select 1 from ff_exec_core where rank between 1 and 5 for update",
        "insert into ff_batch (batch_id, at, events) select nextval('ff_batch_batch_id_seq') + 2, 0, '{}'",
    )  # It reads this many rows first; an emit after the next row has to wait.
    request = claim_request(2, MAIL, QueueKey("other"))
    await write(store, Insert(execution("elsewhere", line=QueueKey("other"), rank=99)))
    return request, asyncio.create_task(store.claim_rows(request))


class TestAConnectionThatIsKilled:
    async def test_after_the_commit_was_sent_leaves_an_unknown_outcome(self, pg: PostgresStore, rival: Rival) -> None:
        revision = await write(pg, Insert(execution("a")))
        await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for update")
        patch = change(Patch(Execution, ("a",), {"priority": 5}), guards=[Guard(Execution, ("a",), revision)])
        commit = asyncio.create_task(pg.commit([patch]))
        (pid,) = await rival.blocks()

        await rival.fetch("select pg_terminate_backend($1)", pid)

        with pytest.raises(StoreUnavailable) as error:
            await commit
        assert unknown_outcome(error) is True
        assert error.value.retryable
        await rival.end("rollback")
        assert (await one(pg, Execution, "a")).revision == revision  # A reload shows the outcome.

    async def test_while_idle_is_replaced_silently(self, pg: PostgresStore, rival: Rival, clock: ManualClock) -> None:
        await asyncio.gather(*(pg.ping() for _ in range(5)))

        idle = list(pg._pool._idle)
        await rival.fetch(f"select pg_terminate_backend(pid) from ({OURS}) ours")
        while not all(connection.is_closed() for connection in idle):  # until this process has noticed
            await rival.fetch("select pg_sleep(0.001)")

        assert await pg.commit([change(Insert(execution("a")))]) == [clock.now]

    async def test_during_a_read_is_replaced_and_the_read_repeated(self, pg: PostgresStore, rival: Rival) -> None:
        await write(pg, Insert(execution("a")))
        await rival.begin("lock table ff_exec_core in access exclusive mode")
        load = asyncio.create_task(pg.load([Read(Execution, ("a",))]))
        (pid,) = await rival.blocks()

        await rival.fetch("select pg_terminate_backend($1)", pid)
        await rival.blocks()
        await rival.end("rollback")

        assert [row.execution_id for row in (await load).rows[0]] == ["a"]

    async def test_during_a_claim_leaves_an_unknown_outcome(self, pg: PostgresStore, rival: Rival) -> None:
        await insert_queued(pg, queued("a"))
        await rival.begin("lock table ff_batch in exclusive mode")
        request = asyncio.create_task(pg.claim_rows(claim_request(1)))
        (pid,) = await rival.blocks()

        await rival.fetch("select pg_terminate_backend($1)", pid)

        with pytest.raises(StoreUnavailable) as error:
            await request
        assert unknown_outcome(error) is True
        await rival.end("rollback")
        assert len((await pg.claim_rows(claim_request(1, prefix="again-"))).rows) == 1

    async def test_during_the_second_read_of_a_claim_leaves_an_unknown_outcome(
        self, pg: PostgresStore, rival: Rival
    ) -> None:
        request, looking = await claim_in_two_reads(pg, rival)
        (pid,) = await rival.blocks()

        await rival.fetch("select pg_terminate_backend($1)", pid)

        with pytest.raises(StoreUnavailable) as error:  # Otherwise lease ids that seem unused would be used again.
            await looking
        assert unknown_outcome(error) is True
        assert (await one(pg, Execution, "00")).lease_id == request.lease_ids[0].lease_id  # A reload shows the outcome.


async def test_a_statement_that_the_server_cancelled_was_not_written(pg: PostgresStore, rival: Rival) -> None:
    await write(pg, Insert(execution("a")))
    await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for update")
    commit = asyncio.create_task(pg.commit([change(Patch(Execution, ("a",), {"priority": 5}))]))
    (pid,) = await rival.blocks()

    await rival.fetch("select pg_cancel_backend($1)", pid)

    with pytest.raises(StoreUnavailable) as error:
        await commit
    assert unknown_outcome(error) is False
    assert error.value.source is StoreFault.TIMEOUT


async def test_a_second_read_that_the_server_cancelled_leaves_the_rows_of_the_first(
    pg: PostgresStore, rival: Rival
) -> None:
    _, looking = await claim_in_two_reads(pg, rival)
    (pid,) = await rival.blocks()

    await rival.fetch("select pg_cancel_backend($1)", pid)

    assert [row.execution_id for row, _ in (await looking).rows] == ["00"]


async def test_an_unreachable_server_leaves_no_unknown_outcome() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        store = PostgresStore(NOBODY.format(unused.getsockname()[1]))
        with pytest.raises(StoreUnavailable) as error:
            await store.commit([change(Insert(execution("a")))])
    assert unknown_outcome(error) is False
    assert error.value.source is StoreFault.TRANSPORT
    await store.close()


async def test_an_address_of_several_hosts_reaches_the_one_that_is_up_and_writable(database: str) -> None:
    parts = urlsplit(database)
    user, _, host = parts.netloc.rpartition("@")
    hosts = parts._replace(netloc=f"{user}@127.0.0.1:1,{host}", query="target_session_attrs=read-write")

    async with await connect(urlunsplit(hosts), migrate=False) as engine:
        execution_id = await new_execution(engine)
        assert await engine.describe_execution(execution_id) is not None


async def test_a_missing_database_is_reported(database: str) -> None:
    store = PostgresStore(postgres().dsn("ff_no_such_database"))
    with pytest.raises(StoreUnavailable, match="ff_no_such_database"):
        await store.open(migrate=True)
    await store.close()


@pytest.mark.parametrize("address", ["127.0.0.1:port/x", "127.0.0.1:99999/x", "127.0.0.1/x?sslmode=perhaps"])
async def test_an_invalid_url_is_an_error_of_the_caller(address: str) -> None:
    store = PostgresStore(f"postgresql://postgres@{address}")
    with pytest.raises(InvalidInput, match="url: "):
        await store.open(migrate=True)
    await store.close()


async def test_connection_attempts_back_off() -> None:
    attempts = 0

    def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    store = PostgresStore(NOBODY.format(server.sockets[0].getsockname()[1]))

    async def insist() -> None:
        while True:
            with pytest.raises(StoreUnavailable):
                await store.ping()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(insist(), 1)

    assert 2 <= attempts <= 12
    await store.close()
    server.close()
    await server.wait_closed()


async def test_calls_wait_for_a_connection_when_all_are_busy(database: str, clock: ManualClock) -> None:
    store = PostgresStore(database, clock, pool_size=2)

    assert await asyncio.gather(*(store.ping() for _ in range(50))) == [clock.now] * 50

    connection = await asyncpg.connect(database)
    assert len(await connection.fetch(OURS)) == 2
    await connection.close()
    await store.close()


async def test_a_cancelled_wait_for_a_connection_passes_its_turn_on(
    database: str, rival: Rival, clock: ManualClock
) -> None:
    store = PostgresStore(database, clock, pool_size=1)
    await write(store, Insert(execution("a")))
    await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for update")
    held = await rival.start_blocked(store.commit([change(Patch(Execution, ("a",), {"priority": 5}))]))
    waiting_calls = [asyncio.create_task(store.ping()) for _ in range(3)]
    await asyncio.sleep(0)

    waiting_calls[0].cancel()
    await rival.end("rollback")

    async with asyncio.timeout(5):
        assert await held == [clock.now]
        assert await asyncio.gather(*waiting_calls[1:]) == [clock.now] * 2
    await store.close()


async def test_a_closed_store_refuses_calls_and_may_be_closed_again(database: str) -> None:
    store = PostgresStore(database)
    await store.ping()
    store.notify(frozenset({"mail"}))

    await store.close()
    await store.close()

    with pytest.raises(StoreUnavailable, match="closed"):
        await store.ping()


async def test_closing_aborts_calls_in_flight(database: str, rival: Rival) -> None:
    store = PostgresStore(database)
    await write(store, Insert(execution("a")))
    await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for update")
    commit = await rival.start_blocked(store.commit([change(Patch(Execution, ("a",), {"priority": 5}))]))

    await store.close()

    with pytest.raises(StoreUnavailable) as error:
        await commit
    assert unknown_outcome(error) is True


@pytest.mark.parametrize("poison", [{"tags": "a\0b"}, {"tags": "\ud800"}, {"priority": 2**63}, {"rank": 2**70}])
async def test_an_unstorable_value_fails_its_change_and_nothing_else(
    database: str, clock: ManualClock, poison: dict[str, object]
) -> None:
    store = PostgresStore(database, clock, pool_size=1)
    batch = [change(Insert(execution("a"))), change(Insert(execution("b", **poison)))]

    assert [type(verdict) for verdict in await store.commit(batch)] == [int, Unstorable]
    assert await one(store, Execution, "b") is None
    assert await store.commit([change(Insert(execution("c")))]) == [clock.now]
    await store.close()


@pytest.mark.parametrize(("names", "in_doubt"), [(["a", "there"], True), (["there", "a"], False)])
async def test_a_connection_lost_between_the_halves_of_a_batch_leaves_it_in_doubt_if_anything_was_written(
    pg: PostgresStore, monkeypatch: pytest.MonkeyPatch, names: list[str], in_doubt: bool
) -> None:
    await write(pg, Insert(execution("there")))
    commit, sent = pg._commit, list[CommitPlan]()

    async def lose_third(plan: CommitPlan, topics: frozenset[str]) -> tuple[list[Verdict], list[object]]:
        sent.append(plan)
        if len(sent) == 3:
            raise StoreUnavailable("lost", source=StoreFault.TRANSPORT, in_doubt=False)
        return await commit(plan, topics)

    monkeypatch.setattr(pg, "_commit", lose_third)

    with pytest.raises(StoreUnavailable, match="lost") as error:
        await pg.commit([change(Insert(execution(name))) for name in names])

    assert unknown_outcome(error) is in_doubt


@pytest.mark.parametrize("cache", [True, False])
async def test_a_read_only_server_is_reported_and_retryable(database: str, clock: ManualClock, cache: bool) -> None:
    server, name = postgres(), database.rpartition("/")[2]
    server.execute(f'alter database "{name}" set default_transaction_read_only = on')
    store = PostgresStore(database, clock, pool_size=1, statement_cache=cache)
    try:
        assert await store.ping() == clock.now
        with pytest.raises(StoreUnavailable, match="default_transaction_read_only is on") as error:
            await store.commit([change(Insert(execution("a")))])
        assert (unknown_outcome(error), error.value.source, error.value.retryable) == (False, StoreFault.CLUSTER, True)
    finally:
        server.execute(f'alter database "{name}" reset default_transaction_read_only')

    assert await store.commit([change(Insert(execution("a")))]) == [clock.now]
    await store.close()


FULL = """
    create function no_room() returns trigger language plpgsql as $$
    begin
        raise exception 'could not extend file: No space left on device' using errcode = 'disk_full';
    end $$;
    create trigger no_room before insert on ff_payload for each row execute function no_room();
"""


async def test_a_full_disk_on_the_server_is_reported_and_retryable(pg: PostgresStore, rival: Rival) -> None:
    """The server's own error for it: it aborts the statement, whichever file was to grow."""
    await write(pg, Insert(execution("a")))
    step = change(
        Patch(Execution, ("a",), {"priority": 9}),
        Insert(execution("b", line=QueueKey("new"))),
        Insert(payload("b", b"x" * 100_000)),
        events=[event("b", lease="x")],
    )
    await rival.connection.execute(FULL)
    try:
        with pytest.raises(StoreUnavailable, match="No space left") as error:
            await pg.commit([step])
        assert (unknown_outcome(error), error.value.source, error.value.retryable) == (
            False,
            StoreFault.TRANSPORT,
            True,
        )
        assert (await one(pg, Execution, "a")).priority == 0
        assert (await pg.load([Read(Execution, ("b",))])).rows == [[]]
        assert (await pg.feed(Topic.LEASE, 0, 10)).events == []
    finally:
        await rival.connection.execute("drop trigger no_room on ff_payload; drop function no_room()")

    assert await pg.commit([step]) != [None]
    assert (await one(pg, Execution, "b")).line == QueueKey("new")
    assert len((await pg.feed(Topic.LEASE, 0, 10)).events) == 1


@pytest.fixture
async def own_server() -> AsyncIterator[PostgresServer]:
    """A server that can be stopped and killed."""
    name = f"store-links-{os.getpid()}"
    server = postgres(name)
    yield server
    server.start()
    server.drop_database("ff")
    leave(name)


@pytest.mark.serial
@pytest.mark.slow
@pytest.mark.parametrize("way", ["restart", "kill"])
async def test_the_store_recovers_when_its_server_does(own_server: PostgresServer, way: str) -> None:
    dsn = own_server.create_database("ff")
    await asyncio.to_thread(migrate, dsn)
    store = PostgresStore(dsn)
    woken = asyncio.Event()
    store.on_notify(lambda topics: woken.set())
    await asyncio.gather(*(store.ping() for _ in range(4)))
    assert await store.commit([change(Insert(execution("a")))]) != [None]

    await asyncio.to_thread(own_server.stop if way == "restart" else own_server.kill)
    with pytest.raises(StoreUnavailable):
        await store.commit([change(Insert(execution("b")))])
    await asyncio.to_thread(own_server.start)

    await until_it_answers(store)
    assert [await one(store, Execution, name) is None for name in "ab"] == [False, True]
    other = PostgresStore(dsn)
    async with asyncio.timeout(20):
        while not woken.is_set():  # The listener has reconnected as well.
            other.notify(frozenset({"mail"}))
            await asyncio.wait([asyncio.ensure_future(woken.wait())], timeout=0.1)
    await store.close()
    await other.close()


@pytest.mark.serial
@pytest.mark.slow
async def test_a_server_without_a_free_connection_is_reported(own_server: PostgresServer) -> None:
    dsn = own_server.create_database("ff")
    own_server.execute("create role guest login password 'guest' connection limit 1")
    guest = dsn.replace("postgres:", "guest:", 1)
    guest = guest.replace(guest[guest.index("guest:") + 6 : guest.index("@")], "guest", 1)
    first = await asyncpg.connect(guest)
    store = PostgresStore(guest)

    with pytest.raises(StoreUnavailable) as error:
        await store.ping()
    await first.close()
    await until_it_answers(store)

    assert unknown_outcome(error) is False
    assert error.value.retryable
    await store.close()
    own_server.execute("drop role guest")
