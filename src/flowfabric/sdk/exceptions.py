"""How a handler says that it failed, and how a caller hears of it."""

from __future__ import annotations

from flowfabric.sdk.durations import Duration, to_ms


class RetryAfter(Exception):
    """Raised by a handler that should go on later: the attempt is put away until then and costs no retry.

    A text of digits is a number of seconds, as servers write it into a Retry-After header.
    """

    def __init__(self, after: Duration) -> None:
        super().__init__(f"try again after {after}")
        seconds = int(after) if isinstance(after, str) and after.strip().isdecimal() else after
        self.after_ms = to_ms(seconds, "after")


class Fatal(Exception):
    """Raised by a handler whose failure no retry can mend."""


class BudgetExceeded(Exception):
    """What a handler wanted to spend or reserve goes beyond a hard limit; nothing was counted."""

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
        self.attempt = attempt  # its last one, when that is known
        where = run_id if attempt is None else f"{run_id} attempt {attempt}"
        super().__init__(f"{task} {where}: {self.reason or self.__doc__}")
        self.add_note(f"{self.hint}; `ff show {run_id}` tells what became of it")


class RunFailed(RunEnded):
    """Its last attempt failed."""

    hint = "run.attempts() tells of every attempt, run.replay() lets it run again"


class RunCancelled(RunEnded):
    """Somebody cancelled it."""


class RunExpired(RunEnded):
    """Its time was over."""


class RunSkipped(RunEnded):
    """What it depended on did not happen."""

    hint = "once what it waits for has been replayed, run.replay() lets it wait again"
