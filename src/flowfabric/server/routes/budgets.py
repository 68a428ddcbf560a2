"""Budgets and quotas. Each belongs to a namespace: the one that is named, else the token's only one, else `default`."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric import ids
from flowfabric.api.encoding import CURSOR, LIMIT, NAMESPACE, Body, Natural, Whole, checked, variants
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.api_token import Scope
from flowfabric.server.request import Ask, found, json, tagged, uuid_in
from flowfabric.server.routing import Reply, Routes, Subject

routes = Routes("budgets")

ONE = "/v1/budgets/{id}"


def _budget(ask: Ask[Any]) -> str:
    return uuid_in("budget_id", ask.params[0])


def _owner(ask: Ask[Any]) -> str:
    return ask.owner(ask.query("namespace"))


class BudgetRef(msgspec.Struct, frozen=True):
    budget_id: str


class BudgetBody(Body, frozen=True):
    """A budget; the three lists are positional."""

    budget_id: str
    scope_type: str
    scope_id: str
    enforcement_mode: str
    on_hard_limit: str
    on_soft_limit: str
    reset_interval_ms: Natural
    dimensions: list[str]
    hard_limits: list[Natural]
    soft_limits: list[Natural]
    now: Whole | None = None
    namespace: str | None = None
    declaration: str | None = None  # a digest of the code that declares it; another one changes the limits

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.budget_id)


@routes.post(
    "/v1/budgets",
    {201: variants(Created=BudgetRef), 200: variants(AlreadySatisfied=BudgetRef, Changed=BudgetRef)},
    body=BudgetBody,
    scope=Scope.OPERATE,
    subject=Subject.OWN,
    audit=True,
)
async def create_budget(ask: Ask[BudgetBody]) -> Reply:
    """Define a budget; a second definition changes nothing, unless it is another declaration than before."""
    answer = await ask.engine.create_budget(**ask.body.told("namespace"), namespace=ask.owner(ask.body.namespace))
    if isinstance(answer, limit_answers.BudgetCreated):
        return tagged(answer, 201, "Created")
    return tagged(answer, 200, "Changed" if isinstance(answer, limit_answers.LimitsChanged) else "AlreadySatisfied")


class BudgetIds(msgspec.Struct, frozen=True):
    budgets: list[str]


@routes.get("/v1/budgets", {200: BudgetIds}, subject=Subject.OWN, query=(CURSOR, LIMIT, NAMESPACE))
async def list_budgets(ask: Ask[None]) -> Reply:
    """The ids of the defined budgets of a namespace, ascending."""
    return json(
        BudgetIds(
            await ask.engine.list_budgets(
                cursor=ask.query("cursor") or None, limit=ask.number("limit", 50), namespace=_owner(ask)
            )
        )
    )


@routes.get(ONE, {200: limit_answers.BudgetStatus}, subject=Subject.OWN, query=(NAMESPACE,))
async def get_budget_status(ask: Ask[None]) -> Reply:
    """A budget: its limits, what was used, what was refused."""
    return json(await ask.engine.get_budget_status(_budget(ask), namespace=_owner(ask)))


class UsageBody(Body, frozen=True):
    dimensions: dict[str, Natural]
    now: Whole | None = None
    dedup_key: str | None = None
    namespace: str | None = None


class Breach(msgspec.Struct, frozen=True, omit_defaults=True):
    """Nothing was applied. What is reserved is told where it counts, or the numbers would not add up."""

    dimension: str
    current_usage: int
    hard_limit: int
    reserved: int = 0


@routes.post(
    f"{ONE}/usage",
    {200: variants(limit_answers.Ok, limit_answers.AlreadyApplied, limit_answers.SoftBreach, HardBreach=Breach)},
    body=UsageBody,
    scope=Scope.WORK,
    subject=Subject.OWN,
)
async def report_usage(ask: Ask[UsageBody]) -> Reply:
    """Report what was used; a hard breach applies nothing at all."""
    body = ask.body
    names = sorted(body.dimensions)  # a JSON object has no order of its own
    answer = await ask.engine.report_usage_admin(
        _budget(ask),
        dimensions=names,
        deltas=[body.dimensions[name] for name in names],
        dedup_key=body.dedup_key,
        namespace=ask.owner(body.namespace),
    )
    if isinstance(answer, limit_answers.HardBreach):
        told = Breach(answer.dimension, answer.current_usage, answer.hard_limit, answer.reserved)
        return tagged(told, name="HardBreach")
    return tagged(answer)


@routes.post(
    f"{ONE}/reset",
    {200: variants(Reset=limit_answers.BudgetReset)},
    scope=Scope.OPERATE,
    subject=Subject.OWN,
    query=(NAMESPACE,),
    audit=True,
)
async def reset_budget(ask: Ask[bytes]) -> Reply:
    """Begin a new period; what waits for the budget goes on."""
    return tagged(await ask.engine.reset_budget(_budget(ask), namespace=_owner(ask)), name="Reset")


class LimitsBody(Body, frozen=True):
    dimensions: list[str]
    hard_limits: list[Natural]
    soft_limits: list[Natural]
    namespace: str | None = None


@routes.put(
    f"{ONE}/limits",
    {200: variants(Changed=BudgetRef)},
    body=LimitsBody,
    scope=Scope.OPERATE,
    subject=Subject.OWN,
    audit=True,
)
async def change_budget_limits(ask: Ask[LimitsBody]) -> Reply:
    """Raise or lower limits; what waits for room goes on when there is some."""
    body = ask.body
    answer = await ask.engine.change_budget_limits(
        _budget(ask),
        dimensions=body.dimensions,
        hard_limits=body.hard_limits,
        soft_limits=body.soft_limits,
        namespace=ask.owner(body.namespace),
    )
    return tagged(answer, name="Changed")


class ReleaseBody(Body, frozen=True):
    execution_id: str
    namespace: str | None = None

    def __post_init__(self) -> None:
        checked(ids.parse_execution_id, self.execution_id)


@routes.post(
    f"{ONE}/release",
    {200: variants(Released=limit_answers.BudgetReleased)},
    body=ReleaseBody,
    scope=Scope.OPERATE,
    subject=Subject.OWN,
    audit=True,
)
async def release_budget(ask: Ask[ReleaseBody]) -> Reply:
    """Give back everything that an execution spent since the last reset."""
    body = ask.body
    namespace = ask.owner(body.namespace)
    answer = await ask.engine.release_budget(_budget(ask), body.execution_id, namespace=namespace, shared=False)
    return tagged(answer, name="Released")


# ---------------------------------------------------------------------------------------------------------------
# Quotas


class QuotaRef(msgspec.Struct, frozen=True):
    quota_policy_id: str


class QuotaBody(Body, frozen=True):
    quota_policy_id: str
    window_seconds: Natural
    max_requests_per_window: Natural
    max_concurrent: Natural
    jitter_ms: Natural = 0
    now: Whole | None = None
    namespace: str | None = None

    def __post_init__(self) -> None:
        checked(ids.parse_uuid, self.quota_policy_id)


@routes.post(
    "/v1/quotas",
    {201: variants(Created=QuotaRef), 200: variants(AlreadySatisfied=QuotaRef)},
    body=QuotaBody,
    scope=Scope.OPERATE,
    subject=Subject.OWN,
    audit=True,
)
async def create_quota_policy(ask: Ask[QuotaBody]) -> Reply:
    """Define a quota policy; 0 is no limit, and a second definition changes nothing."""
    answer = await ask.engine.create_quota_policy(**ask.body.told("namespace"), namespace=ask.owner(ask.body.namespace))
    if isinstance(answer, limit_answers.QuotaPolicyCreated):
        return tagged(answer, 201, "Created")
    return tagged(answer, 200, "AlreadySatisfied")


@routes.get("/v1/quotas/{id}", {200: limit_answers.QuotaLimits}, subject=Subject.OWN, query=(NAMESPACE,))
async def read_quota_policy_limits(ask: Ask[None]) -> Reply:
    """The numbers of a quota policy."""
    policy = uuid_in("quota_policy_id", ask.params[0])
    limits = await ask.engine.read_quota_policy_limits(policy, namespace=_owner(ask))
    return json(found(limits, "not found: quota_policy"))
