"""Routes for waitpoints, signals, messages and facts."""

from __future__ import annotations

from msgspec.structs import asdict

from flowfabric.api import signals as api
from flowfabric.api.durable import ListFactsResponse
from flowfabric.api.encoding import MAX_WAIT_MS, decode_octets
from flowfabric.engine.durable.approval_inbox import ApprovalPage
from flowfabric.engine.durable.facts import FactReading
from flowfabric.engine.types import Accepted, DuplicateDelivery, MessageArgs, SignalArgs, WaitpointRecord
from flowfabric.model.gate import Reply
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server.errors import Problem
from flowfabric.server.request import Request, check_same_id, json_response, path_uuid, require_found
from flowfabric.server.routing import (
    LIMIT_PARAM,
    NAMESPACE_PARAM,
    PAGE_PARAMS,
    SIGNAL_LIMIT,
    WAIT_MS_PARAM,
    QueryParam,
    Response,
    RouteGroup,
    Subject,
    one_of,
)

routes = RouteGroup("signals")
execution_routes = routes.with_defaults(subject=Subject.EXECUTION)
submitter_routes = routes.with_defaults(scope=ApiScope.SUBMIT, subject=Subject.EXECUTION)

EXECUTION_PATH = "/v1/executions/{id}"
ASKED_BY_PARAM = QueryParam("execution_id", {"type": "string"})
NO_STORE = ("cache-control", "no-store")
TOKEN_NOT_FOUND = "waitpoint token not found (consumed, expired, or unknown id)"


@execution_routes.get(
    f"{EXECUTION_PATH}/pending-waitpoints",
    {200: list[api.WaitpointEntry]},
    query=(QueryParam("after", {"type": "string", "format": "uuid"}), LIMIT_PARAM),
)
async def list_pending_waitpoints(request: Request[None]) -> list[api.WaitpointEntry]:
    """List the open waitpoints of an execution by id, up to 1000 a page."""
    after = request.query_param("after")
    page = await request.engine.list_pending_waitpoints(
        request.execution_id,
        after=None if not after else path_uuid("after", after, ""),
        limit=request.int_param("limit", 1000),
    )
    return [
        api.WaitpointEntry(**{name: value for name, value in asdict(entry).items() if value is not None})
        for entry in page.entries
    ]


@routes.get(
    "/v1/approvals",
    {200: ApprovalPage},
    subject=Subject.CHECKED_BY_HANDLER,
    query=(ASKED_BY_PARAM, NAMESPACE_PARAM, *PAGE_PARAMS),
)
async def list_approvals(request: Request[None]) -> ApprovalPage:
    """List what executions, or one of them, ask people, within the token's namespaces; the first to time out first."""
    namespace, namespaces = request.visible_namespaces()
    return await request.engine.list_approvals(
        execution_id=request.query_param("execution_id") or None,
        namespace=namespace,
        namespaces=namespaces,
        cursor=request.cursor,
        limit=request.int_param("limit", 50),
    )


@execution_routes.get(f"{EXECUTION_PATH}/waitpoints/{{waitpoint_id}}", {200: WaitpointRecord})
async def describe_waitpoint(request: Request[None]) -> WaitpointRecord:
    """Return a waitpoint of an execution, open or closed, and how many signals it has; not its token."""
    record = await request.engine.describe_waitpoint(
        request.execution_id, path_uuid("waitpoint_id", request.path_params[1], "")
    )
    return require_found(record, "not found: waitpoint")


@execution_routes.get(
    f"{EXECUTION_PATH}/waitpoints/{{waitpoint_id}}/token",
    {200: api.WaitpointTokenResponse},
    scope=ApiScope.OPERATE,
    audit=True,
)
async def read_waitpoint_token(request: Request[None]) -> Response:
    """Return the token of an open waitpoint."""
    execution_id, waitpoint_id = request.execution_id, path_uuid("waitpoint_id", request.path_params[1], "")
    token = await request.engine.read_token_of(execution_id, waitpoint_id)
    if token is None:
        return json_response(Problem(TOKEN_NOT_FOUND), 404, NO_STORE)
    return json_response(api.WaitpointTokenResponse(token.reveal()), 200, NO_STORE)


