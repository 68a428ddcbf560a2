"""Stream operations: append to, read and tail output streams; subscribe to event feeds.

Appends to one attempt are batched: while one batch is in flight, the next one fills, so a worker that writes token by
token costs a change per batch. A tail that waits holds a wakeup subscription, no connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.cursors import decode_cursor
from flowfabric.engine.runtime.read_set import ReadSet, load_one
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.wakeups import stream_topic, wait_for_wakeup
from flowfabric.engine.streams.frame_batches import FrameWriter
from flowfabric.engine.streams.read_limiter import StreamReadLimiter
from flowfabric.engine.streams.subscription import LegacyCompletions, N, Subscription
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.handles import Handle
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.stream import Frame, FrameKind, FrameMode, Stream, StreamSummary
from flowfabric.rules import feed, validation
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.feed import CompletionFeedEntry, Filter, LeaseFeedEntry, OperatorFeedEntry, SignalFeedEntry
from flowfabric.rules.stream import read
from flowfabric.rules.stream.append import Appended, BestEffort, FrameArgs
from flowfabric.rules.stream.read import StreamPage, StreamPosition, SummaryView
from flowfabric.stores.queries import Scan, Where

MAX_BLOCK_MS = 30_000
TRIM_BATCH = 1000


class Visibility(StrEnum):
    """The frames that a tail returns."""

    ALL = ""
    EXCLUDE_BEST_EFFORT = "exclude_best_effort"


class StreamOperations:
    """Operations on output streams and event feeds."""

    runtime: Runtime
    frame_writer: FrameWriter
    stream_reads: StreamReadLimiter

    async def append_frame(
        self,
        handle: Handle,
        payload: bytes,
        *,
        kind: FrameKind | str = FrameKind.EVENT,
        frame_type: str = "",
        mode: FrameMode | str = FrameMode.DURABLE,
        best_effort: BestEffort = validate_suspension.BEST_EFFORT,
        correlation_id: str | None = None,
        seq: int | None = None,
    ) -> Appended:
        """Append a frame to the attempt's output, in the order of the calls; refused without the lease.

        `seq` is ignored.
        """
        validated = validate_suspension.build_frame(payload, kind, frame_type, mode, best_effort, correlation_id)
        fields = self.runtime.handle_fields(handle)
        frame = FrameArgs(
            payload=validated.payload,
            frame_type=validated.frame_type,
            attempt_index=fields.attempt_index,
            fence=Fence.of(fields),
            mode=validated.mode,
            best_effort=validated.best_effort,
            correlation_id=validated.correlation_id,
        )
        return await self.frame_writer.append((fields.execution_id, fields.attempt_index), frame)

    async def read_stream(
        self,
        execution_id: str,
        attempt_index: int,
        from_cursor: str = read.START,
        to_cursor: str = read.END,
        count_limit: int = 100,
    ) -> StreamPage:
        """Return the frames between two positions, inclusive; a stream that was never written is empty and open."""
        key = _stream_key(execution_id, attempt_index)
        first, last = read.lower_bound(from_cursor), read.upper_bound(to_cursor)
        count = read.check_count(count_limit)
        async with self.stream_reads.acquire():
            return await self._read(key, StreamPosition(first.ms, first.seq - 1), last, count, Visibility.ALL)

    async def tail_stream(
        self,
        execution_id: str,
        attempt_index: int,
        after: str = "0-0",
        block_ms: int = 0,
        count_limit: int = 50,
        visibility: Visibility | str = Visibility.ALL,
    ) -> StreamPage:
        """Return the frames after a position; if there are none, wait for a visible one or the end of the stream."""
        key = _stream_key(execution_id, attempt_index)
        position, count = read.tail_position(after), read.check_count(count_limit)
        shown = _parse_visibility(visibility)
        block_s = validation.integer("block_ms", block_ms, least=0, most=MAX_BLOCK_MS) / 1000
        clock = asyncio.get_running_loop().time
        async with self.stream_reads.acquire():
            until = clock() + block_s
            while True:
                hint = self.runtime.wakeups.subscribe(stream_topic(key[0]))
                try:
                    page = await self._read(key, position, read.LAST, count, shown)
                    left = until - clock()
                    if page.frames or page.closed_at is not None or left <= 0 or self.stream_reads.closing.is_set():
                        return page
                    await wait_for_wakeup(hint, min(left, self.runtime.poll_interval_s))
                finally:
                    hint.cancel()

    async def read_summary(self, execution_id: str, attempt_index: int) -> SummaryView | None:
        """Return the document that the attempt's summary frames produced; None if there were none."""
        row = await load_one(self.runtime, StreamSummary, *_stream_key(execution_id, attempt_index))
        if row is None:
            return None
        return SummaryView(row.document, row.version, row.patch_kind, row.last_updated_ms, row.first_applied_ms)

    async def read_stream_info(self, execution_id: str, attempt_index: int) -> Stream | None:
        """Return the stream's counters and state; None if it was never written."""
        return await load_one(self.runtime, Stream, *_stream_key(execution_id, attempt_index))

    async def _read(
        self, key: tuple[str, int], after: StreamPosition, last: StreamPosition, count: int, visibility: Visibility
    ) -> StreamPage:
        reads = ReadSet()
        row = reads.one(Stream, *key)
        loaded = await self.runtime.load(reads)
        stream = row(loaded.rows)
        if stream is None:
            return StreamPage([])
        page = StreamPage([], stream.closed_at, stream.closed_reason)
        if read.is_expired(stream, loaded.now) or after >= StreamPosition(stream.last_ms, stream.last_seq):
            return page
        where = [
            Where("execution_id", "=", key[0]),
            Where("attempt_index", "=", key[1]),
            Where("number", ">=", stream.kept_from),
            Where("ms", "<=", last.ms),
        ]
        if visibility is Visibility.EXCLUDE_BEST_EFFORT:
            where.append(Where("mode", "in", (FrameMode.DURABLE, FrameMode.SUMMARY)))
        order = ("execution_id", "attempt_index", "page", "ms", "seq")
        start = (*key, read.first_page(stream, after), after.ms, after.seq)
        rows: list[Frame] = await self.runtime.scan(Scan(Frame, tuple(where), order, start, count))
        frames = [read.frame_view(frame) for frame in rows if StreamPosition(frame.ms, frame.seq) <= last]
        return msgspec.structs.replace(page, frames=frames)

    async def shutdown_prepare(self, grace_ms: int = 15_000) -> None:
        """Refuse new reads, wake up waiting tails, and wait until reads in progress have returned."""
        grace = validation.duration_ms("grace_ms", grace_ms, least=0)
        self.stream_reads.closing.set()
        self.runtime.wakeups.notify_prefix(stream_topic(""))
        try:
            await asyncio.wait_for(self.stream_reads.idle.wait(), grace / 1000)
        except TimeoutError:
            raise errors.OperationTimeout("shutdown_prepare", grace) from None

    async def subscribe_lease_history(
        self, cursor: bytes = b"", chosen: Filter | None = None
    ) -> Subscription[LeaseFeedEntry]:
        """Subscribe to all lease changes."""
        return await self._subscribe(Topic.LEASE, cursor, chosen, feed.lease_entry)

    async def subscribe_completion(
        self, cursor: bytes = b"", chosen: Filter | None = None
    ) -> Subscription[CompletionFeedEntry]:
        """Subscribe to all completions."""
        return await self._subscribe(Topic.COMPLETION, cursor, chosen, feed.completion_entry)

    async def subscribe_operator_event(
        self, cursor: bytes = b"", chosen: Filter | None = None
    ) -> Subscription[OperatorFeedEntry]:
        """Subscribe to the actions of operators."""
        return await self._subscribe(Topic.OPERATOR, cursor, chosen, feed.operator_entry)

    async def subscribe_signal_delivery(
        self, cursor: bytes = b"", chosen: Filter | None = None
    ) -> Subscription[SignalFeedEntry]:
        """Subscribe to all signals that were accepted, buffered or recognised as duplicates."""
        return await self._subscribe(Topic.SIGNAL, cursor, chosen, feed.signal_entry)

    async def subscribe_instance_tags(self, cursor: bytes = b"") -> Subscription[Any]:
        """Raise `Unavailable`: there is no such feed."""
        raise errors.Unavailable("subscribe_instance_tags")

    async def subscribe_completions(self) -> LegacyCompletions:
        """Subscribe to new completions in the older form."""
        return await self.subscribe_completions_filtered(Filter())

    async def subscribe_completions_filtered(self, chosen: Filter) -> LegacyCompletions:
        """Subscribe to new completions of matching executions in the older form."""

        async def subscribe(cursor: bytes) -> Subscription[CompletionFeedEntry]:
            return await self.subscribe_completion(cursor, chosen)

        return LegacyCompletions(await subscribe(b""), subscribe)

    async def trim_feed(self) -> int:
        """Delete events whose retention is over; return how many."""
        now = await self.runtime.retry_while_unavailable(self.runtime.store.ping)
        before = now - self.runtime.settings.feed_retention_ms
        return await self.runtime.retry_while_unavailable(lambda: self.runtime.store.trim_feed(before, TRIM_BATCH))

    async def _subscribe(
        self, topic: Topic, cursor: bytes, chosen: Filter | None, decode: Callable[[FeedEvent], N | None]
    ) -> Subscription[N]:
        if not isinstance(cursor, bytes | bytearray):
            raise errors.InvalidInput("cursor: not bytes")
        accepted = validate.validate_filter(chosen)
        position = decode_cursor(bytes(cursor))
        if position is None:
            position = await self.runtime.retry_while_unavailable(self.runtime.store.feed_end)
        # No event precedes position 0, so a smaller position must not be reported as a gap.
        return Subscription(self.runtime, topic, max(position, 0), accepted, decode)


def _stream_key(execution_id: object, attempt_index: object) -> tuple[str, int]:
    execution = validate.validate_execution_id(execution_id)
    return execution, validation.integer("attempt_index", attempt_index, least=0)


def _parse_visibility(value: str) -> Visibility:
    if value == "all":
        return Visibility.ALL
    try:
        return Visibility(value)
    except ValueError:
        raise errors.InvalidInput(
            f"visibility: {validation.preview(value)} is neither all nor exclude_best_effort"
        ) from None
