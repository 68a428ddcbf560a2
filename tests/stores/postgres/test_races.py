"""Races that Postgres decides by locks, each forced: a rival locks a row, the store waits, then the rival commits."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric import Engine, Settings
from flowfabric.clock import ManualClock
from flowfabric.ids import SeededMinter
from flowfabric.model.change import Change, Delete, Guard, Insert, LeaseCheck, LeaseRequirement, Patch, Upsert, absent
from flowfabric.model.event import Topic
from flowfabric.model.execution import Attempt, Execution, Payload, QueueKey, Result
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.states import AttemptRecordState, AttemptType
from flowfabric.rules.execution.lease import RENEWAL
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, LeaseRef
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.queries import Read
from flowfabric.stores.verdicts import Verdict
from tests.conftest import Rival
from tests.executions import claim_one, new_execution
from tests.stores.sample_rows import change, claim_request, event, execution, insert_queued, one, payload, queued, write


def seen(name: str, revision: int) -> Guard:
    return Guard(Execution, (name,), revision)


def set_priority(name: str, priority: int) -> Patch:
    return Patch(Execution, (name,), {"priority": priority})


def attempt(name: str, index: int = 0) -> Attempt:
    kind, state = AttemptType.INITIAL, AttemptRecordState.STARTED
    return Attempt(name, index, f"attempt-{index}", kind, state, 1, "lease", 1, "worker", "worker-1")


def touch(name: str) -> str:
    """Return what another process writes when it decides about a row."""
    return f"update ff_exec_core set revision = 999 where execution_id = '{name}'"


async def blocked_by(rival: Rival, pid: int) -> None:
    """Wait until a backend waits for this process."""
    async with asyncio.timeout(20):
        waiting = "select 1 from pg_locks where not granted and $1 = any(pg_blocking_pids(pid))"
        while not await rival.connection.fetch(waiting, pid):
            await rival.connection.execute("select pg_sleep(0.005)")


async def two_rows(store: PostgresStore) -> int:
    return await write(store, Insert(execution("a")), Insert(execution("b")))


class TestAChangeOfTwoRows:
    """Both rows were decided on; a rival is writing the second one."""

    @pytest.fixture
    async def commit(self, pg: PostgresStore, rival: Rival) -> asyncio.Task[list[Verdict]]:
        revision = await two_rows(pg)
        await rival.begin(touch("b"))
        both = change(set_priority("a", 5), set_priority("b", 5), guards=[seen("a", revision), seen("b", revision)])
        return await rival.start_blocked(pg.commit([both]))

    async def test_is_atomic(self, pg: PostgresStore, rival: Rival, commit: asyncio.Task[list[Verdict]]) -> None:
        await rival.end()

        assert await commit == [None]
        assert (await one(pg, Execution, "a")).priority == 0
        assert (await one(pg, Execution, "b")).priority == 0

    async def test_is_written_whole_if_the_rival_rolls_back(
        self, pg: PostgresStore, rival: Rival, commit: asyncio.Task[list[Verdict]], clock: ManualClock
    ) -> None:
        await rival.end("rollback")

        assert await commit == [clock.now]
        assert (await one(pg, Execution, "a")).priority == 5
        assert (await one(pg, Execution, "b")).priority == 5


async def test_does_not_affect_a_neighbour_in_the_batch(pg: PostgresStore, rival: Rival, clock: ManualClock) -> None:
    revision = await two_rows(pg)
    await rival.begin(touch("b"))
    changes = [change(set_priority(name, 5), guards=[seen(name, revision)]) for name in ("b", "a")]

    assert await rival.answer_after_commit(pg.commit(changes)) == [None, clock.now]


async def test_a_change_that_only_guards_a_row_is_refused_if_that_row_was_written(
    pg: PostgresStore, rival: Rival
) -> None:
    revision = await write(pg, Insert(execution("a")))
    await rival.begin(touch("a"))
    fenced = change(Insert(attempt("a")), guards=[seen("a", revision)], events=[event(lease="acquired")])

    assert await rival.answer_after_commit(pg.commit([fenced])) == [None]
    assert (await pg.load([Read(Attempt, ("a",))])).rows == [[]]
    assert (await pg.feed(Topic.LEASE, 0, 10)).events == []


async def test_a_guarded_row_cannot_be_written_meanwhile(pg: PostgresStore, rival: Rival) -> None:
    revision = await two_rows(pg)
    await rival.begin(touch("b"))
    fenced = change(Insert(attempt("a")), guards=[seen("a", revision), seen("b", revision)])
    commit = asyncio.create_task(pg.commit([fenced]))
    (holder,) = await rival.blocks()  # It has locked "a" and waits for "b".

    rewrite = asyncio.create_task(rival.fetch(touch("a")))
    await blocked_by(rival, holder)
    await rival.end("rollback")

    assert await commit != [None]
    await rewrite


async def test_changes_that_only_guard_a_row_do_not_wait_for_each_other(pg: PostgresStore, rival: Rival) -> None:
    revision = await write(pg, Insert(execution("a")))
    await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for share")

    async with asyncio.timeout(5):
        assert await pg.commit([change(Insert(attempt("a")), guards=[seen("a", revision)])]) != [None]


async def test_a_renewal_beside_a_commit_is_kept(pg: PostgresStore, rival: Rival, clock: ManualClock) -> None:
    revision = await write(pg, Insert(execution("a", lease_expires_at=1)))
    await rival.begin("update ff_exec_core set lease_expires_at = 2 where execution_id = 'a'")

    assert await rival.answer_after_commit(pg.commit([change(set_priority("a", 5), guards=[seen("a", revision)])])) == [
        clock.now
    ]
    row = await one(pg, Execution, "a")
    assert (row.priority, row.lease_expires_at) == (5, 2)


async def test_one_of_two_commits_decided_on_one_revision_is_written(pg: PostgresStore, rival: Rival) -> None:
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


async def test_a_lease_that_expires_while_the_commit_waits_is_not_live(database: str, rival: Rival) -> None:
    store = PostgresStore(database)
    lease = {"lease_id": "l", "lease_epoch": 1, "lease_expires_at": FromNow(300)}
    revision = await write(store, Insert(execution("a", **lease)))
    guard = Guard(Execution, ("a",), revision, LeaseCheck(LeaseRequirement.LIVE, "l", 1))
    await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for update")

    commit = await rival.start_blocked(store.commit([change(set_priority("a", 5), guards=[guard])]))
    await rival.fetch("select pg_sleep(0.01 + lease_expires_at / 1000.0 - extract(epoch from now())) from ff_exec_core")
    await rival.end("rollback")

    assert await commit == [None]
    await store.close()


async def test_a_lease_that_expired_while_the_renewal_waits_is_not_renewed(database: str, rival: Rival) -> None:
    store = PostgresStore(database)
    lease = {"lease_id": "l", "lease_epoch": 1, "lease_expires_at": FromNow(300), "attempt_id": "x", "attempt_index": 0}
    await write(store, Insert(execution("a", **lease)))
    await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for update")

    renewal = await rival.start_blocked(store.renew([LeaseRef("a", 0, "x", "l", 1, 1000)], RENEWAL))
    await rival.fetch("select pg_sleep(0.01 + lease_expires_at / 1000.0 - extract(epoch from now())) from ff_exec_core")
    await rival.end("rollback")

    assert await renewal == [None]
    await store.close()


class TestTwoCreatesOfOneRow:
    """Neither sees the row of the other."""

    @pytest.fixture(params=[Insert, Upsert], ids=["inserted", "put"])
    async def commit(
        self, request: pytest.FixtureRequest, pg: PostgresStore, rival: Rival
    ) -> asyncio.Task[list[Verdict]]:
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
        return await rival.start_blocked(pg.commit([created, change(Insert(execution("b")))]))

    async def test_the_second_is_refused_and_the_change_beside_it_is_written(
        self, pg: PostgresStore, rival: Rival, commit: asyncio.Task[list[Verdict]], clock: ManualClock
    ) -> None:
        await rival.end()

        assert await commit == [None, clock.now]
        assert await one(pg, Payload, "a") is None
        assert await one(pg, Execution, "b") is not None

    async def test_the_second_is_written_if_the_first_rolls_back(
        self, pg: PostgresStore, rival: Rival, commit: asyncio.Task[list[Verdict]], clock: ManualClock
    ) -> None:
        await rival.end("rollback")

        assert await commit == [clock.now, clock.now]


async def test_a_delete_sees_what_was_inserted_while_it_waited(pg: PostgresStore, rival: Rival) -> None:
    revision = await write(pg, Insert(execution("a")), Insert(attempt("a", 0)))
    beside = "select 1 from ff_exec_core where execution_id = 'a' for share"  # as a change does that only guards it
    added = (
        "insert into ff_attempt select added.* from ff_attempt t,"
        """ jsonb_populate_record(t, '{"attempt_index": 1}') added"""
    )
    await rival.begin(beside, added)
    cleared = change(set_priority("a", 5), Delete(Attempt, ("a",)), guards=[seen("a", revision)])

    assert await rival.answer_after_commit(pg.commit([cleared])) != [None]
    assert (await pg.load([Read(Attempt, ("a",))])).rows == [[]]


async def test_a_patch_reaches_a_row_that_was_inserted_while_it_waited(
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

    assert await rival.answer_after_commit(pg.commit([ended])) == [clock.now]
    assert await one(pg, Result, "a") == Result("a", b"first", "json")


async def test_an_upsert_replaces_a_row_that_was_inserted_while_it_waited(pg: PostgresStore, rival: Rival) -> None:
    await write(pg, Insert(execution("a")))
    await rival.begin("insert into ff_result (execution_id, payload) values ('a', 'first')")

    assert await rival.answer_after_commit(pg.commit([change(Upsert(Result("a", b"second")))])) != [None]
    assert await one(pg, Result, "a") == Result("a", b"second")


class TestAClaim:
    async def test_skips_rows_that_others_have_locked(self, pg: PostgresStore, rival: Rival) -> None:
        await insert_queued(pg, *(queued(name, rank) for rank, name in enumerate("abcd")))
        await rival.begin("select 1 from ff_exec_core where execution_id in ('a', 'c') for update")

        async with asyncio.timeout(5):
            claimed = await pg.claim_rows(claim_request(2))

        assert [row.execution_id for row, _ in claimed.rows] == ["b", "d"]

    async def test_reads_further_if_others_have_locked_all_rows_it_read(self, pg: PostgresStore, rival: Rival) -> None:
        await insert_queued(pg, *(queued(f"{rank:02}", rank) for rank in range(30)))
        await rival.begin("select 1 from ff_exec_core where rank < 7 for update")

        claimed = await pg.claim_rows(claim_request(3))

        assert [row.rank for row, _ in claimed.rows] == [7, 8, 9]

    async def test_uses_each_lease_id_once_if_it_reads_twice(self, pg: PostgresStore, rival: Rival) -> None:
        await insert_queued(pg, *(queued(f"{rank:02}", rank) for rank in range(30)))
        await rival.begin("select 1 from ff_exec_core where rank between 1 and 8 for update")
        request = claim_request(4)

        claimed = await pg.claim_rows(request)

        assert [row.rank for row, _ in claimed.rows] == [0, 9, 10, 11]
        assert sorted(row.lease_id or "" for row, _ in claimed.rows) == sorted(
            ids.lease_id for ids in request.lease_ids
        )

    @pytest.mark.parametrize("queues", [1, 3])
    async def test_says_if_others_have_locked_all_rows(self, pg: PostgresStore, rival: Rival, queues: int) -> None:
        names = [QueueKey("mail", fairness_key=str(number)) for number in range(queues)]
        await insert_queued(pg, queued("a", 0, line=names[0]))
        await rival.begin("select 1 from ff_exec_core for update")
        locked = await pg.claim_rows(claim_request(2, *names))
        await rival.end("rollback")
        unlocked, none_left = [await pg.claim_rows(claim_request(2, *names, prefix=name)) for name in ("b-", "c-")]

        assert [(len(one.rows), one.has_locked) for one in (locked, unlocked, none_left)] == [
            (0, True),
            (1, False),
            (0, False),
        ]

    async def test_is_sent_again_when_the_transaction_that_locked_all_rows_has_ended(
        self, pg: PostgresStore, rival: Rival, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = Engine(pg, minter=SeededMinter(1), settings=Settings(dispatch=False))
        run = await new_execution(engine, "mail")
        claim_rows = pg.claim_rows

        async def claim_and_end_rival(request: ClaimRequest) -> ClaimedRows:
            claimed = await claim_rows(request)
            if claimed.has_locked:
                await rival.end("rollback")
            return claimed

        monkeypatch.setattr(pg, "claim_rows", claim_and_end_rival)
        await rival.begin("select 1 from ff_exec_core for update")
        claimed = await claim_one(engine, "mail", worker_id="worker", worker_instance_id="worker-1")
        assert claimed.execution_id == run

    async def test_does_not_wait_for_another_claim(self, pg: PostgresStore, rival: Rival) -> None:
        await insert_queued(pg, queued("a", 0), queued("b", 1))
        await rival.begin(
            "insert into ff_batch (batch_id, at, events) select nextval('ff_batch_batch_id_seq') + 1, 0, '{}'"
        )
        first = asyncio.create_task(pg.claim_rows(claim_request(1, prefix="first-")))
        await rival.blocks()  # It has claimed "a" and waits to emit: a rival has the number of its batch.

        async with asyncio.timeout(5):
            second = await pg.claim_rows(claim_request(1, prefix="second-"))
        await rival.end("rollback")

        rows = [claimed.rows for claimed in (await first, second)]
        assert [row.execution_id for ((row, _),) in rows] == ["a", "b"]


async def test_a_deadlock_retries_the_batch(pg: PostgresStore, rival: Rival, clock: ManualClock) -> None:
    revision = await two_rows(pg)
    await rival.connection.execute("set deadlock_timeout = '20s'")  # so that the store is the deadlock victim
    await rival.begin("select 1 from ff_exec_core where execution_id = 'b' for update")
    both = change(set_priority("a", 5), set_priority("b", 5), guards=[seen("a", revision), seen("b", revision)])
    commit = await rival.start_blocked(pg.commit([both]))

    await rival.connection.execute("select 1 from ff_exec_core where execution_id = 'a' for update")
    await rival.end("rollback")

    assert await commit == [clock.now]
    assert (await one(pg, Execution, "b")).priority == 5


async def test_a_cancelled_call_leaves_no_unusable_connection_behind(
    database: str, rival: Rival, clock: ManualClock
) -> None:
    store = PostgresStore(database, clock, pool_size=1)
    revision = await write(store, Insert(execution("a")))
    await rival.begin("select 1 from ff_exec_core where execution_id = 'a' for update")
    commit = await rival.start_blocked(store.commit([change(set_priority("a", 5), guards=[seen("a", revision)])]))

    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit

    async with asyncio.timeout(5):
        assert await store.ping() == clock.now
    await rival.end("rollback")
    assert await store.commit([Change((), (Insert(execution("b")),), id=77)]) == [clock.now]
    await store.close()


async def test_a_cancelled_close_does_not_affect_a_concurrent_one(pg: PostgresStore, rival: Rival) -> None:
    await write(pg, Insert(execution("a")))
    await rival.begin("update ff_exec_core set completed_at = 1 where execution_id = 'a'")

    closing = change(Patch(Execution, ("a",), {"completed_at": NOW}, unless_set="completed_at"))
    assert await rival.answer_after_commit(pg.commit([closing])) != [None]
    assert (await one(pg, Execution, "a")).completed_at == 1