@submitter_routes.post(
    f"{EXECUTION_PATH}/signal",
    {200: one_of(Accepted, DuplicateDelivery)},
    body=api.DeliverSignalRequest,
    limit=SIGNAL_LIMIT,
)
async def deliver_signal(request: Request[api.DeliverSignalRequest]) -> Accepted | DuplicateDelivery:
    """Deliver a signal to a waitpoint; its token is required."""
    execution_id, body = request.execution_id, request.body
    check_same_id("execution_id", execution_id, body.execution_id)
    return await request.engine.deliver_signal(
        SignalArgs(
            signal_id=body.signal_id or request.engine.minter.uuid(),
            payload=decode_octets("payload", body.payload, body.payload_b64),
            dedup_ttl_ms=_value_or(body.dedup_ttl_ms, api.DEDUP_TTL_MS),
            max_signals_per_execution=_value_or(body.max_signals_per_execution, api.MAX_SIGNALS),
            signal_maxlen=_value_or(body.signal_maxlen, api.SIGNAL_LOG_LENGTH),
            **body.to_kwargs(
                "signal_id",
                "payload",
                "payload_b64",
                "dedup_ttl_ms",
                "max_signals_per_execution",
                "signal_maxlen",
            ),
        )
    )


def _value_or(value: int | None, default: int) -> int:
    """Return the default for null, which means the same as an omitted field."""
    return default if value is None else value


@submitter_routes.post(
    f"{EXECUTION_PATH}/messages",
    {200: one_of(Accepted, DuplicateDelivery)},
    body=api.SendMessageRequest,
    limit=SIGNAL_LIMIT,
)
async def send_message(request: Request[api.SendMessageRequest]) -> Accepted | DuplicateDelivery:
    """Send a message to an execution; messages are kept in order until they are received."""
    body = request.body
    return await request.engine.send_message(
        MessageArgs(
            execution_id=request.execution_id,
            message_id=body.message_id or request.engine.minter.uuid(),
            payload=decode_octets("payload", body.payload, body.payload_b64),
            **body.to_kwargs("message_id", "payload", "payload_b64"),
        )
    )


@submitter_routes.post(f"{EXECUTION_PATH}/asks", {200: Reply}, body=api.AskRequest, limit=SIGNAL_LIMIT, long=True)
async def ask(request: Request[api.AskRequest]) -> Reply:
    """Send a message that wants a reply, and wait for it up to `wait_ms`; the same question is not sent twice."""
    body = request.body
    args = MessageArgs(
        execution_id=request.execution_id,
        message_id=body.message_id or request.engine.minter.uuid(),
        payload=decode_octets("payload", body.payload, body.payload_b64),
        **body.to_kwargs("message_id", "payload", "payload_b64", "wait_ms"),
    )
    asked = await request.engine.ask(args)
    wait_ms = min(body.wait_ms, MAX_WAIT_MS)
    if wait_ms:
        reading = request.engine.read_reply(request.execution_id, asked.message_id, max_wait_ms=wait_ms)
        asked = await request.wait_while_connected(reading) or asked
    return asked


@execution_routes.get(f"{EXECUTION_PATH}/asks/{{message_id}}", {200: Reply}, query=(WAIT_MS_PARAM,), long=True)
async def read_reply(request: Request[None]) -> Reply:
    """Return the reply to a message that wants one; wait up to `wait_ms` while it is open."""
    execution_id, message_id = request.execution_id, path_uuid("message_id", request.path_params[1], "")
    return await request.long_poll(lambda ms: request.engine.read_reply(execution_id, message_id, max_wait_ms=ms))


@execution_routes.get(f"{EXECUTION_PATH}/facts", {200: ListFactsResponse})
async def list_facts(request: Request[None]) -> ListFactsResponse:
    """Return the facts of an execution by name; values are base64."""
    return ListFactsResponse(await request.engine.list_facts(request.execution_id))


@execution_routes.get(
    f"{EXECUTION_PATH}/facts/{{name}}",
    {200: FactReading},
    query=(QueryParam("after", {"type": "integer", "minimum": 0}), WAIT_MS_PARAM),
    long=True,
)
async def read_fact(request: Request[None]) -> FactReading:
    """Return a fact whose number is greater than `after`; wait for it up to `wait_ms`, or until the run ends."""
    execution_id, name, after = request.execution_id, request.path_params[1], request.int_param("after", 0)
    return await request.long_poll(lambda ms: request.engine.read_fact(execution_id, name, after=after, max_wait_ms=ms))
