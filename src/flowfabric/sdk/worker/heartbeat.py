"""Heartbeats: a thread with its own loop and connection renews the worker's leases and its registration.

A handler that blocks the event loop therefore does not lose its lease. But a loop that is blocked for longer than
`stall_limit` counts as dead: the thread stops renewing, so that another worker can claim the work. It also stops for a
handler that runs on after its timeout, because it blocks the loop or ignores its cancellation.
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
from typing import TYPE_CHECKING

from flowfabric.errors import FabricError, LeaseExpired, SchemaTooNew, StoreUnavailable, Unauthorized
from flowfabric.event_loop import start_task
from flowfabric.model.answers.execution import Claimed
from flowfabric.sdk.worker.registration import WorkerRegistrar

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI

logger = logging.getLogger("flowfabric.worker")

BLOCKED_AFTER_S = 1.0
STOP_TIMEOUT_S = 5.0
LOOP_CHECK_INTERVAL_S = 0.5

OnLeaseLost = Callable[[str, FabricError], None]


class HeldLeases:
    """The leases that a worker holds, and when they expire; thread-safe."""

    def __init__(self, handler_timeout_s: Callable[[Claimed], float | None]) -> None:
        """Hold nothing yet. `handler_timeout_s` returns the timeout of a running handler; None if it has none."""
        self._handler_timeout_s = handler_timeout_s
        self._held: dict[str, Claimed] = {}
        self._renewed_until: dict[str, int] = {}
        self._first_seen_at: dict[str, float] = {}  # of handlers with a timeout: the first renewal that saw it running
        self._lock = threading.Lock()
        self.failed_renewals = 0  # consecutive renewals that did not reach the store
        self.any_held = asyncio.Event()  # set on the worker's loop only

    def add(self, claimed: Sequence[Claimed]) -> None:
        """Renew these leases from now on."""
        with self._lock:
            self._held.update({row.lease_id: row for row in claimed})
        if self._held:
            self.any_held.set()

    def remove(self, claimed: Sequence[Claimed]) -> None:
        """Stop renewing these leases."""
        with self._lock:
            for row in claimed:
                self._held.pop(row.lease_id, None)
                if self._renewed_until:
                    self._renewed_until.pop(row.lease_id, None)
            if not self._held:
                self.any_held.clear()

    def stop_renewing(self, lease_id: str) -> None:
        """Stop renewing a lease although its handler is running; for tests."""
        if (claimed := self._held.get(lease_id)) is not None:
            self.remove([claimed])

    def expires_at(self, lease_id: str) -> int:
        """Return the last known expiry of a lease by the store's clock; 0 if it is not held."""
        if (renewed_until := self._renewed_until.get(lease_id)) is not None:
            return renewed_until
        return 0 if (claimed := self._held.get(lease_id)) is None else claimed.lease_expires_at

    async def renew_all(self, engine: EngineAPI, ttl_ms: int) -> list[tuple[str, FabricError]]:
        """Renew all leases in one round trip; remove and return those that are lost."""
        lost = self._remove_overdue(ttl_ms)
        with self._lock:
            held = list(self._held.values())
        if not held:
            return lost
        try:
            answers = await engine.renew_many([claimed.handle for claimed in held], lease_ttl_ms=ttl_ms)
        except (StoreUnavailable, Unauthorized) as error:
            logger.warning("renewal: the store is unavailable (%s); trying again", error)
            self.failed_renewals += 1
            return lost
        self.failed_renewals = 0
        for claimed, answer in zip(held, answers, strict=True):
            if not isinstance(answer, FabricError):
                with self._lock:
                    if claimed.lease_id in self._held:
                        self._renewed_until[claimed.lease_id] = answer.expires_at
            elif not isinstance(answer, StoreUnavailable):
                self.remove([claimed])
                lost.append((claimed.lease_id, answer))
        return lost

    def _remove_overdue(self, ttl_ms: int) -> list[tuple[str, FabricError]]:
        """Remove and return leases whose handlers run on for more than the length of a lease after their timeout."""
        now = asyncio.get_running_loop().time()
        with self._lock:
            held = list(self._held.values())
        timed = [(claimed, limit_s) for claimed in held if (limit_s := self._handler_timeout_s(claimed)) is not None]
        self._first_seen_at = {claimed.lease_id: self._first_seen_at.get(claimed.lease_id, now) for claimed, _ in timed}
        overdue: list[tuple[str, FabricError]] = []
        for claimed, limit_s in timed:
            if now - self._first_seen_at[claimed.lease_id] > limit_s + ttl_ms / 1000:
                message = f"its handler is still running after its {limit_s:g} s: its lease is no longer renewed"
                logger.error("%s: %s", claimed.execution_id, message)
                self.remove([claimed])
                overdue.append((claimed.lease_id, LeaseExpired(message, execution_id=claimed.execution_id)))
        return overdue


