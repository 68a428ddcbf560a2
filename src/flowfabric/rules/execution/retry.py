"""Retry: whether a failed attempt is followed by another, and after which backoff."""

from __future__ import annotations

from typing import Final, TypeAlias, TypeGuard, assert_never

import msgspec

NEVER_RETRIED: Final = frozenset({"permanent", "cancelled"})


class FixedBackoff(msgspec.Struct, frozen=True, tag="fixed", omit_defaults=True):
    """The same delay before every retry."""

    delay_ms: int = 1000


class ExponentialBackoff(msgspec.Struct, frozen=True, tag="exponential", omit_defaults=True):
    """A delay that grows with every retry, up to `max_delay_ms`."""

    initial_delay_ms: int = 1000
    max_delay_ms: int = 60_000
    multiplier: float = 2.0
    jitter: bool = False


BackoffPolicy: TypeAlias = FixedBackoff | ExponentialBackoff


class RetryPolicy(msgspec.Struct, frozen=True, omit_defaults=True):
    """How often and how soon a failed attempt is retried. Empty `retryable_categories` means all categories."""

    max_retries: int = 3
    backoff: BackoffPolicy = FixedBackoff()
    retryable_categories: tuple[str, ...] = ()


def may_retry(
    retry: RetryPolicy | None, retry_count: int, category: str, klass: str | None = None
) -> TypeGuard[RetryPolicy]:
    """True if another attempt follows; `retry_count` is the count before this failure.

    On the wire only the category carries the failure class, so without `klass` the category decides.
    """
    if retry is None or retry_count >= retry.max_retries or (klass or category) in NEVER_RETRIED:
        return False
    return not retry.retryable_categories or category in retry.retryable_categories


def backoff_ms(retry: RetryPolicy, retry_count: int, chance: float) -> int:
    """Return the delay before the next attempt; `retry_count` is the count before this failure.

    With jitter, `chance` (0 <= chance < 1) picks evenly between half the delay and all of it.
    """
    match retry.backoff:
        case FixedBackoff(delay_ms=delay):
            return delay
        case ExponentialBackoff() as backoff:
            delay = _exponential_delay_ms(backoff, retry_count)
            if not backoff.jitter:
                return delay
            half = (delay + 1) // 2
            return min(half + int(chance * (delay - half + 1)), delay)
        case _:
            assert_never(retry.backoff)


def _exponential_delay_ms(backoff: ExponentialBackoff, retry_count: int) -> int:
    if not backoff.initial_delay_ms:
        return 0
    try:
        return int(min(backoff.initial_delay_ms * backoff.multiplier**retry_count, backoff.max_delay_ms))
    except OverflowError:
        return backoff.max_delay_ms
