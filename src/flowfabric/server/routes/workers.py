"""Workers over HTTP: get work with its lease in one call, redeem grants, stay in the registry."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from flowfabric import ids
from flowfabric.api.encoding import CURSOR_PARAM, LIMIT_PARAM, MAX_WAIT_MS, Natural, RequestBody, check_ids, one_of
from flowfabric.engine.engine import Engine
from flowfabric.model.answers import execution as answers
from flowfabric.model.api_token import ApiScope
from flowfabric.model.worker import (
    STOPPED,
    MarkedDead,
    NotRegistered,
    WorkerPage,
    WorkerRefreshed,
    WorkerRegistered,
)
from flowfabric.server import tracing
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Request, json_response, variant_response
from flowfabric.server.routes.grants import check_worker_names
from flowfabric.server.routing import H, QueryParam, Response, RouteGroup, Subject

routes = RouteGroup("workers")

MAX_CLAIM = 1000
MAX_LANES = 100
DEFAULT_LEASE_MS = 15_000


class ClaimedWork(msgspec.Struct, frozen=True):
    """An execution to work on, and the handle that fences whatever its holder says of it."""

    execution_id: str
    handle: str
    lease_id: str
    lease_epoch: int
    lease_expires_at: int
    attempt_index: int
    attempt_id: str
    attempt_type: str
    execution_kind: str
    input_payload_b64: bytes
    payload_encoding: str | None
    creator_identity: str
    policy: str | None
    traceparent: str | None = None  # where it was submitted, when traces are kept
    namespace: str | None = None  # a redeemed grant does not tell


class ClaimWorkResponse(msgspec.Struct, frozen=True):
    claimed: list[ClaimedWork]


class ClaimWorkRequest(RequestBody, frozen=True):
    """A worker's wish for work: as much as it has room for, waited for as long as it likes."""

    worker_instance_id: str
    lanes: Annotated[list[str], Meta(min_length=1, max_length=MAX_LANES)]
    limit: Annotated[int, Meta(ge=1, le=MAX_CLAIM)] = 1
    capabilities: tuple[str, ...] = ()
    lease_ttl_ms: Natural = DEFAULT_LEASE_MS
    wait_ms: Natural = 0  # at most 30 s are waited
    namespaces: tuple[str, ...] | None = None  # whose work is wanted; all that the token is good for unless said


@routes.post(
    "/v1/workers/{worker_id}/claims",
    {200: ClaimWorkResponse},
    body=ClaimWorkRequest,
    scope=ApiScope.WORK,
    subject=Subject.CHECKED_BY_HANDLER,
    long=True,
)
async def claim(ask: Request[ClaimWorkRequest]) -> Response:
    """Up to `limit` executions with their leases, as soon as there is one; budgets and quotas are asked first."""
    worker_id, body = ask.path_params[0], ask.body
    check_worker_names(worker_id, body.worker_instance_id, *body.lanes)
    lanes = tuple(dict.fromkeys(body.lanes))
    for namespace in body.namespaces or ():
        ask.require_namespace(namespace)

    await ask.app.handle_signer.prepare()

    def nudge() -> None:
        ask.engine.wake_claims(lanes)

    async with ask.watch_disconnect(nudge) as is_heard:
        with _endable(ask, nudge) as is_wanted:
            claimed = await ask.engine.claim_from_lanes(
                lanes,
                worker_id=worker_id,
                max_wait_ms=min(body.wait_ms, MAX_WAIT_MS),
                go_on=lambda: is_heard() and is_wanted(),
                namespaces=ask.principal.namespaces if body.namespaces is None else body.namespaces,
                **body.to_kwargs("lanes", "wait_ms", "namespaces"),
            )
        await ask.check_authentication()
        if claimed and ask.is_abandoned:
            await _hand_back(ask.engine, claimed)
            claimed = []
    return json_response(ClaimWorkResponse([await _work(ask, one) for one in claimed]))


async def _hand_back(engine: Engine, claimed: list[answers.Claimed]) -> None:
    """Nobody is there to hear of this work: the next worker shall not have to wait for the end of its leases."""
    await asyncio.gather(*(engine.delay_for(one.handle, 0) for one in claimed), return_exceptions=True)


