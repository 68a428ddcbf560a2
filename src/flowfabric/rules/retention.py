"""Retention: delete a finished execution, with all rows it owns, after its retention period.

Rows that others still need are kept longer. A durable function runs from the top after every wait and asks for its
children again: a deleted child would be created, and run, a second time. A node of a flow may read the results of
others when it starts; those declare so in their policy (`kept_for_successors`). An execution that has succeeded needs
nothing any more.

A flow is deleted with its members, edges, joins and summary once its last member is gone, in any state; later calls
find no such flow. All members are on the flow's partition, and adding one writes the flow row, so no member is
overlooked. A flow that never had a member is kept while it is open.

Frames of long streams are deleted before, oldest first and one page a change, because a change is one call of a
store. A reader in between finds a stream whose oldest frames were trimmed. So are other rows if there are many; what
is purged in parts is not replayed any more, because it would have forgotten steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.model.change import Change, Delete, Guard, Patch, Upsert, Write, seen
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
from flowfabric.model.gate import ChildCompletion, Fact, GateMemo, MailboxMessage, Reply, StepMemo
from flowfabric.model.instant import FromNow
from flowfabric.model.states import LifecyclePhase, TerminalOutcome
from flowfabric.model.stream import Frame, Stream, StreamSummary
from flowfabric.model.suspension import IdempotencyRecord, Signal, Suspension, Waitpoint
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import lives
from flowfabric.rules.execution import cancel
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.execution.transitions import DEFAULT_RETENTION_MS, retention_ms
from flowfabric.rules.flow import successors
from flowfabric.rules.flow.build import RETENTION_CHECK_MS, seen_flow
from flowfabric.rules.stream.append import PAGE

# Children always record their completion with the parent, so no column tells whether there is any.
OWNED: tuple[type[msgspec.Struct], ...] = (Attempt, Result, Payload, Dependency, ChildCompletion)
STREAMS: tuple[type[msgspec.Struct], ...] = (Frame, StreamSummary, Stream)
WAITS: tuple[type[msgspec.Struct], ...] = (Signal, IdempotencyRecord, GateMemo, MailboxMessage, Reply, Suspension)
# An execution may own many rows of these. Attempts are few: their indexes have no gaps, so they are deleted with it.
PAGED = frozenset({Dependency, ChildCompletion, StepMemo, Fact, *WAITS} - {Suspension})

RECHECK_DELAY_MS = 1000
FLOW_RECHECK_DELAY_MS = 2 * 60 * 1000  # by then the sweep has usually removed the last members
MAX_PURGED_PAGES = 1  # a change deletes at most so many pages of frames
MAX_PURGED_ROWS = 200  # a change deletes at most so many named rows

FLOW_PAGED: tuple[type[msgspec.Struct], ...] = (FlowMember, Edge, EdgeGroup, PendingSiblingCancel, PendingMemberCancel)
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
    """A member that keeps its flow; `purge_at` is unset unless the member has ended."""

    purge_at: int | None = None


class OwnedRow(msgspec.Struct, frozen=True):
    """The table and key of a row that an execution or a flow owns."""

    row: type[msgspec.Struct]
    key: tuple[Any, ...]


class RowsRemain(msgspec.Struct, frozen=True):
    """Some rows were deleted; the purge continues."""


def purge(
    row: Execution | None,
    now: int,
    default_ms: int | None = None,
    others: Sequence[Execution] = (),
    streams: Sequence[Stream] = (),
    owned: Sequence[OwnedRow] = (),
) -> Decision[bool | RowsRemain]:
    """Delete a finished execution whose retention period is over, with all rows it owns.

    The period was fixed when the execution ended; `default_ms` replaces the default of that time. While one of the
    `others` may need it, the purge is postponed. While its streams are long, their oldest frames are deleted first, and
    then the `owned` rows, as long as there are more than one change deletes.
    """
    if row is None or not is_retention_over(row, now, default_ms):
        return Decision(False)
    if needing := [other for other in others if may_still_need(other, row)]:
        ends = [other.purge_at for other in needing if other.purge_at is not None]
        wait_ms = max(ends) - now + RECHECK_DELAY_MS if len(ends) == len(needing) else retention_ms(row)
        later = Patch(Execution, (row.execution_id,), {"purge_at": FromNow(max(wait_ms, RECHECK_DELAY_MS))})
        return Decision(False, Change(guards=(seen(row),), writes=(later,)))
    if (shortened := _shorten(streams)) is not None:
        guard, fewer = shortened
        change = Change(guards=(seen(row), guard), writes=fewer, not_before=retained_until(row, default_ms))
        return Decision(RowsRemain(), change)
    key = (row.execution_id,)
    named: tuple[Write, ...] = tuple(Delete(one.row, one.key) for one in owned[:MAX_PURGED_ROWS])
    if len(owned) > MAX_PURGED_ROWS:
        begun = Patch(Execution, key, {"past_life": lives.BEING_PURGED})
        change = Change(guards=(seen(row),), writes=(begun, *named), not_before=retained_until(row, default_ms))
        return Decision(RowsRemain(), change)
    writes = (*named, *(Delete(kind, key) for kind in _owned_tables(row)), Delete(Execution, key))
    if cancel.may_omit_outcome(row):  # its outcome may not have been counted yet
        writes = (*successors.outcome_writes(row, row.terminal_outcome), *writes)
    return Decision(True, Change(guards=(seen(row),), writes=writes, not_before=retained_until(row, default_ms)))


def tables_to_name(row: Execution, in_pages: bool) -> tuple[type[msgspec.Struct], ...]:
    """Return the tables whose rows a purge deletes by name, because their keys do not begin with the execution's id.

    `in_pages` adds those of which an execution may own many rows.
    """
    waitpoints: tuple[type[msgspec.Struct], ...] = (Waitpoint,) if row.has_waits else ()
    if not in_pages:
        return waitpoints
    return waitpoints + tuple(kind for kind in _owned_tables(row) if kind in PAGED)


def _owned_tables(row: Execution) -> tuple[type[msgspec.Struct], ...]:
    """Return the tables that may hold rows whose keys begin with the execution's id."""
    owned = OWNED
    owned += STREAMS if row.stream_index is not None else ()
    owned += WAITS if row.has_waits else ()
    owned += (StepMemo, Fact) if row.has_steps or row.life is not None else ()  # facts stay in the next life
    return owned


