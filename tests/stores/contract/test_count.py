"""Counts by columns of executions: answered by an index, up to a limit."""

from __future__ import annotations

import pytest

from flowfabric.model.change import Change, Insert
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.flow import EdgeGroup
from flowfabric.model.states import PublicState
from flowfabric.model.suspension import Suspension
from flowfabric.stores.port import Store
from flowfabric.stores.queries import GroupedCount
from tests.stores.sample_rows import execution, payload, queued

MAIL, GPU, SMS = QueueKey("mail"), QueueKey("mail", "gpu"), QueueKey("sms")
BY = ("lane_id", "public_state")
WAITING, ACTIVE, SUSPENDED = PublicState.WAITING, PublicState.ACTIVE, PublicState.SUSPENDED


@pytest.fixture
async def filled(store: Store) -> Store:
    """Insert seven rows in three queues of two lanes, three leased ones and two suspended ones."""
    rows = [queued(f"a{n}", n, line=MAIL) for n in range(4)]
    rows += [queued(f"b{n}", n, line=GPU) for n in range(2)]
    rows += [queued("c0", 0, line=SMS, lane_id="sms")]
    rows += [execution(f"d{n}", public_state=ACTIVE, lease_expires_at=100 + n) for n in range(3)]
    rows += [execution(f"e{n}", public_state=SUSPENDED, lane_id="sms") for n in range(2)]
    further = [Suspension(name, 7, due_at=5) for name in ("e0", "e1", "purged")] + [Suspension("a0", 7)]
    changes = [Change((), (Insert(row), Insert(payload(row.execution_id))), id=n) for n, row in enumerate(rows, 1)]
    changes += [Change((), (Insert(row),), id=100 + n) for n, row in enumerate(further)]
    assert None not in await store.commit(changes)
    return store


async def test_rows_with_a_value_in_a_column_are_counted(filled: Store) -> None:
    assert await filled.count_grouped(GroupedCount(Execution, "line", BY, 100)) == {
        ("mail", WAITING): 6,
        ("sms", WAITING): 1,
    }
    assert await filled.count_grouped(GroupedCount(Execution, "lease_expires_at", BY, 100)) == {("mail", ACTIVE): 3}
    assert await filled.count_grouped(GroupedCount(Execution, "lease_expires_at", ("lane_id",), 2)) == {("mail",): 2}
    assert await filled.count_grouped(GroupedCount(Execution, "deadline_at", BY, 100)) == {}


async def test_the_limit_holds_for_each_value(filled: Store) -> None:
    def of(*lines: QueueKey, limit: int) -> GroupedCount:
        return GroupedCount(Execution, "line", BY, limit, values=lines)

    assert await filled.count_grouped(of(MAIL, GPU, SMS, limit=3)) == {("mail", WAITING): 5, ("sms", WAITING): 1}
    assert await filled.count_grouped(of(SMS, SMS, QueueKey("nobody"), limit=3)) == {("sms", WAITING): 1}
    assert await filled.count_grouped(of(limit=3)) == {}


async def test_rows_that_belong_to_an_execution_are_counted_by_its_columns(filled: Store) -> None:
    assert await filled.count_grouped(GroupedCount(Suspension, "due_at", BY, 100)) == {("sms", SUSPENDED): 2}
    groups = GroupedCount(EdgeGroup, "waiting_since", BY, 100, "downstream_execution_id")
    assert await filled.count_grouped(groups) == {}
