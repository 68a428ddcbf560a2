"""Views of suspensions for readers, open or closed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowfabric.model.condition import Condition
from flowfabric.model.suspension import Requester, Signal, Suspension, TimeoutBehavior
from flowfabric.model.view import view_of
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.suspension import conditions
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension.arguments import ResumePolicy


class BoundWaitpoint(msgspec.Struct, frozen=True):
    """A waitpoint of a suspension."""

    waitpoint_id: str
    waitpoint_key: str


class SuspensionRecord(msgspec.Struct, frozen=True):
    """The open suspension of an execution, or the last one that was closed.

    A parked durable function waits on `gates` and has neither a waitpoint nor a condition of its own.
    """

    suspension_id: str
    execution_id: str
    attempt_index: int
    waitpoint_id: str | None
    waitpoint_key: str | None
    additional_waitpoints: list[BoundWaitpoint]
    gates: list[str]
    reason_code: str
    requested_by: Requester | None
    continuation_metadata_pointer: str | None
    created_at: int
    timeout_at: int | None
    timeout_behavior: TimeoutBehavior | None
    resume_condition: Condition | None
    resume_policy: ResumePolicy
    last_signal_at: int | None
    satisfied_at: int | None
    closed_at: int | None
    close_reason: str | None
    closer_signal_id: str | None
    all_satisfier_signals: list[str]


def suspension_record(suspension: Suspension, signals: Sequence[Signal]) -> SuspensionRecord | None:
    """Return the suspension with the signals that closed it; None if there never was one."""
    if suspension.suspension_id is None:
        return None
    bound = [BoundWaitpoint(ref.waitpoint_id, ref.waitpoint_key) for ref in wait_encoding.bound_waitpoints(suspension)]
    condition = suspension.resume_condition
    return view_of(
        SuspensionRecord,
        suspension,
        attempt_index=suspension.attempt_index or 0,
        waitpoint_id=bound[0].waitpoint_id if bound else None,
        waitpoint_key=bound[0].waitpoint_key if bound else None,
        additional_waitpoints=bound[1:],
        gates=gate_rules.parked_on(suspension),
        reason_code=suspension.reason_code or "",
        created_at=suspension.created_at or 0,
        resume_condition=None if condition is None else conditions.decode_condition(condition),
        resume_policy=msgspec.json.decode(suspension.resume_policy or "{}", type=ResumePolicy),
        all_satisfier_signals=[signal.signal_id for signal in signals],
    )
