"""What became of an attempt, in one word."""

from __future__ import annotations

from enum import StrEnum

from flowfabric.model.execution import Attempt
from flowfabric.model.states import AttemptRecordState, TerminalOutcome
from flowfabric.rules.expiry import ATTEMPT_TIMEOUT

TIMEOUT = "timeout"  # the failure category of a handler that was stopped by its worker


class AttemptOutcome(StrEnum):
    """The words for it."""

    OK = "ok"
    ERROR = "error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    RETRY = "retry"


def attempt_outcome(outcome: str | None, ended: Attempt | None) -> AttemptOutcome | None:
    """What became of the attempt that ended with, or without, the life that it belongs to; None when none ended.

    `outcome` is that of the life, if it is over; `ended` the record that the attempt left. One that succeeded leaves
    none, and one that was taken over has not come to an end of its own.
    """
    if outcome == TerminalOutcome.SUCCESS:
        return AttemptOutcome.OK
    if ended is None:
        return None
    if outcome is None:
        return AttemptOutcome.RETRY if ended.attempt_state is AttemptRecordState.ENDED_FAILURE else None
    if ended.attempt_state is AttemptRecordState.ENDED_CANCELLED:
        return AttemptOutcome.CANCELLED
    if ended.failure_category == TIMEOUT or ended.failure_reason == ATTEMPT_TIMEOUT:
        return AttemptOutcome.TIMEOUT
    return AttemptOutcome.ERROR