class Heartbeat:
    """Renews a worker's leases and its registration from a thread beside its event loop."""

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
        """Prepare the thread; `start` starts it.

        `connect` opens an engine for the thread. `on_lost` is called on the worker's loop for each lost lease, and
        `on_schema_too_new` if a newer release has changed the store's schema.
        """
        self._leases = leases
        self._presence = presence
        self._connect = connect
        self._ttl_ms = lease_ttl_ms
        self._on_lost = on_lost
        self._stall_limit_s = stall_limit_s
        self._on_schema_too_new = on_schema_too_new
        self._stop = threading.Event()
        self._loop_alive_at = time.monotonic()
        self._has_warned = self._has_given_up = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; must be called on the worker's event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._note_loop_alive()
        self._thread = threading.Thread(target=self._run, name="flowfabric-heartbeat", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Stop the thread; return when it has ended, or after `STOP_TIMEOUT_S` if the store does not answer."""
        self._stop.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    def _note_loop_alive(self) -> None:
        """Note that the worker's loop runs, and schedule the next note."""
        self._loop_alive_at = time.monotonic()
        if not self._stop.is_set():
            self._loop.call_later(min(0.25, self._ttl_ms / 6000), self._note_loop_alive)

    def _run(self) -> None:
        asyncio.run(self._beat_until_stopped())

    async def _beat_until_stopped(self) -> None:
        """Beat until stopped, with a new connection after each failure."""
        while not self._stop.is_set():
            try:
                engine = await self._connect()
            except SchemaTooNew as error:
                self._loop.call_soon_threadsafe(self._on_schema_too_new, error)
                return
            except FabricError as error:
                logger.warning("heartbeat: no connection (%s); trying again", error)
                await self._wait()
                continue
            try:
                await self._beat(engine)
            except SchemaTooNew as error:
                self._loop.call_soon_threadsafe(self._on_schema_too_new, error)
                return
            except Exception:
                logger.exception("the heartbeat failed, and continues with another connection")
                await self._wait()
            finally:
                with contextlib.suppress(FabricError):
                    await engine.close()

    async def _beat(self, engine: EngineAPI) -> None:
        renew_at = refresh_at = 0.0
        while not self._stop.is_set():
            now = time.monotonic()
            is_alive = self._check_loop(now - self._loop_alive_at)
            if is_alive and now >= renew_at:
                renew_at = now + self._ttl_ms / 3000
                for lease_id, error in await self._leases.renew_all(engine, self._ttl_ms):
                    self._loop.call_soon_threadsafe(self._on_lost, lease_id, error)
                if self._leases.failed_renewals == 1:
                    renew_at = 0.0  # retry soon, on another connection: a third of the lease has passed
            if is_alive and now >= refresh_at:
                refresh_at = now + self._presence.ttl_ms / 3000
                await self._presence.refresh(engine)
            await self._wait()

    async def _wait(self) -> None:
        await asyncio.to_thread(self._stop.wait, min(LOOP_CHECK_INTERVAL_S, self._ttl_ms / 3000))

    def _check_loop(self, blocked_s: float) -> bool:
        """Log once that the loop is blocked; False if it has been blocked for so long that it counts as dead."""
        if blocked_s < BLOCKED_AFTER_S:
            self._has_warned = self._has_given_up = False
        elif not self._has_warned:
            self._has_warned = True
            logger.warning("the event loop has been blocked for %.1f s by:\n%s", blocked_s, self._loop_stack())
        if blocked_s < self._stall_limit_s:
            return True
        if not self._has_given_up:
            self._has_given_up = True
            logger.error(
                "the event loop has been blocked for %.1f s: its leases are no longer renewed. Blocked by:\n%s",
                blocked_s,
                self._loop_stack(),
            )
        return False

    def _loop_stack(self) -> str:
        frame = sys._current_frames().get(self._loop_thread)
        return "".join(traceback.format_stack(frame)) if frame else "(unknown)"


class LoopHeartbeat:
    """Renews on the worker's own loop, for a store in memory, which belongs to that loop."""

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
        self._on_lost = on_lost
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start renewing."""
        self._tasks = [start_task(self._renew_leases()), start_task(self._refresh_registration())]

    async def stop(self) -> None:
        """Stop renewing."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _renew_leases(self) -> None:
        while True:
            await self._leases.any_held.wait()  # virtual time has no renewals to step through while nothing runs
            await asyncio.sleep(self._ttl_ms / 3000)
            for lease_id, error in await self._leases.renew_all(self._engine, self._ttl_ms):
                self._on_lost(lease_id, error)

    async def _refresh_registration(self) -> None:
        while True:
            await asyncio.sleep(self._presence.ttl_ms / 3000)
            await self._presence.refresh(self._engine)
