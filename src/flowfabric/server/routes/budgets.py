"""Routes for budgets and quota policies."""

from __future__ import annotations

from flowfabric.api import budgets as api
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server.request import Request, path_uuid, require_found, variant_response
from flowfabric.server.routing import NAMESPACE_PARAM, PAGE_PARAMS, Response, RouteGroup, Subject, one_of

routes = RouteGroup("budgets", subject=Subject.CHECKED_BY_HANDLER)
operator_routes = routes.with_defaults(scope=ApiScope.OPERATE, audit=True)

BUDGET_PATH = "/v1/budgets/{id}"


@operator_routes.post(
    "/v1/budgets",
    {201: one_of(Created=api.BudgetRef), 200: one_of(AlreadySatisfied=api.BudgetRef, Changed=api.BudgetRef)},
    body=api.CreateBudgetRequest,
)
async def create_budget(request: Request[api.CreateBudgetRequest]) -> Response:
    """Define a budget; a second definition changes nothing unless its declaration differs."""
    answer = await request.engine.create_budget(
        **request.body.to_kwargs("namespace"), namespace=request.resolve_namespace(request.body.namespace)
    )
    if isinstance(answer, limit_answers.BudgetCreated):
        return variant_response(answer, 201, "Created")
    return variant_response(
        answer, 200, "Changed" if isinstance(answer, limit_answers.LimitsChanged) else "AlreadySatisfied"
    )


@routes.get("/v1/budgets", {200: api.BudgetIds}, query=(*PAGE_PARAMS, NAMESPACE_PARAM))
async def list_budgets(request: Request[None]) -> api.BudgetIds:
    """List the ids of the budgets of a namespace, ascending."""
    return api.BudgetIds(
        await request.engine.list_budgets(
            cursor=request.cursor, limit=request.int_param("limit", 50), namespace=request.namespace
        )
    )


@routes.get(BUDGET_PATH, {200: limit_answers.BudgetStatus}, query=(NAMESPACE_PARAM,))
async def get_budget_status(request: Request[None]) -> limit_answers.BudgetStatus:
    """Return the limits of a budget, its usage and its refusals."""
    return await request.engine.get_budget_status(request.budget_id, namespace=request.namespace)


@routes.post(
    f"{BUDGET_PATH}/usage",
    {
        200: one_of(
            limit_answers.Ok, limit_answers.AlreadyApplied, limit_answers.SoftBreach, HardBreach=api.HardBreachResponse
        )
    },
    body=api.ReportUsageRequest,
    scope=ApiScope.WORK,
)
async def report_usage(
    request: Request[api.ReportUsageRequest],
) -> limit_answers.Ok | limit_answers.AlreadyApplied | limit_answers.SoftBreach | Response:
    """Report usage; a hard breach applies nothing."""
    body = request.body
    names = sorted(body.dimensions)  # a JSON object has no order of its own
    answer = await request.engine.report_usage_admin(
        request.budget_id,
        dimensions=names,
        deltas=[body.dimensions[name] for name in names],
        dedup_key=body.dedup_key,
        namespace=request.resolve_namespace(body.namespace),
    )
    if isinstance(answer, limit_answers.HardBreach):
        breach = api.HardBreachResponse(answer.dimension, answer.current_usage, answer.hard_limit, answer.reserved)
        return variant_response(breach, name="HardBreach")
    return answer


@operator_routes.post(f"{BUDGET_PATH}/reset", {200: one_of(Reset=limit_answers.BudgetReset)}, query=(NAMESPACE_PARAM,))
async def reset_budget(request: Request[bytes]) -> Response:
    """Start a new period of a budget; executions that wait for it continue."""
    return variant_response(
        await request.engine.reset_budget(request.budget_id, namespace=request.namespace), name="Reset"
    )


@operator_routes.put(f"{BUDGET_PATH}/limits", {200: one_of(Changed=api.BudgetRef)}, body=api.ChangeBudgetLimitsRequest)
async def change_budget_limits(request: Request[api.ChangeBudgetLimitsRequest]) -> Response:
    """Change the limits of a budget; executions that wait continue if there is capacity."""
    body = request.body
    answer = await request.engine.change_budget_limits(
        request.budget_id, namespace=request.resolve_namespace(body.namespace), **body.to_kwargs("namespace")
    )
    return variant_response(answer, name="Changed")


@operator_routes.post(
    f"{BUDGET_PATH}/release", {200: one_of(Released=limit_answers.BudgetReleased)}, body=api.ReleaseBudgetRequest
)
async def release_budget(request: Request[api.ReleaseBudgetRequest]) -> Response:
    """Return all that an execution spent since the last reset."""
    body = request.body
    namespace = request.resolve_namespace(body.namespace)
    answer = await request.engine.release_budget(
        request.budget_id, body.execution_id, namespace=namespace, shared=False
    )
    return variant_response(answer, name="Released")


@operator_routes.post(
    "/v1/quotas",
    {201: one_of(Created=api.QuotaRef), 200: one_of(AlreadySatisfied=api.QuotaRef)},
    body=api.CreateQuotaPolicyRequest,
)
async def create_quota_policy(request: Request[api.CreateQuotaPolicyRequest]) -> Response:
    """Define a quota policy; 0 is no limit, and a second definition changes nothing."""
    answer = await request.engine.create_quota_policy(
        **request.body.to_kwargs("namespace"), namespace=request.resolve_namespace(request.body.namespace)
    )
    if isinstance(answer, limit_answers.QuotaPolicyCreated):
        return variant_response(answer, 201, "Created")
    return variant_response(answer, 200, "AlreadySatisfied")


@routes.get("/v1/quotas/{id}", {200: limit_answers.QuotaLimits}, query=(NAMESPACE_PARAM,))
async def read_quota_policy_limits(request: Request[None]) -> limit_answers.QuotaLimits:
    """Return the limits of a quota policy."""
    policy = path_uuid("quota_policy_id", request.path_params[0])
    limits = await request.engine.read_quota_policy_limits(policy, namespace=request.namespace)
    return require_found(limits, "not found: quota_policy")
