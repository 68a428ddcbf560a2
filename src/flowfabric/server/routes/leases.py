"""What the holder of a lease says: renew, note, finish, put away. The handle in the body fences all of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from flowfabric import errors, ids
from flowfabric.api.encoding import Body, Held, Natural, Octets, Unsaid, checked, octets, variants
from flowfabric.engine.operations.suspensions import SuspendDetails, Suspended
from flowfabric.engine.types import BestEffort, Fresh, ResumePolicy, SuspendArgs, UsePending
from flowfabric.handles import Handle
from flowfabric.model.answers import execution as answers
from flowfabric.model.api_token import Scope
from flowfabric.server.errors import bad_request, told
from flowfabric.server.request import Ask, json, tagged, variant
from flowfabric.server.routing import BULK_LIMIT, WORK_LIMIT, H, Reply, Routes, Subject

routes = Routes("work")

MAX_HANDLES = 10_000
MAX_FRAMES = 1000
MAX_CHILDREN = 1000


class Results(msgspec.Struct, frozen=True):
    """An answer for each, in order; a refusal is an error's body with its exact `code`."""

    results: list[dict[str, Any]]


class RenewBody(Body, frozen=True):
    handles: Annotated[list[str], Meta(max_length=MAX_HANDLES)]
    lease_ttl_ms: Natural | None = None


@routes.post(
    "/v1/leases/renew", {200: Results}, body=RenewBody, limit=WORK_LIMIT, scope=Scope.WORK, subject=Subject.OWN
)
async def renew(ask: Ask[RenewBody]) -> Reply:
    """Move the ends of many leases in one trip; each answer stands for itself."""
    read: list[Handle | errors.FabricError] = []
    for one in await ask.app.handles.verify_all(ask.body.handles):
        try:
            if isinstance(one, Handle):
                await ask.may_touch(one.fields.execution_id)
            read.append(one)
        except errors.FabricError as refused:
            read.append(refused)
    good = [one for one in read if isinstance(one, Handle)]
    renewed = iter(await ask.engine.renew_many(good, lease_ttl_ms=ask.body.lease_ttl_ms) if good else [])
    answered = [next(renewed) if isinstance(one, Handle) else one for one in read]
    return json({"results": [told(one) if isinstance(one, errors.FabricError) else variant(one) for one in answered]})


def holding(path: str, answered: Any, body: Any, limit: int = WORK_LIMIT, *, audit: bool = False) -> Callable[[H], H]:
    """A route for what the holder of a lease says."""
    return routes.post(
        f"/v1/leases/{path}",
        {200: answered},
        body=body,
        limit=limit,
        scope=Scope.WORK,
        subject=Subject.HANDLE,
        audit=audit,
    )


class ProgressBody(Held, frozen=True):
    pct: Natural | None = None
    message: str | None = None


@holding("progress", variants(answers.ProgressNoted), ProgressBody)
async def progress(ask: Ask[ProgressBody]) -> Reply:
    """Note how far the work is."""
    return tagged(await ask.engine.progress(ask.holder, pct=ask.body.pct, message=ask.body.message))


class CompleteBody(Held, frozen=True):
    result: Octets | None = None
    result_b64: bytes | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        octets("result", self.result, self.result_b64)


@holding("complete", variants(answers.Completed), CompleteBody, BULK_LIMIT)
async def complete(ask: Ask[CompleteBody]) -> Reply:
    """End the execution successfully; repeating it after a lost answer is success."""
    body = ask.body
    result = octets("result", body.result, body.result_b64)
    answer = await ask.engine.complete(ask.holder, result=result, encoding=body.encoding)
    ask.attempt_over("ok")
    return tagged(answer)


class FailBody(Held, frozen=True):
    reason: str
    category: str = "transient"
    retry_policy: str | None = None


@holding("fail", variants(answers.RetryScheduled, answers.TerminalFailed), FailBody)
async def fail(ask: Ask[FailBody]) -> Reply:
    """End the attempt as failed; the retry policy decides whether another one follows."""
    body = ask.body
    answer = await ask.engine.fail(
        ask.holder, reason=body.reason, category=body.category, retry_policy=body.retry_policy
    )
    ask.attempt_over("retry" if isinstance(answer, answers.RetryScheduled) else "error")
    return tagged(answer)


class HolderCancelBody(Held, frozen=True):
    reason: str = ""


@holding("cancel", variants(answers.Cancelled), HolderCancelBody, audit=True)
async def cancel(ask: Ask[HolderCancelBody]) -> Reply:
    """Cancel as the holder of the lease, or of the last one while its attempt is open."""
    answer = await ask.engine.cancel_as_holder(ask.holder, reason=ask.body.reason)
    ask.attempt_over("cancelled")
    return tagged(answer)


class HolderTagsBody(Held, frozen=True):
    tags: dict[str, str]


