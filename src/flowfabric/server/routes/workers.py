"""Routes for workers: long-polling claims, redeemed grants and the registry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flowfabric.api import claims as api
from flowfabric.api.encoding import MAX_WAIT_MS, WORK_LIMIT
from flowfabric.engine.engine import Engine
from flowfabric.model.answers import execution as answers
from flowfabric.model.scheduling.worker import (
    STOPPED,
    MarkedDead,
    NotRegistered,
    TaskList,
    WorkerPage,
    WorkerRefreshed,
    WorkerRegistered,
)
from flowfabric.model.security.api_token import ApiScope
from flowfabric.model.view import view_of
from flowfabric.server import tracing
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Request, variant_response
from flowfabric.server.routes.grants import check_worker_names
from flowfabric.server.routing import NAMESPACE_PARAM, PAGE_PARAMS, H, Response, RouteGroup, Subject, one_of

routes = RouteGroup("workers")
worker_routes = routes.with_defaults(scope=ApiScope.WORK, subject=Subject.CHECKED_BY_HANDLER)


@worker_routes.post(
    "/v1/workers/{worker_id}/claims", {200: api.ClaimWorkResponse}, body=api.ClaimWorkRequest, long=True
)
async def claim(request: Request[api.ClaimWorkRequest]) -> api.ClaimWorkResponse:
    """Claim up to `limit` executions, as soon as there is one; budgets and quotas are checked first."""
    worker_id, body = request.path_params[0], request.body
    check_worker_names(worker_id, body.worker_instance_id, *body.lanes)
    lanes = tuple(dict.fromkeys(body.lanes))
    for namespace in body.namespaces or ():
        request.require_namespace(namespace)

    await request.app.handle_signer.prepare()

    def wake() -> None:
        request.engine.wake_claims(lanes)

    async with request.watch_disconnect(wake) as is_connected:
        with _register_claim(request, wake) as is_wanted:
            claimed = await request.engine.claim_from_lanes(
                lanes,
                worker_id=worker_id,
                max_wait_ms=min(body.wait_ms, MAX_WAIT_MS),
                go_on=lambda: is_connected() and is_wanted(),
                namespaces=request.principal.namespaces if body.namespaces is None else body.namespaces,
                **body.to_kwargs("lanes", "wait_ms", "namespaces"),
            )
        await request.check_authentication()
        if claimed and request.is_abandoned:
            await _release(request.engine, claimed)
            claimed = []
    return api.ClaimWorkResponse([await _claimed_work(request, item) for item in claimed])


async def _release(engine: Engine, claimed: list[answers.Claimed]) -> None:
    """Release work whose claimant has disconnected, so that the next worker need not wait for lease expiry."""
    await asyncio.gather(*(engine.delay_for(item.handle, 0) for item in claimed), return_exceptions=True)


@contextmanager
def _register_claim(request: Request[api.ClaimWorkRequest], wake: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Register a waiting claim for `end_claims`; yield a predicate that is False once it was ended."""
    wanted, claimant = True, (request.principal.name, request.body.worker_instance_id)

    def end() -> None:
        nonlocal wanted
        wanted = False
        wake()

    waiting = request.app.waiting_claims.setdefault(claimant, set())
    waiting.add(end)
    try:
        yield lambda: wanted
    finally:
        waiting.discard(end)
        if not waiting:
            request.app.waiting_claims.pop(claimant, None)


@worker_routes.post("/v1/workers/{worker_id}/claims/end", {200: api.EndClaimsResponse}, body=api.EndClaimsRequest)
async def end_claims(request: Request[api.EndClaimsRequest]) -> api.EndClaimsResponse:
    """Make the waiting claims of this worker instance return now; return how many there were."""
    check_worker_names(request.path_params[0], request.body.worker_instance_id)
    waiting = tuple(request.app.waiting_claims.get((request.principal.name, request.body.worker_instance_id), ()))
    for end in waiting:
        end()
    return api.EndClaimsResponse(len(waiting))


async def _claimed_work(
    request: Request[api.ClaimWorkRequest] | Request[api.RedeemGrantRequest], claimed: answers.Claimed
) -> api.ClaimedWork:
    payload = claimed.payload
    if payload is None:
        context = await request.engine.read_execution_context(claimed.execution_id)
        kind, data, encoding, creator, policy = context.execution_kind, context.input_payload, None, "", None
    else:
        kind, data = payload.execution_kind, payload.input_payload or b""
        encoding, creator, policy = payload.payload_encoding, payload.creator_identity, payload.policy
    submitted = None
    if request.app.tracing.is_on:
        snapshot = await request.engine.describe_execution(claimed.execution_id)
        submitted = None if snapshot is None else snapshot.tags.get(tracing.TRACEPARENT_TAG)
        request.app.tracing.record_claim(
            claimed.execution_id, claimed.attempt_index, claimed.attempt_type.value, submitted
        )
    return view_of(
        api.ClaimedWork,
        claimed,
        handle=await request.app.handle_signer.sign(claimed.handle),
        attempt_type=claimed.attempt_type.value,
        execution_kind=kind,
        input_payload_b64=data,
        payload_encoding=encoding,
        creator_identity=creator,
        policy=policy,
        traceparent=submitted,
    )


