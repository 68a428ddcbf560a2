"""Park: suspend a durable function until one of its gates closes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flowfabric import errors
from flowfabric.handles import HandleFields
from flowfabric.model.change import Change, Upsert, lease_event, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.gate import GateMemo
from flowfabric.model.instant import NOW, Draft
from flowfabric.model.suspension import NO_TIMEOUT, Suspension, TimeoutBehavior
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension import suspend as suspend_rules
from flowfabric.rules.suspension import waitpoints as waitpoint_rules


class NeedsMessage(msgspec.Struct, frozen=True):
    """The rule has to see the message with this sequence number before it can decide."""

    seq: int


class ParkedExecution(msgspec.Struct, frozen=True):
    """The execution waits and its lease is released."""

    suspension_id: str
    holder: HandleFields


class GatesReady(msgspec.Struct, frozen=True):
    """Gates that have closed already; nothing was parked."""

    gates: tuple[str, ...]


def park(
    row: Execution | None,
    suspension: Suspension | None,
    memos: Mapping[str, GateMemo],
    names: tuple[str, ...],
    *,
    suspension_id: str,
    reason_code: str,
    fence: Fence,
    holder: HandleFields,
    now: int,
) -> Decision[ParkedExecution | GatesReady]:
    """Release the lease until one of these gates closes; if one has closed or expired, continue at once."""
    if row is None:
        return refuse(errors.NotFound("execution"))
    if refused := fences.check_lease(row, fence, now):
        return refused
    gates = wait_state.open_gates(suspension)
    unknown = [name for name in names if name not in gates and name not in memos]
    if unknown or suspension is None or not names:
        return refuse(errors.InvalidInput(f"gates: {', '.join(unknown) or 'none'} to wait for"))
    if memos:
        return Decision(GatesReady(tuple(name for name in names if name in memos)))
    guards = (seen(row, live(row)), wait_state.seen_suspension(suspension, row.execution_id))
    if expired := gate_rules.expired_gates(suspension, names, now):
        fields, writes = gate_rules.update_gates(row, suspension, {}, expired)
        suspension_write = Upsert(msgspec.structs.replace(suspension, **fields))
        return Decision(GatesReady(tuple(expired)), Change(guards=guards, writes=(suspension_write, *writes)))
    waitpoint_id = next((gate.waitpoints[0][0] for name in names if (gate := gates[name]).waitpoints), None)
    row_patch = suspend_rules.suspend_row(
        row,
        suspension_id=suspension_id,
        waitpoint_id=waitpoint_id,
        reason_code=reason_code,
        now=now,
        waits_for=" or ".join(gate_rules.describe_wait(name, gates[name]) for name in names),
        keys=[gates[name].mailbox for name in names],
    )
    change = Change(
        guards=guards,
        writes=(
            row_patch,
            Upsert(_parked_suspension(suspension, row, names, suspension_id, reason_code)),
            *waitpoint_rules.close_replaced_waitpoints(suspension, ()),
        ),
        events=(lease_event(row, "released", reason="suspend"),),
    )
    return Decision(ParkedExecution(suspension_id, holder), change)


def _parked_suspension(
    suspension: Suspension, row: Execution, names: tuple[str, ...], suspension_id: str, reason_code: str
) -> Suspension[Draft]:
    """Return the suspension row that waits on gates; it times out when the first of them expires."""
    gates = wait_state.open_gates(suspension)
    ends = [end for name in names if (end := gates[name].expires_at) is not None]
    timeout_at = min(ends, default=None)
    return Suspension(
        execution_id=suspension.execution_id,
        partition=suspension.partition,
        signal_count=suspension.signal_count,
        gates=suspension.gates,
        mail=suspension.mail,
        suspension_id=suspension_id,
        attempt_index=row.attempt_index,
        reason_code=reason_code,
        created_at=NOW,
        timeout_at=timeout_at,
        timeout_behavior=TimeoutBehavior.AUTO_RESUME,
        due_at=NO_TIMEOUT if timeout_at is None else timeout_at,
        waits_on=wait_encoding.encode_or_none(list(names)),
    )
