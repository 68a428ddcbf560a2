"""Event batches: how executions point to them, and how the older feed is migrated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Change, Delete, Guard, Insert, LeaseCheck, LeaseRequirement, Upsert
from flowfabric.model.event import Event, FeedEvent, Topic
from flowfabric.model.execution import Execution, Result
from flowfabric.rules.execution.lease import CLAIMED_FIELDS, RENEWAL
from flowfabric.rules.execution.transitions import success_template
from flowfabric.stores.claims import LeaseRef
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.postgres.commit.plan import MAX_EVENTS_PER_BATCH
from flowfabric.stores.postgres.migrator import migrations
from tests.conftest import Rival
from tests.stores.postgres.old_database import old_database
from tests.stores.sample_rows import change, claim_request, event, execution, insert_queued, queued, write

MANY = 10_000

# A statement that points to a batch waits for a lock first.
PAUSE = """
create function pause() returns trigger language plpgsql as
    $$ begin perform pg_advisory_xact_lock_shared(1); return new; end $$;
create trigger pause before insert on ff_told_in for each row execute function pause();
"""


def leases(events: list[FeedEvent]) -> list[str | None]:
    return [one.event.lease for one in events]


async def claimed(store: PostgresStore, name: str = "a") -> Execution:
    await insert_queued(store, queued(name))
    ((row, _),) = (await store.claim_rows(claim_request(1, prefix=name, **CLAIMED_FIELDS))).rows
    return row


def finished(row: Execution) -> Change:
    held = LeaseCheck(LeaseRequirement.LIVE, row.lease_id or "", row.lease_epoch)
    done = change(
        Upsert(Result(row.execution_id, b"R")), guards=[Guard(Execution, (row.execution_id,), row.revision, held)]
    )
    return msgspec.structs.replace(done, template=success_template(row))


async def live_through(store: PostgresStore, name: str = "a") -> None:
    """Run a life with a claim, a renewal, an event of a change, and the completion by a template."""
    row = await claimed(store, name)
    held = LeaseRef(name, 0, row.attempt_id or "", row.lease_id or "", row.lease_epoch, 1000)
    await store.renew([held, held], RENEWAL)
    await write(store, events=[event(name, lease="emitted")])
    assert await store.commit([finished(row)]) != [None]


async def pointers(rival: Rival) -> int:
    (row,) = await rival.fetch("select count(*) from ff_told_in")
    number: int = row[0]
    return number


LIFE = ["acquired", "renewed", "renewed", "emitted", "released"]


async def test_a_history_contains_the_events_of_every_statement(pg: PostgresStore) -> None:
    await live_through(pg)
    await live_through(pg, "b")

    history = await pg.history("a", Topic.LEASE, MANY)

    assert leases(history) == LIFE
    assert history == [one for one in (await pg.feed(Topic.LEASE, 0, MANY)).events if one.event.execution_id == "a"]
    assert leases(await pg.history("a", Topic.LEASE, 2)) == LIFE[-2:]
    assert [one.event.outcome for one in await pg.history("a", Topic.COMPLETION, MANY)] == ["success"]


async def test_a_history_outlives_its_execution_and_continues_with_the_next_of_that_id(pg: PostgresStore) -> None:
    await live_through(pg)
    await write(pg, Delete(Result, ("a",)), Delete(Execution, ("a",)))
    assert leases(await pg.history("a", Topic.LEASE, MANY)) == LIFE

    await write(pg, Insert(execution("a")), events=[event("a", lease="again")])
    assert leases(await pg.history("a", Topic.LEASE, MANY)) == [*LIFE, "again"]


async def test_a_row_points_to_the_newest_thousand_batches(pg: PostgresStore, rival: Rival) -> None:
    await insert_queued(pg, queued("a"))
    await rival.connection.execute(
        "update ff_exec_core set told = array(select -n from generate_series(1000, 1, -1) n)"
    )
    ((row, _),) = (await pg.claim_rows(claim_request(1, **CLAIMED_FIELDS))).rows
    await pg.commit([finished(row)])

    (found,) = await rival.fetch("select told from ff_exec_core")

    assert found["told"][:2] == [-998, -997]
    assert len(found["told"]) == 1000
    assert leases(await pg.history("a", Topic.LEASE, MANY)) == ["acquired", "released"]


async def test_no_pointer_to_trimmed_batches_remains(pg: PostgresStore, rival: Rival, clock: ManualClock) -> None:
    for name in ("a", "purged before", "purged after"):
        await live_through(pg, name)
    await write(pg, Delete(Execution, ("purged before",)))
    clock.advance_ms(1)
    await write(pg, events=[event("a", lease="kept")])
    before = await pointers(rival)

    assert await pg.trim_feed(clock.now, MANY) == 3 * len(LIFE)
    await write(pg, Delete(Execution, ("purged after",)))

    assert (before, await pointers(rival)) == (3 * 2 + 2 + 1, 1)
    assert leases(await pg.history("a", Topic.LEASE, MANY)) == ["kept"]
    assert await pg.history("purged before", Topic.LEASE, MANY) == []


async def test_a_trim_waits_for_a_purge_and_removes_the_pointers_that_it_left(
    pg: PostgresStore, rival: Rival, clock: ManualClock
) -> None:
    await live_through(pg)
    clock.advance_ms(1)
    # A purge that has read the batches stops at its first pointer until the rival lets it continue.
    await rival.connection.execute(PAUSE)
    await rival.begin("select pg_advisory_xact_lock(1)")
    purging = asyncio.create_task(write(pg, Delete(Execution, ("a",))))
    (purger,) = await rival.blocks()
    trimming = asyncio.create_task(pg.trim_feed(clock.now, MANY))
    waits = "select 1 from pg_stat_activity where $1 = any(pg_blocking_pids(pid))"
    while not trimming.done() and not await rival.fetch(waits, purger):
        await rival.fetch("select pg_sleep(0.005)")
    await rival.end()

    await purging
    assert await trimming == len(LIFE)
    assert await pointers(rival) == 0


async def test_events_keep_the_order_of_their_changes_before_those_of_templates(pg: PostgresStore) -> None:
    rows = [await claimed(pg, name) for name in "abc"]
    start = await pg.feed_end()
    emitted = [change(events=[event("x", lease=f"{number}")]) for number in (1, 2)]
    refused = change(events=[event("x", lease="refused")], not_before=2**62)

    await pg.commit([finished(rows[0]), emitted[0], refused, finished(rows[1]), emitted[1], finished(rows[2])])

    events = (await pg.feed(Topic.LEASE, start, MANY)).events
    assert [(one.event.lease, one.event.execution_id) for one in events] == [
        ("1", "x"),
        ("2", "x"),
        ("released", "a"),
        ("released", "b"),
        ("released", "c"),
    ]


class TestAFeedOfSingleRows:
    """Before the seventh migration each event was a row of `ff_event`."""

    # Three batches: one with gaps, since refused changes emitted nothing; one without events; one without a position.
    OLD = """
    insert into ff_batch (batch_id, at, position) overriding system value
    values (5, 10, 1), (7, 20, 2), (8, 30, 3), (9, 40, null);
    select setval('ff_batch_batch_id_seq', 9);
    update ff_feed set numbered = 3;
    insert into ff_event (batch_id, ord, execution_id, namespace, lease, lease_epoch, attempt_index, operator, details)
    values (5, 1, 'a', 'n', 'one', 7, 0, null, 'x'), (5, 4, 'b', 'n', 'two', null, null, null, null),
           (5, 5, 'a', 'n', null, null, null, 'three', null), (8, 0, 'a', 'n', 'four', null, null, null, null),
           (9, 2, 'a', 'n', 'five', null, null, null, null);
    """
    PLACES = (MAX_EVENTS_PER_BATCH + 1, MAX_EVENTS_PER_BATCH + 4, 3 * MAX_EVENTS_PER_BATCH)

    @pytest.fixture
    async def old_store(self, clock: ManualClock) -> AsyncIterator[PostgresStore]:
        async with old_database("ff_old", migrations()[:6]) as (dsn, connection):
            await connection.execute(self.OLD)
            store = PostgresStore(dsn, clock)
            await store.open(migrate=True)
            yield store
            await store.close()

    async def test_keeps_its_events_and_their_positions(self, old_store: PostgresStore) -> None:
        page = await old_store.feed(Topic.LEASE, 0, MANY)

        *numbered, last = [(one.position, one.at, one.event.lease) for one in page.events]
        assert numbered == [*zip(self.PLACES, (10, 10, 30), ("one", "two", "four"), strict=True)]
        assert last[0] > self.PLACES[-1]  # Its position was assigned after the last migration, from the time of day.
        assert last[0] % MAX_EVENTS_PER_BATCH == 2
        assert last[1:] == (40, "five")
        first = page.events[0].event
        assert first == Event("a", "n", lease="one", lease_epoch=7, attempt_index=0, details="x")

    async def test_continues_from_every_cursor(self, old_store: PostgresStore) -> None:
        for after in range(MAX_EVENTS_PER_BATCH, MAX_EVENTS_PER_BATCH + 8):
            page = await old_store.feed(Topic.LEASE, after, MANY)
            assert [one.position for one in page.events][:-1] == [place for place in self.PLACES if place > after]
            assert not page.diverged
        await write(old_store, events=[event("a", lease="six")])

        assert leases((await old_store.feed(Topic.LEASE, self.PLACES[-1], MANY)).events) == ["five", "six"]

    async def test_keeps_the_history_of_each_execution(self, old_store: PostgresStore) -> None:
        assert leases(await old_store.history("a", Topic.LEASE, MANY)) == ["one", "four", "five"]
        assert leases(await old_store.history("b", Topic.LEASE, MANY)) == ["two"]
        assert len(await old_store.history("a", Topic.OPERATOR, MANY)) == 1

    async def test_can_be_trimmed(self, old_store: PostgresStore) -> None:
        assert await old_store.trim_feed(30, MANY) == 3

        assert leases(await old_store.history("a", Topic.LEASE, MANY)) == ["four", "five"]
        lost = {topic: (await old_store.feed(topic, MAX_EVENTS_PER_BATCH + 4, MANY)).has_gap for topic in Topic}
        assert lost == {topic: topic is Topic.OPERATOR for topic in Topic}
