"""Resume conditions: what a suspended execution waits for, as a tree of plain records.

Only `AllOf` nests. There is no "any of": that is a `Count` of one. `Unknown` stands for a kind of node that this
release has never heard of; it is kept, and never true.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class CountKind(StrEnum):
    """What makes two satisfiers of a count different from each other."""

    DISTINCT_WAITPOINTS = "DistinctWaitpoints"
    DISTINCT_SIGNALS = "DistinctSignals"
    DISTINCT_SOURCES = "DistinctSources"


class ByName(msgspec.Struct, frozen=True):
    """Signals of exactly this name."""

    name: str


class Wildcard(msgspec.Struct, frozen=True):
    """Signals of any name."""


Matcher = ByName | Wildcard


class Single(msgspec.Struct, frozen=True):
    """One matching signal on one waitpoint."""

    waitpoint_key: str
    matcher: Matcher = Wildcard()


class OperatorOnly(msgspec.Struct, frozen=True):
    """Nothing but an operator."""


class TimeoutOnly(msgspec.Struct, frozen=True):
    """Nothing but the timeout, or an operator."""


class AllConditions(msgspec.Struct, frozen=True):
    """Every member, in any order."""

    members: tuple[Condition, ...]


class Count(msgspec.Struct, frozen=True):
    """At least `n` different satisfiers on any of the waitpoints; without a matcher any name will do."""

    n: int
    count_kind: CountKind
    waitpoints: tuple[str, ...]
    matcher: Matcher | None = None


class UnknownCondition(msgspec.Struct, frozen=True):
    """A node of a later release, as it was stored."""

    stored: Any


Condition = Single | OperatorOnly | TimeoutOnly | AllConditions | Count | UnknownCondition
