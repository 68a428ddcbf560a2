"""Exceptions that a handler raises to control retries, and those that a caller of `Run.result` gets."""

from __future__ import annotations

from flowfabric.errors import FabricError
from flowfabric.model.failure import StoredFailure
from flowfabric.sdk.durations import Duration, to_ms

LEASE_LOST_KINDS = ("stale_lease", "lease_expired", "lease_revoked", "execution_not_active", "execution_not_found")


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


class StepFailed(Exception):
    """A step failed with an exception that cannot be made again, such as one of a local class or an exception group.

    `type` is the module and name of its class, `text` its text.
    """

    def __init__(self, type_name: str, text: str) -> None:
        super().__init__(type_name, text)
        self.type = type_name
        self.text = text

    def __str__(self) -> str:
        return f"{self.type}: {self.text}"


class StepTimeout(TimeoutError):
    """Raised when a try of a step takes longer than its `timeout`."""

    def __init__(self, step: str, timeout_s: float) -> None:
        super().__init__(f"step {step!r} has not returned after {timeout_s:g} s")
        self.step = step
        self.timeout_s = timeout_s


class StepInterrupted(Exception):
    """Raised for a step with `at_most_once=True` that began in an earlier attempt, and whose end is unknown."""

    def __init__(self, step: str, run_id: str, at: str) -> None:
        super().__init__(f"step {step!r} of run {run_id} may or may not have happened at {at}")
        self.step = step
        self.run_id = run_id
        self.at = at


class Refused(Exception):
    """The function refused what was asked of it; the text is its reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotAnswered(Exception):
    """The run ended, or began a new life, without answering what was asked of it."""

    def __init__(self, run_id: str, reason: str) -> None:
        super().__init__(run_id, reason)
        self.run_id = run_id
        self.reason = reason

    def __str__(self) -> str:
        return f"run {self.run_id} did not answer: it {self.reason}"


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

    def __init__(
        self,
        run_id: str,
        task: str,
        reason: str | None,
        attempt: int | None = None,
        *,
        failure: StoredFailure | None = None,
    ) -> None:
        super().__init__(run_id, task, reason, attempt)
        self.type = "" if failure is None else failure.type  # "shop.Declined"; empty if no handler raised
        self.text = self.reason if failure is None else failure.text
        self.category = "" if failure is None else failure.category or ""


class RunCancelled(RunEnded):
    """The run was cancelled."""


class RunExpired(RunEnded):
    """The run passed its deadline, or was suspended for too long."""


class RunSkipped(RunEnded):
    """The run was skipped, because its dependencies did not end as required."""

    hint = "once what it waits for has been replayed, run.replay() lets it wait again"


def is_lease_loss(failure: BaseException | None, run_id: str) -> bool:
    """True for the refusal that shows that the handler of this run has lost its lease."""
    return isinstance(failure, FabricError) and failure.kind in LEASE_LOST_KINDS and failure.execution_id == run_id
