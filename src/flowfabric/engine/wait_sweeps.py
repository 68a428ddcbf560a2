"""The sweeps of waiting work: timeouts, waitpoints that were never used, children nobody took in, old events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import msgspec

from flowfabric import errors
from flowfabric.engine.sweeper import Pass, Sweep
from flowfabric.model.gate import ChildEnd
from flowfabric.model.suspension import Suspension, Waitpoint
from flowfabric.rules.resuming import Expiry
from flowfabric.stores.base import Store

logger = logging.getLogger("flowfabric.sweeper")

UNTOUCHED = (Expiry.NOT_DUE, Expiry.NOT_SUSPENDED)


class Waiting(Protocol):
    """What these sweeps need of an engine."""

    store: Store

    async def expire_suspension(self, execution_id: str) -> Expiry: ...
    async def expire_pending_waitpoint(self, waitpoint: Waitpoint) -> bool: ...
    async def take_in_children(self, parent_id: str) -> int: ...
    async def trim_feed(self) -> int: ...


def sweeps(engine: Waiting) -> tuple[Sweep, ...]:
    """All of them."""

    async def time_out(row: Suspension) -> bool:
        return await engine.expire_suspension(row.execution_id) not in UNTOUCHED

    async def take_in(row: ChildEnd) -> bool:
        return await engine.take_in_children(row.parent_id) > 0

    async def trim(_: int) -> Pass:
        return Pass(await engine.trim_feed(), 0)

    return (
        Sweep("suspension_timeout", whole=_by_instant(engine, Suspension, "due_at", time_out)),
        Sweep(
            "pending_wp_expiry", whole=_by_instant(engine, Waitpoint, "pending_until", engine.expire_pending_waitpoint)
        ),
        Sweep("child_ends", whole=_by_instant(engine, ChildEnd, "due_at", take_in)),
        Sweep("feed_trimmer", whole=trim),
    )


def _by_instant(
    engine: Waiting, row: type[msgspec.Struct], column: str, act: Callable[[Any], Awaitable[bool]]
) -> Callable[[int], Awaitable[Pass]]:
    """A pass over rows of one kind whose instant has come."""

    async def one(found: Any) -> bool | None:
        try:
            return await act(found)
        except errors.StoreUnavailable:
            raise
        except errors.FabricError:
            logger.exception("sweep of %s.%s: a row was left for the next pass", row.__name__, column)
            return None

    async def whole(limit: int) -> Pass:
        due = await engine.store.due(row, column, limit=limit)
        acts = await asyncio.gather(*(one(found) for found in due.rows))
        return Pass(sum(act is True for act in acts), sum(act is None for act in acts), due.now, due.next_at)

    return whole
