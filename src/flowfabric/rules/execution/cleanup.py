"""What closes together with an attempt or a life: the output stream, the open suspension, a parent's wait.

Each is one row found through a mark on the sheet, so work that has none of them pays nothing. The first close wins:
a row that is closed already keeps its time and reason.
"""

from __future__ import annotations

from flowfabric.model.change import NOW, Patch, Upsert, Write, from_now
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildCompletion
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.stream import Stream
from flowfabric.model.suspension import Suspension

LEASE_EXPIRED = "lease_expired"
RECLAIMED = "reclaimed"
ATTEMPT_FAILURE = "attempt_failure"
SUSPENSION_TIMEOUT = "suspension_timeout"

STREAM_REASON = {
    TerminalOutcome.SUCCESS: "attempt_success",
    TerminalOutcome.FAILED: ATTEMPT_FAILURE,
    TerminalOutcome.CANCELLED: "attempt_cancelled",
    TerminalOutcome.EXPIRED: "expired",
    TerminalOutcome.SKIPPED: "dependency_impossible",
}


def close_stream(row: Execution, reason: str) -> tuple[Write, ...]:
    """Close the stream of the row's attempt, if it ever wrote one."""
    if row.stream_index is None or row.stream_index != row.attempt_index:
        return ()
    fields = {"closed_at": NOW, "closed_reason": reason}
    return (Patch(Stream, (row.execution_id, row.stream_index), fields, unless_set="closed_at"),)


def close_suspension(row: Execution, reason: str) -> tuple[Write, ...]:
    """Close the row's open suspension, and with it every waitpoint it waits on."""
    if row.current_suspension_id is None:
        return ()
    fields = {"closed_at": NOW, "close_reason": reason, "due_at": None}
    return (Patch(Suspension, (row.execution_id,), fields, unless_set="closed_at"),)


def report_to_parent(row: Execution, outcome: TerminalOutcome) -> tuple[Write, ...]:
    """Leave word of a child's end with its parent: a row that nobody else writes, taken in by the parent's gates."""
    if row.parent_id is None:
        return ()
    return (Upsert(ChildCompletion(row.parent_id, row.execution_id, row.replay_count, outcome.value, from_now(0))),)
