"""Putting work on the shelf until something happens: what every suspension does to the execution and its waitpoints."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from flowfabric.model.execution import Execution
from flowfabric.model.keys import SigningKey
from flowfabric.model.states import AttemptState, BlockingReason, EligibilityState, LifecyclePhase
from flowfabric.model.suspension import Remembered, Signal, Suspension, Waitpoint, WaitpointState
from flowfabric.rules import budgets, gates, lease, place, step, tokens, waits
from flowfabric.rules.change import NOW, Delete, Insert, Patch, Put, Write, at

BLOCKING = {
    "waiting_for_signal": BlockingReason.WAITING_FOR_SIGNAL,
    "waiting_for_approval": BlockingReason.WAITING_FOR_APPROVAL,
    "waiting_for_callback": BlockingReason.WAITING_FOR_CALLBACK,
    "waiting_for_tool_result": BlockingReason.WAITING_FOR_TOOL_RESULT,
    "waiting_for_operator_review": BlockingReason.PAUSED_BY_OPERATOR,
    "paused_by_policy": BlockingReason.PAUSED_BY_POLICY,
    "paused_by_budget": BlockingReason.WAITING_FOR_BUDGET,
    "step_boundary": BlockingReason.WAITING_FOR_SIGNAL,
    "manual_pause": BlockingReason.PAUSED_BY_OPERATOR,
}


def shelved(
    row: Execution,
    *,
    suspension_id: str,
    waitpoint_id: str | None,
    reason_code: str,
    now: int,
    waits_for: str | None = None,
    keys: Iterable[str | None] = (),
) -> Patch:
    """The row without its lease, waiting; the deadline of the whole execution keeps running.

    `keys` are what it waits on: one that names a budget lets room in that budget find it. `waits_for` says in words
    what a function waits for.
    """
    words = f"waitpoint {waitpoint_id} awaiting {reason_code}" if waits_for is None else f"waiting for {waits_for}"
    need = next((need for key in keys if (need := budgets.read_need(key, row.namespace))), None)
    fields = {
        **lease.release(row),
        "lifecycle_phase": LifecyclePhase.SUSPENDED,
        "eligibility_state": EligibilityState.NOT_APPLICABLE,
        "blocking_reason": BLOCKING.get(reason_code, BlockingReason.WAITING_FOR_SIGNAL),
        "blocking_text": f"suspended: {words if need is None else f'waiting for room in budget {need.budget_id}'}",
        "attempt_state": AttemptState.ATTEMPT_INTERRUPTED,
        "attempt_suspended_at": NOW,
        "attempt_suspension": suspension_id,
        "current_suspension_id": suspension_id,
        "current_waitpoint_id": waitpoint_id,
        "has_waits": True,
        "next_type": None,
        "next_timeout_ms": step.remaining_ms(row, now),
    }
    if need is not None:
        fields |= {"blocked_on": place.asleep_on(need.budget), "blocked_at": NOW}
    return step.moved(row, fields)


def new_waitpoint(
    row: Execution, signer: SigningKey | None, waitpoint_id: str, waitpoint_key: str, **fields: Any
) -> Waitpoint:
    """A waitpoint of the row's attempt, with the token that the key signs for it; without a key nobody can signal."""
    token = "" if signer is None else tokens.mint_token(signer, row.execution_id, waitpoint_id)
    return Waitpoint(
        waitpoint_id=waitpoint_id,
        partition=row.partition,
        execution_id=row.execution_id,
        attempt_index=row.attempt_index or 0,
        waitpoint_key=waitpoint_key,
        created_at=at(0),
        token_kid="" if signer is None else signer.kid,
        token_fingerprint=tokens.token_fingerprint(token),
        **fields,
    )


def is_taken(known: Waitpoint | None, row: Execution, root: Suspension | None, now: int) -> bool:
    """Whether a waitpoint's id cannot be used: it is open, or another execution's. A closed one may begin anew."""
    if known is None:
        return False
    return known.execution_id != row.execution_id or waits.state_of(known, root, now) is not WaitpointState.CLOSED


def placed(waitpoints: Iterable[Waitpoint], known: Container[str]) -> tuple[Write, ...]:
    """The waitpoints as rows; one whose id was used before begins anew, without the signals of then."""
    writes: list[Write] = []
    for one in waitpoints:
        key = (one.execution_id, one.waitpoint_id)
        if one.waitpoint_id in known:
            writes += [Delete(Signal, key), Delete(Remembered, key), Put(one)]
        else:
            writes.append(Insert(one))
    return tuple(writes)


def let_go(before: Suspension | None, made: Sequence[Waitpoint]) -> tuple[Write, ...]:
    """What the waitpoints of the suspension before must know once its record is replaced: that and why they closed."""
    if before is None or before.closed_at is None:
        return ()
    anew = {one.waitpoint_id for one in made}
    fields = {"closed_at": before.closed_at, "close_reason": before.close_reason}
    return tuple(
        Patch(Waitpoint, (one.waitpoint_id, before.partition), fields, unless="closed_at")
        for one in waits.bound(before)
        if one.waitpoint_id not in anew
    )


def needs(row: Execution, root: Suspension | None) -> list[budgets.Need]:
    """What an open suspension of an execution waits for, as far as that is room in budgets."""
    if root is None or not waits.is_open(root):
        return []
    keys: list[str | None] = [one.waitpoint_key for one in waits.bound(root)]
    found = waits.open_gates(root)
    keys += [found[name].mailbox for name in gates.waits_on(root) if name in found]
    return [need for key in keys if (need := budgets.read_need(key, row.namespace))]
