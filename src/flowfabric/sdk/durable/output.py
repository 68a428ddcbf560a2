"""The output of a context: progress, and streams of frames that readers follow while the handler runs."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric.errors import FabricError
from flowfabric.event_loop import start_task
from flowfabric.handles import HandleKind
from flowfabric.sdk.durable.attempt import is_in_step, occurrence_scope
from flowfabric.sdk.durable.context_part import ContextPart
from flowfabric.sdk.serialization.values import from_json, json_bytes, to_plain

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.handles import Handle

MAX_IN_FLIGHT = 64  # frames of one output in flight, after which `write` waits
MAX_COUNTED_BRANCHES = 1000  # branches whose reports are counted; others report again when they are replayed
PAGE_SIZE = 1000
START_CURSOR = "0-0"
NUMBER_SEPARATOR = "#"  # between the scope of a frame (its step or branch) and its number in that scope

WrittenCounts = Mapping[tuple[str, str], int]  # number of frames written before, by output and scope


class ContextOutput(ContextPart):
    """The part of a context that reports progress and writes output."""

    def __init__(self) -> None:
        super().__init__()
        self._outputs: dict[str, Output] = {}
        self._progress: dict[str, Any] | None = None
        self._progress_lock = asyncio.Lock()
        self._reports: Counter[str] = Counter()  # of this attempt, by branch
        self._reported: dict[str, int] = {}  # of all attempts, by branch
        self._written_before: WrittenCounts | None = None
        self._load_lock = asyncio.Lock()

    async def progress(self, patch: dict[str, Any] | str | None = None, *, pct: int | None = None) -> None:
        """Report progress: a JSON merge patch on the previous report, a message, or a percentage.

        A replay that reaches a report again does not repeat it, so progress never goes back; a step that runs again
        does. A task without steps and waits starts from zero in each attempt.
        """
        branch, number = occurrence_scope(), 0
        counts = not is_in_step()
        if counts:
            number = self._reports[branch]
            self._reports[branch] += 1
        async with self._progress_lock:  # reports of several branches are merged one after the other
            if self._progress is None:
                self._reported = dict(await self._load_reported())
                self._progress = progress_document(*await self.engine.read_progress(self.run_id))
            if counts:
                if number < self._reported.get(branch, 0):
                    return
                if branch in self._reported or len(self._reported) < MAX_COUNTED_BRANCHES:
                    self._reported[branch] = number + 1
            self._progress = apply_merge_patch(self._progress, progress_patch(patch, pct))
            percentage = self._progress.get("pct")
            await self.engine.progress(
                self.handle,
                pct=percentage if isinstance(percentage, int) else None,
                message=json_bytes(to_plain(self._progress)).decode(),
                counts=self._reported,
            )

    @abstractmethod
    async def _load_reported(self) -> Mapping[str, int]:
        """Return how often earlier attempts have reported progress, by branch."""

    def stream(self, name: str) -> Output:
        """Return the attempt's output of this name; readers see it while it is written."""
        if name not in self._outputs:
            self._outputs[name] = Output(self.engine, self.handle, name, self._load_written_counts)
        return self._outputs[name]

    async def _load_written_counts(self) -> WrittenCounts:
        """Count what this attempt wrote before it was parked; empty if it was not."""
        async with self._load_lock:
            if self._written_before is None:
                is_resumed = self.handle.kind is HandleKind.RESUMED
                self._written_before = await count_written_frames(self.engine, self.handle) if is_resumed else {}
        return self._written_before

    async def flush(self) -> None:
        """Wait until everything written so far is stored."""
        for output in self._outputs.values():
            await output.flush()

    async def flush_quietly(self) -> None:
        """Flush, but ignore refused output: used before a failure is reported, which matters more."""
        with suppress(FabricError):
            await self.flush()


