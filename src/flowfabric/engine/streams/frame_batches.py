"""Frame writer: appends the frames of each attempt in order and in batches."""

from __future__ import annotations

from flowfabric import errors
from flowfabric.batcher import KeyedBatcher
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.execution import Execution
from flowfabric.model.stream import Stream, StreamSummary
from flowfabric.rules.stream import append as append_rules
from flowfabric.rules.stream.append import Appended, FrameArgs

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
        """Append a frame after those that were added before."""
        return await self._batches.add(key, frame)

    async def drain(self) -> None:
        """Wait until every added frame is written or refused."""
        await self._batches.drain()

    async def _append_batch(self, key: AttemptKey, frames: list[FrameArgs]) -> append_rules.AppendResults:
        reads = ReadSet()
        row, stream, summary = reads.one(Execution, key[0]), reads.one(Stream, *key), reads.one(StreamSummary, *key)
        try:
            return await self.runtime.decide_and_commit(
                reads,
                lambda rows, now: append_rules.append_frames(row(rows), stream(rows), summary(rows), frames, now),
            )
        except errors.FabricError:
            raise
        except Exception as bug:
            raise errors.BugError(f"append_frame: {bug!r}") from bug
