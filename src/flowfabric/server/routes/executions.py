"""Executions: create, look, cancel, order, replay, revoke."""

from __future__ import annotations

from contextlib import suppress
from json import dumps
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from flowfabric import errors, ids
from flowfabric.api.encoding import CURSOR, I32, LIMIT, MAX_WAIT_MS, U16, Body, Octets, Whole, checked, octets, variants
from flowfabric.engine.operations.reads import ExecutionPage
from flowfabric.engine.types import POLICY_PARTS, CreateExecution, Fence
from flowfabric.model.answers import execution as answers
from flowfabric.model.api_token import Scope
from flowfabric.model.states import PublicState
from flowfabric.server import tracing
from flowfabric.server.errors import bad_request, told
from flowfabric.server.request import Ask, encode, found, json, same, tagged, variant
from flowfabric.server.routes.leases import TagsSet
from flowfabric.server.routing import BULK_LIMIT, CREATE_LIMIT, OCTETS, Param, Reply, Routes, Subject

routes = Routes("executions")

MAX_BULK = 10_000
LONGEST_WARNING = 1000
ONE = "/v1/executions/{id}"


class CreateBody(Body, frozen=True):
    """A new execution. What the reference wants from its caller and this server can tell by itself may be left out."""

    namespace: str
    lane_id: str
    execution_kind: str
    execution_id: str | None = None
    input_payload: Octets | UnsetType = UNSET
    input_payload_b64: bytes | None = None
    priority: I32 = 0  # kept within 0..9000
    creator_identity: str = ""
    payload_encoding: str | None = None
    idempotency_key: str | None = None
    tags: dict[str, str] = msgspec.field(default_factory=dict)
    policy: dict[str, Any] | None = None
    delay_until: Whole | None = None
    execution_deadline_at: Whole | None = None
    parent_id: str | None = None
    partition_id: U16 | None = None  # the id's own partition decides
    now: Whole | None = None  # the store's clock decides

    def __post_init__(self) -> None:
        checked(ids.parse_lane_id, self.lane_id)
        checked(ids.parse_execution_id, self.execution_id, self.parent_id)
        if self.input_payload is UNSET and self.input_payload_b64 is None:
            raise ValueError("input_payload is missing")
        if self.input_payload is not UNSET and self.input_payload_b64 is not None:
            raise ValueError("input_payload is given twice")


class Info(msgspec.Struct, frozen=True, omit_defaults=True):
    """An execution; instants are texts of milliseconds here."""

    execution_id: str
    namespace: str
    lane_id: str
    priority: int
    execution_kind: str
    state_vector: Any
    public_state: PublicState
    created_at: str
    current_attempt_index: int
    flow_id: str | None
    blocking_detail: str
    started_at: str | UnsetType = UNSET
    completed_at: str | UnsetType = UNSET


class Revoked(msgspec.Struct, frozen=True):
    lease_id: str
    lease_epoch: str


async def creation(ask: Ask[Any], body: CreateBody) -> CreateExecution:
    """What the body asks of the engine."""
    ask.within(body.namespace)
    if body.parent_id is not None:
        await ask.may_touch(body.parent_id)
    if tracing.TAG in body.tags:  # the rules cannot tell the caller's from the server's
        raise errors.InvalidTagKey(f"{tracing.TAG}: reserved; the server sets it from the header traceparent")
    place = ask.app.spans.place()
    return CreateExecution(
        execution_id=body.execution_id or ask.engine.new_execution_id(body.lane_id),
        partition=0,
        input_payload=octets("input_payload", body.input_payload, body.input_payload_b64) or b"",
        tags=body.tags if place is None else {tracing.TAG: place} | body.tags,
        policy=None if body.policy is None else encode(body.policy).decode(),
        **body.told("execution_id", "input_payload", "input_payload_b64", "tags", "policy", "partition_id"),
    )


