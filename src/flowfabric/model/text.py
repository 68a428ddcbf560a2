"""Text for people: instants, counts, lists and failures, formatted the same way in every sentence."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

MAX_NAMES = 5  # names listed in a sentence
MILLIONTHS_SUFFIX = "_millionths"  # a dimension of a budget with fractions is stored as a whole number of millionths


def format_instant(ms: int | None) -> str:
    """Format an instant in UTC as `2026-03-01 12:00:00.000Z`; empty for None."""
    if ms is None:
        return ""
    try:
        at = datetime.fromtimestamp(ms / 1000, UTC)
    except (OverflowError, ValueError):  # beyond the range of datetime
        return f"{ms} ms after 1970"
    return at.isoformat(" ", "milliseconds").removesuffix("+00:00") + "Z"


def pluralize(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: `1 task`, `2 tasks`; `plural` is for irregular nouns."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def join_some(names: Sequence[str]) -> str:
    """Join the first few names and say how many more there are."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def first_line(text: str | None) -> str:
    """Return the first line of a failure, without its traceback."""
    if not text:
        return ""
    line, *more = text.strip().splitlines() or [""]
    return line + ")" if more and line.count("(") > line.count(")") else line


def humanize(code: str) -> str:
    """Return a code as words: `waiting_for_signal` becomes `waiting for signal`."""
    return code.replace("_", " ")


def split_dimension(dimension: str) -> tuple[str, int]:
    """Return the name of a budget's dimension for people, and how many units of the store make one of it."""
    if dimension.endswith(MILLIONTHS_SUFFIX):
        return dimension.removesuffix(MILLIONTHS_SUFFIX), 1_000_000
    return dimension, 1


def format_amount(value: int, dimension: str) -> str:
    """Format an amount of the store in the unit of its dimension for people: `2500000 usd_millionths` is 2.5."""
    _, unit = split_dimension(dimension)
    return f"{value:,}" if unit == 1 else f"{value / unit:,.6f}".rstrip("0").rstrip(".")


def end_sentence(text: str) -> str:
    """Return the text with a full stop, unless it ends with a punctuation mark."""
    return text if text.endswith((".", "!", "?")) else f"{text}."
