"""What applications that know only this server need beside the rest: its store, ends, budgets."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from flowfabric import __version__, errors, ids
from flowfabric.api.encoding import MAX_WAIT_MS, NAMESPACE, Body, Natural, checked, variants
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.api_token import Scope
from flowfabric.server.errors import told
from flowfabric.server.request import Ask, json, tagged, uuid_in
from flowfabric.server.routes.lease_usage import USAGE
from flowfabric.server.routes.queries import MAX_RESULT_BYTES, Ended, told_end
from flowfabric.server.routing import BULK_LIMIT, Reply, Routes, Subject

routes = Routes("applications")

ONE = "/v1/executions/{id}"
MAX_ENDS = 1000
TOGETHER_S = 0.01


class StoreInfo(msgspec.Struct, frozen=True):
    """The store behind the server: its kind, its schema, its partitions, its time; and the server's own release."""

    backend: str
    partitions: ids.PartitionCounts
    now: int  # milliseconds since the epoch
    schema_version: int = 0
    release: str = ""


@routes.get("/v1/store", {200: StoreInfo}, scope=None, refusals=(401,))
async def store_info(ask: Ask[None]) -> Reply:
    """What a client has to know to mint ids that the store would mint; for whoever has any good token."""
    engine = ask.engine
    now = await engine.ping()
    return json(StoreInfo(engine.store.tag.title, engine.partitions, now, engine.schema.known, __version__))


# ---------------------------------------------------------------------------------------------------------------
# Budgets, for an execution whoever holds it


class OfExecution(Body, frozen=True, kw_only=True):
    """A request of an execution to one of its budgets."""

    namespace: str | None = None  # of the execution, which a caller that may see all namespaces saves a look
    shared: bool = True  # whether the shared budget of that id stands in, for a token that may use it


def _whose(ask: Ask[Any]) -> dict[str, Any]:
    """Where the engine looks for the budget: a bound token means those of the execution's namespace only."""
    body = ask.body
    return {"namespace": body.namespace if ask.shares else ask.touched, "shared": ask.shares and body.shared}


class SpendBody(OfExecution, frozen=True):
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
            body.budget_id, ask.execution_id, body.dimensions, idempotency_key=body.idempotency_key, **_whose(ask)
        )
    )


class ReservationBody(OfExecution, frozen=True):
    budget_id: str
    reservation_id: str
    amounts: dict[str, Natural]
    ttl_ms: Natural

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.budget_id, self.reservation_id)


@routes.post(
    f"{ONE}/reserve",
    {200: variants(limit_answers.Reserved, limit_answers.HardBreach, limit_answers.AlreadyApplied)},
    body=ReservationBody,
    scope=Scope.WORK,
    subject=Subject.EXECUTION,
)
async def reserve_for(ask: Ask[ReservationBody]) -> Reply:
    """Keep room free for an execution, under the caller's id."""
    body = ask.body
    return tagged(
        await ask.engine.reserve_budget(
            body.budget_id,
            ask.execution_id,
            body.amounts,
            ttl_ms=body.ttl_ms,
            reservation_id=body.reservation_id,
            **_whose(ask),
        )
    )


class SettleBody(OfExecution, frozen=True):
    budget_id: str
    reservation_id: str
    amounts: dict[str, Natural]

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.budget_id, self.reservation_id)


@routes.post(f"{ONE}/settle", {200: USAGE}, body=SettleBody, scope=Scope.WORK, subject=Subject.EXECUTION)
async def settle_for(ask: Ask[SettleBody]) -> Reply:
    """End a reservation with what was really used; the rest of it is given back."""
    body = ask.body
    return tagged(
        await ask.engine.settle_budget(
            body.budget_id, ask.execution_id, body.reservation_id, body.amounts, **_whose(ask)
        )
    )


class RefundBody(Body, frozen=True):
    reservation_id: str
    namespace: str | None = None
    shared: bool = True
    execution_id: str | None = None  # a reservation of another execution is refused

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.reservation_id)
        checked(ids.parse_execution_id, self.execution_id)


def _budget(ask: Ask[Any]) -> str:
    return uuid_in("budget_id", ask.params[0])


