"""Putting work on the shelf until something happens: what every suspension does to the execution and its waitpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from flowfabric import errors
from flowfabric.handles import HandleFields
from flowfabric.model.change import NOW, Change, Patch, Upsert, Write, from_now, lease_event, live, seen
from flowfabric.model.condition import Single
from flowfabric.model.execution import Execution
from flowfabric.model.signing_key import SigningKey
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
from flowfabric.rules.execution import lease, transitions
from flowfabric.rules.execution.lease import Fence
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
) -> Patch:
    """The row without its lease, waiting; the deadline of the whole execution keeps running.

    `keys` are what it waits on: one that names a budget lets room in that budget find it. `waits_for` says in words
    what a function waits for.
    """
    words = f"waitpoint {waitpoint_id} awaiting {reason_code}" if waits_for is None else f"waiting for {waits_for}"
    need = next((need for key in keys if (need := budget_rules.parse_need(key, row.namespace))), None)
    fields = {
        **lease.release(row),
        "lifecycle_phase": LifecyclePhase.SUSPENDED,
        "eligibility_state": EligibilityState.NOT_APPLICABLE,
        "blocking_reason": BLOCKING_REASON_OF_CODE.get(reason_code, BlockingReason.WAITING_FOR_SIGNAL),
        "blocking_text": f"suspended: {words if need is None else f'waiting for room in budget {need.budget_id}'}",
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
    return transitions.transition(row, fields)


def budget_needs(row: Execution, root: Suspension | None) -> list[budget_rules.BudgetNeed]:
    """What an open suspension of an execution waits for, as far as that is room in budgets."""
    if root is None or not wait_state.is_open(root):
        return []
    keys: list[str | None] = [one.waitpoint_key for one in wait_encoding.bound_waitpoints(root)]
    found = wait_state.open_gates(root)
    keys += [found[name].mailbox for name in gate_rules.parked_on(root) if name in found]
    return [need for key in keys if (need := budget_rules.parse_need(key, row.namespace))]


SCOPE = "suspend"


class MintedWaitpoint(msgspec.Struct, frozen=True):
    """A waitpoint and the token that was given out for it."""

    waitpoint_id: str
    waitpoint_key: str
    kid: str


class SuspendOutcome(msgspec.Struct, frozen=True):
    """What became of a suspend, kept as long as its key is remembered; the engine makes tokens and a handle of it."""

    suspended: bool  # else the signals that were there already satisfied the condition
    suspension_id: str
    waitpoints: tuple[MintedWaitpoint, ...]
    holder: HandleFields


class SuspendRows(msgspec.Struct, frozen=True):
    """What a suspend is decided on."""

    row: Execution | None
    root: Suspension | None
    remembered: IdempotencyRecord | None
    waitpoints: Mapping[str, Waitpoint]
    buffered: Sequence[Signal]
    keys: Sequence[SigningKey]


def suspend(
    scene: SuspendRows, args: SuspendArgs, fence: Fence, holder: HandleFields | None, now: int
) -> Decision[SuspendOutcome]:
    """Release the lease and wait; or find that what was waited for has come already, and change nothing of the work.

    `holder` is what the caller's handle says; without one (`fence` alone) it is read from the row.
    """
    kept, row, root = scene.remembered, scene.row, scene.root
    if kept is not None and kept.expires_at > now:
        return Decision(msgspec.json.decode(kept.answer, type=SuspendOutcome))
    if row is None:
        return refuse(errors.NotFound("execution"))
    held = lease.resolve_fence(row, fence, None)
    if isinstance(held, errors.FabricError):
        return refuse(held)
    if refused := lease.check_lease(row, held, now):
        return refused
    if holder is not None and holder.attempt_index != row.attempt_index:
        return refuse(errors.InvalidLeaseForSuspend(execution_id=row.execution_id))
    if wait_state.is_open(root):
        return refuse(errors.AlreadySuspended(execution_id=row.execution_id))
    holder = holder or _holder_of(row)
    primary = args.waitpoints[0]
    if isinstance(primary, UsePendingWaitpoint):
        return _on_pending(scene, row, args, holder, scene.waitpoints.get(primary.waitpoint_id), now)
    minted = _minted(scene, row, args, now)
    if isinstance(minted, errors.FabricError):
        return refuse(minted)
    return suspend_on(scene, row, args, holder, minted, {}, [], now)


def _on_pending(
    scene: SuspendRows, row: Execution, args: SuspendArgs, holder: HandleFields, waitpoint: Waitpoint | None, now: int
) -> Decision[SuspendOutcome]:
    if waitpoint is None:
        return refuse(errors.WaitpointNotFound())
    if wait_state.was_never_activated(waitpoint, now):
        return refuse(errors.PendingWaitpointExpired())
    if wait_state.waitpoint_state(waitpoint, scene.root, now) is not WaitpointState.PENDING:
        return refuse(errors.WaitpointNotPending())
    if (waitpoint.execution_id, waitpoint.attempt_index) != (row.execution_id, row.attempt_index):
        return refuse(errors.InvalidWaitpointForExecution())
    if not waitpoint.token_kid:
        return refuse(errors.WaitpointNotTokenBound())
    condition = args.resume_condition
    if isinstance(condition, Single) and condition.waitpoint_key != waitpoint.waitpoint_key:
        return refuse(errors.InvalidInput("waitpoint_key_mismatch"))
    active = msgspec.structs.replace(
        waitpoint,
        suspension_id=args.suspension_id,
        activated_at=from_now(0),
        expires_at=args.timeout_at,
        pending_until=None,
    )
    progress: conditions.Progress = {}
    counted: list[SignalRef] = []
    for signal in scene.buffered:
        effect, progress = conditions.apply_signal(condition, progress, _arrival(signal, waitpoint))
        if effect in (SignalEffect.SATISFIED, SignalEffect.APPENDED):
            counted.append(SignalRef(signal.waitpoint_id, signal.seq))
        if effect == SignalEffect.SATISFIED:
            return _satisfied(scene, row, args, holder, active, counted, signal)
    return suspend_on(scene, row, args, holder, [active], progress, counted, now)


def _arrival(signal: Signal, waitpoint: Waitpoint) -> IncomingSignal:
    return IncomingSignal(
        waitpoint.waitpoint_id,
        waitpoint.waitpoint_key,
        signal.signal_id,
        signal.signal_name,
        signal.source_type,
        signal.source_identity,
    )


def _minted(scene: SuspendRows, row: Execution, args: SuspendArgs, now: int) -> list[Waitpoint] | errors.FabricError:
    fresh = [binding for binding in args.waitpoints if isinstance(binding, FreshWaitpoint)]
    for binding in fresh:
        if waitpoint_rules.is_id_in_use(scene.waitpoints.get(binding.waitpoint_id), row, scene.root, now):
            return errors.WaitpointAlreadyExists()
    signer = keystore.waitpoint_signer(scene.keys)
    if isinstance(signer, errors.FabricError):
        return signer
    return [
        waitpoint_rules.new_waitpoint(
            row,
            signer,
            binding.waitpoint_id,
            binding.waitpoint_key,
            suspension_id=args.suspension_id,
            activated_at=from_now(0),
            expires_at=args.timeout_at,
        )
        for binding in fresh
    ]


def suspend_on(
    scene: SuspendRows,
    row: Execution,
    args: SuspendArgs,
    holder: HandleFields,
    waitpoints: Sequence[Waitpoint],
    progress: conditions.Progress,
    counted: Sequence[SignalRef],
    now: int,
) -> Decision[SuspendOutcome]:
    """The holder's work put away on these waitpoints, as far as its condition has come."""
    outcome = _outcome(args, holder, waitpoints, suspended=True)
    activated = isinstance(args.waitpoints[0], UsePendingWaitpoint)  # goes on with the signals that it kept
    root = _recorded(
        scene,
        row,
        args,
        waitpoints,
        progress=wait_encoding.encode_or_none(progress),
        satisfiers=wait_encoding.encode_or_none(list(counted)),
    )
    change = Change(
        guards=(seen(row, live(row)), wait_state.seen_suspension(scene.root, row.execution_id)),
        writes=(
            suspend_row(
                row,
                suspension_id=args.suspension_id,
                waitpoint_id=waitpoints[0].waitpoint_id,
                reason_code=args.reason_code,
                now=now,
                keys=[one.waitpoint_key for one in waitpoints],
            ),
            Upsert(root),
            *(
                (Upsert(waitpoints[0]),)
                if activated
                else waitpoint_rules.waitpoint_writes(waitpoints, scene.waitpoints)
            ),
            *waitpoint_rules.close_replaced_waitpoints(scene.root, waitpoints),
            *_remembered(row, args, outcome),
        ),
        events=(lease_event(row, "released", reason="suspend"),),
        not_before=_not_before(scene, args),
        not_after=_not_after(scene, args),
    )
    return Decision(outcome, change)


