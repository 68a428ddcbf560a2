"""Homes: the partition to which a row belongs, as its tag. It follows from the table and the key (`catalog.HomeKind`).

A store on several servers keeps a partition on one of them. So a change has one home, which its guards, its writes and
its events share. An id without a partition, which only tests use, belongs to partition 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NewType, assert_never

import msgspec

from flowfabric.ids import (
    BudgetId,
    FlowId,
    PartitionCounts,
    QuotaPolicyId,
    budget_partition,
    flow_partition,
    quota_partition,
)
from flowfabric.model.change import BulkInsert, Change
from flowfabric.model.event import Event
from flowfabric.stores.catalog import TABLE, TABLES, HomeKind
from flowfabric.stores.codec import target

HomeTag = NewType("HomeTag", str)

_DECIDED_BY = {table.row: table.home and (table.key.index(table.home[0]), table.home[1]) for table in TABLES}
GLOBAL_HOME = HomeTag("{ff}")  # of rows that belong to no partition


def home_of(row: type[msgspec.Struct], key: tuple[Any, ...], counts: PartitionCounts) -> HomeTag | None:
    """Return the home of the row with this key, or of all rows with this key prefix; None if a prefix does not say."""
    if (decided := _DECIDED_BY[row]) is None:
        return GLOBAL_HOME
    ordinal, kind = decided
    return _home(kind, key[ordinal], counts) if ordinal < len(key) else None


def home_of_event(event: Event, counts: PartitionCounts) -> HomeTag:
    """Return the home of an event: that of its execution, or of its flow if it concerns no execution."""
    if event.flow_id is not None and not event.execution_id.startswith("{"):
        return _home(HomeKind.FLOW, event.flow_id, counts)
    return _home(HomeKind.EXECUTION, event.execution_id, counts)


def home_of_change(change: Change, counts: PartitionCounts) -> HomeTag:
    """Return the home of a change; raise `ValueError` if it has several. A change of nothing is at home anywhere."""
    homes = {home_of(guard.row, guard.key, counts) for guard in change.guards}
    for write in change.writes:
        if isinstance(write, BulkInsert):
            homes |= _homes_of_bulk_insert(write, counts)
        else:
            homes.add(home_of(*target(write), counts))
    for event in change.events:
        homes.add(home_of_event(event, counts))
    home = homes.pop() if homes else GLOBAL_HOME
    if homes or home is None:
        found = ", ".join(sorted(str(home or "any partition") for home in (home, *homes)))
        raise ValueError(f"a change has one home; this one has {found}: {change}")
    return home


def _homes_of_bulk_insert(insert: BulkInsert, counts: PartitionCounts) -> set[HomeTag | None]:
    row, names, count = type(insert.row), TABLE[type(insert.row)].key, len(insert)
    columns = (insert.columns.get(name, [getattr(insert.row, name)] * count) for name in names)
    return {home_of(row, key, counts) for key in zip(*columns, strict=True)}


def _home(kind: HomeKind, value: Any, counts: PartitionCounts) -> HomeTag:
    match kind:
        case HomeKind.EXECUTION:
            text = str(value)
            tag = (text[: text.find("}") + 1] if text[:1] == "{" else "") or "{fp:0}"
        case HomeKind.PARTITION:
            tag = f"{{fp:{value}}}"
        case HomeKind.TAG:
            tag = value if value.startswith("{") else "{fp:0}"
        case HomeKind.FLOW:
            tag = f"{{fp:{_partition(flow_partition, FlowId(value), counts)}}}"
        case HomeKind.BUDGET:
            tag = f"{{b:{_partition(budget_partition, BudgetId(value), counts)}}}"
        case HomeKind.QUOTA:
            tag = f"{{q:{_partition(quota_partition, QuotaPolicyId(value), counts)}}}"
        case _:
            assert_never(kind)
    return HomeTag(tag)


def _partition(partition: Callable[[Any, PartitionCounts], int], id_: str, counts: PartitionCounts) -> int:
    try:
        return partition(id_, counts)
    except ValueError:  # not a UUID
        return 0
