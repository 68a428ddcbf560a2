"""Budgets and quotas. Each belongs to a namespace: the one that is named, else the token's only one, else `default`."""

from __future__ import annotations

from typing import Any

from flowfabric.api.budgets import (
    BudgetIds,
    BudgetRef,
    ChangeBudgetLimitsRequest,
    CreateBudgetRequest,
    CreateQuotaPolicyRequest,
    HardBreachResponse,
    QuotaRef,
    ReleaseBudgetRequest,
    ReportUsageRequest,
)
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.api_token import ApiScope
from flowfabric.server.request import Request, json_response, path_uuid, require_found, variant_response
from flowfabric.server.routing import CURSOR_PARAM, LIMIT_PARAM, NAMESPACE_PARAM, Response, RouteGroup, Subject, one_of

routes = RouteGroup("budgets")

BUDGET_PATH = "/v1/budgets/{id}"


def _budget(request: Request[Any]) -> str:
    return path_uuid("budget_id", request.path_params[0])


def _owner(request: Request[Any]) -> str:
    return request.resolve_namespace(request.query_param("namespace"))


@routes.post(
    "/v1/budgets",
    {201: one_of(Created=BudgetRef), 200: one_of(AlreadySatisfied=BudgetRef, Changed=BudgetRef)},
    body=CreateBudgetRequest,
    scope=ApiScope.OPERATE,
    subject=Subject.CHECKED_BY_HANDLER,
    audit=True,
)
async def create_budget(request: Request[CreateBudgetRequest]) -> Response:
    """Define a budget; a second definition changes nothing, unless it is another declaration than before."""
    answer = await request.engine.create_budget(
        **request.body.to_kwargs("namespace"), namespace=request.resolve_namespace(request.body.namespace)
    )
    if isinstance(answer, limit_answers.BudgetCreated):
        return variant_response(answer, 201, "Created")
    return variant_response(
        answer, 200, "Changed" if isinstance(answer, limit_answers.LimitsChanged) else "AlreadySatisfied"
    )


@routes.get(
    "/v1/budgets",
    {200: BudgetIds},
    subject=Subject.CHECKED_BY_HANDLER,
    query=(CURSOR_PARAM, LIMIT_PARAM, NAMESPACE_PARAM),
)
async def list_budgets(request: Request[None]) -> Response:
    """The ids of the defined budgets of a namespace, ascending."""
    return json_response(
        BudgetIds(
            await request.engine.list_budgets(
                cursor=request.query_param("cursor") or None,
                limit=request.int_param("limit", 50),
                namespace=_owner(request),
            )
        )
    )


@routes.get(
    BUDGET_PATH, {200: limit_answers.BudgetStatus}, subject=Subject.CHECKED_BY_HANDLER, query=(NAMESPACE_PARAM,)
)
async def get_budget_status(request: Request[None]) -> Response:
    """A budget: its limits, what was used, what was refused."""
    return json_response(await request.engine.get_budget_status(_budget(request), namespace=_owner(request)))


@routes.post(
    f"{BUDGET_PATH}/usage",
    {
        200: one_of(
            limit_answers.Ok, limit_answers.AlreadyApplied, limit_answers.SoftBreach, HardBreach=HardBreachResponse
        )
    },
    body=ReportUsageRequest,
    scope=ApiScope.WORK,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def report_usage(request: Request[ReportUsageRequest]) -> Response:
    """Report what was used; a hard breach applies nothing at all."""
    body = request.body
    names = sorted(body.dimensions)  # a JSON object has no order of its own
    answer = await request.engine.report_usage_admin(
        _budget(request),
        dimensions=names,
        deltas=[body.dimensions[name] for name in names],
        dedup_key=body.dedup_key,
        namespace=request.resolve_namespace(body.namespace),
    )
    if isinstance(answer, limit_answers.HardBreach):
        told = HardBreachResponse(answer.dimension, answer.current_usage, answer.hard_limit, answer.reserved)
        return variant_response(told, name="HardBreach")
    return variant_response(answer)


@routes.post(
    f"{BUDGET_PATH}/reset",
    {200: one_of(Reset=limit_answers.BudgetReset)},
    scope=ApiScope.OPERATE,
    subject=Subject.CHECKED_BY_HANDLER,
    query=(NAMESPACE_PARAM,),
    audit=True,
)
async def reset_budget(request: Request[bytes]) -> Response:
    """Begin a new period; what waits for the budget goes on."""
    return variant_response(
        await request.engine.reset_budget(_budget(request), namespace=_owner(request)), name="Reset"
    )


@routes.put(
    f"{BUDGET_PATH}/limits",
    {200: one_of(Changed=BudgetRef)},
    body=ChangeBudgetLimitsRequest,
    scope=ApiScope.OPERATE,
    subject=Subject.CHECKED_BY_HANDLER,
    audit=True,
)
async def change_budget_limits(request: Request[ChangeBudgetLimitsRequest]) -> Response:
    """Raise or lower limits; what waits for room goes on when there is some."""
    body = request.body
    answer = await request.engine.change_budget_limits(
        _budget(request),
        dimensions=body.dimensions,
        hard_limits=body.hard_limits,
        soft_limits=body.soft_limits,
        namespace=request.resolve_namespace(body.namespace),
    )
    return variant_response(answer, name="Changed")


@routes.post(
    f"{BUDGET_PATH}/release",
    {200: one_of(Released=limit_answers.BudgetReleased)},
    body=ReleaseBudgetRequest,
    scope=ApiScope.OPERATE,
    subject=Subject.CHECKED_BY_HANDLER,
    audit=True,
)
async def release_budget(request: Request[ReleaseBudgetRequest]) -> Response:
    """Give back everything that an execution spent since the last reset."""
    body = request.body
    namespace = request.resolve_namespace(body.namespace)
    answer = await request.engine.release_budget(_budget(request), body.execution_id, namespace=namespace, shared=False)
    return variant_response(answer, name="Released")


@routes.post(
    "/v1/quotas",
    {201: one_of(Created=QuotaRef), 200: one_of(AlreadySatisfied=QuotaRef)},
    body=CreateQuotaPolicyRequest,
    scope=ApiScope.OPERATE,
    subject=Subject.CHECKED_BY_HANDLER,
    audit=True,
)
async def create_quota_policy(request: Request[CreateQuotaPolicyRequest]) -> Response:
    """Define a quota policy; 0 is no limit, and a second definition changes nothing."""
    answer = await request.engine.create_quota_policy(
        **request.body.to_kwargs("namespace"), namespace=request.resolve_namespace(request.body.namespace)
    )
    if isinstance(answer, limit_answers.QuotaPolicyCreated):
        return variant_response(answer, 201, "Created")
    return variant_response(answer, 200, "AlreadySatisfied")


@routes.get(
    "/v1/quotas/{id}", {200: limit_answers.QuotaLimits}, subject=Subject.CHECKED_BY_HANDLER, query=(NAMESPACE_PARAM,)
)
async def read_quota_policy_limits(request: Request[None]) -> Response:
    """The numbers of a quota policy."""
    policy = path_uuid("quota_policy_id", request.path_params[0])
    limits = await request.engine.read_quota_policy_limits(policy, namespace=_owner(request))
    return json_response(require_found(limits, "not found: quota_policy"))
