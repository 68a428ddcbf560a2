"""Routes that remote applications need: the store, budgets of an execution, and outcomes of many executions."""

from __future__ import annotations

import asyncio
from typing import Any

from flowfabric import __version__, errors
from flowfabric.api.admin import StoreInfo
from flowfabric.api.budgets import (
    ExecutionBudgetRequest,
    RecordSpendRequest,
    RefundReservationRequest,
    ReserveBudgetRequest,
    SettleReservationRequest,
    WakeBudgetResponse,
)
from flowfabric.api.encoding import BULK_LIMIT, MAX_WAIT_MS
from flowfabric.api.executions import AwaitOutcomesRequest, AwaitOutcomesResponse, ExecutionOutcomeResponse
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.failure import MAX_FAILURE_BYTES
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server.errors import error_entry
from flowfabric.server.request import Request
from flowfabric.server.routes.lease_usage import USAGE_RESPONSE
from flowfabric.server.routes.queries import MAX_RESULT_BYTES, outcome_response
from flowfabric.server.routing import NAMESPACE_PARAM, RouteGroup, Subject, one_of

routes = RouteGroup("applications")
budget_routes = routes.with_defaults(scope=ApiScope.WORK, subject=Subject.CHECKED_BY_HANDLER)
worker_routes = routes.with_defaults(scope=ApiScope.WORK, subject=Subject.EXECUTION)

EXECUTION_PATH = "/v1/executions/{id}"
COALESCE_S = 0.01


@routes.get("/v1/store", {200: StoreInfo}, scope=None, refusals=(401,))
async def store_info(request: Request[None]) -> StoreInfo:
    """Return what a client needs to mint ids for this store; any valid token will do."""
    engine = request.engine
    await engine.lane_spreads.prepare()
    return StoreInfo(
        engine.store.tag.title,
        engine.partitions,
        await engine.ping(),
        engine.schema.current,
        __version__,
        engine.lane_spreads.spreads(),
    )


def _budget_kwargs(request: Request[Any], *excluded: str) -> dict[str, Any]:
    """Return the fields of the body for the engine's operation; a bound token sees only the execution's namespace."""
    body: ExecutionBudgetRequest = request.body
    return body.to_kwargs("namespace", "shared", *excluded) | {
        "execution_id": request.execution_id,
        "namespace": body.namespace if request.may_use_shared_budgets else request.execution_namespace,
        "shared": request.may_use_shared_budgets and body.shared,
    }


@worker_routes.post(f"{EXECUTION_PATH}/spend", {200: USAGE_RESPONSE}, body=RecordSpendRequest)
async def spend_for(request: Request[RecordSpendRequest]) -> limit_answers.UsageResult:
    """Report usage for the ledger of an execution, once for each key; a hard breach applies nothing."""
    return await request.engine.record_spend(deltas=request.body.dimensions, **_budget_kwargs(request, "dimensions"))


@worker_routes.post(
    f"{EXECUTION_PATH}/reserve",
    {200: one_of(limit_answers.Reserved, limit_answers.HardBreach, limit_answers.AlreadyApplied)},
    body=ReserveBudgetRequest,
)
async def reserve_for(
    request: Request[ReserveBudgetRequest],
) -> limit_answers.Reserved | limit_answers.HardBreach | limit_answers.AlreadyApplied:
    """Reserve capacity of a budget for an execution, under the caller's reservation id."""
    return await request.engine.reserve_budget(**_budget_kwargs(request))


@worker_routes.post(f"{EXECUTION_PATH}/settle", {200: USAGE_RESPONSE}, body=SettleReservationRequest)
async def settle_for(request: Request[SettleReservationRequest]) -> limit_answers.UsageResult:
    """End a reservation with the amounts that were used; the rest is released."""
    return await request.engine.settle_budget(**_budget_kwargs(request))


@budget_routes.post("/v1/budgets/{id}/refund", {200: one_of(limit_answers.Refunded)}, body=RefundReservationRequest)
async def refund_reservation(request: Request[RefundReservationRequest]) -> limit_answers.Refunded:
    """Release what is left of a reservation; one that has ended releases nothing."""
    budget_id, body, namespace = request.budget_id, request.body, request.resolve_namespace(request.body.namespace)
    if not request.may_use_shared_budgets:
        owner = await request.engine.reservation_owner(budget_id, body.reservation_id, namespace=namespace)
        if owner is not None:
            await request.require_execution_access(owner)
    return await request.engine.refund_budget(
        budget_id,
        namespace=namespace,
        shared=request.may_use_shared_budgets and body.shared,
        **body.to_kwargs("namespace", "shared"),
    )


@budget_routes.post("/v1/budgets/{id}/wake", {200: WakeBudgetResponse}, query=(NAMESPACE_PARAM,))
async def wake_budget(request: Request[bytes]) -> WakeBudgetResponse:
    """Let executions that wait for capacity of a budget check again."""
    return WakeBudgetResponse(
        await request.engine.unblock_budget_waiters(request.budget_id, namespace=request.namespace)
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
async def await_ends(request: Request[AwaitOutcomesRequest]) -> AwaitOutcomesResponse:
    """Wait for outcomes of many executions; return as soon as one has ended, or after `wait_ms`."""
    wait_ms = min(request.body.wait_ms, MAX_WAIT_MS)
    waiting = _collect_outcomes(request, wait_ms)
    outcomes = (await request.wait_while_connected(waiting) if wait_ms else await waiting) or {}
    refused = {one: answer for one, answer in outcomes.items() if isinstance(answer, dict)}
    return AwaitOutcomesResponse(
        _fit_response([one for one in outcomes.values() if isinstance(one, ExecutionOutcomeResponse)]), refused
    )


def _fit_response(ended: list[ExecutionOutcomeResponse]) -> list[ExecutionOutcomeResponse]:
    """Return as many ends as fit into one response, at least one; a request for the others is answered at once."""
    size = 0
    for index, one in enumerate(ended):
        size += len(one.result_b64 or b"") + (0 if one.error is None else MAX_FAILURE_BYTES)
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
        await asyncio.wait(looks.values(), timeout=COALESCE_S)  # ends at about the same time are reported together
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
