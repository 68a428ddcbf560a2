"""Append: which frames the lease holder may append to its output stream, in which pages, and how much is kept.

Frames are decided in batches, as if one after another, and committed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import msgspec

from flowfabric import errors, merge_patch
from flowfabric.model.change import Change, Delete, Guard, Insert, Patch, Upsert, Write, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.instant import NOW
from flowfabric.model.states import LifecyclePhase, OwnershipState
from flowfabric.model.stream import Frame, FrameMode, Stream, StreamSummary
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import fences
from flowfabric.rules.execution.fences import Fence

MAX_FRAME_BYTES = 65_536
PAGE = 512
MAX_KEPT_FRAMES = {FrameMode.DURABLE: 10_000, FrameMode.SUMMARY: 64}
FLOOR, CEILING, ALPHA = 64, 16_384, 0.2
_SLACK = 1e-9  # keeps rounding errors from raising `ceil` by one


class BestEffort(msgspec.Struct, frozen=True):
    """How long best-effort frames are relevant, which determines how many are kept."""

    ttl_ms: int = 0
    maxlen_floor: int = FLOOR
    maxlen_ceiling: int = CEILING
    ema_alpha: float = ALPHA

    @property
    def normalized(self) -> BestEffort:
        """The settings with every invalid number replaced by its default."""
        floor = self.maxlen_floor if self.maxlen_floor > 0 else FLOOR
        ceiling = self.maxlen_ceiling if self.maxlen_ceiling > 0 else CEILING
        alpha = self.ema_alpha if 0 < self.ema_alpha <= 1 else ALPHA
        return BestEffort(self.ttl_ms, floor, max(floor, ceiling), alpha)


class FrameArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A frame and the fence by which its writer proves that it holds the lease."""

    payload: bytes
    frame_type: str
    attempt_index: int
    fence: Fence
    mode: FrameMode = FrameMode.DURABLE
    best_effort: BestEffort = BestEffort()
    correlation_id: str | None = None


class Appended(msgspec.Struct, frozen=True):
    """The position of an appended frame."""

    stream_id: str
    frame_count: int
    summary_version: int | None = None


AppendResults = list[Appended | errors.FabricError]


def append_frames(
    row: Execution | None, stream: Stream | None, summary: StreamSummary | None, requests: Sequence[FrameArgs], now: int
) -> Decision[AppendResults]:
    """Append frames in order; each is accepted or refused on its own."""
    batch = _AppendBatch(row, stream, summary, now)
    answers = [batch.refused(request) or batch.add(request) for request in requests]
    if row is None or not batch.frames:
        return Decision(answers)
    return Decision(answers, batch.change(row))


