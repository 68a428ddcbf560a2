"""Child results: a small result travels with the completion of a child into the memo of its parent's gate.

So a function that runs from the top again reads no child. A larger result is read from the child itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowfabric.model.gate import ChildCompletion, ChildResult, Gate, GateKind, GateMemo
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.suspension import Suspension
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.suspension import state as wait_state

MAX_MEMO_BYTES = 1024 * 1024  # the memos of all children of one gate count together


def results_text(gate: Gate, ends: Sequence[ChildCompletion]) -> str | None:
    """Return the results of the gate's successful children as the gate's memo stores them; None if there are none."""
    succeeded = {vote.member for vote in gate.votes if vote.outcome == TerminalOutcome.SUCCESS}
    found: dict[str, ChildResult] = {}
    size = 0
    for end in ends:
        if end.child_id in succeeded and end.result is not None and end.outcome == TerminalOutcome.SUCCESS:
            size += len(end.result)
            if size > MAX_MEMO_BYTES:
                break
            found[end.child_id] = ChildResult(end.child_id, end.result, end.result_encoding)
    return msgspec.json.encode(list(found.values())).decode() if found else None


def results_of(memo: GateMemo) -> dict[str, ChildResult]:
    """Return the results that a memo keeps, by child."""
    results = [] if memo.results is None else msgspec.json.decode(memo.results, type=list[ChildResult])
    return {result.child_id: result for result in results}


def delivered_before(suspension: Suspension | None, completions: Sequence[ChildCompletion], now: int) -> list[str]:
    """Return the children whose completions were delivered before, of the gates that these completions close."""
    outcomes = {end.child_id: end.outcome for end in completions}
    children: dict[str, None] = {}
    for gate in wait_state.open_gates(suspension).values():
        if gate.kind is not GateKind.CHILDREN or wait_state.is_gate_expired(gate, now):
            continue
        _, end = gate_rules.apply_child_outcomes(gate, outcomes)
        if end is not None:
            children |= dict.fromkeys(vote.member for vote in gate.votes)
    return list(children)