class TagsSet(msgspec.Struct, frozen=True):
    set: int


@holding("tags", TagsSet, HolderTagsBody)
async def set_tags(ask: Ask[HolderTagsBody]) -> Reply:
    """Set some tags of the held execution, all of them or none; the holder may set those that begin with `ff.`."""
    return json(TagsSet(await ask.engine.set_tags(ask.holder, ask.body.tags)))


class CancelChildrenBody(Held, frozen=True):
    execution_ids: Annotated[list[str], Meta(max_length=MAX_CHILDREN)]
    reason: str = ""

    def __post_init__(self) -> None:
        checked(ids.parse_execution_id, *self.execution_ids)


@holding("cancel-children", variants(answers.ChildrenCancelled), CancelChildrenBody)
async def cancel_children(ask: Ask[CancelChildrenBody]) -> Reply:
    """Cancel children of the execution that is held; of others it is said that they do not exist."""
    body = ask.body
    return tagged(await ask.engine.cancel_children(ask.holder, body.execution_ids, reason=body.reason))


class DelayBody(Held, frozen=True):
    """Until an instant, or for a length of time by the store's clock; 0 hands the work back at once."""

    delay_until: Natural | None = None
    delay_ms: Natural | None = None
    reason: str = ""  # told to who asks why it does not run; with `delay_ms` only


@holding("delay", variants(answers.Delayed), DelayBody)
async def delay(ask: Ask[DelayBody]) -> Reply:
    """Put the work away for a while; the same attempt goes on afterwards."""
    body = ask.body
    if (body.delay_until is None) == (body.delay_ms is None):
        raise bad_request("either delay_until or delay_ms is needed")
    if body.delay_until is None:
        answer = await ask.engine.delay_for(ask.holder, body.delay_ms or 0, reason=body.reason)
    else:
        answer = await ask.engine.delay(ask.holder, delay_until=body.delay_until)
    ask.attempt_over("delayed")
    return tagged(answer)


class HandleBody(Held, frozen=True):
    pass


@holding("wait-children", variants(answers.Moved), HandleBody)
async def wait_children(ask: Ask[HandleBody]) -> Reply:
    """Put the work away until its dependencies are resolved."""
    answer = await ask.engine.wait_children(ask.holder)
    ask.attempt_over("waiting")
    return tagged(answer)


# ---------------------------------------------------------------------------------------------------------------
# Waiting


class Policy(Body, frozen=True):
    resume_target: str = "Runnable"
    consume_matched_signals: bool = True
    retain_signal_buffer_until_closed: bool = False
    resume_delay_ms: Natural | None = None
    close_waitpoint_on_resume: bool = True


class SuspendBody(Held, frozen=True):
    """A suspend as the reference's library writes it: bindings, condition and names in PascalCase."""

    waitpoints: list[dict[str, dict[str, str]]]
    resume_condition: Any
    reason_code: str = "WaitingForSignal"
    suspension_id: str | None = None
    resume_policy: Policy = Policy()
    requested_by: str = "Worker"
    timeout_at: Natural | None = None
    timeout_behavior: str = "Fail"
    continuation_metadata_pointer: str | None = None
    idempotency_key: str | None = None
    now: Natural | None = None

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.suspension_id)


class WaitpointToken(Unsaid, msgspec.Struct, frozen=True):
    waitpoint_id: str
    waitpoint_key: str
    waitpoint_token: str


class Waiting(msgspec.Struct, frozen=True):
    """What is waited on, with the tokens to hand out; with `handle` the lease is gone, without it the wait is over."""

    suspension_id: str
    waitpoints: list[WaitpointToken]
    handle: str | UnsetType = UNSET


@holding("suspend", variants(Suspended=Waiting, AlreadySatisfied=Waiting), SuspendBody)
async def suspend(ask: Ask[SuspendBody]) -> Reply:
    """Give the lease back and wait for the condition; signals that came early may have met it already."""
    body = ask.body
    now = body.now if body.now is not None else await ask.engine.ping()
    policy = body.resume_policy
    answer = await ask.engine.suspend(
        ask.holder,
        SuspendArgs(
            suspension_id=body.suspension_id or ask.engine.minter.uuid(),
            waitpoints=tuple(_binding(ask, one) for one in body.waitpoints),
            resume_condition=body.resume_condition,
            reason_code=_snake(body.reason_code),
            now=now,
            resume_policy=ResumePolicy(
                _snake(policy.resume_target),
                policy.consume_matched_signals,
                policy.retain_signal_buffer_until_closed,
                policy.resume_delay_ms,
                policy.close_waitpoint_on_resume,
            ),
            requested_by=_snake(body.requested_by),  # type: ignore[arg-type]
            timeout_at=body.timeout_at,
            timeout_behavior=_snake(body.timeout_behavior),  # type: ignore[arg-type]
            continuation_metadata_pointer=body.continuation_metadata_pointer,
            idempotency_key=body.idempotency_key,
        ),
    )
    if isinstance(answer, Suspended):
        ask.attempt_over("suspended")
        return tagged(_waiting(answer.details, await ask.app.handles.sign(answer.handle)), name="Suspended")
    return tagged(_waiting(answer.details, UNSET), name="AlreadySatisfied")


