"""Durable functions over HTTP: remembered steps, gates, parking."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from flowfabric.api.encoding import HolderRequest, Natural, Octets, RedactedRepr, decode_octets, one_of
from flowfabric.engine.operations.durable import ParkResult
from flowfabric.engine.types import GateArgs
from flowfabric.model.api_token import ApiScope
from flowfabric.model.gate import Gate, GateKind, GateMemo, StepMemo
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Request, json_response, require_found, variant_response
from flowfabric.server.routes.leases import ObservedSignalItem, observed_signal_item
from flowfabric.server.routing import WORK_LIMIT, Response, RouteGroup, Subject

routes = RouteGroup("durable functions")

EXECUTION_PATH = "/v1/executions/{id}"


class RecordStepRequest(HolderRequest, frozen=True):
    name: str
    occurrence: Natural
    result: Octets | None = None
    result_b64: bytes | None = None
    encoding: str | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        decode_octets("result", self.result, self.result_b64)


@routes.post(
    "/v1/leases/steps",
    {200: StepMemo},
    body=RecordStepRequest,
    limit=WORK_LIMIT,
    scope=ApiScope.WORK,
    subject=Subject.HANDLE,
)
async def record_step(ask: Request[RecordStepRequest]) -> Response:
    """Remember what a step returned; if it was remembered before, the first result stands and is the answer."""
    body = ask.body
    return json_response(
        await ask.engine.record_step(
            ask.handle,
            body.name,
            body.occurrence,
            decode_octets("result", body.result, body.result_b64) or b"",
            encoding=body.encoding,
            digest=body.digest,
        )
    )


class ReadStepsResponse(msgspec.Struct, frozen=True):
    steps: list[StepMemo]


@routes.get(f"{EXECUTION_PATH}/steps", {200: ReadStepsResponse}, scope=ApiScope.WORK, subject=Subject.EXECUTION)
async def read_steps(ask: Request[None]) -> Response:
    """What the steps of an execution returned, by name and occurrence; results are base64."""
    return json_response(ReadStepsResponse(await ask.engine.read_steps(ask.execution_id)))


class OpenGateRequest(HolderRequest, frozen=True):
    """A gate by name: `signals`, `mailbox`, `children` or `timer`, with what belongs to its kind."""

    name: str
    kind: GateKind
    expires_in_ms: Natural | None = None
    expires_at: Natural | None = None
    condition: Any = None
    waitpoints: tuple[tuple[str, str], ...] = ()
    mailbox: str | None = None
    children: tuple[str, ...] = ()
    need: Natural = 0
    any_outcome: bool = False


class GateLink(RedactedRepr, msgspec.Struct, frozen=True):
    waitpoint_id: str
    waitpoint_key: str
    token: str


class OpenGateResponse(msgspec.Struct, frozen=True):
    """A gate that nothing has closed yet, with the tokens of its waitpoints."""

    variant: ClassVar[str] = "OpenedGate"

    name: str
    gate: Gate
    links: list[GateLink]


@routes.post(
    "/v1/leases/gates",
    {200: one_of(OpenGateResponse, GateMemo)},
    body=OpenGateRequest,
    scope=ApiScope.WORK,
    subject=Subject.HANDLE,
)
async def open_gate(ask: Request[OpenGateRequest]) -> Response:
    """Open a gate by name, find it open with the same links, or find what came of it."""
    body = ask.body
    answer = await ask.engine.open_gate(
        ask.handle,
        GateArgs(
            name=body.name,
            kind=body.kind,
            expires_in_ms=body.expires_in_ms,
            expires_at=body.expires_at,
            condition=body.condition,
            waitpoints=body.waitpoints,
            mailbox=body.mailbox,
            children=body.children,
            need=body.need,
            any_outcome=body.any_outcome,
        ),
    )
    if isinstance(answer, GateMemo):
        return variant_response(answer)
    links = [GateLink(one.waitpoint_id, one.waitpoint_key, one.token.reveal()) for one in answer.links]
    return variant_response(OpenGateResponse(answer.name, answer.gate, links))


class ParkRequest(HolderRequest, frozen=True):
    gates: Annotated[list[str], Meta(min_length=1)]
    reason_code: str = "waiting_for_signal"


class ParkedResponse(msgspec.Struct, frozen=True):
    suspension_id: str
    handle: str


class GatesReadyResponse(msgspec.Struct, frozen=True):
    variant: ClassVar[str] = "Ready"
    gates: list[str]


@routes.post(
    "/v1/leases/park",
    {200: one_of(Parked=ParkedResponse, Ready=GatesReadyResponse)},
    body=ParkRequest,
    scope=ApiScope.WORK,
    subject=Subject.HANDLE,
)
async def park(ask: Request[ParkRequest]) -> Response:
    """Give the lease back until one of these gates closes; if one has, keep it."""
    answer = await ask.engine.park(ask.handle, tuple(ask.body.gates), reason_code=ask.body.reason_code)
    if isinstance(answer, ParkResult):
        ask.trace_attempt_end("suspended")
        return variant_response(
            ParkedResponse(answer.suspension_id, await ask.app.handle_signer.sign(answer.handle)), name="Parked"
        )
    return variant_response(GatesReadyResponse(list(answer.gates)))


class ReadWaitsResponse(msgspec.Struct, frozen=True):
    """Open gates by name, and what came of the others."""

    open: dict[str, Gate]
    memos: dict[str, GateMemo]


@routes.get(f"{EXECUTION_PATH}/waits", {200: ReadWaitsResponse}, scope=ApiScope.WORK, subject=Subject.EXECUTION)
async def read_waits(ask: Request[None]) -> Response:
    """What a durable function has waited for and still waits for."""
    waits = await ask.engine.read_waits(ask.execution_id)
    return json_response(ReadWaitsResponse(waits.open, waits.memos))


class ReadVotesResponse(msgspec.Struct, frozen=True):
    signals: list[ObservedSignalItem]


@routes.get(
    f"{EXECUTION_PATH}/gates/{{gate}}/votes", {200: ReadVotesResponse}, scope=ApiScope.WORK, subject=Subject.EXECUTION
)
async def read_votes(ask: Request[None]) -> Response:
    """The signals that closed a gate, in the order in which they were accepted."""
    name = ask.path_params[1]
    if not name:
        raise bad_request("gate: empty")
    memo = require_found((await ask.engine.read_waits(ask.execution_id)).memos.get(name), "not found: suspension")
    return json_response(ReadVotesResponse([observed_signal_item(one) for one in await ask.engine.read_votes(memo)]))
