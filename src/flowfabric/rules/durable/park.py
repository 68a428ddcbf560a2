"""park: split from flowfabric.rules.parking."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flowfabric import errors
from flowfabric.handles import HandleFields
from flowfabric.model.change import Change, Upsert, from_now, lease_event, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import GateMemo
from flowfabric.model.suspension import NO_TIMEOUT, Suspension, TimeoutBehavior
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.execution import lease
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension import suspend as suspend_rules
from flowfabric.rules.suspension import waitpoints as waitpoint_rules


class NeedsMessage(msgspec.Struct, frozen=True):
    """The rule has to see the message at this place before it can decide."""

    seq: int


class ParkedExecution(msgspec.Struct, frozen=True):
    """The execution waits; the lease is gone."""

    suspension_id: str
    holder: HandleFields


class GatesReady(msgspec.Struct, frozen=True):
    """Something that was to be waited for is there already; nothing was parked."""

    gates: tuple[str, ...]


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
) -> Decision[ParkedExecution | GatesReady]:
    """Put the work away until one of these gates closes; if one has closed, or its time is over, go on at once."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := lease.check_lease(row, fence, now):
        return refused
    found = wait_state.open_gates(root)
    unknown = [name for name in names if name not in found and name not in memos]
    if unknown or root is None or not names:
        return refuse(errors.InvalidInput(f"gates: {', '.join(unknown) or 'none'} to wait for"))
    if memos:
        return Decision(GatesReady(tuple(name for name in names if name in memos)))
    guards = (seen(row, live(row)), wait_state.seen_suspension(root, row.execution_id))
    if past := gate_rules.expired_gates(root, names, now):
        fields, writes = gate_rules.update_gates(row, root, {}, past)
        kept = Upsert(msgspec.structs.replace(root, **fields))
        return Decision(GatesReady(tuple(past)), Change(guards=guards, writes=(kept, *writes)))
    waitpoint_id = next((gate.waitpoints[0][0] for name in names if (gate := found[name]).waitpoints), None)
    shelf = suspend_rules.suspend_row(
        row,
        suspension_id=suspension_id,
        waitpoint_id=waitpoint_id,
        reason_code=reason_code,
        now=now,
        waits_for=" or ".join(gate_rules.describe_wait(name, found[name]) for name in names),
        keys=[found[name].mailbox for name in names],
    )
    change = Change(
        guards=guards,
        writes=(
            shelf,
            Upsert(_waiting(root, row, names, suspension_id, reason_code)),
            *waitpoint_rules.close_replaced_waitpoints(root, ()),
        ),
        events=(lease_event(row, "released", reason="suspend"),),
    )
    return Decision(ParkedExecution(suspension_id, holder), change)


def _waiting(
    root: Suspension, row: Execution, names: tuple[str, ...], suspension_id: str, reason_code: str
) -> Suspension:
    """The root with a suspension on gates in place of the one before; its timeout is the first of theirs."""
    found = wait_state.open_gates(root)
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
        created_at=from_now(0),
        timeout_at=timeout_at,
        timeout_behavior=TimeoutBehavior.AUTO_RESUME,
        due_at=NO_TIMEOUT if timeout_at is None else timeout_at,
        waits_on=wait_encoding.encode_or_none(list(names)),
    )
