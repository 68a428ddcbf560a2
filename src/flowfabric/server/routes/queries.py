"""Routes for queries: search, history, explanations, outcomes, lists."""

from __future__ import annotations

import msgspec
from msgspec import UNSET

from flowfabric import ids
from flowfabric.api.encoding import MAX_WAIT_MS, variant_name
from flowfabric.api.executions import (
    ExecutionOutcomeResponse,
    ExplanationResponse,
    ReadProgressResponse,
    ReadResultsRequest,
    ReadResultsResponse,
)
from flowfabric.engine.engine import Capabilities
from flowfabric.engine.operations.pages import (
    ExecutionOutcome,
    HistoryEntry,
    IdMatches,
    LanePage,
    SnapshotPage,
    SuspendedPage,
)
from flowfabric.engine.operations.reads import MAX_MATCHES
from flowfabric.engine.types import ExecutionSnapshot
from flowfabric.model.answers.execution import AttemptView
from flowfabric.model.api_token import ApiScope
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Request, json_response, require_found
from flowfabric.server.routing import CURSOR_PARAM, LIMIT_PARAM, QueryParam, Response, RouteGroup, Subject

routes = RouteGroup("lookups")

EXECUTION_PATH = "/v1/executions/{id}"
STRING_SCHEMA = {"type": "string"}
MAX_RESULT_BYTES = 8 * 1024 * 1024  # of one response; a larger single result is sent alone
RESULTS_BATCH = 20


@routes.get(
    "/v1/executions/search",
    {200: SnapshotPage},
    subject=Subject.CHECKED_BY_HANDLER,
    query=(
        QueryParam("namespace", STRING_SCHEMA),
        QueryParam("lane", STRING_SCHEMA),
        QueryParam("state", STRING_SCHEMA),
        QueryParam("flow_id", STRING_SCHEMA),
        QueryParam("tag", {"type": "string", "description": "key=value"}),
        QueryParam("created_from", {"type": "integer"}),
        QueryParam("created_before", {"type": "integer"}),
        CURSOR_PARAM,
        LIMIT_PARAM,
    ),
)
async def search_executions(request: Request[None]) -> Response:
    """Return executions of all partitions that match every filter, by id."""
    namespace = request.query_param("namespace")
    if request.principal.namespaces is not None:
        if namespace is None:
            raise bad_request("namespace: needed by a token that is bound to namespaces")
        request.require_namespace(namespace)
    tag = request.query_param("tag")
    if tag is not None and "=" not in tag:
        raise bad_request("tag: not key=value")
    key, _, value = (tag or "").partition("=")
    page = await request.engine.search_executions(
        namespace=namespace,
        lane_id=request.query_param("lane"),
        public_state=request.query_param("state"),
        flow_id=request.query_param("flow_id"),
        tag=None if tag is None else (key, value),
        created_from=request.int_param("created_from") if request.query_param("created_from") else None,
        created_before=request.int_param("created_before") if request.query_param("created_before") else None,
        cursor=request.query_param("cursor") or None,
        limit=request.int_param("limit", 50),
    )
    return json_response(page)


@routes.get(
    "/v1/executions/ids",
    {200: IdMatches},
    subject=Subject.CHECKED_BY_HANDLER,
    query=(
        QueryParam(
            "prefix", {"type": "string", "description": "the beginning of an id; its partition may be left out"}
        ),
        QueryParam("limit", {"type": "integer", "minimum": 1, "maximum": MAX_MATCHES}),
    ),
)
async def find_executions(request: Request[None]) -> Response:
    """Return executions whose id begins with a prefix, within the namespaces of the token."""
    namespaces = request.principal.namespaces
    return json_response(
        await request.engine.find_executions(
            request.query_param("prefix") or "",
            namespaces=None if namespaces is None else sorted(namespaces),
            limit=request.int_param("limit", 10),
        )
    )


@routes.get(f"{EXECUTION_PATH}/snapshot", {200: ExecutionSnapshot}, subject=Subject.EXECUTION)
async def describe_execution(request: Request[None]) -> Response:
    """Return an execution with its lease, its waitpoint and its tags."""
    execution_id = request.execution_id
    return json_response(
        require_found(await request.engine.describe_execution(execution_id), f"execution not found: {execution_id}")
    )


