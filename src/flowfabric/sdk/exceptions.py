"""Exceptions that a handler raises to control retries, and those that a caller of `Run.result` gets."""

from __future__ import annotations

from flowfabric.sdk.durations import Duration, to_ms


class RetryAfter(Exception):
    """Raised by a handler that should run again later: the attempt is delayed, which does not count as a retry.

    A text of digits is a number of seconds, as in an HTTP Retry-After header.
    """

    def __init__(self, after: Duration) -> None:
        super().__init__(f"try again after {after}")
        seconds = int(after) if isinstance(after, str) and after.strip().isdecimal() else after
        self.after_ms = to_ms(seconds, "after")


class Fatal(Exception):
    """Raised by a handler to fail the run without another attempt."""


class BudgetExceeded(Exception):
    """Raised when spending or reserving would exceed a hard limit; nothing was counted."""

    def __init__(
        self, budget: str, dimension: str, *, used: int | float, limit: int | float, asked: int | float
    ) -> None:
        self.budget = budget
        self.dimension = dimension
        self.used = used
        self.limit = limit
        self.asked = asked
        super().__init__(f"budget {budget}: {dimension} is at {used} of {limit}, and {asked} more would go beyond it")


class RunEnded(Exception):
    """A run ended without a result."""

    hint = "run.replay() lets it run again"

    def __init__(self, run_id: str, task: str, reason: str | None, attempt: int | None = None) -> None:
        self.run_id = run_id
        self.task = task
        self.reason = reason or ""
        self.attempt = attempt  # the last attempt, if known
        where = run_id if attempt is None else f"{run_id} attempt {attempt}"
        super().__init__(f"{task} {where}: {self.reason or self.__doc__}")
        self.add_note(f"{self.hint}; `ff show {run_id}` shows its history")


# The docstrings of the subclasses are the message of a run that ended without a reason.
class RunFailed(RunEnded):
    """The last attempt of the run failed."""

    hint = "run.attempts() lists every attempt, run.replay() lets it run again"


class RunCancelled(RunEnded):
    """The run was cancelled."""


class RunExpired(RunEnded):
    """The run passed its deadline, or was suspended for too long."""


class RunSkipped(RunEnded):
    """The run was skipped, because its dependencies did not end as required."""

    hint = "once what it waits for has been replayed, run.replay() lets it wait again"
