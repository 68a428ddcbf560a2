"""Routes for executions: create, read, cancel, replay, revoke."""

from __future__ import annotations

from contextlib import suppress
from json import dumps
from typing import Any

import msgspec
from msgspec import UNSET

from flowfabric import errors, ids
from flowfabric.api.encoding import (
    BULK_LIMIT,
    CREATE_LIMIT,
    MAX_WAIT_MS,
    decode_octets,
)
from flowfabric.api.executions import (
    CancelExecutionRequest,
    ChangePriorityRequest,
    CreateExecutionRequest,
    CreateExecutionsRequest,
    CreateExecutionsResponse,
    ExecutionInfoResponse,
    ResumeExecutionRequest,
    ResumeExecutionResponse,
    RevokeLeaseResponse,
    SetTagsRequest,
    SetTagsResponse,
)
from flowfabric.engine.operations.pages import ExecutionPage
from flowfabric.engine.types import POLICY_PARTS, CreateExecution, Fence
from flowfabric.model.answers import execution as answers
from flowfabric.model.api_token import ApiScope
from flowfabric.model.states import PublicState
from flowfabric.server import tracing
from flowfabric.server.errors import bad_request, error_entry
from flowfabric.server.request import (
    Request,
    as_variant,
    check_same_id,
    encode,
    json_response,
    require_found,
    variant_response,
)
from flowfabric.server.routing import (
    CURSOR_PARAM,
    LIMIT_PARAM,
    OCTET_STREAM,
    QueryParam,
    Response,
    RouteGroup,
    Subject,
    one_of,
)

routes = RouteGroup("executions")
MAX_WARNING_CHARS = 1000
EXECUTION_PATH = "/v1/executions/{id}"


async def to_create_execution(request: Request[Any], body: CreateExecutionRequest) -> CreateExecution:
    """Check access and return the engine's request for a body."""
    request.require_namespace(body.namespace)
    if body.parent_id is not None:
        await request.require_execution_access(body.parent_id)
    if tracing.TRACEPARENT_TAG in body.tags:  # the rules cannot tell a tag of the caller from one of the server
        raise errors.InvalidTagKey(
            f"{tracing.TRACEPARENT_TAG}: reserved; the server sets it from the header traceparent"
        )
    traceparent = request.app.tracing.current_traceparent()
    return CreateExecution(
        execution_id=body.execution_id or request.engine.new_execution_id(body.lane_id),
        partition=0,
        input_payload=decode_octets("input_payload", body.input_payload, body.input_payload_b64) or b"",
        tags=body.tags if traceparent is None else {tracing.TRACEPARENT_TAG: traceparent} | body.tags,
        policy=None if body.policy is None else encode(body.policy).decode(),
        **body.to_kwargs("execution_id", "input_payload", "input_payload_b64", "tags", "policy", "partition_id"),
    )