@routes.get(f"{EXECUTION_PATH}/attempts", {200: list[AttemptView]}, subject=Subject.EXECUTION)
async def attempt_history(request: Request[None]) -> Response:
    """Return every attempt by index, the running one included."""
    return json_response(await request.engine.attempt_history(request.execution_id))


@routes.get(f"{EXECUTION_PATH}/leases", {200: list[HistoryEntry]}, subject=Subject.EXECUTION)
async def lease_history(request: Request[None]) -> Response:
    """Return the lease events of an execution, oldest first."""
    return json_response(await request.engine.lease_history(request.execution_id))


@routes.get(f"{EXECUTION_PATH}/progress", {200: ReadProgressResponse}, subject=Subject.EXECUTION)
async def read_progress(request: Request[None]) -> Response:
    """Return the last reported progress."""
    return json_response(ReadProgressResponse(*await request.engine.read_progress(request.execution_id)))


@routes.get(f"{EXECUTION_PATH}/explain", {200: ExplanationResponse}, subject=Subject.EXECUTION)
async def explain(request: Request[None]) -> Response:
    """Explain why an execution is not running."""
    explanation = await request.engine.explain(request.execution_id)
    facts = msgspec.to_builtins(explanation.obstacle)
    return json_response(
        ExplanationResponse(
            explanation.execution_id,
            explanation.public_state.value,
            variant_name(type(explanation.obstacle)),
            facts,
            explanation.sentence,
        )
    )


@routes.get(
    f"{EXECUTION_PATH}/end",
    {200: ExecutionOutcomeResponse, 204: None},
    subject=Subject.EXECUTION,
    query=(
        QueryParam("wait_ms", {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_MS}),
        QueryParam("result", {"type": "string", "enum": ["true", "1", "false", "0"]}),
    ),
    long=True,
)
async def await_end(request: Request[None]) -> Response:
    """Wait up to `wait_ms` for the outcome; include the result with `result=true`; 204 if it has not ended."""
    wait_ms = min(request.int_param("wait_ms", 0), MAX_WAIT_MS)
    execution_id = request.execution_id
    ended = (
        await request.wait_while_connected(request.engine.await_end(execution_id, max_wait_ms=wait_ms))
        if wait_ms
        else None
    )
    ended = ended or await request.engine.await_end(execution_id)
    if ended is None:
        return Response(204)
    return json_response(outcome_response(ended, with_result=request.query_param("result") in ("true", "1")))


def outcome_response(ended: ExecutionOutcome, *, with_result: bool) -> ExecutionOutcomeResponse:
    """Return the response for an outcome."""
    return ExecutionOutcomeResponse(
        ended.execution_id,
        ended.outcome.value,
        ended.result is not None,
        ended.encoding,
        ended.reason,
        ended.result if with_result else UNSET,
        ended.namespace,
    )


@routes.post(
    "/v1/executions/results",
    {200: ReadResultsResponse},
    body=ReadResultsRequest,
    scope=ApiScope.READ,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def read_results(request: Request[ReadResultsRequest]) -> Response:
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
    return json_response(ReadResultsResponse(results, remaining))


@routes.get("/v1/lanes", {200: LanePage}, query=(CURSOR_PARAM, LIMIT_PARAM))
async def list_lanes(request: Request[None]) -> Response:
    """List the lanes that ever had an execution."""
    return json_response(
        await request.engine.list_lanes(
            cursor=request.query_param("cursor") or None, limit=request.int_param("limit", 50)
        )
    )


@routes.get(
    "/v1/suspended",
    {200: SuspendedPage},
    query=(
        QueryParam("partition", {"type": "integer", "minimum": 0, "maximum": 65_535}, required=True),
        CURSOR_PARAM,
        LIMIT_PARAM,
    ),
)
async def list_suspended(request: Request[None]) -> Response:
    """List the suspended executions of a partition, earliest timeout first."""
    return json_response(
        await request.engine.list_suspended(
            request.int_param("partition"),
            cursor=request.query_param("cursor") or None,
            limit=request.int_param("limit", 50),
        )
    )


@routes.get("/v1/capabilities", {200: Capabilities}, subject=Subject.CHECKED_BY_HANDLER)
async def capabilities(request: Request[None]) -> Response:
    """List the operations of the engine."""
    return json_response(request.engine.capabilities())
