"""Routes for executions: create, read, cancel, replay, revoke."""

from __future__ import annotations

from contextlib import suppress
from json import dumps
from typing import Any

import msgspec
from msgspec import UNSET

from flowfabric import errors, ids
from flowfabric.api import executions as api
from flowfabric.api.encoding import (
    BULK_LIMIT,
    CREATE_LIMIT,
    MAX_WAIT_MS,
    decode_octets,
)
from flowfabric.engine.operations.pages import ExecutionPage
from flowfabric.engine.types import POLICY_PARTS, CreateExecution, Fence, KeyPolicy, MessageArgs
from flowfabric.keyed_create import create_with_fresh_id
from flowfabric.model.answers import execution as answers
from flowfabric.model.security.api_token import ApiScope
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
    NAMESPACE_PARAM,
    OCTET_STREAM,
    PAGE_PARAMS,
    PARTITION_PARAM,
    WAIT_MS_PARAM,
    QueryParam,
    Response,
    RouteGroup,
    Subject,
    one_of,
)

routes = RouteGroup("executions")
execution_routes = routes.with_defaults(subject=Subject.EXECUTION)
submitter_routes = routes.with_defaults(scope=ApiScope.SUBMIT, subject=Subject.CHECKED_BY_HANDLER)
operator_routes = routes.with_defaults(scope=ApiScope.OPERATE, subject=Subject.EXECUTION, audit=True)
MAX_WARNING_CHARS = 1000
EXECUTION_PATH = "/v1/executions/{id}"


async def to_create_execution(request: Request[Any], body: api.CreateExecutionRequest) -> CreateExecution:
    """Check access and return the engine's request for a body."""
    request.require_namespace(body.namespace)
    if body.parent_id is not None:
        await request.require_execution_access(body.parent_id)
    if tracing.TRACEPARENT_TAG in body.tags:  # the rules cannot distinguish a tag of the caller from one of the server
        raise errors.InvalidTagKey(
            f"{tracing.TRACEPARENT_TAG}: reserved; the server sets it from the header traceparent"
        )
    traceparent = request.app.tracing.current_traceparent()
    return CreateExecution(
        execution_id=body.execution_id
        or request.engine.new_execution_id(body.key_lane or body.lane_id, body.idempotency_key),
        partition=0,
        input_payload=decode_octets("input_payload", body.input_payload, body.input_payload_b64) or b"",
        tags=body.tags if traceparent is None else {tracing.TRACEPARENT_TAG: traceparent} | body.tags,
        policy=None if body.policy is None else encode(body.policy).decode(),
        **body.to_kwargs("execution_id", "input_payload", "input_payload_b64", "tags", "policy", "partition_id"),
    )


@submitter_routes.post(
    "/v1/executions",
    {201: one_of(answers.Created), 200: one_of(answers.Duplicate)},
    body=api.CreateExecutionRequest,
    limit=CREATE_LIMIT,
)
async def create_execution(request: Request[api.CreateExecutionRequest]) -> Response:
    """Create an execution; the same id, or the same live idempotency key, returns the existing one."""
    ask = await to_create_execution(request, request.body)
    if request.body.execution_id is None:
        answer = await create_with_fresh_id(
            request.engine,
            ask.key_lane or ask.lane_id,
            ask.idempotency_key,
            lambda fresh: request.engine.create(msgspec.structs.replace(ask, execution_id=fresh)),
        )
    else:
        answer = await request.engine.create(ask)
    response = variant_response(answer, 201 if isinstance(answer, answers.Created) else 200)
    if request.body.policy is None or POLICY_PARTS.issuperset(request.body.policy):
        return response
    unknown_keys = dumps(sorted(request.body.policy.keys() - POLICY_PARTS))[1:-1].replace('"', "'")[:MAX_WARNING_CHARS]
    return msgspec.structs.replace(
        response, headers=(("warning", f'299 flowfabric "policy keys ignored: {unknown_keys}"'),)
    )


