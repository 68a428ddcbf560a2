"""Reads that the reference keeps to its library: search, history, explanations, lists."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from flowfabric import ids
from flowfabric.api.encoding import CURSOR, LIMIT, MAX_WAIT_MS, Body, checked
from flowfabric.engine.claiming import poller
from flowfabric.engine.engine import Capabilities
from flowfabric.engine.operations.reads import (
    MAX_MATCHES,
    ExecutionSnapshot,
    HistoryEntry,
    IdMatches,
    LanePage,
    SnapshotPage,
)
from flowfabric.engine.operations.suspensions import SuspendedPage
from flowfabric.model.answers.execution import AttemptView
from flowfabric.model.api_token import Scope
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Ask, found, json
from flowfabric.server.routing import Param, Reply, Routes, Subject

routes = Routes("lookups")

ONE = "/v1/executions/{id}"
TEXT = {"type": "string"}
MAX_RESULTS = 1000
MAX_RESULT_BYTES = 8 * 1024 * 1024  # of one answer; a single result may be larger, and comes alone
RESULTS_AT_ONCE = 20


@routes.get(
    "/v1/executions/search",
    {200: SnapshotPage},
    subject=Subject.OWN,
    query=(
        Param("namespace", TEXT),
        Param("lane", TEXT),
        Param("state", TEXT),
        Param("flow_id", TEXT),
        Param("tag", {"type": "string", "description": "key=value"}),
        Param("created_from", {"type": "integer"}),
        Param("created_before", {"type": "integer"}),
        CURSOR,
        LIMIT,
    ),
)
async def search_executions(ask: Ask[None]) -> Reply:
    """Executions of all partitions that meet every filter, by id."""
    namespace = ask.query("namespace")
    if ask.principal.namespaces is not None:
        if namespace is None:
            raise bad_request("namespace: needed by a token that is bound to namespaces")
        ask.within(namespace)
    tag = ask.query("tag")
    if tag is not None and "=" not in tag:
        raise bad_request("tag: not key=value")
    key, _, value = (tag or "").partition("=")
    page = await ask.engine.search_executions(
        namespace=namespace,
        lane_id=ask.query("lane"),
        public_state=ask.query("state"),
        flow_id=ask.query("flow_id"),
        tag=None if tag is None else (key, value),
        created_from=ask.number("created_from") if ask.query("created_from") else None,
        created_before=ask.number("created_before") if ask.query("created_before") else None,
        cursor=ask.query("cursor") or None,
        limit=ask.number("limit", 50),
    )
    return json(page)


@routes.get(
    "/v1/executions/ids",
    {200: IdMatches},
    subject=Subject.OWN,
    query=(
        Param("prefix", {"type": "string", "description": "the beginning of an id; its partition may be left out"}),
        Param("limit", {"type": "integer", "minimum": 1, "maximum": MAX_MATCHES}),
    ),
)
async def find_executions(ask: Ask[None]) -> Reply:
    """Executions whose id begins like this, within the namespaces of the token."""
    own = ask.principal.namespaces
    return json(
        await ask.engine.find_executions(
            ask.query("prefix") or "", namespaces=None if own is None else sorted(own), limit=ask.number("limit", 10)
        )
    )


@routes.get(f"{ONE}/snapshot", {200: ExecutionSnapshot}, subject=Subject.EXECUTION)
async def describe_execution(ask: Ask[None]) -> Reply:
    """An execution with its lease, its waitpoint and its tags."""
    execution_id = ask.execution_id
    return json(found(await ask.engine.describe_execution(execution_id), f"execution not found: {execution_id}"))


@routes.get(f"{ONE}/attempts", {200: list[AttemptView]}, subject=Subject.EXECUTION)
async def attempt_history(ask: Ask[None]) -> Reply:
    """Every attempt by index, the running one included."""
    return json(await ask.engine.attempt_history(ask.execution_id))


@routes.get(f"{ONE}/leases", {200: list[HistoryEntry]}, subject=Subject.EXECUTION)
async def lease_history(ask: Ask[None]) -> Reply:
    """What happened to the leases of an execution, oldest first."""
    return json(await ask.engine.lease_history(ask.execution_id))


class Progress(msgspec.Struct, frozen=True):
    pct: int | None
    message: str | None


@routes.get(f"{ONE}/progress", {200: Progress}, subject=Subject.EXECUTION)
async def read_progress(ask: Ask[None]) -> Reply:
    """What the holder last said of its progress."""
    return json(Progress(*await ask.engine.read_progress(ask.execution_id)))


class Explanation(msgspec.Struct, frozen=True):
    """Why an execution is not running: the obstacle by name, with its facts, and in a sentence."""

    execution_id: str
    public_state: str
    obstacle: str
    facts: dict[str, Any]
    sentence: str


@routes.get(f"{ONE}/explain", {200: Explanation}, subject=Subject.EXECUTION)
async def explain(ask: Ask[None]) -> Reply:
    """Why an execution is not running."""
    told = await ask.engine.explain(ask.execution_id)
    facts = msgspec.to_builtins(told.obstacle)
    return json(
        Explanation(told.execution_id, told.public_state.value, type(told.obstacle).__name__, facts, told.sentence)
    )


class Ended(msgspec.Struct, frozen=True):
    execution_id: str
    outcome: str
    has_result: bool
    encoding: str | None
    reason: str | None
    result_b64: bytes | UnsetType | None = UNSET
    namespace: str | None = None


@routes.get(
    f"{ONE}/end",
    {200: Ended, 204: None},
    subject=Subject.EXECUTION,
    query=(
        Param("wait_ms", {"type": "integer", "minimum": 0, "maximum": MAX_WAIT_MS}),
        Param("result", {"type": "string", "enum": ["true", "1", "false", "0"]}),
    ),
    long=True,
)
async def await_end(ask: Ask[None]) -> Reply:
    """How an execution ended, waited for up to `wait_ms`, with `result=true` also its result; 204 when it has not."""
    wait_ms = min(ask.number("wait_ms", 0), MAX_WAIT_MS)
    execution_id = ask.execution_id
    ended = await ask.while_heard(ask.engine.await_end(execution_id, max_wait_ms=wait_ms)) if wait_ms else None
    ended = ended or await ask.engine.await_end(execution_id)
    if ended is None:
        return Reply(204)
    return json(told_end(ended, with_result=ask.query("result") in ("true", "1")))


def told_end(ended: poller.Ended, *, with_result: bool) -> Ended:
    """An end for those who waited for it."""
    return Ended(
        ended.execution_id,
        ended.outcome.value,
        ended.result is not None,
        ended.encoding,
        ended.reason,
        ended.result if with_result else UNSET,
        ended.namespace,
    )


class ResultsBody(Body, frozen=True):
    execution_ids: Annotated[list[str], Meta(max_length=MAX_RESULTS)]
    namespace: str | None = None  # that all of them must belong to

    def __post_init__(self) -> None:
        checked(ids.parse_execution_id, *self.execution_ids)


class ResultsOf(msgspec.Struct, frozen=True, omit_defaults=True):
    """Results in base64 by execution, null for one that has none; `rest` are those to ask for next."""

    results: dict[str, bytes | None]
    rest: list[str] = []


@routes.post("/v1/executions/results", {200: ResultsOf}, body=ResultsBody, scope=Scope.READ, subject=Subject.OWN)
async def read_results(ask: Ask[ResultsBody]) -> Reply:
    """The results of many executions, as many as fit into one answer; the ids of the others are told."""
    wanted: list[str] = list(dict.fromkeys(map(ids.parse_execution_id, ask.body.execution_ids)))
    for execution_id in wanted:
        await ask.may_touch(execution_id)
    found: dict[str, bytes | None] = {}
    size = 0
    while wanted and size < MAX_RESULT_BYTES:
        some = await ask.engine.read_results(wanted[:RESULTS_AT_ONCE], namespace=ask.body.namespace)
        for execution_id, result in some.items():
            size += len(result or b"")
            if found and size > MAX_RESULT_BYTES:
                break
            found[execution_id] = result
            wanted.remove(execution_id)
    return json(ResultsOf(found, wanted))


@routes.get("/v1/lanes", {200: LanePage}, query=(CURSOR, LIMIT))
async def list_lanes(ask: Ask[None]) -> Reply:
    """Lanes that ever had an execution."""
    return json(await ask.engine.list_lanes(cursor=ask.query("cursor") or None, limit=ask.number("limit", 50)))


@routes.get(
    "/v1/suspended",
    {200: SuspendedPage},
    query=(Param("partition", {"type": "integer", "minimum": 0, "maximum": 65_535}, required=True), CURSOR, LIMIT),
)
async def list_suspended(ask: Ask[None]) -> Reply:
    """Suspended executions of a partition, those that time out first in front."""
    return json(
        await ask.engine.list_suspended(
            ask.number("partition"), cursor=ask.query("cursor") or None, limit=ask.number("limit", 50)
        )
    )


@routes.get("/v1/capabilities", {200: Capabilities}, subject=Subject.OWN)
async def capabilities(ask: Ask[None]) -> Reply:
    """Which operations the engine knows."""
    return json(ask.engine.capabilities())