@routes.post(
    "/v1/executions/{id}/redeem",
    {200: one_of(answers.NotReclaimable, answers.ReclaimCapExceeded, answers.GrantNotFound, Claimed=api.ClaimedWork)},
    body=api.RedeemGrantRequest,
    scope=ApiScope.WORK,
    subject=Subject.EXECUTION,
)
async def redeem(
    request: Request[api.RedeemGrantRequest],
) -> answers.NotReclaimable | answers.ReclaimCapExceeded | answers.GrantNotFound | Response:
    """Redeem a grant: start an attempt, continue an interrupted one, or take over a lost one."""
    execution_id, body = request.execution_id, request.body
    check_worker_names(body.worker_id, body.worker_instance_id, *filter(None, [body.lane_id]))
    answer: answers.Claimed | answers.NotReclaimable | answers.ReclaimCapExceeded | answers.GrantNotFound
    holder = body.to_kwargs("grant_kind", "attempt_id", "attempt_timeout_ms", "max_reclaim_count")
    await request.app.handle_signer.prepare()
    match body.grant_kind:
        case "claim":
            answer = await request.engine.claim_execution(
                execution_id, attempt_id=body.attempt_id, attempt_timeout_ms=body.attempt_timeout_ms, **holder
            )
        case "resume":
            answer = await request.engine.claim_resumed_execution(
                execution_id, remaining_attempt_timeout_ms=body.attempt_timeout_ms, **holder
            )
        case "reclaim":
            answer = await request.engine.reclaim_execution(
                execution_id, attempt_id=body.attempt_id, max_reclaim_count=body.max_reclaim_count, **holder
            )
        case _:
            raise bad_request("grant_kind: none of claim, resume, reclaim")
    if isinstance(answer, answers.Claimed):
        return variant_response(await _claimed_work(request, answer), name="Claimed")
    return answer


def registry_route(verb: str, answered: Any, body: Any = api.WorkerInstanceRequest, **options: Any) -> Callable[[H], H]:
    """Declare a route for an entry of the registry."""
    path, route_options = f"/v1/workers/{{worker_id}}/{verb}", {"scope": ApiScope.WORK} | options
    return routes.post(path, {200: answered}, body=body, subject=Subject.CHECKED_BY_HANDLER, **route_options)


def _registry_kwargs(request: Request[Any]) -> dict[str, Any]:
    """Check namespace and names, and return the fields of the body."""
    request.require_namespace(request.body.namespace)
    check_worker_names(request.path_params[0], request.body.worker_instance_id, *getattr(request.body, "lanes", ()))
    kwargs: dict[str, Any] = request.body.to_kwargs()
    return kwargs


@registry_route("register", one_of(WorkerRegistered, WorkerRefreshed), api.RegisterWorkerRequest, limit=WORK_LIMIT)
async def register_worker(request: Request[api.RegisterWorkerRequest]) -> WorkerRegistered | WorkerRefreshed:
    """Register a worker and its tasks; work that waited for its capabilities is claimable before this returns."""
    return await request.engine.register_worker(worker_id=request.path_params[0], **_registry_kwargs(request))


@registry_route("heartbeat", one_of(WorkerRefreshed, NotRegistered))
async def heartbeat_worker(request: Request[api.WorkerInstanceRequest]) -> WorkerRefreshed | NotRegistered:
    """Refresh a worker in the registry."""
    return await request.engine.heartbeat_worker(**_registry_kwargs(request))


@registry_route(
    "dead", one_of(MarkedDead, NotRegistered), api.MarkWorkerDeadRequest, scope=ApiScope.OPERATE, audit=True
)
async def mark_worker_dead(request: Request[api.MarkWorkerDeadRequest]) -> MarkedDead | NotRegistered:
    """Remove a worker from the registry; its leases expire by themselves."""
    return await request.engine.mark_worker_dead(**_registry_kwargs(request))


@registry_route("leave", one_of(MarkedDead, NotRegistered))
async def leave(request: Request[api.WorkerInstanceRequest]) -> MarkedDead | NotRegistered:
    """Leave the registry, as a worker that stops."""
    return await request.engine.mark_worker_dead(reason=STOPPED, **_registry_kwargs(request))


@routes.get("/v1/workers", {200: WorkerPage}, subject=Subject.CHECKED_BY_HANDLER, query=(NAMESPACE_PARAM, *PAGE_PARAMS))
async def list_workers(request: Request[None]) -> WorkerPage:
    """List the live workers of a namespace by instance id; without one, those of all namespaces."""
    namespace, namespaces = request.visible_namespaces()
    if namespace is None and namespaces is not None:
        if len(namespaces) != 1:
            raise bad_request("namespace: needed by a token that is bound to namespaces")
        [namespace] = namespaces
    return await request.engine.list_workers(
        namespace, after=request.cursor, limit=request.int_param("limit", 1000), all_namespaces=True
    )


@routes.get("/v1/tasks", {200: TaskList}, subject=Subject.CHECKED_BY_HANDLER, query=(NAMESPACE_PARAM,))
async def list_tasks(request: Request[None]) -> TaskList:
    """List the tasks that live workers run by namespace and name, with the JSON schemas of input and result."""
    namespace, namespaces = request.visible_namespaces()
    return await request.engine.list_tasks(namespace=namespace, namespaces=namespaces)
