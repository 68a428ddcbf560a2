"""What applications that know only this server need beside the rest: its store, and the budgets of their runs."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import ids
from flowfabric.model import verdicts
from flowfabric.model.api_token import Scope
from flowfabric.server.ask import Ask, json, tagged, uuid_in
from flowfabric.server.routes.spending import USAGE
from flowfabric.server.table import Reply, Routes, Subject
from flowfabric.server.wire import Body, Natural, checked, variants

routes = Routes("applications")

ONE = "/v1/executions/{id}"


class StoreInfo(msgspec.Struct, frozen=True):
    """The store behind the server: its kind, its partitions, and its time in milliseconds since the epoch."""

    backend: str
    partitions: ids.PartitionCounts
    now: int


@routes.get("/v1/store", {200: StoreInfo}, scope=None, refusals=(401,))
async def store_info(ask: Ask[None]) -> Reply:
    """What a client has to know to mint ids that the store would mint; for whoever has any good token."""
    await ask.app.guard.admit(ask.headers.get(b"authorization"))
    engine = ask.engine
    return json(StoreInfo(engine.store.tag.title, engine.partitions, await engine.ping()))


# ---------------------------------------------------------------------------------------------------------------
# Budgets, for an execution whoever holds it


class SpendBody(Body, frozen=True):
    budget_id: str
    dimensions: dict[str, Natural]
    idempotency_key: str | None = None

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.budget_id)


@routes.post(f"{ONE}/spend", {200: USAGE}, body=SpendBody, scope=Scope.WORK, subject=Subject.EXECUTION)
async def spend_for(ask: Ask[SpendBody]) -> Reply:
    """Report for an execution's ledger, once for each key; a hard breach applies nothing at all."""
    body = ask.body
    return tagged(
        await ask.engine.record_spend(
            body.budget_id, ask.execution_id, body.dimensions, idempotency_key=body.idempotency_key
        )
    )


class ReservationBody(Body, frozen=True):
    budget_id: str
    reservation_id: str
    amounts: dict[str, Natural]
    ttl_ms: Natural

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.budget_id, self.reservation_id)


@routes.post(
    f"{ONE}/reserve",
    {200: variants(verdicts.Reserved, verdicts.HardBreach, verdicts.AlreadyApplied)},
    body=ReservationBody,
    scope=Scope.WORK,
    subject=Subject.EXECUTION,
)
async def reserve_for(ask: Ask[ReservationBody]) -> Reply:
    """Keep room free for an execution, under the caller's id."""
    body = ask.body
    return tagged(
        await ask.engine.reserve_budget(
            body.budget_id, ask.execution_id, body.amounts, ttl_ms=body.ttl_ms, reservation_id=body.reservation_id
        )
    )


class SettleBody(Body, frozen=True):
    budget_id: str
    reservation_id: str
    amounts: dict[str, Natural]

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.budget_id, self.reservation_id)


@routes.post(f"{ONE}/settle", {200: USAGE}, body=SettleBody, scope=Scope.WORK, subject=Subject.EXECUTION)
async def settle_for(ask: Ask[SettleBody]) -> Reply:
    """End a reservation with what was really used; the rest of it is given back."""
    body = ask.body
    return tagged(await ask.engine.settle_budget(body.budget_id, ask.execution_id, body.reservation_id, body.amounts))


class RefundBody(Body, frozen=True):
    reservation_id: str

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.reservation_id)


def _budget(ask: Ask[Any]) -> str:
    return uuid_in("budget_id", ask.params[0])


@routes.post(
    "/v1/budgets/{id}/refund",
    {200: variants(verdicts.Refunded)},
    body=RefundBody,
    scope=Scope.WORK,
    subject=Subject.OWN,
)
async def refund_reservation(ask: Ask[RefundBody]) -> Reply:
    """Give all of a reservation back; one that is over has nothing to give."""
    return tagged(await ask.engine.refund_budget(_budget(ask), ask.body.reservation_id))


class Woken(msgspec.Struct, frozen=True):
    still_waiting: bool


@routes.post("/v1/budgets/{id}/wake", {200: Woken}, scope=Scope.WORK, subject=Subject.OWN)
async def wake_budget(ask: Ask[bytes]) -> Reply:
    """Let whoever waits for room in a budget look again."""
    return json(Woken(await ask.engine.wake_budget(_budget(ask))))
