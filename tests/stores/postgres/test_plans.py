"""Plans on a large table: what the hot statements may touch, with and without the planner settings of the store.

Plans are examined as the server keeps them: made once, without the values (`generic`), since that is what hundreds of
calls of one statement use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from flowfabric.model.change import Change, Guard, Insert, LeaseCheck, LeaseRequirement, Patch, Upsert, absent
from flowfabric.model.event import Topic
from flowfabric.model.execution import Attempt, Execution, Payload, QueueKey, Result
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.states import AttemptRecordState, AttemptType
from flowfabric.rules.execution.lease import RENEWAL
from flowfabric.stores.claims import LeaseRef
from flowfabric.stores.postgres import claim as taking
from flowfabric.stores.postgres import event_log, reads
from flowfabric.stores.postgres.commit.claim import plan_claim
from flowfabric.stores.postgres.commit.parameters import ParameterShapes
from flowfabric.stores.postgres.commit.plan import CommitPlan
from flowfabric.stores.postgres.commit.statement import commit
from flowfabric.stores.postgres.migrator import migrations
from flowfabric.stores.postgres.pool import SESSION_SETTINGS
from flowfabric.stores.postgres.queue_reads import NONEMPTY_QUEUES
from flowfabric.stores.queries import GroupedCount, Read, Scan, Search, Where
from tests.conftest import migrate
from tests.servers import postgres
from tests.stores.sample_rows import change, claim_request, event, execution, payload

pytestmark = pytest.mark.slow

WAITING, FINISHED = 300_000, 200_000
FILL = f"""
insert into ff_line (line, digest, lane_id, required, fairness_key, fairness_weight, decided)
values (1, '1', 'mail', '', '', 1, false), (2, '2', 'mail', 'gpu', '', 1, false);
insert into ff_exec_core (execution_id, partition, namespace, lane_id, priority, created_at, last_transition_at,
    last_mutation_at, lifecycle_phase, ownership_state, eligibility_state, blocking_reason, terminal_outcome,
    attempt_state, public_state, total_attempt_count, retry_count, replay_count, lease_reclaim_count, lease_epoch,
    line, rank, next_type, revision, purge_at, lease_id, lease_expires_at)
select md5(n::text), 7, 'default', 'mail', 0, n, n, n, 1, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 1,
       case when n <= {WAITING} then 1 + n % 2 end, n, 0, 1, case when n > {WAITING} then n end, 'l',
       case when n % 1000 = 0 then n end
  from generate_series(1, {WAITING + FINISHED}) n;
insert into ff_payload (execution_id, execution_kind, creator_identity)
select execution_id, 'task', 'me' from ff_exec_core;
insert into ff_result (execution_id, payload) select execution_id, 'done' from ff_exec_core where line is null;
insert into ff_batch (at, position, events)
select n, nullif(n, 20001), array(
       select (jsonb_populate_record(null::ff_told, jsonb_build_object(
                'execution_id', md5(((10 * n + m) % 500)::text), 'namespace', 'default', 'lease', 'acquired')))
         from generate_series(0, 9) m)
  from generate_series(1, 20001) n;
