"""Output streams: append, read, tail.

Appends to one execution are decided together: while one batch of frames is on its way the next one fills, so a worker
that writes token by token costs a change per batch, not per token. A tail that waits holds nothing but a place in the
list of those who want a hint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.cursors import decode_cursor
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.wakeups import stream_topic, wait_for_wakeup
from flowfabric.engine.streams.frame_writer import FrameWriter
from flowfabric.engine.streams.read_limiter import StreamReadLimiter
from flowfabric.engine.streams.subscription import LegacyCompletions, N, Subscription
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.handles import Handle
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.stream import Frame, FrameKind, FrameMode, Stream, StreamSummary
from flowfabric.rules import feed, validation
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.feed import CompletionFeedEntry, Filter, LeaseFeedEntry, OperatorFeedEntry, SignalFeedEntry
from flowfabric.rules.stream import read
from flowfabric.rules.stream.append import Appended, BestEffort, FrameArgs
from flowfabric.rules.stream.read import StreamPage, StreamPosition, SummaryView
from flowfabric.stores.queries import Read, Scan, Where

MAX_BLOCK_MS = 30_000
TRIM_BATCH = 1000


class Visibility(StrEnum):
    """Which frames a tail wants."""

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
        """Add a frame to the attempt's output; refused for whoever no longer holds the lease. `seq` is passed over."""
        given = validate_suspension.build_frame(payload, kind, frame_type, mode, best_effort, correlation_id)
        fields = self.runtime.handle_fields(handle)
        ask = FrameArgs(
            payload=given.payload,
            frame_type=given.frame_type,
            attempt_index=fields.attempt_index,
            fence=Fence.of(fields),
            mode=given.mode,
            best_effort=given.best_effort,
            correlation_id=given.correlation_id,
        )
        key = (fields.execution_id, fields.attempt_index)
        return await self.frame_writer.append(key, ask)

    async def read_stream(
        self,
        execution_id: str,
        attempt_index: int,
        from_cursor: str = read.START,
        to_cursor: str = read.END,
        count_limit: int = 100,
    ) -> StreamPage:
        """Frames between two places, both included; a stream that was never written is empty and open."""
        key = (validate.validate_execution_id(execution_id), _index(attempt_index))
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
        """Frames after a place; with none there, waits for one that is visible, or for the end of the stream."""
        key = (validate.validate_execution_id(execution_id), _index(attempt_index))
        place, count, seen = read.tail_position(after), read.check_count(count_limit), _visibility(visibility)
        block_s = validation.integer("block_ms", block_ms, least=0, most=MAX_BLOCK_MS) / 1000
        clock = asyncio.get_running_loop().time
        async with self.stream_reads.acquire():
            until = clock() + block_s
            while True:
                hint = self.runtime.wakeups.subscribe(stream_topic(key[0]))
                try:
                    page = await self._read(key, place, read.LAST, count, seen)
                    left = until - clock()
                    if page.frames or page.closed_at is not None or left <= 0 or self.stream_reads.closing.is_set():
                        return page
                    await wait_for_wakeup(hint, min(left, self.runtime.poll_interval_s))
                finally:
                    hint.cancel()

    async def read_summary(self, execution_id: str, attempt_index: int) -> SummaryView | None:
        """The document that the attempt's summary frames amount to; None when there was none."""
        key = (validate.validate_execution_id(execution_id), _index(attempt_index))
        found = (await self.runtime.load((Read(StreamSummary, key),))).rows[0]
        if not found:
            return None
        kept: StreamSummary = found[0]
        return SummaryView(kept.document, kept.version, kept.patch_kind, kept.last_updated_ms, kept.first_applied_ms)

    async def read_stream_info(self, execution_id: str, attempt_index: int) -> Stream | None:
        """The stream's own numbers; None when it was never written."""
        found = (
            await self.runtime.load(
                (Read(Stream, (validate.validate_execution_id(execution_id), _index(attempt_index))),)
            )
        ).rows[0]
        return found[0] if found else None

    async def _read(
        self, key: tuple[str, int], after: StreamPosition, last: StreamPosition, count: int, visibility: Visibility
    ) -> StreamPage:
        loaded = await self.runtime.load((Read(Stream, key),))
        if not loaded.rows[0]:
            return StreamPage([])
        stream: Stream = loaded.rows[0][0]
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
        wanted = [read.frame_view(row) for row in rows if StreamPosition(row.ms, row.seq) <= last]
        return msgspec.structs.replace(page, frames=wanted)

    async def shutdown_prepare(self, grace_ms: int = 15_000) -> None:
        """Turn new reads away, let waiting tails return at once, and wait for those that are under way."""
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
        """Every change of every lease."""
        return await self._subscribe(Topic.LEASE, cursor, chosen, feed.lease_entry)

    async def subscribe_completion(
        self, cursor: bytes = b"", chosen: Filter | None = None
    ) -> Subscription[CompletionFeedEntry]:
        """Every end of a life."""
        return await self._subscribe(Topic.COMPLETION, cursor, chosen, feed.completion_entry)

    async def subscribe_operator_event(
        self, cursor: bytes = b"", chosen: Filter | None = None
    ) -> Subscription[OperatorFeedEntry]:
        """What operators did."""
        return await self._subscribe(Topic.OPERATOR, cursor, chosen, feed.operator_entry)

    async def subscribe_signal_delivery(
        self, cursor: bytes = b"", chosen: Filter | None = None
    ) -> Subscription[SignalFeedEntry]:
        """Every signal that was accepted, buffered or recognised as a repetition."""
        return await self._subscribe(Topic.SIGNAL, cursor, chosen, feed.signal_entry)

    async def subscribe_instance_tags(self, cursor: bytes = b"") -> Subscription[Any]:
        """There is no such feed."""
        raise errors.Unavailable("subscribe_instance_tags")

    async def subscribe_completions(self) -> LegacyCompletions:
        """Completions in the older form, from now on."""
        return await self.subscribe_completions_filtered(Filter())

    async def subscribe_completions_filtered(self, chosen: Filter) -> LegacyCompletions:
        """The same for some executions."""

        async def subscribe(cursor: bytes) -> Subscription[CompletionFeedEntry]:
            return await self.subscribe_completion(cursor, chosen)

        return LegacyCompletions(await subscribe(b""), subscribe)

    async def trim_feed(self) -> int:
        """Drop events that have been kept long enough; how many went."""
        now = await self.runtime.retry_while_unavailable(self.runtime.store.ping)
        before = now - self.runtime.settings.feed_retention_ms
        return await self.runtime.retry_while_unavailable(lambda: self.runtime.store.trim_feed(before, TRIM_BATCH))

    async def _subscribe(
        self, topic: Topic, cursor: bytes, chosen: Filter | None, tell: Callable[[FeedEvent], N | None]
    ) -> Subscription[N]:
        if not isinstance(cursor, bytes | bytearray):
            raise errors.InvalidInput("cursor: not bytes")
        wanted = validate.validate_filter(chosen)
        position = decode_cursor(bytes(cursor))
        if position is None:
            position = await self.runtime.retry_while_unavailable(self.runtime.store.feed_end)
        # Nothing stands before the first place, and so nothing can be missing there.
        return Subscription(self.runtime, topic, max(position, 0), wanted, tell)


def _index(attempt_index: object) -> int:
    return validation.integer("attempt_index", attempt_index, least=0)


def _visibility(value: str) -> Visibility:
    if value == "all":
        return Visibility.ALL
    try:
        return Visibility(value)
    except ValueError:
        raise errors.InvalidInput(
            f"visibility: {validation.preview(value)} is neither all nor exclude_best_effort"
        ) from None
