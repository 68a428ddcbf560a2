"""Waitpoints on their own: made before the wait, closed without it, listed for reviewers."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.model.change import Change, Delete, Guard, Insert, Patch, Upsert, Write, from_now, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.signing_key import SigningKey
from flowfabric.model.states import LifecyclePhase, OwnershipState
from flowfabric.model.suspension import IdempotencyRecord, Signal, Suspension, Waitpoint, WaitpointState
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import lease
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.security import keystore
from flowfabric.rules.security import waitpoint_token as waitpoint_tokens
from flowfabric.rules.suspension import conditions
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.validation import MAX_INTEGER

PROACTIVE = "proactive_close"


class PendingWaitpoint(msgspec.Struct, frozen=True):
    """A waitpoint that was made before the wait, and its token."""

    waitpoint_id: str
    token: waitpoint_tokens.WaitpointToken


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
        return refuse(lease.not_active_error(row))
    if row.ownership_state is not OwnershipState.LEASED:
        return refuse(errors.NoActiveLease(execution_id=row.execution_id))
    if lease.has_expired(row, now):
        return refuse(errors.LeaseExpired(execution_id=row.execution_id))
    if (attempt_index, fence.lease_id, fence.lease_epoch) != (row.attempt_index, row.lease_id, row.lease_epoch):
        return refuse(lease.stale_lease_error(row))
    signer = keystore.waitpoint_signer(keys)
    if isinstance(signer, errors.FabricError):
        return refuse(signer)
    # No store keeps a later instant; near it, the sum is made of the time of this look.
    until = from_now(expires_in_ms) if expires_in_ms < MAX_INTEGER // 2 else min(now + expires_in_ms, MAX_INTEGER)
    waitpoint = new_waitpoint(row, signer, waitpoint_id, waitpoint_key, expires_at=until, pending_until=until)
    made: tuple[Write, ...] = (Insert(waitpoint),)
    guards: tuple[Guard, ...] = (seen(row, live(row)),)
    if root is None:
        made += (Insert(Suspension(row.execution_id, row.partition)), *wait_state.mark_has_waits(row))
        guards += (wait_state.seen_suspension(None, row.execution_id),)
    token = waitpoint_tokens.WaitpointToken(waitpoint_tokens.mint_token(signer, row.execution_id, waitpoint_id))
    return Decision(PendingWaitpoint(waitpoint_id, token), Change(guards=guards, writes=made))


def close_waitpoint(
    row: Execution | None, root: Suspension | None, waitpoint: Waitpoint | None, reason: str, now: int
) -> Decision[bool]:
    """Close a waitpoint by hand; what waits on it goes on waiting. True when it was open."""
    if waitpoint is None or row is None or root is None:
        return refuse(errors.WaitpointNotFound())
    if wait_state.waitpoint_state(waitpoint, root, now) is WaitpointState.CLOSED:
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
    change = _closed(row, root, waitpoint, wait_state.NEVER_COMMITTED)
    return Decision(True, msgspec.structs.replace(change, not_before=waitpoint.pending_until))


def _closed(row: Execution, root: Suspension, waitpoint: Waitpoint, reason: str) -> Change:
    """The root is written too, so that a signal on its way to the waitpoint is decided again."""
    closed = msgspec.structs.replace(waitpoint, closed_at=from_now(0), close_reason=reason, pending_until=None)
    return Change(
        guards=(seen(row), wait_state.seen_suspension(root, row.execution_id)),
        writes=(Patch(Suspension, (row.execution_id,), {"partition": root.partition}), Upsert(closed)),
    )


def token_if_open(
    waitpoint: Waitpoint, root: Suspension | None, keys: Sequence[SigningKey], now: int
) -> waitpoint_tokens.WaitpointToken | None:
    """The token that was given out for a waitpoint; None when it is closed, or what signed it is gone."""
    if not waitpoint.token_kid or wait_state.waitpoint_state(waitpoint, root, now) is WaitpointState.CLOSED:
        return None
    token = waitpoint_tokens.remint_token(keys, waitpoint.token_kid, waitpoint.execution_id, waitpoint.waitpoint_id)
    is_it = waitpoint_tokens.matches_stored(token, waitpoint.token_kid, waitpoint.token_fingerprint)
    return waitpoint_tokens.WaitpointToken(token) if is_it else None


def waitpoint_view(waitpoint: Waitpoint, root: Suspension | None, now: int) -> WaitpointView | None:
    """The waitpoint for a reviewer; None when it is closed."""
    state = wait_state.waitpoint_state(waitpoint, root, now)
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


def waitpoint_record(waitpoint: Waitpoint, root: Suspension | None, now: int) -> WaitpointRecord:
    """The waitpoint in full."""
    own = root is not None and root.suspension_id is not None and root.suspension_id == waitpoint.suspension_id
    state = wait_state.waitpoint_state(waitpoint, root, now)
    closed_at, reason = waitpoint.closed_at, wait_state.waitpoint_close_reason(waitpoint, root, now)
    if closed_at is None and own and root is not None:
        closed_at = root.closed_at
    resumed = reason in (wait_state.RESUMED, "timed_out_auto_resume")
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
    own = root is not None and wait_state.is_open(root) and root.suspension_id == waitpoint.suspension_id
    return root.timeout_at if root is not None and own else waitpoint.expires_at


def _names(waitpoint: Waitpoint, root: Suspension | None) -> list[str]:
    """The signal names that the condition asks for here, as long as it is known."""
    text = None
    if waitpoint.gate is not None and (gate := wait_state.open_gates(root).get(waitpoint.gate)) is not None:
        text = gate.condition
    elif waitpoint.suspension_id is not None and root is not None and root.suspension_id == waitpoint.suspension_id:
        text = root.resume_condition
    return [] if text is None else conditions.required_names(conditions.decode_condition(text), waitpoint.waitpoint_key)


def new_waitpoint(
    row: Execution, signer: SigningKey | None, waitpoint_id: str, waitpoint_key: str, **fields: Any
) -> Waitpoint:
    """A waitpoint of the row's attempt, with the token that the key signs for it; without a key nobody can signal."""
    token = "" if signer is None else waitpoint_tokens.mint_token(signer, row.execution_id, waitpoint_id)
    return Waitpoint(
        waitpoint_id=waitpoint_id,
        partition=row.partition,
        execution_id=row.execution_id,
        attempt_index=row.attempt_index or 0,
        waitpoint_key=waitpoint_key,
        created_at=from_now(0),
        token_kid="" if signer is None else signer.kid,
        token_fingerprint=waitpoint_tokens.token_fingerprint(token),
        **fields,
    )


