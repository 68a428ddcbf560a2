"""`Retry`: how often a failed attempt is retried, and with which backoff."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.errors import InvalidInput
from flowfabric.sdk import validation
from flowfabric.sdk.durations import Duration, to_ms


class Retry(msgspec.Struct, frozen=True):
    """A retry policy: up to `max` retries with exponential backoff from `base`, by `factor`, up to `cap`.

    `only` names the failures that are retried, by the name of the exception; empty for all.
    """

    max: int = 3
    base: Duration = "1s"
    factor: float = 2.0
    cap: Duration = "60s"
    jitter: bool = True
    only: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        validation.validate_int("max", self.max, minimum=0)
        if not validation.validate_amount("factor", self.factor):
            raise InvalidInput("factor: 0 leaves no time between two attempts")
        validation.validate_each("only", str, self.only, '("ConnectionError",)')
        to_ms(self.base, "base")
        to_ms(self.cap, "cap")

    def policy(self) -> dict[str, Any]:
        """Return the retry policy in the form of the engine."""
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
