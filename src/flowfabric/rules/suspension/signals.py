"""Signals: who may send one, what it does to what waits, and that it does it once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from flowfabric import errors
from flowfabric.model.change import NOW, Change, Delete, Insert, Patch, Upsert, Write, from_now, seen
from flowfabric.model.event import Event
from flowfabric.model.execution import Execution
from flowfabric.model.signing_key import SigningKey
from flowfabric.model.states import LifecyclePhase
from flowfabric.model.suspension import IdempotencyRecord, Signal, Suspension, Waitpoint, WaitpointState
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
    """What a sender hands in."""

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
        if isinstance(self.waitpoint_token, str):  # a plain text would show itself whenever this is printed
            msgspec.structs.force_setattr(
                self, "waitpoint_token", waitpoint_tokens.WaitpointToken(self.waitpoint_token)
            )

    @property
    def is_deduplicated(self) -> bool:
        """Whether a repetition of this one is recognised."""
        return bool(self.idempotency_key) and self.dedup_ttl_ms > 0


class Accepted(msgspec.Struct, frozen=True):
    """A signal or message that was taken, and what it did."""

    signal_id: str
    effect: str

    @property
    def is_useful(self) -> bool:
        """Whether somebody is helped by it: it was kept for a wait, or one came nearer to its end."""
        return self.effect not in UNMATCHED and self.effect != SignalEffect.DUPLICATE


class DuplicateDelivery(msgspec.Struct, frozen=True):
    """This signal was accepted before; nothing happened now."""

    variant: ClassVar[str] = "Duplicate"

    existing_signal_id: str


class SignalRows(msgspec.Struct, frozen=True):
    """What a delivery is decided on."""

    row: Execution | None
    root: Suspension | None
    waitpoint: Waitpoint | None
    remembered: IdempotencyRecord | None
    keys: Sequence[SigningKey]
    call: str = ""  # names the delivery: a sender may send the very same signal twice


def deliver_signal(scene: SignalRows, ask: SignalArgs, now: int) -> Decision[Accepted | DuplicateDelivery]:
    """Accept a signal once: buffer it before the wait, count it towards the condition, resume when that is met.

    The sender shows who it is before it hears anything about the state of what it sends to.
    """
    row, waitpoint = scene.row, scene.waitpoint
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := _verify(scene, ask, now):
        stamp = Patch(Execution, (row.execution_id,), {"last_hmac_validation_failed_at": NOW, "last_mutation_at": NOW})
        return Decision(refused, Change(guards=(seen(row),), writes=(stamp,)))
    assert waitpoint is not None  # a token for one that does not exist is refused
    kept = scene.remembered
    if ask.is_deduplicated and kept is not None and kept.expires_at > now:
        told = signal_event(row, kept.answer, waitpoint.waitpoint_id, ask.source_identity, DEDUPED, scene.call)
        return Decision(DuplicateDelivery(kept.answer), Change(guards=(seen(row),), events=(told,)))
    if row.lifecycle_phase is LifecyclePhase.TERMINAL:
        return refuse(errors.TargetNotSignalable(execution_id=row.execution_id))
    if wait_state.is_pending_expired(waitpoint, now):
        return refuse(errors.WaitpointClosed(execution_id=row.execution_id))
    if wait_state.waitpoint_state(waitpoint, scene.root, now) is WaitpointState.CLOSED:
        if row.lifecycle_phase is LifecyclePhase.SUSPENDED:
            return refuse(errors.WaitpointClosed(execution_id=row.execution_id))
        return refuse(errors.TargetNotSignalable(execution_id=row.execution_id))
    root = wait_state.suspension_or_new(scene.root, row)
    if 0 < ask.max_signals_per_execution <= root.signal_count:
        return refuse(errors.SignalLimitExceeded(execution_id=row.execution_id))
    if wrong := vote_schema.check_vote(row, waitpoint, ask.payload):
        return refuse(wrong)
    return _accepted(scene, row, root, waitpoint, ask, now)


def _verify(scene: SignalRows, ask: SignalArgs, now: int) -> errors.FabricError | None:
    waitpoint, token = scene.waitpoint, _shown(ask)
    # What is stored of a token is its kid and the beginning of its digest: signed with that key, it is the one that
    # was given out. A kid that was dropped and used anew, with another secret, signs other digests.
    given_out = waitpoint is not None and waitpoint_tokens.matches_stored(
        token, waitpoint.token_kid, waitpoint.token_fingerprint
    )
    return waitpoint_tokens.verify_token(
        token,
        scene.keys,
        execution_id=ask.execution_id,
        waitpoint_id=ask.waitpoint_id,
        owner=waitpoint.execution_id if waitpoint is not None else None,
        stored=token if given_out else None,
        now=now,
    )


def _shown(ask: SignalArgs) -> str:
    token = ask.waitpoint_token
    return token if isinstance(token, str) else token.reveal()


def _accepted(
    scene: SignalRows, row: Execution, root: Suspension, waitpoint: Waitpoint, ask: SignalArgs, now: int
) -> Decision[Accepted | DuplicateDelivery]:
    place = SignalRef(waitpoint.waitpoint_id, waitpoint.signal_count + 1)
    effect, fields, writes = _evaluated(row, root, waitpoint, ask, place, now)
    fields |= {"signal_count": root.signal_count + 1}
    log_start = max(waitpoint.log_start, place.seq - ask.signal_maxlen + 1)
    counted = msgspec.structs.replace(
        waitpoint,
        signal_count=place.seq,
        matched_signal_count=waitpoint.matched_signal_count + (effect not in UNMATCHED),
        last_signal_at=from_now(0),
        log_start=log_start,
    )
    kept = Upsert(IdempotencyRecord(row.execution_id, *_remember_key(ask), from_now(ask.dedup_ttl_ms), ask.signal_id))
    change = Change(
        guards=(seen(row), wait_state.seen_suspension(scene.root, row.execution_id)),
        writes=(
            Patch(Suspension, (row.execution_id,), fields),  # there since the first waitpoint
            Upsert(counted),
            Insert(_signal(ask, place.seq, effect)),
            *_trimmed(root, waitpoint, log_start),
            *((kept,) if ask.is_deduplicated else ()),
            *writes,
        ),
        events=(signal_event(row, ask.signal_id, waitpoint.waitpoint_id, ask.source_identity, effect, scene.call),),
        not_before=_earliest(scene, ask),
        not_after=_latest(scene, ask),
    )
    return Decision(Accepted(ask.signal_id, effect), change)


def _evaluated(
    row: Execution, root: Suspension, waitpoint: Waitpoint, ask: SignalArgs, place: SignalRef, now: int
) -> tuple[str, dict[str, Any], tuple[Write, ...]]:
    """The signal's effect, what it changes of the root, and what else it writes."""
    arrival = IncomingSignal(
        waitpoint.waitpoint_id,
        waitpoint.waitpoint_key,
        ask.signal_id,
        ask.signal_name,
        ask.source_type,
        ask.source_identity,
    )
    if waitpoint.gate is not None:
        return gate_rules.apply_vote(row, root, waitpoint.gate, arrival, place.seq, now)
    if waitpoint.suspension_id is None:
        return SignalEffect.BUFFERED, {}, ()
    condition = conditions.decode_condition(root.resume_condition or '"OperatorOnly"')
    effect, progress = conditions.apply_signal(condition, wait_encoding.decode_progress(root.progress), arrival)
    fields: dict[str, Any] = {"last_signal_at": NOW}
    if effect not in (SignalEffect.SATISFIED, SignalEffect.APPENDED):
        return effect, fields, ()
    fields |= {
        "progress": wait_encoding.encode_or_none(progress),
        "satisfiers": wait_encoding.encode_or_none([*wait_encoding.satisfiers(root), place]),
    }
    if effect == SignalEffect.APPENDED:
        return effect, fields, ()
    fields |= {
        "satisfied_at": NOW,
        "closed_at": NOW,
        "close_reason": wait_state.RESUMED,
        "closer_signal_id": ask.signal_id,
        "due_at": None,
    }
    delay = _delay_ms(root, ask)
    return (
        effect,
        fields,
        (wait_state.resume_row(row, delay, f"resume delay {delay}ms after signal {ask.signal_name}"),),
    )


