"""Ready queues on Postgres: ids that follow from keys, and rows that are restored when they are lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import takewhile

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.model.change import Delete, Insert
from flowfabric.model.execution import MISSING_QUEUE, Execution, QueueKey, Result
from flowfabric.stores.postgres import PostgresStore, queue_ids
from flowfabric.stores.postgres.migrator import migrations
from flowfabric.stores.postgres.queue_ids import queue_id
from flowfabric.stores.verdicts import Unstorable
from tests.conftest import Rival
from tests.stores.postgres.old_database import old_database
from tests.stores.sample_rows import MAIL, change, claim_request, insert_queued, one, queued


async def test_a_queue_id_depends_on_the_key_alone(pg: PostgresStore, rival: Rival) -> None:
    await insert_queued(pg, queued("a"))

    # Rows of every database hold such ids: the function must not change.
    assert [row[0] for row in await rival.fetch("select line from ff_line")] == [4206559179369900722]
    assert queue_id(MAIL) == 4206559179369900722


@pytest.mark.parametrize("cached", [True, False], ids=["own sessions", "behind a pooler"])
async def test_a_commit_restores_the_row_of_a_queue_that_was_lost_without_a_broken_connection(
    database: str, clock: ManualClock, rival: Rival, cached: bool
) -> None:
    store = PostgresStore(database, clock, statement_cache=cached)
    await insert_queued(store, queued("a"))
    await rival.connection.execute("delete from ff_line")

    await insert_queued(store, queued("b"))

    assert await store.queues("mail") == [MAIL]
    assert await store.executions_in_missing_queues(10) == []
    assert len((await store.claim_rows(claim_request(2, MAIL))).rows) == 2
    await store.close()


async def test_a_change_in_several_statements_restores_the_row_of_a_lost_queue(pg: PostgresStore, rival: Rival) -> None:
    await insert_queued(pg, queued("a"))
    await rival.connection.execute("delete from ff_line")

    made = change(Delete(Result, ("b",)), Insert(queued("b")), queues=(QueueKey("other"),))
    assert await pg.commit([made]) != [None]

    assert sorted(await pg.queues()) == [MAIL, QueueKey("other")]


async def test_queues_are_checked_again_after_a_connection_broke(pg: PostgresStore, rival: Rival) -> None:
    await insert_queued(pg, queued("a"))
    assert pg._queue_ids._checked
    await rival.connection.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and application_name = 'flowfabric'"
    )

    await pg.ping()

    assert not pg._queue_ids._checked


async def test_two_queues_with_one_id_are_refused(pg: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    await insert_queued(pg, queued("a"))
    monkeypatch.setattr(queue_ids, "queue_id", lambda line: queue_id(MAIL))

    [verdict] = await pg.commit([change(Insert(queued("b", line=QueueKey("other"))))])

    assert isinstance(verdict, Unstorable)
    assert "has the same id as" in str(verdict)
    assert await pg.queues() == [MAIL]


async def test_nothing_can_be_enqueued_in_a_missing_queue(pg: PostgresStore) -> None:
    verdicts = await pg.commit([change(Insert(queued("a", line=MISSING_QUEUE))), change(Insert(queued("b")))])

    assert [type(verdict) for verdict in verdicts] == [Unstorable, int]


class TestIdsOfASequence:
    """Before that migration a queue had the next number of a sequence."""

    OLD = """
    insert into ff_line (line, digest, lane_id, required, fairness_key, fairness_weight, decided)
    values (1, '{mail}', 'mail', '', '', 1, false), (2, '{sms}', 'sms', '', '', 1, false);
    insert into ff_exec_core (execution_id, partition, namespace, lane_id, priority, created_at, last_transition_at,
        last_mutation_at, lifecycle_phase, ownership_state, eligibility_state, blocking_reason, terminal_outcome,
        attempt_state, public_state, total_attempt_count, retry_count, replay_count, lease_reclaim_count, lease_epoch,
        line, rank, next_type, revision)
    select '{{fp:1}}:00000000-0000-4000-8000-00000000000' || n, 1, 'default', lane, 0, n, n, n,
           0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, line, n, 0, 1
      from (values (1, 'mail', 1), (2, 'sms', 2), (3, 'sms', 1), (4, 'mail', 77)) as old (n, lane, line);
    insert into ff_payload (execution_id, execution_kind, creator_identity)
    select execution_id, 'task', 'me' from ff_exec_core;
    """

    @pytest.fixture
    async def old_store(self, clock: ManualClock) -> AsyncIterator[PostgresStore]:
        """A store with two valid rows, one in the queue of another lane, and one whose queue is missing."""
        steps = takewhile(lambda step: step.name != "queue_numbers_and_feed_positions", migrations())
        digests = {lane: rf"\x{queue_ids._digest(QueueKey(lane)).hex()}" for lane in ("mail", "sms")}
        async with old_database("ff_numbers", steps) as (dsn, connection):
            await connection.execute(self.OLD.format(**digests))
            store = PostgresStore(dsn, clock)
            await store.open(migrate=True)
            yield store
            await store.close()

    def name(self, number: int) -> str:
        return f"{{fp:1}}:00000000-0000-4000-8000-00000000000{number}"

    async def test_become_those_of_the_keys(self, old_store: PostgresStore) -> None:
        assert (await one(old_store, Execution, self.name(1))).line == MAIL
        assert (await one(old_store, Execution, self.name(2))).line == QueueKey("sms")
        assert sorted(await old_store.queues()) == [MAIL, QueueKey("sms")]

    async def test_that_were_wrong_or_lost_are_found_and_repaired(self, old_store: PostgresStore) -> None:
        assert sorted(await old_store.executions_in_missing_queues(10)) == [self.name(3), self.name(4)]
        engine = Engine(old_store)

        assert (await engine.sweep_once("queue_reconciler")).processed == 2

        assert (await one(old_store, Execution, self.name(3))).line == QueueKey("sms")
        assert (await one(old_store, Execution, self.name(4))).line == MAIL
