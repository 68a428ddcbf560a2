"""Routes for schedules: define, list, describe, pause, resume, trigger, backfill, delete."""

from __future__ import annotations

from flowfabric import errors
from flowfabric.api import schedules as api
from flowfabric.api.encoding import CREATE_LIMIT, decode_octets
from flowfabric.engine.schedules.operator import SchedulePage
from flowfabric.engine.types import Backfilled, CreateExecution, ScheduleDescription
from flowfabric.model.answers import execution as answers
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server.request import Request, encode
from flowfabric.server.routing import CURSOR_PARAM, NAMESPACE_PARAM, POSITIVE_LIMIT_PARAM, RouteGroup, Subject, one_of

routes = RouteGroup("schedules", subject=Subject.CHECKED_BY_HANDLER)
operator_routes = routes.with_defaults(scope=ApiScope.OPERATE, audit=True)

SCHEDULE_PATH = "/v1/schedules/{name}"


@operator_routes.put(SCHEDULE_PATH, {200: api.PutScheduleResponse}, body=api.PutScheduleRequest, limit=CREATE_LIMIT)
async def put_schedule(request: Request[api.PutScheduleRequest]) -> api.PutScheduleResponse:
    """Put a schedule in place; the same definition again changes nothing."""
    body, run = request.body, request.body.run
    request.require_namespace(run.namespace)
    if run.parent_id is not None:
        raise errors.InvalidInput("parent_id: the runs of a schedule have no other parent")
    ask = CreateExecution(
        execution_id=run.execution_id or request.engine.new_execution_id(run.lane_id),
        partition=0,
        input_payload=decode_octets("input_payload", run.input_payload, run.input_payload_b64) or b"",
        policy=None if run.policy is None else encode(run.policy).decode(),
        **run.to_kwargs("execution_id", "input_payload", "input_payload_b64", "policy", "partition_id"),
    )
    outcome = await request.engine.put_schedule(
        request.path_params[0], body.spec, ask, owner=body.owner, only_new=body.only_new
    )
    return api.PutScheduleResponse(outcome)


@routes.get("/v1/schedules", {200: SchedulePage}, query=(CURSOR_PARAM, POSITIVE_LIMIT_PARAM, NAMESPACE_PARAM))
async def list_schedules(request: Request[None]) -> SchedulePage:
    """List schedules by name; a bound token sees those of its namespaces."""
    namespace, bound = request.visible_namespaces()
    return await request.engine.list_schedules(
        namespace=namespace, namespaces=bound, cursor=request.cursor, limit=request.int_param("limit", 100)
    )


@routes.get(SCHEDULE_PATH, {200: ScheduleDescription}, query=(NAMESPACE_PARAM,))
async def describe_schedule(request: Request[None]) -> ScheduleDescription:
    """Return a schedule with its last ten runs and its next ten instants."""
    return await request.engine.describe_schedule(request.path_params[0], namespace=request.namespace)


@operator_routes.post(
    f"{SCHEDULE_PATH}/pause",
    {200: api.ScheduleChangedResponse},
    body=api.PauseScheduleRequest,
    query=(NAMESPACE_PARAM,),
)
async def pause_schedule(request: Request[api.PauseScheduleRequest]) -> api.ScheduleChangedResponse:
    """Pause a schedule until it is resumed, also through deploys."""
    changed = await request.engine.pause_schedule(
        request.path_params[0], note=request.body.note, namespace=request.namespace
    )
    return api.ScheduleChangedResponse(changed)


@operator_routes.post(f"{SCHEDULE_PATH}/resume", {200: api.ScheduleChangedResponse}, query=(NAMESPACE_PARAM,))
async def resume_schedule(request: Request[bytes]) -> api.ScheduleChangedResponse:
    """Resume a schedule with its next instant."""
    changed = await request.engine.resume_schedule(request.path_params[0], namespace=request.namespace)
    return api.ScheduleChangedResponse(changed)


@operator_routes.post(
    f"{SCHEDULE_PATH}/trigger",
    {201: one_of(answers.Created), 200: one_of(answers.Duplicate)},
    body=api.TriggerScheduleRequest,
    query=(NAMESPACE_PARAM,),
)
async def trigger_schedule(request: Request[api.TriggerScheduleRequest]) -> answers.Created | answers.Duplicate:
    """Create a run of a schedule now; the same `trigger_id` again changes nothing."""
    return await request.engine.trigger_schedule(
        request.path_params[0], trigger_id=request.body.trigger_id, namespace=request.namespace
    )


@operator_routes.post(
    f"{SCHEDULE_PATH}/backfill", {200: Backfilled}, body=api.BackfillScheduleRequest, query=(NAMESPACE_PARAM,)
)
async def backfill_schedule(request: Request[api.BackfillScheduleRequest]) -> Backfilled:
    """Create the runs of past instants; an instant that has its run is skipped."""
    body = request.body
    return await request.engine.backfill_schedule(
        request.path_params[0], body.start, body.end, overlap=body.overlap, namespace=request.namespace
    )


@operator_routes.delete(SCHEDULE_PATH, {200: api.ScheduleChangedResponse}, query=(NAMESPACE_PARAM,))
async def delete_schedule(request: Request[bytes]) -> api.ScheduleChangedResponse:
    """Delete a schedule; its runs continue."""
    changed = await request.engine.delete_schedule(request.path_params[0], namespace=request.namespace)
    return api.ScheduleChangedResponse(changed)


@operator_routes.post("/v1/schedules/retire", {200: api.RetiredSchedulesResponse}, body=api.RetireSchedulesRequest)
async def retire_schedules(request: Request[api.RetireSchedulesRequest]) -> api.RetiredSchedulesResponse:
    """Pause the schedules that an application no longer declares, or remove them."""
    body = request.body
    retired = await request.engine.retire_schedules(
        namespace=request.resolve_namespace(body.namespace), **body.to_kwargs("namespace")
    )
    return api.RetiredSchedulesResponse(retired)
