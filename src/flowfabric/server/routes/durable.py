"""Routes for durable functions: steps, gates, parking."""

from __future__ import annotations

from typing import Any

from msgspec.structs import asdict

from flowfabric.api import durable as api
from flowfabric.api.encoding import BULK_LIMIT, WORK_LIMIT, HolderRequest, decode_octets
from flowfabric.engine.durable.held_runs import OldWays
from flowfabric.engine.operations.durable import ParkResult
from flowfabric.engine.types import FactArgs, GateArgs, LeftOperation, MemoArgs, ReplyArgs
from flowfabric.model.answers.execution import Continued
from flowfabric.model.gate import Fact, GateMemo, Reply, StepMemo
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Request, as_variant, json_response, require_found, variant_response
from flowfabric.server.routes.executions import to_create_execution
from flowfabric.server.routes.leases import observed_signal_item
from flowfabric.server.routing import CURSOR_PARAM, Response, RouteGroup, Subject, one_of

routes = RouteGroup("durable functions")
execution_routes = routes.with_defaults(subject=Subject.EXECUTION)
holder_routes = routes.with_defaults(scope=ApiScope.WORK, subject=Subject.HANDLE)

EXECUTION_PATH = "/v1/executions/{id}"


@holder_routes.post("/v1/leases/steps", {200: StepMemo}, body=api.RecordStepRequest, limit=WORK_LIMIT)
async def record_step(request: Request[api.RecordStepRequest]) -> StepMemo:
    """Record the result of a step, or another state of it; a result or failure recorded before is returned instead."""
    body = request.body
    result = decode_octets("result", body.result, body.result_b64) or b""
    return await request.engine.record_step(
        request.handle, result=result, **body.to_kwargs("handle", "result", "result_b64")
    )


@execution_routes.get(f"{EXECUTION_PATH}/steps", {200: api.ReadStepsResponse})
async def read_steps(request: Request[None]) -> api.ReadStepsResponse:
    """Return the recorded steps of an execution in the order in which they began; results are base64."""
    return api.ReadStepsResponse(await request.engine.read_steps(request.execution_id))


@holder_routes.post("/v1/leases/remembered", {200: api.RememberedResponse}, body=HolderRequest)
async def remembered(request: Request[HolderRequest]) -> api.RememberedResponse:
    """Return what earlier attempts of a durable function left behind: steps, open gates, memos of closed ones."""
    answer = await request.engine.remembered(request.handle)
    return api.RememberedResponse(answer.steps, answer.open, answer.memos, answer.progress_counts)


@holder_routes.post(
    "/v1/leases/leave-gates", {200: api.LeaveGatesResponse}, body=api.LeaveGatesRequest, limit=WORK_LIMIT
)
async def leave_gates(request: Request[api.LeaveGatesRequest]) -> api.LeaveGatesResponse:
    """Record that the function left waits or steps, and close their gates; a received message goes back to its mailbox.

    A memo is recorded in the same change, for a race: the winner.
    """
    body = request.body
    operations = [LeftOperation(**asdict(item)) for item in body.operations]
    memo = None if body.memo is None else _memo_args(body.memo)
    return api.LeaveGatesResponse(await request.engine.leave_gates(request.handle, operations, memo=memo))


def _memo_args(item: api.MemoItem) -> MemoArgs:
    return MemoArgs(
        name=item.name,
        occurrence=item.occurrence,
        result=item.result_b64,
        encoding=item.encoding,
        digest=item.digest,
        number=item.number,
        started_at=item.started_at,
    )


@holder_routes.post("/v1/leases/spawn", {200: api.SpawnResponse}, body=api.SpawnRequest, limit=BULK_LIMIT)
async def spawn(request: Request[api.SpawnRequest]) -> Response:
    """Create children of the held execution, each recorded under its memo in the change that creates it."""
    children = request.body.children
    results = await request.engine.spawn(
        request.handle,
        [await to_create_execution(request, child.execution) for child in children],
        [_memo_args(child.memo) for child in children],
    )
    return json_response({"results": [as_variant(one) for one in results]})


@holder_routes.post("/v1/leases/batch", {200: api.ReadBatchResponse}, body=HolderRequest)
async def read_batch(request: Request[HolderRequest]) -> api.ReadBatchResponse:
    """Return the inputs of a batch, in the order of their submits; payloads are base64."""
    inputs = await request.engine.read_batch(request.handle)
    return api.ReadBatchResponse(
        [api.BatchInput(one.seq, one.message_id, one.payload, one.payload_encoding) for one in inputs]
    )


