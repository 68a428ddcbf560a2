"""Homes: the partition of a row follows from its table and key, and a change has one."""

from __future__ import annotations

import pytest

from flowfabric.ids import (
    DEFAULT_PARTITIONS,
    BudgetId,
    FlowId,
    PartitionCounts,
    QuotaPolicyId,
    budget_partition,
    flow_partition,
    quota_partition,
)
from flowfabric.model.bulk_operation import BulkOperation
from flowfabric.model.change import BulkInsert, Change, Delete, Insert, Patch, Write, absent
from flowfabric.model.deployment import Deployment, SweepLease
from flowfabric.model.event import Event
from flowfabric.model.execution import Execution, IdempotencyKey
from flowfabric.model.flow import EdgeGroup, Flow
from flowfabric.model.gate import ChildCompletion
from flowfabric.model.limits.budget import BudgetSpend
from flowfabric.model.limits.quota import QuotaSlot
from flowfabric.model.outbox import OutboxMessage
from flowfabric.model.scheduling.lane import Lane
from flowfabric.model.scheduling.worker import RegisteredWorker, WorkerEvent
from flowfabric.model.security.api_token import ApiToken
from flowfabric.model.security.signing_key import Keystore, SigningKey
from flowfabric.model.suspension import Waitpoint
from flowfabric.stores.catalog import TABLES
from flowfabric.stores.homes import GLOBAL_HOME, home_of, home_of_change, home_of_event
from tests.stores.sample_rows import event, execution

UUID = "0191f0e2-7c3a-4b1d-8e5f-123456789abc"
FLOW = f"{{fp:{flow_partition(FlowId(UUID), DEFAULT_PARTITIONS)}}}"
BUDGET = f"{{b:{budget_partition(BudgetId(UUID), DEFAULT_PARTITIONS)}}}"
QUOTA = f"{{q:{quota_partition(QuotaPolicyId(UUID), DEFAULT_PARTITIONS)}}}"
GLOBAL_ROWS = {
    *(SweepLease, Deployment, Lane, ApiToken, BulkOperation, Keystore, SigningKey, RegisteredWorker, WorkerEvent)
}


@pytest.mark.parametrize(
    ("row", "key", "home"),
    [
        (Execution, ("{fp:7}:x",), "{fp:7}"),
        (ChildCompletion, ("{fp:7}:x", "{fp:8}:y", 0), "{fp:7}"),
        (IdempotencyKey, (9, "digest"), "{fp:9}"),
        (Waitpoint, ("w", 9), "{fp:9}"),
        (OutboxMessage, ("{b:3}", "m"), "{b:3}"),
        (Flow, (UUID,), FLOW),
        (EdgeGroup, (UUID, f"{FLOW}:x"), FLOW),
        (BudgetSpend, ("default", UUID, "{fp:7}:x", "tokens"), BUDGET),
        (QuotaSlot, ("default", UUID, "{fp:7}:x"), QUOTA),
        (ApiToken, ("t",), "{ff}"),
    ],
)
def test_the_home_of_a_row_follows_from_its_key(row: type, key: tuple[object, ...], home: str) -> None:
    assert home_of(row, key, DEFAULT_PARTITIONS) == home


def test_the_home_of_a_flow_depends_on_the_number_of_partitions() -> None:
    assert {home_of(Flow, (UUID,), PartitionCounts(flow=count)) for count in (1, 7, 256)} == {
        f"{{fp:{flow_partition(FlowId(UUID), PartitionCounts(flow=count))}}}" for count in (1, 7, 256)
    }


def test_a_key_prefix_has_a_home_if_it_names_the_partition() -> None:
    assert home_of(BudgetSpend, ("default", UUID), DEFAULT_PARTITIONS) == BUDGET
    assert home_of(BudgetSpend, ("default",), DEFAULT_PARTITIONS) is None
    assert home_of(Waitpoint, ("w",), DEFAULT_PARTITIONS) is None
    assert home_of(SigningKey, (), DEFAULT_PARTITIONS) == GLOBAL_HOME


def test_only_rows_of_the_deployment_belong_to_no_partition() -> None:
    assert {table.row for table in TABLES if table.home is None} == GLOBAL_ROWS


def test_a_row_belongs_to_a_partition_if_its_aggregate_root_does() -> None:
    home = {table.row: table.home for table in TABLES}
    assert [table.name for table in TABLES if (table.home is None) != (home[table.aggregate_root] is None)] == []


def test_an_event_without_an_execution_is_at_home_with_its_flow() -> None:
    assert home_of_event(Event(UUID, "ns", flow_id=UUID), DEFAULT_PARTITIONS) == FLOW
    assert home_of_event(Event("{fp:9}:x", "ns", flow_id=UUID), DEFAULT_PARTITIONS) == "{fp:9}"


HERE, THERE = "{fp:3}:a", "{fp:4}:b"


@pytest.mark.parametrize(
    "other",
    [
        Change((absent(Execution, THERE),)),
        Change((), (Insert(execution(THERE)),)),
        Change((), (Patch(Execution, (THERE,), {"priority": 1}),)),
        Change((), (BulkInsert(execution("model"), {"execution_id": [HERE, THERE]}),)),
        Change((), (Delete(Execution, ()),)),
        Change((), (Insert(IdempotencyKey(4, "x", HERE, 0)),)),
        Change((), (), (event(THERE),)),
    ],
    ids=["guard", "insert", "patch", "bulk insert", "delete of everything", "key", "event"],
)
def test_a_change_of_two_partitions_has_no_home(other: Change) -> None:
    own: tuple[Write, ...] = (Insert(execution(HERE)), Insert(IdempotencyKey(3, "x", HERE, 0)))
    alone = Change((absent(Execution, HERE),), own, (event(HERE),))
    both = Change(alone.guards + other.guards, alone.writes + other.writes, alone.events + other.events)

    assert home_of_change(alone, DEFAULT_PARTITIONS) == "{fp:3}"
    with pytest.raises(ValueError, match="a change has one home"):
        home_of_change(both, DEFAULT_PARTITIONS)


def test_a_change_of_nothing_is_at_home_anywhere() -> None:
    assert home_of_change(Change(()), DEFAULT_PARTITIONS) == GLOBAL_HOME
