"""A worker: takes what its slots have room for, runs handlers, and ends each attempt with one word."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
import signal
import socket
import traceback
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from flowfabric.connecting import connect
from flowfabric.engine.engine import Engine
from flowfabric.errors import FabricError, InvalidInput, StoreUnavailable
from flowfabric.handles import BackendTag
from flowfabric.model.answers import Claimed
from flowfabric.sdk.codec import json_bytes
from flowfabric.sdk.context import Context, entered
from flowfabric.sdk.durable import Crash, Unwound
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.failing import Fatal, RetryAfter
from flowfabric.sdk.heartbeat import Heartbeat, LoopHeartbeat

if TYPE_CHECKING:
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.task import Task

logger = logging.getLogger("flowfabric.worker")

PULL_WAIT_MS = 10_000
PAUSE_S = 1.0
UNKNOWN_TASK_DELAY_MS = 5000
LONGEST_REASON = 8000
FINAL_FOR_THE_LEASE = ("stale_lease", "lease_expired", "lease_revoked", "execution_not_active", "execution_not_found")


class Worker:
    """One process's share of the work."""

    def __init__(
        self,
        app: Fabric,
        *,
        slots: int = 10,
        lanes: Iterable[str] | None = None,
        capabilities: Iterable[str] = (),
        lease_ttl: Duration = "15s",
        grace: Duration = "30s",
        worker_id: str | None = None,
    ) -> None:
        if slots < 1:
            raise InvalidInput("slots: at least 1")
        self._app = app
        self._slots = slots
        self._lanes = tuple(lanes) if lanes is not None else _lanes_of(app)
        self._capabilities = tuple(capabilities)
        self._ttl_ms = to_ms(lease_ttl, "lease_ttl")
        self._grace_s = to_ms(grace, "grace") / 1000
        self.worker_id = worker_id or socket.gethostname()
        self.instance_id = f"{self.worker_id}:{os.getpid()}:{os.urandom(3).hex()}"
        self._running: dict[str, tuple[asyncio.Task[None], Claimed]] = {}
        self._free = asyncio.Event()
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._threads = ThreadPoolExecutor(max_workers=slots, thread_name_prefix="flowfabric-task")
        self._engine: Engine | None = None
        self.done = 0

    # -- life -----------------------------------------------------------------------------------------------------

    async def run_until_told(self) -> None:
        """Work until SIGTERM or SIGINT; then drain."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        try:
            await self.work()
        finally:
            await self._app.close()

    def stop(self) -> None:
        """Take no more work and finish what runs; called again, hand it back at once."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()
        self._free.set()
        if self._engine is not None:
            self._engine.nudge(self._lanes)

    def abandon(self) -> None:
        """Drop everything on the floor, as a killed process does; for tests."""
        for task, _ in self._running.values():
            task.cancel()

    async def work(self) -> None:
        """Work until `stop`; returns when everything was finished or handed back."""
        self._engine = engine = await self._app.engine()
        engine.start_sweeps()
        self._heartbeat = self._make_heartbeat(engine)
        self._heartbeat.start()
        try:
            await self._pull(engine)
            await self._drain(engine)
        finally:
            await self._heartbeat.stop()
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _make_heartbeat(self, engine: Engine) -> Heartbeat | LoopHeartbeat:
        """A thread with a connection of its own; a store in memory is of one loop, so its leases are renewed there."""
        if engine.store.tag is BackendTag.MEMORY:
            return LoopHeartbeat(engine, lease_ttl_ms=self._ttl_ms, lost=self._lease_lost)
        return Heartbeat(
            lambda: connect(self._app.url, migrate=False), lease_ttl_ms=self._ttl_ms, lost=self._lease_lost
        )

    async def _pull(self, engine: Engine) -> None:
        while not self._stopping.is_set():
            room = self._slots - len(self._running)
            if room <= 0:
                self._free.clear()
                await self._free.wait()
                continue
            try:
                claimed = await engine.claim_from_lanes(
                    self._lanes,
                    room,
                    worker_id=self.worker_id,
                    worker_instance_id=self.instance_id,
                    capabilities=self._capabilities,
                    lease_ttl_ms=self._ttl_ms,
                    max_wait_ms=max(PULL_WAIT_MS, engine.settings.poll_ms),
                    go_on=lambda: not self._stopping.is_set(),
                )
            except StoreUnavailable as away:
                logger.warning("no work: the store is away (%s); trying again", away)
                await asyncio.sleep(PAUSE_S)
                continue
            for work in claimed:
                self._begin(engine, work)

    async def _drain(self, engine: Engine) -> None:
        if not self._running:
            return
        running = [task for task, _ in self._running.values()]
        hurry = asyncio.create_task(self._hurry.wait())
        finished = asyncio.create_task(_all_done(running))
        await asyncio.wait((finished, hurry), timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED)
        finished.cancel()
        hurry.cancel()
        left = list(self._running.values())
        for task, _ in left:
            task.cancel()
        await asyncio.gather(*(task for task, _ in left), return_exceptions=True)
        for _, claimed in left:
            try:
                await engine.delay_for(claimed.handle, 0)  # the attempt goes on elsewhere and costs nothing
            except FabricError as gone:
                logger.info("%s could not be handed back: %s", claimed.execution_id, gone)

    # -- one piece of work ----------------------------------------------------------------------------------------

    def _begin(self, engine: Engine, claimed: Claimed) -> None:
        self._heartbeat.hold(claimed.handle)
        task = asyncio.get_running_loop().create_task(self._perform(engine, claimed))
        self._running[claimed.lease_id] = (task, claimed)
        task.add_done_callback(lambda _: self._over(claimed))

    def _over(self, claimed: Claimed) -> None:
        self._heartbeat.let_go(claimed.handle)
        self._running.pop(claimed.lease_id, None)
        self._free.set()

    def _lease_lost(self, lease_id: str, why: FabricError) -> None:
        found = self._running.get(lease_id)
        if found is not None:
            logger.warning("%s was taken away: %s", found[1].execution_id, why)
            found[0].cancel(f"lease lost: {why}")

    async def _perform(self, engine: Engine, claimed: Claimed) -> None:
        kind = claimed.payload.execution_kind if claimed.payload else ""
        task = self._app.tasks.get(kind)
        try:
            if task is None:
                logger.warning("%s: no task %r here; left for a worker that knows it", claimed.execution_id, kind)
                await engine.delay_for(claimed.handle, UNKNOWN_TASK_DELAY_MS)
                return
            await self._attempt(engine, claimed, task)
        except FabricError as refused:
            if refused.kind not in FINAL_FOR_THE_LEASE:
                raise
            logger.warning("%s: its end was refused: %s", claimed.execution_id, refused)

    async def _attempt(self, engine: Engine, claimed: Claimed, task: Task[..., Any]) -> None:
        context = Context(self._app, engine, claimed, task.name, is_async=task.is_async)
        try:
            value = await self._call(task, context, claimed)
            if context.is_parked:
                logger.error("%s: %s went on after it was put away; its result is lost", context.run_id, task.name)
                return
            result = json_bytes(task.signature.result.dump(value, "result"))
        except (asyncio.CancelledError, Unwound):
            if not context.is_parked:
                raise
            _forgive()
        except Crash:
            logger.info("%s: crashed on purpose", context.run_id)
            self._heartbeat.let_go(claimed.handle)
        except RetryAfter as later:
            await engine.delay_for(claimed.handle, later.after_ms)
        except (Fatal, InvalidInput) as fatal:
            await engine.fail(claimed.handle, reason=_reason(fatal), category="permanent")
        except TimeoutError as slow:
            await engine.fail(claimed.handle, reason=_reason(slow), category="timeout")
        except Exception as failure:
            logger.info("%s: %s failed", claimed.execution_id, task.name, exc_info=failure)
            await engine.fail(claimed.handle, reason=_reason(failure), category=type(failure).__name__)
        else:
            await engine.complete(claimed.handle, result=result, encoding="json")
            self.done += 1

    async def _call(self, task: Task[..., Any], context: Context, claimed: Claimed) -> Any:
        arguments = task.signature.load(claimed.payload.input_payload or b"" if claimed.payload else b"")
        if task.signature.context_name is not None:
            arguments[task.signature.context_name] = context
        timeout_s = None if task.own.timeout_ms is None else task.own.timeout_ms / 1000
        if task.is_async:
            entered(context)
            if timeout_s is None:
                return await task.handler(**arguments)
            async with asyncio.timeout(timeout_s):
                return await task.handler(**arguments)
        surroundings = contextvars.copy_context()
        surroundings.run(entered, context)
        call = asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: surroundings.run(lambda: task.handler(**arguments))
        )
        return await (call if timeout_s is None else asyncio.wait_for(call, timeout_s))


def _forgive() -> None:
    """The cancellation was ours: the task that ran the handler goes on."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


def _lanes_of(app: Fabric) -> tuple[str, ...]:
    lanes = tuple(sorted({task.own.lane for task in app.tasks.values()}))
    if not lanes:
        raise InvalidInput("the app has no tasks; import the modules that define them before running a worker")
    return lanes


def _reason(failure: BaseException) -> str:
    """The failure in a line, and where it happened."""
    line = f"{type(failure).__name__}: {failure}"
    where = "".join(traceback.format_tb(failure.__traceback__)[-3:])
    text = f"{line}\n{where}" if where else line
    return text.replace("\x00", "\\0").encode("utf-8", "backslashreplace")[:LONGEST_REASON].decode("utf-8", "ignore")


async def _all_done(tasks: Iterable[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