@submitter_routes.post(
    "/v1/executions/bulk", {200: api.CreateExecutionsResponse}, body=api.CreateExecutionsRequest, limit=BULK_LIMIT
)
async def create_executions(request: Request[api.CreateExecutionsRequest]) -> Response:
    """Create many executions; each gets its own result or error."""
    results = await request.engine.create_executions(
        [await to_create_execution(request, body) for body in request.body.executions]
    )
    return json_response({"results": [_batch_entry(one) for one in results]})


def _batch_entry(answer: answers.Created | answers.Duplicate | errors.FabricError) -> Any:
    return error_entry(answer) if isinstance(answer, errors.FabricError) else as_variant(answer)


KEY_PATH = "/v1/keys/{task}/{key}"


@submitter_routes.post(
    KEY_PATH, {200: answers.Submitted, 201: answers.Submitted}, body=api.StartByKeyRequest, limit=CREATE_LIMIT
)
async def start_by_key(request: Request[api.StartByKeyRequest]) -> Response:
    """Create an execution under a key of its task, or handle the one that has the key as the mode says.

    A message is sent to the created or existing execution, in the same change.
    """
    body, (task, key) = request.body, request.path_params
    check_same_id("task", task, body.execution.execution_kind)
    full_key = f"{task}|{key}"
    given = msgspec.structs.replace(body.execution, idempotency_key=full_key)
    ask = await to_create_execution(request, given)
    policy = KeyPolicy(**body.to_kwargs("execution", "message"))

    async def start(fresh: ids.ExecutionId) -> answers.Submitted:
        message = None
        if body.message is not None:
            message = MessageArgs(
                execution_id=fresh,
                mailbox=body.message.mailbox,
                message_id=body.message.message_id,
                payload=body.message.payload_b64,
                payload_encoding=body.message.payload_encoding,
                sender=body.message.sender,
                wants_reply=body.message.wants_reply,
            )
        return await request.engine.start_by_key(
            msgspec.structs.replace(ask, execution_id=fresh), policy, message=message
        )

    if body.execution.execution_id is None:
        answer = await create_with_fresh_id(request.engine, ask.key_lane or ask.lane_id, full_key, start)
    else:
        answer = await start(ids.ExecutionId(ask.execution_id))
    return json_response(answer, 201 if answer.is_new else 200)


@routes.get(
    KEY_PATH,
    {200: api.KeyHolderResponse},
    subject=Subject.CHECKED_BY_HANDLER,
    query=(NAMESPACE_PARAM, QueryParam("lane_id", {"type": "string"})),
)
async def find_by_key(request: Request[None]) -> api.KeyHolderResponse:
    """Return the execution that has a key of a task: one that has not ended, or else the last one."""
    task, key = request.path_params
    namespace = request.namespace
    found = await request.engine.find_by_key(
        f"{task}|{key}", namespace=namespace, lane_id=request.query_param("lane_id") or "default"
    )
    return api.KeyHolderResponse(require_found(found, "not found: key"))


@routes.get("/v1/executions", {200: ExecutionPage}, query=(PARTITION_PARAM, *PAGE_PARAMS))
async def list_executions(request: Request[None]) -> ExecutionPage:
    """List the ids of one partition, ascending, strictly after the cursor; the limit is 50 by default, at most 1000."""
    partition = request.int_param("partition")
    if partition > 65_535:
        raise bad_request(f"partition: {partition} is not within 0..65535")
    cursor = request.cursor
    if cursor is not None:
        try:
            ids.parse_execution_id(cursor)
        except errors.InvalidInput as fault:
            raise bad_request(f"invalid cursor: {fault.detail}") from None
    return await request.engine.list_executions(partition, cursor=cursor, limit=request.int_param("limit", 50))


@execution_routes.get(EXECUTION_PATH, {200: api.ExecutionInfoResponse})
async def get_execution(request: Request[None]) -> api.ExecutionInfoResponse:
    """Return an execution and its state."""
    execution_id = request.execution_id
    info = require_found(await request.engine.read_execution_info(execution_id), f"execution not found: {execution_id}")
    fields = msgspec.structs.asdict(info)
    for name in ("created_at", "started_at", "completed_at"):
        fields[name] = UNSET if fields[name] is None else str(fields[name])
    return api.ExecutionInfoResponse(**fields)


