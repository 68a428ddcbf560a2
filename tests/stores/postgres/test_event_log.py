"""How events get their positions on Postgres: in the order of commits and without gaps."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
from urllib.parse import urlsplit

import asyncpg
import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Guard, Insert, Patch
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import Execution
from flowfabric.stores.postgres import PostgresStore
from tests.conftest import Rival
from tests.postgres_install import environment, programs
from tests.servers import postgres
from tests.stores.sample_rows import change, event, execution, write

# A batch as any process commits it, with one event of the given execution.
BATCH = """
with batch as (
    insert into ff_batch (at, events)
    values (0, array[(jsonb_populate_record(null::ff_told,
        jsonb_build_object('execution_id', '{0}', 'namespace', 'default', 'lease', 'emitted')))])
    returning batch_id)
insert into ff_told_in (execution_id, batch_id) select '{0}', batch_id from batch
"""


def names(events: list[FeedEvent]) -> list[str]:
    return [one.event.execution_id for one in events]


async def emit(store: PostgresStore, name: str) -> None:
    await write(store, events=[event(name, lease="emitted")])


async def test_a_batch_that_commits_late_is_not_skipped(pg: PostgresStore, rival: Rival) -> None:
    await rival.begin(BATCH.format("late"))  # It has its number and is not committed.
    await emit(pg, "early")
    first = await pg.feed(Topic.LEASE, 0, 10)
    await rival.end()
    await emit(pg, "last")

    second = await pg.feed(Topic.LEASE, first.position, 10)

    assert names(first.events) == ["early"]
    assert names(second.events) == ["late", "last"]
    assert names((await pg.feed(Topic.LEASE, 0, 10)).events) == ["early", "late", "last"]


async def test_the_end_of_the_feed_is_before_a_batch_that_commits_late(pg: PostgresStore, rival: Rival) -> None:
    await rival.begin(BATCH.format("late"))
    await emit(pg, "early")
    end = await pg.feed_end()
    await rival.end()

    assert names((await pg.feed(Topic.LEASE, end, 10)).events) == ["late"]


async def test_a_batch_that_is_rolled_back_leaves_no_gap(pg: PostgresStore, rival: Rival) -> None:
    await emit(pg, "a")
    await rival.begin(BATCH.format("never"))
    await rival.end("rollback")
    await emit(pg, "b")

    await pg.feed_end()

    positions = [row[0] for row in await rival.fetch("select position from ff_batch order by batch_id")]
    assert positions[1] == positions[0] + 1


async def test_two_batches_about_one_row_are_in_the_order_of_their_commits(pg: PostgresStore, rival: Rival) -> None:
    """The second statement began first; it gets its number only when it has the row lock."""
    revision = await write(pg, Insert(execution("a")))
    await rival.begin("update ff_exec_core set revision = 5 where execution_id = 'a'")
    second = change(
        Patch(Execution, ("a",), {"priority": 2}),
        guards=[Guard(Execution, ("a",), 5)],
        events=[event("a", lease="second")],
    )
    commit = await rival.start_blocked(pg.commit([second]))
    await rival.connection.execute(BATCH.format("a").replace("'emitted'", "'first'"))
    await rival.end()

    assert await commit != [None]
    assert [one.event.lease for one in (await pg.feed(Topic.LEASE, 0, 10)).events] == ["first", "second"]
    assert [one.event.lease for one in await pg.history("a", Topic.LEASE, 10)] == ["first", "second"]
    assert revision


async def test_concurrent_readers_and_writers_skip_and_repeat_nothing(database: str, clock: ManualClock) -> None:
    stores = [PostgresStore(database, clock) for _ in range(4)]
    written = asyncio.Event()

    async def write_some(store: PostgresStore, writer: int) -> None:
        for number in range(40):
            await emit(store, f"{writer}-{number:02}")

    async def read_all(store: PostgresStore) -> list[FeedEvent]:
        position, found = 0, list[FeedEvent]()
        while True:
            last = written.is_set()
            page = await store.feed(Topic.LEASE, position, 7)
            assert page.position >= position
            assert all(position < one.position <= page.position for one in page.events)
            found += page.events
            position = page.position
            if last and not page.events:
                return found

    readers = [asyncio.create_task(read_all(store)) for store in stores]
    await asyncio.gather(*(write_some(store, writer) for writer, store in enumerate(stores * 2)))
    written.set()
    answers = await asyncio.gather(*readers)

    assert all(one == answers[0] for one in answers)
    assert sorted(names(answers[0])) == sorted(f"{writer}-{number:02}" for writer in range(8) for number in range(40))
    for writer in range(8):  # The sequential writes of one caller stay in order.
        own = [name for name in names(answers[0]) if name.startswith(f"{writer}-")]
        assert own == sorted(own)
    for store in stores:
        await store.close()


async def test_processes_that_number_batches_wait_for_each_other(pg: PostgresStore, rival: Rival) -> None:
    await emit(pg, "a")
    await rival.begin("select numbered from ff_feed for update")
    page = await rival.start_blocked(pg.feed(Topic.LEASE, 0, 10))
    await rival.connection.execute(
        "update ff_batch set position = (select numbered + 1 from ff_feed) where position is null"
    )
    await rival.connection.execute("update ff_feed set numbered = numbered + 1")
    await rival.end()

    assert names((await page).events) == ["a"]
    await emit(pg, "b")
    assert names((await pg.feed(Topic.LEASE, (await page).position, 10)).events) == ["b"]


async def test_more_batches_than_one_numbering_pass_holds_are_numbered(pg: PostgresStore, rival: Rival) -> None:
    await rival.connection.execute(
        "insert into ff_batch (at, events) select 0, '{}' from generate_series(1, 2500)",
    )
    await write(pg, events=[event("a", operator="paused")])

    end = await pg.feed_end()
    page = await pg.feed(Topic.OPERATOR, 0, 10)  # a long stretch without an event of this topic

    assert names(page.events) == ["a"]
    assert page.position == end
    assert (await rival.fetch("select count(*) from ff_batch where position is null"))[0][0] == 0


async def test_an_idle_transaction_in_another_database_does_not_stall_the_feed(
    pg: PostgresStore, database: str
) -> None:
    elsewhere = await asyncpg.connect(postgres().dsn())  # another database of the same server
    here = await asyncpg.connect(database)
    for connection in (elsewhere, here):
        await connection.execute("begin isolation level repeatable read")
        # It has a snapshot and an xid and does nothing with them.
        await connection.fetch("select pg_current_xact_id()")

    await emit(pg, "a")
    page = await pg.feed(Topic.LEASE, 0, 10)
    await emit(pg, "b")
    more = await pg.feed(Topic.LEASE, page.position, 10)

    assert names(page.events + more.events) == ["a", "b"]
    for connection in (elsewhere, here):
        await connection.close()


@pytest.mark.slow
async def test_a_cursor_survives_dump_and_restore(pg: PostgresStore, database: str, clock: ManualClock) -> None:
    for name in "abc":
        await emit(pg, name)
    (a, *_) = (await pg.feed(Topic.LEASE, 0, 10)).events
    await emit(pg, "unnumbered")
    server, restored = postgres(), f"restored_{urlsplit(database).path[1:]}"
    server.drop_database(restored)
    dsn = server.create_database(restored)
    dump = await _run("pg_dump", "--dbname", database)
    await _run("psql", "-XqAt", "-d", dsn, given=dump)

    copy = PostgresStore(dsn, clock)
    await copy.open(migrate=False)
    await emit(copy, "after")
    page = await copy.feed(Topic.LEASE, a.position, 10)

    assert names(page.events) == ["b", "c", "unnumbered", "after"]
    assert all(one.position < other.position for one, other in itertools.pairwise(page.events))
    await copy.close()
    server.drop_database(restored)


async def _run(program: str, *arguments: str, given: bytes = b"") -> bytes:
    command = [str(programs() / program), *arguments]
    done = await asyncio.to_thread(
        subprocess.run, command, input=given, capture_output=True, check=True, env=environment()
    )
    return done.stdout
