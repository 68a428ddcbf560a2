"""Frames: ids grow and exactly the newest frames are kept, whatever the clock and the batches."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from flowfabric.errors import FabricError, StreamClosed
from flowfabric.model.change import Change, Delete, Insert, Upsert
from flowfabric.model.states import LifecyclePhase, OwnershipState
from flowfabric.model.stream import Frame, FrameMode, Stream, StreamSummary
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.stream import append as append_rules
from flowfabric.rules.stream.append import Appended, BestEffort, FrameArgs
from flowfabric.rules.stream.read import StreamPosition, first_page
from tests.stores.sample_rows import execution, loaded

ROW = loaded(
    execution(
        "e",
        lifecycle_phase=LifecyclePhase.ACTIVE,
        ownership_state=OwnershipState.LEASED,
        attempt_index=0,
        attempt_id="a",
        lease_id="x",
        lease_epoch=1,
        lease_expires_at=10**15,
    )
)


def ask(mode: FrameMode = FrameMode.DURABLE, payload: bytes = b"{}", **given: Any) -> FrameArgs:
    return FrameArgs(
        payload=payload,
        frame_type="t",
        attempt_index=0,
        fence=Fence("x", 1, "a"),
        mode=mode,
        best_effort=BestEffort(**given),
    )


class StoredStream:
    """A stream with its rows, as a store keeps them."""

    def __init__(self) -> None:
        self.stream: Stream | None = None
        self.summary: StreamSummary | None = None
        self.frames: dict[tuple[int, int], Frame] = {}

    def append(self, asks: list[FrameArgs], now: int) -> list[Appended | FabricError]:
        decision = append_rules.append_frames(ROW, self.stream, self.summary, asks, now)
        if decision.change is not None:
            self.write(decision.change)
        return decision.unwrap(now)

    def write(self, change: Change) -> None:
        for write in change.writes:
            match write:
                case Upsert(row=Stream() as stream):
                    self.stream = stream
                case Upsert(row=StreamSummary() as summary):
                    self.summary = summary
                case Insert(row=Frame() as frame):
                    assert (frame.ms, frame.seq) not in self.frames, "two frames with one id"
                    self.frames[frame.ms, frame.seq] = frame
                case Delete(row=kind, key=(_, _, page)) if kind is Frame:
                    self.frames = {place: one for place, one in self.frames.items() if one.page != page}
                case _:
                    pass

    @property
    def visible(self) -> list[int]:
        assert self.stream is not None
        return sorted(frame.number for frame in self.frames.values() if frame.number >= self.stream.kept_from)


modes = st.sampled_from([FrameMode.DURABLE, FrameMode.DURABLE, FrameMode.SUMMARY, FrameMode.BEST_EFFORT])
batches = st.lists(st.tuples(st.lists(modes, min_size=1, max_size=200), st.integers(-50, 200)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=60)
@given(batches)
def test_ids_grow_and_exactly_the_newest_frames_are_kept(played: list[tuple[list[FrameMode], int]]) -> None:
    stored, now, kept, appended = StoredStream(), 1000, list[int](), list[Appended]()
    for asked, passed in played:
        now = max(1, now + passed)
        answers = stored.append([ask(mode, ttl_ms=60_000) for mode in asked], now)
        appended += [answer for answer in answers if isinstance(answer, Appended)]
        assert stored.stream is not None
        for mode in asked:
            kept.append(len(kept) + 1 if not kept else kept[-1] + 1)
            limit = append_rules.MAX_KEPT_FRAMES.get(mode, stored.stream.maxlen_applied_last or 64)
            if mode is not FrameMode.BEST_EFFORT:
                kept = kept[-limit:]
        if FrameMode.BEST_EFFORT not in asked:
            assert stored.visible[-len(kept) :] == kept
    ids = [tuple(map(int, one.stream_id.split("-"))) for one in appended]
    assert ids == sorted(set(ids))
    assert [one.frame_count for one in appended] == list(range(1, len(appended) + 1))
    assert len(stored.frames) <= len(stored.visible) + append_rules.PAGE
    order = sorted(stored.frames.values(), key=lambda frame: (frame.ms, frame.seq))
    assert [frame.number for frame in order] == sorted(frame.number for frame in order)
    assert [frame.page for frame in order] == sorted(frame.page for frame in order)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=1500), st.integers(0, 1500))
def test_the_page_of_a_cursor_is_at_or_before_the_following_frames(pauses: list[int], place: int) -> None:
    stored, now = StoredStream(), 1000
    for pause in pauses:
        now += pause
        stored.append([ask()], now)
    assert stored.stream is not None
    order = sorted(stored.frames.values(), key=lambda frame: (frame.ms, frame.seq))
    cursor = order[min(place, len(order) - 1)]

    page = first_page(stored.stream, StreamPosition(cursor.ms, cursor.seq))

    after = [frame for frame in order if (frame.ms, frame.seq) > (cursor.ms, cursor.seq)]
    start = (page, cursor.ms, cursor.seq)
    assert [frame for frame in order if (frame.page, frame.ms, frame.seq) > start] == after


def test_a_refused_frame_does_not_affect_its_neighbours() -> None:
    stored = StoredStream()

    first, bad, last = stored.append([ask(FrameMode.SUMMARY), ask(FrameMode.SUMMARY, b"[1]"), ask()], 1000)

    assert isinstance(first, Appended)
    assert isinstance(bad, FabricError)
    assert isinstance(last, Appended)
    assert (first.summary_version, last.frame_count) == (1, 2)


def test_a_corrupt_document_refuses_summaries_and_nothing_else() -> None:
    stored = StoredStream()
    stored.append([ask(FrameMode.SUMMARY)], 1000)
    assert stored.summary is not None
    stored.summary = msgspec.structs.replace(stored.summary, document="{broken")

    summary, durable = stored.append([ask(FrameMode.SUMMARY), ask()], 1001)

    assert isinstance(summary, FabricError)
    assert summary.kind == "corruption"
    assert isinstance(durable, Appended)
    assert stored.summary.document == "{broken"


def test_invalid_settings_fall_back_to_the_defaults() -> None:
    sane = BestEffort(ttl_ms=10, maxlen_floor=0, maxlen_ceiling=-5, ema_alpha=1.5).normalized
    assert (sane.maxlen_floor, sane.maxlen_ceiling, sane.ema_alpha) == (64, 16_384, 0.2)
    assert BestEffort(maxlen_floor=100, maxlen_ceiling=10).normalized.maxlen_ceiling == 100
    assert BestEffort(ema_alpha=1.0).normalized.ema_alpha == 1.0


def test_a_purged_execution_has_no_stream() -> None:
    [answer] = append_rules.append_frames(None, None, None, [ask()], 1000).unwrap(1000)

    assert isinstance(answer, StreamClosed)
