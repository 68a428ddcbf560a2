"""Lives: a durable function continues as new, under the same id, with another input and an empty past.

The change that begins the next life keeps what others know of the run (its id, key, tags, parent and unread mail) and
deletes what it remembers. It is as large as that, never as large as the mailbox. If the run remembers more than one
change may delete, it is not claimable until the rest is deleted, some rows at a time: `past_life` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.answers.execution import Continued
from flowfabric.model.change import Change, Delete, Insert, Patch, Upsert, Write, lease_event, live, seen
from flowfabric.model.execution import Execution, Payload
from flowfabric.model.gate import ChildCompletion, GateMemo, Reply, StepMemo
from flowfabric.model.instant import NOW, FromNow
from flowfabric.model.states import AttemptRecordState, AttemptState, BlockingReason, EligibilityState, LifecyclePhase
from flowfabric.model.suspension import Suspension, Waitpoint
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import asks, mailbox, releases
from flowfabric.rules.durable.leave import returned_message
from flowfabric.rules.execution import cleanup, fences, lease, transitions
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.scheduling import queue
from flowfabric.rules.suspension import state as wait_state

BEING_PURGED = -1  # as `past_life` of a finished run: its rows are being deleted, and it can no longer be replayed
MAX_FORGOTTEN = 200  # rows that one change deletes by name
WENT_ON = "went_on"  # why the approvals of the former life are closed
UNANSWERED = "its run continued as new"
REMEMBERED = (StepMemo, GateMemo, ChildCompletion)

Memo = StepMemo | GateMemo | ChildCompletion


class LifeRows(msgspec.Struct, frozen=True):
    """The rows that the next life is decided on."""

    row: Execution | None
    root: Suspension | None = None
    unmet: Sequence[GateMemo] = ()  # their gates have closed, but the function has not seen the outcome
    memos: Sequence[Memo] = ()  # memos that this change deletes
    has_more: bool = False  # True if further memos remain
    replies: Sequence[Reply | None] = ()  # they answer the messages that these memos received


def continue_as_new(
    rows: LifeRows, input_payload: bytes, encoding: str | None, fence: Fence, now: int
) -> Decision[Continued]:
    """Begin the next life of a run with another input, at the end of its queue.

    The deadline of the run stays, and so does the version that it is pinned to. A holder that calls again because the
    reply was lost gets the same answer.
    """
    row = rows.row
    if row is None:
        return refuse(errors.NotFound("execution"))
    life = (row.life or 0) + 1
    if refused := fences.check_lease(row, fence, now):
        if _continued_by(row, fence):
            return Decision(Continued(row.execution_id, life - 1, is_forgotten=row.past_life is None))
        return refused
    terms = decode_terms(row.terms)
    fields: dict[str, Any] = {
        "lifecycle_phase": LifecyclePhase.RUNNABLE,
        "attempt_state": AttemptState.PENDING_FIRST_ATTEMPT,
        "attempt_id": None,
        "lineage": None,
        "retry_count": 0,
        "progress_counts": None,
        "failure_reason": None,
        "rank": FromNow(queue.position_offset(row.priority, terms)),
        "life": life,
        **lease.release(row),
        **queue.enqueue_fields(row, AttemptState.PENDING_FIRST_ATTEMPT),
    }
    if kept := _without_patches(row):
        fields |= kept
    if rows.has_more:
        fields |= forgetting_fields(row.life or 0)
    else:
        fields["has_steps"] = False
    writes: tuple[Write, ...] = (
        transitions.transition(row, fields),
        lease.attempt_record(row, AttemptRecordState.ENDED_SUCCESS),
        Patch(Payload, (row.execution_id,), {"input_payload": input_payload or None, "payload_encoding": encoding}),
        *cleanup.close_stream(row, WENT_ON),
        *_close_waits(rows, row),
        *_forget(row, rows),
    )
    change = Change(
        guards=(seen(row, live(row)), wait_state.seen_suspension(rows.root, row.execution_id)),
        writes=writes,
        events=(lease_event(row, "released", reason="continued_as_new"),),
    )
    return Decision(Continued(row.execution_id, life, is_forgotten=not rows.has_more), change)


def forget(rows: LifeRows) -> Decision[bool | None]:
    """Delete memos of the former life, and without more of them make the run claimable.

    The answer is whether there are more; None if there was nothing to forget.
    """
    row = rows.row
    if row is None or row.past_life in (None, BEING_PURGED):
        return Decision(None)
    fields: dict[str, Any] = {"last_mutation_at": NOW}
    if not rows.has_more:
        fields |= {"past_life": None, "has_steps": False}
        if row.lifecycle_phase is LifecyclePhase.RUNNABLE:
            fields |= queue.enqueue_fields(row, row.attempt_state)
    change = Change(guards=(seen(row),), writes=(transitions.transition(row, fields), *_forget(row, rows)))
    return Decision(rows.has_more, change)


def forgetting_fields(past_life: int) -> dict[str, Any]:
    """Return the columns of a run that is not claimable until its former life is forgotten."""
    return {
        "past_life": past_life,
        "eligibility_state": EligibilityState.NOT_ELIGIBLE_UNTIL_TIME,
        "blocking_reason": BlockingReason.WAITING_FOR_DELAY,
        "blocking_text": "what its former life remembered is being deleted",
        "delay_until": NOW,
        "line": None,
    }


def _continued_by(row: Execution, fence: Fence) -> bool:
    """True if this holder began the present life. The epoch suffices, because the next claim increments it."""
    return (
        row.life is not None
        and row.lifecycle_phase is LifecyclePhase.RUNNABLE
        and row.attempt_state is AttemptState.PENDING_FIRST_ATTEMPT
        and row.lease_epoch == fence.lease_epoch
    )


def _without_patches(row: Execution) -> dict[str, Any]:
    """Return the tags without those of patches: the next life asks again."""
    if not releases.old_ways(row):
        return {}
    tags = tag_rules.decode_tags(row.tags)
    return {
        "tags": tag_rules.encode_tags(
            {name: value for name, value in tags.items() if not name.startswith(releases.PATCH_TAG_PREFIX)}
        )
    }


def _close_waits(rows: LifeRows, row: Execution) -> tuple[Write, ...]:
    """Close gates and approvals; a message that a gate received, but no branch has seen, stays unread."""
    root = rows.root
    gates = wait_state.open_gates(root)
    unseen = [memo for memo in rows.unmet if memo.mailbox is not None]
    if root is None or not (gates or unseen or root.inbox_closed_at is not None):
        return ()
    fields = {**wait_state.gate_columns({}), "inbox_closed_at": None}
    writes: tuple[Write, ...] = ()
    if unseen:
        order = sorted(unseen, key=lambda memo: (memo.message_number or 0, memo.closed_at, memo.number or 0))
        fields["mail"], unread = mailbox.return_to_head(root, [returned_message(memo) for memo in order])
        writes += tuple(Insert(message) for message in unread)
    closed = {"closed_at": NOW, "close_reason": WENT_ON}
    writes += tuple(
        Patch(Waitpoint, (waitpoint_id, row.partition), closed, unless_set="closed_at")
        for gate in gates.values()
        for waitpoint_id, _ in gate.waitpoints
    )
    return (Upsert(msgspec.structs.replace(root, **fields)), *writes)


def _forget(row: Execution, rows: LifeRows) -> tuple[Write, ...]:
    """Return the deletes of these memos, and end the asks that nobody will answer.

    Without more memos all are deleted, also those written since they were read.
    """
    writes = asks.close_unanswered(rows.replies, UNANSWERED)
    if not rows.has_more:
        return writes + tuple(Delete(kind, (row.execution_id,)) for kind in REMEMBERED)
    # Those of returned messages go first: what is deleted later counts as received.
    forgotten = dict.fromkeys((type(memo), _key(memo)) for memo in (*rows.unmet, *rows.memos))
    return writes + tuple(Delete(kind, key) for kind, key in forgotten)


def _key(memo: Memo) -> tuple[Any, ...]:
    match memo:
        case StepMemo():
            return (memo.execution_id, memo.name, memo.occurrence)
        case GateMemo():
            return (memo.execution_id, memo.gate)
        case ChildCompletion():
            return (memo.parent_id, memo.child_id, memo.life)
