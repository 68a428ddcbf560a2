"""Routes for budgets as the holder of a lease: usage, ledger, reservations. All require the current lease.

The budget belongs to the namespace of the execution. If that has none of the id, a token that is not bound to
namespaces uses the shared budget of `default`.
"""

from __future__ import annotations

from flowfabric.api.budgets import HolderRefundRequest, HolderReserveRequest, HolderSettleRequest, HolderUsageRequest
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE
from flowfabric.server.request import Request
from flowfabric.server.routes.leases import lease_route, routes
from flowfabric.server.routing import one_of

USAGE_RESPONSE = one_of(
    limit_answers.Ok, limit_answers.AlreadyApplied, limit_answers.SoftBreach, limit_answers.HardBreach
)


@lease_route("usage", USAGE_RESPONSE, HolderUsageRequest)
async def report_usage_as_holder(request: Request[HolderUsageRequest]) -> limit_answers.UsageResult:
    """Report usage of this execution."""
    body = request.body
    await request.engine.require_lease(request.handle)
    return await request.engine.report_usage(
        request.handle,
        body.budget_id,
        body.dimensions,
        dedup_key=body.dedup_key,
        namespace=request.execution_namespace,
        shared=request.may_use_shared_budgets,
    )


@lease_route("spend", USAGE_RESPONSE, HolderUsageRequest)
async def record_spend(request: Request[HolderUsageRequest]) -> limit_answers.UsageResult:
    """Report usage for the ledger of this execution, so that it can be returned."""
    body, handle = request.body, request.handle
    await request.engine.require_lease(handle)
    return await request.engine.record_spend(
        body.budget_id,
        handle.fields.execution_id,
        body.dimensions,
        idempotency_key=body.dedup_key,
        handle=handle,
        namespace=request.execution_namespace,
        shared=request.may_use_shared_budgets,
    )


@lease_route(
    "reserve",
    one_of(limit_answers.Reserved, limit_answers.HardBreach, limit_answers.AlreadyApplied),
    HolderReserveRequest,
)
async def reserve_budget(
    request: Request[HolderReserveRequest],
) -> limit_answers.Reserved | limit_answers.HardBreach | limit_answers.AlreadyApplied:
    """Reserve capacity of a budget for this execution."""
    body, handle = request.body, request.handle
    await request.engine.require_lease(handle)
    return await request.engine.reserve_budget(
        body.budget_id,
        handle.fields.execution_id,
        body.amounts,
        ttl_ms=body.ttl_ms,
        reservation_id=body.reservation_id,
        handle=handle,
        namespace=request.execution_namespace,
        shared=request.may_use_shared_budgets,
    )


@lease_route("settle", USAGE_RESPONSE, HolderSettleRequest)
async def settle_budget(request: Request[HolderSettleRequest]) -> limit_answers.UsageResult:
    """End a reservation with the amounts that were spent."""
    body = request.body
    await request.engine.require_lease(request.handle)
    execution_id = request.handle.fields.execution_id
    return await request.engine.settle_budget(
        body.budget_id,
        execution_id,
        body.reservation_id,
        body.amounts,
        namespace=request.execution_namespace,
        shared=request.may_use_shared_budgets,
    )


@lease_route("refund", one_of(limit_answers.Refunded), HolderRefundRequest)
async def refund_budget(request: Request[HolderRefundRequest]) -> limit_answers.Refunded:
    """Release a reservation of this execution unused."""
    await request.engine.require_lease(request.handle)
    body, execution_id = request.body, request.handle.fields.execution_id
    namespace = request.execution_namespace or await request.engine.get_execution_namespace(execution_id)
    return await request.engine.refund_budget(
        body.budget_id,
        body.reservation_id,
        execution_id=execution_id,
        namespace=namespace or DEFAULT_NAMESPACE,
        shared=request.may_use_shared_budgets,
    )


__all__ = ["routes"]