class _AppendBatch:
    """The stream in memory while frames are added to it."""

    def __init__(self, row: Execution | None, stream: Stream | None, summary: StreamSummary | None, now: int) -> None:
        self.row = row
        self.now = now
        self.before = stream
        self.frames: list[Frame] = []
        self.state: dict[str, Any] = {} if stream is None else msgspec.structs.asdict(stream)
        if row is not None and stream is None:
            self.state = msgspec.structs.asdict(Stream(row.execution_id, row.attempt_index or 0, now, 0, 0, 0, 0, now))
        self.pages: list[list[int]] = msgspec.json.decode(self.state.get("pages", "[]"))
        self.summary = summary
        self.document: dict[str, Any] | errors.FabricError = {}
        if summary is not None:
            self.document = merge_patch.decode_document(summary.document)

    def refused(self, request: FrameArgs) -> errors.FabricError | None:
        row = self.row
        if row is None or row.lifecycle_phase is not LifecyclePhase.ACTIVE:
            return errors.StreamClosed()
        if row.ownership_state is not OwnershipState.LEASED or fences.has_expired(row, self.now):
            return errors.StaleOwnerCannotAppend(execution_id=row.execution_id)
        held = (request.attempt_index, request.fence.lease_id, request.fence.lease_epoch)
        if held != (row.attempt_index, row.lease_id, row.lease_epoch):
            return errors.StaleOwnerCannotAppend(execution_id=row.execution_id)
        if self.state["closed_at"] is not None:
            return errors.StreamClosed()
        return None

    def add(self, request: FrameArgs) -> Appended | errors.FabricError:
        version = None
        if request.mode is FrameMode.SUMMARY:
            patch = merge_patch.decode_patch(request.payload)
            if isinstance(patch, errors.FabricError):
                return patch
            if isinstance(self.document, errors.FabricError):
                return self.document
            version = self._update_summary(merge_patch.merge(self.document, patch))
        state = self.state
        is_later = not state["frame_count"] or self.now > state["last_ms"]
        state["last_ms"], state["last_seq"] = (self.now, 0) if is_later else (state["last_ms"], state["last_seq"] + 1)
        number = state["frame_count"] = state["frame_count"] + 1
        state["total_bytes"] += len(request.payload)
        state["last_frame_at"] = self.now
        self._apply_retention(request, number)
        frame = Frame(
            execution_id=state["execution_id"],
            attempt_index=state["attempt_index"],
            page=(number - 1) // PAGE,
            ms=state["last_ms"],
            seq=state["last_seq"],
            number=number,
            ts=self.now,
            mode=request.mode,
            frame_type=request.frame_type,
            payload=request.payload,
            correlation_id=request.correlation_id,
            summary_version=version,
            ttl_ms=request.best_effort.ttl_ms
            if request.mode is FrameMode.BEST_EFFORT and request.best_effort.ttl_ms > 0
            else None,
        )
        if not self.pages or self.pages[-1][0] != frame.page:
            self.pages.append([frame.page, frame.ms, frame.seq])
        self.frames.append(frame)
        return Appended(f"{frame.ms}-{frame.seq}", number, version)

    def _update_summary(self, document: dict[str, Any]) -> int:
        previous, state = self.summary, self.state
        version = 1 if previous is None else previous.version + 1
        first = self.now if previous is None else previous.first_applied_ms
        self.document = document
        # The document is encoded once, for the last version of the batch.
        self.summary = StreamSummary(state["execution_id"], state["attempt_index"], "", version, first, self.now)
        return version

    def _apply_retention(self, request: FrameArgs, number: int) -> None:
        """Update how many frames are kept and until when, by the mode of the frame just added."""
        state = self.state
        if state["vanishes_at"] is not None and state["vanishes_at"] <= self.now:
            state["kept_from"], state["vanishes_at"] = number, None
        if request.mode is FrameMode.BEST_EFFORT:
            limit = self._best_effort_limit(request.best_effort.normalized)
        else:
            limit = MAX_KEPT_FRAMES[request.mode]
            state["has_durable_frame"], state["vanishes_at"] = True, None
        state["kept_from"] = max(state["kept_from"], number - limit + 1)

    def _best_effort_limit(self, settings: BestEffort) -> int:
        """Return how many frames to keep: twice the number expected within the ttl, by a moving average of the rate."""
        state, ttl_s = self.state, max(settings.ttl_ms, 1) / 1000
        if state["ema_rate_hz"] is None:
            rate = settings.maxlen_floor / (2 * ttl_s)
        else:
            passed = max(self.now - (state["last_append_ts_ms"] or 0), 1)
            rate = settings.ema_alpha * (1000 / passed) + (1 - settings.ema_alpha) * state["ema_rate_hz"]
        limit = min(max(ceil(rate * ttl_s * 2 - _SLACK), settings.maxlen_floor), settings.maxlen_ceiling)
        state.update(ema_rate_hz=rate, last_append_ts_ms=self.now, maxlen_applied_last=limit)
        if settings.ttl_ms > 0 and not state["has_durable_frame"]:
            state["vanishes_at"] = self.now + 2 * settings.ttl_ms
        return limit

    def change(self, row: Execution) -> Change:
        """Return the change that writes all frames, fenced by the lease. The execution row is written only by the first
        one."""
        key = (row.execution_id, self.state["attempt_index"])
        oldest = (self.state["kept_from"] - 1) // PAGE
        dropped = [page for page, _, _ in self.pages if page < oldest]
        self.pages = [page for page in self.pages if page[0] >= oldest]
        self.state["pages"] = msgspec.json.encode(self.pages).decode()
        frames = [frame for frame in self.frames if frame.page >= oldest]
        writes: tuple[Write, ...] = (Upsert(Stream(**self.state)), *(Insert(frame) for frame in frames))
        if self.before is None:
            writes += (Patch(Execution, (row.execution_id,), {"stream_index": key[1], "last_mutation_at": NOW}),)
        if self.summary is not None and not self.summary.document and isinstance(self.document, dict):
            text = merge_patch.encode_document(self.document)
            writes += (Upsert(msgspec.structs.replace(self.summary, document=text)),)
        writes += tuple(Delete(Frame, (*key, page)) for page in dropped)
        guard = Guard(Stream, key, None if self.before is None else self.before.revision)
        return Change(guards=(seen(row, live(row)), guard), writes=writes)
