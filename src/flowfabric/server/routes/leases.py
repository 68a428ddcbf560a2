"""Routes for the holder of a lease: renew, report, finish, suspend. The handle in the body fences every request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec import UNSET, UnsetType

from flowfabric import errors
from flowfabric.api import leases as api
from flowfabric.api.encoding import (
    BULK_LIMIT,
    WORK_LIMIT,
    decode_octets,
)
from flowfabric.api.executions import SetTagsResponse
from flowfabric.api.signals import ObservedSignalItem, ObservedSignalsResponse
from flowfabric.api.streams import AppendFramesRequest, FrameSpec
from flowfabric.engine.operations.suspensions import SuspendDetails, Suspended
from flowfabric.engine.types import BestEffort, FreshWaitpoint, ResumePolicy, SuspendArgs, UsePendingWaitpoint
from flowfabric.handles import Handle
from flowfabric.model.answers import execution as answers
from flowfabric.model.failure import encode_stored
from flowfabric.model.security.api_token import ApiScope
from flowfabric.model.view import view_of
from flowfabric.server.errors import bad_request, error_entry
from flowfabric.server.request import Request, as_variant, json_response, variant_response
from flowfabric.server.routing import H, Response, RouteGroup, Subject, one_of

routes = RouteGroup("work")


@routes.post(
    "/v1/leases/renew",
    {200: api.BatchResponse},
    body=api.RenewLeasesRequest,
    limit=WORK_LIMIT,
    scope=ApiScope.WORK,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def renew(request: Request[api.RenewLeasesRequest]) -> Response:
    """Renew many leases in one round trip; each gets its own result or error."""
    handles: list[Handle | errors.FabricError] = []
    for item in await request.app.handle_signer.verify_all(request.body.handles):
        try:
            if isinstance(item, Handle):
                await request.require_execution_access(item.fields.execution_id)
            handles.append(item)
        except errors.FabricError as refused:
            handles.append(refused)
    valid = [item for item in handles if isinstance(item, Handle)]
    renewed = iter(await request.engine.renew_many(valid, lease_ttl_ms=request.body.lease_ttl_ms) if valid else [])
    response = [next(renewed) if isinstance(item, Handle) else item for item in handles]
    return json_response(
        {
            "results": [
                error_entry(item) if isinstance(item, errors.FabricError) else as_variant(item) for item in response
            ]
        }
    )


def lease_route(
    path: str, response: Any, body: Any, limit: int = WORK_LIMIT, *, audit: bool = False
) -> Callable[[H], H]:
    """Declare a route for the holder of a lease."""
    return routes.post(
        f"/v1/leases/{path}",
        {200: response},
        body=body,
        limit=limit,
        scope=ApiScope.WORK,
        subject=Subject.HANDLE,
        audit=audit,
    )


@lease_route("progress", one_of(answers.ProgressNoted), api.ReportProgressRequest)
async def progress(request: Request[api.ReportProgressRequest]) -> answers.ProgressNoted:
    """Report progress."""
    return await request.engine.progress(request.handle, **request.body.to_kwargs("handle"))


@lease_route("complete", one_of(answers.Completed), api.CompleteRequest, BULK_LIMIT)
async def complete(request: Request[api.CompleteRequest]) -> answers.Completed:
    """Complete the execution; a repeated call after a lost response succeeds."""
    body = request.body
    result = decode_octets("result", body.result, body.result_b64)
    answer = await request.engine.complete(request.handle, result=result, encoding=body.encoding)
    request.trace_attempt_end("ok")
    return answer


@lease_route("fail", one_of(answers.RetryScheduled, answers.TerminalFailed), api.FailRequest)
async def fail(request: Request[api.FailRequest]) -> answers.RetryScheduled | answers.TerminalFailed:
    """Fail the attempt; the retry policy decides whether another one follows."""
    body = request.body
    failure = None if body.error is None else encode_stored(body.error)
    answer = await request.engine.fail(request.handle, failure=failure, **body.to_kwargs("handle", "error"))
    request.trace_attempt_end("retry" if isinstance(answer, answers.RetryScheduled) else "error")
    return answer


@lease_route("cancel", one_of(answers.Cancelled), api.HolderCancelRequest, audit=True)
async def cancel(request: Request[api.HolderCancelRequest]) -> answers.Cancelled:
    """Cancel as the holder of the lease, or of the last one while its attempt is open."""
    answer = await request.engine.cancel_as_holder(request.handle, reason=request.body.reason)
    request.trace_attempt_end("cancelled")
    return answer


@lease_route("tags", SetTagsResponse, api.HolderSetTagsRequest)
async def set_tags(request: Request[api.HolderSetTagsRequest]) -> SetTagsResponse:
    """Set tags of the held execution, all or none; the holder may set those that begin with `ff.`."""
    return SetTagsResponse(await request.engine.set_tags(request.handle, request.body.tags))


@lease_route("cancel-children", one_of(answers.ChildrenCancelled), api.CancelChildrenRequest)
async def cancel_children(request: Request[api.CancelChildrenRequest]) -> answers.ChildrenCancelled:
    """Cancel children of the held execution; executions that are no children are reported as not found."""
    return await request.engine.cancel_children(request.handle, **request.body.to_kwargs("handle"))


@lease_route("delay", one_of(answers.Delayed), api.DelayRequest)
async def delay(request: Request[api.DelayRequest]) -> answers.Delayed:
    """Release the work for a while; the same attempt continues afterwards."""
    body = request.body
    if (body.delay_until is None) == (body.delay_ms is None):
        raise bad_request("either delay_until or delay_ms is needed")
    if body.delay_until is None:
        answer = await request.engine.delay_for(request.handle, body.delay_ms or 0, reason=body.reason)
    else:
        answer = await request.engine.delay(request.handle, delay_until=body.delay_until)
    request.trace_attempt_end("delayed")
    return answer


@lease_route("wait-children", one_of(answers.Moved), api.HandleOnlyRequest)
async def wait_children(request: Request[api.HandleOnlyRequest]) -> answers.Moved:
    """Release the work until its dependencies are resolved."""
    answer = await request.engine.wait_children(request.handle)
    request.trace_attempt_end("waiting")
    return answer


@lease_route("suspend", one_of(Suspended=api.SuspendResponse, AlreadySatisfied=api.SuspendResponse), api.SuspendRequest)
async def suspend(request: Request[api.SuspendRequest]) -> Response:
    """Release the lease and wait for the condition; buffered signals may have met it already."""
    body = request.body
    now = body.now if body.now is not None else await request.engine.ping()
    policy = body.resume_policy
    answer = await request.engine.suspend(
        request.handle,
        SuspendArgs(
            suspension_id=body.suspension_id or request.engine.minter.uuid(),
            waitpoints=tuple(_to_binding(request, item) for item in body.waitpoints),
            resume_condition=body.resume_condition,
            reason_code=_snake(body.reason_code),
            now=now,
            resume_policy=ResumePolicy(_snake(policy.resume_target), **policy.to_kwargs("resume_target")),
            requested_by=_snake(body.requested_by),  # type: ignore[arg-type]
            timeout_at=body.timeout_at,
            timeout_behavior=_snake(body.timeout_behavior),  # type: ignore[arg-type]
            continuation_metadata_pointer=body.continuation_metadata_pointer,
            idempotency_key=body.idempotency_key,
        ),
    )
    if isinstance(answer, Suspended):
        request.trace_attempt_end("suspended")
        return variant_response(
            _suspend_response(answer.details, await request.app.handle_signer.sign(answer.handle)), name="Suspended"
        )
    return variant_response(_suspend_response(answer.details, UNSET), name="AlreadySatisfied")


def _to_binding(
    request: Request[api.SuspendRequest], binding: dict[str, dict[str, str]]
) -> FreshWaitpoint | UsePendingWaitpoint:
    match binding:
        case {"Fresh": fields}:
            waitpoint_id = fields.get("waitpoint_id") or request.engine.minter.uuid()
            return FreshWaitpoint(waitpoint_id, fields.get("waitpoint_key", f"wpk:{waitpoint_id}"))
        case {"UsePending": {"waitpoint_id": waitpoint_id}}:
            return UsePendingWaitpoint(waitpoint_id)
        case _:
            raise bad_request("waitpoints: neither Fresh nor UsePending")


def _suspend_response(details: SuspendDetails, handle: str | UnsetType) -> api.SuspendResponse:
    first = api.IssuedWaitpoint(details.waitpoint_id, details.waitpoint_key, details.waitpoint_token.reveal())
    rest = [
        api.IssuedWaitpoint(item.waitpoint_id, item.waitpoint_key, item.waitpoint_token.reveal())
        for item in details.additional_waitpoints
    ]
    return api.SuspendResponse(details.suspension_id, [first, *rest], handle)


def _snake(name: str) -> str:
    """Return the snake case of an enum value, so that `WaitingForSignal` and `waiting_for_signal` are equal."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


