"""retry: split from flowfabric.rules.policy."""

from __future__ import annotations

from typing import Final, TypeAlias, TypeGuard, assert_never

import msgspec

"""retry: split from flowfabric.rules.policy."""
"""retry: split from flowfabric.rules.policy."""

NEVER_RETRIED: Final = frozenset({"permanent", "cancelled"})


class FixedBackoff(msgspec.Struct, frozen=True, tag="fixed", omit_defaults=True):
    """The same pause before every retry."""

    delay_ms: int = 1000


class ExponentialBackoff(msgspec.Struct, frozen=True, tag="exponential", omit_defaults=True):
    """A pause that grows with every retry, up to a longest one."""

    initial_delay_ms: int = 1000
    max_delay_ms: int = 60_000
    multiplier: float = 2.0
    jitter: bool = False


BackoffPolicy: TypeAlias = FixedBackoff | ExponentialBackoff


class RetryPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """How often and how soon a failed attempt is followed by another."""

    max_retries: int = 3
    backoff: BackoffPolicy = FixedBackoff()
    retryable_categories: tuple[str, ...] = ()


# ---------------------------------------------------------------------------------------------------------------
# Deciding by the terms


def may_retry(
    retry: RetryPolicy | None, retry_count: int, category: str, klass: str | None = None
) -> TypeGuard[RetryPolicy]:
    """Whether a failure is followed by another attempt; `retry_count` is the count before this failure.

    On the wire the category is all that tells the class, so without `klass` it stands for both.
    """
    if retry is None or retry_count >= retry.max_retries or (klass or category) in NEVER_RETRIED:
        return False
    return not retry.retryable_categories or category in retry.retryable_categories


def backoff_ms(retry: RetryPolicy, retry_count: int, chance: float) -> int:
    """The pause before the next attempt; `retry_count` is the count before this failure.

    With jitter, `chance` (from 0 up to but not including 1) picks evenly between half the pause and the whole.
    """
    match retry.backoff:
        case FixedBackoff(delay_ms=delay):
            return delay
        case ExponentialBackoff() as growing:
            delay = _grown(growing, retry_count)
            if not growing.jitter:
                return delay
            half = (delay + 1) // 2
            return min(half + int(chance * (delay - half + 1)), delay)
        case _:
            assert_never(retry.backoff)


def _grown(growing: ExponentialBackoff, retry_count: int) -> int:
    if not growing.initial_delay_ms:
        return 0
    try:
        return int(min(growing.initial_delay_ms * growing.multiplier**retry_count, growing.max_delay_ms))
    except OverflowError:
        return growing.max_delay_ms