def _delay_ms(root: Suspension, ask: SignalArgs) -> int:
    if ask.resume_delay_ms is not None:
        return ask.resume_delay_ms
    policy = msgspec.json.decode(root.resume_policy or "{}", type=ResumePolicy)
    return policy.resume_delay_ms or 0


def _signal(ask: SignalArgs, seq: int, effect: str) -> Signal:
    return Signal(
        execution_id=ask.execution_id,
        waitpoint_id=ask.waitpoint_id,
        seq=seq,
        signal_id=ask.signal_id,
        signal_name=ask.signal_name,
        signal_category=ask.signal_category,
        source_type=ask.source_type,
        source_identity=ask.source_identity,
        target_scope=ask.target_scope,
        created_at=from_now(0) if ask.created_at is None else ask.created_at,
        accepted_at=from_now(0),
        observed_effect=effect,
        correlation_id=ask.correlation_id or None,
        idempotency_key=ask.idempotency_key or None,
        payload_encoding=ask.payload_encoding,
        payload=ask.payload or None,
    )


def _trimmed(root: Suspension, waitpoint: Waitpoint, log_start: int) -> tuple[Write, ...]:
    """The entries that leave the log; those that count stay, for whoever was resumed by them."""
    if log_start == waitpoint.log_start:
        return ()
    counted = {place.seq for place in wait_encoding.satisfiers(root) if place.waitpoint_id == waitpoint.waitpoint_id}
    counted |= gate_rules.counted_signals(root, waitpoint)
    leaving = (seq for seq in range(waitpoint.log_start, log_start) if seq not in counted)
    return tuple(Delete(Signal, (waitpoint.execution_id, waitpoint.waitpoint_id, seq)) for seq in leaving)


def _remember_key(ask: SignalArgs) -> tuple[str, str]:
    return ask.waitpoint_id, wait_encoding.key_digest(ask.idempotency_key or "")


def _earliest(scene: SignalRows, ask: SignalArgs) -> int | None:
    """A key whose time was over at the look must be over."""
    kept = scene.remembered
    return kept.expires_at if ask.is_deduplicated and kept is not None else None


def _latest(scene: SignalRows, ask: SignalArgs) -> int | None:
    """What was in time at the look must be in time: the key that signed, the waitpoint that was pending."""
    kid = waitpoint_tokens.token_kid(_shown(ask))
    ends = [key.expires_at for key in scene.keys if key.kid == kid and not key.current]
    pending = scene.waitpoint.pending_until if scene.waitpoint is not None else None
    ends.append(None if pending is None else pending - 1)
    return min((end for end in ends if end is not None), default=None)


def resuming_signals(root: Suspension | None, attempt_index: int) -> list[SignalRef]:
    """The signals that closed the latest suspension, if it was this attempt's and signals closed it."""
    if root is None or root.attempt_index != attempt_index:
        return []
    return wait_encoding.closing_signals(root)


def signal_event(
    row: Execution, signal_id: str, waitpoint_id: str | None, source_identity: str, effect: str, call: str = ""
) -> Event:
    """An entry of the signal feed; by the call's name it is known again when the answer got lost."""
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
