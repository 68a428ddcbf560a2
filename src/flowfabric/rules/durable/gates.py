"""Gates: what a durable function waits for, and how a gate closes.

A gate is opened once, by name. A later attempt that opens the same name finds the gate with the same waitpoints, or its
memo if it has closed. The change that closes a gate writes the memo and, if the function is parked on the gate, resumes
the execution. So nothing is lost between a vote and the function that waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Delete, Insert, Patch, Upsert, Write, live, seen
from flowfabric.model.condition import Condition
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildCompletion, Gate, GateKind, GateMemo, GateOutcome, MailboxMessage, Vote
from flowfabric.model.instant import NOW, Draft, FromNow
from flowfabric.model.obstacles import TIMER_WAIT
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.model.states import LifecyclePhase, TerminalOutcome
from flowfabric.model.suspension import Suspension, Waitpoint
from flowfabric.model.text import join_some
from flowfabric.model.view import view_of
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import child_results, mailbox
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.security import keystore
from flowfabric.rules.suspension import conditions
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension import waitpoints as waitpoint_rules
from flowfabric.rules.suspension.conditions import IncomingSignal, SignalEffect

At = TypeVar("At", int, FromNow)
ClosedGates = Mapping[str, tuple[Gate, GateOutcome, MailboxMessage[Draft] | None]]


def apply_vote(
    row: Execution, suspension: Suspension, name: str, signal: IncomingSignal, seq: int, now: int
) -> tuple[str, dict[str, Any], tuple[Write, ...]]:
    """Apply a signal to a gate: return its effect, the changed columns of the suspension, and further writes."""
    gate = wait_state.open_gates(suspension)[name]
    condition = conditions.decode_condition(gate.condition or '"OperatorOnly"')
    effect, progress = conditions.apply_signal(condition, wait_encoding.decode_progress(gate.progress), signal)
    if effect not in (SignalEffect.SATISFIED, SignalEffect.APPENDED):
        return effect, {}, ()
    votes = (*gate.votes, Vote(signal.waitpoint_id, seq))
    gate = msgspec.structs.replace(gate, progress=wait_encoding.encode_or_none(progress), votes=votes)
    closed: ClosedGates = {name: (gate, GateOutcome.SATISFIED, None)} if effect == SignalEffect.SATISFIED else {}
    fields, writes = update_gates(row, suspension, {name: gate}, closed)
    return effect, fields, writes


def update_gates(
    row: Execution,
    suspension: Suspension,
    changed: Mapping[str, Gate],
    closed: ClosedGates,
    *,
    reason: str = wait_state.RESUMED,
    ends: Sequence[ChildCompletion] = (),
) -> tuple[dict[str, Any], tuple[Write, ...]]:
    """Return the columns of the suspension after gates changed and some closed, and further writes.

    A function that is parked on a closed gate is resumed. `ends` are completions of children of the closed gates.
    """
    remaining = wait_state.open_gates(suspension) | dict(changed)
    for name in closed:
        remaining.pop(name, None)
    fields = wait_state.gate_columns(remaining)
    writes: tuple[Write, ...] = tuple(
        Insert(gate_memo(row.execution_id, name, gate, outcome, mail, NOW, ends=ends))
        for name, (gate, outcome, mail) in closed.items()
    )
    if wait_state.is_open(suspension) and not closed.keys().isdisjoint(parked_on(suspension)):
        fields |= {"satisfied_at": NOW, "closed_at": NOW, "close_reason": reason, "due_at": None}
        writes += (wait_state.resume_row(row, 0, ""),)
    return fields, writes


def gate_memo(
    execution_id: str,
    name: str,
    gate: Gate,
    outcome: GateOutcome,
    mail: MailboxMessage[Draft] | None,
    closed_at: At,
    *,
    ends: Sequence[ChildCompletion] = (),
) -> GateMemo[At]:
    """Return the memo of a gate that closes; `ends` are completions of its children."""
    return GateMemo(
        execution_id=execution_id,
        gate=name,
        kind=gate.kind,
        ended_as=outcome,
        opened_at=gate.opened_at,
        closed_at=closed_at,
        votes=wait_encoding.encode_or_none(gate.votes),
        payload=mail.payload if mail is not None else None,
        payload_encoding=mail.payload_encoding if mail is not None else None,
        sender=mail.sender if mail is not None else None,
        message_id=mail.message_id if mail is not None else None,
        mailbox=mail.mailbox if mail is not None else None,
        message_number=mail.number if mail is not None else None,
        wants_reply=mail is not None and mail.wants_reply,
        number=gate.number,
        results=child_results.results_text(gate, ends) if ends else None,
    )


def parked_on(suspension: Suspension | None) -> list[str]:
    """Return the names of the gates that the function is parked on."""
    text = None if suspension is None else suspension.waits_on
    return [] if text is None else msgspec.json.decode(text, type=list[str])


def describe_wait(name: str, gate: Gate) -> str:
    """Describe what closes this gate."""
    match gate.kind:
        case GateKind.TIMER:
            return TIMER_WAIT
        case GateKind.MAILBOX if gate.task is not None:
            return f"other code of {gate.task}: what it would do next does not fit what it remembers"
        case GateKind.MAILBOX:
            return f"a message to {' or '.join(gate.receives)}"
        case GateKind.SIGNALS:
            return f"an answer to {approval_of_gate(name)}"
        case GateKind.CHILDREN:
            ended = {vote.member for vote in gate.votes}
            return f"the end of {join_some([child for child in gate.children if child not in ended])}"


def approval_of_gate(gate: str) -> str:
    """Return the name of an approval from that of its gate, which may name a branch or the inside of a step first."""
    _, prefix, name = gate.partition("approval:")
    return (name if prefix else gate).partition("#")[0]


def expired_gates(
    suspension: Suspension | None, names: Iterable[str], now: int
) -> dict[str, tuple[Gate, GateOutcome, MailboxMessage[Draft] | None]]:
    """Return the expired gates among these names with their outcome; expiry satisfies a timer."""
    gates = wait_state.open_gates(suspension)
    return {
        name: (
            gates[name],
            GateOutcome.SATISFIED if gates[name].kind is GateKind.TIMER else GateOutcome.TIMED_OUT,
            None,
        )
        for name in names
        if name in gates and wait_state.is_gate_expired(gates[name], now)
    }


def apply_child_outcomes(gate: Gate, child_outcomes: Mapping[str, str]) -> tuple[Gate, GateOutcome | None]:
    """Count the first outcome of each child; return the gate and its own outcome, if it closes."""
    known = {vote.member for vote in gate.votes}
    new_votes = [
        Vote(child, 0, child_outcomes[child])
        for child in gate.children
        if child in child_outcomes and child not in known
    ]
    gate = msgspec.structs.replace(gate, votes=(*gate.votes, *new_votes)) if new_votes else gate
    outcomes = [vote.outcome for vote in gate.votes]
    return gate, outcome_of_children(outcomes, len(gate.children), gate.need, any_outcome=gate.any_outcome)


def outcome_of_children(
    outcomes: Collection[str | None], children: int, need: int, *, any_outcome: bool = False
) -> GateOutcome | None:
    """Return the outcome of a gate that needs some of its children; None while it stays open."""
    counted = sum(any_outcome or outcome == TerminalOutcome.SUCCESS for outcome in outcomes)
    if counted >= need:
        return GateOutcome.SATISFIED
    return GateOutcome.IMPOSSIBLE if counted + children - len(outcomes) < need else None


def counted_signals(suspension: Suspension, waitpoint: Waitpoint) -> set[int]:
    """Return the sequence numbers of signals that count towards the waitpoint's gate."""
    gate = wait_state.open_gates(suspension).get(waitpoint.gate or "")
    votes: Sequence[Vote] = () if gate is None else gate.votes
    return {vote.seq for vote in votes if vote.member == waitpoint.waitpoint_id}


class GateArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A gate to open. Waitpoint ids are minted beforehand; an existing gate keeps its own."""

    name: str
    kind: GateKind
    expires_in_ms: int | None = None
    expires_at: int | None = None
    condition: Condition | None = None
    waitpoints: tuple[tuple[str, str], ...] = ()  # ids and keys
    mailbox: str | None = None
    mailboxes: tuple[str, ...] = ()  # instead of one
    children: tuple[str, ...] = ()
    need: int = 0
    any_outcome: bool = False
    number: int | None = None
    task: str | None = None
    version: str | None = None
    note: str | None = None

    @property
    def receives(self) -> tuple[str, ...]:
        """The mailboxes whose next message closes the gate."""
        return self.mailboxes or (() if self.mailbox is None else (self.mailbox,))


class OpenGate(msgspec.Struct, frozen=True):
    """An open gate; for a gate that was just opened, also the ids of the keys that signed its tokens."""

    name: str
    gate: Gate
    kids: tuple[str, ...] = ()


class NeedsMessages(msgspec.Struct, frozen=True):
    """The rule has to see these messages, by mailbox and sequence number, before it can decide."""

    heads: tuple[tuple[str, int], ...]


class GateRows(msgspec.Struct, frozen=True):
    """The rows that opening a gate is decided on."""

    row: Execution | None
    root: Suspension | None
    memo: GateMemo | None = None
    messages: Sequence[MailboxMessage] = ()  # the first unread ones of its mailboxes
    ends: Sequence[ChildCompletion] = ()
    keys: Sequence[SigningKey] = ()
    waitpoints: Mapping[str, Waitpoint] = {}  # requested ids that already exist
    is_left: bool = False  # the function has left it


def open_gate(rows: GateRows, args: GateArgs, fence: Fence, now: int) -> Decision[OpenGate | GateMemo | NeedsMessages]:
    """Open a gate, or find it open, or find its memo."""
    row, suspension = rows.row, rows.root
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_lease(row, fence, now):
        return refused
    if rows.memo is not None:
        return Decision(rows.memo)
    existing = wait_state.open_gates(suspension).get(args.name)
    if existing is not None:
        if existing.kind is not args.kind:
            return refuse(errors.InvalidInput(f"gate {args.name}: it is a {existing.kind.value} gate"))
        return Decision(OpenGate(args.name, existing))
    if rows.is_left and args.kind is not GateKind.SIGNALS:
        return refuse(errors.InvalidInput(f"gate {args.name}: it was left before"))
    signer: SigningKey | None = None
    if args.waitpoints:
        if any(
            waitpoint_rules.is_id_in_use(rows.waitpoints.get(waitpoint_id), row, suspension, now)
            for waitpoint_id, _ in args.waitpoints
        ):
            return refuse(errors.WaitpointAlreadyExists())
        signer_or_error = keystore.waitpoint_signer(rows.keys)
        if isinstance(signer_or_error, errors.FabricError):
            return refuse(signer_or_error)
        signer = signer_or_error
    gate = new_gate(args, now)
    outcome: GateOutcome | None = None
    mail: MailboxMessage | None = None
    fields: dict[str, Any] = {}
    writes: tuple[Write, ...] = ()
    if args.kind is GateKind.MAILBOX and (heads := mailbox.heads(suspension, args.receives)):
        if (mail := mailbox.first_of(heads, rows.messages)) is None:
            return Decision(NeedsMessages(heads))
        outcome = GateOutcome.SATISFIED
        fields["mail"] = mailbox.mark_received(suspension, mail.mailbox)
        writes += (Delete(MailboxMessage, (row.execution_id, mail.mailbox, mail.seq)),)
    if args.kind is GateKind.CHILDREN:
        gate, outcome = apply_child_outcomes(
            gate, {completion.child_id: completion.outcome for completion in rows.ends}
        )
    if signer is not None:
        fresh = (
            waitpoint_rules.new_waitpoint(row, signer, *id_and_key, gate=args.name, activated_at=NOW)
            for id_and_key in args.waitpoints
        )
        waitpoints = (msgspec.structs.replace(waitpoint, expires_at=gate.expires_at) for waitpoint in fresh)
        writes += waitpoint_rules.waitpoint_writes(waitpoints, rows.waitpoints)
    return _open_decision(rows, row, args.name, gate, outcome, mail, fields, writes, signer)


def _open_decision(
    rows: GateRows,
    row: Execution,
    name: str,
    gate: Gate,
    outcome: GateOutcome | None,
    mail: MailboxMessage | None,
    fields: dict[str, Any],
    writes: tuple[Write, ...],
    signer: SigningKey | None,
) -> Decision[OpenGate | GateMemo | NeedsMessages]:
    """Return the decision for a new gate: it is stored as open, or its memo is if it closes at once."""
    suspension = wait_state.suspension_or_new(rows.root, row)
    if outcome is None:
        answer: Any = OpenGate(name, gate, (signer.kid,) * len(gate.waitpoints) if signer is not None else ())
        fields |= wait_state.gate_columns(wait_state.open_gates(suspension) | {name: gate})
    else:
        answer = memo = partial(gate_memo, row.execution_id, name, gate, outcome, mail, ends=rows.ends)
        writes += (Insert(memo(NOW)),)

    change = Change(
        guards=(seen(row, live(row)), wait_state.seen_suspension(rows.root, row.execution_id)),
        writes=(Upsert(msgspec.structs.replace(suspension, **fields)), *writes, *wait_state.mark_has_waits(row)),
    )
    return Decision(answer, change)


def new_gate(args: GateArgs, now: int) -> Gate:
    """Return the gate that these arguments describe, opened now."""
    expires_at = args.expires_at if args.expires_in_ms is None else now + args.expires_in_ms
    condition = None if args.condition is None else conditions.encode_condition(args.condition)
    return view_of(Gate, args, opened_at=now, expires_at=expires_at, condition=condition)


def deliver_child_completions(
    row: Execution | None,
    suspension: Suspension | None,
    completions: Sequence[ChildCompletion],
    now: int,
    *,
    earlier: Sequence[ChildCompletion] = (),
) -> Decision[int]:
    """Report completions of children to the open gates of their parent; answer how many there were.

    `earlier` were delivered before: a gate that closes keeps the results of all its children.
    """
    if not completions:
        return Decision(0)
    if row is None:
        parent = completions[0].parent_id
        deletes = tuple(Delete(ChildCompletion, (parent, end.child_id, end.life)) for end in completions)
        return Decision(
            len(completions), Change(guards=(wait_state.seen_suspension(suspension, parent),), writes=deletes)
        )
    outcomes = {end.child_id: end.outcome for end in completions}
    changed: dict[str, Gate] = {}
    closed: dict[str, tuple[Gate, GateOutcome, MailboxMessage[Draft] | None]] = {}
    for name, gate in wait_state.open_gates(suspension).items():
        if gate.kind is not GateKind.CHILDREN or wait_state.is_gate_expired(gate, now):
            continue
        updated, end = apply_child_outcomes(gate, outcomes)
        if updated is not gate:
            changed[name] = updated
        if end is not None:
            closed[name] = (updated, end, None)
    delivered: tuple[Write, ...] = tuple(Upsert(msgspec.structs.replace(end, due_at=None)) for end in completions)
    guards = (seen(row), wait_state.seen_suspension(suspension, row.execution_id))
    if suspension is None or not changed:
        if row.lifecycle_phase is LifecyclePhase.ACTIVE:
            # A gate for these children may be in flight, decided before they ended. Writing the row makes it conflict.
            delivered += (Patch(Execution, (row.execution_id,), {"last_mutation_at": NOW}),)
        return Decision(len(completions), Change(guards=guards, writes=delivered))
    fields, writes = update_gates(row, suspension, changed, closed, ends=(*earlier, *completions))
    suspension_write = Upsert(msgspec.structs.replace(suspension, **fields))
    return Decision(len(completions), Change(guards=guards, writes=(suspension_write, *delivered, *writes)))
