"""What the holder of a lease spends: usage, its ledger, reservations. All of it needs the current lease.

The budget is the one of the execution's namespace. Where that has none of the id, a token that is not bound to
namespaces means the shared one of `default`.
"""

from __future__ import annotations

from flowfabric import ids
from flowfabric.api.encoding import Held, Natural, checked, variants
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.owned_id import DEFAULT_NAMESPACE
from flowfabric.server.request import Ask, tagged
from flowfabric.server.routes.leases import holding, routes
from flowfabric.server.routing import Reply

USAGE = variants(limit_answers.Ok, limit_answers.AlreadyApplied, limit_answers.SoftBreach, limit_answers.HardBreach)


class HolderUsageBody(Held, frozen=True):
    budget_id: str
    dimensions: dict[str, Natural]
    dedup_key: str | None = None

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.budget_id)


@holding("usage", USAGE, HolderUsageBody)
async def report_usage_as_holder(ask: Ask[HolderUsageBody]) -> Reply:
    """Report what this execution used."""
    body = ask.body
    await ask.engine.require_lease(ask.holder)
    return tagged(
        await ask.engine.report_usage(
            ask.holder,
            body.budget_id,
            body.dimensions,
            dedup_key=body.dedup_key,
            namespace=ask.touched,
            shared=ask.shares,
        )
    )


@holding("spend", USAGE, HolderUsageBody)
async def record_spend(ask: Ask[HolderUsageBody]) -> Reply:
    """Report for this execution's ledger, so that it can be given back."""
    body, handle = ask.body, ask.holder
    await ask.engine.require_lease(handle)
    return tagged(
        await ask.engine.record_spend(
            body.budget_id,
            handle.fields.execution_id,
            body.dimensions,
            idempotency_key=body.dedup_key,
            handle=handle,
            namespace=ask.touched,
            shared=ask.shares,
        )
    )


class ReserveBody(Held, frozen=True):
    budget_id: str
    amounts: dict[str, Natural]
    ttl_ms: Natural
    reservation_id: str | None = None

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.budget_id, self.reservation_id)


@holding(
    "reserve", variants(limit_answers.Reserved, limit_answers.HardBreach, limit_answers.AlreadyApplied), ReserveBody
)
async def reserve_budget(ask: Ask[ReserveBody]) -> Reply:
    """Keep room free in a budget for this execution."""
    body, handle = ask.body, ask.holder
    await ask.engine.require_lease(handle)
    return tagged(
        await ask.engine.reserve_budget(
            body.budget_id,
            handle.fields.execution_id,
            body.amounts,
            ttl_ms=body.ttl_ms,
            reservation_id=body.reservation_id,
            handle=handle,
            namespace=ask.touched,
            shared=ask.shares,
        )
    )


class SettleBody(Held, frozen=True):
    budget_id: str
    reservation_id: str
    amounts: dict[str, Natural]

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.budget_id, self.reservation_id)


@holding("settle", USAGE, SettleBody)
async def settle_budget(ask: Ask[SettleBody]) -> Reply:
    """Turn a reservation into what was really spent."""
    body = ask.body
    await ask.engine.require_lease(ask.holder)
    execution_id = ask.holder.fields.execution_id
    return tagged(
        await ask.engine.settle_budget(
            body.budget_id, execution_id, body.reservation_id, body.amounts, namespace=ask.touched, shared=ask.shares
        )
    )


class RefundBody(Held, frozen=True):
    budget_id: str
    reservation_id: str

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.budget_id, self.reservation_id)


@holding("refund", variants(limit_answers.Refunded), RefundBody)
async def refund_budget(ask: Ask[RefundBody]) -> Reply:
    """Give the room of one of this execution's reservations back unused."""
    await ask.engine.require_lease(ask.holder)
    body, execution_id = ask.body, ask.holder.fields.execution_id
    namespace = ask.touched or await ask.engine.get_execution_namespace(execution_id)
    return tagged(
        await ask.engine.refund_budget(
            body.budget_id,
            body.reservation_id,
            execution_id=execution_id,
            namespace=namespace or DEFAULT_NAMESPACE,
            shared=ask.shares,
        )
    )


__all__ = ["routes"]
