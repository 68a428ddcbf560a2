"""How a durable function opens its gates, and how its execution parks on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.handles import HandleFields
from flowfabric.model.condition import Condition
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildEnd, Gate, GateEnd, GateKind, GateMemo, Mail
from flowfabric.model.keys import SigningKey
from flowfabric.model.states import LifecyclePhase
from flowfabric.model.suspension import NO_TIMEOUT, Suspension, TimeoutBehavior, Waitpoint
from flowfabric.rules import conditions, gates, lease, mailbox, shelving, tokens, waits
from flowfabric.rules.change import (
    NOW,
    Change,
    Decision,
    Delete,
    Insert,
    Patch,
    Put,
    Write,
    at,
    lease_event,
    live,
    refuse,
    seen,
)
from flowfabric.rules.lease import Fence


class GateArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A gate to be opened. Waitpoint ids are minted beforehand; a gate that is there keeps its own."""

    name: str
    kind: GateKind
    expires_in_ms: int | None = None
    expires_at: int | None = None
    condition: Condition | None = None
    waitpoints: tuple[tuple[str, str], ...] = ()  # ids and keys
    mailbox: str | None = None
    children: tuple[str, ...] = ()
    need: int = 0
    any_outcome: bool = False


class OpenGate(msgspec.Struct, frozen=True):
    """A gate that nothing has closed yet; of one that was just opened, the keys that signed its tokens."""

    name: str
    gate: Gate
    kids: tuple[str, ...] = ()


class LookAt(msgspec.Struct, frozen=True):
    """The rule has to see the message at this place before it can decide."""

    seq: int


class Parked(msgspec.Struct, frozen=True):
    """The execution waits; the lease is gone."""

    suspension_id: str
    holder: HandleFields


class Ready(msgspec.Struct, frozen=True):
    """Something that was to be waited for is there already; nothing was parked."""

    gates: tuple[str, ...]


class Scene(msgspec.Struct, frozen=True):
    """What opening a gate is decided on."""

    row: Execution | None
    root: Suspension | None
    memo: GateMemo | None = None
    mail: Mail | None = None
    ends: Sequence[ChildEnd] = ()
    keys: Sequence[SigningKey] = ()
    waitpoints: Mapping[str, Waitpoint] = {}  # those of the ids it asks for that were used before


def open_gate(scene: Scene, ask: GateArgs, fence: Fence, now: int) -> Decision[OpenGate | GateMemo | LookAt]:
    """Open a gate, find it open, or find what came of it."""
    row, root = scene.row, scene.root
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := lease.check_lease(row, fence, now):
        return refused
    if scene.memo is not None:
        return Decision(scene.memo)
    known = waits.open_gates(root).get(ask.name)
    if known is not None:
        if known.kind is not ask.kind:
            return refuse(errors.InvalidInput(f"gate {ask.name}: it is a {known.kind.value} gate"))
        return Decision(OpenGate(ask.name, known))
    signer: SigningKey | None = None
    if ask.waitpoints:
        if any(shelving.is_taken(scene.waitpoints.get(one), row, root, now) for one, _ in ask.waitpoints):
            return refuse(errors.WaitpointAlreadyExists())
        found = tokens.waitpoint_signer(scene.keys)
        if isinstance(found, errors.FabricError):
            return refuse(found)
        signer = found
    gate = _new(ask, now)
    end: GateEnd | None = None
    mail: Mail | None = None
    fields: dict[str, Any] = {}
    writes: tuple[Write, ...] = ()
    if ask.kind is GateKind.MAILBOX and (seq := mailbox.next_unread(root, ask.mailbox or "")) is not None:
        if scene.mail is None or scene.mail.seq != seq:
            return Decision(LookAt(seq))
        mail, end = scene.mail, GateEnd.SATISFIED
        fields["mail"] = mailbox.taken(root, mail.mailbox)
        writes += (Delete(Mail, (row.execution_id, mail.mailbox, mail.seq)),)
    if ask.kind is GateKind.CHILDREN:
        gate, end = gates.with_children(gate, {one.child_id: one.outcome for one in scene.ends})
    if signer is not None:
        fresh = (shelving.new_waitpoint(row, signer, *one, gate=ask.name, activated_at=at(0)) for one in ask.waitpoints)
        made = (msgspec.structs.replace(one, expires_at=gate.expires_at) for one in fresh)
        writes += shelving.placed(made, scene.waitpoints)
    return _opened(scene, row, ask.name, gate, end, mail, fields, writes, signer)


def _opened(
    scene: Scene,
    row: Execution,
    name: str,
    gate: Gate,
    end: GateEnd | None,
    mail: Mail | None,
    fields: dict[str, Any],
    writes: tuple[Write, ...],
    signer: SigningKey | None,
) -> Decision[OpenGate | GateMemo | LookAt]:
    root = waits.root_of(scene.root, row)
    if end is None:
        answer: Any = OpenGate(name, gate, (signer.kid,) * len(gate.waitpoints) if signer is not None else ())
        fields["gates"] = waits.written(waits.open_gates(root) | {name: gate})
    else:
        memo = gates.memo(row.execution_id, name, gate, end, mail)
        writes += (Insert(memo),)

        def answer(now: int) -> GateMemo:
            return msgspec.structs.replace(memo, closed_at=now)

    change = Change(
        guards=(seen(row, live(row)), waits.guard_of(scene.root, row.execution_id)),
        writes=(Put(msgspec.structs.replace(root, **fields)), *writes, *waits.marked(row)),
    )
    return Decision(answer, change)


