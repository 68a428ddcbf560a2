"""Routes for durable functions: steps, gates, parking."""

from __future__ import annotations

from flowfabric.api.durable import (
    GateLink,
    GatesReadyResponse,
    OpenGateRequest,
    OpenGateResponse,
    ParkedResponse,
    ParkRequest,
    ReadStepsResponse,
    ReadVotesResponse,
    ReadWaitsResponse,
    RecordStepRequest,
)
from flowfabric.api.encoding import WORK_LIMIT, decode_octets
from flowfabric.engine.operations.durable import ParkResult
from flowfabric.engine.types import GateArgs
from flowfabric.model.api_token import ApiScope
from flowfabric.model.gate import GateMemo, StepMemo
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Request, json_response, require_found, variant_response
from flowfabric.server.routes.leases import observed_signal_item
from flowfabric.server.routing import Response, RouteGroup, Subject, one_of

routes = RouteGroup("durable functions")

EXECUTION_PATH = "/v1/executions/{id}"


@routes.post(
    "/v1/leases/steps",
    {200: StepMemo},
    body=RecordStepRequest,
    limit=WORK_LIMIT,
    scope=ApiScope.WORK,
    subject=Subject.HANDLE,
)
async def record_step(request: Request[RecordStepRequest]) -> Response:
    """Record the result of a step; if one is recorded already, that one is returned."""
    body = request.body
    return json_response(
        await request.engine.record_step(
            request.handle,
            body.name,
            body.occurrence,
            decode_octets("result", body.result, body.result_b64) or b"",
            encoding=body.encoding,
            digest=body.digest,
        )
    )


@routes.get(f"{EXECUTION_PATH}/steps", {200: ReadStepsResponse}, scope=ApiScope.WORK, subject=Subject.EXECUTION)
async def read_steps(request: Request[None]) -> Response:
    """Return the recorded steps of an execution by name and occurrence; results are base64."""
    return json_response(ReadStepsResponse(await request.engine.read_steps(request.execution_id)))


@routes.post(
    "/v1/leases/gates",
    {200: one_of(OpenGateResponse, GateMemo)},
    body=OpenGateRequest,
    scope=ApiScope.WORK,
    subject=Subject.HANDLE,
)
async def open_gate(request: Request[OpenGateRequest]) -> Response:
    """Open a gate by name; return the open one with the same links, or the memo of a closed one."""
    body = request.body
    answer = await request.engine.open_gate(
        request.handle,
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
    links = [GateLink(link.waitpoint_id, link.waitpoint_key, link.token.reveal()) for link in answer.links]
    return variant_response(OpenGateResponse(answer.name, answer.gate, links))


@routes.post(
    "/v1/leases/park",
    {200: one_of(Parked=ParkedResponse, Ready=GatesReadyResponse)},
    body=ParkRequest,
    scope=ApiScope.WORK,
    subject=Subject.HANDLE,
)
async def park(request: Request[ParkRequest]) -> Response:
    """Release the lease until one of these gates closes; keep it if one is closed already."""
    answer = await request.engine.park(request.handle, tuple(request.body.gates), reason_code=request.body.reason_code)
    if isinstance(answer, ParkResult):
        request.trace_attempt_end("suspended")
        return variant_response(
            ParkedResponse(answer.suspension_id, await request.app.handle_signer.sign(answer.handle)), name="Parked"
        )
    return variant_response(GatesReadyResponse(list(answer.gates)))


@routes.get(f"{EXECUTION_PATH}/waits", {200: ReadWaitsResponse}, scope=ApiScope.WORK, subject=Subject.EXECUTION)
async def read_waits(request: Request[None]) -> Response:
    """Return the open gates of a durable function and the memos of closed ones."""
    waits = await request.engine.read_waits(request.execution_id)
    return json_response(ReadWaitsResponse(waits.open, waits.memos))


@routes.get(
    f"{EXECUTION_PATH}/gates/{{gate}}/votes", {200: ReadVotesResponse}, scope=ApiScope.WORK, subject=Subject.EXECUTION
)
async def read_votes(request: Request[None]) -> Response:
    """Return the signals that closed a gate, in the order of acceptance."""
    name = request.path_params[1]
    if not name:
        raise bad_request("gate: empty")
    memo = require_found(
        (await request.engine.read_waits(request.execution_id)).memos.get(name), "not found: suspension"
    )
    return json_response(
        ReadVotesResponse([observed_signal_item(link) for link in await request.engine.read_votes(memo)])
    )
