"""Routes for grants: the server issues a grant, the worker redeems it."""

from __future__ import annotations

from typing import Any

from flowfabric import errors, ids
from flowfabric.api.claims import ClaimGrantRequest, ClaimGrantResponse, ReclaimGrantRequest, ReclaimGrantResponse
from flowfabric.model.answers import execution as answers
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Request
from flowfabric.server.routing import Response, RouteGroup, Subject

routes = RouteGroup("claims", scope=ApiScope.WORK)

MAX_GRANT_TTL_MS = 60_000


def check_worker_names(worker_id: str, worker_instance_id: str, *lanes: str) -> None:
    """Raise 400 for malformed names of workers and lanes."""
    for field, text in (("worker_id", worker_id), ("worker_instance_id", worker_instance_id)):
        size = len(text.encode("utf-8", "surrogatepass"))
        if not text:
            raise bad_request(f"{field}: must not be empty")
        if size > ids.MAX_WORKER_BYTES:
            raise bad_request(f"{field}: exceeds {ids.MAX_WORKER_BYTES} bytes (got {size})")
        if ids.has_blank_or_control(text):
            raise bad_request(f"{field}: must not contain whitespace or control characters")
    for lane in lanes:
        try:
            ids.parse_lane_id(lane)
        except ids.LaneIdEmpty:
            raise bad_request("lane_id: lane_id is empty") from None
        except ids.LaneIdTooLong as long:
            raise bad_request(f"lane_id: lane_id exceeds {ids.MAX_LANE_BYTES} bytes (got {long.length})") from None
        except ids.LaneIdNonPrintable as odd:
            raise bad_request(f"lane_id: lane_id contains non-ASCII-printable byte at index {odd.index}") from None


def check_grant_ttl(ttl_ms: int) -> None:
    """Raise 400 if the lifetime of a grant is out of range."""
    if not 1 <= ttl_ms <= MAX_GRANT_TTL_MS:
        raise bad_request(f"grant_ttl_ms must be in 1..={MAX_GRANT_TTL_MS}")


@routes.post(
    "/v1/workers/{worker_id}/claim",
    {200: ClaimGrantResponse, 204: None},
    body=ClaimGrantRequest,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def claim_for_worker(request: Request[ClaimGrantRequest]) -> ClaimGrantResponse | Response:
    """Issue a grant for the best execution of the lane that this worker may run; 204 if there is none."""
    worker_id, body = request.path_params[0], request.body
    check_worker_names(worker_id, body.worker_instance_id, body.lane_id)
    check_grant_ttl(body.grant_ttl_ms)
    within = request.principal.namespaces
    grant = await request.engine.claim_for_worker(worker_id=worker_id, namespaces=within, **body.to_kwargs())
    if grant is None:
        return Response(204)
    kind = "reclaim" if isinstance(grant, answers.ReclaimGrant) else "resume" if grant.resumes else "claim"
    return ClaimGrantResponse(grant.execution_id, grant.partition_key, grant.grant_key, grant.expires_at_ms, kind)


@routes.post(
    "/v1/executions/{id}/reclaim", {200: ReclaimGrantResponse}, body=ReclaimGrantRequest, subject=Subject.EXECUTION
)
async def issue_reclaim_grant(request: Request[ReclaimGrantRequest]) -> ReclaimGrantResponse:
    """Issue a grant for an execution whose lease was lost; a refusal is a status in the response."""
    execution_id, body = request.execution_id, request.body
    check_worker_names(body.worker_id, body.worker_instance_id, body.lane_id)
    check_grant_ttl(body.grant_ttl_ms)
    answer = await request.engine.issue_reclaim_grant(execution_id, **body.to_kwargs())
    return reclaim_response(execution_id, answer)


def reclaim_response(execution_id: str, answer: Any) -> ReclaimGrantResponse:
    """Return the response with its status."""
    match answer:
        case answers.ReclaimGrant():
            return ReclaimGrantResponse(
                "granted",
                execution_id,
                answer.partition_key,
                answer.grant_key,
                answer.expires_at_ms,
                answer.lane_id,
            )
        case answers.NotReclaimable(detail=detail):
            return ReclaimGrantResponse("not_reclaimable", execution_id, detail=detail)
        case answers.ReclaimCapExceeded(reclaim_count=count):
            return ReclaimGrantResponse("reclaim_cap_exceeded", execution_id, reclaim_count=count)
        case answers.GrantNotFound():
            return ReclaimGrantResponse("grant_not_found", execution_id)
        case _:
            raise errors.BugError(f"reclaim: {type(answer).__name__}")
