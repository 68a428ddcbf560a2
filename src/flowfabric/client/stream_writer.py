"""Output frames over HTTP: the frames of one attempt are sent in batches, in order, one request at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from flowfabric import errors
from flowfabric.api.encoding import WORK_LIMIT, handle_to_text
from flowfabric.api.streams import MAX_FRAMES
from flowfabric.client.base import ClientBase
from flowfabric.client.decoding import convert_variant, decode_as
from flowfabric.client.errors import error_in_batch
from flowfabric.engine.types import Appended, BestEffort
from flowfabric.handles import Handle
from flowfabric.model.stream import FrameKind, FrameMode

DEFAULT_BEST_EFFORT = BestEffort()
FRAME_OVERHEAD_BYTES = 256  # encoded size of a frame without its payload

QueuedFrame = tuple[dict[str, Any], asyncio.Future[Appended]]


class ClientStreamWriter(ClientBase):
    """Appends frames to the output of attempts."""

    _outgoing: dict[str, list[QueuedFrame]]  # by handle
    _senders: dict[str, asyncio.Task[None]]

    async def append_frame(
        self,
        handle: Handle,
        payload: bytes,
        *,
        kind: FrameKind | str = FrameKind.EVENT,
        frame_type: str = "",
        mode: FrameMode | str = FrameMode.DURABLE,
        best_effort: BestEffort = DEFAULT_BEST_EFFORT,
        correlation_id: str | None = None,
        seq: int | None = None,
    ) -> Appended:
        """Append a frame to the output of the attempt, in the order of the calls."""
        frame = {
            "payload_b64": payload,
            "frame_type": frame_type,
            "mode": str(mode),
            "correlation_id": correlation_id,
            "best_effort": best_effort,
        }
        handle_text = handle_to_text(handle, handle.signature)
        appended: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        self._outgoing.setdefault(handle_text, []).append((frame, appended))
        if handle_text not in self._senders:
            self._senders[handle_text] = asyncio.create_task(self._send(handle_text))
        return await appended

    async def _send(self, handle_text: str) -> None:
        """Send batches until the queue is empty."""
        try:
            while queue := self._outgoing.get(handle_text):
                batch = _next_batch(queue)
                del queue[: len(batch)]
                await self._send_batch(handle_text, batch)
        finally:
            del self._senders[handle_text]
            for _, appended in self._outgoing.pop(handle_text, []):
                appended.cancel()

    async def _send_batch(self, handle_text: str, batch: list[QueuedFrame]) -> None:
        body = {"handle": handle_text, "frames": [frame for frame, _ in batch]}
        try:
            response = await self.transport.request("POST", "/v1/leases/frames", body)
            answers = [
                error_in_batch(entry) or convert_variant(entry, Appended)
                for entry in decode_as(response.body, dict[str, Any])["results"]
            ]
        except errors.FabricError as refused:
            answers = [refused] * len(batch)
        except asyncio.CancelledError:
            for _, appended in batch:
                appended.cancel()
            raise
        for (_, appended), answer in zip(batch, answers, strict=True):
            if appended.done():
                continue
            if isinstance(answer, errors.FabricError):
                appended.set_exception(answer)
            else:
                appended.set_result(answer)


def _next_batch(queue: list[QueuedFrame]) -> list[QueuedFrame]:
    """Return as many frames as fit into one request, at least one."""
    batch: list[QueuedFrame] = []
    length = 0
    for entry in queue[:MAX_FRAMES]:
        length += FRAME_OVERHEAD_BYTES + len(entry[0]["payload_b64"]) * 4 // 3
        if batch and length > WORK_LIMIT - FRAME_OVERHEAD_BYTES:
            break
        batch.append(entry)
    return batch