def _shorten(streams: Sequence[Stream]) -> tuple[Guard, tuple[Write, ...]] | None:
    """Delete the oldest pages of a stream if all streams together have many; None if they have few."""
    pages = [msgspec.json.decode(stream.pages, type=list[tuple[int, int, int]]) for stream in streams]
    if sum(map(len, pages)) <= MAX_PURGED_PAGES:
        return None
    stream, own = next((stream, own) for stream, own in zip(streams, pages, strict=True) if own)
    key, dropped, kept = (stream.execution_id, stream.attempt_index), own[:MAX_PURGED_PAGES], own[MAX_PURGED_PAGES:]
    kept_from = max(stream.kept_from, (dropped[-1][0] + 1) * PAGE + 1)
    shorter = msgspec.structs.replace(stream, pages=msgspec.json.encode(kept).decode(), kept_from=kept_from)
    writes: tuple[Write, ...] = (Upsert(shorter), *(Delete(Frame, (*key, page)) for page, _, _ in dropped))
    return Guard(Stream, key, stream.revision), writes


def purge_flow(
    flow: Flow | None, remaining: RemainingMember | None, now: int, owned: Sequence[OwnedRow] = ()
) -> Decision[bool | RowsRemain]:
    """Delete a flow whose last member is gone, with all rows it owns; otherwise schedule the next check.

    The `owned` rows are deleted first, as long as there are more than one change deletes.
    """
    if flow is None:
        return Decision(False)
    kept_until: int | None = None
    if remaining is not None:
        kept_until = (
            now + RETENTION_CHECK_MS
            if remaining.purge_at is None
            else max(remaining.purge_at, now) + FLOW_RECHECK_DELAY_MS
        )
    elif flow.node_count == 0:
        if flow.cancelled_at is None:
            return Decision(False)
        kept_until = flow.cancelled_at + DEFAULT_RETENTION_MS
    key, guards = (flow.flow_id,), (seen_flow(flow),)
    if kept_until is None or kept_until <= now:
        named: tuple[Write, ...] = tuple(Delete(one.row, one.key) for one in owned[:MAX_PURGED_ROWS])
        if len(owned) > MAX_PURGED_ROWS:
            return Decision(RowsRemain(), Change(guards=guards, writes=named))
        writes = (*named, *(Delete(kind, key) for kind in FLOW_OWNED), Delete(Flow, key))
        return Decision(True, Change(guards=guards, writes=writes))
    if flow.purge_check_at is not None and flow.purge_check_at > now:
        return Decision(False)
    return Decision(False, Change(guards=guards, writes=(Patch(Flow, key, {"purge_check_at": kept_until}),)))


def remaining_member(flow_id: str, row: Execution | None) -> RemainingMember | None:
    """Return whether this execution keeps the flow; the id of a member may have been reused."""
    if row is None or row.flow_id != flow_id:
        return None
    return RemainingMember(row.purge_at if row.lifecycle_phase is LifecyclePhase.TERMINAL else None)


def may_still_need(other: Execution, ended: Execution) -> bool:
    """True if `other` may still read the ended execution.

    An execution that ended without success has no result to read. It is kept for successors that continue without it,
    so that they do not take it for a deleted one.
    """
    if other.terminal_outcome is TerminalOutcome.SUCCESS:
        return False
    if other.execution_id == ended.parent_id or ended.terminal_outcome is TerminalOutcome.SUCCESS:
        return True
    return other.lifecycle_phase is not LifecyclePhase.TERMINAL


def retained_for(row: Execution) -> tuple[str, ...]:
    """Return the executions that may still need this one, as far as its row names them."""
    parent = () if row.parent_id is None else (row.parent_id,)
    if row.successors is None or not decode_terms(row.terms).kept_for_successors:
        return parent
    return (*parent, *(successor.execution_id for successor in successors.named_successors(row)))


def is_retained_for_many(row: Execution) -> bool:
    """True if too many executions may need this one for its row to name them."""
    return row.successors == successors.MANY and decode_terms(row.terms).kept_for_successors


def is_retention_over(row: Execution, now: int, default_ms: int | None = None) -> bool:
    """True if the retention period of a finished execution is over."""
    over_at = retained_until(row, default_ms) if row.lifecycle_phase is LifecyclePhase.TERMINAL else None
    return over_at is not None and over_at <= now


def retained_until(row: Execution, default_ms: int | None) -> int | None:
    """Return when a finished execution may be deleted."""
    if default_ms is None or row.completed_at is None or decode_terms(row.terms).retention_ttl_ms is not None:
        return row.purge_at
    return row.completed_at + default_ms
