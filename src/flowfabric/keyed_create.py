"""Create a run under a fresh id that fits its idempotency key, even if the spread of its lane changes meanwhile."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

from flowfabric.errors import KeyElsewhere

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.ids import ExecutionId

A = TypeVar("A")


def key_of(idempotency_key: str | None) -> str | None:
    """Return a run's key as people know it, without the name of its task."""
    return None if idempotency_key is None else idempotency_key.partition("|")[2] or idempotency_key


MAX_MINTS = 3  # the spread of a lane changes once in ten seconds at most


async def create_with_fresh_id(
    engine: EngineAPI, lane_id: str, idempotency_key: str | None, create: Callable[[ExecutionId], Awaitable[A]]
) -> A:
    """Mint an id and create; mint again if the spread of the lane has changed since."""
    for _ in range(MAX_MINTS - 1):
        try:
            return await create(engine.new_execution_id(lane_id, idempotency_key))
        except KeyElsewhere:
            await engine.refresh_lanes()
    return await create(engine.new_execution_id(lane_id, idempotency_key))
