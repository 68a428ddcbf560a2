"""Claims by plan, lists of blocked work and scans of due rows beside many dead index entries: each read is bounded, and
some reads find everything.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.claiming import ready_queues
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.limits import Reserved
from flowfabric.model.execution import Execution, IdempotencyKey, QueueKey
from flowfabric.model.flow import Flow
from flowfabric.model.gate import ChildCompletion
from flowfabric.model.limits.budget import Budget, BudgetDimension, BudgetReservation, UsageKey
from flowfabric.model.limits.quota import QuotaPolicy, QuotaRequest, QuotaSlot
from flowfabric.model.outbox import OutboxMessage
from flowfabric.model.scheduling.worker import RegisteredWorker, WorkerEvent
from flowfabric.model.suspension import Suspension, Waitpoint
from flowfabric.stores.postgres import PostgresStore, queue_reads
from flowfabric.stores.postgres.dead_entries import BLOAT_THRESHOLD, ENTRIES_PER_S, SLICE_ENTRIES, BloatedQueue
from flowfabric.stores.postgres.queue_ids import queue_id
from flowfabric.stores.queries import Scan, Where
from tests.stores.dead_rows import PAGES, Meter, connected, insert_rows, keyed, leave_dead, update_often, vacuum
from tests.stores.sample_rows import insert_queued, queued

pytestmark = pytest.mark.slow

DEAD = 6000  # dead entries of each queue; the second measurement has four times as many
DEAD_DUE = 3000  # the same of a column of instants
MOST = BLOAT_THRESHOLD + 2 * SLICE_ENTRIES  # entries of one read of a queue
WARM_UP = 40  # the number of reads after which slices are small
ROUNDS = 60  # more reads than a round has
BATCH = 5  # executions with limits that run together
MOST_LIMITED = 1000  # entries of their creation, claim and completion
LIMIT = "0c000000-0000-4000-8000-000000000001"
RATE = "0c000000-0000-4000-8000-000000000002"
DUE = [
    (Execution, "lease_expires_at"),
    (Execution, "delay_until"),
    (Execution, "attempt_timeout_at"),
    (Execution, "deadline_at"),
    (Execution, "purge_at"),
    (Suspension, "due_at"),
    (Waitpoint, "pending_until"),
    (ChildCompletion, "due_at"),
    (Budget, "next_reset_at"),
    (Budget, "lapse_at"),
    (RegisteredWorker, "lapses_at"),
    (WorkerEvent, "expires_at"),
    (OutboxMessage, "due_at"),
    (IdempotencyKey, "expires_at"),
    (UsageKey, "expires_at"),
    (QuotaRequest, "expires_at"),
    (Flow, "purge_check_at"),
]


@pytest.fixture(autouse=True)
async def vacuumed(database: str) -> AsyncIterator[None]:
    """No dead entries of earlier tests, and none for later ones."""
    await vacuum(database)
    yield
    await vacuum(database)


@pytest.fixture
async def snapshot_holder(vacuumed: None, database: str) -> AsyncIterator[None]:
    """A connection with an idle transaction that holds a snapshot."""
    async with connected(database) as connection:
        await connection.execute("begin isolation level repeatable read")
        await connection.fetch("select count(*) from ff_exec_core")
        yield


@pytest.fixture
async def engine(pg: PostgresStore) -> Engine:
    return Engine(pg, minter=SeededMinter(1))


@pytest.fixture
def meter(pg: PostgresStore) -> Meter:
    return Meter(pg)


async def claim(engine: Engine, count: int) -> list[str]:
    claimed = await engine.claim_many("mail", count, worker_id="w", worker_instance_id="w-1", lease_ttl_ms=10_000_000)
    return [one.execution_id for one in claimed]


async def dead_work(pg: PostgresStore, clock: ManualClock, queues: list[QueueKey]) -> None:
    """Leave `DEAD` entries of deleted work in each queue, a millisecond apart."""
    await pg._queue_ids.register(queues)
    for queue in queues:
        rank = f"{clock.now} + n"
        await leave_dead(pg._pool.dsn, Execution, DEAD, line=str(queue_id(queue)), rank=rank, lane_id="'mail'")
    clock.advance_ms(DEAD + 1000)


class Claims:
    """New work in some queues that is claimed at once."""

    def __init__(self, engine: Engine, clock: ManualClock, queues: list[QueueKey], meter: Meter) -> None:
        self.engine, self.clock, self.queues, self.meter = engine, clock, queues, meter
        self.count = 0

    async def costs(self, count: int) -> list[int]:
        return [await self.meter.cost(self.one()) for _ in range(count)]

    async def warm_up(self) -> None:
        for _ in range(WARM_UP):
            await self.one()

    async def one(self) -> None:
        self.clock.advance_ms(300)
        self.count += 1
        store: Any = self.engine.store
        names = [f"{self.count:06}-{place}" for place, _ in enumerate(self.queues)]
        rows = zip(names, self.queues, strict=True)
        await insert_queued(store, *(queued(name, self.clock.now, line=queue) for name, queue in rows))
        refill_read_quota(store)
        assert sorted(await claim(self.engine, len(names))) == names


def refill_read_quota(pg: PostgresStore) -> None:
    """Let time pass as far as it limits the reads of a process."""
    pg._dead_entries._allowance = ENTRIES_PER_S


async def read_until_found(pg: PostgresStore, read: Callable[[], Awaitable[list[str]]], wanted: str) -> None:
    """Read until the row is found, or a whole round has not found it."""
    found = list[str]()
    for _ in range(ROUNDS):
        refill_read_quota(pg)
        found = await read()
        if wanted in found:
            return
    raise AssertionError(f"{wanted} was not found, but {found}")


@pytest.mark.parametrize("decided", [False, True], ids=["fairness keys", "work with limits or ended leases"])
async def test_a_claim_by_plan_steps_over_a_bounded_number_of_entries(
    pg: PostgresStore, clock: ManualClock, engine: Engine, snapshot_holder: None, meter: Meter, decided: bool
) -> None:
    queues = [msgspec.structs.replace(queue, guarded=decided) for queue in keyed("a", "b", "c")]
    most = (1 + 2 * len(queues)) * MOST
    claims = Claims(engine, clock, queues, meter)
    await dead_work(pg, clock, queues)
    await claims.warm_up()
    before = await claims.costs(10)
    for _ in range(3):
        await dead_work(pg, clock, queues)
    await claims.warm_up()
    after = await claims.costs(10)

    assert max(before) < most
    assert max(after) < most

    early = queued("returned", 1_600_000_000_000, line=queues[1])
    await insert_queued(pg, early)
    await read_until_found(pg, lambda: claim(engine, 1), "returned")


async def test_queues_with_work_are_found_in_a_bounded_number_of_entries(
    pg: PostgresStore, clock: ManualClock, snapshot_holder: None, meter: Meter
) -> None:
    queues = keyed("a", "b", "c")
    await dead_work(pg, clock, queues)

    async def look() -> list[str]:
        refill_read_quota(pg)
        return [queue.fairness_key for queue in await pg.nonempty_queues("mail")]

    await insert_queued(pg, queued("new", clock.now, line=queues[2]))
    for _ in range(WARM_UP):
        assert await look() == ["c"]
    before = max([await meter.cost(look()) for _ in range(10)])
    for _ in range(3):
        await dead_work(pg, clock, queues)
    for _ in range(WARM_UP):
        await look()
    after = max([await meter.cost(look()) for _ in range(10)])

    assert before < 2 * MOST
    assert after < 2 * MOST
    await insert_queued(pg, queued("returned", 1_600_000_000_000, line=queues[0]))
    await read_until_found(pg, look, "a")


async def test_claims_among_very_many_queues_step_over_a_bounded_number_of_entries(
    pg: PostgresStore, clock: ManualClock, engine: Engine, snapshot_holder: None, meter: Meter
) -> None:
    """With a fairness key for each user, the store searches for the queues that have work."""
    queues = keyed(*(f"user-{number:03}" for number in range(ready_queues.MAX_QUEUES_PER_CLAIM + 6)))
    await pg._queue_ids.register(queues)
    await dead_work(pg, clock, queues[:2])
    claims = Claims(engine, clock, queues[:3], meter)
    await claims.warm_up()
    before = await claims.costs(10)
    for _ in range(3):
        await dead_work(pg, clock, queues[:2])
    await claims.warm_up()
    after = await claims.costs(10)

    assert max(before) < 10 * MOST
    assert max(after) < 10 * MOST
    await insert_queued(pg, queued("returned", 1_600_000_000_000, line=queues[0]))
    await read_until_found(pg, lambda: claim(engine, 1), "returned")


async def test_blocked_work_is_listed_in_a_bounded_number_of_entries(
    pg: PostgresStore, clock: ManualClock, snapshot_holder: None, meter: Meter
) -> None:
    where = (Where("blocked_on", "in", ("quota:q", "asleep:q")),)
    scan = Scan(Execution, where, ("rank", "execution_id"), limit=10, limit_by="blocked_on", partial=True)

    async def listed() -> list[str]:
        refill_read_quota(pg)
        return [row.execution_id for row in await pg.scan(scan)]

    async def dead(times: int) -> int:
        for _ in range(times):
            rank = f"{clock.now} + n"
            await leave_dead(pg._pool.dsn, Execution, DEAD, blocked_on="'quota:q'", rank=rank)
            clock.advance_ms(DEAD + 1000)
        await insert_queued(pg, queued(f"new-{times}", clock.now, line=None, blocked_on="quota:q"))
        for _ in range(WARM_UP):
            assert f"new-{times}" in await listed()
        return max([await meter.cost(listed()) for _ in range(10)])

    before, after = await dead(1), await dead(3)

    assert before < 2 * MOST
    assert after < 2 * MOST
    await insert_queued(pg, queued("returned", 1_600_000_000_000, line=None, blocked_on="quota:q"))
    await read_until_found(pg, listed, "returned")


@pytest.mark.parametrize(("row", "column"), DUE, ids=[f"{row.__name__}-{column}" for row, column in DUE])
async def test_due_rows_are_found_in_a_bounded_number_of_entries(
    pg: PostgresStore, clock: ManualClock, snapshot_holder: None, meter: Meter, row: Any, column: str
) -> None:
    dsn = pg._pool.dsn

    async def look() -> list[Any]:
        refill_read_quota(pg)
        return [getattr(one, column) for one in (await pg.due(row, column, limit=10)).rows]

    async def dead(times: int) -> int:
        for _ in range(times):
            await leave_dead(dsn, row, DEAD_DUE, **{column: f"{clock.now} + n"})
            clock.advance_ms(DEAD_DUE + 1000)
        for _ in range(WARM_UP):
            await look()
        return max([await meter.cost(look()) for _ in range(10)])

    assert DEAD_DUE > MOST, "otherwise the bound shows nothing"
    before, after = await dead(1), await dead(3)

    assert before < MOST
    assert after < MOST
    old, new = 1_600_000_000_000, clock.now - 5
    await insert_rows(dsn, row, "live-", 1, **{column: f"{new}"})
    assert await look() == [new]
    await insert_rows(dsn, row, "old-", 1, **{column: f"{old}"})
    found = list[int]()
    for _ in range(ROUNDS):
        found += await look()
    assert {old, new} == {*found}


@pytest.mark.parametrize("by_list", [False, True], ids=["the first rows of each list", "list by list"])
async def test_lists_of_blocked_work_by_prefix_are_read_in_a_bounded_number_of_entries(
    pg: PostgresStore, clock: ManualClock, snapshot_holder: None, meter: Meter, by_list: bool
) -> None:
    where = (Where("blocked_on", "starts", "quota:q#"),)
    scan = Scan(Execution, where, ("rank", "execution_id"), limit=10, limit_by="blocked_on", max_values=9, partial=True)
    if by_list:
        scan = Scan(Execution, where, ("blocked_on", "rank", "execution_id"), limit=100, partial=True)

    async def listed() -> list[str]:
        refill_read_quota(pg)
        return [row.execution_id for row in await pg.scan(scan)]

    async def dead(times: int) -> int:
        for name in ("a", "b", "c"):
            await insert_queued(pg, queued(f"dead-{times}-{name}", clock.now, line=None, blocked_on=f"quota:q#{name}"))
        await listed()  # names are learned from rows
        for name in ("a", "b", "c") * times:
            await leave_dead(pg._pool.dsn, Execution, DEAD, blocked_on=f"'quota:q#{name}'", rank=f"{clock.now} + n")
            clock.advance_ms(DEAD + 1000)
        await insert_queued(pg, queued(f"new-{times}", clock.now, line=None, blocked_on="quota:q#b"))
        for _ in range(2 * WARM_UP):
            assert f"new-{times}" in await listed()
        return max([await meter.cost(listed()) for _ in range(10)])

    before, after = await dead(1), await dead(3)

    assert before < 2 * MOST
    assert after < 2 * MOST
    await insert_queued(pg, queued("returned", 1_600_000_000_000, line=None, blocked_on="quota:q#c"))
    await read_until_found(pg, listed, "returned")
    await insert_queued(pg, queued("unknown", clock.now, line=None, blocked_on="quota:q#unknown"))
    await read_until_found(pg, listed, "unknown")


async def test_the_search_for_queues_with_work_does_not_grow_with_the_number_of_floors(
    pg: PostgresStore, clock: ManualClock, snapshot_holder: None, meter: Meter
) -> None:
    async def searches(users: int) -> int:
        """Return the ranges that one search reads if so many queues have floors."""
        queues = keyed(*(f"user-{number:04}" for number in range(users)))
        await pg._queue_ids.register(queues)
        for queue in queues:
            pg._dead_entries._queues[queue_id(queue)] = BloatedQueue((clock.now - 1000, ""), 100)
        last = queues[-1]
        found, ranges = set[str](), list[int]()
        read = pg._queue_reads._pool.read

        async def counted(work: Any) -> Any:
            return await read(lambda connection: work(Counted(connection, ranges)))

        pg._queue_reads._pool.read = counted  # type: ignore[method-assign]
        await insert_queued(pg, queued(f"new-{users}", clock.now, line=last))
        most = 0
        for _ in range(users // queue_reads.MAX_TRACKED + 2):
            ranges.clear()
            found |= {queue.fairness_key for queue in await pg.nonempty_queues("mail")}
            most = max(most, sum(ranges))
        pg._queue_reads._pool.read = read  # type: ignore[method-assign]
        assert last.fairness_key in found, "the next call goes on where the last one stopped"
        return most

    few, many = await searches(300), await searches(1200)

    assert many <= max(few, 3 * queue_reads.MAX_WINDOWS * queue_reads.MAX_TRACKED)


class LimitedWork:
    """Executions with a limit that are created, claimed and completed."""

    def __init__(self, engine: Engine, clock: ManualClock, meter: Meter, policy: dict[str, Any]) -> None:
        self.engine, self.clock, self.meter, self.policy = engine, clock, meter, policy

    async def costs(self, count: int) -> list[int]:
        return [await self.meter.cost(self.batch()) for _ in range(count)]

    async def batch(self) -> None:
        """Run as many executions as one claim returns, so that their slots are released by one statement."""
        engine = self.engine
        self.clock.advance_ms(300)
        for _ in range(BATCH):
            await engine.create_execution(
                execution_id=engine.new_execution_id("mail"),
                namespace="default",
                lane_id="mail",
                execution_kind="k",
                input_payload=b"",
                policy=self.policy,
            )
        claimed = await engine.claim_admitted("mail", BATCH, worker_id="w", worker_instance_id="w-1")
        assert len(claimed) == BATCH
        if "budget_ids" in self.policy:
            for one in claimed:
                reserved = await engine.reserve_budget(LIMIT, one.execution_id, {"usd": 1}, ttl_ms=10_000)
                assert isinstance(reserved, Reserved)
                await engine.settle_budget(LIMIT, one.execution_id, reserved.reservation_id, {"usd": 1})
        await engine.complete_many([(one.handle, b"") for one in claimed])
        await engine.outbox.wait_for_deliveries()


@pytest.mark.parametrize(("policy", "rate", "cap"), [(LIMIT, 0, 10), (RATE, 1000, 0)], ids=["concurrency", "rate"])
async def test_work_with_a_quota_steps_over_a_bounded_number_of_entries(
    pg: PostgresStore,
    clock: ManualClock,
    engine: Engine,
    snapshot_holder: None,
    meter: Meter,
    policy: str,
    rate: int,
    cap: int,
) -> None:
    await engine.create_quota_policy(policy, window_seconds=2, max_requests_per_window=rate, max_concurrent=cap)
    work = LimitedWork(engine, clock, meter, {"quota_policy_ids": [policy]})
    owner = {"quota_policy_id": f"'{policy}'", "namespace": "'default'"}

    async def dead(times: int) -> int:
        for _ in range(times):
            await leave_dead(pg._pool.dsn, QuotaSlot, DEAD, **owner)
            entry = {"dimension": "'default'", "admitted_at": f"{clock.now} + n", "expires_at": f"{clock.now} + n"}
            await leave_dead(pg._pool.dsn, QuotaRequest, DEAD, **owner, **entry)
            clock.advance_ms(DEAD + 3000)
        return max(await work.costs(10))

    assert await dead(1) < MOST_LIMITED
    assert await dead(3) < MOST_LIMITED


async def test_work_with_a_budget_steps_over_a_bounded_number_of_entries(
    pg: PostgresStore, clock: ManualClock, engine: Engine, snapshot_holder: None, meter: Meter
) -> None:
    await engine.create_budget(LIMIT, dimensions=["usd"], hard_limits=[10**9], soft_limits=[0])
    work = LimitedWork(engine, clock, meter, {"budget_ids": [LIMIT]})
    owner = {"budget_id": f"'{LIMIT}'", "namespace": "'default'", "dimension": "'usd'"}

    async def dead(times: int) -> int:
        for _ in range(times):
            await leave_dead(pg._pool.dsn, BudgetReservation, DEAD, **owner)
        return max(await work.costs(10))

    assert await dead(1) < MOST_LIMITED
    assert await dead(3) < MOST_LIMITED


@pytest.mark.parametrize("kind", ["quota", "budget"])
async def test_work_with_a_limit_reads_few_of_the_dead_versions_of_its_rows(
    pg: PostgresStore, clock: ManualClock, engine: Engine, snapshot_holder: None, kind: str
) -> None:
    """Every change of a limit leaves a version of its root, and of the dimensions that it counts in."""
    if kind == "quota":
        await engine.create_quota_policy(LIMIT, window_seconds=2, max_requests_per_window=1000, max_concurrent=10)
        policy: dict[str, Any] = {"quota_policy_ids": [LIMIT]}
        updated: list[tuple[Any, str]] = [(QuotaPolicy, "created_at")]
    else:
        await engine.create_budget(LIMIT, dimensions=["usd", "token"], hard_limits=[10**9] * 2, soft_limits=[0] * 2)
        policy = {"budget_ids": [LIMIT]}
        updated = [(Budget, "last_updated_at"), (BudgetDimension, "hard_limit")]
    work = LimitedWork(engine, clock, Meter(pg, PAGES), policy)
    before = min(await work.costs(5))
    for row, column in updated:
        await update_often(pg._pool.dsn, row, column, DEAD)
    # The work leaves versions of its own; reading all of these costs more than twice as many pages.
    few_pages = DEAD // 20

    after = min(await work.costs(5))

    assert after < before + few_pages


class Counted:
    """A connection that notes how many ranges of an index each statement reads."""

    def __init__(self, connection: Any, ranges: list[int]) -> None:
        self._connection, self._ranges = connection, ranges

    async def fetch(self, statement: str, *arguments: Any) -> Any:
        self._note(arguments)
        return await self._connection.fetch(statement, *arguments)

    async def fetchrow(self, statement: str, *arguments: Any) -> Any:
        self._note(arguments)
        return await self._connection.fetchrow(statement, *arguments)

    def _note(self, arguments: tuple[Any, ...]) -> None:
        self._ranges.append(max((len(one) for one in arguments if isinstance(one, list)), default=0))
