"""Races that Postgres decides by locks, each forced: someone holds a row, the store waits, then it is let go."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import (
    NOW,
    Change,
    Delete,
    FromNow,
    Guard,
    Insert,
    LeaseCheck,
    LeaseRequirement,
    Patch,
    Upsert,
    absent,
)
from flowfabric.model.event import Topic
from flowfabric.model.execution import Attempt, Execution, Payload, Result
from flowfabric.model.states import AttemptRecordState, AttemptType
from flowfabric.rules.execution.lease import RENEWAL
from flowfabric.stores.claims import LeaseRef
from flowfabric.stores.port import Collision
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.queries import Read
from tests.conftest import Rival
from tests.stores.samples import a_take, change, event, execution, line_up, one, payload, waiting, write


def seen(name: str, revision: int) -> Guard:
    return Guard(Execution, (name,), revision)


def set_priority(name: str, priority: int) -> Patch:
    return Patch(Execution, (name,), {"priority": priority})


def attempt(name: str, index: int = 0) -> Attempt:
    kind, state = AttemptType.INITIAL, AttemptRecordState.STARTED
    return Attempt(name, index, f"attempt-{index}", kind, state, 1, "lease", 1, "worker", "worker-1")


def touch(name: str) -> str:
    """What another process writes when it decides something about a row."""
    return f"update ff_exec_core set revision = 999 where execution_id = '{name}'"


async def blocked_by(rival: Rival, pid: int) -> None:
    """Wait until someone waits for this process."""
    async with asyncio.timeout(20):
        waiting = "select 1 from pg_locks where not granted and $1 = any(pg_blocking_pids(pid))"
        while not await rival.connection.fetch(waiting, pid):
            await rival.connection.execute("select pg_sleep(0.005)")


async def two_rows(store: PostgresStore) -> int:
    return await write(store, Insert(execution("a")), Insert(execution("b")))


class TestAChangeOfTwoRows:
    """Both were decided on; someone else is just writing the second one."""

    @pytest.fixture
    async def commit(self, pg: PostgresStore, rival: Rival) -> asyncio.Task[list[int | None]]:
        revision = await two_rows(pg)
        await rival.begin(touch("b"))
        both = change(set_priority("a", 5), set_priority("b", 5), guards=[seen("a", revision), seen("b", revision)])
        commit = asyncio.create_task(pg.commit([both]))
        await rival.blocks()
        return commit

    async def test_is_not_torn(self, pg: PostgresStore, rival: Rival, commit: asyncio.Task[list[int | None]]) -> None:
        await rival.end()

        assert await commit == [None]
        assert (await one(pg, Execution, "a")).priority == 0
        assert (await one(pg, Execution, "b")).priority == 0

    async def test_is_written_whole_when_the_other_gives_up(
        self, pg: PostgresStore, rival: Rival, commit: asyncio.Task[list[int | None]], clock: ManualClock
    ) -> None:
        await rival.end("rollback")

        assert await commit == [clock.now]
        assert (await one(pg, Execution, "a")).priority == 5
        assert (await one(pg, Execution, "b")).priority == 5


async def test_a_neighbour_in_the_batch_is_not_disturbed(pg: PostgresStore, rival: Rival, clock: ManualClock) -> None:
    revision = await two_rows(pg)
    await rival.begin(touch("b"))
    changes = [change(set_priority(name, 5), guards=[seen(name, revision)]) for name in ("b", "a")]

    commit = asyncio.create_task(pg.commit(changes))
    await rival.blocks()
    await rival.end()

    assert await commit == [None, clock.now]


async def test_a_change_that_only_relies_on_a_row_is_refused_when_that_row_was_just_written(
    pg: PostgresStore, rival: Rival
) -> None:
    revision = await write(pg, Insert(execution("a")))
    await rival.begin(touch("a"))
    fenced = change(Insert(attempt("a")), guards=[seen("a", revision)], events=[event(lease="acquired")])

    commit = asyncio.create_task(pg.commit([fenced]))
    await rival.blocks()
    await rival.end()

    assert await commit == [None]
    assert (await pg.load([Read(Attempt, ("a",))])).rows == [[]]
    assert (await pg.feed(Topic.LEASE, 0, 10)).events == []


async def test_a_row_that_is_relied_on_cannot_be_written_meanwhile(pg: PostgresStore, rival: Rival) -> None:
    revision = await two_rows(pg)
    await rival.begin(touch("b"))
    fenced = change(Insert(attempt("a")), guards=[seen("a", revision), seen("b", revision)])
    commit = asyncio.create_task(pg.commit([fenced]))
    (holder,) = await rival.blocks()  # it has locked "a" and waits for "b"

    rewrite = asyncio.create_task(rival.fetch(touch("a")))
    await blocked_by(rival, holder)
    await rival.end("rollback")

    assert await commit != [None]
    await rewrite


async def test_those_who_only_rely_on_a_row_do_not_wait_for_each_other(pg: PostgresStore, rival: Rival) -> None:
    revision = await write(pg, Insert(execution("a")))
    await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for share")

    async with asyncio.timeout(5):
        assert await pg.commit([change(Insert(attempt("a")), guards=[seen("a", revision)])]) != [None]


async def test_a_renewal_beside_a_commit_is_kept(pg: PostgresStore, rival: Rival, clock: ManualClock) -> None:
    revision = await write(pg, Insert(execution("a", lease_expires_at=1)))
    await rival.begin("update ff_exec_core set lease_expires_at = 2 where execution_id = 'a'")

    commit = asyncio.create_task(pg.commit([change(set_priority("a", 5), guards=[seen("a", revision)])]))
    await rival.blocks()
    await rival.end()

    assert await commit == [clock.now]
    row = await one(pg, Execution, "a")
    assert (row.priority, row.lease_expires_at) == (5, 2)


async def test_of_two_commits_decided_on_one_revision_one_is_written(pg: PostgresStore, rival: Rival) -> None:
    revision = await write(pg, Insert(execution("a")))
    await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for update")
    commits = [
        asyncio.create_task(pg.commit([change(set_priority("a", n), guards=[seen("a", revision)])])) for n in (1, 2)
    ]
    (first,) = await rival.blocks()
    await blocked_by(rival, first)
    await rival.end("rollback")

    answers = await asyncio.gather(*commits)
    assert sorted(answer == [None] for answer in answers) == [False, True]


async def test_a_lease_that_ends_while_the_commit_waits_is_not_in_force(database: str, rival: Rival) -> None:
    store = PostgresStore(database)
    lease = {"lease_id": "l", "lease_epoch": 1, "lease_expires_at": FromNow(300)}
    revision = await write(store, Insert(execution("a", **lease)))
    guard = Guard(Execution, ("a",), revision, LeaseCheck(LeaseRequirement.LIVE, "l", 1))
    await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for update")

    commit = asyncio.create_task(store.commit([change(set_priority("a", 5), guards=[guard])]))
    await rival.blocks()
    await rival.fetch("select pg_sleep(0.01 + lease_expires_at / 1000.0 - extract(epoch from now())) from ff_exec_core")
    await rival.end("rollback")

    assert await commit == [None]
    await store.close()


async def test_a_lease_that_ended_while_the_renewal_waits_is_not_renewed(database: str, rival: Rival) -> None:
    store = PostgresStore(database)
    lease = {"lease_id": "l", "lease_epoch": 1, "lease_expires_at": FromNow(300), "attempt_id": "x", "attempt_index": 0}
    await write(store, Insert(execution("a", **lease)))
    await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for update")

    renewal = asyncio.create_task(store.renew([LeaseRef("a", 0, "x", "l", 1, 1000)], RENEWAL))
    await rival.blocks()
    await rival.fetch("select pg_sleep(0.01 + lease_expires_at / 1000.0 - extract(epoch from now())) from ff_exec_core")
    await rival.end("rollback")

    assert await renewal == [None]
    await store.close()


class TestTwoCreatesOfOneRow:
    """Neither sees the other's row."""

    @pytest.fixture(params=[Insert, Upsert], ids=["inserted", "put"])
    async def commit(
        self, request: pytest.FixtureRequest, pg: PostgresStore, rival: Rival
    ) -> asyncio.Task[list[int | None]]:
        make: type[Insert | Upsert] = request.param
        await write(pg, Insert(execution("old")))
        columns = (
            await rival.fetch(
                "select string_agg(quote_ident(attname), ', ') from pg_attribute"
                " where attrelid = 'ff_exec_core'::regclass and attnum > 0"
                " and not attisdropped and attname <> 'execution_id'"
            )
        )[0][0]
        copied = f"insert into ff_exec_core (execution_id, {columns}) select 'a', {columns} from ff_exec_core"
        await rival.begin(copied)
        created = change(make(execution("a")), Insert(payload("a")), guards=[absent(Execution, "a")])
        commit = asyncio.create_task(pg.commit([created, change(Insert(execution("b")))]))
        await rival.blocks()
        return commit

    async def test_the_second_collides_and_writes_nothing(
        self, pg: PostgresStore, rival: Rival, commit: asyncio.Task[list[int | None]]
    ) -> None:
        await rival.end()

        with pytest.raises(Collision):
            await commit
        assert await one(pg, Payload, "a") is None
        assert await one(pg, Execution, "b") is None

    async def test_the_second_is_written_when_the_first_gives_up(
        self, pg: PostgresStore, rival: Rival, commit: asyncio.Task[list[int | None]], clock: ManualClock
    ) -> None:
        await rival.end("rollback")

        assert await commit == [clock.now, clock.now]


