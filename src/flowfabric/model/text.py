"""Words for people: instants, counts, lists and failures, written the same way in every sentence."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

FEW = 5  # names that fit into a sentence


def format_instant(ms: int | None) -> str:
    """An instant in UTC, as `2026-03-01 12:00:00.000Z`; empty for None."""
    if ms is None:
        return ""
    try:
        at = datetime.fromtimestamp(ms / 1000, UTC)
    except (OverflowError, ValueError):  # beyond the years that a calendar has
        return f"{ms} ms after 1970"
    return at.isoformat(" ", "milliseconds").removesuffix("+00:00") + "Z"


def pluralize(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun: `1 task`, `2 tasks`; `plural` is for nouns that take no s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def join_some(names: Sequence[str]) -> str:
    """The names; of many the first few, and how many there are besides."""
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(names[:FEW]) + more


def first_line(text: str | None) -> str:
    """What a failure says, without where it happened."""
    line, *more = (text or "").strip().splitlines() or [""]
    return line + ")" if more and line.count("(") > line.count(")") else line


def humanize(code: str) -> str:
    """A code as words: `waiting_for_signal` is `waiting for signal`."""
    return code.replace("_", " ")


def end_sentence(text: str) -> str:
    """The text with a full stop, unless it ends with a mark of its own."""
    return text if text.endswith((".", "!", "?")) else f"{text}."
