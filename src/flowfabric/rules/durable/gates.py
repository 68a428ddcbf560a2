"""Gates: what a durable function waits for, and how a gate closes.

A gate is opened once, by name; a later attempt that asks for the same name finds it as it is, with the same waitpoints,
or finds what came of it. The change that closes a gate writes its memo and, when the function is parked on it, resumes
the execution: nothing is lost between the vote and the function that waited for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.change import NOW, Change, Delete, Insert, Patch, Upsert, Write, from_now, live, seen
from flowfabric.model.condition import Condition
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildCompletion, Gate, GateKind, GateMemo, GateOutcome, MailboxMessage, Vote
from flowfabric.model.obstacles import TIMER_WAIT
from flowfabric.model.signing_key import SigningKey
from flowfabric.model.states import LifecyclePhase, TerminalOutcome
from flowfabric.model.suspension import Suspension, Waitpoint
from flowfabric.model.text import join_some
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import mailbox
from flowfabric.rules.durable.park import NeedsMessage
from flowfabric.rules.execution import lease
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.security import keystore
from flowfabric.rules.suspension import conditions
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension import waitpoints as waitpoint_rules
from flowfabric.rules.suspension.conditions import IncomingSignal, SignalEffect

ClosedGates = Mapping[str, tuple[Gate, GateOutcome, MailboxMessage | None]]


def apply_vote(
    row: Execution, root: Suspension, name: str, arrival: IncomingSignal, seq: int, now: int
) -> tuple[str, dict[str, Any], tuple[Write, ...]]:
    """A signal to one of the gate's waitpoints: its effect, what it changes of the root, and what else it writes."""
    gate = wait_state.open_gates(root)[name]
    condition = conditions.decode_condition(gate.condition or '"OperatorOnly"')
    effect, progress = conditions.apply_signal(condition, wait_encoding.decode_progress(gate.progress), arrival)
    if effect not in (SignalEffect.SATISFIED, SignalEffect.APPENDED):
        return effect, {}, ()
    votes = (*gate.votes, Vote(arrival.waitpoint_id, seq))
    gate = msgspec.structs.replace(gate, progress=wait_encoding.encode_or_none(progress), votes=votes)
    closed: ClosedGates = {name: (gate, GateOutcome.SATISFIED, None)} if effect == SignalEffect.SATISFIED else {}
    fields, writes = update_gates(row, root, {name: gate}, closed)
    return effect, fields, writes


def update_gates(
    row: Execution,
    root: Suspension,
    changed: Mapping[str, Gate],
    closed: ClosedGates,
    *,
    reason: str = wait_state.RESUMED,
) -> tuple[dict[str, Any], tuple[Write, ...]]:
    """What becomes of the root when gates changed and some closed, and what is written besides.

    A function that is parked on one of those that closed is resumed.
    """
    left = wait_state.open_gates(root) | dict(changed)
    for name in closed:
        left.pop(name, None)
    fields: dict[str, Any] = {"gates": wait_encoding.encode_or_none(left)}
    writes: tuple[Write, ...] = tuple(
        Insert(gate_memo(row.execution_id, name, gate, end, mail)) for name, (gate, end, mail) in closed.items()
    )
    if wait_state.is_open(root) and not closed.keys().isdisjoint(parked_on(root)):
        fields |= {"satisfied_at": NOW, "closed_at": NOW, "close_reason": reason, "due_at": None}
        writes += (wait_state.resume_row(row, 0, ""),)
    return fields, writes


def gate_memo(execution_id: str, name: str, gate: Gate, end: GateOutcome, mail: MailboxMessage | None) -> GateMemo:
    """What is remembered of a gate that closes."""
    return GateMemo(
        execution_id=execution_id,
        gate=name,
        kind=gate.kind,
        ended_as=end,
        opened_at=gate.opened_at,
        closed_at=from_now(0),
        votes=wait_encoding.encode_or_none(gate.votes),
        payload=mail.payload if mail is not None else None,
        payload_encoding=mail.payload_encoding if mail is not None else None,
        sender=mail.sender if mail is not None else None,
        message_id=mail.message_id if mail is not None else None,
    )


def parked_on(root: Suspension | None) -> list[str]:
    """The gates that the function is parked on."""
    text = None if root is None else root.waits_on
    return [] if text is None else msgspec.json.decode(text, type=list[str])