insert into ff_told_in (batch_id, execution_id)
select b.batch_id, e.execution_id from ff_batch b cross join lateral unnest(b.events) e;
analyze;
"""


@pytest.fixture(scope="module")
def large() -> str:
    """A database of that size, made once for all processes; tests change nothing in it."""

    def fill(dsn: str) -> None:
        migrate(dsn)
        server.execute(FILL, urlsplit(dsn).path[1:])

    server = postgres()
    made_of = "".join(step.text for step in migrations()) + FILL
    return server.dsn(server.template(f"ff_large_{hashlib.sha256(made_of.encode()).hexdigest()[:12]}", fill))


@pytest.fixture(params=["as the store connects", "as a pooler connects"])
async def planner(large: str, request: pytest.FixtureRequest) -> AsyncIterator[Planner]:
    settings = (
        SESSION_SETTINGS if request.param == "as the store connects" else {"plan_cache_mode": "force_generic_plan"}
    )
    connection = await asyncpg.connect(large, server_settings=settings)
    yield Planner(connection)
    await connection.close()


LARGE = ("ff_exec_core", "ff_payload", "ff_result", "ff_told_in", "ff_batch")


class Planner:
    """Replaces a connection and explains the statements that it receives."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.plans: list[Any] = []

    async def fetch(self, sql: str, *values: Any) -> list[Any]:
        await self.explain(sql, len(values))
        return []

    async def fetchrow(self, sql: str, *values: Any) -> Any:
        await self.explain(sql, len(values))
        return {"now": 0, "yes": [], "numbered": 0, "news": False, "events": []}

    def is_in_transaction(self) -> bool:
        return True

    async def explain(self, sql: str, values: int) -> None:
        await self.connection.execute(f"prepare asked as {sql}")
        given = f"({', '.join(['null'] * values)})" if values else ""
        plan = await self.connection.fetchval(f"explain (format json) execute asked{given}")
        await self.connection.execute("deallocate asked")
        self.plans.append(json.loads(plan)[0]["Plan"])

    def scans(self) -> list[tuple[str, str, str | None]]:
        """Return kind, table and index of every scan of our large tables."""
        found: list[tuple[str, str, str | None]] = []

        def walk(node: Any) -> None:
            if node.get("Relation Name") in LARGE and node["Node Type"] != "ModifyTable":
                found.append((node["Node Type"], node["Relation Name"], node.get("Index Name")))
                assert "Seq Scan" not in node["Node Type"], node
                by_key = {"Index Cond", "Recheck Cond", "TID Cond"} & node.keys()
                assert by_key or node["Relation Name"] == "ff_batch", node
            for child in node.get("Plans", ()):
                walk(child)

        for plan in self.plans:
            walk(plan)
        return found


LINES = (QueueKey("mail"), QueueKey("mail", "gpu"))


def numbers(line: QueueKey) -> int:
    return LINES.index(line) + 1


async def test_a_claim_from_one_queue_walks_its_index_and_updates_the_locked_rows(planner: Planner) -> None:
    request = claim_request(100, LINES[0])

    await taking.claim_rows(planner, request, request.lease_ids, [1], 200, None)

    assert planner.scans() == [
        ("Index Scan", "ff_exec_core", "ff_exec_core_line"),
        ("Tid Scan", "ff_exec_core", None),
        ("Index Scan", "ff_payload", "ff_payload_pkey"),
        ("Index Scan", "ff_exec_core", "ff_exec_core_line"),  # only executed if nothing was locked
    ]
    assert '"e.rank"' not in json.dumps(planner.plans)  # The queue is not sorted: the index has it in order.


async def test_a_claim_walks_the_queue_index(planner: Planner) -> None:
    request = claim_request(100, *LINES)

    await taking.claim_rows(planner, request, request.lease_ids, [1, 2], 200, None)

    assert planner.scans() == [
        ("Index Scan", "ff_exec_core", "ff_exec_core_line"),
        ("Index Scan", "ff_exec_core", planner.scans()[1][2]),
        ("Tid Scan", "ff_exec_core", None),
        ("Index Scan", "ff_payload", "ff_payload_pkey"),
    ]


async def test_a_claim_from_many_queues_walks_the_queue_index(planner: Planner) -> None:
    request = claim_request(100, *(QueueKey("mail", f"{number}") for number in range(taking.MANY_QUEUES + 1)))

    await taking.claim_rows(planner, request, request.lease_ids, list(range(taking.MANY_QUEUES + 1)), 200, None)

    assert [index for _, _, index in planner.scans()][:2] == ["ff_exec_core_line"] * 2


@pytest.mark.parametrize("lines", [[1], [1, 2]], ids=["one line", "two lines"])
async def test_a_claim_reads_few_pages_whatever_the_table_holds(planner: Planner, lines: list[int]) -> None:
    request = claim_request(100, *LINES)
    sql = taking.claim_statement(request, lines).sql

    class Analyst(Planner):
        async def fetch(self, sql: str, *values: Any) -> list[Any]:
            await self.connection.execute("begin")
            plan = await self.connection.fetchval(f"explain (analyze, buffers, format json) {sql}", *values)
            await self.connection.execute("rollback")
            self.plans.append(json.loads(plan)[0]["Plan"])
            return []

    analyst = Analyst(planner.connection)
    await taking.claim_rows(analyst, request, request.lease_ids, lines, 200, None)

    (plan,) = analyst.plans
    assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 50 * 100, sql


