"""Output streams: append, read, tail.

Appends to one execution are decided together: while one batch of frames is on its way the next one fills, so a worker
that writes token by token costs a change per batch, not per token. A tail that waits holds nothing but a place in the
list of those who want a hint.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.operations.base import Operations
from flowfabric.engine.runtime.wakeups import stream_topic, wait_for_wakeup
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.handles import Handle
from flowfabric.model.execution import Execution
from flowfabric.model.stream import Frame, FrameKind, FrameMode, Stream, StreamSummary
from flowfabric.rules import validation
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.stream import append as append_rules
from flowfabric.rules.stream import read
from flowfabric.rules.stream.append import Appended, BestEffort, FrameArgs
from flowfabric.rules.stream.read import StreamPage, StreamPosition, SummaryView
from flowfabric.stores.queries import Read, Scan, Where

BATCH_FRAMES = 500
BATCH_BYTES = 4 * 1024 * 1024
MAX_BLOCK_MS = 30_000
RETRY_HINT_MS = 25


class Visibility(StrEnum):
    """Which frames a tail wants."""

    ALL = ""
    EXCLUDE_BEST_EFFORT = "exclude_best_effort"


class _Waiting(msgspec.Struct):
    ask: FrameArgs
    answer: asyncio.Future[Appended | errors.FabricError]


class _Writer:
    """The frames of one attempt that are still to be written."""

    def __init__(self) -> None:
        self.waiting: deque[_Waiting] = deque()
        self.task: asyncio.Task[None] | None = None

    def next_batch(self) -> list[_Waiting]:
        """As many as one change should carry."""
        batch: list[_Waiting] = []
        size = 0
        while self.waiting and len(batch) < BATCH_FRAMES and (not batch or size < BATCH_BYTES):
            size += len(self.waiting[0].ask.payload)
            batch.append(self.waiting.popleft())
        return batch


class StreamReadLimiter:
    """How many reads and tails are under way, and whether new ones are welcome."""

    def __init__(self, most: int) -> None:
        self.limit = most
        self.running = 0
        self.closing = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[None]:
        """A place among them; `ResourceExhausted` when all are taken, `Unavailable` while shutting down."""
        if self.closing.is_set():
            raise errors.Unavailable("stream_ops")
        if self.running >= self.limit:
            available = self.limit - self.running
            hint = max(RETRY_HINT_MS, RETRY_HINT_MS * self.limit // (available + 1))
            raise errors.ResourceExhausted("stream_ops", self.limit, hint)
        self.running += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()


class StreamOperations(Operations):
    """What can be done with output streams."""

    stream_reads: StreamReadLimiter
    frame_writers: dict[tuple[str, int], _Writer]

    # -- append ---------------------------------------------------------------------------------------------------

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
            fence=Fence(fields.lease_id, fields.lease_epoch, fields.attempt_id),
            mode=given.mode,
            best_effort=given.best_effort,
            correlation_id=given.correlation_id,
        )
        key = (fields.execution_id, fields.attempt_index)
        writer = self.frame_writers.get(key)
        if writer is None:
            writer = self.frame_writers[key] = _Writer()
        waiting = _Waiting(ask, asyncio.get_running_loop().create_future())
        writer.waiting.append(waiting)
        if writer.task is None:
            writer.task = asyncio.create_task(self._write(key, writer))
        answer = await waiting.answer
        if isinstance(answer, errors.FabricError):
            raise answer
        return answer

    async def _write(self, key: tuple[str, int], writer: _Writer) -> None:
        try:
            while batch := writer.next_batch():
                asks = [waiting.ask for waiting in batch]
                try:
                    answers = await self._append(key, asks)
                except errors.FabricError as error:
                    answers = [error] * len(batch)
                except Exception as bug:  # every caller of this batch must hear of it
                    answers = [_bug(bug)] * len(batch)
                for waiting, answer in zip(batch, answers, strict=True):
                    if not waiting.answer.done():
                        waiting.answer.set_result(answer)
        finally:
            writer.task = None
            if self.frame_writers.get(key) is writer:
                del self.frame_writers[key]

    async def _append(self, key: tuple[str, int], asks: list[FrameArgs]) -> append_rules.AppendResults:
        return await self.runtime.decide_and_commit(
            (Read(Execution, key[:1]), Read(Stream, key), Read(StreamSummary, key)),
            lambda rows, now: append_rules.append_frames(_first(rows[0]), _first(rows[1]), _first(rows[2]), asks, now),
        )

    async def flush_frames(self) -> None:
        """Wait until every frame that was handed in is written or refused."""
        while tasks := [writer.task for writer in self.frame_writers.values() if writer.task is not None]:
            await asyncio.wait(tasks)

    # -- read -----------------------------------------------------------------------------------------------------

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

    # -- shutdown -------------------------------------------------------------------------------------------------

    async def shutdown_prepare(self, grace_ms: int = 15_000) -> None:
        """Turn new reads away, let waiting tails return at once, and wait for those that are under way."""
        grace = validation.duration_ms("grace_ms", grace_ms, least=0)
        self.stream_reads.closing.set()
        self.runtime.wakeups.notify_prefix(stream_topic(""))
        try:
            await asyncio.wait_for(self.stream_reads.idle.wait(), grace / 1000)
        except TimeoutError:
            raise errors.OperationTimeout("shutdown_prepare", grace) from None


def _index(attempt_index: object) -> int:
    return validation.integer("attempt_index", attempt_index, least=0)


def _first(rows: list[Any]) -> Any:
    return rows[0] if rows else None


def _visibility(value: str) -> Visibility:
    if value == "all":
        return Visibility.ALL
    try:
        return Visibility(value)
    except ValueError:
        raise errors.InvalidInput(
            f"visibility: {validation.preview(value)} is neither all nor exclude_best_effort"
        ) from None


def _bug(cause: Exception) -> errors.FabricError:
    error = errors.BugError(f"append_frame: {cause!r}")
    error.__cause__ = cause
    return error