async def test_a_delete_sees_what_was_added_while_it_waited(pg: PostgresStore, rival: Rival) -> None:
    revision = await write(pg, Insert(execution("a")), Insert(attempt("a", 0)))
    beside = "select 1 from ff_exec_core where execution_id = 'a' for share"  # as someone does who only relies on it
    added = (
        "insert into ff_attempt select added.* from ff_attempt t,"
        """ jsonb_populate_record(t, '{"attempt_index": 1}') added"""
    )
    await rival.begin(beside, added)
    cleared = change(set_priority("a", 5), Delete(Attempt, ("a",)), guards=[seen("a", revision)])

    commit = asyncio.create_task(pg.commit([cleared]))
    await rival.blocks()
    await rival.end()

    assert await commit != [None]
    assert (await pg.load([Read(Attempt, ("a",))])).rows == [[]]


async def test_a_patch_reaches_a_row_that_was_added_while_it_waited(
    pg: PostgresStore, rival: Rival, clock: ManualClock
) -> None:
    revision = await write(pg, Insert(execution("a")))
    beside = "select 1 from ff_exec_core where execution_id = 'a' for share"
    added = "insert into ff_result (execution_id, payload) values ('a', 'first')"
    await rival.begin(beside, added)
    ended = change(
        set_priority("a", 5),
        Patch(Result, ("a",), {"encoding": "json"}, unless_set="encoding"),
        guards=[seen("a", revision)],
    )

    commit = asyncio.create_task(pg.commit([ended]))
    await rival.blocks()
    await rival.end()

    assert await commit == [clock.now]
    assert await one(pg, Result, "a") == Result("a", b"first", "json")


