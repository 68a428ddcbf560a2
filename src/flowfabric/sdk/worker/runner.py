"""Attempts: a handler is called where it belongs, and what comes of it is one outcome.

`async def` handlers run on the worker's loop, plain ones in a thread, and those with `isolation="process"` in a process
of their own that can be killed. A thread cannot: one that goes on after its time keeps its slot until it returns.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from flowfabric.engine.engine import Engine
from flowfabric.model.answers.execution import Claimed
from flowfabric.sdk.context import ClaimedAttempt, Context, set_current
from flowfabric.sdk.durable.attempt import HandlerUnwound, is_simulated_crash
from flowfabric.sdk.serialization.inputs import budget_ids_by_name, inline_input, resolve_input
from flowfabric.sdk.worker.eager_runner import EagerRunner
from flowfabric.sdk.worker.outcome import (
    NOTHING_TO_REPORT,
    Failed,
    Outcome,
    Postponed,
    application_traceback,
    find_lease_loss,
    is_encodable,
    outcome_of_exception,
    outcome_of_result,
)
from flowfabric.sdk.worker.subprocesses import SubprocessCall, SubprocessPool
from flowfabric.sdk.worker.threads import DaemonThreadPool

if TYPE_CHECKING:
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.task import Task

logger = logging.getLogger("flowfabric.worker")

UNKNOWN_TASK_DELAY_MS = 5000


class AttemptRunner:
    """Calls the handlers of one worker."""

    def __init__(
        self,
        app: Fabric,
        engine: Engine,
        *,
        lease_expires_at: Callable[[str], int],
        on_outcome: Callable[[Claimed, Outcome | None], None],
        on_slot_freed: Callable[[], None],
    ) -> None:
        """`until` tells the end of a lease; `ended` is called with what came of an attempt, None when it was cancelled
        from outside; `freed` when a thread that was given up returns at last."""
        self._app = app
        self._engine = engine
        self._until = lease_expires_at
        self._ended = on_outcome
        self._freed = on_slot_freed
        self._loop = asyncio.get_running_loop()
        self._turns = EagerRunner(self._perform)
        self._threads = DaemonThreadPool("flowfabric-task")
        self._cells = SubprocessPool()
        self._stuck: set[asyncio.Future[Any]] = set()

    @property
    def stuck_threads(self) -> int:
        """How many threads run on although nobody waits for them."""
        return len(self._stuck)

    def close(self) -> None:
        """End what can be ended."""
        self._threads.shutdown()
        self._cells.close()

    def start(self, claimed: Sequence[Claimed]) -> list[ClaimedAttempt]:
        """Call the handlers of what was claimed, soon."""
        begun = [ClaimedAttempt(one, self._context) for one in claimed]
        self._turns.add(begun)
        return begun

    def cancel(self, own: ClaimedAttempt, why: str) -> None:
        """Cancel an attempt."""
        if own.handler_task is not None:
            own.handler_task.cancel(why)
        else:  # then nothing of it ever runs
            self._turns.discard(own)
            self._ended(own.claimed, None)

    async def _perform(self, own: ClaimedAttempt, root: asyncio.Task[None]) -> None:
        own.handler_task, claimed = root, own.claimed
        outcome: Outcome | None = None
        try:
            kind = claimed.payload.execution_kind if claimed.payload else ""
            task = self._app.tasks.get(kind)
            if task is None:
                logger.warning("%s: no task %r here; left for a worker that knows it", claimed.execution_id, kind)
                outcome = Postponed(UNKNOWN_TASK_DELAY_MS, f"the worker that had it knows no task {kind!r}")
            elif self._app.stubs and task in self._app.stubs:
                outcome = await self._stubbed(claimed, task)
            elif task.isolation == "process" and self._app.use_subprocesses:
                outcome = await self._in_cell(own, task)
            else:
                outcome = await self._attempt(claimed, task, own)
        except Exception:
            logger.exception("%s: its end is not known", claimed.execution_id)
        finally:
            self._ended(claimed, outcome)

    async def _attempt(self, claimed: Claimed, task: Task[..., Any], own: ClaimedAttempt) -> Outcome:
        """Call the handler; raises only when the attempt was cancelled from outside."""
        try:
            arguments = task.signature.load(
                inline_input(claimed.payload) or await resolve_input(self._engine, claimed.payload, self._app.namespace)
            )
            try:
                value = await self._call(task, own, arguments)
            finally:
                if own.context is not None:
                    own.context.close()
            if own.context is not None:
                await own.context.flush()
        except (asyncio.CancelledError, HandlerUnwound) as ended:
            if own.context is not None:
                own.context.mark_cancelled()
            if own.is_parked:
                _forgive()
                return NOTHING_TO_REPORT
            if _is_cancelled() or isinstance(ended, HandlerUnwound):
                raise
            # Something that the handler waited for was cancelled, not the attempt.
            return await _failed(claimed, task, own, ended)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as failure:  # also `sys.exit()`: one handler must not end the others
            if is_simulated_crash(failure):
                logger.info("%s: crashed on purpose", claimed.execution_id)
                return NOTHING_TO_REPORT
            return _went_on(claimed, task) if own.is_parked else await _failed(claimed, task, own, failure)
        return _went_on(claimed, task) if own.is_parked else _told(claimed, task, outcome_of_result(task, value))

    def _call(self, task: Task[..., Any], own: ClaimedAttempt, arguments: dict[str, Any]) -> Awaitable[Any]:
        """What to await for the value of the handler."""
        if not task.is_async:
            return self._in_thread(task, own.get_context(), arguments)
        set_current(own)
        call: Awaitable[Any] = task.handler(**task.with_context(arguments, own.get_context))
        return call if task.timeout_s is None else _in_time(call, task.name, task.timeout_s)

    def _context(self, own: ClaimedAttempt) -> Context:
        claimed = own.claimed
        assert claimed.payload is not None
        task = self._app.tasks[claimed.payload.execution_kind]
        return Context(
            self._app,
            self._engine,
            claimed.handle,
            task,
            handler_task=own.handler_task if task.is_async else None,
            loop=self._loop,
            budgets=budget_ids_by_name(claimed.payload),
            lease_until=lambda: self._until(claimed.lease_id),
        )

    async def _stubbed(self, claimed: Claimed, task: Task[..., Any]) -> Outcome:
        """What a test has put in the place of the handler; it gets the arguments without a context."""
        try:
            arguments = task.signature.load(await resolve_input(self._engine, claimed.payload, self._app.namespace))
            value = self._app.stubs[task](**arguments)
            return outcome_of_result(task, await value if inspect.isawaitable(value) else value)
        except Exception as failure:
            return outcome_of_exception(failure)

    async def _in_thread(self, task: Task[..., Any], context: Context, arguments: dict[str, Any]) -> Any:
        surroundings = contextvars.copy_context()
        surroundings.run(set_current, context)
        given = task.with_context(arguments, lambda: context)
        call = self._loop.run_in_executor(self._threads, lambda: surroundings.run(lambda: task.handler(**given)))
        try:
            await asyncio.wait((call,), timeout=task.timeout_s)
            if call.done():
                return call.result()
            raise TimeoutError(f"{task.name} has not returned after {task.timeout_s:g} s")
        finally:
            if not call.done():
                context.mark_cancelled()
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

    async def _in_cell(self, own: ClaimedAttempt, task: Task[..., Any]) -> Outcome:
        claimed, handle = own.claimed, own.claimed.handle
        own.is_process_starting = True
        order = SubprocessCall(
            module=task.module,
            task=task.name,
            input=await resolve_input(self._engine, claimed.payload, self._app.namespace),
            url=self._app.url if self._engine.is_shared else None,
            backend=handle.backend.value,
            handle_kind=handle.kind.value,
            handle=handle.opaque,
            signature=handle.signature,
            budgets=budget_ids_by_name(claimed.payload),
            lease_expires_at=claimed.lease_expires_at,
        )

        def begun() -> None:
            own.is_process_starting = False

        return _told(claimed, task, await self._cells.run(order, task.timeout_s, begun))


async def _failed(claimed: Claimed, task: Task[..., Any], own: ClaimedAttempt, failure: BaseException) -> Outcome:
    if (lost := find_lease_loss(failure, claimed.execution_id)) is not None:
        logger.warning("%s: attempt %d of %s is over: %s", claimed.execution_id, claimed.attempt_index, task.name, lost)
        return NOTHING_TO_REPORT
    if own.context is not None:
        await own.context.flush_quietly()
    outcome, which = outcome_of_exception(failure), (claimed.execution_id, claimed.attempt_index, task.name)
    if isinstance(outcome, Failed) and is_encodable(failure):
        logger.warning(
            "%s: attempt %d of %s failed", *which, exc_info=(type(failure), failure, application_traceback(failure))
        )
    elif isinstance(outcome, Failed):  # a log could not be written with what it says
        logger.warning("%s: attempt %d of %s failed: %s", *which, outcome.reason.rstrip())
    else:
        logger.info("%s: attempt %d of %s goes on later: %s", *which, failure)
    return outcome


def _told(claimed: Claimed, task: Task[..., Any], outcome: Outcome) -> Outcome:
    """The outcome of a handler that did not raise here: it ran elsewhere, or what it returned does not fit."""
    if isinstance(outcome, Failed):
        which = (claimed.execution_id, claimed.attempt_index, task.name)
        logger.warning("%s: attempt %d of %s failed: %s", *which, outcome.reason.rstrip())
    return outcome


def _is_cancelled() -> bool:
    """Whether somebody wants the attempt to end: its worker, which stops or has lost the lease."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _in_time(call: Awaitable[Any], name: str, timeout_s: float) -> Any:
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await call
    except TimeoutError as late:
        if not limit.expired():  # then it is one of the handler's own
            raise
        told = TimeoutError(f"{name} has not returned after {timeout_s:g} s")
        # The cancellation shows where the handler was. Before Python 3.11.4 it is the context of `late`, not its cause.
        raise told.with_traceback((late.__cause__ or late.__context__ or late).__traceback__) from None


def _went_on(claimed: Claimed, task: Task[..., Any]) -> Outcome:
    logger.error("%s: %s went on after it was put away; its result is lost", claimed.execution_id, task.name)
    return NOTHING_TO_REPORT


def _forgive() -> None:
    """The cancellation was ours: the task that ran the handler goes on."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