class Output:
    """A named output of a handler. Its frames belong to the attempt: a retry starts over.

    A function that is resumed after a wait runs from the top and writes the same pieces again. Like a step, a piece is
    identified by its number in its branch, or in the step that writes it, and is not stored a second time.
    """

    def __init__(
        self,
        engine: EngineAPI,
        handle: Handle,
        name: str,
        load_written_counts: Callable[[], Awaitable[WrittenCounts]],
    ) -> None:
        self._engine = engine
        self._handle = handle
        self._name = name
        self._counts: Counter[str] = Counter()
        self._load_written_counts = load_written_counts
        self._written_before: WrittenCounts | None = None
        self._written: list[str] = []
        self._in_flight: set[asyncio.Task[Any]] = set()

    async def write(self, piece: str | bytes | dict[str, Any] | Sequence[Any]) -> None:
        """Write a piece. Pieces are sent in batches; this waits while many are in flight.

        Raises if an earlier piece was refused, which happens to a worker that has lost its lease.
        """
        if isinstance(piece, bytes):
            payload = piece
        elif isinstance(piece, str):
            payload = piece.encode()
        else:
            payload = json_bytes(to_plain(piece))
        self._written.append(payload.decode("utf-8", "replace"))
        scope = occurrence_scope()
        number = self._counts[scope]
        self._counts[scope] += 1
        if self._written_before is None:
            self._written_before = await self._load_written_counts()
        if number < self._written_before.get((self._name, scope), 0):
            return
        append = start_task(
            self._engine.append_frame(
                self._handle, payload, frame_type=self._name, correlation_id=f"{scope}{NUMBER_SEPARATOR}{number}"
            )
        )
        append.add_done_callback(_mark_retrieved)
        self._in_flight.add(append)
        await asyncio.sleep(0)  # starts the append even if the handler never waits
        self._check_finished()
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
            self._check_finished()

    async def flush(self) -> None:
        """Wait until everything written is stored; raises if a piece was refused."""
        while self._in_flight:
            await asyncio.wait(self._in_flight)
            self._check_finished()

    def _check_finished(self) -> None:
        """Forget the appends that have finished; raise if one was refused."""
        done = {task for task in self._in_flight if task.done()}
        self._in_flight -= done
        for task in done:
            task.result()

    def text(self) -> str:
        """Return everything written so far."""
        return "".join(self._written)


async def count_written_frames(engine: EngineAPI, handle: Handle) -> WrittenCounts:
    """Count the frames of an attempt by output and scope; they were written in order."""
    fields, after = handle.fields, START_CURSOR
    counts: dict[tuple[str, str], int] = {}
    while True:
        page = await engine.tail_stream(fields.execution_id, fields.attempt_index, after, count_limit=PAGE_SIZE)
        for frame in page.frames:
            scope, separator, number = frame.fields.get("correlation_id", "").rpartition(NUMBER_SEPARATOR)
            if separator and number.isdecimal():
                output = (frame.fields["frame_type"], scope)
                counts[output] = max(counts.get(output, 0), int(number) + 1)
        if len(page.frames) < PAGE_SIZE:
            return counts
        after = page.frames[-1].id


def _mark_retrieved(task: asyncio.Task[Any]) -> None:
    """Silence asyncio's warning: the next `write` or `flush` raises a refusal, unless the handler was cancelled."""
    if not task.cancelled():
        task.exception()


def progress_document(pct: int | None, message: str | None) -> dict[str, Any]:
    """Return the last reported progress as one document."""
    report: Any = None
    if message is not None:
        try:
            report = from_json(message.encode())
        except msgspec.DecodeError:
            report = {"message": message}
    report = report if isinstance(report, dict) else {}
    return report if pct is None else {**report, "pct": pct}


def progress_patch(patch: dict[str, Any] | str | None, pct: int | None) -> dict[str, Any]:
    """Return the arguments of `progress` as one merge patch."""
    fields: dict[str, Any] = {"message": patch} if isinstance(patch, str) else dict(patch or {})
    return fields if pct is None else {**fields, "pct": pct}


def apply_merge_patch(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Apply an RFC 7396 merge patch: named fields are replaced, null removes a field, objects are merged."""
    result = dict(document)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            below = result.get(name)
            result[name] = apply_merge_patch(below if isinstance(below, dict) else {}, value)
        else:
            result[name] = value
    return result
