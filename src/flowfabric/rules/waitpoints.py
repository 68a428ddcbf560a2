"""Waitpoints on their own: made before the wait, closed without it, listed for reviewers."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowfabric import errors
from flowfabric.model.execution import Execution
from flowfabric.model.keys import SigningKey
from flowfabric.model.states import LifecyclePhase, OwnershipState
from flowfabric.model.suspension import Suspension, Waitpoint, WaitpointState
from flowfabric.rules import conditions, lease, shelving, tokens, waits
from flowfabric.rules.change import Change, Decision, Guard, Insert, Patch, Put, Write, at, live, refuse, seen
from flowfabric.rules.lease import Fence
from flowfabric.rules.limits import MAX_INTEGER

PROACTIVE = "proactive_close"


class PendingWaitpoint(msgspec.Struct, frozen=True):
    """A waitpoint that was made before the wait, and its token."""

    waitpoint_id: str
    token: tokens.WaitpointToken


class WaitpointView(msgspec.Struct, frozen=True):
    """An open waitpoint as reviewers see it; the token is not part of it."""

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
    root: Suspension | None,
    keys: Sequence[SigningKey],
    fence: Fence,
    attempt_index: int,
    *,
    waitpoint_id: str,
    waitpoint_key: str,
    expires_in_ms: int,
    now: int,
) -> Decision[PendingWaitpoint]:
    """A waitpoint to hand out before the wait; what is sent to it meanwhile is kept for the wait."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if row.lifecycle_phase is not LifecyclePhase.ACTIVE:
        return refuse(lease.not_active(row))
    if row.ownership_state is not OwnershipState.LEASED:
        return refuse(errors.NoActiveLease(execution_id=row.execution_id))
    if lease.has_lapsed(row, now):
        return refuse(errors.LeaseExpired(execution_id=row.execution_id))
    if (attempt_index, fence.lease_id, fence.lease_epoch) != (row.attempt_index, row.lease_id, row.lease_epoch):
        return refuse(lease.stale(row))
    signer = tokens.waitpoint_signer(keys)
    if isinstance(signer, errors.FabricError):
        return refuse(signer)
    # No store keeps a later instant; near it, the sum is made of the time of this look.
    until = at(expires_in_ms) if expires_in_ms < MAX_INTEGER // 2 else min(now + expires_in_ms, MAX_INTEGER)
    waitpoint = shelving.new_waitpoint(row, signer, waitpoint_id, waitpoint_key, expires_at=until, pending_until=until)
    made: tuple[Write, ...] = (Insert(waitpoint),)
    guards: tuple[Guard, ...] = (seen(row, live(row)),)
    if root is None:
        made += (Insert(Suspension(row.execution_id, row.partition)), *waits.marked(row))
        guards += (waits.guard_of(None, row.execution_id),)
    token = tokens.WaitpointToken(tokens.mint_token(signer, row.execution_id, waitpoint_id))
    return Decision(PendingWaitpoint(waitpoint_id, token), Change(guards=guards, writes=made))


def close_waitpoint(
    row: Execution | None, root: Suspension | None, waitpoint: Waitpoint | None, reason: str, now: int
) -> Decision[bool]:
    """Close a waitpoint by hand; what waits on it goes on waiting. True when it was open."""
    if waitpoint is None or row is None or root is None:
        return refuse(errors.WaitpointNotFound())
    if waits.state_of(waitpoint, root, now) is WaitpointState.CLOSED:
        return Decision(False)
    return Decision(True, _closed(row, root, waitpoint, reason))


def expire_pending(
    row: Execution | None, root: Suspension | None, waitpoint: Waitpoint | None, now: int
) -> Decision[bool]:
    """The sweep's form, for a waitpoint that was not activated in time; the execution is not touched."""
    if waitpoint is None or waitpoint.pending_until is None or waitpoint.pending_until > now:
        return Decision(False)
    if row is None or root is None:
        return Decision(False)
    change = _closed(row, root, waitpoint, waits.NEVER_COMMITTED)
    return Decision(True, msgspec.structs.replace(change, not_before=waitpoint.pending_until))