async def test_a_search_walks_the_index_of_creations(planner: Planner) -> None:
    where = (Where("namespace", "=", "x"), Where("created_at", ">=", 5))
    search = Search(where, "mail", (9, "m"), 51, 2000)

    for statement, values in (
        reads.search_end_statement(search, numbers),
        reads.search_statement(search, (7, "a"), numbers),
    ):
        await planner.fetch(statement, *values)

    assert {index for _, _, index in planner.scans()} == {"ff_exec_core_created_at", "ff_payload_pkey"}
    assert '"Sort"' not in json.dumps(planner.plans)


async def test_queues_with_work_are_found_by_index_skips(planner: Planner) -> None:
    plan = await planner.connection.fetchval(
        f"explain (analyze, buffers, format json) {NONEMPTY_QUEUES}", None, [-1], [2**63 - 1], None
    )

    read = json.loads(plan)[0]["Plan"]
    assert read["Shared Hit Blocks"] + read["Shared Read Blocks"] < 100, plan


async def test_a_renewal_finds_its_rows_by_key(planner: Planner) -> None:
    await taking.renew(planner, [LeaseRef("a", 0, "x", "l", 1, 1000)], RENEWAL, None)

    assert {index for _, _, index in planner.scans()} == {"ff_exec_core_pkey"}


def finish(name: str) -> Change:
    attempt = Attempt(name, 0, "x", AttemptType.INITIAL, AttemptRecordState.ENDED_SUCCESS, 1, "l", 1, "w", "wi")
    return change(
        Patch(Execution, (name,), {"completed_at": NOW, "purge_at": FromNow(5), "lease_expires_at": None}),
        Insert(attempt),
        Upsert(Result(name, name.encode())),
        guards=[Guard(Execution, (name,), 1, LeaseCheck(LeaseRequirement.LIVE, "l", 1))],
        events=[event(name, lease="released")],
    )


def create(name: str) -> Change:
    return change(Insert(execution(name)), Insert(payload(name)), guards=[absent(Execution, name)])


def relied_on(name: str) -> Change:
    return change(Upsert(Result(name, b"")), guards=[Guard(Execution, (name,), 1)])


@pytest.mark.parametrize("make", [finish, create, relied_on])
@pytest.mark.parametrize("many", [1, 300])
async def test_a_commit_finds_its_rows_by_key(planner: Planner, make: Any, many: int) -> None:
    batch = CommitPlan([make(f"{number:03}") for number in range(many)], ParameterShapes(numbers))

    await commit(planner, batch, None)

    assert {index for _, _, index in planner.scans()} == {"ff_exec_core_pkey"}


async def test_a_commit_and_claim_reads_each_queue_once(planner: Planner) -> None:
    def freed(name: str) -> Change:
        return change(Patch(Execution, (name,), {"line": LINES[0]}), guards=[Guard(Execution, (name,), 1)])

    changes = [freed(f"{number:03}") for number in range(16)]
    batch = CommitPlan(changes, ParameterShapes(numbers))
    batch.claim = plan_claim(changes, batch.rounds[0], claim_request(16, *LINES), [1, 2])
    assert batch.claim is not None

    await commit(planner, batch, None)

    scans = [index for _, _, index in planner.scans()]
    assert scans.count("ff_exec_core_line") == 1
    assert set(scans) == {"ff_exec_core_line", "ff_exec_core_pkey", "ff_payload_pkey"}


@pytest.mark.parametrize("column", ["lease_expires_at", "purge_at", "delay_until"])
async def test_due_rows_are_found_by_the_index_of_their_column(planner: Planner, column: str) -> None:
    where = (Where("namespace", "=", "default"),)
    sql, values = reads.due_statement(Execution, column, 50, where, None, numbers)

    await planner.explain(sql, len(values))

    assert {index for _, _, index in planner.scans()} == {f"ff_exec_core_{column}"}


