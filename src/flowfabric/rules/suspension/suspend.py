"""Suspend: release the lease and wait until the resume condition is met.

Signals that arrived at a pending waitpoint beforehand are counted first. If they already satisfy the condition, the
execution is not suspended and its lease stays. A suspend with an idempotency key stores its answer, so that a repeated
call returns the same outcome.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.handles import HandleFields
from flowfabric.model.change import Change, Patch, Upsert, Write, lease_event, live, seen
from flowfabric.model.condition import Single
from flowfabric.model.execution import Execution
from flowfabric.model.instant import NOW, Draft, FromNow
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.model.states import AttemptState, BlockingReason, EligibilityState, LifecyclePhase
from flowfabric.model.suspension import (
    NO_TIMEOUT,
    IdempotencyRecord,
    Signal,
    Suspension,
    Waitpoint,
    WaitpointState,
)
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.execution import fences, lease, transitions
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.scheduling import queue
from flowfabric.rules.security import keystore
from flowfabric.rules.suspension import conditions
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension import waitpoints as waitpoint_rules
from flowfabric.rules.suspension.arguments import FreshWaitpoint, SuspendArgs, UsePendingWaitpoint
from flowfabric.rules.suspension.conditions import IncomingSignal, SignalEffect
from flowfabric.rules.suspension.encoding import SignalRef, WaitpointRef

BLOCKING_REASON_OF_CODE = {
    "waiting_for_signal": BlockingReason.WAITING_FOR_SIGNAL,
    "waiting_for_approval": BlockingReason.WAITING_FOR_APPROVAL,
    "waiting_for_callback": BlockingReason.WAITING_FOR_CALLBACK,
    "waiting_for_tool_result": BlockingReason.WAITING_FOR_TOOL_RESULT,
    "waiting_for_operator_review": BlockingReason.PAUSED_BY_OPERATOR,
    "paused_by_policy": BlockingReason.PAUSED_BY_POLICY,
    "paused_by_budget": BlockingReason.WAITING_FOR_BUDGET,
    "step_boundary": BlockingReason.WAITING_FOR_SIGNAL,
    "manual_pause": BlockingReason.PAUSED_BY_OPERATOR,
}


def suspend_row(
    row: Execution,
    *,
    suspension_id: str,
    waitpoint_id: str | None,
    reason_code: str,
    now: int,
    waits_for: str | None = None,
    keys: Iterable[str | None] = (),
    held_task: str | None = None,
) -> Patch:
    """Return the patch that suspends a row without its lease. The execution deadline keeps running.

    `keys` are the keys waited on. A key that names a budget lets an unblock of that budget find the row. `waits_for`
    describes what a durable function waits for. `held_task` is the task whose code has to change before it continues.
    """
    text = f"waitpoint {waitpoint_id} awaiting {reason_code}" if waits_for is None else f"waiting for {waits_for}"
    need = next((need for key in keys if (need := budget_rules.parse_need(key, row.namespace))), None)
    fields = {
        **lease.release(row),
        "lifecycle_phase": LifecyclePhase.SUSPENDED,
        "eligibility_state": EligibilityState.NOT_APPLICABLE,
        "blocking_reason": BLOCKING_REASON_OF_CODE.get(reason_code, BlockingReason.WAITING_FOR_SIGNAL),
        "blocking_text": f"suspended: {text if need is None else f'waiting for room in budget {need.budget_id}'}",
        "attempt_state": AttemptState.ATTEMPT_INTERRUPTED,
        "attempt_suspended_at": NOW,
        "attempt_suspension": suspension_id,
        "current_suspension_id": suspension_id,
        "current_waitpoint_id": waitpoint_id,
        "has_waits": True,
        "next_type": None,
        "next_timeout_ms": transitions.remaining_timeout_ms(row, now),
    }
    if need is not None:
        fields |= {"blocked_on": queue.asleep_on_key(need.budget), "blocked_at": NOW}
    if held_task is not None:
        fields |= {"blocked_on": queue.held_by_key(held_task), "blocked_at": NOW}
    return transitions.transition(row, fields)


def budget_needs(row: Execution, suspension: Suspension | None) -> list[budget_rules.BudgetNeed]:
    """Return the budget capacity that an open suspension waits for."""
    if suspension is None or not wait_state.is_open(suspension):
        return []
    keys: list[str | None] = [waitpoint.waitpoint_key for waitpoint in wait_encoding.bound_waitpoints(suspension)]
    gates = wait_state.open_gates(suspension)
    keys += [gates[name].mailbox for name in gate_rules.parked_on(suspension) if name in gates]
    return [need for key in keys if (need := budget_rules.parse_need(key, row.namespace))]


SCOPE = "suspend"


class MintedWaitpoint(msgspec.Struct, frozen=True):
    """A waitpoint and the key id that signed its token."""

    waitpoint_id: str
    waitpoint_key: str
    kid: str


class SuspendOutcome(msgspec.Struct, frozen=True):
    """The outcome of a suspend, stored with its idempotency key; the engine makes tokens and a handle of it."""

    suspended: bool  # False if buffered signals already satisfied the condition
    suspension_id: str
    waitpoints: tuple[MintedWaitpoint, ...]
    holder: HandleFields


class SuspendRows(msgspec.Struct, frozen=True):
    """The rows that a suspend is decided on."""

    row: Execution | None
    root: Suspension | None
    remembered: IdempotencyRecord | None
    waitpoints: Mapping[str, Waitpoint]
    buffered: Sequence[Signal]
    keys: Sequence[SigningKey]


def suspend(
    rows: SuspendRows, args: SuspendArgs, fence: Fence, holder: HandleFields | None, now: int
) -> Decision[SuspendOutcome]:
    """Release the lease and wait; or, if buffered signals already satisfy the condition, keep the lease.

    `holder` is the content of the caller's handle; without it, it is read from the row.
    """
    record, row, suspension = rows.remembered, rows.row, rows.root
    if record is not None and record.expires_at > now:
        return Decision(msgspec.json.decode(record.answer, type=SuspendOutcome))
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_fence(row, fence, None, now):
        return refused
    if holder is not None and holder.attempt_index != row.attempt_index:
        return refuse(errors.InvalidLeaseForSuspend(execution_id=row.execution_id))
    if wait_state.is_open(suspension):
        return refuse(errors.AlreadySuspended(execution_id=row.execution_id))
    holder = holder or lease.handle_fields(row, (row.lease_expires_at or 0) - (row.lease_renewed_at or 0))
    primary = args.waitpoints[0]
    if isinstance(primary, UsePendingWaitpoint):
        return _suspend_on_pending(rows, row, args, holder, rows.waitpoints.get(primary.waitpoint_id), now)
    minted = _mint_waitpoints(rows, row, args, now)
    if isinstance(minted, errors.FabricError):
        return refuse(minted)
    return suspend_on(rows, row, args, holder, minted, {}, [], now)


def _suspend_on_pending(
    rows: SuspendRows, row: Execution, args: SuspendArgs, holder: HandleFields, waitpoint: Waitpoint | None, now: int
) -> Decision[SuspendOutcome]:
    if waitpoint is None:
        return refuse(errors.WaitpointNotFound())
    if wait_state.was_never_activated(waitpoint, now):
        return refuse(errors.PendingWaitpointExpired())
    if wait_state.waitpoint_state(waitpoint, rows.root, now) is not WaitpointState.PENDING:
        return refuse(errors.WaitpointNotPending())
    if (waitpoint.execution_id, waitpoint.attempt_index) != (row.execution_id, row.attempt_index):
        return refuse(errors.InvalidWaitpointForExecution())
    if not waitpoint.token_kid:
        return refuse(errors.WaitpointNotTokenBound())
    condition = args.resume_condition
    if isinstance(condition, Single) and condition.waitpoint_key != waitpoint.waitpoint_key:
        return refuse(errors.InvalidInput("waitpoint_key_mismatch"))
    active: Waitpoint[Draft] = msgspec.structs.replace(
        waitpoint,
        suspension_id=args.suspension_id,
        activated_at=NOW,
        expires_at=args.timeout_at,
        pending_until=None,
    )
    progress: conditions.Progress = {}
    counted: list[SignalRef] = []
    for signal in rows.buffered:
        effect, progress = conditions.apply_signal(condition, progress, _incoming_signal(signal, waitpoint))
        if effect in (SignalEffect.SATISFIED, SignalEffect.APPENDED):
            counted.append(SignalRef(signal.waitpoint_id, signal.seq))
        if effect == SignalEffect.SATISFIED:
            return _already_satisfied(rows, row, args, holder, active, counted, signal)
    return suspend_on(rows, row, args, holder, [active], progress, counted, now)


def _incoming_signal(signal: Signal, waitpoint: Waitpoint) -> IncomingSignal:
    return IncomingSignal(
        waitpoint.waitpoint_id,
        waitpoint.waitpoint_key,
        signal.signal_id,
        signal.signal_name,
        signal.source_type,
        signal.source_identity,
    )


def _mint_waitpoints(
    rows: SuspendRows, row: Execution, args: SuspendArgs, now: int
) -> list[Waitpoint[Draft]] | errors.FabricError:
    fresh = [binding for binding in args.waitpoints if isinstance(binding, FreshWaitpoint)]
    for binding in fresh:
        if waitpoint_rules.is_id_in_use(rows.waitpoints.get(binding.waitpoint_id), row, rows.root, now):
            return errors.WaitpointAlreadyExists()
    signer = keystore.waitpoint_signer(rows.keys)
    if isinstance(signer, errors.FabricError):
        return signer
    return [
        waitpoint_rules.new_waitpoint(
            row,
            signer,
            binding.waitpoint_id,
            binding.waitpoint_key,
            suspension_id=args.suspension_id,
            activated_at=NOW,
            expires_at=args.timeout_at,
        )
        for binding in fresh
    ]


def suspend_on(
    rows: SuspendRows,
    row: Execution,
    args: SuspendArgs,
    holder: HandleFields,
    waitpoints: Sequence[Waitpoint[Draft]],
    progress: conditions.Progress,
    counted: Sequence[SignalRef],
    now: int,
) -> Decision[SuspendOutcome]:
    """Return the decision that suspends on these waitpoints with the progress so far."""
    outcome = _outcome(args, holder, waitpoints, suspended=True)
    activated = isinstance(args.waitpoints[0], UsePendingWaitpoint)  # it keeps its buffered signals
    suspension = _suspension_row(
        rows,
        row,
        args,
        waitpoints,
        progress=wait_encoding.encode_or_none(progress),
        satisfiers=wait_encoding.encode_or_none(list(counted)),
    )
    change = Change(
        guards=(seen(row, live(row)), wait_state.seen_suspension(rows.root, row.execution_id)),
        writes=(
            suspend_row(
                row,
                suspension_id=args.suspension_id,
                waitpoint_id=waitpoints[0].waitpoint_id,
                reason_code=args.reason_code,
                now=now,
                keys=[waitpoint.waitpoint_key for waitpoint in waitpoints],
            ),
            Upsert(suspension),
            *((Upsert(waitpoints[0]),) if activated else waitpoint_rules.waitpoint_writes(waitpoints, rows.waitpoints)),
            *waitpoint_rules.close_replaced_waitpoints(rows.root, waitpoints),
            *_idempotency_writes(row, args, outcome),
        ),
        events=(lease_event(row, "released", reason="suspend"),),
        not_before=_not_before(rows, args),
        not_after=_not_after(rows, args),
    )
    return Decision(outcome, change)


def _already_satisfied(
    rows: SuspendRows,
    row: Execution,
    args: SuspendArgs,
    holder: HandleFields,
    waitpoint: Waitpoint[Draft],
    counted: Sequence[SignalRef],
    closer: Signal,
) -> Decision[SuspendOutcome]:
    """Return the decision for a wait whose buffered signals satisfy it: record it as closed and keep the lease."""
    outcome = _outcome(args, holder, [waitpoint], suspended=False)
    suspension = _suspension_row(
        rows,
        row,
        args,
        [waitpoint],
        satisfiers=wait_encoding.encode_or_none(list(counted)),
        closer_signal_id=closer.signal_id,
        satisfied_at=NOW,
        closed_at=NOW,
        close_reason=wait_state.RESUMED,
        due_at=None,
    )
    change = Change(
        guards=(seen(row, live(row)), wait_state.seen_suspension(rows.root, row.execution_id)),
        writes=(
            Upsert(suspension),
            Upsert(waitpoint),
            *waitpoint_rules.close_replaced_waitpoints(rows.root, [waitpoint]),
            *_idempotency_writes(row, args, outcome),
        ),
        not_before=_not_before(rows, args),
        not_after=_not_after(rows, args),
    )
    return Decision(outcome, change)


def _suspension_row(
    rows: SuspendRows, row: Execution, args: SuspendArgs, waitpoints: Sequence[Waitpoint[Draft]], **fields: Any
) -> Suspension[Draft]:
    """Return the suspension row with this suspension instead of the previous one; columns of the execution stay."""
    columns: dict[str, Any] = {
        "suspension_id": args.suspension_id,
        "attempt_index": row.attempt_index,
        "waitpoints": wait_encoding.encode_or_none(
            [WaitpointRef(waitpoint.waitpoint_id, waitpoint.waitpoint_key) for waitpoint in waitpoints]
        ),
        "reason_code": args.reason_code,
        "requested_by": args.requested_by,
        "continuation_metadata_pointer": args.continuation_metadata_pointer,
        "last_signal_at": waitpoints[0].last_signal_at,
        "timeout_at": args.timeout_at,
        "timeout_behavior": args.timeout_behavior,
        "due_at": NO_TIMEOUT if args.timeout_at is None else args.timeout_at,
        "resume_condition": conditions.encode_condition(args.resume_condition),
        "resume_policy": msgspec.json.encode(args.resume_policy).decode(),
    }
    return wait_state.next_suspension(wait_state.suspension_or_new(rows.root, row), **(columns | fields))


def _idempotency_writes(row: Execution, args: SuspendArgs, outcome: SuspendOutcome) -> tuple[Write, ...]:
    if not args.idempotency_key:
        return ()
    answer = msgspec.json.encode(outcome).decode()
    key = wait_encoding.key_digest(args.idempotency_key)
    return (Upsert(IdempotencyRecord(row.execution_id, SCOPE, key, FromNow(args.answer_ttl_ms), answer)),)


def _outcome(
    args: SuspendArgs, holder: HandleFields, waitpoints: Sequence[Waitpoint[Draft]], *, suspended: bool
) -> SuspendOutcome:
    minted = tuple(
        MintedWaitpoint(waitpoint.waitpoint_id, waitpoint.waitpoint_key, waitpoint.token_kid)
        for waitpoint in waitpoints
    )
    return SuspendOutcome(suspended, args.suspension_id, minted, holder)


def _not_before(rows: SuspendRows, args: SuspendArgs) -> int | None:
    """An idempotency record that had expired when it was loaded must have expired at the commit."""
    record = rows.remembered
    return record.expires_at if args.idempotency_key and record is not None else None


def _not_after(rows: SuspendRows, args: SuspendArgs) -> int | None:
    """A waitpoint that was pending when it was loaded must be activated before it expires."""
    primary = args.waitpoints[0]
    if not isinstance(primary, UsePendingWaitpoint):
        return None
    pending_until = rows.waitpoints[primary.waitpoint_id].pending_until
    return None if pending_until is None else pending_until - 1