@routes.post(
    "/v1/executions",
    {201: variants(answers.Created), 200: variants(answers.Duplicate)},
    body=CreateBody,
    limit=CREATE_LIMIT,
    scope=Scope.SUBMIT,
    subject=Subject.OWN,
)
async def create_execution(ask: Ask[CreateBody]) -> Reply:
    """Create an execution; the same id, or the same live idempotency key, is the same execution."""
    answer = await ask.engine.create(await creation(ask, ask.body))
    reply = tagged(answer, 201 if isinstance(answer, answers.Created) else 200)
    if ask.body.policy is None or POLICY_PARTS.issuperset(ask.body.policy):
        return reply
    odd = dumps(sorted(ask.body.policy.keys() - POLICY_PARTS))[1:-1].replace('"', "'")[:LONGEST_WARNING]
    return msgspec.structs.replace(reply, headers=(("warning", f'299 flowfabric "policy keys passed over: {odd}"'),))


class BulkBody(Body, frozen=True):
    executions: Annotated[list[CreateBody], Meta(max_length=MAX_BULK)]


class BulkAnswers(msgspec.Struct, frozen=True):
    """An answer for each, in order: Created, Duplicate, or an error's body."""

    results: list[dict[str, Any]]


@routes.post(
    "/v1/executions/bulk",
    {200: BulkAnswers},
    body=BulkBody,
    limit=BULK_LIMIT,
    scope=Scope.SUBMIT,
    subject=Subject.OWN,
)
async def create_executions(ask: Ask[BulkBody]) -> Reply:
    """Create many at once; each answer stands for itself, refusals included."""
    answered = await ask.engine.create_executions([await creation(ask, body) for body in ask.body.executions])
    return json({"results": [_each(one) for one in answered]})


def _each(answer: answers.Created | answers.Duplicate | errors.FabricError) -> Any:
    return told(answer) if isinstance(answer, errors.FabricError) else variant(answer)


@routes.get(
    "/v1/executions",
    {200: ExecutionPage},
    query=(Param("partition", {"type": "integer", "minimum": 0, "maximum": 65_535}, required=True), CURSOR, LIMIT),
)
async def list_executions(ask: Ask[None]) -> Reply:
    """The ids of one partition, ascending, strictly after the cursor; the limit is 50 unless said, at most 1000."""
    partition = ask.number("partition")
    if partition > 65_535:
        raise bad_request(f"partition: {partition} is not within 0..65535")
    cursor = ask.query("cursor") or None
    if cursor is not None:
        try:
            ids.parse_execution_id(cursor)
        except errors.InvalidInput as fault:
            raise bad_request(f"invalid cursor: {fault.detail}") from None
    return json(await ask.engine.list_executions(partition, cursor=cursor, limit=ask.number("limit", 50)))


@routes.get(ONE, {200: Info}, subject=Subject.EXECUTION)
async def get_execution(ask: Ask[None]) -> Reply:
    """An execution and where it stands."""
    execution_id = ask.execution_id
    info = found(await ask.engine.read_execution_info(execution_id), f"execution not found: {execution_id}")
    return json(
        Info(
            execution_id=info.execution_id,
            namespace=info.namespace,
            lane_id=info.lane_id,
            priority=info.priority,
            execution_kind=info.execution_kind,
            state_vector=info.state_vector,
            public_state=info.public_state,
            created_at=str(info.created_at),
            current_attempt_index=info.current_attempt_index,
            flow_id=info.flow_id,
            blocking_detail=info.blocking_detail,
            started_at=UNSET if info.started_at is None else str(info.started_at),
            completed_at=UNSET if info.completed_at is None else str(info.completed_at),
        )
    )


@routes.get(f"{ONE}/state", {200: PublicState}, subject=Subject.EXECUTION)
async def get_state(ask: Ask[None]) -> Reply:
    """The one public word."""
    execution_id = ask.execution_id
    return json(found(await ask.engine.read_execution_state(execution_id), f"execution not found: {execution_id}"))


@routes.get(
    f"{ONE}/result",
    {200: OCTETS},
    subject=Subject.EXECUTION,
    query=(Param("wait_ms", {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_MS}),),
    long=True,
)
async def get_result(ask: Ask[None]) -> Reply:
    """The result's exact bytes; with `wait_ms`, as soon as the execution has ended."""
    execution_id = ask.execution_id
    if wait_ms := min(ask.number("wait_ms", 0), MAX_WAIT_MS):
        with suppress(errors.NotFound):
            await ask.while_heard(ask.engine.await_end(execution_id, max_wait_ms=wait_ms))
    result = await ask.engine.get_execution_result(execution_id)
    return Reply(200, found(result, f"execution result not found: {execution_id}"), OCTETS)


