"""Delivery: an end for which many wait is told to them in bounded steps, along a dispatch row.

The row remembers how far that has come and goes with the last step, so that whoever finds it can go on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Delete, Guard, Patch, Write
from flowfabric.model.execution import Execution
from flowfabric.model.flow import CompletionDispatch, Dependency, Edge, EdgeGroup
from flowfabric.rules.decision import Decision
from flowfabric.rules.flow import joins, successors
from flowfabric.rules.flow.joins import JoinContext, UpstreamOutcome


class FanOutEdge(msgspec.Struct, frozen=True):
    """The next edge of an end, and what is there of the child behind it."""

    edge: Edge
    group: EdgeGroup | None
    child: Execution | None
    dependency: Dependency | None  # None for an edge that is staged only: nobody waits for it


class FanOutStep(msgspec.Struct, frozen=True):
    """What one step did."""

    edge_count: int = 0
    unresolved: tuple[Dependency, ...] = ()  # those whose fold was not part of it
    is_last: bool = True


def fan_out(
    owed: CompletionDispatch | None,
    ahead: Sequence[FanOutEdge],
    *,
    is_last: bool,
    inline: bool,
    after_edge: str | None = None,
) -> Decision[FanOutStep]:
    """Note the end on the next edges of a dispatch row; the row goes with the last of them.

    `after_edge` is the edge that the next step begins after, if that is not the last of these.

    Children that wait for one of these edges alone are advanced in the same change (`carry`), where that needs no
    closer look.
    """
    if owed is None:
        return Decision(FanOutStep())
    key = (owed.execution_id,)
    guards = [Guard(CompletionDispatch, key, owed.revision)]
    writes: list[Write] = [
        Delete(CompletionDispatch, key)
        if is_last
        else Patch(CompletionDispatch, key, {"after_edge": after_edge or ahead[-1].edge.edge_id})
    ]
    unfolded: list[Dependency] = []
    for one in ahead:
        if one.dependency is None:
            continue
        advanced = _advanced(one, UpstreamOutcome(one.dependency, owed.outcome)) if inline else None
        if advanced is not None:
            guards += advanced.guards
            writes += advanced.writes
        else:
            writes.append(successors.record_outcome(one.edge.downstream_execution_id, one.edge.edge_id, owed.outcome))
            unfolded.append(one.dependency)
    change = Change(guards=tuple(guards), writes=tuple(writes))
    return Decision(FanOutStep(len(ahead), tuple(unfolded), is_last), change)


def _advanced(one: FanOutEdge, settlement: UpstreamOutcome) -> Change | None:
    if one.group is None or one.child is None or settlement.dependency.data_passing_ref:
        return None
    try:
        return joins.inline_release(one.group, one.child, settlement, JoinContext())
    except errors.Corruption:
        return None  # told of when it is folded