async def test_a_put_meets_a_row_that_was_put_while_it_waited(pg: PostgresStore, rival: Rival) -> None:
    await write(pg, Insert(execution("a")))
    await rival.begin("insert into ff_result (execution_id, payload) values ('a', 'first')")

    commit = asyncio.create_task(pg.commit([change(Upsert(Result("a", b"second")))]))
    await rival.blocks()
    await rival.end()

    assert await commit != [None]
    assert await one(pg, Result, "a") == Result("a", b"second")


class TestATake:
    async def test_passes_over_rows_that_others_hold(self, pg: PostgresStore, rival: Rival) -> None:
        await line_up(pg, *(waiting(name, rank) for rank, name in enumerate("abcd")))
        await rival.begin("select 1 from ff_exec_core where execution_id in ('a', 'c') for update")

        async with asyncio.timeout(5):
            taken = await pg.claim_rows(a_take(2))

        assert [row.execution_id for row, _ in taken.rows] == ["b", "d"]

    async def test_looks_further_when_others_hold_all_it_looked_at(self, pg: PostgresStore, rival: Rival) -> None:
        await line_up(pg, *(waiting(f"{rank:02}", rank) for rank in range(30)))
        await rival.begin("select 1 from ff_exec_core where rank < 7 for update")

        taken = await pg.claim_rows(a_take(3))

        assert [row.rank for row, _ in taken.rows] == [7, 8, 9]

    async def test_uses_each_stamp_once_when_it_looks_twice(self, pg: PostgresStore, rival: Rival) -> None:
        await line_up(pg, *(waiting(f"{rank:02}", rank) for rank in range(30)))
        await rival.begin("select 1 from ff_exec_core where rank between 1 and 8 for update")
        take = a_take(4)

        taken = await pg.claim_rows(take)

        assert [row.rank for row, _ in taken.rows] == [0, 9, 10, 11]
        assert sorted(row.lease_id or "" for row, _ in taken.rows) == sorted(stamp.lease_id for stamp in take.lease_ids)

    async def test_does_not_wait_for_another_one(self, pg: PostgresStore, rival: Rival) -> None:
        await line_up(pg, waiting("a", 0), waiting("b", 1))
        await rival.begin(
            "insert into ff_batch (batch_id, at, events) select nextval('ff_batch_batch_id_seq') + 1, 0, '{}'"
        )
        first = asyncio.create_task(pg.claim_rows(a_take(1, prefix="first-")))
        await rival.blocks()  # it has taken "a", and waits to tell: someone else has the number of its batch

        async with asyncio.timeout(5):
            second = await pg.claim_rows(a_take(1, prefix="second-"))
        await rival.end("rollback")

        rows = [taken.rows for taken in (await first, second)]
        assert [row.execution_id for ((row, _),) in rows] == ["a", "b"]


