"""How frames read: cursors, pages and what each entry says."""

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
    """Entries in order, and whether more can come: a stream that is closed says since when and why."""

    frames: list[FrameView]
    closed_at: int | None = None
    closed_reason: str | None = None


class SummaryView(msgspec.Struct, frozen=True):
    document_json: str
    version: int
    patch_kind: str
    last_updated_ms: int
    first_applied_ms: int


class StreamPosition(msgspec.Struct, frozen=True, order=True):
    """A place in a stream."""

    ms: int
    seq: int


FIRST = StreamPosition(0, 0)
LAST = StreamPosition(MAX_INTEGER, MAX_INTEGER)


def parse_cursor(text: object) -> str | tuple[int, int | None]:
    """`start`, `end`, or a time and perhaps a sequence number; `InvalidInput` with one of three causes otherwise."""
    if not isinstance(text, str):
        raise InvalidInput("stream cursor: not a text")
    if not text:
        raise InvalidInput("stream cursor: empty")
    if text in ("-", "+"):
        raise InvalidInput("stream cursor: a bare marker; write start or end")
    if text in (START, END):
        return text
    found = _ID(text)
    if found is None:
        raise InvalidInput("stream cursor: malformed; write start, end, <ms> or <ms>-<seq>")
    seq = found[2]
    return min(int(found[1]), MAX_INTEGER), None if seq is None else min(int(seq), MAX_INTEGER)


def lower_bound(text: object) -> StreamPosition:
    """A cursor as the first place that counts."""
    cursor = parse_cursor(text)
    if isinstance(cursor, str):
        return FIRST if cursor == START else LAST
    return StreamPosition(cursor[0], cursor[1] or 0)


def upper_bound(text: object) -> StreamPosition:
    """A cursor as the last place that counts; a bare time means its last entry."""
    cursor = parse_cursor(text)
    if isinstance(cursor, str):
        return FIRST if cursor == START else LAST
    return StreamPosition(cursor[0], MAX_INTEGER if cursor[1] is None else cursor[1])


def tail_position(text: object) -> StreamPosition:
    """A cursor that a tail can go on from."""
    cursor = parse_cursor(text)
    if isinstance(cursor, str):
        raise InvalidInput(f"stream cursor: {cursor} is no place to go on from; use an entry's id, such as 0-0")
    return StreamPosition(cursor[0], cursor[1] or 0)


def check_count(count_limit: object) -> int:
    """How many entries are asked for."""
    if not isinstance(count_limit, int) or isinstance(count_limit, bool) or count_limit < 1:
        raise InvalidInput("count_limit must be >= 1")
    if count_limit > MAX_COUNT:
        raise InvalidInput("count_limit_exceeds_hard_cap")
    return count_limit


def first_page(stream: Stream, after: StreamPosition) -> int:
    """The page on which the entry after a place stands, or a page before it."""
    pages: Sequence[Sequence[int]] = msgspec.json.decode(stream.pages)
    starting = [page for page, ms, seq in pages if StreamPosition(ms, seq) <= after]
    return max(starting, default=0)


def is_expired(stream: Stream, now: int) -> bool:
    """Whether all frames are best-effort ones whose time is over."""
    return stream.vanishes_at is not None and stream.vanishes_at <= now


def frame_view(frame: Frame) -> FrameView:
    """The entry as it is handed out; a payload that is no UTF-8 comes as base64."""
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
