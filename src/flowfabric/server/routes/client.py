"""What applications that know only this server need beside the rest: its store, ends, budgets."""

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
    """What a client has to know to mint ids that the store would mint; for whoever has any good token."""
    engine = request.engine
    now = await engine.ping()
    return json_response(StoreInfo(engine.store.tag.title, engine.partitions, now, engine.schema.current, __version__))


def _whose(request: Request[Any]) -> dict[str, Any]:
    """Where the engine looks for the budget: a bound token means those of the execution's namespace only."""
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
    """Report for an execution's ledger, once for each key; a hard breach applies nothing at all."""
    body = request.body
    return variant_response(
        await request.engine.record_spend(
            body.budget_id,
            request.execution_id,
            body.dimensions,
            idempotency_key=body.idempotency_key,
            **_whose(request),
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
    """Keep room free for an execution, under the caller's id."""
    body = request.body
    return variant_response(
        await request.engine.reserve_budget(
            body.budget_id,
            request.execution_id,
            body.amounts,
            ttl_ms=body.ttl_ms,
            reservation_id=body.reservation_id,
            **_whose(request),
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
    """End a reservation with what was really used; the rest of it is given back."""
    body = request.body
    return variant_response(
        await request.engine.settle_budget(
            body.budget_id, request.execution_id, body.reservation_id, body.amounts, **_whose(request)
        )
    )


def _budget(request: Request[Any]) -> str:
    return path_uuid("budget_id", request.path_params[0])


@routes.post(
    "/v1/budgets/{id}/refund",
    {200: one_of(limit_answers.Refunded)},
    body=RefundReservationRequest,
    scope=ApiScope.WORK,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def refund_reservation(request: Request[RefundReservationRequest]) -> Response:
    """Give all of a reservation back; one that is over has nothing to give."""
    budget_id, reservation_id, namespace = (
        _budget(request),
        request.body.reservation_id,
        request.resolve_namespace(request.body.namespace),
    )
    if not request.may_use_shared_budgets:
        holder = await request.engine.reservation_owner(budget_id, reservation_id, namespace=namespace)
        if holder is not None:
            await request.require_execution_access(holder)
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
    """Let whoever waits for room in a budget look again."""
    return json_response(
        WakeBudgetResponse(
            await request.engine.unblock_budget_waiters(
                _budget(request), namespace=request.resolve_namespace(request.query_param("namespace"))
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
    """The ends of many executions with their results, as soon as one of them has ended, or the time is over."""
    wait_ms = min(request.body.wait_ms, MAX_WAIT_MS)
    looking = _first_ends(request, wait_ms)
    found = (await request.wait_while_connected(looking) if wait_ms else await looking) or {}
    refused = {one: answer for one, answer in found.items() if isinstance(answer, dict)}
    return json_response(
        AwaitOutcomesResponse(
            _first_bytes([one for one in found.values() if isinstance(one, ExecutionOutcomeResponse)]), refused
        )
    )


def _first_bytes(ended: list[ExecutionOutcomeResponse]) -> list[ExecutionOutcomeResponse]:
    """As many ends as fit into one answer, at least one; whoever asks for the others again is told them at once."""
    size = 0
    for place, one in enumerate(ended):
        size += len(one.result_b64 or b"")
        if place and size > MAX_RESULT_BYTES:
            return ended[:place]
    return ended


async def _first_ends(
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