class CancelBody(Body, frozen=True):
    execution_id: str
    reason: str
    now: Whole | None = None
    source: str = "operator_override"
    lease_id: str | None = None
    lease_epoch: Whole | None = None
    attempt_id: str | None = None

    def __post_init__(self) -> None:
        checked(ids.parse_execution_id, self.execution_id)
        checked(ids.parse_uuid, self.lease_id, self.attempt_id)


@routes.post(
    f"{ONE}/cancel",
    {200: variants(answers.Cancelled)},
    body=CancelBody,
    scope=Scope.OPERATE,
    subject=Subject.EXECUTION,
    audit=True,
)
async def cancel_execution(ask: Ask[CancelBody]) -> Reply:
    """Cancel whatever it is doing; again is fine."""
    execution_id, body = ask.execution_id, ask.body
    same("execution_id", execution_id, body.execution_id)
    fence = Fence(body.lease_id, body.lease_epoch, body.attempt_id)
    return tagged(await ask.engine.cancel_execution(execution_id, reason=body.reason, source=body.source, fence=fence))


class PriorityBody(Body, frozen=True):
    new_priority: I32


@routes.put(
    f"{ONE}/priority",
    {200: variants(answers.Changed)},
    body=PriorityBody,
    scope=Scope.OPERATE,
    subject=Subject.EXECUTION,
    audit=True,
)
async def change_priority(ask: Ask[PriorityBody]) -> Reply:
    """Re-order a claimable execution."""
    return tagged(await ask.engine.change_priority(ask.execution_id, ask.body.new_priority))


@routes.post(
    f"{ONE}/replay",
    {200: variants(answers.Replayed)},
    scope=Scope.OPERATE,
    subject=Subject.EXECUTION,
    audit=True,
)
async def replay_execution(ask: Ask[bytes]) -> Reply:
    """Give an execution that has ended another life."""
    return tagged(await ask.engine.replay_execution(ask.execution_id))


@routes.post(
    f"{ONE}/revoke-lease",
    {200: variants(Revoked, answers.AlreadySatisfied)},
    scope=Scope.OPERATE,
    subject=Subject.EXECUTION,
    audit=True,
)
async def revoke_lease(ask: Ask[bytes]) -> Reply:
    """Take the lease away at once; the next claim of the lane takes the work over."""
    answer = await ask.engine.revoke_lease(ask.execution_id)
    if isinstance(answer, answers.AlreadySatisfied):
        return tagged(answer)
    return tagged(Revoked(answer.lease_id, str(answer.lease_epoch)))


class TagsBody(Body, frozen=True):
    tags: dict[str, str]


@routes.put(f"{ONE}/tags", {200: TagsSet}, body=TagsBody, scope=Scope.SUBMIT, subject=Subject.EXECUTION)
async def set_execution_tags(ask: Ask[TagsBody]) -> Reply:
    """Set some tags, all of them or none."""
    return json(TagsSet(await ask.engine.set_execution_tags(ask.execution_id, ask.body.tags)))


class ResumeBody(Body, frozen=True):
    trigger_type: str = "operator"
    resume_delay_ms: Whole = 0


class Resumed(msgspec.Struct, frozen=True):
    public_state: PublicState


@routes.post(
    f"{ONE}/resume",
    {200: variants(Resumed)},
    body=ResumeBody,
    scope=Scope.OPERATE,
    subject=Subject.EXECUTION,
    audit=True,
)
async def resume_execution(ask: Ask[ResumeBody]) -> Reply:
    """Let a suspended execution go on, whatever it waits for."""
    body = ask.body
    answer = await ask.engine.resume_execution(
        ask.execution_id, trigger_type=body.trigger_type, resume_delay_ms=body.resume_delay_ms
    )
    return tagged(Resumed(answer.public_state))
