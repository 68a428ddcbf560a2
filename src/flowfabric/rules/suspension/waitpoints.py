"""Waitpoints: create before the wait, close by hand, expire, list for reviewers."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Delete, Guard, Insert, Patch, Upsert, Write, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.instant import NOW, Draft, FromNow
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.model.states import LifecyclePhase, OwnershipState
from flowfabric.model.suspension import IdempotencyRecord, Signal, Suspension, Waitpoint, WaitpointState
from flowfabric.model.view import view_of
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.security import keystore
from flowfabric.rules.security import waitpoint_token as waitpoint_tokens
from flowfabric.rules.suspension import conditions
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.validation import MAX_INTEGER

PROACTIVE = "proactive_close"


class PendingWaitpoint(msgspec.Struct, frozen=True):
    """A waitpoint that was created before the wait, and its token."""

    waitpoint_id: str
    token: waitpoint_tokens.WaitpointToken


class WaitpointView(msgspec.Struct, frozen=True):
    """An open waitpoint as reviewers see it, without the token."""

    waitpoint_id: str
    waitpoint_key: str
    state: WaitpointState
    required_signal_names: list[str]
    created_at: int
    activated_at: int | None
    expires_at: int | None
    execution_id: str
    token_kid: str
    token_fingerprint: str


class WaitpointRecord(msgspec.Struct, frozen=True):
    """A waitpoint in full, open or closed."""

    waitpoint_id: str
    waitpoint_key: str
    execution_id: str
    attempt_index: int
    suspension_id: str | None
    gate: str | None
    state: WaitpointState
    created_at: int
    activated_at: int | None
    expires_at: int | None
    satisfied_at: int | None
    closed_at: int | None
    close_reason: str | None
    signal_count: int
    matched_signal_count: int
    last_signal_at: int | None
    required_signal_names: list[str] = []


def create_waitpoint(
    row: Execution | None,
    suspension: Suspension | None,
    keys: Sequence[SigningKey],
    fence: Fence,
    attempt_index: int,
    *,
    waitpoint_id: str,
    waitpoint_key: str,
    expires_in_ms: int,
    now: int,
) -> Decision[PendingWaitpoint]:
    """Create a waitpoint to hand out before the wait; signals that arrive meanwhile are buffered."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is not LifecyclePhase.ACTIVE:
        return refuse(fences.not_active_error(row))
    if row.ownership_state is not OwnershipState.LEASED:
        return refuse(errors.NoActiveLease(execution_id=row.execution_id))
    if fences.has_expired(row, now):
        return refuse(errors.LeaseExpired(execution_id=row.execution_id))
    if (attempt_index, fence.lease_id, fence.lease_epoch) != (row.attempt_index, row.lease_id, row.lease_epoch):
        return refuse(fences.stale_lease_error(row))
    signer = keystore.waitpoint_signer(keys)
    if isinstance(signer, errors.FabricError):
        return refuse(signer)
    # No column holds a later instant; near the limit the sum is computed here, where it can be capped.
    expires_at = FromNow(expires_in_ms) if expires_in_ms < MAX_INTEGER // 2 else min(now + expires_in_ms, MAX_INTEGER)
    waitpoint = new_waitpoint(row, signer, waitpoint_id, waitpoint_key, expires_at=expires_at, pending_until=expires_at)
    writes: tuple[Write, ...] = (Insert(waitpoint),)
    guards: tuple[Guard, ...] = (seen(row, live(row)),)
    if suspension is None:
        writes += (Insert(Suspension(row.execution_id, row.partition)), *wait_state.mark_has_waits(row))
        guards += (wait_state.seen_suspension(None, row.execution_id),)
    token = waitpoint_tokens.WaitpointToken(waitpoint_tokens.mint_token(signer, row.execution_id, waitpoint_id))
    return Decision(PendingWaitpoint(waitpoint_id, token), Change(guards=guards, writes=writes))


def close_waitpoint(
    row: Execution | None, suspension: Suspension | None, waitpoint: Waitpoint | None, reason: str, now: int
) -> Decision[bool]:
    """Close a waitpoint by hand; an execution that waits on it keeps waiting. True if it was open."""
    if waitpoint is None or row is None or suspension is None:
        return refuse(errors.WaitpointNotFound())
    if wait_state.waitpoint_state(waitpoint, suspension, now) is WaitpointState.CLOSED:
        return Decision(False)
    return Decision(True, _close_change(row, suspension, waitpoint, reason))


def expire_pending(
    row: Execution | None, suspension: Suspension | None, waitpoint: Waitpoint | None, now: int
) -> Decision[bool]:
    """Close a waitpoint that was not activated in time, for the sweep; the execution does not change."""
    if waitpoint is None or waitpoint.pending_until is None or waitpoint.pending_until > now:
        return Decision(False)
    if row is None or suspension is None:
        return Decision(False)
    change = _close_change(row, suspension, waitpoint, wait_state.NEVER_COMMITTED)
    return Decision(True, msgspec.structs.replace(change, not_before=waitpoint.pending_until))


def _close_change(row: Execution, suspension: Suspension, waitpoint: Waitpoint, reason: str) -> Change:
    """Return the change that closes a waitpoint. It writes the suspension too, so that a signal in flight conflicts."""
    closed: Waitpoint[Draft] = msgspec.structs.replace(
        waitpoint, closed_at=NOW, close_reason=reason, pending_until=None
    )
    return Change(
        guards=(seen(row), wait_state.seen_suspension(suspension, row.execution_id)),
        writes=(Patch(Suspension, (row.execution_id,), {"partition": suspension.partition}), Upsert(closed)),
    )