def _satisfied(
    scene: SuspendRows,
    row: Execution,
    args: SuspendArgs,
    holder: HandleFields,
    waitpoint: Waitpoint,
    counted: Sequence[SignalRef],
    closer: Signal,
) -> Decision[SuspendOutcome]:
    outcome = _outcome(args, holder, [waitpoint], suspended=False)
    root = _recorded(
        scene,
        row,
        args,
        [waitpoint],
        satisfiers=wait_encoding.encode_or_none(list(counted)),
        closer_signal_id=closer.signal_id,
        satisfied_at=from_now(0),
        closed_at=from_now(0),
        close_reason=wait_state.RESUMED,
        due_at=None,
    )
    change = Change(
        guards=(seen(row, live(row)), wait_state.seen_suspension(scene.root, row.execution_id)),
        writes=(
            Upsert(root),
            Upsert(waitpoint),
            *waitpoint_rules.close_replaced_waitpoints(scene.root, [waitpoint]),
            *_remembered(row, args, outcome),
        ),
        not_before=_not_before(scene, args),
        not_after=_not_after(scene, args),
    )
    return Decision(outcome, change)


def _recorded(
    scene: SuspendRows, row: Execution, args: SuspendArgs, waitpoints: Sequence[Waitpoint], **fields: object
) -> Suspension:
    """The root with this suspension in place of the one before; what belongs to the execution stays."""
    before = wait_state.suspension_or_new(scene.root, row)
    given: dict[str, object] = {
        "execution_id": before.execution_id,
        "partition": before.partition,
        "signal_count": before.signal_count,
        "gates": before.gates,
        "mail": before.mail,
        "suspension_id": args.suspension_id,
        "attempt_index": row.attempt_index,
        "waitpoints": wait_encoding.encode_or_none(
            [WaitpointRef(one.waitpoint_id, one.waitpoint_key) for one in waitpoints]
        ),
        "reason_code": args.reason_code,
        "requested_by": args.requested_by,
        "continuation_metadata_pointer": args.continuation_metadata_pointer,
        "created_at": from_now(0),
        "last_signal_at": waitpoints[0].last_signal_at,
        "timeout_at": args.timeout_at,
        "timeout_behavior": args.timeout_behavior,
        "due_at": NO_TIMEOUT if args.timeout_at is None else args.timeout_at,
        "resume_condition": conditions.encode_condition(args.resume_condition),
        "resume_policy": msgspec.json.encode(args.resume_policy).decode(),
    }
    return Suspension(**(given | fields))  # type: ignore[arg-type]


