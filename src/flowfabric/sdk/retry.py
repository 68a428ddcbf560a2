"""`Retry`: how often a failed attempt or step is retried, and with which backoff."""

from __future__ import annotations

from typing import Any

import msgspec

from flowfabric.errors import InvalidInput
from flowfabric.sdk import validation
from flowfabric.sdk.durations import Duration, to_ms

NO_END = 10**9  # retries of a policy without a maximum: more than can happen


class Retry(msgspec.Struct, frozen=True):
    """A retry policy: up to `max` retries with exponential backoff from `base`, by `factor`, up to `cap`.

    Without a maximum (None) retries have no end. `only` names the failures that are retried, by their class or its
    name; empty for all. `within` is the time from the first try after which none begins; only steps have that.
    """

    max: int | None = 3
    base: Duration = "1s"
    factor: float = 2.0
    cap: Duration = "60s"
    jitter: bool = True
    only: tuple[str | type[BaseException], ...] = ()
    within: Duration | None = None

    def __post_init__(self) -> None:
        if self.max is not None:
            validation.validate_int("max", self.max, minimum=0)
        if not validation.validate_amount("factor", self.factor):
            raise InvalidInput("factor: 0 leaves no time between two attempts")
        for kind in validation.validate_each("only", object, self.only, '("ConnectionError",)'):
            if not (isinstance(kind, str) or (isinstance(kind, type) and issubclass(kind, BaseException))):
                raise InvalidInput(
                    f'only: {kind!r} is neither an exception class nor its name; write only=("OSError",)'
                )
        to_ms(self.base, "base")
        to_ms(self.cap, "cap")
        if self.within is not None:
            to_ms(self.within, "within")

    def policy(self) -> dict[str, Any]:
        """Return the retry policy of a task in the form of the engine."""
        if self.within is not None:
            raise InvalidInput("within: only the retries of a step have it; give the task a deadline= or fewer retries")
        return {
            "max_retries": NO_END if self.max is None else self.max,
            "backoff": {
                "type": "exponential",
                "initial_delay_ms": to_ms(self.base, "base"),
                "max_delay_ms": to_ms(self.cap, "cap"),
                "multiplier": self.factor,
                "jitter": self.jitter,
            },
            "retryable_categories": [kind if isinstance(kind, str) else kind.__name__ for kind in self.only],
        }

    def covers(self, failure: BaseException) -> bool:
        """True if this failure of a step is retried."""
        names = {type(failure).__name__, "timeout" if isinstance(failure, TimeoutError) else ""}
        return not self.only or any(
            kind in names if isinstance(kind, str) else isinstance(failure, kind) for kind in self.only
        )

    def backoff_ms(self, retries: int, chance: float) -> int:
        """Return the pause of a step after this many retries; with jitter, between half of it and all, by chance."""
        base_ms, cap_ms = to_ms(self.base, "base"), to_ms(self.cap, "cap")
        try:
            delay = int(min(base_ms * self.factor**retries, cap_ms))
        except OverflowError:
            delay = cap_ms
        return delay if not self.jitter else delay - int(chance * (delay // 2 + 1))