def token_if_open(
    waitpoint: Waitpoint | None,
    execution_id: str,
    suspension: Suspension | None,
    keys: Sequence[SigningKey],
    now: int,
) -> waitpoint_tokens.WaitpointToken | None:
    """Return the token that was issued for a waitpoint of this execution; None if it is closed or its key is gone."""
    if waitpoint is None or waitpoint.execution_id != execution_id:
        return None
    if not waitpoint.token_kid or wait_state.waitpoint_state(waitpoint, suspension, now) is WaitpointState.CLOSED:
        return None
    token = waitpoint_tokens.remint_token(keys, waitpoint.token_kid, waitpoint.execution_id, waitpoint.waitpoint_id)
    is_issued = waitpoint_tokens.matches_stored(token, waitpoint.token_kid, waitpoint.token_fingerprint)
    return waitpoint_tokens.WaitpointToken(token) if is_issued else None


def waitpoint_view(waitpoint: Waitpoint, suspension: Suspension | None, now: int) -> WaitpointView | None:
    """Return the waitpoint for a reviewer; None if it is closed."""
    state = wait_state.waitpoint_state(waitpoint, suspension, now)
    if state is WaitpointState.CLOSED:
        return None
    return view_of(
        WaitpointView,
        waitpoint,
        state=state,
        required_signal_names=_required_names(waitpoint, suspension),
        expires_at=_expires_at(waitpoint, suspension),
    )


def waitpoint_record(waitpoint: Waitpoint, suspension: Suspension | None, now: int) -> WaitpointRecord:
    """Return the waitpoint in full."""
    is_own = (
        suspension is not None
        and suspension.suspension_id is not None
        and suspension.suspension_id == waitpoint.suspension_id
    )
    state = wait_state.waitpoint_state(waitpoint, suspension, now)
    closed_at, reason = waitpoint.closed_at, wait_state.waitpoint_close_reason(waitpoint, suspension, now)
    if closed_at is None and is_own and suspension is not None:
        closed_at = suspension.closed_at
    resumed = reason in (wait_state.RESUMED, "timed_out_auto_resume")
    return view_of(
        WaitpointRecord,
        waitpoint,
        state=state,
        expires_at=_expires_at(waitpoint, suspension),
        satisfied_at=closed_at if resumed else None,
        closed_at=closed_at,
        close_reason=reason,
        required_signal_names=_required_names(waitpoint, suspension),
    )


def _expires_at(waitpoint: Waitpoint, suspension: Suspension | None) -> int | None:
    """Return when the waitpoint expires: with its open suspension, else by itself. Escalation removes the timeout."""
    is_own = (
        suspension is not None
        and wait_state.is_open(suspension)
        and suspension.suspension_id == waitpoint.suspension_id
    )
    return suspension.timeout_at if suspension is not None and is_own else waitpoint.expires_at


def _required_names(waitpoint: Waitpoint, suspension: Suspension | None) -> list[str]:
    """Return the signal names that the condition requires here, as long as the condition is stored."""
    text = None
    if waitpoint.gate is not None and (gate := wait_state.open_gates(suspension).get(waitpoint.gate)) is not None:
        text = gate.condition
    elif (
        waitpoint.suspension_id is not None
        and suspension is not None
        and suspension.suspension_id == waitpoint.suspension_id
    ):
        text = suspension.resume_condition
    return [] if text is None else conditions.required_names(conditions.decode_condition(text), waitpoint.waitpoint_key)


def new_waitpoint(
    row: Execution, signer: SigningKey | None, waitpoint_id: str, waitpoint_key: str, **fields: Any
) -> Waitpoint[Draft]:
    """Return a waitpoint of the row's attempt with its signed token; without a key nobody can signal it."""
    token = "" if signer is None else waitpoint_tokens.mint_token(signer, row.execution_id, waitpoint_id)
    return Waitpoint(
        waitpoint_id=waitpoint_id,
        partition=row.partition,
        execution_id=row.execution_id,
        attempt_index=row.attempt_index or 0,
        waitpoint_key=waitpoint_key,
        created_at=NOW,
        token_kid="" if signer is None else signer.kid,
        token_fingerprint=waitpoint_tokens.token_fingerprint(token),
        **fields,
    )


def is_id_in_use(known: Waitpoint | None, row: Execution, suspension: Suspension | None, now: int) -> bool:
    """True if the id belongs to an open waitpoint or to another execution. The id of a closed one may be reused."""
    if known is None:
        return False
    return (
        known.execution_id != row.execution_id
        or wait_state.waitpoint_state(known, suspension, now) is not WaitpointState.CLOSED
    )


def waitpoint_writes(waitpoints: Iterable[Waitpoint[Draft]], known: Container[str]) -> tuple[Write, ...]:
    """Return the writes of new waitpoints; reusing an id deletes the former signals."""
    writes: list[Write] = []
    for waitpoint in waitpoints:
        key = (waitpoint.execution_id, waitpoint.waitpoint_id)
        if waitpoint.waitpoint_id in known:
            writes += [Delete(Signal, key), Delete(IdempotencyRecord, key), Upsert(waitpoint)]
        else:
            writes.append(Insert(waitpoint))
    return tuple(writes)


def close_replaced_waitpoints(previous: Suspension | None, created: Sequence[Waitpoint[Draft]]) -> tuple[Write, ...]:
    """Return the writes that close the waitpoints of the previous suspension before its record is replaced."""
    if previous is None or previous.closed_at is None:
        return ()
    reused = {ref.waitpoint_id for ref in created}
    fields = {"closed_at": previous.closed_at, "close_reason": previous.close_reason}
    return tuple(
        Patch(Waitpoint, (ref.waitpoint_id, previous.partition), fields, unless_set="closed_at")
        for ref in wait_encoding.bound_waitpoints(previous)
        if ref.waitpoint_id not in reused
    )