def is_id_in_use(known: Waitpoint | None, row: Execution, root: Suspension | None, now: int) -> bool:
    """Whether a waitpoint's id cannot be used: it is open, or another execution's. A closed one may begin anew."""
    if known is None:
        return False
    return (
        known.execution_id != row.execution_id
        or wait_state.waitpoint_state(known, root, now) is not WaitpointState.CLOSED
    )


def waitpoint_writes(waitpoints: Iterable[Waitpoint], known: Container[str]) -> tuple[Write, ...]:
    """The waitpoints as rows; one whose id was used before begins anew, without the signals of then."""
    writes: list[Write] = []
    for one in waitpoints:
        key = (one.execution_id, one.waitpoint_id)
        if one.waitpoint_id in known:
            writes += [Delete(Signal, key), Delete(IdempotencyRecord, key), Upsert(one)]
        else:
            writes.append(Insert(one))
    return tuple(writes)


def close_replaced_waitpoints(before: Suspension | None, made: Sequence[Waitpoint]) -> tuple[Write, ...]:
    """What the waitpoints of the suspension before must know once its record is replaced: that and why they closed."""
    if before is None or before.closed_at is None:
        return ()
    anew = {one.waitpoint_id for one in made}
    fields = {"closed_at": before.closed_at, "close_reason": before.close_reason}
    return tuple(
        Patch(Waitpoint, (one.waitpoint_id, before.partition), fields, unless_set="closed_at")
        for one in wait_encoding.bound_waitpoints(before)
        if one.waitpoint_id not in anew
    )
