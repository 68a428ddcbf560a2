"""Lanes: the number of partitions that the executions of a lane are spread over."""

from __future__ import annotations

from typing import Generic

import msgspec

from flowfabric.model.instant import Instant


class Lane(msgspec.Struct, Generic[Instant], frozen=True):
    """A lane whose spread was changed; a lane without a row has spread 1."""

    lane_id: str
    spread: int  # this applies from `effective_at` on
    previous: int  # and this until then
    effective_at: Instant
    former: str = "[]"  # earlier spreads as JSON: [[spread, when it last ended], …]
    revision: int = 0


class LaneSpread(msgspec.Struct, frozen=True):
    """The number of partitions of a lane now, and the number that follows if a change is not yet in effect."""

    lane_id: str
    spread: int
    next_spread: int | None = None
    effective_at: int | None = None  # when `next_spread` takes effect, in milliseconds since the epoch