@holder_routes.post("/v1/leases/continue-as-new", {200: Continued}, body=api.ContinueAsNewRequest, limit=WORK_LIMIT)
async def continue_as_new(request: Request[api.ContinueAsNewRequest]) -> Continued:
    """Release the lease and begin the run's next life with another input; unread messages stay, memos are deleted."""
    body = request.body
    continued = await request.engine.continue_as_new(
        request.handle, body.input_payload_b64, encoding=body.encoding, unmet=body.unmet
    )
    request.trace_attempt_end("continued_as_new")
    return continued


@holder_routes.post("/v1/leases/gates", {200: one_of(api.OpenGateResponse, GateMemo)}, body=api.OpenGateRequest)
async def open_gate(request: Request[api.OpenGateRequest]) -> api.OpenGateResponse | GateMemo:
    """Open a gate by name; return the open one with the same links, or the memo of a closed one."""
    answer = await request.engine.open_gate(request.handle, GateArgs(**request.body.to_kwargs("handle")))
    if isinstance(answer, GateMemo):
        return answer
    links = [api.GateLink(link.waitpoint_id, link.waitpoint_key, link.token.reveal()) for link in answer.links]
    return api.OpenGateResponse(answer.name, answer.gate, links)


@holder_routes.post(
    "/v1/leases/park", {200: one_of(Parked=api.ParkedResponse, Ready=api.GatesReadyResponse)}, body=api.ParkRequest
)
async def park(request: Request[api.ParkRequest]) -> Response:
    """Release the lease until one of these gates closes; keep it if one is closed already."""
    answer = await request.engine.park(request.handle, tuple(request.body.gates), reason_code=request.body.reason_code)
    if isinstance(answer, ParkResult):
        return await _parked(request, answer)
    return variant_response(api.GatesReadyResponse(list(answer.gates)))


async def _parked(request: Request[Any], parked: ParkResult) -> Response:
    request.trace_attempt_end("suspended")
    handle = await request.app.handle_signer.sign(parked.handle)
    return variant_response(api.ParkedResponse(parked.suspension_id, handle), name="Parked")


@holder_routes.post(
    "/v1/leases/open-and-park",
    {200: one_of(Parked=api.ParkedResponse, Closed=api.GatesClosedResponse)},
    body=api.OpenAndParkRequest,
    limit=WORK_LIMIT,
)
async def open_gates_and_park(request: Request[api.OpenAndParkRequest]) -> Response:
    """Open gates and release the lease until one of all gates closes; keep it if one closes at once."""
    body = request.body
    answer = await request.engine.open_gates_and_park(
        request.handle, tuple(map(_gate_args, body.gates)), names=body.names, reason_code=body.reason_code
    )
    if isinstance(answer, ParkResult):
        return await _parked(request, answer)
    return variant_response(api.GatesClosedResponse(answer.memos))


@holder_routes.post(
    "/v1/leases/open-gates", {200: api.GatesClosedResponse}, body=api.OpenGatesRequest, limit=WORK_LIMIT
)
async def open_gates(request: Request[api.OpenGatesRequest]) -> api.GatesClosedResponse:
    """Open gates without links; return the memos of those that have closed, or close at once."""
    answer = await request.engine.open_gates(request.handle, tuple(map(_gate_args, request.body.gates)))
    return api.GatesClosedResponse(answer.memos)


@holder_routes.post("/v1/leases/reply", {200: Reply}, body=api.ReplyRequest, limit=WORK_LIMIT)
async def reply(request: Request[api.ReplyRequest]) -> Reply:
    """Reply to a message; the first reply stays and is returned."""
    body = request.body
    payload = decode_octets("payload", body.payload, body.payload_b64)
    args = ReplyArgs(payload=payload, **body.to_kwargs("handle", "memo", "payload", "payload_b64"))
    return await request.engine.reply(request.handle, args, _memo_args(body.memo))


@holder_routes.post("/v1/leases/close-inbox", {200: api.CloseInboxResponse}, body=api.CloseInboxRequest)
async def close_inbox(request: Request[api.CloseInboxRequest]) -> api.CloseInboxResponse:
    """Close the inbox of the held execution if nothing is unread; senders are refused from then on."""
    closed = await request.engine.close_inbox(request.handle, _memo_args(request.body.memo))
    return api.CloseInboxResponse(closed)


