"""Waitpoints and signals."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from flowfabric import ids
from flowfabric.api.encoding import LIMIT, Body, Natural, Octets, Unsaid, Whole, checked, octets, variants
from flowfabric.engine.types import Accepted, Duplicate, MailArgs, SignalArgs, WaitpointRecord
from flowfabric.model.api_token import Scope
from flowfabric.model.suspension import WaitpointState
from flowfabric.server.errors import Problem
from flowfabric.server.request import Ask, found, json, same, tagged, uuid_in
from flowfabric.server.routing import SIGNAL_LIMIT, Param, Reply, Routes, Subject

routes = Routes("signals")

ONE = "/v1/executions/{id}"
NO_STORE = ("cache-control", "no-store")
DEDUP_TTL_MS, SIGNAL_CAP, LOG_LENGTH = 86_400_000, 10_000, 1000
NO_TOKEN = "waitpoint token not found (consumed, expired, or unknown id)"


class WaitpointEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """An open waitpoint; the token is not part of it."""

    waitpoint_id: str
    waitpoint_key: str
    execution_id: str
    state: WaitpointState
    required_signal_names: list[str]
    created_at: int
    token_kid: str
    token_fingerprint: str
    activated_at: int | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET


@routes.get(
    f"{ONE}/pending-waitpoints",
    {200: list[WaitpointEntry]},
    subject=Subject.EXECUTION,
    query=(Param("after", {"type": "string", "format": "uuid"}), LIMIT),
)
async def list_pending_waitpoints(ask: Ask[None]) -> Reply:
    """The open waitpoints of an execution by id, up to 1000 a page."""
    after = ask.query("after")
    page = await ask.engine.list_pending_waitpoints(
        ask.execution_id,
        after=None if not after else uuid_in("after", after, ""),
        limit=ask.number("limit", 1000),
    )
    entries = [
        WaitpointEntry(
            waitpoint_id=one.waitpoint_id,
            waitpoint_key=one.waitpoint_key,
            execution_id=one.execution_id,
            state=one.state,
            required_signal_names=one.required_signal_names,
            created_at=one.created_at,
            token_kid=one.token_kid,
            token_fingerprint=one.token_fingerprint,
            activated_at=UNSET if one.activated_at is None else one.activated_at,
            expires_at=UNSET if one.expires_at is None else one.expires_at,
        )
        for one in page.entries
    ]
    return json(entries)


@routes.get(f"{ONE}/waitpoints/{{waitpoint_id}}", {200: WaitpointRecord}, subject=Subject.EXECUTION)
async def describe_waitpoint(ask: Ask[None]) -> Reply:
    """A waitpoint of an execution, open or closed, and how many signals it has met; not its token."""
    record = await ask.engine.describe_waitpoint(ask.execution_id, uuid_in("waitpoint_id", ask.params[1], ""))
    return json(found(record, "not found: waitpoint"))


class Token(Unsaid, msgspec.Struct, frozen=True):
    token: str


@routes.get(
    f"{ONE}/waitpoints/{{waitpoint_id}}/token", {200: Token}, scope=Scope.OPERATE, subject=Subject.EXECUTION, audit=True
)
async def read_waitpoint_token(ask: Ask[None]) -> Reply:
    """The token of an open waitpoint, for those who may have it."""
    execution_id, waitpoint_id = ask.execution_id, uuid_in("waitpoint_id", ask.params[1], "")
    token = await ask.engine.read_token_of(execution_id, waitpoint_id)
    if token is None:
        return json(Problem(NO_TOKEN), 404, NO_STORE)
    return json(Token(token.reveal()), 200, NO_STORE)


class SignalBody(Unsaid, Body, frozen=True):
    """A signal; id and instants may be left to the server."""

    execution_id: str
    waitpoint_id: str
    signal_name: str
    signal_category: str
    source_type: str
    source_identity: str
    waitpoint_token: str
    target_scope: str = "waitpoint"
    signal_id: str | None = None
    now: Whole | None = None
    payload: Octets | None = None
    payload_b64: bytes | None = None
    payload_encoding: str | None = None
    correlation_id: str | None = None
    idempotency_key: str | None = None
    created_at: Natural | None = None
    dedup_ttl_ms: Natural | None = DEDUP_TTL_MS
    resume_delay_ms: Natural | None = None
    max_signals_per_execution: Natural | None = SIGNAL_CAP
    signal_maxlen: Natural | None = LOG_LENGTH

    def __post_init__(self) -> None:
        checked(ids.parse_execution_id, self.execution_id)
        checked(ids.parse_uuid, self.waitpoint_id, self.signal_id)
        octets("payload", self.payload, self.payload_b64)


@routes.post(
    f"{ONE}/signal",
    {200: variants(Accepted, Duplicate)},
    body=SignalBody,
    limit=SIGNAL_LIMIT,
    scope=Scope.SUBMIT,
    subject=Subject.EXECUTION,
)
async def deliver_signal(ask: Ask[SignalBody]) -> Reply:
    """Send a signal to a waitpoint, with the token that allows it."""
    execution_id, body = ask.execution_id, ask.body
    same("execution_id", execution_id, body.execution_id)
    answer = await ask.engine.deliver_signal(
        SignalArgs(
            signal_id=body.signal_id or ask.engine.minter.uuid(),
            payload=octets("payload", body.payload, body.payload_b64),
            dedup_ttl_ms=_or(body.dedup_ttl_ms, DEDUP_TTL_MS),
            max_signals_per_execution=_or(body.max_signals_per_execution, SIGNAL_CAP),
            signal_maxlen=_or(body.signal_maxlen, LOG_LENGTH),
            **body.told(
                "signal_id",
                "payload",
                "payload_b64",
                "dedup_ttl_ms",
                "max_signals_per_execution",
                "signal_maxlen",
            ),
        )
    )
    return tagged(answer)


def _or(given: int | None, default: int) -> int:
    """A number that may be sent as null, which says no more than leaving it out."""
    return default if given is None else given


class MessageBody(Body, frozen=True):
    """A message to the mailbox of a durable function."""

    mailbox: str
    message_id: str | None = None
    payload: Octets | None = None
    payload_b64: bytes | None = None
    payload_encoding: str | None = None
    sender: str = ""
    idempotency_key: str | None = None
    dedup_ttl_ms: Natural = 86_400_000

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.message_id)
        octets("payload", self.payload, self.payload_b64)


@routes.post(
    f"{ONE}/messages",
    {200: variants(Accepted, Duplicate)},
    body=MessageBody,
    limit=SIGNAL_LIMIT,
    scope=Scope.SUBMIT,
    subject=Subject.EXECUTION,
)
async def send_message(ask: Ask[MessageBody]) -> Reply:
    """Send a message to an execution; it is kept in order until somebody receives it."""
    body = ask.body
    answer = await ask.engine.send_message(
        MailArgs(
            execution_id=ask.execution_id,
            message_id=body.message_id or ask.engine.minter.uuid(),
            payload=octets("payload", body.payload, body.payload_b64),
            **body.told("message_id", "payload", "payload_b64"),
        )
    )
    return tagged(answer)
