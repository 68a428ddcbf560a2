"""`Worker`: claims executions for its free slots, runs their handlers, and reports the outcome of each attempt.

The parts: `AttemptRunner` runs handlers, `OutcomeReporter` batches outcomes, `Heartbeat` renews leases from a thread
with its own connection, and `WorkerRegistrar` keeps the worker in the registry. A slot belongs to a running handler
only: the next execution is claimed while the outcome of the last one is in flight.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from flowfabric.engine.types import version_token
from flowfabric.errors import (
    ExecutionNotActive,
    FabricError,
    InvalidInput,
    SchemaTooNew,
    StoreUnavailable,
    Unauthorized,
)
from flowfabric.event_loop import start_task
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.states import LifecyclePhase
from flowfabric.sdk import validation
from flowfabric.sdk.context import ClaimedAttempt
from flowfabric.sdk.durable.branches import stop_tracking
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.fabric import Fabric
from flowfabric.sdk.schedules import apply_schedules
from flowfabric.sdk.worker.completions import OutcomeReporter
from flowfabric.sdk.worker.heartbeat import Heartbeat, HeldLeases, LoopHeartbeat
from flowfabric.sdk.worker.held_runs import keep_releasing
from flowfabric.sdk.worker.outcome import Outcome
from flowfabric.sdk.worker.registration import WorkerRegistrar, served_tasks
from flowfabric.sdk.worker.runner import AttemptRunner

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI, LanePollerAPI

logger = logging.getLogger("flowfabric.worker")

POLL_WAIT_MS = 10_000
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 1.0  # between claims while the store is unavailable
CANCEL_GRACE_S = 5.0  # for cancelled handlers to finish
SHUTDOWN_TIMEOUT_S = 5.0  # for the last commands of a worker that stops while the store is unavailable
COMMAND_LEASE_SHARE = 2 / 3  # share of a lease after which a store command times out
PARK_ANSWER_S = 5.0  # for the answer to a park, after a renewal was refused because of it
UNREPORTED_PER_SLOT = 2  # outcomes not yet stored, per slot, beyond which nothing more is claimed


class Worker:
    """Claims and runs executions of an app's tasks, in a process of its own or beside other code on an event loop.

    `ff worker` and `app.run()` use a whole process. To run a worker inside another program, such as a web service,
    start `work` as a task, and at the end `stop` it and await that task:

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
        """Configure a worker; nothing is opened yet.

        If the event loop is blocked for longer than `stall_limit`, leases are no longer renewed. A worker that is not
        heard of for `presence_ttl`, by default twice the lease, leaves the registry. `instance_id` identifies this
        worker among all others; it is random by default.
        """
        self._app = app
        self._slots = validation.validate_int("slots", slots, minimum=1)
        self._lanes = validation.validate_lanes(lanes) if lanes is not None else _lanes_of(app)
        offered = validation.validate_capabilities("capabilities", capabilities)
        if app.version is not None:  # for runs of pinned tasks
            offered |= {version_token(app.version)}
        self._capabilities = tuple(sorted(offered))
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
            tasks=served_tasks(app.tasks.values(), self._lanes),
            ttl_ms=max(1000, 2 * self._ttl_ms) if presence_ttl is None else to_ms(presence_ttl, "presence_ttl"),
        )
        self._leases = HeldLeases(self._handler_timeout_s)
        self._running: dict[str, ClaimedAttempt] = {}  # by lease id
        self._reporter: OutcomeReporter | None = None
        self._capacity_changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._engine: EngineAPI | None = None
        self._schema_error: SchemaTooNew | None = None

    @property
    def running(self) -> int:
        """The number of handlers that are running."""
        return len(self._running)

    @property
    def done(self) -> int:
        """The number of runs it has completed."""
        return 0 if self._reporter is None else self._reporter.succeeded

    @property
    def failed(self) -> int:
        """The number of attempts that have failed, including those that are retried."""
        return 0 if self._reporter is None else self._reporter.failed

    # -- lifecycle------------------------------------------------------------------------------------------------

    async def run_until_told(self) -> None:
        """Work until SIGTERM or SIGINT, then drain; a second signal releases the running work at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            await self.work()
        finally:
            await _within_shutdown_timeout(self._app.close())

    def stop(self) -> None:
        """Claim nothing more and let running handlers finish; called again, cancel and release them at once."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()
        self._capacity_changed.set()
        if self._engine is not None:
            self._engine.wake_claims(self._lanes)

    def simulate_kill(self) -> None:
        """Drop all work without reporting it, as a killed process does; for tests."""
        self._cancel_all("abandoned")
        for attempt in self._running.values():  # a handler that swallows its cancellation records nothing more
            if attempt.context is not None:
                attempt.context.durable.close()
        if self._reporter is not None:
            self._reporter.discard()

    def stop_renewing(self, lease_id: str) -> None:
        """Stop renewing a lease although its handler is running; for tests."""
        self._leases.stop_renewing(lease_id)

    async def work(self) -> None:
        """Work until `stop`; return when all running work is finished or released.

        Raises `SchemaTooNew` if a newer release has changed the store's schema in a way that this one cannot handle.
        """
        stop_tracking()  # a worker that a handler starts is no branch of that handler
        engine = await self._start()
        if engine is None:  # stopped before the store was available
            return
        self._attempts = AttemptRunner(
            self._app,
            engine,
            lease_expires_at=self._leases.expires_at,
            on_outcome=self._on_outcome,
            on_slot_freed=self._capacity_changed.set,
        )
        self._reporter = reporter = OutcomeReporter(engine, self._on_reported, lease_expires_at=self._leases.expires_at)
        heartbeat = self._make_heartbeat(engine)
        heartbeat.start()
        held = start_task(keep_releasing(self._app, engine))
        try:
            await self._claim_until_stopped(engine, reporter)
            if self._schema_error is not None:
                self._cancel_all("the schema is newer")
                reporter.discard()  # workers of the newer release claim this work when its leases expire
                raise self._schema_error
            unfinished = await self._drain(reporter)
            await _within_shutdown_timeout(self._release_and_deregister(engine, reporter, unfinished))
        finally:
            held.cancel()
            await heartbeat.stop()
            self._attempts.close()

    async def _start(self) -> EngineAPI | None:
        """Open the engine and register the worker, as soon as the store is available. None if stopped meanwhile."""
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            try:
                self._engine = engine = await self._app.claim()
                engine.limit_commands(self._ttl_ms * COMMAND_LEASE_SHARE / 1000)
                await self._app.declare(engine)
                await apply_schedules(self._app, engine)
                await self._presence.register(engine)
            except StoreUnavailable as error:
                if not error.retryable:
                    raise
                logger.warning("not started yet: the store is unavailable (%s); trying again", error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), backoff_s)
                backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
            else:
                engine.start_sweeps()
                return engine
        return None

    def _stop_for_newer_schema(self, error: SchemaTooNew) -> None:
        """Stop at once: this release must not write to the newer schema."""
        if self._schema_error is None:
            logger.error(
                "the schema of the store is newer (%d) than this release knows (%d): this worker stops. Update it; "
                "what ran here is taken over by workers of the newer release",
                error.found,
                error.known,
            )
            self._schema_error = error
            self.stop()

    def _make_heartbeat(self, engine: EngineAPI) -> Heartbeat | LoopHeartbeat:
        """Return a heartbeat in a thread with its own connection; for a store in memory, one on this loop."""
        if not engine.is_shared:
            return LoopHeartbeat(
                self._leases, self._presence, engine=engine, lease_ttl_ms=self._ttl_ms, on_lost=self._on_lease_lost
            )
        return Heartbeat(
            self._leases,
            self._presence,
            # Without wakeups, or each one would wake this process twice.
            connect=lambda: self._app.connect(hears=False, command_s=self._ttl_ms / 4000),
            lease_ttl_ms=self._ttl_ms,
            on_lost=self._on_lease_lost,
            stall_limit_s=self._stall_limit_s,
            on_schema_too_new=self._stop_for_newer_schema,
        )

    async def _claim_until_stopped(self, engine: EngineAPI, reporter: OutcomeReporter) -> None:
        poller = self._make_poller(engine)
        most = poller.max_claim(self._slots)
        max_wait_ms = max(POLL_WAIT_MS, engine.settings.poll_ms)
        backoff_s = FIRST_BACKOFF_S
        while not self._stopping.is_set():
            free_slots = self._slots - len(self._running) - self._attempts.stuck_threads
            if free_slots <= 0 or len(reporter) > UNREPORTED_PER_SLOT * self._slots:
                engine.metrics.count("ff_worker_at_capacity")
                self._capacity_changed.clear()
                await self._capacity_changed.wait()
                continue
            try:
                claimed = await poller.claim(
                    min(free_slots, most), max_wait_ms=max_wait_ms, go_on=lambda: not self._stopping.is_set()
                )
            except SchemaTooNew as error:
                self._stop_for_newer_schema(error)
                continue
            except (StoreUnavailable, Unauthorized) as error:  # Unauthorized: the token may be in rotation
                logger.warning("no work: the store is unavailable (%s); trying again", error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)
                continue
            backoff_s = FIRST_BACKOFF_S
            if foreign := [row for row in claimed if row.namespace not in (None, self._app.namespace)]:
                logger.info(
                    "these lanes also have work of namespace %s: from now on only that of %s is claimed, which takes "
                    "longer; separate lanes would be better",
                    foreign[0].namespace,
                    self._app.namespace,
                )
                await asyncio.gather(*(_release(engine, row) for row in foreign))
                poller.close()
                poller = self._make_poller(engine, (self._app.namespace,))
                claimed = [row for row in claimed if row not in foreign]
            self._start_attempts(claimed)
        poller.close()

    def _make_poller(self, engine: EngineAPI, namespaces: tuple[str, ...] | None = None) -> LanePollerAPI:
        """Return a poller of the lanes. Without `namespaces` it claims from all, which is faster."""
        return engine.pulling(
            self._lanes,
            worker_id=self.worker_id,
            worker_instance_id=self.instance_id,
            capabilities=self._capabilities,
            lease_ttl_ms=self._ttl_ms,
            namespaces=namespaces,
        )

    async def _drain(self, reporter: OutcomeReporter) -> list[Claimed]:
        """Let handlers finish within the grace time; cancel the rest, and return it to be released."""
        if not self._running and not reporter:
            return []
        logger.warning(
            "draining: %d running, %g s of grace; stop again to release them at once", len(self._running), self._grace_s
        )
        hurry = start_task(self._hurry.wait())
        finished = start_task(self._finish(reporter))
        await asyncio.wait((finished, hurry), timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        finished.cancel()
        hurry.cancel()
        running = list(self._running.values())
        unfinished = [*(attempt.claimed for attempt in running), *reporter.discard()]
        self._cancel_all("the worker stops")
        if tasks := [attempt.handler_task for attempt in running if attempt.handler_task is not None]:
            await asyncio.wait(tasks, timeout=CANCEL_GRACE_S)
        return unfinished

    async def _release_and_deregister(
        self, engine: EngineAPI, reporter: OutcomeReporter, unfinished: list[Claimed]
    ) -> None:
        """Release unfinished work, so that other workers continue it without a retry; leave the registry."""
        await reporter.flush()  # a cancelled handler may have produced an outcome
        await asyncio.gather(*(_release(engine, claimed) for claimed in unfinished))
        await self._presence.deregister(engine)

    async def _finish(self, reporter: OutcomeReporter) -> None:
        """Wait until every handler has finished and every outcome is stored."""
        while self._running or reporter:
            if self._running:
                self._capacity_changed.clear()
                await self._capacity_changed.wait()
            await reporter.flush()

    # -- attempts -------------------------------------------------------------------------------------------

    def _start_attempts(self, claimed: list[Claimed]) -> None:
        self._leases.add(claimed)
        self._running.update({attempt.claimed.lease_id: attempt for attempt in self._attempts.start(claimed)})

    def _on_outcome(self, claimed: Claimed, outcome: Outcome | None) -> None:
        """Free the slot of a handler that has finished, and report its outcome; None if there is nothing to report."""
        assert self._reporter is not None
        del self._running[claimed.lease_id]
        self._capacity_changed.set()
        if outcome is None:
            self._leases.remove([claimed])
        else:
            self._reporter.add(claimed, outcome)

    def _handler_timeout_s(self, claimed: Claimed) -> float | None:
        """Return the timeout of an attempt's handler; None if it has no timeout, has not started, or has finished."""
        attempt = self._running.get(claimed.lease_id)
        if attempt is None or attempt.is_process_starting or claimed.payload is None:
            return None
        task = self._app.tasks.get(claimed.payload.execution_kind)
        return None if task is None else task.timeout_s

    def _cancel_all(self, reason: str) -> None:
        for attempt in list(self._running.values()):
            self._attempts.cancel(attempt, reason)

    def _on_reported(self, claimed: list[Claimed]) -> None:
        self._leases.remove(claimed)
        self._capacity_changed.set()

    def _on_lease_lost(self, lease_id: str, error: FabricError) -> None:
        attempt = self._running.get(lease_id)  # None if its outcome is being reported, which also ends the lease
        if attempt is None or attempt.is_parked:
            return
        if _is_own_park(attempt.claimed, error):  # the answer to the park is probably in flight
            asyncio.get_running_loop().call_later(PARK_ANSWER_S, self._cancel_lost, lease_id, error)
        else:
            self._cancel_lost(lease_id, error)

    def _cancel_lost(self, lease_id: str, error: FabricError) -> None:
        attempt = self._running.get(lease_id)
        if attempt is not None and not attempt.is_parked:
            logger.warning("%s lost its lease: %s", attempt.claimed.execution_id, error)
            is_over = isinstance(error, ExecutionNotActive) and error.lifecycle_phase == LifecyclePhase.TERMINAL
            self._attempts.cancel(attempt, f"lease lost: {error}", is_run_over=is_over)


def _is_own_park(claimed: Claimed, error: FabricError) -> bool:
    """True if a renewal was refused because the execution was suspended under this very lease."""
    return (
        isinstance(error, ExecutionNotActive)
        and error.lifecycle_phase == LifecyclePhase.SUSPENDED
        and (error.lease_epoch, error.attempt_id) == (claimed.lease_epoch, claimed.attempt_id)
    )


async def _release(engine: EngineAPI, claimed: Claimed) -> None:
    try:
        await engine.delay_for(claimed.handle, 0)
        logger.info("%s was released", claimed.execution_id)
    except FabricError as error:
        logger.info("%s could not be released: %s", claimed.execution_id, error)


async def _within_shutdown_timeout(commands: Coroutine[Any, Any, None]) -> None:
    """Await the last commands of a worker, but not for long: without them its leases expire by themselves."""
    try:
        async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
            await commands
    except TimeoutError:
        logger.warning("the store does not answer; the worker stops, and its leases will expire")


def _lanes_of(app: Fabric) -> tuple[str, ...]:
    lanes = tuple(sorted({task.default_options.lane for task in app.tasks.values()}))
    if not lanes:
        raise InvalidInput("the app has no tasks; import the modules that define them before running a worker")
    return lanes
