"""Durable functions over HTTP: remembered steps, gates, parking."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from flowfabric.api.encoding import Held, Natural, Octets, Unsaid, octets, variants
from flowfabric.engine.operations.durable import Parked
from flowfabric.engine.types import GateArgs
from flowfabric.model.api_token import Scope
from flowfabric.model.gate import Gate, GateKind, GateMemo, StepMemo
from flowfabric.server.errors import bad_request
from flowfabric.server.request import Ask, found, json, tagged
from flowfabric.server.routes.leases import ObservedSignal, observed
from flowfabric.server.routing import WORK_LIMIT, Reply, Routes, Subject

routes = Routes("durable functions")

ONE = "/v1/executions/{id}"


class StepBody(Held, frozen=True):
    name: str
    occurrence: Natural
    result: Octets | None = None
    result_b64: bytes | None = None
    encoding: str | None = None
    digest: str | None = None

    def __post_init__(self) -> None:
        octets("result", self.result, self.result_b64)


@routes.post(
    "/v1/leases/steps", {200: StepMemo}, body=StepBody, limit=WORK_LIMIT, scope=Scope.WORK, subject=Subject.HANDLE
)
async def record_step(ask: Ask[StepBody]) -> Reply:
    """Remember what a step returned; if it was remembered before, the first result stands and is the answer."""
    body = ask.body
    return json(
        await ask.engine.record_step(
            ask.holder,
            body.name,
            body.occurrence,
            octets("result", body.result, body.result_b64) or b"",
            encoding=body.encoding,
            digest=body.digest,
        )
    )


class Steps(msgspec.Struct, frozen=True):
    steps: list[StepMemo]


@routes.get(f"{ONE}/steps", {200: Steps}, scope=Scope.WORK, subject=Subject.EXECUTION)
async def read_steps(ask: Ask[None]) -> Reply:
    """What the steps of an execution returned, by name and occurrence; results are base64."""
    return json(Steps(await ask.engine.read_steps(ask.execution_id)))


class GateBody(Held, frozen=True):
    """A gate by name: `signals`, `mailbox`, `children` or `timer`, with what belongs to its kind."""

    name: str
    kind: GateKind
    expires_in_ms: Natural | None = None
    expires_at: Natural | None = None
    condition: Any = None
    waitpoints: tuple[tuple[str, str], ...] = ()
    mailbox: str | None = None
    children: tuple[str, ...] = ()
    need: Natural = 0
    any_outcome: bool = False


class GateLink(Unsaid, msgspec.Struct, frozen=True):
    waitpoint_id: str
    waitpoint_key: str
    token: str


class OpenedGate(msgspec.Struct, frozen=True):
    """A gate that nothing has closed yet, with the tokens of its waitpoints."""

    name: str
    gate: Gate
    links: list[GateLink]


@routes.post(
    "/v1/leases/gates",
    {200: variants(OpenedGate, GateMemo)},
    body=GateBody,
    scope=Scope.WORK,
    subject=Subject.HANDLE,
)
async def open_gate(ask: Ask[GateBody]) -> Reply:
    """Open a gate by name, find it open with the same links, or find what came of it."""
    body = ask.body
    answer = await ask.engine.open_gate(
        ask.holder,
        GateArgs(
            name=body.name,
            kind=body.kind,
            expires_in_ms=body.expires_in_ms,
            expires_at=body.expires_at,
            condition=body.condition,
            waitpoints=body.waitpoints,
            mailbox=body.mailbox,
            children=body.children,
            need=body.need,
            any_outcome=body.any_outcome,
        ),
    )
    if isinstance(answer, GateMemo):
        return tagged(answer)
    links = [GateLink(one.waitpoint_id, one.waitpoint_key, one.token.reveal()) for one in answer.links]
    return tagged(OpenedGate(answer.name, answer.gate, links))


class ParkBody(Held, frozen=True):
    gates: Annotated[list[str], Meta(min_length=1)]
    reason_code: str = "waiting_for_signal"


class ParkedAway(msgspec.Struct, frozen=True):
    suspension_id: str
    handle: str


class Ready(msgspec.Struct, frozen=True):
    gates: list[str]


@routes.post(
    "/v1/leases/park",
    {200: variants(Parked=ParkedAway, Ready=Ready)},
    body=ParkBody,
    scope=Scope.WORK,
    subject=Subject.HANDLE,
)
async def park(ask: Ask[ParkBody]) -> Reply:
    """Give the lease back until one of these gates closes; if one has, keep it."""
    answer = await ask.engine.park(ask.holder, tuple(ask.body.gates), reason_code=ask.body.reason_code)
    if isinstance(answer, Parked):
        ask.attempt_over("suspended")
        return tagged(ParkedAway(answer.suspension_id, await ask.app.handles.sign(answer.handle)), name="Parked")
    return tagged(Ready(list(answer.gates)))


class WaitsOf(msgspec.Struct, frozen=True):
    """Open gates by name, and what came of the others."""

    open: dict[str, Gate]
    memos: dict[str, GateMemo]


@routes.get(f"{ONE}/waits", {200: WaitsOf}, scope=Scope.WORK, subject=Subject.EXECUTION)
async def read_waits(ask: Ask[None]) -> Reply:
    """What a durable function has waited for and still waits for."""
    waits = await ask.engine.read_waits(ask.execution_id)
    return json(WaitsOf(waits.open, waits.memos))


class Votes(msgspec.Struct, frozen=True):
    signals: list[ObservedSignal]


@routes.get(f"{ONE}/gates/{{gate}}/votes", {200: Votes}, scope=Scope.WORK, subject=Subject.EXECUTION)
async def read_votes(ask: Ask[None]) -> Reply:
    """The signals that closed a gate, in the order in which they were accepted."""
    name = ask.params[1]
    if not name:
        raise bad_request("gate: empty")
    memo = found((await ask.engine.read_waits(ask.execution_id)).memos.get(name), "not found: suspension")
    return json(Votes([observed(one) for one in await ask.engine.read_votes(memo)]))
