"""Rows of an attempt's output: the stream, its frames, and the document built from summary frames."""

from __future__ import annotations

from enum import StrEnum
from typing import Generic

import msgspec

from flowfabric.model.instant import Instant


class FrameMode(StrEnum):
    """How long a frame is kept."""

    DURABLE = "durable"
    SUMMARY = "summary"
    BEST_EFFORT = "best_effort"


class FrameKind(StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"
    EVENT = "event"
    BLOB = "blob"


class Stream(msgspec.Struct, Generic[Instant], frozen=True):
    """The aggregate root of one attempt's output; the first frame creates it.

    `kept_from` is the number of the oldest visible frame; pages that contain only older frames are deleted as a whole.
    `vanishes_at` is set while all frames are best-effort frames with a time to live.
    """

    execution_id: str
    attempt_index: int
    created_at: int
    last_ms: int
    last_seq: int
    frame_count: int
    total_bytes: int
    last_frame_at: int
    kept_from: int = 1
    pages: str = "[]"  # [[page, ms and seq of its first frame], …] as JSON
    has_durable_frame: bool = False
    vanishes_at: int | None = None
    ema_rate_hz: float | None = None
    last_append_ts_ms: int | None = None
    maxlen_applied_last: int | None = None
    closed_at: Instant | None = None
    closed_reason: str | None = None
    revision: int = 0


class Frame(msgspec.Struct, frozen=True):
    """One entry: its id is `<ms>-<seq>`, its `number` counts the frames of the stream from 1.

    Frames are grouped into pages of consecutive numbers, in the same order as their ids.
    """

    execution_id: str
    attempt_index: int
    page: int
    ms: int
    seq: int
    number: int
    ts: int
    mode: FrameMode
    frame_type: str
    payload: bytes
    correlation_id: str | None = None
    summary_version: int | None = None
    ttl_ms: int | None = None


class StreamSummary(msgspec.Struct, frozen=True):
    """The JSON object that the summary frames of an attempt have built."""

    execution_id: str
    attempt_index: int
    document: str
    version: int
    first_applied_ms: int
    last_updated_ms: int
    patch_kind: str = "json-merge-patch"
