"""Frames on their way: those of one attempt travel together and in order, one request at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from flowfabric import errors
from flowfabric.api.encoding import write_handle
from flowfabric.client.base import Asking
from flowfabric.client.decoding import read, variant_of
from flowfabric.client.errors import among_answers
from flowfabric.engine.types import Appended, BestEffort
from flowfabric.handles import Handle
from flowfabric.model.stream import FrameKind, FrameMode
from flowfabric.server.routes.leases import MAX_FRAMES
from flowfabric.server.routing import WORK_LIMIT

NO_LIMITS = BestEffort()
FRAME_BYTES = 256  # what a frame takes beside its payload

Waiting = tuple[dict[str, Any], asyncio.Future[Appended]]


class Frames(Asking):
    """What a handler writes while it works."""

    _outgoing: dict[str, list[Waiting]]  # by handle
    _senders: dict[str, asyncio.Task[None]]

    async def append_frame(
        self,
        handle: Handle,
        payload: bytes,
        *,
        kind: FrameKind | str = FrameKind.EVENT,
        frame_type: str = "",
        mode: FrameMode | str = FrameMode.DURABLE,
        best_effort: BestEffort = NO_LIMITS,
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
        holder = write_handle(handle, handle.signature)
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

    async def _send_batch(self, holder: str, batch: list[Waiting]) -> None:
        body = {"handle": holder, "frames": [frame for frame, _ in batch]}
        try:
            told = await self.wire.ask("POST", "/v1/leases/frames", body)
            answers = [
                among_answers(one) or variant_of(one, Appended) for one in read(told.body, dict[str, Any])["results"]
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


def _batch(waiting: list[Waiting]) -> list[Waiting]:
    """As many as one request holds, at least one."""
    batch: list[Waiting] = []
    length = 0
    for one in waiting[:MAX_FRAMES]:
        length += FRAME_BYTES + len(one[0]["payload_b64"]) * 4 // 3
        if batch and length > WORK_LIMIT - FRAME_BYTES:
            break
        batch.append(one)
    return batch
