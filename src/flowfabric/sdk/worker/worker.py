"""A worker: takes what its slots have room for, runs handlers, and ends each attempt with one word."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import Any

from flowfabric.engine.claiming.poller import LanePoller
from flowfabric.engine.engine import Engine
from flowfabric.errors import (
    ExecutionNotActive,
    FabricError,
    InvalidInput,
    SchemaTooNew,
    StoreUnavailable,
    Unauthorized,
)
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.states import LifecyclePhase
from flowfabric.sdk import validation
from flowfabric.sdk.context import ClaimedAttempt
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.fabric import Fabric
from flowfabric.sdk.worker.completions import OutcomeReporter
from flowfabric.sdk.worker.heartbeat import Heartbeat, HeldLeases, LoopHeartbeat
from flowfabric.sdk.worker.outcome import Outcome
from flowfabric.sdk.worker.registration import WorkerRegistrar
from flowfabric.sdk.worker.runner import AttemptRunner

logger = logging.getLogger("flowfabric.worker")

POLL_WAIT_MS = 10_000
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 1.0  # between claims that find no store
CANCEL_GRACE_S = 5.0  # how long handlers that were cancelled have to come to their end
SHUTDOWN_TIMEOUT_S = (
    5.0  # how long a store that is away is waited for when there is nothing to do but to tell it the end
)
COMMAND_LEASE_SHARE = 2 / 3  # of a lease, after which a command that has no answer is given up
PARK_ANSWER_S = 5.0  # for the answer to a park, when a renewal was refused because of it
UNREPORTED_PER_SLOT = 2  # how many ends a slot may be ahead of what is told


class Worker:
    """Claims and runs the work of an app's tasks, in a process of its own or beside other code on an event loop.

    `ff worker` and `app.run()` take a process. To work inside one that does other things, as a web service, run `work`
    as a task, and at the end `stop` it and await that task:

        worker = Worker(app, slots=10)
        working = asyncio.create_task(worker.work())
        ...
        worker.stop()
        await working
    """

    def __init__(
        self,
        app: Fabric,
        *,
        slots: int = 10,
        lanes: Iterable[str] | None = None,
        capabilities: Iterable[str] = (),
        lease_ttl: Duration = "15s",
        grace: Duration = "30s",
        stall_limit: Duration = "5m",
        presence_ttl: Duration | None = None,
        worker_id: str | None = None,
        instance_id: str | None = None,
    ) -> None:
        """`stall_limit` is how long the loop may be blocked before its work is left to others, `presence_ttl` how long
        a worker that is not heard of stays in the registry: twice a lease, unless said otherwise. `instance_id` names
        this worker and no other; it is random, but for tests."""
        self._app = app
        self._slots = validation.validate_int("slots", slots, minimum=1)
        self._lanes = validation.validate_lanes(lanes) if lanes is not None else _lanes_of(app)
        self._capabilities = tuple(sorted(validation.validate_capabilities("capabilities", capabilities)))
        self._ttl_ms = to_ms(lease_ttl, "lease_ttl", minimum_ms=1)
        self._grace_s = to_ms(grace, "grace") / 1000
        self._stall_limit_s = to_ms(stall_limit, "stall_limit") / 1000
        self.worker_id = worker_id or socket.gethostname()
        self.instance_id = instance_id or f"{self.worker_id}:{os.getpid()}:{os.urandom(3).hex()}"
        self._presence = WorkerRegistrar(
            namespace=app.namespace,
            worker_id=self.worker_id,
            instance_id=self.instance_id,
            lanes=self._lanes,
            capabilities=self._capabilities,
            ttl_ms=max(1000, 2 * self._ttl_ms) if presence_ttl is None else to_ms(presence_ttl, "presence_ttl"),
        )
        self._leases = HeldLeases(self._time_of)
        self._running: dict[str, ClaimedAttempt] = {}  # by lease
        self._ends: OutcomeReporter | None = None
        self._free = asyncio.Event()
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._engine: Engine | None = None
        self._newer: SchemaTooNew | None = None

    @property
    def running(self) -> int:
        """How many handlers are under way."""
        return len(self._running)

    @property
    def done(self) -> int:
        """How many runs it has completed."""
        return 0 if self._ends is None else self._ends.succeeded

    @property
    def failed(self) -> int:
        """How many attempts have failed, whether or not others follow."""
        return 0 if self._ends is None else self._ends.failed

    # -- life -----------------------------------------------------------------------------------------------------

    async def run_until_told(self) -> None:
        """Work until SIGTERM or SIGINT; then drain."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            await self.work()
        finally:
            await _in_time(self._app.close())

    def stop(self) -> None:
        """Take no more work and finish what runs; called again, hand it back at once."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()
        self._free.set()
        if self._engine is not None:
            self._engine.wake_claims(self._lanes)

    def simulate_kill(self) -> None:
        """Drop everything on the floor, as a killed process does; for tests."""
        self._cancel_all("abandoned")
        if self._ends is not None:
            self._ends.discard()

    def stop_renewing(self, lease_id: str) -> None:
        """Renew a lease no more although its handler goes on; for tests."""
        self._leases.stop_renewing(lease_id)

    async def work(self) -> None:
        """Work until `stop`; returns when everything was finished or handed back.

        Raises `SchemaTooNew` when a newer release has changed the store in a way that this one does not understand.
        """
        engine = await self._start()
        if engine is None:  # told to stop before there was a store
            return
        self._attempts = AttemptRunner(
            self._app,
            engine,
            lease_expires_at=self._leases.expires_at,
            on_outcome=self._ended,
            on_slot_freed=self._free.set,
        )
        self._ends = ends = OutcomeReporter(engine, self._told, lease_expires_at=self._leases.expires_at)
        heartbeat = self._make_heartbeat(engine)
        heartbeat.start()
        try:
            await self._pull(engine, ends)
            if self._newer is not None:
                self._cancel_all("the schema is newer")
                ends.discard()  # what ran here is taken over by workers of the newer release
                raise self._newer
            left = await self._drain(ends)
            await _in_time(self._take_leave(engine, ends, left))
        finally:
            await heartbeat.stop()
            self._attempts.close()

    async def _start(self) -> Engine | None:
        """Open the engine, and enter the registry; a store that is away is waited for. None when told to stop."""
        pause_s = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            try:
                self._engine = engine = await self._app.claim()
                engine.limit_commands(self._ttl_ms * COMMAND_LEASE_SHARE / 1000)
                await self._app.declare(engine)
                await self._presence.register(engine)
            except StoreUnavailable as away:
                if not away.retryable:
                    raise
                logger.warning("not started yet: the store is away (%s); trying again", away)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), pause_s)
                pause_s = min(pause_s * 2, MAX_BACKOFF_S)
            else:
                engine.start_sweeps()
                return engine
        return None

    def _stop_for_newer_schema(self, newer: SchemaTooNew) -> None:
        """Stop at once: nothing that this release writes would be right any more."""
        if self._newer is None:
            logger.error(
                "the schema of the store is newer (%d) than this release knows (%d): this worker stops. Update it; "
                "what ran here is taken over by workers of the newer release",
                newer.found,
                newer.known,
            )
            self._newer = newer
            self.stop()

    def _make_heartbeat(self, engine: Engine) -> Heartbeat | LoopHeartbeat:
        """A thread with a connection of its own; a store in memory is of one loop, so its leases are renewed there."""
        if not engine.is_shared:
            return LoopHeartbeat(
                self._leases, self._presence, engine=engine, lease_ttl_ms=self._ttl_ms, on_lost=self._lease_lost
            )
        return Heartbeat(
            self._leases,
            self._presence,
            # Without ears, or each hint would wake this process twice.
            connect=lambda: self._app.connect(hears=False, command_s=self._ttl_ms / 4000),
            lease_ttl_ms=self._ttl_ms,
            on_lost=self._lease_lost,
            stall_limit_s=self._stall_limit_s,
            on_schema_too_new=self._stop_for_newer_schema,
        )

    async def _pull(self, engine: Engine, ends: OutcomeReporter) -> None:
        pull = self._pulling(engine)
        max_wait_ms = max(POLL_WAIT_MS, engine.settings.poll_ms)
        pause_s = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            # A slot is a handler's: the next one may be fetched while the end of the last one is on its way.
            room = self._slots - len(self._running) - self._attempts.stuck_threads
            if room <= 0 or len(ends) > UNREPORTED_PER_SLOT * self._slots:
                engine.metrics.count("ff_worker_at_capacity")
                self._free.clear()
                await self._free.wait()
                continue
            try:
                claimed = await pull.claim(room, max_wait_ms=max_wait_ms, go_on=lambda: not self._stopping.is_set())
            except SchemaTooNew as newer:
                self._stop_for_newer_schema(newer)
                continue
            except (StoreUnavailable, Unauthorized) as away:  # a token may be good again when it has been rotated
                logger.warning("no work: the store is away (%s); trying again", away)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, MAX_BACKOFF_S)
                continue
            pause_s = FIRST_BACKOFF_S
            if foreign := [one for one in claimed if one.namespace not in (None, self._app.namespace)]:
                logger.info(
                    "these lanes have work of namespace %s, too: from now on only that of %s is asked for, which takes "
                    "longer; lanes of their own would be better",
                    foreign[0].namespace,
                    self._app.namespace,
                )
                await asyncio.gather(*(_hand_back(engine, one) for one in foreign))
                pull.close()
                pull = self._pulling(engine, (self._app.namespace,))
                claimed = [one for one in claimed if one not in foreign]
            self._begin(claimed)
        pull.close()

    def _pulling(self, engine: Engine, namespaces: tuple[str, ...] | None = None) -> LanePoller:
        """Claims from the lanes; of all namespaces, which is the fastest way, until there are others than its own."""
        return engine.pulling(
            self._lanes,
            worker_id=self.worker_id,
            worker_instance_id=self.instance_id,
            capabilities=self._capabilities,
            lease_ttl_ms=self._ttl_ms,
            namespaces=namespaces,
        )

    async def _drain(self, ends: OutcomeReporter) -> list[Claimed]:
        """Finish what runs within the grace time; the rest is cancelled, and returned to be handed back."""
        if not self._running and not ends:
            return []
        logger.warning("draining: %d running, %g s of grace; once more hurries", len(self._running), self._grace_s)
        hurry = asyncio.create_task(self._hurry.wait())
        finished = asyncio.create_task(self._finish(ends))
        await asyncio.wait((finished, hurry), timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        finished.cancel()
        hurry.cancel()
        running = list(self._running.values())
        left = [*(own.claimed for own in running), *ends.discard()]
        self._cancel_all("the worker stops")
        if roots := [own.handler_task for own in running if own.handler_task is not None]:
            await asyncio.wait(roots, timeout=CANCEL_GRACE_S)  # whoever does not listen is not waited for
        return left

    async def _take_leave(self, engine: Engine, ends: OutcomeReporter, left: list[Claimed]) -> None:
        """Hand back what is left, so that it goes on elsewhere and costs nothing, and leave the registry."""
        await ends.flush()  # a handler may have had something to say all the same
        await asyncio.gather(*(_hand_back(engine, claimed) for claimed in left))
        await self._presence.deregister(engine)

    async def _finish(self, ends: OutcomeReporter) -> None:
        """Wait until every handler is over and every end is told."""
        while self._running or ends:
            if self._running:
                self._free.clear()
                await self._free.wait()
            await ends.flush()

    # -- one piece of work ----------------------------------------------------------------------------------------

    def _begin(self, claimed: list[Claimed]) -> None:
        self._leases.add(claimed)
        self._running.update({own.claimed.lease_id: own for own in self._attempts.start(claimed)})

    def _ended(self, claimed: Claimed, outcome: Outcome | None) -> None:
        """A handler is over: its slot is free, and its end is to be told."""
        assert self._ends is not None
        del self._running[claimed.lease_id]
        self._free.set()
        if outcome is None:
            self._leases.remove([claimed])
        else:
            self._ends.add(claimed, outcome)

    def _time_of(self, claimed: Claimed) -> float | None:
        """How many seconds its handler has; None when it has all the time, has yet to begin, or is over and untold."""
        own = self._running.get(claimed.lease_id)
        if own is None or own.is_process_starting or claimed.payload is None:
            return None
        task = self._app.tasks.get(claimed.payload.execution_kind)
        return None if task is None else task.timeout_s

    def _cancel_all(self, why: str) -> None:
        for own in list(self._running.values()):
            self._attempts.cancel(own, why)

    def _told(self, claimed: list[Claimed]) -> None:
        self._leases.remove(claimed)
        self._free.set()

    def _lease_lost(self, lease_id: str, why: FabricError) -> None:
        own = self._running.get(lease_id)  # an end that is just being told lets the lease go, too
        if own is None or own.is_parked:
            return
        if _is_own_park(own.claimed, why):  # its answer is on its way, or something that this attempt did parked it
            asyncio.get_running_loop().call_later(PARK_ANSWER_S, self._cancel_lost, lease_id, why)
        else:
            self._cancel_lost(lease_id, why)

    def _cancel_lost(self, lease_id: str, why: FabricError) -> None:
        own = self._running.get(lease_id)
        if own is not None and not own.is_parked:
            logger.warning("%s was taken away: %s", own.claimed.execution_id, why)
            self._attempts.cancel(own, f"lease lost: {why}")


def _is_own_park(claimed: Claimed, why: FabricError) -> bool:
    """True if a renewal was refused because the execution was suspended under this very lease."""
    return (
        isinstance(why, ExecutionNotActive)
        and why.lifecycle_phase == LifecyclePhase.SUSPENDED
        and (why.lease_epoch, why.attempt_id) == (claimed.lease_epoch, claimed.attempt_id)
    )


async def _hand_back(engine: Engine, claimed: Claimed) -> None:
    try:
        await engine.delay_for(claimed.handle, 0)
        logger.info("%s was handed back", claimed.execution_id)
    except FabricError as gone:
        logger.info("%s could not be handed back: %s", claimed.execution_id, gone)


async def _in_time(last: Coroutine[Any, Any, None]) -> None:
    """Do the last things, unless they take too long: then the process ends, and its leases do so by their own time."""
    try:
        async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
            await last
    except TimeoutError:
        logger.warning("the store does not answer; the worker stops, and what it could not hand back is taken over")


def _lanes_of(app: Fabric) -> tuple[str, ...]:
    lanes = tuple(sorted({task.default_options.lane for task in app.tasks.values()}))
    if not lanes:
        raise InvalidInput("the app has no tasks; import the modules that define them before running a worker")
    return lanes
