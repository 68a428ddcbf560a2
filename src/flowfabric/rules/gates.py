"""Gates: what a durable function waits for, and how a gate closes.

A gate is opened once, by name; a later attempt that asks for the same name finds it as it is, with the same waitpoints,
or finds what came of it. The change that closes a gate writes its memo and, when the function is parked on it, resumes
the execution: nothing is lost between the vote and the function that waited for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric.model.execution import Execution
from flowfabric.model.gate import Gate, GateEnd, GateKind, GateMemo, Mail, Vote
from flowfabric.model.obstacles import PASSING
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.suspension import Suspension, Waitpoint
from flowfabric.model.wording import some
from flowfabric.rules import conditions, waits
from flowfabric.rules.change import NOW, Insert, Write, at
from flowfabric.rules.conditions import Arrival, Effect

Closed = Mapping[str, tuple[Gate, GateEnd, Mail | None]]


def vote(
    row: Execution, root: Suspension, name: str, arrival: Arrival, seq: int, now: int
) -> tuple[str, dict[str, Any], tuple[Write, ...]]:
    """A signal to one of the gate's waitpoints: its effect, what it changes of the root, and what else it writes."""
    gate = waits.open_gates(root)[name]
    condition = conditions.read_condition(gate.condition or '"OperatorOnly"')
    effect, progress = conditions.meet(condition, waits.progress(gate.progress), arrival)
    if effect not in (Effect.SATISFIED, Effect.APPENDED):
        return effect, {}, ()
    votes = (*gate.votes, Vote(arrival.waitpoint_id, seq))
    gate = msgspec.structs.replace(gate, progress=waits.written(progress), votes=votes)
    closed: Closed = {name: (gate, GateEnd.SATISFIED, None)} if effect == Effect.SATISFIED else {}
    fields, writes = moved_on(row, root, {name: gate}, closed)
    return effect, fields, writes


def moved_on(
    row: Execution, root: Suspension, changed: Mapping[str, Gate], closed: Closed, *, reason: str = waits.RESUMED
) -> tuple[dict[str, Any], tuple[Write, ...]]:
    """What becomes of the root when gates changed and some closed, and what is written besides.

    A function that is parked on one of those that closed is resumed.
    """
    left = waits.open_gates(root) | dict(changed)
    for name in closed:
        left.pop(name, None)
    fields: dict[str, Any] = {"gates": waits.written(left)}
    writes: tuple[Write, ...] = tuple(
        Insert(memo(row.execution_id, name, gate, end, mail)) for name, (gate, end, mail) in closed.items()
    )
    if waits.is_open(root) and not closed.keys().isdisjoint(waits_on(root)):
        fields |= {"satisfied_at": NOW, "closed_at": NOW, "close_reason": reason, "due_at": None}
        writes += (waits.resumption(row, 0, ""),)
    return fields, writes


def memo(execution_id: str, name: str, gate: Gate, end: GateEnd, mail: Mail | None) -> GateMemo:
    """What is remembered of a gate that closes."""
    return GateMemo(
        execution_id=execution_id,
        gate=name,
        kind=gate.kind,
        ended_as=end,
        opened_at=gate.opened_at,
        closed_at=at(0),
        votes=waits.written(gate.votes),
        payload=mail.payload if mail is not None else None,
        payload_encoding=mail.payload_encoding if mail is not None else None,
        sender=mail.sender if mail is not None else None,
        message_id=mail.message_id if mail is not None else None,
    )


def waits_on(root: Suspension | None) -> list[str]:
    """The gates that the function is parked on."""
    text = None if root is None else root.waits_on
    return [] if text is None else msgspec.json.decode(text, type=list[str])


def awaited(name: str, gate: Gate) -> str:
    """What closes this gate, in words."""
    match gate.kind:
        case GateKind.TIMER:
            return PASSING
        case GateKind.MAILBOX:
            return f"a message to {gate.mailbox}"
        case GateKind.SIGNALS:
            return f"an answer to {name.removeprefix('approval:').partition('#')[0]}"
        case GateKind.CHILDREN:
            ended = {vote.member for vote in gate.votes}
            return f"the end of {some([child for child in gate.children if child not in ended])}"


def past(root: Suspension | None, names: Iterable[str], now: int) -> dict[str, tuple[Gate, GateEnd, Mail | None]]:
    """Those of the open gates whose own time is over, as what they close as: a timer is satisfied by that."""
    found = waits.open_gates(root)
    return {
        name: (found[name], GateEnd.SATISFIED if found[name].kind is GateKind.TIMER else GateEnd.TIMED_OUT, None)
        for name in names
        if name in found and waits.gate_is_past(found[name], now)
    }


def with_children(gate: Gate, ends: Mapping[str, str]) -> tuple[Gate, GateEnd | None]:
    """The gate after these ends of children (the first of each counts), and how it closes, if it does."""
    known = {vote.member for vote in gate.votes}
    news = [Vote(child, 0, ends[child]) for child in gate.children if child in ends and child not in known]
    gate = msgspec.structs.replace(gate, votes=(*gate.votes, *news)) if news else gate
    outcomes = [vote.outcome for vote in gate.votes]
    return gate, closed_by(outcomes, len(gate.children), gate.need, any_outcome=gate.any_outcome)


def closed_by(
    outcomes: Collection[str | None], children: int, need: int, *, any_outcome: bool = False
) -> GateEnd | None:
    """How these ends, of so many children, close a gate that needs some of them; None while they do not."""
    good = sum(any_outcome or outcome == TerminalOutcome.SUCCESS for outcome in outcomes)
    if good >= need:
        return GateEnd.SATISFIED
    return GateEnd.IMPOSSIBLE if good + children - len(outcomes) < need else None


def voted(root: Suspension, waitpoint: Waitpoint) -> set[int]:
    """The places of the signals that count towards the waitpoint's gate."""
    gate = waits.open_gates(root).get(waitpoint.gate or "")
    votes: Sequence[Vote] = () if gate is None else gate.votes
    return {vote.seq for vote in votes if vote.member == waitpoint.waitpoint_id}
