"""Heartbeats: leases are renewed from a thread of its own with a connection of its own.

A handler that blocks the event loop does not lose its work that way. But a loop that makes no turn for very long is
not alive either: after `stall_limit` the thread stops renewing, so that somebody else can take the work. So it does for
a handler that goes on although its timeout is over, because it blocks the loop or does not listen.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence

from flowfabric.engine_api import EngineAPI
from flowfabric.errors import FabricError, LeaseExpired, SchemaTooNew, StoreUnavailable, Unauthorized
from flowfabric.model.answers.execution import Claimed
from flowfabric.sdk.worker.registration import WorkerRegistrar

logger = logging.getLogger("flowfabric.worker")

BLOCKED_AFTER_S = 1.0
STOP_TIMEOUT_S = 5.0
LOOP_CHECK_INTERVAL_S = 0.5  # how often the thread looks whether the loop turns

OnLeaseLost = Callable[[str, FabricError], None]


class HeldLeases:
    """What a worker holds, and until when; asked and told by several threads."""

    def __init__(self, time_of: Callable[[Claimed], float | None]) -> None:
        """`time_of` tells how many seconds a handler has; None for one whose time does not run."""
        self._time_of = time_of
        self._held: dict[str, Claimed] = {}
        self._until: dict[str, int] = {}  # of those that were renewed
        self._seen_at: dict[str, float] = {}  # of those whose time runs: when a renewal first came by
        self._lock = threading.Lock()
        self.failed_renewals = 0  # renewals in a row that found no store
        self.any_held = asyncio.Event()  # set on the worker's loop only

    def add(self, claimed: Sequence[Claimed]) -> None:
        """Renew these leases from now on."""
        with self._lock:
            self._held.update({one.lease_id: one for one in claimed})
        if self._held:
            self.any_held.set()

    def remove(self, claimed: Sequence[Claimed]) -> None:
        """Renew them no more."""
        with self._lock:
            for one in claimed:
                self._held.pop(one.lease_id, None)
                if self._until:
                    self._until.pop(one.lease_id, None)
            if not self._held:
                self.any_held.clear()

    def stop_renewing(self, lease_id: str) -> None:
        """Renew it no more although its handler goes on; for tests."""
        if (claimed := self._held.get(lease_id)) is not None:
            self.remove([claimed])

    def expires_at(self, lease_id: str) -> int:
        """When the lease ends as far as we know, by the store's clock; 0 for one that is not held."""
        if (renewed := self._until.get(lease_id)) is not None:
            return renewed
        return 0 if (claimed := self._held.get(lease_id)) is None else claimed.lease_expires_at

    async def renew_all(self, engine: EngineAPI, ttl_ms: int) -> list[tuple[str, FabricError]]:
        """Renew everything; the leases that turned out to be lost, which are let go of."""
        lost = self._give_up_overdue(ttl_ms)
        with self._lock:
            held = list(self._held.values())
        if not held:
            return lost
        try:
            answers = await engine.renew_many([claimed.handle for claimed in held], lease_ttl_ms=ttl_ms)
        except (StoreUnavailable, Unauthorized) as away:
            logger.warning("renewal: the store is away (%s); trying again", away)
            self.failed_renewals += 1
            return lost
        self.failed_renewals = 0
        for claimed, answer in zip(held, answers, strict=True):
            if not isinstance(answer, FabricError):
                with self._lock:
                    if claimed.lease_id in self._held:
                        self._until[claimed.lease_id] = answer.expires_at
            elif not isinstance(answer, StoreUnavailable):
                self.remove([claimed])
                lost.append((claimed.lease_id, answer))
        return lost

    def _give_up_overdue(self, ttl_ms: int) -> list[tuple[str, FabricError]]:
        """Let go of leases whose handlers should have ended; they have the length of a lease to come to their end."""
        now = asyncio.get_running_loop().time()
        with self._lock:
            held = list(self._held.values())
        timed = [(claimed, limit_s) for claimed in held if (limit_s := self._time_of(claimed)) is not None]
        self._seen_at = {claimed.lease_id: self._seen_at.get(claimed.lease_id, now) for claimed, _ in timed}
        given_up: list[tuple[str, FabricError]] = []
        for claimed, limit_s in timed:
            if now - self._seen_at[claimed.lease_id] > limit_s + ttl_ms / 1000:
                words = f"its handler goes on although its {limit_s:g} s are over: its lease is renewed no more"
                logger.error("%s: %s", claimed.execution_id, words)
                self.remove([claimed])
                given_up.append((claimed.lease_id, LeaseExpired(words, execution_id=claimed.execution_id)))
        return given_up