@holder_routes.post("/v1/leases/facts", {200: Fact}, body=api.SetFactRequest, limit=WORK_LIMIT)
async def set_fact(request: Request[api.SetFactRequest]) -> Fact:
    """Set a fact of the held execution; a set that was counted before changes nothing."""
    body = request.body
    value = decode_octets("value", body.value, body.value_b64) or b""
    args = FactArgs(value=value, **body.to_kwargs("handle", "value", "value_b64"))
    return await request.engine.set_fact(request.handle, args)


@holder_routes.post("/v1/leases/patch", {200: StepMemo}, body=api.RecordPatchRequest)
async def record_patch(request: Request[api.RecordPatchRequest]) -> StepMemo:
    """Record the run's answer to a patch; the first answer stays."""
    return await request.engine.record_patch(request.handle, **request.body.to_kwargs("handle"))


@execution_routes.post(
    f"{EXECUTION_PATH}/release", {200: api.ReleaseHeldResponse}, body=api.ReleaseHeldRequest, scope=ApiScope.WORK
)
async def release_held(request: Request[api.ReleaseHeldRequest]) -> api.ReleaseHeldResponse:
    """Resume a run that waits for other code, unless this version has held it before."""
    released = await request.engine.release_held(request.execution_id, **request.body.to_kwargs())
    return api.ReleaseHeldResponse(released)


@routes.post(
    "/v1/held",
    {200: api.ListHeldResponse},
    body=api.ListHeldRequest,
    scope=ApiScope.WORK,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def list_held(request: Request[api.ListHeldRequest]) -> api.ListHeldResponse:
    """List the runs of these tasks that wait for other code."""
    request.require_namespace(request.body.namespace)
    return api.ListHeldResponse(await request.engine.list_held(**request.body.to_kwargs()))


@routes.get("/v1/held", {200: api.CountHeldResponse}, subject=Subject.CHECKED_BY_HANDLER)
async def count_held(request: Request[None]) -> api.CountHeldResponse:
    """Count the runs that wait for other code by task, within the namespaces of the token."""
    return api.CountHeldResponse(await request.engine.count_held(namespaces=request.bound_namespaces()))


@routes.get("/v1/old-ways", {200: OldWays}, subject=Subject.CHECKED_BY_HANDLER, query=(CURSOR_PARAM,))
async def count_old_ways(request: Request[None]) -> OldWays:
    """Count unfinished runs that go the old way of a patch or are pinned, within the namespaces of the token."""
    cursor = request.cursor
    return await request.engine.count_old_ways(namespaces=request.bound_namespaces(), cursor=cursor)


@holder_routes.post("/v1/leases/pin", {200: StepMemo}, body=api.PinVersionRequest)
async def pin_version(request: Request[api.PinVersionRequest]) -> StepMemo:
    """Require a version of the code from now on; the first one stays."""
    return await request.engine.pin_version(request.handle, **request.body.to_kwargs("handle"))


@execution_routes.post(
    f"{EXECUTION_PATH}/unpin", {200: api.UnpinResponse}, body=api.UnpinRequest, scope=ApiScope.OPERATE, audit=True
)
async def unpin(request: Request[api.UnpinRequest]) -> api.UnpinResponse:
    """Let workers of any version continue a pinned run, or those of another version."""
    return api.UnpinResponse(await request.engine.unpin(request.execution_id, version=request.body.version))


def _gate_args(gate: api.NewGate) -> GateArgs:
    return GateArgs(**asdict(gate))


@execution_routes.get(f"{EXECUTION_PATH}/waits", {200: api.ReadWaitsResponse})
async def read_waits(request: Request[None]) -> api.ReadWaitsResponse:
    """Return the open gates of a durable function and the memos of closed ones."""
    waits = await request.engine.read_waits(request.execution_id)
    return api.ReadWaitsResponse(waits.open, waits.memos)


@execution_routes.get(f"{EXECUTION_PATH}/gates/{{gate}}/votes", {200: api.ReadVotesResponse}, scope=ApiScope.WORK)
async def read_votes(request: Request[None]) -> api.ReadVotesResponse:
    """Return the signals that closed a gate, in the order of acceptance."""
    name = request.path_params[1]
    if not name:
        raise bad_request("gate: empty")
    memo = require_found(
        (await request.engine.read_waits(request.execution_id)).memos.get(name), "not found: suspension"
    )
    return api.ReadVotesResponse([observed_signal_item(link) for link in await request.engine.read_votes(memo)])
