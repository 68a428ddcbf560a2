"""Routes that remote applications need: the store, budgets of an execution, and outcomes of many executions."""

from __future__ import annotations

import asyncio
from typing import Any

from flowfabric import __version__, errors
from flowfabric.api.admin import StoreInfo
from flowfabric.api.budgets import (
    RecordSpendRequest,
    RefundReservationRequest,
    ReserveBudgetRequest,
    SettleReservationRequest,
    WakeBudgetResponse,
)
from flowfabric.api.encoding import BULK_LIMIT, MAX_WAIT_MS
from flowfabric.api.executions import AwaitOutcomesRequest, AwaitOutcomesResponse, ExecutionOutcomeResponse
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.api_token import ApiScope
from flowfabric.server.errors import error_entry
from flowfabric.server.request import Request, json_response, path_uuid, variant_response
from flowfabric.server.routes.lease_usage import USAGE_RESPONSE
from flowfabric.server.routes.queries import MAX_RESULT_BYTES, outcome_response
from flowfabric.server.routing import NAMESPACE_PARAM, Response, RouteGroup, Subject, one_of

routes = RouteGroup("applications")

EXECUTION_PATH = "/v1/executions/{id}"
COALESCE_S = 0.01


@routes.get("/v1/store", {200: StoreInfo}, scope=None, refusals=(401,))
async def store_info(request: Request[None]) -> Response:
    """Return what a client needs to mint ids for this store; any valid token will do."""
    engine = request.engine
    now = await engine.ping()
    return json_response(StoreInfo(engine.store.tag.title, engine.partitions, now, engine.schema.current, __version__))


def _budget_scope(request: Request[Any]) -> dict[str, Any]:
    """Return where the engine looks for the budget; a bound token sees only the execution's namespace."""
    body = request.body
    return {
        "namespace": body.namespace if request.may_use_shared_budgets else request.execution_namespace,
        "shared": request.may_use_shared_budgets and body.shared,
    }


@routes.post(
    f"{EXECUTION_PATH}/spend",
    {200: USAGE_RESPONSE},
    body=RecordSpendRequest,
    scope=ApiScope.WORK,
    subject=Subject.EXECUTION,
)
async def spend_for(request: Request[RecordSpendRequest]) -> Response:
    """Report usage for the ledger of an execution, once for each key; a hard breach applies nothing."""
    body = request.body
    return variant_response(
        await request.engine.record_spend(
            body.budget_id,
            request.execution_id,
            body.dimensions,
            idempotency_key=body.idempotency_key,
            **_budget_scope(request),
        )
    )


@routes.post(
    f"{EXECUTION_PATH}/reserve",
    {200: one_of(limit_answers.Reserved, limit_answers.HardBreach, limit_answers.AlreadyApplied)},
    body=ReserveBudgetRequest,
    scope=ApiScope.WORK,
    subject=Subject.EXECUTION,
)
async def reserve_for(request: Request[ReserveBudgetRequest]) -> Response:
    """Reserve capacity of a budget for an execution, under the caller's reservation id."""
    body = request.body
    return variant_response(
        await request.engine.reserve_budget(
            body.budget_id,
            request.execution_id,
            body.amounts,
            ttl_ms=body.ttl_ms,
            reservation_id=body.reservation_id,
            **_budget_scope(request),
        )
    )


@routes.post(
    f"{EXECUTION_PATH}/settle",
    {200: USAGE_RESPONSE},
    body=SettleReservationRequest,
    scope=ApiScope.WORK,
    subject=Subject.EXECUTION,
)
async def settle_for(request: Request[SettleReservationRequest]) -> Response:
    """End a reservation with the amounts that were used; the rest is released."""
    body = request.body
    return variant_response(
        await request.engine.settle_budget(
            body.budget_id, request.execution_id, body.reservation_id, body.amounts, **_budget_scope(request)
        )
    )


def _path_budget_id(request: Request[Any]) -> str:
    return path_uuid("budget_id", request.path_params[0])


