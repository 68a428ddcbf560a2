"""How a handler says that it failed, and how a caller hears of it."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.sdk.durations import Duration, to_ms


class Retry(msgspec.Struct, frozen=True):
    """How often and how fast a failed attempt is followed by another."""

    max: int = 3
    base: Duration = "1s"
    factor: float = 2.0
    cap: Duration = "60s"
    jitter: bool = True
    only: tuple[str, ...] = ()  # names of failures that are worth another attempt; empty for all

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
    """Raised by a handler that should go on later: the attempt is put away until then and costs no retry."""

    def __init__(self, after: Duration) -> None:
        super().__init__(f"try again after {after}")
        self.after_ms = to_ms(after, "after")


class Fatal(Exception):
    """Raised by a handler whose failure no retry can mend."""


class BudgetExceeded(Exception):
    """What a handler wanted to spend or reserve goes beyond a hard limit; nothing was counted."""

    def __init__(self, budget: str, dimension: str, *, used: int, limit: int) -> None:
        self.budget = budget
        self.dimension = dimension
        self.used = used
        self.limit = limit
        super().__init__(f"budget {budget}: {dimension} is at {used} of {limit}")


class RunEnded(Exception):
    """A run ended without a result."""

    def __init__(self, run_id: str, task: str, reason: str | None) -> None:
        self.run_id = run_id
        self.task = task
        self.reason = reason or ""
        super().__init__(f"{task} {run_id}: {self.reason or 'no reason was given'}")


class RunFailed(RunEnded):
    """Its last attempt failed."""


class RunCancelled(RunEnded):
    """Somebody cancelled it."""


class RunExpired(RunEnded):
    """Its time was over."""


class RunSkipped(RunEnded):
    """What it depended on did not happen."""
