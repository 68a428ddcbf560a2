"""Statements of the hot path find their rows by an index and in order, also in a large table."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest

from flowfabric.model.change import Insert
from flowfabric.model.event import Topic
from flowfabric.model.execution import Attempt, Execution, IdempotencyKey, Payload, QueueKey
from flowfabric.model.instant import FromNow
from flowfabric.model.suspension import Suspension
from flowfabric.rules.execution.lease import RENEWAL
from flowfabric.stores.claims import LeaseRef
from flowfabric.stores.port import Store
from flowfabric.stores.queries import GroupedCount, Read, Scan, Where
from flowfabric.stores.sqlite import SQLiteStore
from tests.stores.sample_rows import MAIL, change, claim_request, event, execution, payload, queued

LINES = (MAIL, QueueKey("mail", "gpu"), QueueKey("sms"))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with some thousand rows, known to the planner."""
    path = tmp_path_factory.mktemp("plans") / "ff.db"

    async def fill() -> None:
        store = SQLiteStore(path, synchronous="NORMAL")
        await store.open(migrate=True)
        for start in range(0, 4000, 500):
            await store.commit(
                [
                    change(*_rows(number), events=[event(f"n{number}", lease="x")])
                    for number in range(start, start + 500)
                ]
            )
        await store.close()

    def _rows(number: int) -> list[Insert]:
        name = f"n{number}"
        row = (
            queued(name, number % 1000, line=LINES[number % 3])
            if number % 2
            else execution(name, lease_expires_at=FromNow(number), delay_until=FromNow(number), lease_id=name)
        )
        return [Insert(row), Insert(payload(name))]

    asyncio.run(fill())
    db = apsw.Connection(str(path))
    db.execute("ANALYZE")
    db.close()
    return path


class PlanRecordingStore(SQLiteStore):
    """A store that records the plan of each statement that it runs."""

    plans: dict[str, list[str]]

    def _watch(self, db: apsw.Connection) -> apsw.Connection:
        plain = apsw.Connection(str(self._path))

        def note(cursor: apsw.Cursor, statement: str, bindings: Any) -> bool:
            if statement.split()[0] in ("SELECT", "WITH", "UPDATE", "INSERT", "DELETE"):
                steps = plain.execute(f"EXPLAIN QUERY PLAN {statement}", bindings)
                self.plans[statement] = [step[3] for step in steps]
            return True

        db.exec_trace = note
        return db

    def _connect(self) -> apsw.Connection:
        return self._watch(super()._connect())

    def _connect_reader(self) -> apsw.Connection:
        return self._watch(super()._connect_reader())


async def plans_of(path: Path, *calls: Any) -> list[list[str]]:
    store = PlanRecordingStore(path)
    store.plans = {}
    for call in calls:
        await call(store)
    await store.close()
    return list(store.plans.values())


def only_searches(plans: Sequence[Sequence[str]]) -> bool:
    """Return True if no step scans a whole table or sorts; in the statements, r and p are tables."""
    steps = [step for plan in plans for step in plan]
    assert steps
    return not [step for step in steps if re.match(r"SCAN (ff_\w+|[rp])\b|.*TEMP B-TREE", step)]


async def test_a_claim_reads_the_heads_of_its_queues_in_order(filled: Path) -> None:
    for lines in (LINES[:1], LINES):
        plans = await plans_of(filled, lambda store, lines=lines: store.claim_rows(claim_request(10, *lines)))
        heads = next(plan for plan in plans if any("ff_exec_core_line" in step for step in plan))
        assert sum("USING INDEX ff_exec_core_line (line=?)" in step for step in heads) == len(lines)
        assert only_searches([heads])
        writes = [plan for plan in plans if plan is not heads]
        assert only_searches(writes)


async def test_queues_with_work_are_found_by_index_skips(filled: Path) -> None:
    [plan] = await plans_of(filled, lambda store: store.nonempty_queues("mail"))

    assert sum("USING COVERING INDEX ff_exec_core_line (line>?)" in step for step in plan) == 2, plan
    assert not [step for step in plan if re.match(r"SCAN (ff_\w+|[el])\b", step)], plan


