"""Output streams: what the holder of a lease may append, what is kept of it, and in which order.

Frames are decided a batch at a time: as if one after the other, and written together.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import msgspec

from flowfabric import errors, merge_patch
from flowfabric.model.change import NOW, Change, Delete, Guard, Insert, Patch, Upsert, Write, live, seen
from flowfabric.model.execution import Execution
from flowfabric.model.states import LifecyclePhase, OwnershipState
from flowfabric.model.stream import Frame, FrameMode, Stream, StreamSummary
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import lease
from flowfabric.rules.execution.lease import Fence

MAX_FRAME_BYTES = 65_536
PAGE = 512
KEPT = {FrameMode.DURABLE: 10_000, FrameMode.SUMMARY: 64}
FLOOR, CEILING, ALPHA = 64, 16_384, 0.2
_SLACK = 1e-9  # so that rounding errors do not lift a whole number over itself


class BestEffort(msgspec.Struct, frozen=True):
    """How long best-effort frames matter, and how many are kept for it."""

    ttl_ms: int = 0
    maxlen_floor: int = FLOOR
    maxlen_ceiling: int = CEILING
    ema_alpha: float = ALPHA

    @property
    def normalized(self) -> BestEffort:
        """With every number that makes no sense replaced by its default."""
        floor = self.maxlen_floor if self.maxlen_floor > 0 else FLOOR
        ceiling = self.maxlen_ceiling if self.maxlen_ceiling > 0 else CEILING
        alpha = self.ema_alpha if 0 < self.ema_alpha <= 1 else ALPHA
        return BestEffort(self.ttl_ms, floor, max(floor, ceiling), alpha)


class FrameArgs(msgspec.Struct, frozen=True, kw_only=True):
    """A frame, and what its writer shows to prove that it holds the lease."""

    payload: bytes
    frame_type: str
    attempt_index: int
    fence: Fence
    mode: FrameMode = FrameMode.DURABLE
    best_effort: BestEffort = BestEffort()
    correlation_id: str | None = None


class Appended(msgspec.Struct, frozen=True):
    """Where a frame stands now."""

    stream_id: str
    frame_count: int
    summary_version: int | None = None


AppendResults = list[Appended | errors.FabricError]


def append_frames(
    row: Execution | None, stream: Stream | None, summary: StreamSummary | None, asks: Sequence[FrameArgs], now: int
) -> Decision[AppendResults]:
    """Append frames in order; each is accepted or refused on its own."""
    page = _Page(row, stream, summary, now)
    answers = [page.refused(ask) or page.add(ask) for ask in asks]
    if row is None or not page.frames:
        return Decision(answers)
    return Decision(answers, page.change(row))


class _Page:
    """The stream while frames are added to it."""

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

    def refused(self, ask: FrameArgs) -> errors.FabricError | None:
        row = self.row
        if row is None or row.lifecycle_phase is not LifecyclePhase.ACTIVE:
            return errors.StreamClosed()
        if row.ownership_state is not OwnershipState.LEASED or lease.has_expired(row, self.now):
            return errors.StaleOwnerCannotAppend(execution_id=row.execution_id)
        held = (ask.attempt_index, ask.fence.lease_id, ask.fence.lease_epoch)
        if held != (row.attempt_index, row.lease_id, row.lease_epoch):
            return errors.StaleOwnerCannotAppend(execution_id=row.execution_id)
        if self.state["closed_at"] is not None:
            return errors.StreamClosed()
        return None

    def add(self, ask: FrameArgs) -> Appended | errors.FabricError:
        version = None
        if ask.mode is FrameMode.SUMMARY:
            patch = merge_patch.decode_patch(ask.payload)
            if isinstance(patch, errors.FabricError):
                return patch
            if isinstance(self.document, errors.FabricError):
                return self.document
            version = self._summarise(merge_patch.merge(self.document, patch))
        state = self.state
        later = not state["frame_count"] or self.now > state["last_ms"]
        state["last_ms"], state["last_seq"] = (self.now, 0) if later else (state["last_ms"], state["last_seq"] + 1)
        number = state["frame_count"] = state["frame_count"] + 1
        state["total_bytes"] += len(ask.payload)
        state["last_frame_at"] = self.now
        self._keep(ask, number)
        frame = Frame(
            execution_id=state["execution_id"],
            attempt_index=state["attempt_index"],
            page=(number - 1) // PAGE,
            ms=state["last_ms"],
            seq=state["last_seq"],
            number=number,
            ts=self.now,
            mode=ask.mode,
            frame_type=ask.frame_type,
            payload=ask.payload,
            correlation_id=ask.correlation_id,
            summary_version=version,
            ttl_ms=ask.best_effort.ttl_ms if ask.mode is FrameMode.BEST_EFFORT and ask.best_effort.ttl_ms > 0 else None,
        )
        if not self.pages or self.pages[-1][0] != frame.page:
            self.pages.append([frame.page, frame.ms, frame.seq])
        self.frames.append(frame)
        return Appended(f"{frame.ms}-{frame.seq}", number, version)

    def _summarise(self, document: dict[str, Any]) -> int:
        kept, state = self.summary, self.state
        version = 1 if kept is None else kept.version + 1
        first = self.now if kept is None else kept.first_applied_ms
        self.document = document
        # The text is written once, for the last version of the batch.
        self.summary = StreamSummary(state["execution_id"], state["attempt_index"], "", version, first, self.now)
        return version

    def _keep(self, ask: FrameArgs, number: int) -> None:
        """How many frames are kept, by the mode of the one just added, and until when."""
        state = self.state
        if state["vanishes_at"] is not None and state["vanishes_at"] <= self.now:
            state["kept_from"], state["vanishes_at"] = number, None
        if ask.mode is FrameMode.BEST_EFFORT:
            limit = self._best_effort(ask.best_effort.normalized)
        else:
            limit = KEPT[ask.mode]
            state["has_durable_frame"], state["vanishes_at"] = True, None
        state["kept_from"] = max(state["kept_from"], number - limit + 1)

    def _best_effort(self, ask: BestEffort) -> int:
        state, ttl_s = self.state, max(ask.ttl_ms, 1) / 1000
        if state["ema_rate_hz"] is None:
            rate = ask.maxlen_floor / (2 * ttl_s)
        else:
            passed = max(self.now - (state["last_append_ts_ms"] or 0), 1)
            rate = ask.ema_alpha * (1000 / passed) + (1 - ask.ema_alpha) * state["ema_rate_hz"]
        limit = min(max(ceil(rate * ttl_s * 2 - _SLACK), ask.maxlen_floor), ask.maxlen_ceiling)
        state.update(ema_rate_hz=rate, last_append_ts_ms=self.now, maxlen_applied_last=limit)
        if ask.ttl_ms > 0 and not state["has_durable_frame"]:
            state["vanishes_at"] = self.now + 2 * ask.ttl_ms
        return limit

    def change(self, row: Execution) -> Change:
        """Everything that was added, fenced by the lease: the row itself is written only when the stream begins."""
        key = (row.execution_id, self.state["attempt_index"])
        oldest = (self.state["kept_from"] - 1) // PAGE
        gone = [page for page, _, _ in self.pages if page < oldest]
        self.pages = [page for page in self.pages if page[0] >= oldest]
        self.state["pages"] = msgspec.json.encode(self.pages).decode()
        frames = [frame for frame in self.frames if frame.page >= oldest]
        writes: tuple[Write, ...] = (Upsert(Stream(**self.state)), *(Insert(frame) for frame in frames))
        if self.before is None:
            writes += (Patch(Execution, (row.execution_id,), {"stream_index": key[1], "last_mutation_at": NOW}),)
        if self.summary is not None and not self.summary.document and isinstance(self.document, dict):
            text = merge_patch.encode_document(self.document)
            writes += (Upsert(msgspec.structs.replace(self.summary, document=text)),)
        writes += tuple(Delete(Frame, (*key, page)) for page in gone)
        guard = Guard(Stream, key, None if self.before is None else self.before.revision)
        return Change(guards=(seen(row, live(row)), guard), writes=writes)
