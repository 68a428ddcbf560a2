"""Lengths of time as people write them: "30s", "7d", seconds, or a timedelta."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TypeAlias

from flowfabric.errors import InvalidInput

Duration: TypeAlias = str | int | float | timedelta

_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d|w)\s*")


def to_ms(length: Duration, name: str = "duration", *, minimum_ms: int = 0) -> int:
    """Convert a length of time to whole milliseconds; numbers are seconds, texts are like "1h30m"."""
    match length:
        case bool():
            raise InvalidInput(f"{name}: {length!r} is no length of time")
        case timedelta():
            ms = length.total_seconds() * 1000
        case int() | float():
            ms = length * 1000
        case str():
            ms = _parse(length, name)
        case _:
            raise InvalidInput(f"{name}: {length!r} is no length of time")
    if not minimum_ms <= ms < 2**53:
        raise InvalidInput(f"{name}: {length!r} is out of range")
    return round(ms)


def _parse(text: str, name: str) -> float:
    position, total_ms = 0, 0.0
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            break
        total_ms += float(part[1]) * _UNITS[part[2]]
        position = part.end()
    if not text or position != len(text):
        raise InvalidInput(f'{name}: {text!r} is no length of time; write it like "30s", "5m", "1h30m" or "7d"')
    return total_ms


def to_seconds(length: Duration | None) -> float | None:
    """Convert a timeout to seconds; None stays None, and a negative number is 0, as the rest of an elapsed time."""
    if length is None or (isinstance(length, int | float) and length <= 0):
        return None if length is None else 0.0
    return to_ms(length, "timeout") / 1000
