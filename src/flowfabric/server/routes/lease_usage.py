"""What the holder of a lease spends: usage, its ledger, reservations. All of it needs the current lease.

The budget is the one of the execution's namespace. Where that has none of the id, a token that is not bound to
namespaces means the shared one of `default`.
"""

from __future__ import annotations

from flowfabric.api.budgets import HolderRefundRequest, HolderReserveRequest, HolderSettleRequest, HolderUsageRequest
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.owned_id import DEFAULT_NAMESPACE
from flowfabric.server.request import Request, variant_response
from flowfabric.server.routes.leases import lease_route, routes
from flowfabric.server.routing import Response, one_of

USAGE_RESPONSE = one_of(
    limit_answers.Ok, limit_answers.AlreadyApplied, limit_answers.SoftBreach, limit_answers.HardBreach
)


@lease_route("usage", USAGE_RESPONSE, HolderUsageRequest)
async def report_usage_as_holder(ask: Request[HolderUsageRequest]) -> Response:
    """Report what this execution used."""
    body = ask.body
    await ask.engine.require_lease(ask.handle)
    return variant_response(
        await ask.engine.report_usage(
            ask.handle,
            body.budget_id,
            body.dimensions,
            dedup_key=body.dedup_key,
            namespace=ask.execution_namespace,
            shared=ask.may_use_shared_budgets,
        )
    )


@lease_route("spend", USAGE_RESPONSE, HolderUsageRequest)
async def record_spend(ask: Request[HolderUsageRequest]) -> Response:
    """Report for this execution's ledger, so that it can be given back."""
    body, handle = ask.body, ask.handle
    await ask.engine.require_lease(handle)
    return variant_response(
        await ask.engine.record_spend(
            body.budget_id,
            handle.fields.execution_id,
            body.dimensions,
            idempotency_key=body.dedup_key,
            handle=handle,
            namespace=ask.execution_namespace,
            shared=ask.may_use_shared_budgets,
        )
    )


@lease_route(
    "reserve",
    one_of(limit_answers.Reserved, limit_answers.HardBreach, limit_answers.AlreadyApplied),
    HolderReserveRequest,
)
async def reserve_budget(ask: Request[HolderReserveRequest]) -> Response:
    """Keep room free in a budget for this execution."""
    body, handle = ask.body, ask.handle
    await ask.engine.require_lease(handle)
    return variant_response(
        await ask.engine.reserve_budget(
            body.budget_id,
            handle.fields.execution_id,
            body.amounts,
            ttl_ms=body.ttl_ms,
            reservation_id=body.reservation_id,
            handle=handle,
            namespace=ask.execution_namespace,
            shared=ask.may_use_shared_budgets,
        )
    )


@lease_route("settle", USAGE_RESPONSE, HolderSettleRequest)
async def settle_budget(ask: Request[HolderSettleRequest]) -> Response:
    """Turn a reservation into what was really spent."""
    body = ask.body
    await ask.engine.require_lease(ask.handle)
    execution_id = ask.handle.fields.execution_id
    return variant_response(
        await ask.engine.settle_budget(
            body.budget_id,
            execution_id,
            body.reservation_id,
            body.amounts,
            namespace=ask.execution_namespace,
            shared=ask.may_use_shared_budgets,
        )
    )


@lease_route("refund", one_of(limit_answers.Refunded), HolderRefundRequest)
async def refund_budget(ask: Request[HolderRefundRequest]) -> Response:
    """Give the room of one of this execution's reservations back unused."""
    await ask.engine.require_lease(ask.handle)
    body, execution_id = ask.body, ask.handle.fields.execution_id
    namespace = ask.execution_namespace or await ask.engine.get_execution_namespace(execution_id)
    return variant_response(
        await ask.engine.refund_budget(
            body.budget_id,
            body.reservation_id,
            execution_id=execution_id,
            namespace=namespace or DEFAULT_NAMESPACE,
            shared=ask.may_use_shared_budgets,
        )
    )


__all__ = ["routes"]