def _remembered(row: Execution, args: SuspendArgs, outcome: SuspendOutcome) -> tuple[Write, ...]:
    if not args.idempotency_key:
        return ()
    answer = msgspec.json.encode(outcome).decode()
    key = wait_encoding.key_digest(args.idempotency_key)
    return (Upsert(IdempotencyRecord(row.execution_id, SCOPE, key, from_now(args.answer_ttl_ms), answer)),)


def _outcome(
    args: SuspendArgs, holder: HandleFields, waitpoints: Sequence[Waitpoint], *, suspended: bool
) -> SuspendOutcome:
    minted = tuple(MintedWaitpoint(one.waitpoint_id, one.waitpoint_key, one.token_kid) for one in waitpoints)
    return SuspendOutcome(suspended, args.suspension_id, minted, holder)


def _not_before(scene: SuspendRows, args: SuspendArgs) -> int | None:
    """A key whose time was over at the look must be over."""
    kept = scene.remembered
    return kept.expires_at if args.idempotency_key and kept is not None else None


def _not_after(scene: SuspendRows, args: SuspendArgs) -> int | None:
    """A waitpoint that was pending at the look may not be activated after its time."""
    primary = args.waitpoints[0]
    if not isinstance(primary, UsePendingWaitpoint):
        return None
    until = scene.waitpoints[primary.waitpoint_id].pending_until
    return None if until is None else until - 1


def _holder_of(row: Execution) -> HandleFields:
    ttl = (row.lease_expires_at or 0) - (row.lease_renewed_at or 0)
    return HandleFields(
        row.execution_id,  # type: ignore[arg-type]
        row.attempt_index or 0,
        row.attempt_id,  # type: ignore[arg-type]
        row.lease_id,  # type: ignore[arg-type]
        row.lease_epoch,
        ttl,
        row.current_lane or row.lane_id,  # type: ignore[arg-type]
        row.worker_instance_id,  # type: ignore[arg-type]
    )
