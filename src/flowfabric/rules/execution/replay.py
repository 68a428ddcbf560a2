"""Replay: run a finished execution again under the same id."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import Replayed
from flowfabric.model.change import Change, Delete, Patch, Write, seen
from flowfabric.model.execution import Execution, Lineage, Result
from flowfabric.model.flow import Flow
from flowfabric.model.gate import GateMemo, Reply, StepMemo, StepState
from flowfabric.model.instant import NOW
from flowfabric.model.states import (
    AttemptRecordState,
    AttemptState,
    LifecyclePhase,
    PublicState,
    TerminalOutcome,
)
from flowfabric.model.suspension import Suspension
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import asks, lives
from flowfabric.rules.execution import lease, transitions
from flowfabric.rules.execution.operator import operator_event
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.flow import successors
from flowfabric.rules.scheduling import queue

FORMER_LIFE_FIELDS = lease.ClearableFields(
    "failure_reason",
    "cancellation_reason",
    "cancelled_by",
    "progress_pct",
    "progress_message",
    "progress_updated_at",
    "progress_counts",
)


def is_life_over(row: Execution | None, life: int | None) -> bool:
    """True if the life that was to be replayed has been replayed already."""
    return row is not None and life is not None and row.replay_count != life


def replay(
    row: Execution | None,
    *,
    branch: str = "normal",
    groups_reset: int | None = None,
    steps: Sequence[StepMemo] = (),
    replies: Sequence[Reply | None] = (),
) -> Decision[Replayed]:
    """Make a terminal execution claimable again. History, payload, tags, retry count and lease epoch stay.

    The deadline of the first run is not armed again. `branch` is the kind of replay, for the operator event. `steps`
    are the recorded steps: their tries start at 0. `replies` are those to received messages, which a success forgets.
    """
    if row is None or row.past_life == lives.BEING_PURGED:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is not LifecyclePhase.TERMINAL:
        return refuse(errors.ExecutionNotTerminal(execution_id=row.execution_id))
    if row.replay_count >= decode_terms(row.terms).max_replay_count:
        return refuse(errors.MaxReplaysExhausted(execution_id=row.execution_id))
    required = row.required_capabilities
    if row.terminal_outcome is TerminalOutcome.SUCCESS:  # its records are deleted, and so is its pin to a version
        required = decode_terms(row.terms).required_capabilities or None
    fields = queue.enqueue_fields(
        msgspec.structs.replace(row, required_capabilities=required), AttemptState.PENDING_REPLAY_ATTEMPT
    )
    if required != row.required_capabilities:
        fields["required_capabilities"] = required
    fields.update(
        lifecycle_phase=LifecyclePhase.RUNNABLE,
        terminal_outcome=TerminalOutcome.NONE,
        attempt_state=AttemptState.PENDING_REPLAY_ATTEMPT,
        replay_count=row.replay_count + 1,
        lineage=lease.encode_lineage(Lineage(replayed_from_attempt_index=row.attempt_index)),
        completed_at=None,
        purge_at=None,
        **FORMER_LIFE_FIELDS.clear(row),
    )
    if row.past_life is not None:
        fields |= lives.forgetting_fields(row.past_life)
    details = {"replay_count": row.replay_count + 1, "replay_type": branch, "branch": branch}
    if groups_reset is not None:
        details["groups_reset"] = groups_reset
    writes: tuple[Write, ...] = (transitions.transition(row, fields), Delete(Result, (row.execution_id,)))
    if lease.holds_successful_attempt(row):  # the next attempt overwrites its columns
        writes += (lease.attempt_record(row, AttemptRecordState.ENDED_SUCCESS, ended_at=row.completed_at),)
    if row.flow_id is not None:
        # Reopens the flow's summary. Written even if it is open, since a projector that has just seen all members
        # ended would close it.
        writes += (Patch(Flow, (row.flow_id,), {"project_at": NOW}),)
    change = Change(
        guards=(seen(row),),
        writes=writes + _memo_deletes(row, steps, replies) + successors.retraction_writes(row),
        events=(operator_event(row, "replayed", msgspec.json.encode(details).decode(), lease_name="replay_initiated"),),
    )
    return Decision(Replayed(PublicState.WAITING), change)


def _memo_deletes(row: Execution, steps: Sequence[StepMemo], replies: Sequence[Reply | None]) -> tuple[Write, ...]:
    """Return the deletes of step and gate memos after a success; after a failure the replay continues from them.

    Then only what belongs to steps without an end is deleted: the count of their tries, and that they began.
    """
    writes: tuple[Write, ...] = ()
    if row.terminal_outcome is not TerminalOutcome.SUCCESS:
        return tuple(
            Delete(StepMemo, (row.execution_id, memo.name, memo.occurrence))
            for memo in steps
            if memo.state in (StepState.TRIES, StepState.BEGAN)
        )
    if row.has_steps:
        writes += (Delete(StepMemo, (row.execution_id,)),)
    if row.has_waits:
        writes += (
            Delete(GateMemo, (row.execution_id,)),
            Patch(Suspension, (row.execution_id,), {"gates": None, "asks_until": None, "inbox_closed_at": None}),
            *asks.close_unanswered(replies, "its run was replayed"),
        )
    return writes
