"""Delivery: an end for which many wait is told to them in bounded steps, along a dispatch row.

The row remembers how far that has come and goes with the last step, so that whoever finds it can go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Delete, Guard, Patch, Write
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Dependency, Dispatch, Edge, EdgeGroup
from flowfabric.rules.decision import Decision
from flowfabric.rules.flow import joins, successors
from flowfabric.rules.flow.joins import Settlement, Surroundings


class Ahead(msgspec.Struct, frozen=True):
    """The next edge of an end, and what is there of the child behind it."""

    edge: Edge
    group: EdgeGroup | None
    child: Execution | None
    dependency: Dependency | None  # None for an edge that is staged only: nobody waits for it


class Step(msgspec.Struct, frozen=True):
    """What one step did."""

    settled: int = 0
    unfolded: tuple[Dependency, ...] = ()  # those whose fold was not part of it
    is_last: bool = True


def deliver(
    owed: Dispatch | None, ahead: Sequence[Ahead], *, is_last: bool, carry: bool, after_edge: str | None = None
) -> Decision[Step]:
    """Note the end on the next edges of a dispatch row; the row goes with the last of them.

    `after_edge` is the edge that the next step begins after, if that is not the last of these.

    Children that wait for one of these edges alone are advanced in the same change (`carry`), where that needs no
    closer look.
    """
    if owed is None:
        return Decision(Step())
    key = (owed.execution_id,)
    guards = [Guard(Dispatch, key, owed.revision)]
    writes: list[Write] = [
        Delete(Dispatch, key) if is_last else Patch(Dispatch, key, {"after_edge": after_edge or ahead[-1].edge.edge_id})
    ]
    unfolded: list[Dependency] = []
    for one in ahead:
        if one.dependency is None:
            continue
        advanced = _advanced(one, Settlement(one.dependency, owed.outcome)) if carry else None
        if advanced is not None:
            guards += advanced.guards
            writes += advanced.writes
        else:
            writes.append(successors.settle(one.edge.downstream_execution_id, one.edge.edge_id, owed.outcome))
            unfolded.append(one.dependency)
    change = Change(guards=tuple(guards), writes=tuple(writes))
    return Decision(Step(len(ahead), tuple(unfolded), is_last), change)


def _advanced(one: Ahead, settlement: Settlement) -> Change | None:
    if one.group is None or one.child is None or settlement.dependency.data_passing_ref:
        return None
    try:
        return joins.advance(one.group, one.child, settlement, Surroundings())
    except errors.Corruption:
        return None  # told of when it is folded
