"""Routes for bulk operations: preview, start, follow, cancel."""

from __future__ import annotations

from typing import Any

from flowfabric import errors
from flowfabric.api.operations import BulkCriteria, PreviewOperationRequest, StartOperationRequest
from flowfabric.engine.operations.bulk import BulkPage, BulkPreview
from flowfabric.engine.types import BulkStatus
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server.request import Request, path_uuid
from flowfabric.server.routing import CURSOR_PARAM, POSITIVE_LIMIT_PARAM, RouteGroup, Subject

routes = RouteGroup("operations", subject=Subject.CHECKED_BY_HANDLER)
operator_routes = routes.with_defaults(scope=ApiScope.OPERATE, audit=True)

OPERATION_PATH = "/v1/operations/{id}"


def _criteria(request: Request[Any], criteria: BulkCriteria) -> dict[str, Any]:
    """Return the filters, within the namespaces of the token."""
    given = criteria.given()
    if criteria.namespace is not None:
        request.require_namespace(criteria.namespace)
    if (namespaces := request.bound_namespaces()) is not None:
        given["namespaces"] = namespaces
    return given


async def _visible(request: Request[Any]) -> BulkStatus:
    status = await request.engine.read_operation(path_uuid("operation_id", request.path_params[0]))
    if not request.principal.can_see_all(status.criteria.namespaces):
        raise errors.NotFound("operation")
    return status


@routes.post("/v1/operations/preview", {200: BulkPreview}, body=PreviewOperationRequest, scope=ApiScope.READ)
async def preview_operation(request: Request[PreviewOperationRequest]) -> BulkPreview:
    """Count what a bulk operation would act on, and show some of it; nothing is changed."""
    body = request.body
    return await request.engine.preview_operation(body.verb, _criteria(request, body.criteria))


@operator_routes.post("/v1/operations", {200: BulkStatus}, body=StartOperationRequest)
async def start_operation(request: Request[StartOperationRequest]) -> BulkStatus:
    """Start a bulk operation; the sweeps of servers and workers execute it."""
    body = request.body
    return await request.engine.start_operation(
        criteria=_criteria(request, body.criteria),
        requested_by=_requester(request),
        **body.to_kwargs("criteria", "requested_by"),
    )


def _requester(request: Request[StartOperationRequest]) -> str:
    """Return who starts an operation: the token, with the person that the request names."""
    claimed, name = request.body.requested_by, request.principal.name
    if request.app.settings.is_open:
        return claimed or name
    return f"{claimed} with {name}" if claimed and claimed != name else name


@routes.get("/v1/operations", {200: BulkPage}, query=(CURSOR_PARAM, POSITIVE_LIMIT_PARAM))
async def list_operations(request: Request[None]) -> BulkPage:
    """List bulk operations, newest first; a bound token sees those that touch its namespaces only."""
    page = await request.engine.list_operations(cursor=request.cursor, limit=request.int_param("limit", 50))
    visible = [status for status in page.operations if request.principal.can_see_all(status.criteria.namespaces)]
    return BulkPage(visible, page.next_cursor)


@routes.get(OPERATION_PATH, {200: BulkStatus})
async def read_operation(request: Request[None]) -> BulkStatus:
    """Return a bulk operation and its progress."""
    return await _visible(request)


@operator_routes.post(f"{OPERATION_PATH}/cancel", {200: BulkStatus})
async def cancel_operation(request: Request[bytes]) -> BulkStatus:
    """Cancel a bulk operation: what was done stays done, and no further page is begun."""
    return await request.engine.cancel_operation((await _visible(request)).operation_id)
