"""retry: split from flowfabric.sdk.failing."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.errors import InvalidInput
from flowfabric.sdk import validation
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
        validation.validate_int("max", self.max, minimum=0)
        if not validation.validate_amount("factor", self.factor):
            raise InvalidInput("factor: 0 leaves no time between two attempts")
        validation.validate_each("only", str, self.only, '("ConnectionError",)')
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
