"""Runs the handlers of claimed executions, and turns each attempt into one outcome.

`async def` handlers run on the worker's loop, plain ones in a thread, and those with `isolation="process"` in a
subprocess that can be killed. A thread cannot be killed: after a timeout it keeps its slot until it returns.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from flowfabric.errors import FabricError
from flowfabric.model.answers.execution import Claimed
from flowfabric.sdk.context import ClaimedAttempt, Context, set_current
from flowfabric.sdk.durable.attempt import HandlerUnwound, is_simulated_crash
from flowfabric.sdk.durable.branches import ensure_task_factory
from flowfabric.sdk.serialization.inputs import (
    batch_input,
    budget_ids_by_name,
    inline_input,
    resolve_input,
    schedule_of,
)
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
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.sdk.fabric import Fabric
    from flowfabric.sdk.task import Task

logger = logging.getLogger("flowfabric.worker")

UNKNOWN_TASK_DELAY_MS = 5000


class AttemptRunner:
    """Runs the handlers of one worker."""

    def __init__(
        self,
        app: Fabric,
        engine: EngineAPI,
        *,
        lease_expires_at: Callable[[str], int],
        on_outcome: Callable[[Claimed, Outcome | None], None],
        on_slot_freed: Callable[[], None],
    ) -> None:
        """Prepare to run handlers on the running loop.

        `on_outcome` is called once per attempt, with None if the attempt was cancelled from outside. `on_slot_freed`
        is called when a stuck thread returns.
        """
        self._app = app
        self._engine = engine
        self._lease_expires_at = lease_expires_at
        self._on_outcome = on_outcome
        self._on_slot_freed = on_slot_freed
        self._loop = asyncio.get_running_loop()
        self._store_time = engine.estimate.now(), self._loop.time()  # the latest known time, and when it was
        self._worker_task = asyncio.current_task()
        self._eager_runner = EagerRunner(self._run)
        self._threads = DaemonThreadPool("flowfabric-task")
        self._subprocesses = SubprocessPool()
        self._stuck: set[asyncio.Future[Any]] = set()

    @property
    def stuck_threads(self) -> int:
        """The number of threads that are still running although their attempt is over."""
        return len(self._stuck)

    def close(self) -> None:
        """End idle threads and subprocesses; a running thread cannot be ended."""
        self._threads.shutdown()
        self._subprocesses.close()

    def start(self, claimed: Sequence[Claimed]) -> list[ClaimedAttempt]:
        """Schedule the handlers of claimed executions."""
        ensure_task_factory(self._loop)
        attempts = [ClaimedAttempt(row, self._make_context) for row in claimed]
        self._eager_runner.add(attempts)
        return attempts

    def cancel(self, attempt: ClaimedAttempt, reason: str, *, is_run_over: bool = False) -> None:
        """Cancel an attempt; one that has not started never runs. Another one continues, unless the run is over."""
        attempt.is_cancelled = True
        if attempt.context is not None:
            attempt.context.continues_elsewhere = not is_run_over
        if attempt.handler_task is not None:
            attempt.handler_task.cancel(reason)
        else:
            self._eager_runner.discard(attempt)
            self._on_outcome(attempt.claimed, None)

    async def _run(self, attempt: ClaimedAttempt, handler_task: asyncio.Task[None]) -> None:
        attempt.handler_task, claimed = handler_task, attempt.claimed
        outcome: Outcome | None = None
        try:
            kind = claimed.payload.execution_kind if claimed.payload else ""
            task = self._app.tasks.get(kind)
            if task is None:
                logger.warning("%s: no task %r here; left for a worker that knows it", claimed.execution_id, kind)
                outcome = Postponed(UNKNOWN_TASK_DELAY_MS, f"the worker that had it knows no task {kind!r}")
            elif self._app.stubs and task in self._app.stubs:
                outcome = await self._run_stub(claimed, task)
            elif task.isolation == "process" and self._app.use_subprocesses:
                outcome = await self._run_in_subprocess(attempt, task)
            else:
                outcome = await self._run_handler(claimed, task, attempt)
        except Exception:
            logger.exception("%s: its outcome is unknown", claimed.execution_id)
        finally:
            self._on_outcome(claimed, outcome)

    async def _run_handler(self, claimed: Claimed, task: Task[..., Any], attempt: ClaimedAttempt) -> Outcome:
        """Call the handler and return its outcome; raises only if the attempt was cancelled from outside."""
        try:
            arguments = task.handler_signature.load(self._inline(claimed, task) or await self._resolve(claimed, task))
            if self._seems_expired(claimed) and await self._has_expired(claimed):
                return NOTHING_TO_REPORT
            try:
                value = await self._call(task, attempt, arguments)
            finally:
                if attempt.context is not None:
                    attempt.context.close()
            task.check_result(value, arguments)
            if attempt.context is not None:
                await attempt.context.flush()
                await attempt.context.acknowledge_spends()
        except (asyncio.CancelledError, HandlerUnwound) as error:
            if attempt.context is not None:
                attempt.context.mark_cancelled()
            if attempt.is_parked:
                _uncancel()
                return NOTHING_TO_REPORT
            if self._is_cancelled(attempt) or isinstance(error, HandlerUnwound):
                raise
            # Something that the handler awaited was cancelled, not the attempt.
            return await _failure_outcome(claimed, task, attempt, error)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # also `sys.exit()`: one handler must not end the others
            if is_simulated_crash(error):
                logger.info("%s: simulated crash", claimed.execution_id)
                return NOTHING_TO_REPORT
            if attempt.is_parked:
                return _outcome_after_park(claimed, task)
            return await _failure_outcome(claimed, task, attempt, error)
        if attempt.is_parked:
            return _outcome_after_park(claimed, task)
        return _log_failure(claimed, task, outcome_of_result(task, value))

    def _seems_expired(self, claimed: Claimed) -> bool:
        """True if the lease has expired by what this worker knows of the store's time: it stalled during its claim.

        The reply to the claim was late then, and set the engine's estimate back. So the time of an earlier run counts
        too, with what has passed since.
        """
        (then_ms, then_s), now_s = self._store_time, self._loop.time()
        now = max(self._engine.estimate.now(), then_ms + int((now_s - then_s) * 1000))
        self._store_time = now, now_s
        return self._lease_expires_at(claimed.lease_id) <= now

    async def _has_expired(self, claimed: Claimed) -> bool:
        """Confirm with the store's clock that the lease has expired; log and count it.

        Such an attempt is not begun, and nothing is written: the sweep lets another worker claim the execution. The
        worker's own knowledge does not suffice, because with a store whose clock was set back it would refuse all work.
        """
        try:
            now = await self._engine.ping()
        except FabricError as error:
            logger.warning("%s: the store's clock cannot be read: %s", claimed.execution_id, error)
        else:
            self._engine.estimate.update(now)
            self._store_time = now, self._loop.time()
            if now < self._lease_expires_at(claimed.lease_id):
                return False
        logger.warning("%s: not begun: its lease expired after the claim", claimed.execution_id)
        self._engine.metrics.count("ff_lease_expired_before_start")
        return True

    def _is_cancelled(self, attempt: ClaimedAttempt) -> bool:
        """True if the attempt was cancelled from outside: by its worker, or with it as the loop ends."""
        worker = self._worker_task
        return attempt.is_cancelled or worker is None or worker.done() or worker.cancelling() > 0

    def _inline(self, claimed: Claimed, task: Task[..., Any]) -> bytes:
        """Return the arguments if they came with the claim; else nothing."""
        return b"" if task.is_batch else inline_input(claimed.payload)

    async def _resolve(self, claimed: Claimed, task: Task[..., Any]) -> bytes:
        """Return the arguments as a JSON object, with what has to be read."""
        if task.is_batch:
            [parameter] = task.handler_signature.parameter_codecs
            return await batch_input(self._engine, claimed.handle, claimed.payload, parameter)
        return await resolve_input(self._engine, claimed.payload, self._app.namespace)

    def _call(self, task: Task[..., Any], attempt: ClaimedAttempt, arguments: dict[str, Any]) -> Awaitable[Any]:
        """Return an awaitable for the handler's result."""
        if not task.is_async:
            return self._run_in_thread(task, attempt.get_context(), arguments)
        set_current(attempt)
        call: Awaitable[Any] = task.handler(**task.with_context(arguments, attempt.get_context))
        return call if task.timeout_s is None else _with_timeout(call, attempt, task.name, task.timeout_s)

    def _make_context(self, attempt: ClaimedAttempt) -> Context:
        claimed = attempt.claimed
        assert claimed.payload is not None
        task = self._app.tasks[claimed.payload.execution_kind]
        return Context(
            self._app,
            self._engine,
            claimed.handle,
            task,
            branches=attempt.branches if task.is_async else None,
            loop=self._loop,
            budgets=budget_ids_by_name(claimed.payload),
            scheduled=schedule_of(claimed.payload),
            lease_until=lambda: self._lease_expires_at(claimed.lease_id),
            life=claimed.life,
        )

    async def _run_stub(self, claimed: Claimed, task: Task[..., Any]) -> Outcome:
        """Call a test's stub instead of the handler; it gets the arguments without a context."""
        try:
            arguments = task.handler_signature.load(await self._resolve(claimed, task))
            value = self._app.stubs[task](**arguments)
            if inspect.isawaitable(value):
                value = await value
            task.check_result(value, arguments)
            return outcome_of_result(task, value)
        except Exception as error:
            return outcome_of_exception(error)

    async def _run_in_thread(self, task: Task[..., Any], context: Context, arguments: dict[str, Any]) -> Any:
        variables = contextvars.copy_context()
        variables.run(set_current, context)
        arguments = task.with_context(arguments, lambda: context)
        call = self._loop.run_in_executor(self._threads, lambda: variables.run(lambda: task.handler(**arguments)))
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
        """Count a thread that runs on after its attempt as a used slot, until it returns."""
        logger.warning(
            "%s: the thread of %s was cancelled but is still running; it keeps its slot. Let it poll ctx.cancelled, or "
            'use isolation="process"',
            context.run_id,
            context.task,
        )
        self._stuck.add(call)

        def on_done(_: asyncio.Future[Any]) -> None:
            self._stuck.discard(call)
            if not call.cancelled():
                call.exception()  # retrieved, or asyncio would warn
            self._on_slot_freed()

        call.add_done_callback(on_done)

    async def _run_in_subprocess(self, attempt: ClaimedAttempt, task: Task[..., Any]) -> Outcome:
        claimed, handle = attempt.claimed, attempt.claimed.handle
        attempt.is_process_starting = True
        arguments = await self._resolve(claimed, task)
        if self._seems_expired(claimed) and await self._has_expired(claimed):
            return NOTHING_TO_REPORT
        call = SubprocessCall(
            module=task.module,
            task=task.name,
            input=arguments,
            url=self._app.url if self._engine.is_shared else None,
            backend=handle.backend.value,
            handle_kind=handle.kind.value,
            handle=handle.opaque,
            signature=handle.signature,
            budgets=budget_ids_by_name(claimed.payload),
            scheduled=schedule_of(claimed.payload),
            lease_expires_at=claimed.lease_expires_at,
            life=claimed.life,
        )

        def on_started() -> None:
            attempt.is_process_starting = False

        return _log_failure(claimed, task, await self._subprocesses.run(call, task.timeout_s, on_started))