def describe_wait(name: str, gate: Gate) -> str:
    """What closes this gate, in words."""
    match gate.kind:
        case GateKind.TIMER:
            return TIMER_WAIT
        case GateKind.MAILBOX:
            return f"a message to {gate.mailbox}"
        case GateKind.SIGNALS:
            return f"an answer to {name.removeprefix('approval:').partition('#')[0]}"
        case GateKind.CHILDREN:
            ended = {vote.member for vote in gate.votes}
            return f"the end of {join_some([child for child in gate.children if child not in ended])}"


def expired_gates(
    root: Suspension | None, names: Iterable[str], now: int
) -> dict[str, tuple[Gate, GateOutcome, MailboxMessage | None]]:
    """Those of the open gates whose own time is over, as what they close as: a timer is satisfied by that."""
    found = wait_state.open_gates(root)
    return {
        name: (
            found[name],
            GateOutcome.SATISFIED if found[name].kind is GateKind.TIMER else GateOutcome.TIMED_OUT,
            None,
        )
        for name in names
        if name in found and wait_state.is_gate_expired(found[name], now)
    }


def apply_child_outcomes(gate: Gate, ends: Mapping[str, str]) -> tuple[Gate, GateOutcome | None]:
    """The gate after these ends of children (the first of each counts), and how it closes, if it does."""
    known = {vote.member for vote in gate.votes}
    news = [Vote(child, 0, ends[child]) for child in gate.children if child in ends and child not in known]
    gate = msgspec.structs.replace(gate, votes=(*gate.votes, *news)) if news else gate
    outcomes = [vote.outcome for vote in gate.votes]
    return gate, outcome_of_children(outcomes, len(gate.children), gate.need, any_outcome=gate.any_outcome)


def outcome_of_children(
    outcomes: Collection[str | None], children: int, need: int, *, any_outcome: bool = False
) -> GateOutcome | None:
    """How these ends, of so many children, close a gate that needs some of them; None while they do not."""
    good = sum(any_outcome or outcome == TerminalOutcome.SUCCESS for outcome in outcomes)
    if good >= need:
        return GateOutcome.SATISFIED
    return GateOutcome.IMPOSSIBLE if good + children - len(outcomes) < need else None


def counted_signals(root: Suspension, waitpoint: Waitpoint) -> set[int]:
    """The places of the signals that count towards the waitpoint's gate."""
    gate = wait_state.open_gates(root).get(waitpoint.gate or "")
    votes: Sequence[Vote] = () if gate is None else gate.votes
    return {vote.seq for vote in votes if vote.member == waitpoint.waitpoint_id}


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


class GateRows(msgspec.Struct, frozen=True):
    """What opening a gate is decided on."""

    row: Execution | None
    root: Suspension | None
    memo: GateMemo | None = None
    mail: MailboxMessage | None = None
    ends: Sequence[ChildCompletion] = ()
    keys: Sequence[SigningKey] = ()
    waitpoints: Mapping[str, Waitpoint] = {}  # those of the ids it asks for that were used before


def open_gate(scene: GateRows, ask: GateArgs, fence: Fence, now: int) -> Decision[OpenGate | GateMemo | NeedsMessage]:
    """Open a gate, find it open, or find what came of it."""
    row, root = scene.row, scene.root
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := lease.check_lease(row, fence, now):
        return refused
    if scene.memo is not None:
        return Decision(scene.memo)
    known = wait_state.open_gates(root).get(ask.name)
    if known is not None:
        if known.kind is not ask.kind:
            return refuse(errors.InvalidInput(f"gate {ask.name}: it is a {known.kind.value} gate"))
        return Decision(OpenGate(ask.name, known))
    signer: SigningKey | None = None
    if ask.waitpoints:
        if any(waitpoint_rules.is_id_in_use(scene.waitpoints.get(one), row, root, now) for one, _ in ask.waitpoints):
            return refuse(errors.WaitpointAlreadyExists())
        found = keystore.waitpoint_signer(scene.keys)
        if isinstance(found, errors.FabricError):
            return refuse(found)
        signer = found
    gate = _new(ask, now)
    end: GateOutcome | None = None
    mail: MailboxMessage | None = None
    fields: dict[str, Any] = {}
    writes: tuple[Write, ...] = ()
    if ask.kind is GateKind.MAILBOX and (seq := mailbox.next_unread(root, ask.mailbox or "")) is not None:
        if scene.mail is None or scene.mail.seq != seq:
            return Decision(NeedsMessage(seq))
        mail, end = scene.mail, GateOutcome.SATISFIED
        fields["mail"] = mailbox.mark_received(root, mail.mailbox)
        writes += (Delete(MailboxMessage, (row.execution_id, mail.mailbox, mail.seq)),)
    if ask.kind is GateKind.CHILDREN:
        gate, end = apply_child_outcomes(gate, {one.child_id: one.outcome for one in scene.ends})
    if signer is not None:
        fresh = (
            waitpoint_rules.new_waitpoint(row, signer, *one, gate=ask.name, activated_at=from_now(0))
            for one in ask.waitpoints
        )
        made = (msgspec.structs.replace(one, expires_at=gate.expires_at) for one in fresh)
        writes += waitpoint_rules.waitpoint_writes(made, scene.waitpoints)
    return _opened(scene, row, ask.name, gate, end, mail, fields, writes, signer)


