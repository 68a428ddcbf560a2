"""Cleanup: close what ends together with an attempt or an execution.

These are the output stream, the open suspension and the parent's wait. A column of the execution tells whether each
exists, so executions without them pay nothing. The first close wins: a row that is already closed keeps its time and
reason.
"""

from __future__ import annotations

import msgspec

from flowfabric.model.change import Patch, Upsert, Write
from flowfabric.model.execution import Execution, Result
from flowfabric.model.gate import ChildCancel, ChildCompletion
from flowfabric.model.instant import NOW
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.stream import Stream
from flowfabric.model.suspension import Suspension

LEASE_EXPIRED = "lease_expired"
RECLAIMED = "reclaimed"
ATTEMPT_FAILURE = "attempt_failure"
SUSPENSION_TIMEOUT = "suspension_timeout"
MAX_TRAVELLING_BYTES = 16 * 1024  # a larger result of a child does not travel to its parent

STREAM_REASON = {
    TerminalOutcome.SUCCESS: "attempt_success",
    TerminalOutcome.FAILED: ATTEMPT_FAILURE,
    TerminalOutcome.CANCELLED: "attempt_cancelled",
    TerminalOutcome.EXPIRED: "expired",
    TerminalOutcome.SKIPPED: "dependency_impossible",
}


def close_stream(row: Execution, reason: str) -> tuple[Write, ...]:
    """Close the stream of the current attempt, if the attempt wrote one."""
    if row.stream_index is None or row.stream_index != row.attempt_index:
        return ()
    fields = {"closed_at": NOW, "closed_reason": reason}
    return (Patch(Stream, (row.execution_id, row.stream_index), fields, unless_set="closed_at"),)


def close_suspension(row: Execution, reason: str) -> tuple[Write, ...]:
    """Close the open suspension and with it all its waitpoints."""
    if row.current_suspension_id is None:
        return ()
    fields = {"closed_at": NOW, "close_reason": reason, "due_at": None}
    return (Patch(Suspension, (row.execution_id,), fields, unless_set="closed_at"),)


def report_to_parent(row: Execution, outcome: TerminalOutcome, result: Result | None = None) -> tuple[Write, ...]:
    """Record a child's completion for its parent, whose gates read it; a small result travels with it.

    Nobody else writes this row.
    """
    if row.parent_id is None:
        return ()
    end = ChildCompletion(row.parent_id, row.execution_id, row.replay_count, outcome.value, NOW)
    if result is not None and len(result.payload) <= MAX_TRAVELLING_BYTES:
        end = msgspec.structs.replace(end, result=result.payload, result_encoding=result.encoding)
    return (Upsert(end),)


def request_child_cancels(row: Execution, outcome: TerminalOutcome) -> tuple[Write, ...]:
    """Let the children of a cancelled or expired execution be cancelled. Only a durable function has any."""
    if outcome not in (TerminalOutcome.CANCELLED, TerminalOutcome.EXPIRED):
        return ()
    may_have_children = row.attempt_index is not None and (row.has_steps or row.has_waits)
    return (Upsert(ChildCancel(row.execution_id, NOW)),) if may_have_children else ()