def _closed(row: Execution, root: Suspension, waitpoint: Waitpoint, reason: str) -> Change:
    """The root is written too, so that a signal on its way to the waitpoint is decided again."""
    closed = msgspec.structs.replace(waitpoint, closed_at=at(0), close_reason=reason, pending_until=None)
    return Change(
        guards=(seen(row), waits.guard_of(root, row.execution_id)),
        writes=(Patch(Suspension, (row.execution_id,), {"partition": root.partition}), Put(closed)),
    )


def open_token(
    waitpoint: Waitpoint, root: Suspension | None, keys: Sequence[SigningKey], now: int
) -> tokens.WaitpointToken | None:
    """The token that was given out for a waitpoint; None when it is closed, or what signed it is gone."""
    if not waitpoint.token_kid or waits.state_of(waitpoint, root, now) is WaitpointState.CLOSED:
        return None
    token = tokens.token_of(keys, waitpoint.token_kid, waitpoint.execution_id, waitpoint.waitpoint_id)
    is_it = tokens.is_of(token, waitpoint.token_kid, waitpoint.token_fingerprint)
    return tokens.WaitpointToken(token) if is_it else None


def view(waitpoint: Waitpoint, root: Suspension | None, now: int) -> WaitpointView | None:
    """The waitpoint for a reviewer; None when it is closed."""
    state = waits.state_of(waitpoint, root, now)
    if state is WaitpointState.CLOSED:
        return None
    return WaitpointView(
        waitpoint.waitpoint_id,
        waitpoint.waitpoint_key,
        state,
        _names(waitpoint, root),
        waitpoint.created_at,
        waitpoint.activated_at,
        _expires_at(waitpoint, root),
        waitpoint.execution_id,
        waitpoint.token_kid,
        waitpoint.token_fingerprint,
    )


def record(waitpoint: Waitpoint, root: Suspension | None, now: int) -> WaitpointRecord:
    """The waitpoint in full."""
    own = root is not None and root.suspension_id is not None and root.suspension_id == waitpoint.suspension_id
    state = waits.state_of(waitpoint, root, now)
    closed_at, reason = waitpoint.closed_at, waits.close_reason_of(waitpoint, root, now)
    if closed_at is None and own and root is not None:
        closed_at = root.closed_at
    resumed = reason in (waits.RESUMED, "timed_out_auto_resume")
    return WaitpointRecord(
        waitpoint.waitpoint_id,
        waitpoint.waitpoint_key,
        waitpoint.execution_id,
        waitpoint.attempt_index,
        waitpoint.suspension_id,
        waitpoint.gate,
        state,
        waitpoint.created_at,
        waitpoint.activated_at,
        _expires_at(waitpoint, root),
        closed_at if resumed else None,
        closed_at,
        reason,
        waitpoint.signal_count,
        waitpoint.matched_signal_count,
        waitpoint.last_signal_at,
        _names(waitpoint, root),
    )


def _expires_at(waitpoint: Waitpoint, root: Suspension | None) -> int | None:
    """When its time is over: that of the open suspension it belongs to, which escalating takes away; else its own."""
    own = root is not None and waits.is_open(root) and root.suspension_id == waitpoint.suspension_id
    return root.timeout_at if root is not None and own else waitpoint.expires_at


def _names(waitpoint: Waitpoint, root: Suspension | None) -> list[str]:
    """The signal names that the condition asks for here, as long as it is known."""
    text = None
    if waitpoint.gate is not None and (gate := waits.open_gates(root).get(waitpoint.gate)) is not None:
        text = gate.condition
    elif waitpoint.suspension_id is not None and root is not None and root.suspension_id == waitpoint.suspension_id:
        text = root.resume_condition
    return [] if text is None else conditions.required_names(conditions.read_condition(text), waitpoint.waitpoint_key)
