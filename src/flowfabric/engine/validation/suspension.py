"""Validation of the arguments of suspensions, signals, frames, messages and gates."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.validation import execution as validate
from flowfabric.handles import HandleFields
from flowfabric.model.gate import GateKind, StepMemo, StepState, step_row_name
from flowfabric.model.stream import FrameKind, FrameMode
from flowfabric.model.suspension import Requester, TimeoutBehavior
from flowfabric.rules import validation
from flowfabric.rules.durable import asks, facts, mailbox
from flowfabric.rules.durable.asks import ReplyArgs
from flowfabric.rules.durable.facts import FactArgs
from flowfabric.rules.durable.gates import GateArgs
from flowfabric.rules.durable.leave import LeftOperation
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.durable.steps import MemoArgs
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
MAX_NOTE_BYTES = 4096
BEST_EFFORT = BestEffort()
_LEFT, _FACT = StepState.LEFT, StepState.FACT  # hot path: found faster than a member of an enum
RESERVED_STEP_PREFIXES = frozenset(state.value for state in StepState) - {StepState.DONE.value}


def validate_waitpoint_token(value: object) -> WaitpointToken:
    """Check the type of a token; the rules verify it."""
    if isinstance(value, WaitpointToken):
        return value
    if value is not None and not isinstance(value, str):
        raise errors.InvalidInput("waitpoint_token: not a text")
    return WaitpointToken(value or "")


def validate_suspend(args: object) -> SuspendArgs:
    """Check the arguments of a suspend."""
    args = validate.check_type("args", args, SuspendArgs)
    bindings = [_binding(binding) for binding in validate.validate_iterable("waitpoints", args.waitpoints)]
    if len(bindings) > MAX_WAITPOINTS:
        raise errors.InvalidInput(f"waitpoints: {len(bindings)} of them, the limit is {MAX_WAITPOINTS}")
    return SuspendArgs(
        suspension_id=validate.parse_uuid("suspension_id", args.suspension_id),
        waitpoints=tuple(bindings),
        resume_condition=conditions.parse_condition(args.resume_condition),
        reason_code=validation.name("reason_code", args.reason_code),
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
            return FreshWaitpoint(
                validate.parse_uuid("waitpoint_id", waitpoint_id), validation.text("waitpoint_key", key)
            )
        case UsePendingWaitpoint(waitpoint_id=waitpoint_id):
            return UsePendingWaitpoint(validate.parse_uuid("waitpoint_id", waitpoint_id))
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
    args = validate.check_type("args", args, SignalArgs)
    payload = _bounded_payload(args.payload, signals.MAX_PAYLOAD_BYTES)
    texts = {
        name: validation.text(name, getattr(args, name))
        for name in ("signal_name", "signal_category", "source_type", "source_identity", "target_scope")
    }
    return SignalArgs(
        execution_id=validate.validate_execution_id(args.execution_id),
        waitpoint_id=validate.parse_uuid("waitpoint_id", args.waitpoint_id),
        signal_id=validate.parse_uuid("signal_id", args.signal_id),
        waitpoint_token=validate_waitpoint_token(args.waitpoint_token),
        payload=payload,
        payload_encoding=validation.optional_name("payload_encoding", args.payload_encoding),
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
    type_name = validation.name("frame_type", frame_type)
    return FrameInput(
        bytes(payload),
        type_name or frame_kind.value,
        mode if type(mode) is FrameMode else _member(FrameMode, "mode", mode),
        BEST_EFFORT if best_effort is BEST_EFFORT else _best_effort(best_effort),
        validation.optional_text("correlation_id", correlation_id) or None,
    )


def _best_effort(value: object) -> BestEffort:
    value = validate.check_type("best_effort", value, BestEffort)
    validation.integer("ttl_ms", value.ttl_ms, most=validation.MAX_DURATION_MS)
    for name in ("maxlen_floor", "maxlen_ceiling"):
        validation.integer(name, getattr(value, name))
    if not isinstance(value.ema_alpha, float | int):
        raise errors.InvalidInput("ema_alpha: not a number")
    return value


def validate_mail(args: object, *, internal: str | None = None) -> MessageArgs:
    """Check a message to an execution; names that begin with `ff.` are refused to senders, except for `internal`."""
    args = validate.check_type("args", args, MessageArgs)
    name = validate_name("mailbox", args.mailbox)
    if internal is not None and name != internal:
        raise errors.InvalidInput(f"mailbox: {validation.preview(name)}; the inputs of a batch go to {internal}")
    if internal is None and name.startswith(mailbox.INTERNAL_PREFIX):
        raise errors.InvalidInput(f"mailbox: {validation.preview(name)} is reserved; choose a name without ff.")
    return MessageArgs(
        execution_id=validate.validate_execution_id(args.execution_id),
        mailbox=name,
        message_id=validate.parse_uuid("message_id", args.message_id),
        payload=_bounded_payload(args.payload, mailbox.MAX_PAYLOAD_BYTES),
        payload_encoding=validation.optional_name("payload_encoding", args.payload_encoding),
        sender=validation.text("sender", args.sender),
        idempotency_key=validation.optional_text("idempotency_key", args.idempotency_key) or None,
        dedup_ttl_ms=validation.duration_ms("dedup_ttl_ms", args.dedup_ttl_ms, least=0),
        wants_reply=bool(args.wants_reply),
    )


def validate_reply(args: object) -> ReplyArgs:
    """Check a reply to a message."""
    args = validate.check_type("args", args, ReplyArgs)
    return ReplyArgs(
        message_id=validate.parse_uuid("message_id", args.message_id),
        payload=_bounded_payload(args.payload, mailbox.MAX_PAYLOAD_BYTES),
        payload_encoding=validation.optional_name("payload_encoding", args.payload_encoding),
        reason=validation.optional_text("reason", args.reason, limit=asks.MAX_REASON_BYTES),
    )


def validate_fact(args: object) -> FactArgs:
    """Check a set of a fact, first of all its size."""
    args = validate.check_type("args", args, FactArgs)
    name = validate_name("name", args.name)
    value = validation.payload("value", args.value)
    if len(value) > facts.MAX_FACT_BYTES:
        raise errors.FactTooLarge(f"{name}: {len(value)} bytes, the limit is {facts.MAX_FACT_BYTES}")
    return FactArgs(
        name=name,
        value=value,
        encoding=validation.optional_name("encoding", args.encoding),
        place=validate_name("place", args.place),
        count=validation.integer("count", args.count, least=1),
        number=validate_number(args.number),
    )


def validate_gate(args: object) -> GateArgs:
    """Check the arguments of a gate."""
    args = validate.check_type("args", args, GateArgs)
    kind = _member(GateKind, "kind", args.kind)
    children = tuple(
        validate.validate_execution_id(child) for child in validate.validate_iterable("children", args.children)
    )
    common: dict[str, Any] = {
        "name": validate_name("gate", args.name),
        "kind": kind,
        "expires_in_ms": validate.optional_duration("expires_in_ms", args.expires_in_ms),
        "expires_at": validate.optional_instant("expires_at", args.expires_at),
        "number": validate_number(args.number),
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
            task = validation.optional_name("task", args.task)
            version = validation.optional_name("version", args.version)
            note = validation.optional_text("note", args.note, limit=MAX_NOTE_BYTES)
            names = validate_names("mailboxes", args.mailboxes)
            if len(names) > mailbox.MAX_MAILBOXES:
                raise errors.InvalidInput(f"mailboxes: {len(names)} of them, the limit is {mailbox.MAX_MAILBOXES}")
            one = None if names and args.mailbox is None else validate_name("mailbox", args.mailbox)
            return GateArgs(
                **common,
                mailbox=one,
                mailboxes=() if one is not None else names,
                task=task,
                version=version,
                note=note,
            )
        case GateKind.CHILDREN:
            if not children or len(set(children)) < len(children):
                raise errors.InvalidInput("children: none, or one of them twice")
            need = validation.integer("need", args.need or len(children), least=1, most=len(children))
            return GateArgs(**common, children=children, need=need, any_outcome=bool(args.any_outcome))
        case _:
            if common["expires_in_ms"] is None and common["expires_at"] is None:
                raise errors.InvalidInput("expires_in_ms: a timer has to end")
            return GateArgs(**common)


def validate_new_gates(gates: object) -> tuple[GateArgs, ...]:
    """Check gates that are opened together: each has another name, and none has links."""
    checked = tuple(validate_gate(args) for args in validate.validate_iterable("gates", gates))
    if len({args.name for args in checked}) < len(checked):
        raise errors.InvalidInput("gates: one of them twice")
    if linked := next((args.name for args in checked if args.kind is GateKind.SIGNALS), None):
        raise errors.InvalidInput(f"gate {linked}: it has links; open it first")
    return checked


def validate_number(value: object) -> int | None:
    """Check the place of an operation in the order of its run."""
    return None if value is None else validation.integer("number", value, least=0)


def validate_left(operations: object) -> tuple[LeftOperation, ...]:
    """Check operations that a function left; each is named once."""
    checked = []
    for one in validate.validate_iterable("operations", operations):
        operation = validate.check_type("operations", one, LeftOperation)
        checked.append(
            LeftOperation(
                name=validate_name("name", operation.name),
                occurrence=validation.integer("occurrence", operation.occurrence, least=0),
                is_gate=bool(operation.is_gate),
                number=validate_number(operation.number),
            )
        )
    if len({(one.name, one.occurrence) for one in checked}) < len(checked):
        raise errors.InvalidInput("operations: one of them twice")
    return tuple(checked)


def validate_step_state(value: object) -> StepState:
    """Parse the state of a step that is recorded; that a step was left is recorded with its gates."""
    state: StepState = value if type(value) is StepState else _member(StepState, "state", value)
    if state is _LEFT:
        raise errors.InvalidInput("state: leave_gates records what was left")
    if state is _FACT:
        raise errors.InvalidInput("state: set_fact counts the sets of a fact")
    return state


def validate_step_name(name: object) -> str:
    """Check the name of a step: it must not equal the name of another step's state."""
    checked = validate_name("name", name)
    if ":" in checked and (prefix := checked.partition(":")[0]) in RESERVED_STEP_PREFIXES:
        raise errors.InvalidInput(f"name: {prefix}: is reserved; give the step another name")
    return checked


def step_memo(fields: HandleFields, args: object, state: StepState = StepState.DONE) -> StepMemo:
    """Check something that a function records once; return the memo that the holder of this lease records."""
    args = validate.check_type("memo", args, MemoArgs)
    return StepMemo(
        execution_id=fields.execution_id,
        name=step_row_name(validate_step_name(args.name), state),
        occurrence=validation.integer("occurrence", args.occurrence, least=0),
        attempt_index=fields.attempt_index,
        recorded_at=0,
        result=validation.payload("result", args.result),
        encoding=validation.optional_name("encoding", args.encoding),
        digest=validation.optional_name("digest", args.digest),
        number=validate_number(args.number),
        started_at=None if args.started_at is None else validation.integer("started_at", args.started_at, least=0),
    )


def _pairs(waitpoints: object) -> tuple[tuple[str, str], ...]:
    pairs = validate.validate_pairs("waitpoints", waitpoints)
    bound = tuple(
        (validate.parse_uuid("waitpoint_id", identity), validation.text("waitpoint_key", key))
        for identity, key in pairs
    )
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
