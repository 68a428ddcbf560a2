"""Frame writer: frames of one attempt are appended in order and in batches."""

from __future__ import annotations

from flowfabric import errors
from flowfabric.batcher import KeyedBatcher
from flowfabric.engine.runtime.after_commit import first
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.execution import Execution
from flowfabric.model.stream import Stream, StreamSummary
from flowfabric.rules.stream import append as append_rules
from flowfabric.rules.stream.append import Appended, FrameArgs
from flowfabric.stores.queries import Read

BATCH_FRAMES = 500
BATCH_BYTES = 4 * 1024 * 1024

AttemptKey = tuple[str, int]  # execution id and attempt index


class FrameWriter:
    """Appends the frames of every attempt that this process runs."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._batches = KeyedBatcher[AttemptKey, FrameArgs, Appended](
            self._append_batch, max_items=BATCH_FRAMES, max_weight=BATCH_BYTES, weight=lambda frame: len(frame.payload)
        )

    async def append(self, key: AttemptKey, frame: FrameArgs) -> Appended:
        """Append a frame after those that were handed in before."""
        return await self._batches.add(key, frame)

    async def drain(self) -> None:
        """Wait until every frame that was handed in is written or refused."""
        await self._batches.drain()

    async def _append_batch(self, key: AttemptKey, frames: list[FrameArgs]) -> append_rules.AppendResults:
        try:
            return await self.runtime.decide_and_commit(
                (Read(Execution, key[:1]), Read(Stream, key), Read(StreamSummary, key)),
                lambda rows, now: append_rules.append_frames(
                    first(rows[0]), first(rows[1]), first(rows[2]), frames, now
                ),
            )
        except errors.FabricError:
            raise
        except Exception as bug:
            raise errors.BugError(f"append_frame: {bug!r}") from bug
