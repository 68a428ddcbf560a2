"""Markup of values: instants, lengths, ids, states and payloads. Only this module and `charts` make markup.

Payloads are hostile: they are decoded, cut and escaped, and never rendered as HTML.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from typing import Final
from zoneinfo import ZoneInfo

import msgspec
from markupsafe import Markup, escape

from flowfabric import json_limits
from flowfabric.model.states import PublicState
from flowfabric.model.text import format_amount, split_dimension
from flowfabric.server.settings import Redact

MAX_SHOWN_BYTES: Final = 64 * 1024
HIDDEN: Final = "(hidden by FF_UI_HIDE_PAYLOADS)"

STATES: Final = {  # the word, the mark and the colour class of each public state
    PublicState.WAITING: ("waiting", "○", "wait"),
    PublicState.DELAYED: ("delayed", "◷", "wait"),
    PublicState.RATE_LIMITED: ("limited", "◔", "hold"),
    PublicState.WAITING_CHILDREN: ("blocked", "◌", "hold"),
    PublicState.ACTIVE: ("running", "▶", "run"),
    PublicState.SUSPENDED: ("suspended", "❚❚", "hold"),
    PublicState.RESUMABLE: ("resumable", "○", "wait"),
    PublicState.COMPLETED: ("completed", "✓", "ok"),
    PublicState.FAILED: ("failed", "✕", "bad"),
    PublicState.CANCELLED: ("cancelled", "⊘", "off"),
    PublicState.EXPIRED: ("expired", "⌛", "bad"),
    PublicState.SKIPPED: ("skipped", "⤼", "off"),
}


@cache
def state_badge(state: str) -> Markup:
    """Render a public state: mark, word and colour."""
    word, mark, colour = STATES[PublicState(state)]
    return Markup('<span class="state {}"><span aria-hidden="true">{}</span> {}</span>').format(colour, mark, word)


def state_word(state: str) -> str:
    """Return the word for a public state, as in its badge."""
    return STATES[PublicState(state)][0]


def instant(ms: int | None, style: str = "age") -> Markup:
    """Render an instant as `<time>`: its age, which the browser keeps counting, or the time of day."""
    if ms is None:
        return Markup("–")
    try:
        at = datetime.fromtimestamp(ms / 1000, UTC)
    except (OverflowError, ValueError):
        return escape(f"{ms} ms after 1970")
    iso = at.isoformat("T", "milliseconds").replace("+00:00", "Z")
    full = at.strftime("%Y-%m-%d %H:%M:%S") + "Z"
    text = full if style == "full" else at.strftime("%H:%M:%S") if style == "clock" else _since(ms)
    # Added up, because `Markup.format` took a quarter of the time of a page with 50 runs.
    begin, title = Markup('<time datetime="') + iso, Markup(' title="') + full
    return begin + Markup('" data-') + style + title + Markup('">') + text + Markup("</time>")


def local_text(ms: int, tz: str) -> str:
    """Return an instant as a clock of a time zone shows it."""
    return datetime.fromtimestamp(ms / 1000, ZoneInfo(tz)).strftime("%Y-%m-%d %H:%M:%S %Z")


def _since(ms: int) -> str:
    return since_text(ms, int(datetime.now(UTC).timestamp() * 1000))


def since_text(ms: int, now: int) -> str:
    """Return `5 s ago` or `in 2 h`."""
    return f"in {length(ms - now)}" if ms > now else f"{length(now - ms)} ago"


def length(ms: int | None) -> str:
    """Return a length of time in its two largest units."""
    if ms is None:
        return "–"
    if ms < 1000:
        return f"{ms} ms"
    seconds = ms // 1000
    if seconds < 10:
        return f"{ms / 1000:.1f} s"
    for size, unit, less, lower in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            rest = seconds % size // less
            return f"{seconds // size} {unit}" + (f" {rest} {lower}" if rest else "")
    return f"{seconds} s"


def short_id(execution_id: str) -> str:
    """Return the end of an id: enough to distinguish the runs of a page."""
    return execution_id[-8:]


def size(number: int) -> str:
    """Return a number of bytes for people."""
    if number < 1024:
        return f"{number} B"
    return f"{number / 1024:.1f} KB" if number < 1024 * 1024 else f"{number / 1024 / 1024:.1f} MB"


class Shown(msgspec.Struct, frozen=True):
    """A payload as it is shown."""

    text: str
    bytes: int
    is_cut: bool = False
    is_json: bool = False


def payload(kind: str, data: bytes | None, *, redact: Redact | None, hide: bool) -> Shown | None:
    """Decode a payload for people: indented JSON, text, or hexadecimal; at most 64 KB of it."""
    if data is None:
        return None
    if hide:
        return Shown(HIDDEN, len(data))
    if redact is not None:
        data = redact(kind, data)
    cut = data[:MAX_SHOWN_BYTES]
    if len(data) <= MAX_SHOWN_BYTES and (formatted := _format_json(data)) is not None:
        return Shown(formatted[:MAX_SHOWN_BYTES], len(data), len(formatted) > MAX_SHOWN_BYTES, True)
    try:
        text = cut.decode("utf-8", "strict" if len(cut) == len(data) else "ignore")
    except UnicodeDecodeError:
        text = cut[: MAX_SHOWN_BYTES // 4].hex(" ")
    return Shown(visible(text), len(data), len(data) > MAX_SHOWN_BYTES)


def _format_json(data: bytes) -> str | None:
    """Indent JSON as it is, without changing a number; None if it is no JSON."""
    try:
        json_limits.check_numbers(data)
        msgspec.json.decode(data)
        return visible(msgspec.json.format(data, indent=2).decode())
    except (msgspec.DecodeError, json_limits.NumberTooLong, UnicodeDecodeError, RecursionError):
        return None


_INVISIBLE = {
    code: f"⟨U+{code:04X}⟩" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C)
}
_INVISIBLE |= {code: f"⟨U+{code:04X}⟩" for code in (*range(9), 0x0B, 0x0C, *range(0x0E, 0x20), 0x7F)}


def visible(text: str) -> str:
    """Return text with control characters and marks that change the direction of writing made visible."""
    return text.translate(_INVISIBLE)


def prose(text: str) -> Markup:
    """Render a sentence; text between backticks is code."""
    *pairs, last = visible(text).split("`")
    if len(pairs) % 2:  # the last backtick has no partner
        last = f"{pairs.pop()}`{last}"
    html = Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part) for number, part in enumerate(pairs)
    )
    return html + last


def is_link(text: str) -> bool:
    """True for a text that may become a link."""
    return text.startswith(("http://", "https://")) and len(text) < 2000 and not any(map(str.isspace, text))


def csv_text(rows: Sequence[msgspec.Struct]) -> str:
    """Return rows as CSV. A text that a spreadsheet would take for a formula begins with a quote."""
    text = io.StringIO()
    writer = csv.writer(text)
    for number, row in enumerate(rows):
        values: dict[str, object] = msgspec.to_builtins(row)
        if not number:
            writer.writerow(values)
        writer.writerow(map(_csv_cell, values.values()))
    return text.getvalue()


def _csv_cell(value: object) -> object:
    if isinstance(value, dict | list):
        value = msgspec.json.encode(value).decode()
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


FILTERS = {
    "state_badge": state_badge,
    "state_word": state_word,
    "instant": instant,
    "local": local_text,
    "length": length,
    "short_id": short_id,
    "size": size,
    "visible": visible,
    "prose": prose,
    "amount": format_amount,
    "dimension": lambda dimension: split_dimension(dimension)[0],
}
