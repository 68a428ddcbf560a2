"""Signals: authenticate the sender, count the signal towards what waits, exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Delete, Insert, Patch, Upsert, Write, seen
from flowfabric.model.event import Event
from flowfabric.model.execution import Execution
from flowfabric.model.instant import NOW, Draft, FromNow
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.model.states import LifecyclePhase
from flowfabric.model.suspension import IdempotencyRecord, Signal, Suspension, Waitpoint, WaitpointState
from flowfabric.model.view import view_of
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.durable import vote_schema
from flowfabric.rules.security import waitpoint_token as waitpoint_tokens
from flowfabric.rules.suspension import conditions
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension.arguments import ResumePolicy
from flowfabric.rules.suspension.conditions import UNMATCHED, IncomingSignal, SignalEffect
from flowfabric.rules.suspension.encoding import SignalRef

MAX_PAYLOAD_BYTES = 65_536
DEDUP_TTL_MS = 24 * 60 * 60 * 1000
SIGNAL_CAP = 10_000
LOG_LENGTH = 1000
DEDUPED = "deduped"


class SignalArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a signal."""

    execution_id: str
    waitpoint_id: str
    signal_id: str
    signal_name: str
    waitpoint_token: waitpoint_tokens.WaitpointToken | str
    signal_category: str = ""
    source_type: str = ""
    source_identity: str = ""
    payload: bytes | None = None
    payload_encoding: str | None = "json"
    correlation_id: str | None = None
    idempotency_key: str | None = None
    target_scope: str = "waitpoint"
    created_at: int | None = None
    dedup_ttl_ms: int = DEDUP_TTL_MS
    resume_delay_ms: int | None = None
    max_signals_per_execution: int = SIGNAL_CAP
    signal_maxlen: int = LOG_LENGTH

    def __post_init__(self) -> None:
        if isinstance(self.waitpoint_token, str):  # a plain str would appear in logs and tracebacks
            msgspec.structs.force_setattr(
                self, "waitpoint_token", waitpoint_tokens.WaitpointToken(self.waitpoint_token)
            )

    @property
    def is_deduplicated(self) -> bool:
        """True if a repetition of this signal is recognised."""
        return bool(self.idempotency_key) and self.dedup_ttl_ms > 0


class Accepted(msgspec.Struct, frozen=True):
    """A signal or message that was accepted, and its effect."""

    signal_id: str
    effect: str

    @property
    def is_useful(self) -> bool:
        """True if the signal was buffered or brought a wait closer to its condition."""
        return self.effect not in UNMATCHED and self.effect != SignalEffect.DUPLICATE


class DuplicateDelivery(msgspec.Struct, frozen=True):
    """The signal was accepted before; nothing changed."""

    variant: ClassVar[str] = "Duplicate"

    existing_signal_id: str


class SignalRows(msgspec.Struct, frozen=True):
    """The rows that a delivery is decided on."""

    row: Execution | None
    root: Suspension | None
    waitpoint: Waitpoint | None
    remembered: IdempotencyRecord | None
    keys: Sequence[SigningKey]
    call: str = ""  # identifies the call, because a sender may send the same signal twice


def deliver_signal(rows: SignalRows, args: SignalArgs, now: int) -> Decision[Accepted | DuplicateDelivery]:
    """Accept a signal once: buffer it before the wait, count it towards the condition, resume when that is met.

    The token is checked before anything about the state of the target is revealed.
    """
    row, waitpoint = rows.row, rows.waitpoint
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := check_token(
        waitpoint,
        rows.keys,
        _token_text(args),
        execution_id=args.execution_id,
        waitpoint_id=args.waitpoint_id,
        now=now,
    ):
        failure_time = Patch(
            Execution, (row.execution_id,), {"last_hmac_validation_failed_at": NOW, "last_mutation_at": NOW}
        )
        return Decision(refused, Change(guards=(seen(row),), writes=(failure_time,)))
    assert waitpoint is not None  # a token for a missing waitpoint was refused above
    record = rows.remembered
    if args.is_deduplicated and record is not None and record.expires_at > now:
        duplicate_event = signal_event(
            row, record.answer, waitpoint.waitpoint_id, args.source_identity, DEDUPED, rows.call
        )
        return Decision(DuplicateDelivery(record.answer), Change(guards=(seen(row),), events=(duplicate_event,)))
    if row.lifecycle_phase is LifecyclePhase.TERMINAL:
        return refuse(errors.TargetNotSignalable(execution_id=row.execution_id))
    if wait_state.is_pending_expired(waitpoint, now):
        return refuse(errors.WaitpointClosed(execution_id=row.execution_id))
    if wait_state.waitpoint_state(waitpoint, rows.root, now) is WaitpointState.CLOSED:
        if row.lifecycle_phase is LifecyclePhase.SUSPENDED:
            return refuse(errors.WaitpointClosed(execution_id=row.execution_id))
        return refuse(errors.TargetNotSignalable(execution_id=row.execution_id))
    suspension = wait_state.suspension_or_new(rows.root, row)
    if 0 < args.max_signals_per_execution <= suspension.signal_count:
        return refuse(errors.SignalLimitExceeded(execution_id=row.execution_id))
    if invalid := vote_schema.check_vote(row, waitpoint, args.payload):
        return refuse(invalid)
    return _accept(rows, row, suspension, waitpoint, args, now)


