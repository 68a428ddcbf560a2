"""Output frames over HTTP: the frames of one attempt are sent in batches, in order, one request at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from flowfabric.api.encoding import WORK_LIMIT, handle_to_text
from flowfabric.api.streams import MAX_FRAMES
from flowfabric.batcher import KeyedBatcher
from flowfabric.client.base import ClientBase
from flowfabric.client.decoding import convert_variant, decode_as
from flowfabric.client.errors import error_in_batch
from flowfabric.client.transport import HttpTransport
from flowfabric.engine.types import Appended, BestEffort
from flowfabric.handles import Handle
from flowfabric.model.stream import FrameKind, FrameMode

DEFAULT_BEST_EFFORT = BestEffort()
FRAME_OVERHEAD_BYTES = 256  # encoded size of a frame without its payload

FrameBatcher = KeyedBatcher[str, dict[str, Any], Appended]  # by handle


class ClientStreamWriter(ClientBase):
    """Appends frames to the output of attempts."""

    _frames: FrameBatcher

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
        frame = {
            "payload_b64": payload,
            "frame_type": frame_type,
            "mode": str(mode),
            "correlation_id": correlation_id,
            "best_effort": best_effort,
        }
        return await self._frames.add(handle_to_text(handle, handle.signature), frame)


def frame_batcher(transport: HttpTransport) -> FrameBatcher:
    """Return a batcher that appends as many frames as fit into one request."""
    return KeyedBatcher(
        partial(_append, transport),
        max_items=MAX_FRAMES,
        max_weight=WORK_LIMIT - FRAME_OVERHEAD_BYTES,
        weight=lambda frame: FRAME_OVERHEAD_BYTES + len(frame["payload_b64"]) * 4 // 3,
    )


async def _append(
    transport: HttpTransport, handle_text: str, frames: list[dict[str, Any]]
) -> Sequence[Appended | Exception]:
    response = await transport.request("POST", "/v1/leases/frames", {"handle": handle_text, "frames": frames})
    results = decode_as(response.body, dict[str, Any])["results"]
    return [error_in_batch(entry) or convert_variant(entry, Appended) for entry in results]