def _new(ask: GateArgs, now: int) -> Gate:
    expires_at = ask.expires_at if ask.expires_in_ms is None else now + ask.expires_in_ms
    return Gate(
        kind=ask.kind,
        opened_at=now,
        expires_at=expires_at,
        condition=None if ask.condition is None else conditions.write_condition(ask.condition),
        waitpoints=ask.waitpoints,
        mailbox=ask.mailbox,
        children=ask.children,
        need=ask.need,
        any_outcome=ask.any_outcome,
    )


def park(
    row: Execution | None,
    root: Suspension | None,
    memos: Mapping[str, GateMemo],
    names: tuple[str, ...],
    *,
    suspension_id: str,
    reason_code: str,
    fence: Fence,
    holder: HandleFields,
    now: int,
) -> Decision[Parked | Ready]:
    """Put the work away until one of these gates closes; if one has closed, or its time is over, go on at once."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := lease.check_lease(row, fence, now):
        return refused
    found = waits.open_gates(root)
    unknown = [name for name in names if name not in found and name not in memos]
    if unknown or root is None or not names:
        return refuse(errors.InvalidInput(f"gates: {', '.join(unknown) or 'none'} to wait for"))
    if memos:
        return Decision(Ready(tuple(name for name in names if name in memos)))
    guards = (seen(row, live(row)), waits.guard_of(root, row.execution_id))
    if past := gates.past(root, names, now):
        fields, writes = gates.moved_on(row, root, {}, past)
        kept = Put(msgspec.structs.replace(root, **fields))
        return Decision(Ready(tuple(past)), Change(guards=guards, writes=(kept, *writes)))
    waitpoint_id = next((gate.waitpoints[0][0] for name in names if (gate := found[name]).waitpoints), None)
    shelf = shelving.shelved(
        row,
        suspension_id=suspension_id,
        waitpoint_id=waitpoint_id,
        reason_code=reason_code,
        now=now,
        waits_for=" or ".join(gates.awaited(name, found[name]) for name in names),
        keys=[found[name].mailbox for name in names],
    )
    change = Change(
        guards=guards,
        writes=(
            shelf,
            Put(_waiting(root, row, names, suspension_id, reason_code)),
            *shelving.let_go(root, ()),
        ),
        events=(lease_event(row, "released", reason="suspend"),),
    )
    return Decision(Parked(suspension_id, holder), change)


def _waiting(
    root: Suspension, row: Execution, names: tuple[str, ...], suspension_id: str, reason_code: str
) -> Suspension:
    """The root with a suspension on gates in place of the one before; its timeout is the first of theirs."""
    found = waits.open_gates(root)
    ends = [end for name in names if (end := found[name].expires_at) is not None]
    timeout_at = min(ends, default=None)
    return Suspension(
        execution_id=root.execution_id,
        partition=root.partition,
        signal_count=root.signal_count,
        gates=root.gates,
        mail=root.mail,
        suspension_id=suspension_id,
        attempt_index=row.attempt_index,
        reason_code=reason_code,
        created_at=at(0),
        timeout_at=timeout_at,
        timeout_behavior=TimeoutBehavior.AUTO_RESUME,
        due_at=NO_TIMEOUT if timeout_at is None else timeout_at,
        waits_on=waits.written(list(names)),
    )


def take_in(row: Execution | None, root: Suspension | None, ends: Sequence[ChildEnd], now: int) -> Decision[int]:
    """Let the open gates of a parent know of its children's ends; how many ends there were."""
    if not ends:
        return Decision(0)
    if row is None:
        parent = ends[0].parent_id
        gone = tuple(Delete(ChildEnd, (parent, end.child_id, end.life)) for end in ends)
        return Decision(len(ends), Change(guards=(waits.guard_of(root, parent),), writes=gone))
    outcomes = {end.child_id: end.outcome for end in ends}
    changed: dict[str, Gate] = {}
    closed: dict[str, tuple[Gate, GateEnd, Mail | None]] = {}
    for name, gate in waits.open_gates(root).items():
        if gate.kind is not GateKind.CHILDREN or waits.gate_is_past(gate, now):
            continue
        grown, end = gates.with_children(gate, outcomes)
        if grown is not gate:
            changed[name] = grown
        if end is not None:
            closed[name] = (grown, end, None)
    heard: tuple[Write, ...] = tuple(Put(msgspec.structs.replace(end, due_at=None)) for end in ends)
    guards = (seen(row), waits.guard_of(root, row.execution_id))
    if root is None or not changed:
        if row.lifecycle_phase is LifecyclePhase.ACTIVE:
            # A gate for them may be on its way, decided before they ended: it has to be decided again, with them.
            heard += (Patch(Execution, (row.execution_id,), {"last_mutation_at": NOW}),)
        return Decision(len(ends), Change(guards=guards, writes=heard))
    fields, writes = gates.moved_on(row, root, changed, closed)
    kept = Put(msgspec.structs.replace(root, **fields))
    return Decision(len(ends), Change(guards=guards, writes=(kept, *heard, *writes)))
