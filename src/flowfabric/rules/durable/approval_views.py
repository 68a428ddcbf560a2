"""Views of approvals: what a durable function asks people, and which votes it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import json_limits
from flowfabric.model.condition import AllConditions, Condition, Count, Single
from flowfabric.model.execution import Execution
from flowfabric.model.gate import Gate
from flowfabric.model.suspension import Signal, Suspension
from flowfabric.model.view import view_of
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.durable.vote_schema import vote_schema
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.suspension import conditions
from flowfabric.rules.suspension import state as wait_state

SHOW_TAG = "ff.show"


class ApprovalVote(msgspec.Struct, frozen=True):
    """A vote that was accepted: who voted, when, and the value as it was sent."""

    waitpoint_id: str
    waitpoint_key: str
    by: str
    at: int
    payload: bytes | None


class Approver(msgspec.Struct, frozen=True):
    """An address of a vote: a waitpoint of the approval."""

    waitpoint_id: str
    waitpoint_key: str
    has_voted: bool


class Approval(msgspec.Struct, frozen=True):
    """An open question to people: `need` of its approvers have to vote."""

    execution_id: str
    execution_kind: str
    namespace: str
    lane_id: str
    gate: str
    name: str
    opened_at: int
    expires_at: int | None
    need: int
    approvers: list[Approver]
    votes: list[ApprovalVote]  # in the order of acceptance
    shown: Any  # the facts that the function shows, as JSON; None if there are none
    schema: dict[str, Any] | None  # a vote has to match it; None accepts any value


def approval_gates(suspension: Suspension, now: int) -> dict[str, Gate]:
    """Return the open gates that ask people, by name; an expired one asks nobody, closed or not."""
    return {
        name: gate
        for name, gate in wait_state.open_gates(suspension).items()
        if gate.waitpoints and not wait_state.is_gate_expired(gate, now)
    }


def describe_approval(
    row: Execution, kind: str, name: str, gate: Gate, signals: Mapping[str, Sequence[Signal]]
) -> Approval:
    """Return an open approval; `signals` are those of its waitpoints."""
    keys = dict(gate.waitpoints)
    tags = tag_rules.decode_tags(row.tags)
    votes = [
        ApprovalVote(waitpoint, key, signal.source_identity, signal.accepted_at, signal.payload)
        for waitpoint, key in gate.waitpoints
        for signal in signals.get(waitpoint, ())
        if signal.seq
    ]
    voted = {vote.waitpoint_id for vote in votes}
    first_key = next(iter(keys.values()))
    return view_of(
        Approval,
        row,
        execution_kind=kind,
        gate=name,
        name=gate_rules.approval_of_gate(name),
        opened_at=gate.opened_at,
        expires_at=gate.expires_at,
        need=required_votes(gate),
        approvers=[Approver(waitpoint, key, waitpoint in voted) for waitpoint, key in gate.waitpoints],
        votes=sorted(votes, key=lambda vote: (vote.at, vote.waitpoint_id)),
        shown=_decode(tags.get(SHOW_TAG)),
        schema=vote_schema(tags, first_key),
    )


def required_votes(gate: Gate) -> int:
    """Return how many votes close the gate."""
    return _required(conditions.decode_condition(gate.condition)) if gate.condition else len(gate.waitpoints)


def _required(condition: Condition) -> int:
    match condition:
        case Count():
            return condition.n
        case Single():
            return 1
        case AllConditions():
            return sum(_required(member) for member in condition.members)
        case _:
            return 0


def _decode(text: str | None) -> Any:
    try:
        return None if text is None else json_limits.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None