async def test_a_deadlock_sends_the_batch_again(pg: PostgresStore, rival: Rival, clock: ManualClock) -> None:
    revision = await two_rows(pg)
    await rival.connection.execute("set deadlock_timeout = '20s'")  # so that it is the store who is told to give way
    await rival.begin("select 1 from ff_exec_core where execution_id = 'b' for update")
    both = change(set_priority("a", 5), set_priority("b", 5), guards=[seen("a", revision), seen("b", revision)])
    commit = asyncio.create_task(pg.commit([both]))
    await rival.blocks()

    await rival.connection.execute("select 1 from ff_exec_core where execution_id = 'a' for update")
    await rival.end("rollback")

    assert await commit == [clock.now]
    assert (await one(pg, Execution, "b")).priority == 5


async def test_a_cancelled_call_leaves_no_connection_behind_that_is_not_fit_for_use(
    database: str, rival: Rival, clock: ManualClock
) -> None:
    store = PostgresStore(database, clock, pool_size=1)
    revision = await write(store, Insert(execution("a")))
    await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for update")
    commit = asyncio.create_task(store.commit([change(set_priority("a", 5), guards=[seen("a", revision)])]))
    await rival.blocks()

    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit

    async with asyncio.timeout(5):
        assert await store.ping() == clock.now
    await rival.end("rollback")
    assert await store.commit([Change((), (Insert(execution("b")),), id=77)]) == [clock.now]
    await store.close()


async def test_a_first_close_that_waits_for_another_one_leaves_it_alone(pg: PostgresStore, rival: Rival) -> None:
    await write(pg, Insert(execution("a")))
    await rival.begin("update ff_exec_core set completed_at = 1 where execution_id = 'a'")

    closing = change(Patch(Execution, ("a",), {"completed_at": NOW}, unless_set="completed_at"))
    commit = asyncio.create_task(pg.commit([closing]))
    await rival.blocks()
    await rival.end()

    assert await commit != [None]
    assert (await one(pg, Execution, "a")).completed_at == 1
