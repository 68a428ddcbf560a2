"""Frames on their way: those of one attempt travel together and in order, one request at a time."""

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
FRAME_OVERHEAD_BYTES = 256  # what a frame takes beside its payload

QueuedFrame = tuple[dict[str, Any], asyncio.Future[Appended]]


class ClientStreamWriter(ClientBase):
    """What a handler writes while it works."""

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
        """Add a frame to the attempt's output; the order is that of the calls."""
        frame = {
            "payload_b64": payload,
            "frame_type": frame_type,
            "mode": str(mode),
            "correlation_id": correlation_id,
            "best_effort": best_effort,
        }
        holder = handle_to_text(handle, handle.signature)
        kept: asyncio.Future[Appended] = asyncio.get_running_loop().create_future()
        self._outgoing.setdefault(holder, []).append((frame, kept))
        if holder not in self._senders:
            self._senders[holder] = asyncio.create_task(self._send(holder))
        return await kept

    async def _send(self, holder: str) -> None:
        """Send what there is until there is nothing more."""
        try:
            while waiting := self._outgoing.get(holder):
                batch = _batch(waiting)
                del waiting[: len(batch)]
                await self._send_batch(holder, batch)
        finally:
            del self._senders[holder]
            for _, kept in self._outgoing.pop(holder, []):
                kept.cancel()

    async def _send_batch(self, holder: str, batch: list[QueuedFrame]) -> None:
        body = {"handle": holder, "frames": [frame for frame, _ in batch]}
        try:
            told = await self.transport.request("POST", "/v1/leases/frames", body)
            answers = [
                error_in_batch(one) or convert_variant(one, Appended)
                for one in decode_as(told.body, dict[str, Any])["results"]
            ]
        except errors.FabricError as refused:
            answers = [refused] * len(batch)
        except asyncio.CancelledError:
            for _, kept in batch:
                kept.cancel()
            raise
        for (_, kept), answer in zip(batch, answers, strict=True):
            if kept.done():
                continue
            if isinstance(answer, errors.FabricError):
                kept.set_exception(answer)
            else:
                kept.set_result(answer)


def _batch(waiting: list[QueuedFrame]) -> list[QueuedFrame]:
    """As many as one request holds, at least one."""
    batch: list[QueuedFrame] = []
    length = 0
    for one in waiting[:MAX_FRAMES]:
        length += FRAME_OVERHEAD_BYTES + len(one[0]["payload_b64"]) * 4 // 3
        if batch and length > WORK_LIMIT - FRAME_OVERHEAD_BYTES:
            break
        batch.append(one)
    return batch
