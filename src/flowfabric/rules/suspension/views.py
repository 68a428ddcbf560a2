"""A suspension as people and programs read it, open or closed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flowfabric.model.condition import Condition
from flowfabric.model.suspension import Requester, Signal, Suspension, TimeoutBehavior
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

    A function that is parked waits on `gates`, and has neither a waitpoint nor a condition of its own.
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


def suspension_record(root: Suspension, signals: Sequence[Signal]) -> SuspensionRecord | None:
    """The suspension in full, with the signals that closed it; None when there never was one."""
    if root.suspension_id is None:
        return None
    bound = [BoundWaitpoint(one.waitpoint_id, one.waitpoint_key) for one in wait_encoding.bound_waitpoints(root)]
    return SuspensionRecord(
        suspension_id=root.suspension_id,
        execution_id=root.execution_id,
        attempt_index=root.attempt_index or 0,
        waitpoint_id=bound[0].waitpoint_id if bound else None,
        waitpoint_key=bound[0].waitpoint_key if bound else None,
        additional_waitpoints=bound[1:],
        gates=gate_rules.parked_on(root),
        reason_code=root.reason_code or "",
        requested_by=root.requested_by,
        continuation_metadata_pointer=root.continuation_metadata_pointer,
        created_at=root.created_at or 0,
        timeout_at=root.timeout_at,
        timeout_behavior=root.timeout_behavior,
        resume_condition=None if root.resume_condition is None else conditions.decode_condition(root.resume_condition),
        resume_policy=msgspec.json.decode(root.resume_policy or "{}", type=ResumePolicy),
        last_signal_at=root.last_signal_at,
        satisfied_at=root.satisfied_at,
        closed_at=root.closed_at,
        close_reason=root.close_reason,
        closer_signal_id=root.closer_signal_id,
        all_satisfier_signals=[one.signal_id for one in signals],
    )