async def _failure_outcome(
    claimed: Claimed, task: Task[..., Any], attempt: ClaimedAttempt, error: BaseException
) -> Outcome:
    """Return and log the outcome of a handler that raised."""
    if (lost := find_lease_loss(error, claimed.execution_id)) is not None:
        logger.warning("%s: attempt %d of %s is over: %s", claimed.execution_id, claimed.attempt_index, task.name, lost)
        return NOTHING_TO_REPORT
    if attempt.context is not None:
        await attempt.context.flush_quietly()
        await attempt.context.acknowledge_spends()
    is_final = attempt.context is not None and attempt.context.is_final(error)
    outcome = outcome_of_exception(error, is_final=is_final)
    if isinstance(outcome, Failed) and not is_encodable(error):  # its text would break the log
        return _log_failure(claimed, task, outcome)
    subject = (claimed.execution_id, claimed.attempt_index, task.name)
    if isinstance(outcome, Failed):
        trace = (type(error), error, application_traceback(error))
        logger.warning("%s: attempt %d of %s failed", *subject, exc_info=trace)
    else:
        logger.info("%s: attempt %d of %s continues later: %s", *subject, error)
    return outcome


def _log_failure(claimed: Claimed, task: Task[..., Any], outcome: Outcome) -> Outcome:
    """Log an outcome that is a failure by its reason, where there is no exception to log; return the outcome."""
    if isinstance(outcome, Failed):
        subject = (claimed.execution_id, claimed.attempt_index, task.name)
        logger.warning("%s: attempt %d of %s failed: %s", *subject, outcome.reason.rstrip())
    return outcome


async def _with_timeout(call: Awaitable[Any], attempt: ClaimedAttempt, name: str, timeout_s: float) -> Any:
    attempt.time_limit = limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await call
    except (TimeoutError, asyncio.CancelledError) as error:
        if not limit.expired() or (attempt.is_cancelled and isinstance(error, asyncio.CancelledError)):
            raise  # the handler raised it itself, or the worker has cancelled the attempt
        timeout = TimeoutError(f"{name} has not returned after {timeout_s:g} s")
        # The cancellation shows where the handler was. Before Python 3.11.4 it is the error's context, not its cause.
        raise timeout.with_traceback((error.__cause__ or error.__context__ or error).__traceback__) from None


def _outcome_after_park(claimed: Claimed, task: Task[..., Any]) -> Outcome:
    logger.error("%s: %s continued after the run was parked; its result is lost", claimed.execution_id, task.name)
    return NOTHING_TO_REPORT


def _uncancel() -> None:
    """Undo the cancellation that parking caused, so that the task can run further handlers."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