class Heartbeat:
    """Renews what a worker holds, and keeps the worker in the registry, beside its event loop."""

    def __init__(
        self,
        leases: HeldLeases,
        presence: WorkerRegistrar,
        *,
        connect: Callable[[], Awaitable[EngineAPI]],
        lease_ttl_ms: int,
        on_lost: OnLeaseLost,
        stall_limit_s: float,
        on_schema_too_new: Callable[[SchemaTooNew], None],
    ) -> None:
        """`engine` makes a connection for this thread; `lost` is called on the worker's loop for each lost lease, and
        `newer` when the store's schema has become too new."""
        self._leases = leases
        self._presence = presence
        self._engine = connect
        self._ttl_ms = lease_ttl_ms
        self._lost = on_lost
        self._stall_limit_s = stall_limit_s
        self._newer = on_schema_too_new
        self._stop = threading.Event()
        self._turned_at = time.monotonic()
        self._reported = self._gave_up = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; must be called on the worker's event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._turn()
        self._thread = threading.Thread(target=self._run, name="flowfabric-heartbeat", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread; returns when it has ended, or waits for a store that does not answer."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    def _turn(self) -> None:
        """Note that the worker's loop turns, and again in a while."""
        self._turned_at = time.monotonic()
        if not self._stop.is_set():
            self._loop.call_later(min(0.25, self._ttl_ms / 6000), self._turn)

    def _run(self) -> None:
        asyncio.run(self._beat())

    async def _beat(self) -> None:
        """Go on until told to stop, with another connection whenever one cannot be had or something goes wrong."""
        while not self._stop.is_set():
            try:
                engine = await self._engine()
            except SchemaTooNew as newer:
                self._loop.call_soon_threadsafe(self._newer, newer)
                return
            except FabricError as away:
                logger.warning("heartbeat: no connection (%s); trying again", away)
                await self._pause()
                continue
            try:
                await self._beat_on(engine)
            except SchemaTooNew as newer:
                self._loop.call_soon_threadsafe(self._newer, newer)
                return
            except Exception:
                logger.exception("the heartbeat stumbled, and goes on with another connection")
                await self._pause()
            finally:
                with contextlib.suppress(FabricError):
                    await engine.close()

    async def _beat_on(self, engine: EngineAPI) -> None:
        renew_at = keep_at = 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            alive = self._watch_loop(now - self._turned_at)
            if alive and now >= renew_at:
                renew_at = now + self._ttl_ms / 3000
                for lease_id, why in await self._leases.renew_all(engine, self._ttl_ms):
                    self._loop.call_soon_threadsafe(self._lost, lease_id, why)
                if self._leases.failed_renewals == 1:
                    renew_at = 0.0  # over another connection, and soon: a third of the lease is gone
            if alive and now >= keep_at:
                keep_at = now + self._presence.ttl_ms / 3000
                await self._presence.refresh(engine)
            await self._pause()

    async def _pause(self) -> None:
        await asyncio.to_thread(self._stop.wait, min(LOOP_CHECK_INTERVAL_S, self._ttl_ms / 3000))

    def _watch_loop(self, silent_s: float) -> bool:
        """Report a loop that is blocked, once; False when it has been silent for so long that it counts as dead."""
        if silent_s < BLOCKED_AFTER_S:
            self._reported = self._gave_up = False
        elif not self._reported:
            self._reported = True
            logger.warning("the event loop has been blocked for %.1f s by:\n%s", silent_s, self._blocker())
        if silent_s < self._stall_limit_s:
            return True
        if not self._gave_up:
            self._gave_up = True
            logger.error(
                "the event loop has been blocked for %.1f s: its leases are renewed no more. Blocked by:\n%s",
                silent_s,
                self._blocker(),
            )
        return False

    def _blocker(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        return "".join(traceback.format_stack(frame)) if frame else "(unknown)"


class LoopHeartbeat:
    """The same on the worker's own loop, for a store that lives there."""

    def __init__(
        self,
        leases: HeldLeases,
        presence: WorkerRegistrar,
        *,
        engine: EngineAPI,
        lease_ttl_ms: int,
        on_lost: OnLeaseLost,
    ) -> None:
        self._leases = leases
        self._presence = presence
        self._engine = engine
        self._ttl_ms = lease_ttl_ms
        self._lost = on_lost
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._beat()), loop.create_task(self._stay())]

    async def stop(self) -> None:
        """End."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _beat(self) -> None:
        while True:
            await self._leases.any_held.wait()  # so that virtual time has no beats to go through while nothing runs
            await asyncio.sleep(self._ttl_ms / 3000)
            for lease_id, why in await self._leases.renew_all(self._engine, self._ttl_ms):
                self._lost(lease_id, why)

    async def _stay(self) -> None:
        while True:
            await asyncio.sleep(self._presence.ttl_ms / 3000)
            await self._presence.refresh(self._engine)
