"""Fan-out: report a completion to many successors in bounded steps.

A dispatch row stores how far the fan-out has come. The last step deletes it. Any process that finds the row can
continue.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Delete, Guard, Patch, Write
from flowfabric.model.execution import Execution
from flowfabric.model.flow import CompletionDispatch, Dependency, Edge, EdgeGroup
from flowfabric.rules.decision import Decision
from flowfabric.rules.flow import inline_release, successors
from flowfabric.rules.flow.joins import JoinContext, UpstreamOutcome


class FanOutEdge(msgspec.Struct, frozen=True):
    """An outgoing edge with what was loaded of its downstream."""

    edge: Edge
    group: EdgeGroup | None
    child: Execution | None
    dependency: Dependency | None  # None if the edge is only staged, so nobody waits for it


class FanOutStep(msgspec.Struct, frozen=True):
    """The result of one step."""

    edge_count: int = 0
    unresolved: tuple[Dependency, ...] = ()  # recorded, but their joins are not resolved yet
    is_last: bool = True


def fan_out(
    dispatch: CompletionDispatch | None,
    edges: Sequence[FanOutEdge],
    *,
    is_last: bool,
    inline: bool,
    after_edge: str | None = None,
) -> Decision[FanOutStep]:
    """Record the outcome on the next edges of a dispatch row; the last step deletes the row.

    `after_edge` is where the next step starts, if that is not the last of these edges. With `inline`, children that
    wait for one of these edges only are released in the same change, where no further load is needed.
    """
    if dispatch is None:
        return Decision(FanOutStep())
    key = (dispatch.execution_id,)
    guards = [Guard(CompletionDispatch, key, dispatch.revision)]
    writes: list[Write] = [
        Delete(CompletionDispatch, key)
        if is_last
        else Patch(CompletionDispatch, key, {"after_edge": after_edge or edges[-1].edge.edge_id})
    ]
    unresolved: list[Dependency] = []
    for target in edges:
        if target.dependency is None:
            continue
        release = _inline_release(target, UpstreamOutcome(target.dependency, dispatch.outcome)) if inline else None
        if release is not None:
            guards += release.guards
            writes += release.writes
        else:
            writes.append(
                successors.record_outcome(target.edge.downstream_execution_id, target.edge.edge_id, dispatch.outcome)
            )
            unresolved.append(target.dependency)
    change = Change(guards=tuple(guards), writes=tuple(writes))
    return Decision(FanOutStep(len(edges), tuple(unresolved), is_last), change)


def _inline_release(target: FanOutEdge, outcome: UpstreamOutcome) -> Change | None:
    if target.group is None or target.child is None or outcome.dependency.data_passing_ref:
        return None
    try:
        return inline_release.inline_release(target.group, target.child, outcome, JoinContext())
    except errors.Corruption:
        return None  # reported when the join is resolved
