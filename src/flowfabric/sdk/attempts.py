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
from typing import TYPE_CHECKING, Any

from flowfabric.engine.engine import Engine
from flowfabric.model.answers import Claimed
from flowfabric.sdk.cells import Cells, Order
from flowfabric.sdk.context import Context, entered
from flowfabric.sdk.durable import Crash, Unwound
from flowfabric.sdk.inputs import named_budgets, read_input
from flowfabric.sdk.outcomes import AWAY, Outcome, raised, returned
from flowfabric.sdk.threads import DaemonThreads

if TYPE_CHECKING:
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.task import Task

logger = logging.getLogger("flowfabric.worker")


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

    async def attempt(self, claimed: Claimed, task: Task[..., Any]) -> Outcome:
        """Call the handler; raises only when the attempt was cancelled from outside."""
        if task in self._app.stubs:
            return await self._stubbed(claimed, task)
        if task.isolation == "process" and self._app.isolates:
            return await self._in_cell(claimed, task)
        root = asyncio.current_task() if task.is_async else None
        context = Context(
            self._app,
            self._engine,
            claimed.handle,
            task,
            root=root,
            budgets=named_budgets(claimed.payload),
            lease_until=lambda: self._until(claimed.lease_id),
        )
        try:
            arguments = task.signature.load(await read_input(self._engine, claimed.payload))
            value = await (self._on_loop if task.is_async else self._in_thread)(task, context, arguments)
            await context.flush()
        except (asyncio.CancelledError, Unwound) as ended:
            context.give_up()
            if context.is_parked:
                _forgive()
                return AWAY
            if _is_cancelled() or isinstance(ended, Unwound):
                raise
            return _failed(context, ended)  # something that the handler waited for was cancelled, not the attempt
        except Crash:
            logger.info("%s: crashed on purpose", context.run_id)
            return AWAY
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as failure:  # also `sys.exit()`: one handler must not end the others
            return _went_on(context) if context.is_parked else _failed(context, failure)
        return _went_on(context) if context.is_parked else returned(task, value)

    async def _stubbed(self, claimed: Claimed, task: Task[..., Any]) -> Outcome:
        """What a test has put in the place of the handler; it gets the arguments without a context."""
        try:
            arguments = task.signature.load(await read_input(self._engine, claimed.payload))
            value = self._app.stubs[task](**arguments)
            return returned(task, await value if inspect.isawaitable(value) else value)
        except Exception as failure:
            return raised(failure)

    async def _on_loop(self, task: Task[..., Any], context: Context, arguments: dict[str, Any]) -> Any:
        entered(context)
        call = task.handler(**task.with_context(arguments, context))
        if task.own.timeout_ms is None:
            return await call
        async with asyncio.timeout(task.own.timeout_ms / 1000):
            return await call

    async def _in_thread(self, task: Task[..., Any], context: Context, arguments: dict[str, Any]) -> Any:
        surroundings = contextvars.copy_context()
        surroundings.run(entered, context)
        given = task.with_context(arguments, context)
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


def _failed(context: Context, failure: BaseException) -> Outcome:
    logger.info("%s: attempt %d of %s failed", context.run_id, context.attempt, context.task, exc_info=failure)
    return raised(failure)


def _is_cancelled() -> bool:
    """Whether somebody wants the attempt to end: its worker, which stops or has lost the lease."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _went_on(context: Context) -> Outcome:
    logger.error("%s: %s went on after it was put away; its result is lost", context.run_id, context.task)
    return AWAY


def _forgive() -> None:
    """The cancellation was ours: the task that ran the handler goes on."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
