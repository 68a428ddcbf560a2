"""Joins: when several children are enough."""

from __future__ import annotations

import msgspec


class AllOf(msgspec.Struct, frozen=True):
    """Every child has to succeed."""


class AnyOf(msgspec.Struct, frozen=True):
    """One success is enough."""

    cancel_rest: bool = False


class Quorum(msgspec.Struct, frozen=True):
    """`k` successes are enough."""

    k: int
    cancel_rest: bool = False


Join = AllOf | AnyOf | Quorum


def needed(join: Join, count: int) -> int:
    """How many successes the join needs of so many children."""
    match join:
        case AllOf():
            return count
        case AnyOf():
            return 1
        case Quorum(k=k):
            return k