def approval_token(
    row: Execution | None, waitpoint: Waitpoint | None, keys: Sequence[SigningKey], lane_id: str
) -> waitpoint_tokens.WaitpointToken | errors.FabricError:
    """Return the token that delivers an operator's approval, or why this waitpoint cannot be approved."""
    if row is None:
        return errors.NotFound("execution")
    if lane_id != row.lane_id:
        return errors.InvalidInput(f"lane_mismatch: the execution is in lane {row.lane_id}")
    if waitpoint is None or waitpoint.execution_id != row.execution_id:
        return errors.NotFound("waitpoint")
    token = waitpoint_tokens.remint_token(keys, waitpoint.token_kid, row.execution_id, waitpoint.waitpoint_id)
    return waitpoint_tokens.WaitpointToken(token)


def check_token(
    waitpoint: Waitpoint | None,
    keys: Sequence[SigningKey],
    token: str,
    *,
    execution_id: str,
    waitpoint_id: str,
    now: int,
) -> errors.FabricError | None:
    """Return why a token does not permit signalling this waitpoint, open or closed; None if it does."""
    # The waitpoint stores the kid and a prefix of the digest. A token that matches both is the one that was issued: a
    # kid that was dropped and reused with another secret signs other digests.
    is_issued = waitpoint is not None and waitpoint_tokens.matches_stored(
        token, waitpoint.token_kid, waitpoint.token_fingerprint
    )
    return waitpoint_tokens.verify_token(
        token,
        keys,
        execution_id=execution_id,
        waitpoint_id=waitpoint_id,
        owner=waitpoint.execution_id if waitpoint is not None else None,
        stored=token if is_issued else None,
        now=now,
    )


def _token_text(args: SignalArgs) -> str:
    token = args.waitpoint_token
    return token if isinstance(token, str) else token.reveal()


def _accept(
    rows: SignalRows, row: Execution, suspension: Suspension, waitpoint: Waitpoint, args: SignalArgs, now: int
) -> Decision[Accepted | DuplicateDelivery]:
    ref = SignalRef(waitpoint.waitpoint_id, waitpoint.signal_count + 1)
    effect, fields, writes = _apply(row, suspension, waitpoint, args, ref, now)
    fields |= {"signal_count": suspension.signal_count + 1}
    log_start = max(waitpoint.log_start, ref.seq - args.signal_maxlen + 1)
    updated: Waitpoint[Draft] = msgspec.structs.replace(
        waitpoint,
        signal_count=ref.seq,
        matched_signal_count=waitpoint.matched_signal_count + (effect not in UNMATCHED),
        last_signal_at=NOW,
        log_start=log_start,
    )
    record = Upsert(IdempotencyRecord(row.execution_id, *_record_key(args), FromNow(args.dedup_ttl_ms), args.signal_id))
    change = Change(
        guards=(seen(row), wait_state.seen_suspension(rows.root, row.execution_id)),
        writes=(
            Patch(Suspension, (row.execution_id,), fields),  # exists since the first waitpoint
            Upsert(updated),
            Insert(_signal_row(args, ref.seq, effect)),
            *_trim_log(suspension, waitpoint, log_start),
            *((record,) if args.is_deduplicated else ()),
            *writes,
        ),
        events=(signal_event(row, args.signal_id, waitpoint.waitpoint_id, args.source_identity, effect, rows.call),),
        not_before=_not_before(rows, args),
        not_after=_not_after(rows, args),
    )
    return Decision(Accepted(args.signal_id, effect), change)


