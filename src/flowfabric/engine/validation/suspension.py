"""What callers hand in about waits, signals and frames: looked at once, and put into its one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.validation import execution as validate
from flowfabric.model.gate import GateKind
from flowfabric.model.stream import FrameKind, FrameMode
from flowfabric.model.suspension import Requester, TimeoutBehavior
from flowfabric.rules import validation
from flowfabric.rules.durable import mailbox
from flowfabric.rules.durable.gates import GateArgs
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.security.waitpoint_token import WaitpointToken
from flowfabric.rules.stream import append as append_rules
from flowfabric.rules.stream.append import BestEffort
from flowfabric.rules.suspension import conditions, signals
from flowfabric.rules.suspension.arguments import (
    FreshWaitpoint,
    ResumePolicy,
    SuspendArgs,
    UsePendingWaitpoint,
    WaitpointBinding,
)
from flowfabric.rules.suspension.signals import SignalArgs

AUTO_RESUME_ALIAS = "auto_resume"
MAX_WAITPOINTS = 1000
BEST_EFFORT = BestEffort()


def validate_waitpoint_id(waitpoint_id: object) -> str:
    """A waitpoint id."""
    return ids.parse_uuid(validation.text("waitpoint_id", waitpoint_id), "waitpoint_id")


def validate_waitpoint_token(value: object) -> WaitpointToken:
    """A token as a sender shows it; what is wrong with it is for the rules."""
    if isinstance(value, WaitpointToken):
        return value
    if value is not None and not isinstance(value, str):
        raise errors.InvalidInput("waitpoint_token: not a text")
    return WaitpointToken(value or "")


def validate_suspend(args: object) -> SuspendArgs:
    """What a suspend asks for."""
    if not isinstance(args, SuspendArgs):
        raise errors.InvalidInput("args: not a SuspendArgs")
    bindings = [_binding(one) for one in validate.validate_iterable("waitpoints", args.waitpoints)]
    if len(bindings) > MAX_WAITPOINTS:
        raise errors.InvalidInput(f"waitpoints: {len(bindings)} of them, the limit is {MAX_WAITPOINTS}")
    return SuspendArgs(
        suspension_id=ids.parse_uuid(validation.text("suspension_id", args.suspension_id), "suspension_id"),
        waitpoints=tuple(bindings),
        resume_condition=conditions.parse_condition(args.resume_condition),
        reason_code=validation.text("reason_code", args.reason_code, limit=validation.MAX_NAME_BYTES),
        now=validation.integer("now", args.now, least=0),
        resume_policy=_policy(args.resume_policy),
        requested_by=_member(Requester, "requested_by", args.requested_by),
        timeout_at=validate.optional_instant("timeout_at", args.timeout_at),
        timeout_behavior=_behavior(args.timeout_behavior),
        continuation_metadata_pointer=validation.optional_text(
            "continuation_metadata_pointer", args.continuation_metadata_pointer
        )
        or None,
        idempotency_key=validation.optional_text("idempotency_key", args.idempotency_key) or None,
    )


def _binding(binding: object) -> WaitpointBinding:
    match binding:
        case FreshWaitpoint(waitpoint_id=waitpoint_id, waitpoint_key=key):
            return FreshWaitpoint(validate_waitpoint_id(waitpoint_id), validation.text("waitpoint_key", key))
        case UsePendingWaitpoint(waitpoint_id=waitpoint_id):
            return UsePendingWaitpoint(validate_waitpoint_id(waitpoint_id))
        case _:
            raise errors.InvalidInput("waitpoints: neither Fresh nor UsePending")


def _policy(policy: object) -> ResumePolicy:
    if not isinstance(policy, ResumePolicy) or policy.resume_target != "runnable":
        raise errors.InvalidInput("resume_policy: not a policy")
    for name in ("consume_matched_signals", "retain_signal_buffer_until_closed", "close_waitpoint_on_resume"):
        if not isinstance(getattr(policy, name), bool):
            raise errors.InvalidInput(f"{name}: neither true nor false")
    if policy.resume_delay_ms is not None:
        validation.duration_ms("resume_delay_ms", policy.resume_delay_ms, least=0)
    return policy


def _behavior(value: object) -> TimeoutBehavior:
    alias = value == AUTO_RESUME_ALIAS
    return TimeoutBehavior.AUTO_RESUME if alias else _member(TimeoutBehavior, "timeout_behavior", value)


def _member(kind: Any, name: str, value: object) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise errors.InvalidInput(f"{name}: not a {kind.__name__}") from None


def validate_signal(args: object) -> SignalArgs:
    """A signal; a payload that is too large is refused before anything else is."""
    if not isinstance(args, SignalArgs):
        raise errors.InvalidInput("args: not a SignalArgs")
    payload = _small(args.payload, signals.MAX_PAYLOAD_BYTES)
    texts = {
        name: validation.text(name, getattr(args, name))
        for name in ("signal_name", "signal_category", "source_type", "source_identity", "target_scope")
    }
    return SignalArgs(
        execution_id=validate.validate_execution_id(args.execution_id),
        waitpoint_id=validate_waitpoint_id(args.waitpoint_id),
        signal_id=ids.parse_uuid(validation.text("signal_id", args.signal_id), "signal_id"),
        waitpoint_token=validate_waitpoint_token(args.waitpoint_token),
        payload=payload,
        payload_encoding=validation.optional_text(
            "payload_encoding", args.payload_encoding, limit=validation.MAX_NAME_BYTES
        ),
        correlation_id=validation.optional_text("correlation_id", args.correlation_id),
        idempotency_key=validation.optional_text("idempotency_key", args.idempotency_key) or None,
        created_at=validate.optional_instant("created_at", args.created_at),
        dedup_ttl_ms=validation.duration_ms("dedup_ttl_ms", args.dedup_ttl_ms, least=0),
        resume_delay_ms=validate.optional_duration("resume_delay_ms", args.resume_delay_ms),
        max_signals_per_execution=validation.integer(
            "max_signals_per_execution", args.max_signals_per_execution, least=0
        ),
        signal_maxlen=validation.integer("signal_maxlen", args.signal_maxlen, least=1),
        **texts,
    )


def _small(payload: object, most: int) -> bytes | None:
    if payload is None:
        return None
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise errors.InvalidInput("payload: not bytes")
    size = memoryview(payload).nbytes
    if size > most:
        raise errors.PayloadTooLarge(f"{size} bytes, the limit is {most}")
    return bytes(payload)


class FrameInput(msgspec.Struct, frozen=True):
    """A frame that can be kept."""

    payload: bytes
    frame_type: str
    mode: FrameMode
    best_effort: BestEffort
    correlation_id: str | None


def build_frame(
    payload: object, kind: object, frame_type: object, mode: object, best_effort: object, correlation_id: object
) -> FrameInput:
    """A frame; one that is too large is refused before anything is asked about the lease."""
    if type(payload) is not bytes and not isinstance(payload, bytes | bytearray | memoryview):
        raise errors.InvalidInput("payload: not bytes")
    size = len(payload) if type(payload) is bytes else memoryview(payload).nbytes
    if size > append_rules.MAX_FRAME_BYTES:
        raise errors.RetentionLimitExceeded(f"{size} bytes, the limit is {append_rules.MAX_FRAME_BYTES}")
    kinds: FrameKind = kind if type(kind) is FrameKind else _member(FrameKind, "kind", kind)
    named = validation.text("frame_type", frame_type, limit=validation.MAX_NAME_BYTES)
    return FrameInput(
        bytes(payload),
        named or kinds.value,
        mode if type(mode) is FrameMode else _member(FrameMode, "mode", mode),
        BEST_EFFORT if best_effort is BEST_EFFORT else _best_effort(best_effort),
        validation.optional_text("correlation_id", correlation_id) or None,
    )


def _best_effort(given: object) -> BestEffort:
    if not isinstance(given, BestEffort):
        raise errors.InvalidInput("best_effort: not a BestEffort")
    validation.integer("ttl_ms", given.ttl_ms, most=validation.MAX_DURATION_MS)
    for name in ("maxlen_floor", "maxlen_ceiling"):
        validation.integer(name, getattr(given, name))
    if not isinstance(given.ema_alpha, float | int):
        raise errors.InvalidInput("ema_alpha: not a number")
    return given


def validate_mail(args: object) -> MessageArgs:
    """A message to an execution."""
    if not isinstance(args, MessageArgs):
        raise errors.InvalidInput("args: not a MailArgs")
    return MessageArgs(
        execution_id=validate.validate_execution_id(args.execution_id),
        mailbox=validate_name("mailbox", args.mailbox),
        message_id=ids.parse_uuid(validation.text("message_id", args.message_id), "message_id"),
        payload=_small(args.payload, mailbox.MAX_PAYLOAD_BYTES),
        payload_encoding=validation.optional_text(
            "payload_encoding", args.payload_encoding, limit=validation.MAX_NAME_BYTES
        ),
        sender=validation.text("sender", args.sender),
        idempotency_key=validation.optional_text("idempotency_key", args.idempotency_key) or None,
        dedup_ttl_ms=validation.duration_ms("dedup_ttl_ms", args.dedup_ttl_ms, least=0),
    )


def validate_gate(args: object) -> GateArgs:
    """A gate to be opened."""
    if not isinstance(args, GateArgs):
        raise errors.InvalidInput("args: not a GateArgs")
    kind = _member(GateKind, "kind", args.kind)
    children = tuple(
        validate.validate_execution_id(child) for child in validate.validate_iterable("children", args.children)
    )
    given: dict[str, Any] = {
        "name": validate_name("gate", args.name),
        "kind": kind,
        "expires_in_ms": validate.optional_duration("expires_in_ms", args.expires_in_ms),
        "expires_at": validate.optional_instant("expires_at", args.expires_at),
    }
    match kind:
        case GateKind.SIGNALS:
            condition = conditions.parse_condition(args.condition)
            if refused := conditions.check_structure(condition):
                raise refused
            bound = _pairs(args.waitpoints)
            keys = [key for _, key in bound]
            if not bound or sorted(keys) != sorted(conditions.referenced_keys(condition)):
                raise errors.InvalidInput("waitpoints: not those that the condition names")
            return GateArgs(**given, condition=condition, waitpoints=bound)
        case GateKind.MAILBOX:
            return GateArgs(**given, mailbox=validate_name("mailbox", args.mailbox))
        case GateKind.CHILDREN:
            if not children or len(set(children)) < len(children):
                raise errors.InvalidInput("children: none, or one of them twice")
            need = validation.integer("need", args.need or len(children), least=1, most=len(children))
            return GateArgs(**given, children=children, need=need, any_outcome=bool(args.any_outcome))
        case _:
            if given["expires_in_ms"] is None and given["expires_at"] is None:
                raise errors.InvalidInput("expires_in_ms: a timer has to end")
            return GateArgs(**given)


def _pairs(waitpoints: object) -> tuple[tuple[str, str], ...]:
    found = validate.validate_pairs("waitpoints", waitpoints)
    bound = tuple((validate_waitpoint_id(one), validation.text("waitpoint_key", key)) for one, key in found)
    if len({one for one, _ in bound}) < len(bound):
        raise errors.InvalidInput("waitpoints: one of them twice")
    return bound


def validate_name(field: str, value: object) -> str:
    """A name that can be part of a key."""
    name = validation.text(field, value, limit=validation.MAX_NAME_BYTES)
    if not name:
        raise errors.InvalidInput(f"{field}: empty")
    return name


def validate_names(field: str, values: object) -> tuple[str, ...]:
    """Several of them, each once."""
    found: Sequence[str] = [validate_name(field, one) for one in validate.validate_iterable(field, values)]
    return tuple(dict.fromkeys(found))
