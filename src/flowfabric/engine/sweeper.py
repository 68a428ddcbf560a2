"""Sweeps: what time makes due is done by any process that runs a sweeper; there is no leader.

Each sweep holds a short lease on its own name, so that many processes do not fetch the same rows, looks for rows whose
instant has come, and hands each to the verb that decides about it again. It then sleeps until the next instant that it
saw, at most its interval. A sweep that fails is tried again after a growing pause; stopping waits for the item in hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable

import msgspec

from flowfabric import errors
from flowfabric.engine.claims import Claims
from flowfabric.engine.wakes import due_topic
from flowfabric.model import answers
from flowfabric.model.execution import Execution
from flowfabric.model.sweep import SweepLease
from flowfabric.rules import expiry, limits, sweeps
from flowfabric.settings import Sweeps
from flowfabric.stores.base import Want, Where

logger = logging.getLogger("flowfabric.sweeper")

LEAST_INTERVAL_MS = 100
LONGEST_PAUSE_S = 30.0


class Pass(msgspec.Struct, frozen=True):
    """What one pass of a sweep did, and when the next row falls due."""

    processed: int
    errors: int
    now: int = 0
    next_at: int | None = None


class Sweep(msgspec.Struct, frozen=True):
    """One kind of due work: which instant, and the verb that decides about a row whose instant has come.

    `whole` is for work that is not found by an instant of an execution: it makes a pass of its own.
    """

    name: str
    column: str = ""
    act: Callable[[str], Awaitable[bool]] | None = None
    where: tuple[Where, ...] = ()
    whole: Callable[[int], Awaitable[Pass]] | None = None


class Sweeper:
    """The background sweeps of one process."""

    def __init__(self, engine: Claims, settings: Sweeps, more: Iterable[Sweep] = ()) -> None:
        self._engine = engine
        self._settings = settings
        self._holder = engine.minter.uuid()
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.sweeps = {sweep.name: sweep for sweep in (*_sweeps(engine), *more)}

    def start(self) -> None:
        """Run every sweep that has an interval."""
        for sweep in self.sweeps.values():
            interval = getattr(self._settings, f"{sweep.name}_ms")
            if interval > 0:
                self._tasks.append(asyncio.create_task(self._run(sweep, max(interval, LEAST_INTERVAL_MS))))

    async def stop(self, grace_s: float = 15.0) -> int:
        """Stop after the item in hand; how many sweeps did not make it in time and were cut off."""
        self._stopping.set()
        if not self._tasks:
            return 0
        _, late = await asyncio.wait(self._tasks, timeout=grace_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        return len(late)

    async def sweep_once(self, name: str) -> Pass:
        """One pass now, whoever holds the sweep."""
        sweep = self.sweeps.get(limits.text("sweep", name))
        if sweep is None:
            raise errors.InvalidInput(f"sweep: {name!r} is none of {', '.join(self.sweeps)}")
        return await self._pass(sweep)

    async def _run(self, sweep: Sweep, interval_ms: int) -> None:
        failures = 0
        while not self._stopping.is_set():
            pause_s = interval_ms / 1000
            hint = self._engine.wakes.expect(due_topic(Execution, sweep.column))
            try:
                if await self._hold(sweep, interval_ms * 3):
                    done = await self._pass(sweep)
                    if done.next_at is not None:
                        pause_s = min(pause_s, max(0.0, (done.next_at - done.now) / 1000))
                    if done.processed == self._settings.batch:
                        pause_s = 0.0
                failures = 0
            except errors.StoreUnavailable as away:
                failures += 1
                pause_s = min(LONGEST_PAUSE_S, pause_s * 2**failures)
                logger.warning("sweep %s: the store is away (%s); next try in %.1f s", sweep.name, away, pause_s)
            await self._sleep(sweep, pause_s, hint)
        with contextlib.suppress(errors.FabricError):
            await self._let_go(sweep)

    async def _sleep(self, sweep: Sweep, pause_s: float, hint: asyncio.Future[None]) -> None:
        """Until the pause is over, something falls due earlier, or it is time to stop."""
        planned, key = self._engine.planned, (Execution, sweep.column)
        if sweep.column:
            planned[key] = self._engine.estimate.now() + int(pause_s * 1000)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((stopping, hint), timeout=max(0.001, pause_s), return_when=asyncio.FIRST_COMPLETED)
        finally:
            planned.pop(key, None)
            stopping.cancel()
            hint.cancel()

    async def _pass(self, sweep: Sweep) -> Pass:
        if sweep.whole is not None:
            return await sweep.whole(self._settings.batch)
        due = await self._engine.store.due(Execution, sweep.column, limit=self._settings.batch, where=sweep.where)
        self._engine.estimate.hear(due.now)
        acts = await asyncio.gather(*(self._act(sweep, row.execution_id) for row in due.rows))
        return Pass(sum(act is True for act in acts), sum(act is None for act in acts), due.now, due.next_at)

    async def _act(self, sweep: Sweep, execution_id: str) -> bool | None:
        if self._stopping.is_set() or sweep.act is None:
            return False
        try:
            return await sweep.act(execution_id)
        except errors.StoreUnavailable:
            raise
        except errors.FabricError:
            logger.exception("sweep %s: %s was left for the next pass", sweep.name, execution_id)
            return None

    async def _hold(self, sweep: Sweep, ttl_ms: int) -> bool:
        return await self._engine.settle(
            (Want(SweepLease, (sweep.name,)),),
            lambda rows, now: sweeps.hold(rows[0][0] if rows[0] else None, sweep.name, self._holder, ttl_ms, now),
        )

    async def _let_go(self, sweep: Sweep) -> bool:
        return await self._engine.settle(
            (Want(SweepLease, (sweep.name,)),),
            lambda rows, _: sweeps.let_go(rows[0][0] if rows[0] else None, self._holder),
        )


def _sweeps(engine: Claims) -> tuple[Sweep, ...]:
    async def mark(execution_id: str) -> bool:
        return isinstance(await engine.mark_lease_expired_if_due(execution_id), answers.MarkedExpired)

    async def promote(execution_id: str) -> bool:
        return await engine.promote_delayed(execution_id) is answers.Promotion.PROMOTED

    def expire(reason: str) -> Callable[[str], Awaitable[bool]]:
        async def act(execution_id: str) -> bool:
            return isinstance(await engine.expire_if_due(execution_id, reason), answers.Expired)

        return act

    return (
        Sweep("lease_expiry", "lease_expires_at", mark, (Where("lease_expired_at", "unset"),)),
        Sweep("delayed_promoter", "delay_until", promote),
        Sweep("attempt_timeout", "attempt_timeout_at", expire(expiry.ATTEMPT_TIMEOUT)),
        Sweep("execution_deadline", "deadline_at", expire(expiry.EXECUTION_DEADLINE)),
        Sweep("retention_trimmer", "purge_at", engine.purge_execution),
    )
