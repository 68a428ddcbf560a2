"""Validation of the arguments of suspensions, signals, frames, messages and gates."""

from __future__ import annotations

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
    """Parse a waitpoint id."""
    return ids.parse_uuid(validation.text("waitpoint_id", waitpoint_id), "waitpoint_id")


def validate_waitpoint_token(value: object) -> WaitpointToken:
    """Check the type of a token; the rules verify it."""
    if isinstance(value, WaitpointToken):
        return value
    if value is not None and not isinstance(value, str):
        raise errors.InvalidInput("waitpoint_token: not a text")
    return WaitpointToken(value or "")


def validate_suspend(args: object) -> SuspendArgs:
    """Check the arguments of a suspend."""
    if not isinstance(args, SuspendArgs):
        raise errors.InvalidInput("args: not a SuspendArgs")
    bindings = [_binding(binding) for binding in validate.validate_iterable("waitpoints", args.waitpoints)]
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
    """Check a signal, first of all the size of its payload."""
    if not isinstance(args, SignalArgs):
        raise errors.InvalidInput("args: not a SignalArgs")
    payload = _bounded_payload(args.payload, signals.MAX_PAYLOAD_BYTES)
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


def _bounded_payload(payload: object, limit: int) -> bytes | None:
    if payload is None:
        return None
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise errors.InvalidInput("payload: not bytes")
    size = memoryview(payload).nbytes
    if size > limit:
        raise errors.PayloadTooLarge(f"{size} bytes, the limit is {limit}")
    return bytes(payload)


class FrameInput(msgspec.Struct, frozen=True):
    """A valid frame."""

    payload: bytes
    frame_type: str
    mode: FrameMode
    best_effort: BestEffort
    correlation_id: str | None


def build_frame(
    payload: object, kind: object, frame_type: object, mode: object, best_effort: object, correlation_id: object
) -> FrameInput:
    """Check a frame; its size is checked before the lease is."""
    if type(payload) is not bytes and not isinstance(payload, bytes | bytearray | memoryview):
        raise errors.InvalidInput("payload: not bytes")
    size = len(payload) if type(payload) is bytes else memoryview(payload).nbytes
    if size > append_rules.MAX_FRAME_BYTES:
        raise errors.RetentionLimitExceeded(f"{size} bytes, the limit is {append_rules.MAX_FRAME_BYTES}")
    frame_kind: FrameKind = kind if type(kind) is FrameKind else _member(FrameKind, "kind", kind)
    type_name = validation.text("frame_type", frame_type, limit=validation.MAX_NAME_BYTES)
    return FrameInput(
        bytes(payload),
        type_name or frame_kind.value,
        mode if type(mode) is FrameMode else _member(FrameMode, "mode", mode),
        BEST_EFFORT if best_effort is BEST_EFFORT else _best_effort(best_effort),
        validation.optional_text("correlation_id", correlation_id) or None,
    )


def _best_effort(value: object) -> BestEffort:
    if not isinstance(value, BestEffort):
        raise errors.InvalidInput("best_effort: not a BestEffort")
    validation.integer("ttl_ms", value.ttl_ms, most=validation.MAX_DURATION_MS)
    for name in ("maxlen_floor", "maxlen_ceiling"):
        validation.integer(name, getattr(value, name))
    if not isinstance(value.ema_alpha, float | int):
        raise errors.InvalidInput("ema_alpha: not a number")
    return value


def validate_mail(args: object) -> MessageArgs:
    """Check a message to an execution."""
    if not isinstance(args, MessageArgs):
        raise errors.InvalidInput("args: not a MailArgs")
    return MessageArgs(
        execution_id=validate.validate_execution_id(args.execution_id),
        mailbox=validate_name("mailbox", args.mailbox),
        message_id=ids.parse_uuid(validation.text("message_id", args.message_id), "message_id"),
        payload=_bounded_payload(args.payload, mailbox.MAX_PAYLOAD_BYTES),
        payload_encoding=validation.optional_text(
            "payload_encoding", args.payload_encoding, limit=validation.MAX_NAME_BYTES
        ),
        sender=validation.text("sender", args.sender),
        idempotency_key=validation.optional_text("idempotency_key", args.idempotency_key) or None,
        dedup_ttl_ms=validation.duration_ms("dedup_ttl_ms", args.dedup_ttl_ms, least=0),
    )


def validate_gate(args: object) -> GateArgs:
    """Check the arguments of a gate."""
    if not isinstance(args, GateArgs):
        raise errors.InvalidInput("args: not a GateArgs")
    kind = _member(GateKind, "kind", args.kind)
    children = tuple(
        validate.validate_execution_id(child) for child in validate.validate_iterable("children", args.children)
    )
    common: dict[str, Any] = {
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
            return GateArgs(**common, condition=condition, waitpoints=bound)
        case GateKind.MAILBOX:
            return GateArgs(**common, mailbox=validate_name("mailbox", args.mailbox))
        case GateKind.CHILDREN:
            if not children or len(set(children)) < len(children):
                raise errors.InvalidInput("children: none, or one of them twice")
            need = validation.integer("need", args.need or len(children), least=1, most=len(children))
            return GateArgs(**common, children=children, need=need, any_outcome=bool(args.any_outcome))
        case _:
            if common["expires_in_ms"] is None and common["expires_at"] is None:
                raise errors.InvalidInput("expires_in_ms: a timer has to end")
            return GateArgs(**common)


def _pairs(waitpoints: object) -> tuple[tuple[str, str], ...]:
    pairs = validate.validate_pairs("waitpoints", waitpoints)
    bound = tuple((validate_waitpoint_id(identity), validation.text("waitpoint_key", key)) for identity, key in pairs)
    if len({identity for identity, _ in bound}) < len(bound):
        raise errors.InvalidInput("waitpoints: one of them twice")
    return bound


def validate_name(field: str, value: object) -> str:
    """Check a name that is part of a key: it must not be empty."""
    name = validation.text(field, value, limit=validation.MAX_NAME_BYTES)
    if not name:
        raise errors.InvalidInput(f"{field}: empty")
    return name


def validate_names(field: str, values: object) -> tuple[str, ...]:
    """Check several names; duplicates are removed."""
    return tuple(dict.fromkeys(validate_name(field, value) for value in validate.validate_iterable(field, values)))