@routes.post(
    "/v1/executions",
    {201: one_of(answers.Created), 200: one_of(answers.Duplicate)},
    body=CreateExecutionRequest,
    limit=CREATE_LIMIT,
    scope=ApiScope.SUBMIT,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def create_execution(request: Request[CreateExecutionRequest]) -> Response:
    """Create an execution; the same id, or the same live idempotency key, returns the existing one."""
    answer = await request.engine.create(await to_create_execution(request, request.body))
    response = variant_response(answer, 201 if isinstance(answer, answers.Created) else 200)
    if request.body.policy is None or POLICY_PARTS.issuperset(request.body.policy):
        return response
    unknown_keys = dumps(sorted(request.body.policy.keys() - POLICY_PARTS))[1:-1].replace('"', "'")[:MAX_WARNING_CHARS]
    return msgspec.structs.replace(
        response, headers=(("warning", f'299 flowfabric "policy keys passed over: {unknown_keys}"'),)
    )


@routes.post(
    "/v1/executions/bulk",
    {200: CreateExecutionsResponse},
    body=CreateExecutionsRequest,
    limit=BULK_LIMIT,
    scope=ApiScope.SUBMIT,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def create_executions(request: Request[CreateExecutionsRequest]) -> Response:
    """Create many executions; each gets its own result or error."""
    results = await request.engine.create_executions(
        [await to_create_execution(request, body) for body in request.body.executions]
    )
    return json_response({"results": [_batch_entry(one) for one in results]})


def _batch_entry(answer: answers.Created | answers.Duplicate | errors.FabricError) -> Any:
    return error_entry(answer) if isinstance(answer, errors.FabricError) else as_variant(answer)


@routes.get(
    "/v1/executions",
    {200: ExecutionPage},
    query=(
        QueryParam("partition", {"type": "integer", "minimum": 0, "maximum": 65_535}, required=True),
        CURSOR_PARAM,
        LIMIT_PARAM,
    ),
)
async def list_executions(request: Request[None]) -> Response:
    """List the ids of one partition, ascending, strictly after the cursor; the limit is 50 by default, at most 1000."""
    partition = request.int_param("partition")
    if partition > 65_535:
        raise bad_request(f"partition: {partition} is not within 0..65535")
    cursor = request.query_param("cursor") or None
    if cursor is not None:
        try:
            ids.parse_execution_id(cursor)
        except errors.InvalidInput as fault:
            raise bad_request(f"invalid cursor: {fault.detail}") from None
    return json_response(
        await request.engine.list_executions(partition, cursor=cursor, limit=request.int_param("limit", 50))
    )


@routes.get(EXECUTION_PATH, {200: ExecutionInfoResponse}, subject=Subject.EXECUTION)
async def get_execution(request: Request[None]) -> Response:
    """Return an execution and its state."""
    execution_id = request.execution_id
    info = require_found(await request.engine.read_execution_info(execution_id), f"execution not found: {execution_id}")
    return json_response(
        ExecutionInfoResponse(
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


@routes.get(f"{EXECUTION_PATH}/state", {200: PublicState}, subject=Subject.EXECUTION)
async def get_state(request: Request[None]) -> Response:
    """Return the public state of an execution."""
    execution_id = request.execution_id
    return json_response(
        require_found(await request.engine.read_execution_state(execution_id), f"execution not found: {execution_id}")
    )


@routes.get(
    f"{EXECUTION_PATH}/result",
    {200: OCTET_STREAM},
    subject=Subject.EXECUTION,
    query=(QueryParam("wait_ms", {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_MS}),),
    long=True,
)
async def get_result(request: Request[None]) -> Response:
    """Return the raw bytes of the result; with `wait_ms`, wait for the end of the execution."""
    execution_id = request.execution_id
    if wait_ms := min(request.int_param("wait_ms", 0), MAX_WAIT_MS):
        with suppress(errors.NotFound):
            await request.wait_while_connected(request.engine.await_end(execution_id, max_wait_ms=wait_ms))
    result = await request.engine.get_execution_result(execution_id)
    return Response(200, require_found(result, f"execution result not found: {execution_id}"), OCTET_STREAM)


@routes.post(
    f"{EXECUTION_PATH}/cancel",
    {200: one_of(answers.Cancelled)},
    body=CancelExecutionRequest,
    scope=ApiScope.OPERATE,
    subject=Subject.EXECUTION,
    audit=True,
)
async def cancel_execution(request: Request[CancelExecutionRequest]) -> Response:
    """Cancel whatever it is doing; again is fine."""
    execution_id, body = request.execution_id, request.body
    check_same_id("execution_id", execution_id, body.execution_id)
    fence = Fence(body.lease_id, body.lease_epoch, body.attempt_id)
    return variant_response(
        await request.engine.cancel_execution(execution_id, reason=body.reason, source=body.source, fence=fence)
    )


@routes.put(
    f"{EXECUTION_PATH}/priority",
    {200: one_of(answers.Changed)},
    body=ChangePriorityRequest,
    scope=ApiScope.OPERATE,
    subject=Subject.EXECUTION,
    audit=True,
)
async def change_priority(request: Request[ChangePriorityRequest]) -> Response:
    """Change the priority of a claimable execution."""
    return variant_response(await request.engine.change_priority(request.execution_id, request.body.new_priority))


@routes.post(
    f"{EXECUTION_PATH}/replay",
    {200: one_of(answers.Replayed)},
    scope=ApiScope.OPERATE,
    subject=Subject.EXECUTION,
    audit=True,
)
async def replay_execution(request: Request[bytes]) -> Response:
    """Start another life of an ended execution."""
    return variant_response(await request.engine.replay_execution(request.execution_id))


@routes.post(
    f"{EXECUTION_PATH}/revoke-lease",
    {200: one_of(RevokeLeaseResponse, answers.NothingToDo)},
    scope=ApiScope.OPERATE,
    subject=Subject.EXECUTION,
    audit=True,
)
async def revoke_lease(request: Request[bytes]) -> Response:
    """Revoke the lease at once; the next claim on the lane takes the work over."""
    answer = await request.engine.revoke_lease(request.execution_id)
    if isinstance(answer, answers.NothingToDo):
        return variant_response(answer)
    return variant_response(RevokeLeaseResponse(answer.lease_id, str(answer.lease_epoch)))


@routes.put(
    f"{EXECUTION_PATH}/tags",
    {200: SetTagsResponse},
    body=SetTagsRequest,
    scope=ApiScope.SUBMIT,
    subject=Subject.EXECUTION,
)
async def set_execution_tags(request: Request[SetTagsRequest]) -> Response:
    """Set tags, all or none."""
    return json_response(
        SetTagsResponse(await request.engine.set_execution_tags(request.execution_id, request.body.tags))
    )


@routes.post(
    f"{EXECUTION_PATH}/resume",
    {200: one_of(ResumeExecutionResponse)},
    body=ResumeExecutionRequest,
    scope=ApiScope.OPERATE,
    subject=Subject.EXECUTION,
    audit=True,
)
async def resume_execution(request: Request[ResumeExecutionRequest]) -> Response:
    """Resume a suspended execution, whatever it waits for."""
    body = request.body
    answer = await request.engine.resume_execution(
        request.execution_id, trigger_type=body.trigger_type, resume_delay_ms=body.resume_delay_ms
    )
    return variant_response(ResumeExecutionResponse(answer.public_state))
