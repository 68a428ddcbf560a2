"""What a handler says while it works: progress, and streams of output."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from flowfabric.sdk.codec import from_json, json_bytes, to_plain

if TYPE_CHECKING:
    from flowfabric.engine.engine import Engine
    from flowfabric.handles import Handle

MOST_UNDER_WAY = 64  # pieces of one output that may be on their way; then `write` waits


class Saying(ABC):
    """The part of a context that talks to whoever watches."""

    engine: Engine
    run_id: str

    def __init__(self) -> None:
        self._outputs: dict[str, Output] = {}
        self._said: dict[str, Any] | None = None

    @property
    @abstractmethod
    def handle(self) -> Handle:
        """The lease under which this attempt runs."""

    async def progress(self, patch: dict[str, Any] | str | None = None, *, pct: int | None = None) -> None:
        """Say how far the work is: a JSON merge patch on what was said before, a message, or a percentage."""
        if self._said is None:
            self._said = progress_of(*await self.engine.read_progress(self.run_id))
        given: dict[str, Any] = {"message": patch} if isinstance(patch, str) else dict(patch or {})
        if pct is not None:
            given["pct"] = pct
        self._said = merged(self._said, given)
        share = self._said.get("pct")
        await self.engine.progress(
            self.handle,
            pct=share if isinstance(share, int) else None,
            message=json_bytes(to_plain(self._said)).decode(),
        )

    def stream(self, name: str) -> Output:
        """The attempt's output of this name; readers see it while it is written."""
        if name not in self._outputs:
            self._outputs[name] = Output(self.engine, self.handle, name)
        return self._outputs[name]

    async def flush(self) -> None:
        """Wait until everything that was written is kept."""
        for output in self._outputs.values():
            await output.flush()


class Output:
    """What a handler writes while it works. Frames belong to the attempt: a retry begins anew."""

    def __init__(self, engine: Engine, handle: Handle, name: str) -> None:
        self._engine = engine
        self._handle = handle
        self._name = name
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
        adding = asyncio.create_task(self._engine.append_frame(self._handle, payload, frame_type=self._name))
        adding.add_done_callback(_heard)
        self._under_way.add(adding)
        self._written.append(payload.decode("utf-8", "replace"))
        await asyncio.sleep(0)  # so that a handler that never waits does not hold its pieces back
        self._forget_written()
        while len(self._under_way) >= MOST_UNDER_WAY:
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


def _heard(task: asyncio.Task[Any]) -> None:
    """A refusal is raised by the next `write` or `flush`; a handler that was cancelled comes to neither."""
    if not task.cancelled():
        task.exception()


def progress_of(pct: int | None, message: str | None) -> dict[str, Any]:
    """What was said last, as one document."""
    said: Any = None
    if message is not None:
        try:
            said = from_json(message.encode())
        except msgspec.DecodeError:
            said = {"message": message}
    said = said if isinstance(said, dict) else {}
    return said if pct is None else {**said, "pct": pct}


def merged(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """RFC 7396: what the patch names is replaced, null takes away, objects are merged in turn."""
    result = dict(document)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            below = result.get(name)
            result[name] = merged(below if isinstance(below, dict) else {}, value)
        else:
            result[name] = value
    return result