@execution_routes.get(f"{EXECUTION_PATH}/state", {200: PublicState})
async def get_state(request: Request[None]) -> PublicState:
    """Return the public state of an execution."""
    execution_id = request.execution_id
    return require_found(
        await request.engine.read_execution_state(execution_id), f"execution not found: {execution_id}"
    )


@execution_routes.get(f"{EXECUTION_PATH}/result", {200: OCTET_STREAM}, query=(WAIT_MS_PARAM,), long=True)
async def get_result(request: Request[None]) -> Response:
    """Return the raw bytes of the result; with `wait_ms`, wait for the end of the execution."""
    execution_id = request.execution_id
    if wait_ms := min(request.int_param("wait_ms", 0), MAX_WAIT_MS):
        with suppress(errors.NotFound):
            await request.wait_while_connected(request.engine.await_end(execution_id, max_wait_ms=wait_ms))
    result = await request.engine.get_execution_result(execution_id)
    return Response(200, require_found(result, f"execution result not found: {execution_id}"), OCTET_STREAM)


@operator_routes.post(f"{EXECUTION_PATH}/cancel", {200: one_of(answers.Cancelled)}, body=api.CancelExecutionRequest)
async def cancel_execution(request: Request[api.CancelExecutionRequest]) -> answers.Cancelled:
    """Cancel the execution in any state. Idempotent."""
    execution_id, body = request.execution_id, request.body
    check_same_id("execution_id", execution_id, body.execution_id)
    fence = Fence(body.lease_id, body.lease_epoch, body.attempt_id)
    return await request.engine.cancel_execution(execution_id, reason=body.reason, source=body.source, fence=fence)


@operator_routes.put(f"{EXECUTION_PATH}/priority", {200: one_of(answers.Changed)}, body=api.ChangePriorityRequest)
async def change_priority(request: Request[api.ChangePriorityRequest]) -> answers.Changed:
    """Change the priority of a claimable execution."""
    return await request.engine.change_priority(request.execution_id, request.body.new_priority)


@operator_routes.post(f"{EXECUTION_PATH}/replay", {200: one_of(answers.Replayed)})
async def replay_execution(request: Request[bytes]) -> answers.Replayed:
    """Start another life of an ended execution."""
    return await request.engine.replay_execution(request.execution_id)


@operator_routes.post(f"{EXECUTION_PATH}/revoke-lease", {200: one_of(api.RevokeLeaseResponse, answers.NothingToDo)})
async def revoke_lease(request: Request[bytes]) -> api.RevokeLeaseResponse | answers.NothingToDo:
    """Revoke the lease at once; the next claim on the lane takes the work over."""
    answer = await request.engine.revoke_lease(request.execution_id)
    if isinstance(answer, answers.NothingToDo):
        return answer
    return api.RevokeLeaseResponse(answer.lease_id, str(answer.lease_epoch))


@execution_routes.put(
    f"{EXECUTION_PATH}/tags", {200: api.SetTagsResponse}, body=api.SetTagsRequest, scope=ApiScope.SUBMIT
)
async def set_execution_tags(request: Request[api.SetTagsRequest]) -> api.SetTagsResponse:
    """Set tags, all or none."""
    return api.SetTagsResponse(await request.engine.set_execution_tags(request.execution_id, request.body.tags))


@operator_routes.post(
    f"{EXECUTION_PATH}/resume", {200: one_of(api.ResumeExecutionResponse)}, body=api.ResumeExecutionRequest
)
async def resume_execution(request: Request[api.ResumeExecutionRequest]) -> api.ResumeExecutionResponse:
    """Resume a suspended execution, whatever it waits for."""
    answer = await request.engine.resume_execution(request.execution_id, **request.body.to_kwargs())
    return api.ResumeExecutionResponse(answer.public_state)