@routes.post(
    "/v1/budgets/{id}/refund",
    {200: variants(limit_answers.Refunded)},
    body=RefundBody,
    scope=Scope.WORK,
    subject=Subject.OWN,
)
async def refund_reservation(ask: Ask[RefundBody]) -> Reply:
    """Give all of a reservation back; one that is over has nothing to give."""
    budget_id, reservation_id, namespace = _budget(ask), ask.body.reservation_id, ask.owner(ask.body.namespace)
    if not ask.shares:
        holder = await ask.engine.reserved_for(budget_id, reservation_id, namespace=namespace)
        if holder is not None:
            await ask.may_touch(holder)
    shared, execution_id = ask.shares and ask.body.shared, ask.body.execution_id
    return tagged(
        await ask.engine.refund_budget(
            budget_id, reservation_id, execution_id=execution_id, namespace=namespace, shared=shared
        )
    )


class Woken(msgspec.Struct, frozen=True):
    still_waiting: bool


@routes.post("/v1/budgets/{id}/wake", {200: Woken}, scope=Scope.WORK, subject=Subject.OWN, query=(NAMESPACE,))
async def wake_budget(ask: Ask[bytes]) -> Reply:
    """Let whoever waits for room in a budget look again."""
    return json(Woken(await ask.engine.wake_budget(_budget(ask), namespace=ask.owner(ask.query("namespace")))))


# ---------------------------------------------------------------------------------------------------------------
# The ends of many


class EndsBody(Body, frozen=True):
    execution_ids: Annotated[tuple[str, ...], Meta(min_length=1, max_length=MAX_ENDS)]
    wait_ms: Natural = 0  # at most 30 s are waited

    def __post_init__(self) -> None:
        checked(ids.parse_execution_id, *self.execution_ids)


class Ends(msgspec.Struct, frozen=True):
    """How those ended that have, and why others cannot be told of: by execution, an error's body with its `code`."""

    ended: list[Ended]
    refused: dict[str, dict[str, Any]]


@routes.post(
    "/v1/executions/ends",
    {200: Ends},
    body=EndsBody,
    limit=BULK_LIMIT,
    scope=Scope.READ,
    subject=Subject.OWN,
    long=True,
)
async def await_ends(ask: Ask[EndsBody]) -> Reply:
    """The ends of many executions with their results, as soon as one of them has ended, or the time is over."""
    wait_ms = min(ask.body.wait_ms, MAX_WAIT_MS)
    looking = _first_ends(ask, wait_ms)
    found = (await ask.while_heard(looking) if wait_ms else await looking) or {}
    refused = {one: answer for one, answer in found.items() if isinstance(answer, dict)}
    return json(Ends(_first_bytes([one for one in found.values() if isinstance(one, Ended)]), refused))


def _first_bytes(ended: list[Ended]) -> list[Ended]:
    """As many ends as fit into one answer, at least one; whoever asks for the others again is told them at once."""
    size = 0
    for place, one in enumerate(ended):
        size += len(one.result_b64 or b"")
        if place and size > MAX_RESULT_BYTES:
            return ended[:place]
    return ended


async def _first_ends(ask: Ask[EndsBody], wait_ms: int) -> dict[str, Ended | dict[str, Any] | None]:
    looks = {one: asyncio.create_task(_end_of(ask, one, wait_ms)) for one in dict.fromkeys(ask.body.execution_ids)}
    try:
        await asyncio.wait(looks.values(), return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(looks.values(), timeout=TOGETHER_S)  # those that end at about the same time: told together
    finally:
        for look in looks.values():
            look.cancel()
        await asyncio.wait(looks.values())
    return {one: look.result() for one, look in looks.items() if not look.cancelled()}


async def _end_of(ask: Ask[EndsBody], execution_id: str, wait_ms: int) -> Ended | dict[str, Any] | None:
    try:
        await ask.may_touch(execution_id)
        ended = await ask.engine.await_end(execution_id, max_wait_ms=wait_ms)
    except errors.FabricError as refused:
        return told(refused)
    return None if ended is None else told_end(ended, with_result=True)