def _binding(ask: Ask[SuspendBody], given: dict[str, dict[str, str]]) -> Fresh | UsePending:
    match given:
        case {"Fresh": fields}:
            waitpoint_id = fields.get("waitpoint_id") or ask.engine.minter.uuid()
            return Fresh(waitpoint_id, fields.get("waitpoint_key", f"wpk:{waitpoint_id}"))
        case {"UsePending": {"waitpoint_id": waitpoint_id}}:
            return UsePending(waitpoint_id)
        case _:
            raise bad_request("waitpoints: neither Fresh nor UsePending")


def _waiting(details: SuspendDetails, handle: str | UnsetType) -> Waiting:
    first = WaitpointToken(details.waitpoint_id, details.waitpoint_key, details.waitpoint_token.reveal())
    rest = [
        WaitpointToken(one.waitpoint_id, one.waitpoint_key, one.waitpoint_token.reveal())
        for one in details.additional_waitpoints
    ]
    return Waiting(details.suspension_id, [first, *rest], handle)


def _snake(name: str) -> str:
    """`WaitingForSignal` and `waiting_for_signal` are the same."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


class WaitpointBody(Held, frozen=True):
    waitpoint_key: str
    expires_in_ms: Natural


class Pending(Unsaid, msgspec.Struct, frozen=True):
    waitpoint_id: str
    token: str


@holding("waitpoints", Pending, WaitpointBody)
async def create_waitpoint(ask: Ask[WaitpointBody]) -> Reply:
    """A waitpoint to hand out before the wait."""
    made = await ask.engine.create_waitpoint(ask.holder, ask.body.waitpoint_key, ask.body.expires_in_ms)
    return json(Pending(made.waitpoint_id, made.token.reveal()), 200, ("cache-control", "no-store"))


class ObservedSignal(msgspec.Struct, frozen=True):
    signal_id: str
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    correlation_id: str
    accepted_at: int
    payload_b64: bytes | None


class ObservedSignals(msgspec.Struct, frozen=True):
    signals: list[ObservedSignal]


@holding("signals", ObservedSignals, HandleBody)
async def observe_signals(ask: Ask[HandleBody]) -> Reply:
    """The signals that resumed this attempt, in the order in which they were accepted."""
    return json(ObservedSignals([observed(one) for one in await ask.engine.observe_signals(ask.holder)]))


def observed(signal: Any) -> ObservedSignal:
    """A signal for its receiver."""
    return ObservedSignal(
        signal.signal_id,
        signal.signal_name,
        signal.signal_category,
        signal.source_type,
        signal.source_identity,
        signal.correlation_id,
        signal.accepted_at,
        signal.payload,
    )


# ---------------------------------------------------------------------------------------------------------------
# Output


class BestEffortSpec(Body, frozen=True):
    ttl_ms: Natural = 0
    maxlen_floor: Natural = 64
    maxlen_ceiling: Natural = 16_384
    ema_alpha: float = 0.2


class FrameSpec(Body, frozen=True):
    payload: Octets | None = None
    payload_b64: bytes | None = None
    frame_type: str = ""
    mode: str = "durable"
    correlation_id: str | None = None
    best_effort: BestEffortSpec = BestEffortSpec()

    def __post_init__(self) -> None:
        octets("payload", self.payload, self.payload_b64)


class FramesBody(Held, frozen=True):
    frames: Annotated[list[FrameSpec], Meta(min_length=1, max_length=MAX_FRAMES)]


@holding("frames", Results, FramesBody)
async def append_frames(ask: Ask[FramesBody]) -> Reply:
    """Add frames to the attempt's output, in order; each answer stands for itself."""
    handle = ask.holder
    # Handed in together, in order, they are written together.
    appended = await asyncio.gather(*(_appended(ask, handle, frame) for frame in ask.body.frames))
    return json({"results": appended})


async def _appended(ask: Ask[FramesBody], handle: Handle, frame: FrameSpec) -> Any:
    spec = frame.best_effort
    try:
        answer = await ask.engine.append_frame(
            handle,
            octets("payload", frame.payload, frame.payload_b64) or b"",
            frame_type=frame.frame_type,
            mode=frame.mode,
            correlation_id=frame.correlation_id,
            best_effort=BestEffort(spec.ttl_ms, spec.maxlen_floor, spec.maxlen_ceiling, spec.ema_alpha),
        )
    except errors.FabricError as refused:
        return told(refused)
    return variant(answer)