async def test_rows_are_loaded_by_their_key(filled: Path) -> None:
    # n6 is in no queue, which the store would have to read first.
    wants = [Read(Execution, ("n6",)), Read(Attempt, ("n6",)), Read(IdempotencyKey, (1,))]

    [at_once] = await plans_of(filled, lambda store: store.load(wants))
    one_by_one = await plans_of(filled, lambda store: store.load([*wants, Read(Payload, ("n6",))]))
    many = await plans_of(filled, lambda store: store.load([Read(Execution, (f"n{n}",)) for n in range(20)]))

    assert len(one_by_one) == 4
    assert only_searches([at_once, *one_by_one, *many])


@pytest.mark.parametrize("column", ["lease_expires_at", "delay_until", "attempt_timeout_at", "deadline_at", "purge_at"])
async def test_due_rows_are_found_by_their_instant_in_order(filled: Path, column: str) -> None:
    plans = await plans_of(filled, lambda store: store.due(Execution, column, limit=10))

    assert len(plans) == 2
    assert only_searches(plans)
    assert all(f"ff_exec_core_{column}" in plan[0] for plan in plans)


@pytest.mark.parametrize("each", [None, LINES])
async def test_counts_use_an_index(filled: Path, each: tuple[QueueKey, ...] | None) -> None:
    """They may group and sort what they found; they never read a row beyond their limit."""
    held = GroupedCount(Execution, "lease_expires_at", ("lane_id",), 100)
    line = GroupedCount(Execution, "line", ("lane_id",), 100, values=each)
    asleep = GroupedCount(Suspension, "due_at", ("lane_id",), 100)
    for tally, index in (
        (held, "INDEX ff_exec_core_lease_expires_at"),
        (line, "INDEX ff_exec_core_line"),
        (asleep, "INDEX ff_suspension_due_at"),
    ):
        plans = await plans_of(filled, lambda store, tally=tally: store.count_grouped(tally))
        steps = [step for plan in plans for step in plan]
        assert [step for step in steps if index in step], steps
        assert not [step for step in steps if re.match(r"SCAN ff_\w+$", step)], steps


async def test_a_lease_is_renewed_by_key(filled: Path) -> None:
    async def renew(store: Store) -> None:
        ((row, _),) = (await store.claim_rows(claim_request(1))).rows
        await store.renew(
            [LeaseRef(row.execution_id, 0, row.attempt_id or "", row.lease_id or "", 1, 100)] * 3, RENEWAL
        )

    assert only_searches(await plans_of(filled, renew))


async def test_feed_and_history_are_read_in_order(filled: Path) -> None:
    async def read(store: Store) -> None:
        for topic in Topic:
            await store.feed(topic, 100, 10)
            await store.history("n5", topic, 10)

    of_one_row = ("sqlite_sequence", "ff_feed_trim")
    plans = [
        plan for plan in await plans_of(filled, read) if not any(table in step for step in plan for table in of_one_row)
    ]
    assert len(plans) == 2 * len(Topic) + 1  # and whether the position was assigned
    assert only_searches(plans)


async def test_the_leases_of_a_lost_claim_are_found_without_reading_finished_rows(filled: Path) -> None:
    lost = (Where("lease_id", "in", ("a", "b")), Where("lease_expires_at", "set"))
    (plan,) = await plans_of(filled, lambda store: store.scan(Scan(Execution, lost, ("lease_expires_at",))))

    assert "ff_exec_core_lease_expires_at" in plan[0]


async def test_rows_with_a_key_prefix_are_an_index_range(filled: Path) -> None:
    begin = (Where("execution_id", "starts", ("n1", "n25")),)
    each = Scan(Execution, begin, ("execution_id",), limit=3, limit_by="execution_id")

    plans = await plans_of(filled, lambda store: store.scan(each))

    assert only_searches(plans)
    steps = [step for plan in plans for step in plan if "ff_exec_core" in step]
    assert steps
    assert all(step.endswith("(execution_id>? AND execution_id<?)") for step in steps)


async def test_the_lists_of_a_limit_are_found_by_one_index_search_each(filled: Path) -> None:
    where = (Where("blocked_on", "starts", "quota:1#"), Where("blocked_on", ">", "quota:1#a"))
    lists = Scan(Execution, where, ("rank", "execution_id"), limit=1, limit_by="blocked_on", max_values=9)

    plans = await plans_of(filled, lambda store: store.scan(lists))

    steps = [step for plan in plans for step in plan if "ff_exec_core" in step]
    assert steps
    assert all("SEARCH" in step and "ff_exec_core_blocked_on" in step for step in steps)