def _apply(
    row: Execution, suspension: Suspension, waitpoint: Waitpoint, args: SignalArgs, ref: SignalRef, now: int
) -> tuple[str, dict[str, Any], tuple[Write, ...]]:
    """Return the signal's effect, the columns of the suspension that change, and further writes."""
    incoming = IncomingSignal(
        waitpoint.waitpoint_id,
        waitpoint.waitpoint_key,
        args.signal_id,
        args.signal_name,
        args.source_type,
        args.source_identity,
    )
    if waitpoint.gate is not None:
        return gate_rules.apply_vote(row, suspension, waitpoint.gate, incoming, ref.seq, now)
    if waitpoint.suspension_id is None:
        return SignalEffect.BUFFERED, {}, ()
    condition = conditions.decode_condition(suspension.resume_condition or '"OperatorOnly"')
    effect, progress = conditions.apply_signal(condition, wait_encoding.decode_progress(suspension.progress), incoming)
    fields: dict[str, Any] = {"last_signal_at": NOW}
    if effect not in (SignalEffect.SATISFIED, SignalEffect.APPENDED):
        return effect, fields, ()
    fields |= {
        "progress": wait_encoding.encode_or_none(progress),
        "satisfiers": wait_encoding.encode_or_none([*wait_encoding.satisfiers(suspension), ref]),
    }
    if effect == SignalEffect.APPENDED:
        return effect, fields, ()
    fields |= {
        "satisfied_at": NOW,
        "closed_at": NOW,
        "close_reason": wait_state.RESUMED,
        "closer_signal_id": args.signal_id,
        "due_at": None,
    }
    delay = _delay_ms(suspension, args)
    return (
        effect,
        fields,
        (wait_state.resume_row(row, delay, f"resume delay {delay}ms after signal {args.signal_name}"),),
    )


def _delay_ms(suspension: Suspension, args: SignalArgs) -> int:
    if args.resume_delay_ms is not None:
        return args.resume_delay_ms
    policy = msgspec.json.decode(suspension.resume_policy or "{}", type=ResumePolicy)
    return policy.resume_delay_ms or 0


def _signal_row(args: SignalArgs, seq: int, effect: str) -> Signal[Draft]:
    return view_of(
        Signal,
        args,
        seq=seq,
        created_at=NOW if args.created_at is None else args.created_at,
        accepted_at=NOW,
        observed_effect=effect,
        correlation_id=args.correlation_id or None,
        idempotency_key=args.idempotency_key or None,
        payload=args.payload or None,
    )


def _trim_log(suspension: Suspension, waitpoint: Waitpoint, log_start: int) -> tuple[Write, ...]:
    """Return deletes of the entries that leave the log. Counted signals stay, for the worker that they resume."""
    if log_start == waitpoint.log_start:
        return ()
    counted = {ref.seq for ref in wait_encoding.satisfiers(suspension) if ref.waitpoint_id == waitpoint.waitpoint_id}
    counted |= gate_rules.counted_signals(suspension, waitpoint)
    dropped = (seq for seq in range(waitpoint.log_start, log_start) if seq not in counted)
    return tuple(Delete(Signal, (waitpoint.execution_id, waitpoint.waitpoint_id, seq)) for seq in dropped)


def _record_key(args: SignalArgs) -> tuple[str, str]:
    return args.waitpoint_id, wait_encoding.key_digest(args.idempotency_key or "")


def _not_before(rows: SignalRows, args: SignalArgs) -> int | None:
    """An idempotency record that had expired when it was loaded must have expired at the commit."""
    record = rows.remembered
    return record.expires_at if args.is_deduplicated and record is not None else None


def _not_after(rows: SignalRows, args: SignalArgs) -> int | None:
    """The signing key and a pending waitpoint that were valid when loaded must be valid at the commit."""
    kid = waitpoint_tokens.token_kid(_token_text(args))
    ends = [key.expires_at for key in rows.keys if key.kid == kid and not key.current]
    pending = rows.waitpoint.pending_until if rows.waitpoint is not None else None
    ends.append(None if pending is None else pending - 1)
    return min((end for end in ends if end is not None), default=None)


def resuming_signals(suspension: Suspension | None, attempt_index: int) -> list[SignalRef]:
    """Return the signals that closed the latest suspension, if it belongs to this attempt and signals closed it."""
    if suspension is None or suspension.attempt_index != attempt_index:
        return []
    return wait_encoding.closing_signals(suspension)


def signal_event(
    row: Execution, signal_id: str, waitpoint_id: str | None, source_identity: str, effect: str, call: str = ""
) -> Event:
    """Return an event of the signal feed; `call` identifies the call after a lost reply."""
    details = {
        "signal_id": signal_id,
        "waitpoint_id": waitpoint_id,
        "source_identity": source_identity or None,
        "call": call or None,
    }
    return Event(
        execution_id=row.execution_id,
        namespace=row.namespace,
        tags=row.tags,
        flow_id=row.flow_id,
        signal=effect,
        details=msgspec.json.encode({name: value for name, value in details.items() if value is not None}).decode(),
    )