def _opened(
    scene: GateRows,
    row: Execution,
    name: str,
    gate: Gate,
    end: GateOutcome | None,
    mail: MailboxMessage | None,
    fields: dict[str, Any],
    writes: tuple[Write, ...],
    signer: SigningKey | None,
) -> Decision[OpenGate | GateMemo | NeedsMessage]:
    root = wait_state.suspension_or_new(scene.root, row)
    if end is None:
        answer: Any = OpenGate(name, gate, (signer.kid,) * len(gate.waitpoints) if signer is not None else ())
        fields["gates"] = wait_encoding.encode_or_none(wait_state.open_gates(root) | {name: gate})
    else:
        memo = gate_memo(row.execution_id, name, gate, end, mail)
        writes += (Insert(memo),)

        def answer(now: int) -> GateMemo:
            return msgspec.structs.replace(memo, closed_at=now)

    change = Change(
        guards=(seen(row, live(row)), wait_state.seen_suspension(scene.root, row.execution_id)),
        writes=(Upsert(msgspec.structs.replace(root, **fields)), *writes, *wait_state.mark_has_waits(row)),
    )
    return Decision(answer, change)


def _new(ask: GateArgs, now: int) -> Gate:
    expires_at = ask.expires_at if ask.expires_in_ms is None else now + ask.expires_in_ms
    return Gate(
        kind=ask.kind,
        opened_at=now,
        expires_at=expires_at,
        condition=None if ask.condition is None else conditions.encode_condition(ask.condition),
        waitpoints=ask.waitpoints,
        mailbox=ask.mailbox,
        children=ask.children,
        need=ask.need,
        any_outcome=ask.any_outcome,
    )


def deliver_child_completions(
    row: Execution | None, root: Suspension | None, ends: Sequence[ChildCompletion], now: int
) -> Decision[int]:
    """Let the open gates of a parent know of its children's ends; how many ends there were."""
    if not ends:
        return Decision(0)
    if row is None:
        parent = ends[0].parent_id
        gone = tuple(Delete(ChildCompletion, (parent, end.child_id, end.life)) for end in ends)
        return Decision(len(ends), Change(guards=(wait_state.seen_suspension(root, parent),), writes=gone))
    outcomes = {end.child_id: end.outcome for end in ends}
    changed: dict[str, Gate] = {}
    closed: dict[str, tuple[Gate, GateOutcome, MailboxMessage | None]] = {}
    for name, gate in wait_state.open_gates(root).items():
        if gate.kind is not GateKind.CHILDREN or wait_state.is_gate_expired(gate, now):
            continue
        grown, end = apply_child_outcomes(gate, outcomes)
        if grown is not gate:
            changed[name] = grown
        if end is not None:
            closed[name] = (grown, end, None)
    heard: tuple[Write, ...] = tuple(Upsert(msgspec.structs.replace(end, due_at=None)) for end in ends)
    guards = (seen(row), wait_state.seen_suspension(root, row.execution_id))
    if root is None or not changed:
        if row.lifecycle_phase is LifecyclePhase.ACTIVE:
            # A gate for them may be on its way, decided before they ended: it has to be decided again, with them.
            heard += (Patch(Execution, (row.execution_id,), {"last_mutation_at": NOW}),)
        return Decision(len(ends), Change(guards=guards, writes=heard))
    fields, writes = update_gates(row, root, changed, closed)
    kept = Upsert(msgspec.structs.replace(root, **fields))
    return Decision(len(ends), Change(guards=guards, writes=(kept, *heard, *writes)))