@contextmanager
def _endable(ask: Request[ClaimWorkRequest], nudge: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """While a claim waits: whether its worker still wants it."""
    wanted, claimant = True, (ask.principal.name, ask.body.worker_instance_id)

    def end() -> None:
        nonlocal wanted
        wanted = False
        nudge()

    waiting = ask.app.waiting_claims.setdefault(claimant, set())
    waiting.add(end)
    try:
        yield lambda: wanted
    finally:
        waiting.discard(end)
        if not waiting:
            ask.app.waiting_claims.pop(claimant, None)


class EndClaimsRequest(RequestBody, frozen=True):
    worker_instance_id: str


class EndClaimsResponse(msgspec.Struct, frozen=True):
    ended: int


@routes.post(
    "/v1/workers/{worker_id}/claims/end",
    {200: EndClaimsResponse},
    body=EndClaimsRequest,
    scope=ApiScope.WORK,
    subject=Subject.CHECKED_BY_HANDLER,
)
async def end_claims(ask: Request[EndClaimsRequest]) -> Response:
    """Let the claims of one's own worker instance that wait here answer now, with what they have; how many."""
    check_worker_names(ask.path_params[0], ask.body.worker_instance_id)
    waiting = tuple(ask.app.waiting_claims.get((ask.principal.name, ask.body.worker_instance_id), ()))
    for end in waiting:
        end()
    return json_response(EndClaimsResponse(len(waiting)))


async def _work(ask: Request[ClaimWorkRequest] | Request[RedeemGrantRequest], claimed: answers.Claimed) -> ClaimedWork:
    payload = claimed.payload
    if payload is None:
        context = await ask.engine.read_execution_context(claimed.execution_id)
        kind, data, encoding, creator, policy = context.execution_kind, context.input_payload, None, "", None
    else:
        kind, data = payload.execution_kind, payload.input_payload or b""
        encoding, creator, policy = payload.payload_encoding, payload.creator_identity, payload.policy
    submitted = None
    if ask.app.tracing.is_on:
        snapshot = await ask.engine.describe_execution(claimed.execution_id)
        submitted = None if snapshot is None else snapshot.tags.get(tracing.TRACEPARENT_TAG)
        ask.app.tracing.record_claim(claimed.execution_id, claimed.attempt_index, claimed.attempt_type.value, submitted)
    return ClaimedWork(
        execution_id=claimed.execution_id,
        handle=await ask.app.handle_signer.sign(claimed.handle),
        lease_id=claimed.lease_id,
        lease_epoch=claimed.lease_epoch,
        lease_expires_at=claimed.lease_expires_at,
        attempt_index=claimed.attempt_index,
        attempt_id=claimed.attempt_id,
        attempt_type=claimed.attempt_type.value,
        execution_kind=kind,
        input_payload_b64=data,
        payload_encoding=encoding,
        creator_identity=creator,
        policy=policy,
        traceparent=submitted,
        namespace=claimed.namespace,
    )


class RedeemGrantRequest(RequestBody, frozen=True):
    """A grant to be redeemed; `grant_kind` and `grant_key` as the grant says."""

    grant_kind: str
    worker_id: str
    worker_instance_id: str
    grant_key: str = ""
    lane_id: str = ""
    lease_ttl_ms: Natural = DEFAULT_LEASE_MS
    lease_id: str | None = None
    attempt_id: str | None = None
    attempt_timeout_ms: Natural | None = None
    max_reclaim_count: Natural | None = None

    def __post_init__(self) -> None:
        check_ids(ids.parse_uuid, self.lease_id, self.attempt_id)


@routes.post(
    "/v1/executions/{id}/redeem",
    {200: one_of(answers.NotReclaimable, answers.ReclaimCapExceeded, answers.GrantNotFound, Claimed=ClaimedWork)},
    body=RedeemGrantRequest,
    scope=ApiScope.WORK,
    subject=Subject.EXECUTION,
)
async def redeem(ask: Request[RedeemGrantRequest]) -> Response:
    """Redeem a grant: begin an attempt, go on with an interrupted one, or take over a lost one."""
    execution_id, body = ask.execution_id, ask.body
    check_worker_names(body.worker_id, body.worker_instance_id, *filter(None, [body.lane_id]))
    answer: answers.Claimed | answers.NotReclaimable | answers.ReclaimCapExceeded | answers.GrantNotFound
    holder = body.to_kwargs("grant_kind", "attempt_id", "attempt_timeout_ms", "max_reclaim_count")
    await ask.app.handle_signer.prepare()
    match body.grant_kind:
        case "claim":
            answer = await ask.engine.claim_execution(
                execution_id, attempt_id=body.attempt_id, attempt_timeout_ms=body.attempt_timeout_ms, **holder
            )
        case "resume":
            answer = await ask.engine.claim_resumed_execution(
                execution_id, remaining_attempt_timeout_ms=body.attempt_timeout_ms, **holder
            )
        case "reclaim":
            answer = await ask.engine.reclaim_execution(
                execution_id, attempt_id=body.attempt_id, max_reclaim_count=body.max_reclaim_count, **holder
            )
        case _:
            raise bad_request("grant_kind: none of claim, resume, reclaim")
    if isinstance(answer, answers.Claimed):
        return variant_response(await _work(ask, answer), name="Claimed")
    return variant_response(answer)


# ---------------------------------------------------------------------------------------------------------------
# The registry


class WorkerInstanceRequest(RequestBody, frozen=True):
    worker_instance_id: str
    namespace: str = "default"


class RegisterWorkerRequest(WorkerInstanceRequest, frozen=True, kw_only=True):
    lanes: list[str]
    liveness_ttl_ms: Natural
    capabilities: tuple[str, ...] = ()


class MarkWorkerDeadRequest(WorkerInstanceRequest, frozen=True):
    reason: str = ""


def registry_route(verb: str, answered: Any, body: Any = WorkerInstanceRequest, **given: Any) -> Callable[[H], H]:
    """A route about one entry of the registry."""
    path, ways = f"/v1/workers/{{worker_id}}/{verb}", {"scope": ApiScope.WORK} | given
    return routes.post(path, {200: answered}, body=body, subject=Subject.CHECKED_BY_HANDLER, **ways)


def _told(ask: Request[Any]) -> dict[str, Any]:
    """What the body says of a worker; refused beyond the token's namespaces, and with names that are none."""
    ask.require_namespace(ask.body.namespace)
    check_worker_names(ask.path_params[0], ask.body.worker_instance_id, *getattr(ask.body, "lanes", ()))
    told: dict[str, Any] = ask.body.to_kwargs()
    return told


@registry_route("register", one_of(WorkerRegistered, WorkerRefreshed), RegisterWorkerRequest)
async def register_worker(ask: Request[RegisterWorkerRequest]) -> Response:
    """Enter the registry; work that waited for these capabilities is claimable before this answers."""
    return variant_response(await ask.engine.register_worker(worker_id=ask.path_params[0], **_told(ask)))


@registry_route("heartbeat", one_of(WorkerRefreshed, NotRegistered))
async def heartbeat_worker(ask: Request[WorkerInstanceRequest]) -> Response:
    """Stay in the registry for another while."""
    return variant_response(await ask.engine.heartbeat_worker(**_told(ask)))


@registry_route("dead", one_of(MarkedDead, NotRegistered), MarkWorkerDeadRequest, scope=ApiScope.OPERATE, audit=True)
async def mark_worker_dead(ask: Request[MarkWorkerDeadRequest]) -> Response:
    """Take a worker out of the registry; its leases end by their own time."""
    return variant_response(await ask.engine.mark_worker_dead(**_told(ask)))


@registry_route("leave", one_of(MarkedDead, NotRegistered))
async def leave(ask: Request[WorkerInstanceRequest]) -> Response:
    """Leave the registry, as a worker that stops."""
    return variant_response(await ask.engine.mark_worker_dead(reason=STOPPED, **_told(ask)))


@routes.get(
    "/v1/workers",
    {200: WorkerPage},
    subject=Subject.CHECKED_BY_HANDLER,
    query=(QueryParam("namespace", {"type": "string"}, required=True), CURSOR_PARAM, LIMIT_PARAM),
)
async def list_workers(ask: Request[None]) -> Response:
    """The live workers of a namespace by instance id."""
    namespace = ask.query_param("namespace")
    if namespace is None:
        raise bad_request("namespace: missing")
    ask.require_namespace(namespace)
    return json_response(
        await ask.engine.list_workers(
            namespace, after=ask.query_param("cursor") or None, limit=ask.int_param("limit", 1000)
        )
    )
