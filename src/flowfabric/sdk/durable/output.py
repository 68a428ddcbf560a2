"""What a handler says while it works: progress, and streams of output."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric.errors import FabricError
from flowfabric.handles import HandleKind
from flowfabric.sdk.durable.attempt import occurrence_scope
from flowfabric.sdk.serialization.values import from_json, json_bytes, to_plain

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine
    from flowfabric.handles import Handle

MAX_IN_FLIGHT = 64  # pieces of one output that may be on their way; then `write` waits
PAGE_SIZE = 1000
START_CURSOR = "0-0"
NUMBER_SEPARATOR = "#"  # stands between a piece's place and how many came before it there

WrittenCounts = Mapping[tuple[str, str], int]  # by output, and branch or step: how many pieces were written before


class ContextOutput(ABC):
    """The part of a context that talks to whoever watches."""

    engine: Engine
    run_id: str

    def __init__(self) -> None:
        self._outputs: dict[str, Output] = {}
        self._said: dict[str, Any] | None = None
        self._passed: WrittenCounts | None = None
        self._reading = asyncio.Lock()

    @property
    @abstractmethod
    def handle(self) -> Handle:
        """The lease under which this attempt runs."""

    async def progress(self, patch: dict[str, Any] | str | None = None, *, pct: int | None = None) -> None:
        """Say how far the work is: a JSON merge patch on what was said before, a message, or a percentage."""
        if self._said is None:
            self._said = progress_document(*await self.engine.read_progress(self.run_id))
        given: dict[str, Any] = {"message": patch} if isinstance(patch, str) else dict(patch or {})
        if pct is not None:
            given["pct"] = pct
        self._said = apply_merge_patch(self._said, given)
        share = self._said.get("pct")
        await self.engine.progress(
            self.handle,
            pct=share if isinstance(share, int) else None,
            message=json_bytes(to_plain(self._said)).decode(),
        )

    def stream(self, name: str) -> Output:
        """The attempt's output of this name; readers see it while it is written."""
        if name not in self._outputs:
            self._outputs[name] = Output(self.engine, self.handle, name, self._passed_by)
        return self._outputs[name]

    async def _passed_by(self) -> WrittenCounts:
        """What this attempt has written before it was put away; nothing, for one that was not."""
        async with self._reading:
            if self._passed is None:
                resumed = self.handle.kind is HandleKind.RESUMED
                self._passed = await count_written_frames(self.engine, self.handle) if resumed else {}
        return self._passed

    async def flush(self) -> None:
        """Wait until everything that was written is kept."""
        for output in self._outputs.values():
            await output.flush()

    async def flush_quietly(self) -> None:
        """The same before a failure is told, which matters more than what can no longer be kept."""
        with suppress(FabricError):
            await self.flush()


class Output:
    """What a handler writes while it works. Frames belong to the attempt: a retry begins anew.

    A function that goes on after a wait runs from the top, and comes to the pieces again that it wrote before. Like a
    step, a piece is known by how many came before it in its branch, or in the step that writes it; it is not written a
    second time.
    """

    def __init__(
        self,
        engine: Engine,
        handle: Handle,
        name: str,
        passed: Callable[[], Awaitable[WrittenCounts]],
    ) -> None:
        self._engine = engine
        self._handle = handle
        self._name = name
        self._counts: Counter[str] = Counter()
        self._passed = passed
        self._known: WrittenCounts | None = None
        self._written: list[str] = []
        self._under_way: set[asyncio.Task[Any]] = set()

    async def write(self, piece: str | bytes | dict[str, Any] | Sequence[Any]) -> None:
        """Add a piece. Pieces travel together; this waits when many are on their way, and raises once one is refused,
        as all are for a worker that lost its lease."""
        if isinstance(piece, bytes):
            payload = piece
        elif isinstance(piece, str):
            payload = piece.encode()
        else:
            payload = json_bytes(to_plain(piece))
        self._written.append(payload.decode("utf-8", "replace"))
        place = occurrence_scope()
        number = self._counts[place]
        self._counts[place] += 1
        if self._known is None:
            self._known = await self._passed()
        if number < self._known.get((self._name, place), 0):
            return
        adding = asyncio.create_task(
            self._engine.append_frame(
                self._handle, payload, frame_type=self._name, correlation_id=f"{place}{NUMBER_SEPARATOR}{number}"
            )
        )
        adding.add_done_callback(_heard)
        self._under_way.add(adding)
        await asyncio.sleep(0)  # so that a handler that never waits does not hold its pieces back
        self._forget_written()
        while len(self._under_way) >= MAX_IN_FLIGHT:
            await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
            self._forget_written()

    async def flush(self) -> None:
        """Wait until all of it is kept; raises when some was refused."""
        while self._under_way:
            await asyncio.wait(self._under_way)
            self._forget_written()

    def _forget_written(self) -> None:
        done = {task for task in self._under_way if task.done()}
        self._under_way -= done
        for task in done:
            task.result()

    def text(self) -> str:
        """Everything that was written so far."""
        return "".join(self._written)


async def count_written_frames(engine: Engine, handle: Handle) -> WrittenCounts:
    """How many pieces an attempt has, by output and place; they were written in order."""
    fields, after = handle.fields, START_CURSOR
    passed: dict[tuple[str, str], int] = {}
    while True:
        page = await engine.tail_stream(fields.execution_id, fields.attempt_index, after, count_limit=PAGE_SIZE)
        for frame in page.frames:
            place, numbered, number = frame.fields.get("correlation_id", "").rpartition(NUMBER_SEPARATOR)
            if numbered and number.isdecimal():
                output = (frame.fields["frame_type"], place)
                passed[output] = max(passed.get(output, 0), int(number) + 1)
        if len(page.frames) < PAGE_SIZE:
            return passed
        after = page.frames[-1].id


def _heard(task: asyncio.Task[Any]) -> None:
    """A refusal is raised by the next `write` or `flush`; a handler that was cancelled comes to neither."""
    if not task.cancelled():
        task.exception()


def progress_document(pct: int | None, message: str | None) -> dict[str, Any]:
    """What was said last, as one document."""
    said: Any = None
    if message is not None:
        try:
            said = from_json(message.encode())
        except msgspec.DecodeError:
            said = {"message": message}
    said = said if isinstance(said, dict) else {}
    return said if pct is None else {**said, "pct": pct}


def apply_merge_patch(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """RFC 7396: what the patch names is replaced, null takes away, objects are merged in turn."""
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
