"""Retention: a finished execution goes, with everything it owns, when its time is over.

What others still need is kept longer. A durable function runs from the top after every wait and comes to its children
again: one that was gone would be made, and run, a second time. A node of a flow may read the results of others whenever
it starts, and these say so in their policy (`kept_for_successors`). Whoever has succeeded needs nothing any more.

A flow goes with its members, edges, joins and summary once its last member is gone, in whatever state it is; what comes
later finds no such flow. Every member is on the flow's partition, and a new one writes the flow's row, so no member is
overlooked. A flow that never had a member stays while it is open.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowfabric.model.change import Change, Delete, FromNow, Patch, Write, seen
from flowfabric.model.execution import Attempt, Execution, Payload, Result
from flowfabric.model.flow import (
    CancelBacklog,
    Dependency,
    Edge,
    EdgeGroup,
    Flow,
    FlowMember,
    FlowSummary,
    PendingMemberCancel,
    PendingSiblingCancel,
)
from flowfabric.model.gate import ChildCompletion, GateMemo, MailboxMessage, StepMemo
from flowfabric.model.states import LifecyclePhase, TerminalOutcome
from flowfabric.model.stream import Frame, Stream, StreamSummary
from flowfabric.model.suspension import IdempotencyRecord, Signal, Suspension, Waitpoint
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import cancel
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.execution.transitions import DEFAULT_RETENTION_MS, retention_ms
from flowfabric.rules.flow import successors
from flowfabric.rules.flow.build import RETENTION_CHECK_MS, seen_flow

# Children leave word of their ends whether or not anybody waits for them, so no mark tells of that.
OWNED: tuple[type[msgspec.Struct], ...] = (Attempt, Result, Payload, Dependency, ChildCompletion)
STREAMS: tuple[type[msgspec.Struct], ...] = (Frame, StreamSummary, Stream)
WAITS: tuple[type[msgspec.Struct], ...] = (Signal, IdempotencyRecord, GateMemo, MailboxMessage, Suspension)

RECHECK_DELAY_MS = 1000
FLOW_RECHECK_DELAY_MS = 2 * 60 * 1000  # by then the sweep has removed what is due, and mostly the flow as well


FLOW_OWNED: tuple[type[msgspec.Struct], ...] = (
    FlowMember,
    Edge,
    EdgeGroup,
    FlowSummary,
    PendingSiblingCancel,
    PendingMemberCancel,
    CancelBacklog,
)


class RemainingMember(msgspec.Struct, frozen=True):
    """A member that keeps its flow; `purge_at` is unset unless it has ended."""

    purge_at: int | None = None


class NeedsWaitpoints(msgspec.Struct, frozen=True):
    """The execution is due to go, and its waitpoints have to be named for that."""


def purge(
    row: Execution | None,
    now: int,
    waitpoint_ids: Sequence[str] | None = None,
    default_ms: int | None = None,
    others: Sequence[Execution] = (),
) -> Decision[bool | NeedsWaitpoints]:
    """Delete a finished execution that has been kept long enough, with everything that its marks tell of.

    How long that is was settled when it ended; `default_ms` stands in for the default of that time. While one of the
    `others` that it is kept for may need it, it is looked at again later.
    """
    if row is None or not is_retention_over(row, now, default_ms):
        return Decision(False)
    if needing := [one for one in others if may_still_need(one, row)]:
        ends = [one.purge_at for one in needing if one.purge_at is not None]
        wait_ms = max(ends) - now + RECHECK_DELAY_MS if len(ends) == len(needing) else retention_ms(row)
        later = Patch(Execution, (row.execution_id,), {"purge_at": FromNow(max(wait_ms, RECHECK_DELAY_MS))})
        return Decision(False, Change(guards=(seen(row),), writes=(later,)))
    if row.has_waits and waitpoint_ids is None:
        return Decision(NeedsWaitpoints())
    key = (row.execution_id,)
    owned = OWNED
    owned += STREAMS if row.stream_index is not None else ()
    owned += WAITS if row.has_waits else ()
    owned += (StepMemo,) if row.has_steps else ()
    waitpoints = (Delete(Waitpoint, (one, row.partition)) for one in waitpoint_ids or ())
    writes: tuple[Write, ...] = (*(Delete(kind, key) for kind in owned), *waitpoints, Delete(Execution, key))
    if cancel.may_omit_outcome(row):  # and whoever is to count its end may not have come by yet
        writes = (*successors.outcome_writes(row, row.terminal_outcome), *writes)
    return Decision(True, Change(guards=(seen(row),), writes=writes, not_before=retained_until(row, default_ms)))


def purge_flow(flow: Flow | None, left: RemainingMember | None, now: int) -> Decision[bool]:
    """Delete a flow whose last member retention has removed, with everything it owns; else check again later."""
    if flow is None:
        return Decision(False)
    kept_until: int | None = None
    if left is not None:
        kept_until = (
            now + RETENTION_CHECK_MS if left.purge_at is None else max(left.purge_at, now) + FLOW_RECHECK_DELAY_MS
        )
    elif flow.node_count == 0:
        if flow.cancelled_at is None:
            return Decision(False)
        kept_until = flow.cancelled_at + DEFAULT_RETENTION_MS
    key, guards = (flow.flow_id,), (seen_flow(flow),)
    if kept_until is None or kept_until <= now:
        writes = (*(Delete(kind, key) for kind in FLOW_OWNED), Delete(Flow, key))
        return Decision(True, Change(guards=guards, writes=writes))
    if flow.purge_check_at is not None and flow.purge_check_at > now:
        return Decision(False)
    return Decision(False, Change(guards=guards, writes=(Patch(Flow, key, {"purge_check_at": kept_until}),)))


def remaining_member(flow_id: str, row: Execution | None) -> RemainingMember | None:
    """Whether this execution, found by the name of a member, keeps its flow; an id may have been used again."""
    if row is None or row.flow_id != flow_id:
        return None
    return RemainingMember(row.purge_at if row.lifecycle_phase is LifecyclePhase.TERMINAL else None)


def may_still_need(one: Execution, ended: Execution) -> bool:
    """Whether one of those that an execution is kept for may still look at it.

    One that ended without success has no result to read again: it is there for those of its successors that go on
    without it, so that they do not take it for one that is gone.
    """
    if one.terminal_outcome is TerminalOutcome.SUCCESS:
        return False
    if one.execution_id == ended.parent_id or ended.terminal_outcome is TerminalOutcome.SUCCESS:
        return True
    return one.lifecycle_phase is not LifecyclePhase.TERMINAL


def retained_for(row: Execution) -> tuple[str, ...]:
    """The executions that may still need this one, as far as its sheet names them."""
    parent = () if row.parent_id is None else (row.parent_id,)
    if row.successors is None or not decode_terms(row.terms).kept_for_successors:
        return parent
    return (*parent, *(one.execution_id for one in successors.named_successors(row)))


def is_retained_for_many(row: Execution) -> bool:
    """Whether there are more that may need this one, too many for its sheet to name them."""
    return row.successors == successors.MANY and decode_terms(row.terms).kept_for_successors


def is_retention_over(row: Execution, now: int, default_ms: int | None = None) -> bool:
    """Whether a finished execution has been kept long enough."""
    over_at = retained_until(row, default_ms) if row.lifecycle_phase is LifecyclePhase.TERMINAL else None
    return over_at is not None and over_at <= now


def retained_until(row: Execution, default_ms: int | None) -> int | None:
    """When a finished execution may go."""
    if default_ms is None or row.completed_at is None or decode_terms(row.terms).retention_ttl_ms is not None:
        return row.purge_at
    return row.completed_at + default_ms
