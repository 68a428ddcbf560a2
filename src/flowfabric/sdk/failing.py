"""How a handler says that it failed, and how a caller hears of it."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.errors import InvalidInput
from flowfabric.sdk import declared
from flowfabric.sdk.durations import Duration, to_ms


class Retry(msgspec.Struct, frozen=True):
    """How often and how fast a failed attempt is followed by another."""

    max: int = 3
    base: Duration = "1s"
    factor: float = 2.0
    cap: Duration = "60s"
    jitter: bool = True
    only: tuple[str, ...] = ()  # names of failures that are worth another attempt; empty for all

    def __post_init__(self) -> None:
        declared.whole("max", self.max, least=0)
        if not declared.amount("factor", self.factor):
            raise InvalidInput("factor: 0 leaves no time between two attempts")
        declared.each("only", str, self.only, '("ConnectionError",)')
        to_ms(self.base, "base")
        to_ms(self.cap, "cap")

    def policy(self) -> dict[str, Any]:
        """The retry policy that the engine keeps."""
        return {
            "max_retries": self.max,
            "backoff": {
                "type": "exponential",
                "initial_delay_ms": to_ms(self.base, "base"),
                "max_delay_ms": to_ms(self.cap, "cap"),
                "multiplier": self.factor,
                "jitter": self.jitter,
            },
            "retryable_categories": list(self.only),
        }


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
