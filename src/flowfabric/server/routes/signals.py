"""Routes for waitpoints, signals and messages."""

from __future__ import annotations

from msgspec import UNSET

from flowfabric.api.encoding import decode_octets
from flowfabric.api.signals import (
    DEDUP_TTL_MS,
    MAX_SIGNALS,
    SIGNAL_LOG_LENGTH,
    DeliverSignalRequest,
    SendMessageRequest,
    WaitpointEntry,
    WaitpointTokenResponse,
)
from flowfabric.engine.types import Accepted, DuplicateDelivery, MessageArgs, SignalArgs, WaitpointRecord
from flowfabric.model.api_token import ApiScope
from flowfabric.server.errors import Problem
from flowfabric.server.request import Request, check_same_id, json_response, path_uuid, require_found, variant_response
from flowfabric.server.routing import LIMIT_PARAM, SIGNAL_LIMIT, QueryParam, Response, RouteGroup, Subject, one_of

routes = RouteGroup("signals")

EXECUTION_PATH = "/v1/executions/{id}"
NO_STORE = ("cache-control", "no-store")
TOKEN_NOT_FOUND = "waitpoint token not found (consumed, expired, or unknown id)"


@routes.get(
    f"{EXECUTION_PATH}/pending-waitpoints",
    {200: list[WaitpointEntry]},
    subject=Subject.EXECUTION,
    query=(QueryParam("after", {"type": "string", "format": "uuid"}), LIMIT_PARAM),
)
async def list_pending_waitpoints(request: Request[None]) -> Response:
    """List the open waitpoints of an execution by id, up to 1000 a page."""
    after = request.query_param("after")
    page = await request.engine.list_pending_waitpoints(
        request.execution_id,
        after=None if not after else path_uuid("after", after, ""),
        limit=request.int_param("limit", 1000),
    )
    entries = [
        WaitpointEntry(
            waitpoint_id=entry.waitpoint_id,
            waitpoint_key=entry.waitpoint_key,
            execution_id=entry.execution_id,
            state=entry.state,
            required_signal_names=entry.required_signal_names,
            created_at=entry.created_at,
            token_kid=entry.token_kid,
            token_fingerprint=entry.token_fingerprint,
            activated_at=UNSET if entry.activated_at is None else entry.activated_at,
            expires_at=UNSET if entry.expires_at is None else entry.expires_at,
        )
        for entry in page.entries
    ]
    return json_response(entries)


@routes.get(f"{EXECUTION_PATH}/waitpoints/{{waitpoint_id}}", {200: WaitpointRecord}, subject=Subject.EXECUTION)
async def describe_waitpoint(request: Request[None]) -> Response:
    """Return a waitpoint of an execution, open or closed, and how many signals it has; not its token."""
    record = await request.engine.describe_waitpoint(
        request.execution_id, path_uuid("waitpoint_id", request.path_params[1], "")
    )
    return json_response(require_found(record, "not found: waitpoint"))


@routes.get(
    f"{EXECUTION_PATH}/waitpoints/{{waitpoint_id}}/token",
    {200: WaitpointTokenResponse},
    scope=ApiScope.OPERATE,
    subject=Subject.EXECUTION,
    audit=True,
)
async def read_waitpoint_token(request: Request[None]) -> Response:
    """Return the token of an open waitpoint."""
    execution_id, waitpoint_id = request.execution_id, path_uuid("waitpoint_id", request.path_params[1], "")
    token = await request.engine.read_token_of(execution_id, waitpoint_id)
    if token is None:
        return json_response(Problem(TOKEN_NOT_FOUND), 404, NO_STORE)
    return json_response(WaitpointTokenResponse(token.reveal()), 200, NO_STORE)


@routes.post(
    f"{EXECUTION_PATH}/signal",
    {200: one_of(Accepted, DuplicateDelivery)},
    body=DeliverSignalRequest,
    limit=SIGNAL_LIMIT,
    scope=ApiScope.SUBMIT,
    subject=Subject.EXECUTION,
)
async def deliver_signal(request: Request[DeliverSignalRequest]) -> Response:
    """Deliver a signal to a waitpoint; its token is required."""
    execution_id, body = request.execution_id, request.body
    check_same_id("execution_id", execution_id, body.execution_id)
    answer = await request.engine.deliver_signal(
        SignalArgs(
            signal_id=body.signal_id or request.engine.minter.uuid(),
            payload=decode_octets("payload", body.payload, body.payload_b64),
            dedup_ttl_ms=_value_or(body.dedup_ttl_ms, DEDUP_TTL_MS),
            max_signals_per_execution=_value_or(body.max_signals_per_execution, MAX_SIGNALS),
            signal_maxlen=_value_or(body.signal_maxlen, SIGNAL_LOG_LENGTH),
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
    return variant_response(answer)


def _value_or(value: int | None, default: int) -> int:
    """Return the default for null, which means the same as an omitted field."""
    return default if value is None else value


@routes.post(
    f"{EXECUTION_PATH}/messages",
    {200: one_of(Accepted, DuplicateDelivery)},
    body=SendMessageRequest,
    limit=SIGNAL_LIMIT,
    scope=ApiScope.SUBMIT,
    subject=Subject.EXECUTION,
)
async def send_message(request: Request[SendMessageRequest]) -> Response:
    """Send a message to an execution; messages are kept in order until they are received."""
    body = request.body
    answer = await request.engine.send_message(
        MessageArgs(
            execution_id=request.execution_id,
            message_id=body.message_id or request.engine.minter.uuid(),
            payload=decode_octets("payload", body.payload, body.payload_b64),
            **body.to_kwargs("message_id", "payload", "payload_b64"),
        )
    )
    return variant_response(answer)
