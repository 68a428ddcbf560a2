"""Routes for budgets and quota policies."""

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


def _path_budget_id(request: Request[Any]) -> str:
    return path_uuid("budget_id", request.path_params[0])


def _query_namespace(request: Request[Any]) -> str:
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
    """Define a budget; a second definition changes nothing unless its declaration differs."""
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
    """List the ids of the budgets of a namespace, ascending."""
    return json_response(
        BudgetIds(
            await request.engine.list_budgets(
                cursor=request.query_param("cursor") or None,
                limit=request.int_param("limit", 50),
                namespace=_query_namespace(request),
            )
        )
    )


@routes.get(
    BUDGET_PATH, {200: limit_answers.BudgetStatus}, subject=Subject.CHECKED_BY_HANDLER, query=(NAMESPACE_PARAM,)
)
async def get_budget_status(request: Request[None]) -> Response:
    """Return the limits of a budget, its usage and its refusals."""
    return json_response(
        await request.engine.get_budget_status(_path_budget_id(request), namespace=_query_namespace(request))
    )


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
    """Report usage; a hard breach applies nothing."""
    body = request.body
    names = sorted(body.dimensions)  # a JSON object has no order of its own
    answer = await request.engine.report_usage_admin(
        _path_budget_id(request),
        dimensions=names,
        deltas=[body.dimensions[name] for name in names],
        dedup_key=body.dedup_key,
        namespace=request.resolve_namespace(body.namespace),
    )
    if isinstance(answer, limit_answers.HardBreach):
        breach = HardBreachResponse(answer.dimension, answer.current_usage, answer.hard_limit, answer.reserved)
        return variant_response(breach, name="HardBreach")
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
    """Start a new period of a budget; executions that wait for it continue."""
    return variant_response(
        await request.engine.reset_budget(_path_budget_id(request), namespace=_query_namespace(request)), name="Reset"
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
    """Change the limits of a budget; executions that wait continue if there is capacity."""
    body = request.body
    answer = await request.engine.change_budget_limits(
        _path_budget_id(request),
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
    """Return all that an execution spent since the last reset."""
    body = request.body
    namespace = request.resolve_namespace(body.namespace)
    answer = await request.engine.release_budget(
        _path_budget_id(request), body.execution_id, namespace=namespace, shared=False
    )
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
    """Return the limits of a quota policy."""
    policy = path_uuid("quota_policy_id", request.path_params[0])
    limits = await request.engine.read_quota_policy_limits(policy, namespace=_query_namespace(request))
    return json_response(require_found(limits, "not found: quota_policy"))
