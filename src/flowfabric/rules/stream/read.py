"""Read: stream cursors, pages and the fields of each entry."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

import msgspec

from flowfabric.errors import InvalidInput
from flowfabric.model.stream import Frame, Stream
from flowfabric.rules.validation import MAX_INTEGER

MAX_COUNT = 10_000
START, END = "start", "end"

_ID = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?").fullmatch


class FrameView(msgspec.Struct, frozen=True):
    """An entry: its id and its fields, all of them text."""

    id: str
    fields: dict[str, str]


class StreamPage(msgspec.Struct, frozen=True):
    """Entries in order; for a closed stream also when and why it was closed."""

    frames: list[FrameView]
    closed_at: int | None = None
    closed_reason: str | None = None


class SummaryView(msgspec.Struct, frozen=True):
    """The merged document of all summary frames."""

    document_json: str
    version: int
    patch_kind: str
    last_updated_ms: int
    first_applied_ms: int


class StreamPosition(msgspec.Struct, frozen=True, order=True):
    """A position in a stream."""

    ms: int
    seq: int


FIRST = StreamPosition(0, 0)
LAST = StreamPosition(MAX_INTEGER, MAX_INTEGER)


def parse_cursor(text: object) -> str | tuple[int, int | None]:
    """Parse `start`, `end`, or a time with an optional sequence number. Raises `InvalidInput`."""
    if not isinstance(text, str):
        raise InvalidInput("stream cursor: not a text")
    if not text:
        raise InvalidInput("stream cursor: empty")
    if text in ("-", "+"):
        raise InvalidInput("stream cursor: a bare marker; write start or end")
    if text in (START, END):
        return text
    matched = _ID(text)
    if matched is None:
        raise InvalidInput("stream cursor: malformed; write start, end, <ms> or <ms>-<seq>")
    seq = matched[2]
    return min(int(matched[1]), MAX_INTEGER), None if seq is None else min(int(seq), MAX_INTEGER)


def lower_bound(text: object) -> StreamPosition:
    """Return the first position that a cursor includes."""
    cursor = parse_cursor(text)
    if isinstance(cursor, str):
        return FIRST if cursor == START else LAST
    return StreamPosition(cursor[0], cursor[1] or 0)


def upper_bound(text: object) -> StreamPosition:
    """Return the last position that a cursor includes; a bare time includes all its entries."""
    cursor = parse_cursor(text)
    if isinstance(cursor, str):
        return FIRST if cursor == START else LAST
    return StreamPosition(cursor[0], MAX_INTEGER if cursor[1] is None else cursor[1])


def tail_position(text: object) -> StreamPosition:
    """Return the position after which a tail continues."""
    cursor = parse_cursor(text)
    if isinstance(cursor, str):
        raise InvalidInput(f"stream cursor: {cursor} is no position to continue from; use an entry's id, such as 0-0")
    return StreamPosition(cursor[0], cursor[1] or 0)


def check_count(count_limit: object) -> int:
    """Return the requested number of entries, or raise `InvalidInput`."""
    if not isinstance(count_limit, int) or isinstance(count_limit, bool) or count_limit < 1:
        raise InvalidInput("count_limit must be >= 1")
    if count_limit > MAX_COUNT:
        raise InvalidInput("count_limit_exceeds_hard_cap")
    return count_limit


def first_page(stream: Stream, after: StreamPosition) -> int:
    """Return a page at or before the entry that follows a position."""
    pages: Sequence[Sequence[int]] = msgspec.json.decode(stream.pages)
    starting = [page for page, ms, seq in pages if StreamPosition(ms, seq) <= after]
    return max(starting, default=0)


def is_expired(stream: Stream, now: int) -> bool:
    """True if all frames are best-effort frames that have expired."""
    return stream.vanishes_at is not None and stream.vanishes_at <= now


def frame_view(frame: Frame) -> FrameView:
    """Return the entry for readers; a payload that is not UTF-8 is base64."""
    try:
        payload, encoding = frame.payload.decode(), "utf8"
    except UnicodeDecodeError:
        payload, encoding = base64.b64encode(frame.payload).decode(), "base64"
    fields = {
        "frame_type": frame.frame_type,
        "ts": str(frame.ts),
        "payload": payload,
        "encoding": encoding,
        "source": "worker",
        "mode": frame.mode.value,
    }
    if frame.correlation_id is not None:
        fields["correlation_id"] = frame.correlation_id
    if frame.summary_version is not None:
        fields["summary_version"] = str(frame.summary_version)
    if frame.ttl_ms is not None:
        fields["ttl_ms"] = str(frame.ttl_ms)
    return FrameView(f"{frame.ms}-{frame.seq}", fields)
