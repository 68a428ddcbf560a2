"""Schemas of output streams: frames that are appended and frames that are read."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from flowfabric.api.encoding import (
    HolderRequest,
    Natural,
    Octets,
    RequestBody,
)

MAX_FRAMES = 1000
MAX_FRAMES_PER_READ = 1000
MAX_BLOCK_MS = 30_000


class BestEffortSpec(RequestBody, frozen=True):
    ttl_ms: Natural = 0
    maxlen_floor: Natural = 64
    maxlen_ceiling: Natural = 16_384
    ema_alpha: float = 0.2


class FrameSpec(RequestBody, frozen=True):
    payload: Octets | None = None
    payload_b64: bytes | None = None
    frame_type: str = ""
    mode: str = "durable"
    correlation_id: str | None = None
    best_effort: BestEffortSpec = BestEffortSpec()
    octets_field: ClassVar = "payload"


class AppendFramesRequest(HolderRequest, frozen=True):
    frames: Annotated[list[FrameSpec], Meta(min_length=1, max_length=MAX_FRAMES)]


class StreamFrame(msgspec.Struct, frozen=True):
    id: str
    fields: dict[str, str]


class ReadStreamResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A page of frames; a closed stream also has `closed_at` and `closed_reason`."""

    frames: list[StreamFrame]
    count: int
    closed_at: int | UnsetType = UNSET
    closed_reason: str | UnsetType = UNSET