@lease_route("waitpoints", api.CreateWaitpointResponse, api.CreateWaitpointRequest)
async def create_waitpoint(request: Request[api.CreateWaitpointRequest]) -> Response:
    """Create a waitpoint before the suspension that uses it."""
    created = await request.engine.create_waitpoint(
        request.handle, request.body.waitpoint_key, request.body.expires_in_ms
    )
    return json_response(
        api.CreateWaitpointResponse(created.waitpoint_id, created.token.reveal()), 200, ("cache-control", "no-store")
    )


@lease_route("signals", ObservedSignalsResponse, api.HandleOnlyRequest)
async def observe_signals(request: Request[api.HandleOnlyRequest]) -> ObservedSignalsResponse:
    """Return the signals that resumed this attempt, in the order of acceptance."""
    return ObservedSignalsResponse(
        [observed_signal_item(item) for item in await request.engine.observe_signals(request.handle)]
    )


def observed_signal_item(signal: Any) -> ObservedSignalItem:
    """Return the schema of a signal."""
    return view_of(ObservedSignalItem, signal, payload_b64=signal.payload)


@lease_route("frames", api.BatchResponse, AppendFramesRequest)
async def append_frames(request: Request[AppendFramesRequest]) -> Response:
    """Append frames to the output of the attempt, in order; each gets its own result or error."""
    handle = request.handle
    # Appends that are added together, in order, are written together.
    appended = await asyncio.gather(*(_appended(request, handle, frame) for frame in request.body.frames))
    return json_response({"results": appended})


async def _appended(request: Request[AppendFramesRequest], handle: Handle, frame: FrameSpec) -> Any:
    try:
        answer = await request.engine.append_frame(
            handle,
            decode_octets("payload", frame.payload, frame.payload_b64) or b"",
            best_effort=BestEffort(**frame.best_effort.to_kwargs()),
            **frame.to_kwargs("payload", "payload_b64", "best_effort"),
        )
    except errors.FabricError as refused:
        return error_entry(refused)
    return as_variant(answer)