@pytest.mark.parametrize("each", [None, LINES])
async def test_counts_use_an_index(planner: Planner, each: tuple[QueueKey, ...] | None) -> None:
    held = GroupedCount(Execution, "lease_expires_at", ("lane_id",), 100)
    line = GroupedCount(Execution, "line", ("lane_id",), 100, values=each)
    for tally, first in ((held, "ff_exec_core_lease_expires_at"), (line, "ff_exec_core_line")):
        sql, values = reads.count_statement(tally, numbers)
        planner.plans.clear()

        await planner.explain(sql, len(values))

        # An index that holds only rows with a value is read from its beginning, up to the limit: there is nothing to
        # compare with, which `scans` would require.
        # to compare with, which `scans` would ask for.
        plan = json.dumps(planner.plans)
        assert f'"{first}"' in plan
        assert '"Seq Scan"' not in plan


async def test_a_load_finds_its_rows_by_key(planner: Planner) -> None:
    await reads.fetch_rows(planner, [Read(Execution, ("a",)), Read(Payload, ("a",)), Read(Result, ("a",))], None)

    assert {index for _, _, index in planner.scans()} == {"ff_exec_core_pkey", "ff_payload_pkey", "ff_result_pkey"}


async def test_a_load_of_many_finds_its_rows_by_key(planner: Planner) -> None:
    await reads.fetch_rows(planner, [Read(Execution, (f"{number}",)) for number in range(reads.MANY_READS)], None)

    assert {index for _, _, index in planner.scans()} == {"ff_exec_core_pkey"}


async def test_the_feed_walks_its_batches_in_order(planner: Planner) -> None:
    await planner.explain(event_log.statement("read_events", Topic.LEASE), 4)

    assert {index for _, _, index in planner.scans()} == {"ff_batch_position", "ff_batch_unnumbered"}
    # A plan with a sort would read all batches of a window for a short page.
    assert '"Sort"' not in json.dumps(planner.plans)


async def test_a_history_follows_the_pointers_of_its_execution(planner: Planner) -> None:
    await planner.explain(event_log.statement("history", Topic.LEASE), 3)

    assert {table for _, table, _ in planner.scans()} == {"ff_exec_core", "ff_told_in", "ff_batch"}
    assert all(f'"{index}"' in json.dumps(planner.plans) for index in ("ff_told_in_pkey", "ff_batch_pkey"))


async def test_pointers_to_trimmed_batches_are_found_by_key(planner: Planner) -> None:
    await planner.explain(event_log.TRIM, 3)
    await planner.explain(event_log.DELETE_POINTERS, 2)

    assert ("Tid Scan", "ff_told_in", None) in planner.scans()
    assert {index for kind, _, index in planner.scans() if "Index" in kind} >= {"ff_told_in_pkey", "ff_batch_position"}


async def test_rows_with_a_key_prefix_are_an_index_range(planner: Planner) -> None:
    one = Scan(Execution, (Where("execution_id", "starts", "1a"),), ("execution_id",), limit=3)
    each = Scan(Execution, (Where("execution_id", "starts", ("1a", "2")),), limit=3, limit_by="execution_id")

    for scan in (one, each):
        sql, values = reads.scan_statement(scan, lambda line: 1)
        await planner.fetch(sql, *values)

    assert planner.scans() == [("Index Scan", "ff_exec_core", "ff_exec_core_pkey")] * 2
    conditions = [json.dumps(plan) for plan in planner.plans]
    assert all(" < " in text.partition('"Index Cond"')[2] for text in conditions), "both ends of the range"


async def test_the_lists_of_a_limit_are_found_by_one_index_search_each(planner: Planner) -> None:
    where = (Where("blocked_on", "starts", "quota:1#"), Where("blocked_on", ">", "quota:1#a"))
    sql, values = reads.scan_statement(
        Scan(Execution, where, ("rank",), limit=1, limit_by="blocked_on", max_values=9), lambda line: 1
    )

    await planner.fetch(sql, *values)

    assert {(table, index) for _, table, index in planner.scans() if table == "ff_exec_core"} == {
        ("ff_exec_core", "ff_exec_core_blocked_on")
    }
