"""Routes for queries: one execution, its history and outcome, and lists."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from flowfabric import ids
from flowfabric.api import executions as api
from flowfabric.api.encoding import variant_name
from flowfabric.engine.engine import Capabilities
from flowfabric.engine.operations.pages import (
    ExecutionOutcome,
    HistoryEntry,
    LanePage,
    SuspendedPage,
)
from flowfabric.engine.types import ExecutionSnapshot
from flowfabric.model.answers.execution import AttemptView
from flowfabric.model.scheduling.lane import LaneSpread
from flowfabric.model.security.api_token import ApiScope
from flowfabric.model.view import view_of
from flowfabric.server.request import Request, require_found
from flowfabric.server.routing import (
    PAGE_PARAMS,
    PARTITION_PARAM,
    WAIT_MS_PARAM,
    QueryParam,
    Response,
    RouteGroup,
    Subject,
)

routes = RouteGroup("lookups")
execution_routes = routes.with_defaults(subject=Subject.EXECUTION)

EXECUTION_PATH = "/v1/executions/{id}"
STRING_SCHEMA = {"type": "string"}
MAX_RESULT_BYTES = 8 * 1024 * 1024  # limit of one response; a larger single result is sent alone
RESULTS_BATCH = 20


@execution_routes.get(f"{EXECUTION_PATH}/snapshot", {200: ExecutionSnapshot})
async def describe_execution(request: Request[None]) -> ExecutionSnapshot:
    """Return an execution with its lease, its waitpoint and its tags."""
    execution_id = request.execution_id
    return require_found(await request.engine.describe_execution(execution_id), f"execution not found: {execution_id}")


@execution_routes.get(f"{EXECUTION_PATH}/attempts", {200: list[AttemptView]})
async def attempt_history(request: Request[None]) -> list[AttemptView]:
    """Return every attempt by index, the running one included."""
    return await request.engine.attempt_history(request.execution_id)


@execution_routes.get(f"{EXECUTION_PATH}/leases", {200: list[HistoryEntry]})
async def lease_history(request: Request[None]) -> list[HistoryEntry]:
    """Return the lease events of an execution, oldest first."""
    return await request.engine.lease_history(request.execution_id)


@execution_routes.get(f"{EXECUTION_PATH}/input", {200: api.ExecutionInputResponse})
async def read_input(request: Request[None]) -> api.ExecutionInputResponse:
    """Return the input of an execution, its kind and its policy."""
    found = await request.engine.read_input(request.execution_id)
    return api.ExecutionInputResponse(
        found.execution_kind, found.payload, found.encoding, found.creator_identity, found.policy
    )


@execution_routes.get(f"{EXECUTION_PATH}/progress", {200: api.ReadProgressResponse})
async def read_progress(request: Request[None]) -> api.ReadProgressResponse:
    """Return the last reported progress."""
    return api.ReadProgressResponse(*await request.engine.read_progress(request.execution_id))


@execution_routes.get(f"{EXECUTION_PATH}/explain", {200: api.ExplanationResponse})
async def explain(request: Request[None]) -> api.ExplanationResponse:
    """Explain why an execution is not running."""
    explanation = await request.engine.explain(request.execution_id)
    facts = msgspec.to_builtins(explanation.obstacle)
    return api.ExplanationResponse(
        explanation.execution_id,
        explanation.public_state.value,
        variant_name(type(explanation.obstacle)),
        facts,
        explanation.sentence,
        explanation.parts,
    )


@execution_routes.get(
    f"{EXECUTION_PATH}/end",
    {200: api.ExecutionOutcomeResponse, 204: None},
    query=(
        WAIT_MS_PARAM,
        QueryParam("result", {"type": "string", "enum": ["true", "1", "false", "0"]}),
    ),
    long=True,
)
async def await_end(request: Request[None]) -> api.ExecutionOutcomeResponse | Response:
    """Wait up to `wait_ms` for the outcome; include the result with `result=true`; 204 if it has not ended."""
    execution_id = request.execution_id
    ended = await request.long_poll(lambda ms: request.engine.await_end(execution_id, max_wait_ms=ms))
    if ended is None:
        return Response(204)
    return outcome_response(ended, with_result=request.query_param("result") in ("true", "1"))


def outcome_response(ended: ExecutionOutcome, *, with_result: bool) -> api.ExecutionOutcomeResponse:
    """Return the response for an outcome."""
    return view_of(
        api.ExecutionOutcomeResponse,
        ended,
        outcome=ended.outcome.value,
        has_result=ended.result is not None,
        result_b64=ended.result if with_result else UNSET,
        error=ended.failure,
    )


@routes.post(
    "/v1/executions/results",
    {200: api.ReadResultsResponse},
    body=api.ReadResultsRequest,
    scope=ApiScope.READ,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def read_results(request: Request[api.ReadResultsRequest]) -> api.ReadResultsResponse:
    """Return the results of many executions, as many as fit into one response, and the ids of the rest."""
    remaining: list[str] = list(dict.fromkeys(map(ids.parse_execution_id, request.body.execution_ids)))
    for execution_id in remaining:
        await request.require_execution_access(execution_id)
    results: dict[str, bytes | None] = {}
    size = 0
    while remaining and size < MAX_RESULT_BYTES:
        batch = await request.engine.read_results(remaining[:RESULTS_BATCH], namespace=request.body.namespace)
        for execution_id, result in batch.items():
            size += len(result or b"")
            if results and size > MAX_RESULT_BYTES:
                break
            results[execution_id] = result
            remaining.remove(execution_id)
    return api.ReadResultsResponse(results, remaining)


@routes.get("/v1/lanes", {200: LanePage}, query=PAGE_PARAMS)
async def list_lanes(request: Request[None]) -> LanePage:
    """List the lanes that ever had an execution."""
    return await request.engine.list_lanes(cursor=request.cursor, limit=request.int_param("limit", 50))


@routes.get("/v1/lanes/{lane}", {200: LaneSpread})
async def read_lane(request: Request[None]) -> LaneSpread:
    """Return the spread of a lane, and the one that follows if a change is not yet in effect."""
    return await request.engine.read_lane(request.path_params[0])


@routes.get("/v1/suspended", {200: SuspendedPage}, query=(PARTITION_PARAM, *PAGE_PARAMS))
async def list_suspended(request: Request[None]) -> SuspendedPage:
    """List the suspended executions of a partition, earliest timeout first."""
    return await request.engine.list_suspended(
        request.int_param("partition"), cursor=request.cursor, limit=request.int_param("limit", 50)
    )


@routes.get("/v1/capabilities", {200: Capabilities}, subject=Subject.CHECKED_BY_HANDLER)
async def capabilities(request: Request[None]) -> Capabilities:
    """List the operations of the engine."""
    return request.engine.capabilities()
