"""Resume conditions: what a suspended execution waits for, as a tree of plain records.

Only `AllConditions` nests. There is no "any of": that is a `Count` of one. `UnknownCondition` is a node of a later
release; it is kept and never true.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec


class CountKind(StrEnum):
    """What makes two satisfiers of a count distinct."""

    DISTINCT_WAITPOINTS = "DistinctWaitpoints"
    DISTINCT_SIGNALS = "DistinctSignals"
    DISTINCT_SOURCES = "DistinctSources"


class ByName(msgspec.Struct, frozen=True):
    """Match signals of exactly this name."""

    name: str


class Wildcard(msgspec.Struct, frozen=True):
    """Match signals of any name."""


Matcher = ByName | Wildcard


class Single(msgspec.Struct, frozen=True):
    """One matching signal on one waitpoint."""

    waitpoint_key: str
    matcher: Matcher = Wildcard()


class OperatorOnly(msgspec.Struct, frozen=True):
    """Only an operator can resume."""


class TimeoutOnly(msgspec.Struct, frozen=True):
    """Only the timeout or an operator can resume."""


class AllConditions(msgspec.Struct, frozen=True):
    """All members, in any order."""

    members: tuple[Condition, ...]


class Count(msgspec.Struct, frozen=True):
    """At least `n` distinct satisfiers on any of the waitpoints; without a matcher any name counts."""

    n: int
    count_kind: CountKind
    waitpoints: tuple[str, ...]
    matcher: Matcher | None = None


class UnknownCondition(msgspec.Struct, frozen=True):
    """A node of a later release, as it was stored."""

    stored: Any


Condition = Single | OperatorOnly | TimeoutOnly | AllConditions | Count | UnknownCondition
