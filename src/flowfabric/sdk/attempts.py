"""Attempts: a handler is called where it belongs, and what comes of it is one outcome.

`async def` handlers run on the worker's loop, plain ones in a thread, and those with `isolation="process"` in a process
of their own that can be killed. A thread cannot: one that goes on after its time keeps its slot until it returns.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from flowfabric.engine.engine import Engine
from flowfabric.model.answers import Claimed
from flowfabric.sdk.cells import Cells, Order
from flowfabric.sdk.context import Context, Pending, entered
from flowfabric.sdk.durable import Crash, Unwound
from flowfabric.sdk.inputs import named_budgets, read_input
from flowfabric.sdk.outcomes import AWAY, Later, Outcome, raised, returned
from flowfabric.sdk.threads import DaemonThreads

if TYPE_CHECKING:
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.task import Task

logger = logging.getLogger("flowfabric.worker")

UNKNOWN_TASK_DELAY_MS = 5000


class Attempts:
    """Calls the handlers of one worker."""

    def __init__(self, app: Fabric, engine: Engine, until: Callable[[str], int], freed: Callable[[], None]) -> None:
        """`until` tells the end of a lease; `freed` is called when a thread that was given up returns at last."""
        self._app = app
        self._engine = engine
        self._until = until
        self._freed = freed
        self._threads = DaemonThreads("flowfabric-task")
        self._cells = Cells()
        self._stuck: set[asyncio.Future[Any]] = set()

    @property
    def stuck(self) -> int:
        """How many threads run on although nobody waits for them."""
        return len(self._stuck)

    def close(self) -> None:
        """End what can be ended."""
        self._threads.shutdown()
        self._cells.close()

    async def attempt(self, claimed: Claimed) -> Outcome:
        """Call the handler; raises only when the attempt was cancelled from outside."""
        kind = claimed.payload.execution_kind if claimed.payload else ""
        task = self._app.tasks.get(kind)
        if task is None:
            logger.warning("%s: no task %r here; left for a worker that knows it", claimed.execution_id, kind)
            return Later(UNKNOWN_TASK_DELAY_MS)
        if self._app.stubs and task in self._app.stubs:
            return await self._stubbed(claimed, task)
        if task.isolation == "process" and self._app.isolates:
            return await self._in_cell(claimed, task)
        root = asyncio.current_task() if task.is_async else None
        own = Pending(partial(self._context, claimed, task, root, asyncio.get_running_loop()))
        try:
            arguments = task.signature.load(await read_input(self._engine, claimed.payload))
            value = await (self._on_loop if task.is_async else self._in_thread)(task, own, arguments)
            if own.context is not None:
                await own.context.flush()
        except (asyncio.CancelledError, Unwound):
            if own.context is not None:
                own.context.give_up()
            if not own.is_parked:
                raise
            _forgive()
            return AWAY
        except Crash:
            logger.info("%s: crashed on purpose", claimed.execution_id)
            return AWAY
        except Exception as failure:
            if own.is_parked:
                return _went_on(claimed, task)
            attempt = claimed.attempt_index
            logger.info("%s: attempt %d of %s failed", claimed.execution_id, attempt, task.name, exc_info=failure)
            return raised(failure)
        return _went_on(claimed, task) if own.is_parked else returned(task, value)

    def _context(
        self,
        claimed: Claimed,
        task: Task[..., Any],
        root: asyncio.Task[Any] | None,
        loop: asyncio.AbstractEventLoop,
    ) -> Context:
        return Context(
            self._app,
            self._engine,
            claimed.handle,
            task,
            root=root,
            loop=loop,
            budgets=named_budgets(claimed.payload),
            lease_until=lambda: self._until(claimed.lease_id),
        )

    async def _stubbed(self, claimed: Claimed, task: Task[..., Any]) -> Outcome:
        """What a test has put in the place of the handler; it gets the arguments without a context."""
        try:
            arguments = task.signature.load(await read_input(self._engine, claimed.payload))
            value = self._app.stubs[task](**arguments)
            return returned(task, await value if inspect.isawaitable(value) else value)
        except Exception as failure:
            return raised(failure)

    async def _on_loop(self, task: Task[..., Any], own: Pending, arguments: dict[str, Any]) -> Any:
        entered(own)
        call = task.handler(**task.with_context(arguments, own.get))
        if task.timeout_s is None:
            return await call
        async with asyncio.timeout(task.timeout_s):
            return await call

    async def _in_thread(self, task: Task[..., Any], own: Pending, arguments: dict[str, Any]) -> Any:
        context = own.get()
        surroundings = contextvars.copy_context()
        surroundings.run(entered, context)
        given = task.with_context(arguments, own.get)
        loop = asyncio.get_running_loop()
        call = loop.run_in_executor(self._threads, lambda: surroundings.run(lambda: task.handler(**given)))
        try:
            await asyncio.wait((call,), timeout=task.timeout_s)
            if call.done():
                return call.result()
            raise TimeoutError(f"{task.name} has not returned after {task.timeout_s:g} s")
        finally:
            if not call.done():
                context.give_up()
                self._keep_slot(call, context)

    def _keep_slot(self, call: asyncio.Future[Any], context: Context) -> None:
        """A thread that nobody waits for any more still takes its slot."""
        logger.warning(
            "%s: the thread of %s was told to end and goes on; it keeps its slot. Let it look at ctx.cancelled, or use "
            'isolation="process"',
            context.run_id,
            context.task,
        )
        self._stuck.add(call)

        def over(_: asyncio.Future[Any]) -> None:
            self._stuck.discard(call)
            if not call.cancelled():
                call.exception()
            self._freed()

        call.add_done_callback(over)

    async def _in_cell(self, claimed: Claimed, task: Task[..., Any]) -> Outcome:
        handle = claimed.handle
        order = Order(
            module=task.module,
            task=task.name,
            input=await read_input(self._engine, claimed.payload),
            url=self._app.url if self._engine.is_shared else None,
            backend=handle.backend.value,
            kind=handle.kind.value,
            handle=handle.opaque,
            budgets=named_budgets(claimed.payload),
            lease_until=claimed.lease_expires_at,
        )
        return await self._cells.perform(order, task.timeout_s)


def _went_on(claimed: Claimed, task: Task[..., Any]) -> Outcome:
    logger.error("%s: %s went on after it was put away; its result is lost", claimed.execution_id, task.name)
    return AWAY


def _forgive() -> None:
    """The cancellation was ours: the task that ran the handler goes on."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