@routes.post(
    "/v1/budgets/{id}/refund",
    {200: one_of(limit_answers.Refunded)},
    body=RefundReservationRequest,
    scope=ApiScope.WORK,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def refund_reservation(request: Request[RefundReservationRequest]) -> Response:
    """Release a reservation unused; one that has ended releases nothing."""
    budget_id, reservation_id, namespace = (
        _path_budget_id(request),
        request.body.reservation_id,
        request.resolve_namespace(request.body.namespace),
    )
    if not request.may_use_shared_budgets:
        owner = await request.engine.reservation_owner(budget_id, reservation_id, namespace=namespace)
        if owner is not None:
            await request.require_execution_access(owner)
    shared, execution_id = request.may_use_shared_budgets and request.body.shared, request.body.execution_id
    return variant_response(
        await request.engine.refund_budget(
            budget_id, reservation_id, execution_id=execution_id, namespace=namespace, shared=shared
        )
    )


@routes.post(
    "/v1/budgets/{id}/wake",
    {200: WakeBudgetResponse},
    scope=ApiScope.WORK,
    subject=Subject.CHECKED_BY_HANDLER,
    query=(NAMESPACE_PARAM,),
)
async def wake_budget(request: Request[bytes]) -> Response:
    """Let executions that wait for capacity of a budget check again."""
    return json_response(
        WakeBudgetResponse(
            await request.engine.unblock_budget_waiters(
                _path_budget_id(request), namespace=request.resolve_namespace(request.query_param("namespace"))
            )
        )
    )


@routes.post(
    "/v1/executions/ends",
    {200: AwaitOutcomesResponse},
    body=AwaitOutcomesRequest,
    limit=BULK_LIMIT,
    scope=ApiScope.READ,
    subject=Subject.CHECKED_BY_HANDLER,
    long=True,
)
async def await_ends(request: Request[AwaitOutcomesRequest]) -> Response:
    """Wait for outcomes of many executions; return as soon as one has ended, or after `wait_ms`."""
    wait_ms = min(request.body.wait_ms, MAX_WAIT_MS)
    waiting = _collect_outcomes(request, wait_ms)
    outcomes = (await request.wait_while_connected(waiting) if wait_ms else await waiting) or {}
    refused = {one: answer for one, answer in outcomes.items() if isinstance(answer, dict)}
    return json_response(
        AwaitOutcomesResponse(
            _fit_response([one for one in outcomes.values() if isinstance(one, ExecutionOutcomeResponse)]), refused
        )
    )


def _fit_response(ended: list[ExecutionOutcomeResponse]) -> list[ExecutionOutcomeResponse]:
    """As many ends as fit into one answer, at least one; whoever asks for the others again is told them at once."""
    size = 0
    for index, one in enumerate(ended):
        size += len(one.result_b64 or b"")
        if index and size > MAX_RESULT_BYTES:
            return ended[:index]
    return ended


async def _collect_outcomes(
    request: Request[AwaitOutcomesRequest], wait_ms: int
) -> dict[str, ExecutionOutcomeResponse | dict[str, Any] | None]:
    looks = {
        one: asyncio.create_task(_end_of(request, one, wait_ms)) for one in dict.fromkeys(request.body.execution_ids)
    }
    try:
        await asyncio.wait(looks.values(), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(looks.values(), timeout=COALESCE_S)  # those that end at about the same time: told together
    finally:
        for look in looks.values():
            look.cancel()
        await asyncio.wait(looks.values())
    return {one: look.result() for one, look in looks.items() if not look.cancelled()}


async def _end_of(
    request: Request[AwaitOutcomesRequest], execution_id: str, wait_ms: int
) -> ExecutionOutcomeResponse | dict[str, Any] | None:
    try:
        await request.require_execution_access(execution_id)
        ended = await request.engine.await_end(execution_id, max_wait_ms=wait_ms)
    except errors.FabricError as refused:
        return error_entry(refused)
    return None if ended is None else outcome_response(ended, with_result=True)
