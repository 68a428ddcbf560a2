"""Subprocesses that run one handler at a time and can be killed in the middle of it.

They are for handlers that keep a processor busy or ignore cancellation: a timeout, a cancelled run or a lost lease
kills the process. A subprocess gets the names of the module and the task and the input as JSON, and opens the store by
its URL. Nothing is pickled, and a subprocess ends with its worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from flowfabric.handles import BackendTag, Handle, HandleKind
from flowfabric.sdk.context import Context, set_current
from flowfabric.sdk.durable.attempt import HandlerUnwound
from flowfabric.sdk.durable.branches import BranchTree, ensure_task_factory
from flowfabric.sdk.task import Task
from flowfabric.sdk.worker.outcome import (
    NOTHING_TO_REPORT,
    Failed,
    Outcome,
    find_lease_loss,
    outcome_of_exception,
    outcome_of_result,
)
from flowfabric.sdk.worker.threads import DaemonThreadPool

STARTED = b"begun"
START_TIMEOUT_S = 60.0  # for a process to start and import the handler's module


class SubprocessCall(msgspec.Struct, frozen=True):
    """The call of a handler in a subprocess: its module, the name of its task, and its input."""

    module: str
    task: str
    input: bytes
    url: str | None  # of the store; None if other processes cannot open it
    backend: int
    handle_kind: str
    handle: bytes
    signature: bytes  # of the handle, by the server that issued it; empty on a store
    budgets: dict[str, str]
    scheduled: tuple[str, int] | None
    lease_expires_at: int
    life: int = 0


class SubprocessPool:
    """The subprocesses of one worker: as many as are busy at once, reused for later calls."""

    def __init__(self) -> None:
        self._threads = DaemonThreadPool("flowfabric-cell")
        self._idle: list[_Subprocess] = []

    async def run(self, call: SubprocessCall, timeout_s: float | None, on_started: Callable[[], None]) -> Outcome:
        """Run a call and return its outcome. After a timeout, or if this is cancelled, the process is killed.

        `on_started` is called when the handler starts. The timeout begins then, since a process may take long to start.
        """
        loop = asyncio.get_running_loop()
        process = self._idle.pop() if self._idle else await self._start()
        try:
            started = loop.run_in_executor(self._threads, process.start_call, call)
            await asyncio.wait((started,), timeout=START_TIMEOUT_S)
            if not started.done():
                reason = f"the process of {call.task} has not begun after {START_TIMEOUT_S:g} s; it was killed"
                return Failed(reason, "infra_crash")
            if not started.result():
                return _died(call, process)
            on_started()
            answer = loop.run_in_executor(self._threads, process.wait_for_outcome)
            await asyncio.wait((answer,), timeout=timeout_s)
            if not answer.done():
                reason = f"TimeoutError: {call.task} has not returned after {timeout_s:g} s; its process was killed"
                return Failed(reason, "timeout")
            outcome = answer.result()
            if outcome is None:
                return _died(call, process)
            self._idle.append(process)
            return outcome
        finally:
            if process not in self._idle:
                self._end(process)

    async def _start(self) -> _Subprocess:
        starting = asyncio.get_running_loop().run_in_executor(self._threads, _Subprocess)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:  # the process will start all the same: end it then
            starting.add_done_callback(lambda future: self._end(future.result()))
            raise

    def _end(self, process: _Subprocess) -> None:
        process.kill()
        self._threads.submit(process.release)

    def close(self) -> None:
        """End idle subprocesses; the others were killed, or end with this process."""
        for process in self._idle:
            self._end(process)
        self._idle.clear()
        self._threads.shutdown()


class _Subprocess:
    """The worker's side of one subprocess."""

    def __init__(self) -> None:
        # A new interpreter: a fork would inherit threads, locks and connections in an undefined state.
        spawn = multiprocessing.get_context("spawn")
        self._pipe, far_end = spawn.Pipe()
        self._process = spawn.Process(target=subprocess_main, args=(far_end,), name="flowfabric-cell", daemon=True)
        self._process.start()
        far_end.close()
        self._pipe_lock = threading.Lock()  # held by the thread that waits for an answer

    def start_call(self, call: SubprocessCall) -> bool:
        """Send a call; True if its handler has started, False if the process died. Blocks the thread."""
        with self._pipe_lock:
            try:
                self._pipe.send_bytes(msgspec.msgpack.encode(call))
                return self._pipe.recv_bytes() == STARTED
            except (EOFError, OSError):
                return False

    def wait_for_outcome(self) -> Outcome | None:
        """Return the outcome of the call; None if the process died. Blocks the thread."""
        with self._pipe_lock:
            try:
                outcome: Outcome = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=Outcome)
                return outcome
            except (EOFError, OSError):
                return None

    def describe_exit(self) -> str:
        """Return the signal or the exit code with which the process ended."""
        self._process.join(5)
        code = self._process.exitcode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return signal.Signals(-code).name
        return f"exit code {code}"

    def kill(self) -> None:
        """Kill the process; the thread that waits for its answer gets an end of file."""
        self._process.kill()

    def release(self) -> None:
        """Release the resources of a killed process. Blocks the thread until the process has ended."""
        with (
            self._pipe_lock
        ):  # after the waiting thread has returned: a closed descriptor may be reused by another pipe
            self._process.join()
            self._process.close()
            self._pipe.close()


def _died(call: SubprocessCall, process: _Subprocess) -> Outcome:
    return Failed(f"the process of {call.task} died ({process.describe_exit()})", "infra_crash")


def subprocess_main(pipe: Connection) -> None:
    """Run calls one after the other, until the worker closes the pipe or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which decides about its subprocesses
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_worker, daemon=True).start()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="flowfabric-cell-loop", daemon=True).start()
    while True:
        try:
            call = msgspec.msgpack.decode(pipe.recv_bytes(), type=SubprocessCall)
        except (EOFError, OSError):
            return
        outcome = _run_call(call, loop, lambda: pipe.send_bytes(STARTED))
        pipe.send_bytes(msgspec.msgpack.encode(outcome))


def _end_with_worker() -> None:
    """Exit when the worker ends: a killed worker cannot stop its subprocesses, and its leases expire."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_call(call: SubprocessCall, loop: asyncio.AbstractEventLoop, on_started: Callable[[], None]) -> Outcome:
    """Import the handler, create its context, and call it."""
    try:
        task = _find_task(call)
        context = None
        if call.url is not None:
            context = asyncio.run_coroutine_threadsafe(_make_context(task, call), loop).result()
        elif task.handler_signature.context_name is not None:
            raise RuntimeError("a store in memory cannot be reached from another process: this handler gets no context")
        arguments = task.handler_signature.load(call.input)
    except Exception as error:
        on_started()
        return outcome_of_exception(error)
    on_started()
    if task.is_async:
        return asyncio.run_coroutine_threadsafe(_run_async_handler(task, arguments, context), loop).result()
    return _run_plain_handler(task, arguments, context, loop)


def _find_task(call: SubprocessCall) -> Task[..., Any]:
    """Return the task of this name in the module that defines it."""
    module = sys.modules.get(call.module) or importlib.import_module(call.module)
    for value in vars(module).values():
        if isinstance(value, Task) and value.name == call.task:
            return value
    raise LookupError(f"{call.module} has no task {call.task!r} at its top level, so no process can find it")


def _run_plain_handler(
    task: Task[..., Any], arguments: dict[str, Any], context: Context | None, loop: asyncio.AbstractEventLoop
) -> Outcome:
    """Call a plain handler in the main thread; its context belongs to the loop in the other thread."""
    variables = contextvars.copy_context()
    if context is not None:
        variables.run(set_current, context)
        arguments = task.with_context(arguments, lambda: context)
    try:
        value = variables.run(lambda: task.handler(**arguments))
        asyncio.run_coroutine_threadsafe(_flush(context), loop).result()
        task.check_result(value, arguments)
    except HandlerUnwound:
        return NOTHING_TO_REPORT
    except Exception as error:
        return asyncio.run_coroutine_threadsafe(_failure_outcome(context, error), loop).result()
    return outcome_of_result(task, value)


async def _run_async_handler(task: Task[..., Any], arguments: dict[str, Any], context: Context | None) -> Outcome:
    """Call an `async def` handler on the subprocess's loop."""
    if context is not None:
        ensure_task_factory(asyncio.get_running_loop())
        context.branches = BranchTree(asyncio.current_task())
        set_current(context)
        arguments = task.with_context(arguments, lambda: context)
    try:
        try:
            value = await task.handler(**arguments)
        finally:
            if context is not None:
                context.close()
        await _flush(context)
        task.check_result(value, arguments)
    except asyncio.CancelledError as error:
        return NOTHING_TO_REPORT if context is not None and context.is_parked else outcome_of_exception(error)
    except (Exception, SystemExit) as error:  # a SystemExit would end the loop without an outcome
        return await _failure_outcome(context, error)
    return outcome_of_result(task, value)


async def _flush(context: Context | None) -> None:
    """Store what a handler that has returned left to be written."""
    if context is not None:
        await context.flush()
        await context.acknowledge_spends()


async def _failure_outcome(context: Context | None, error: BaseException) -> Outcome:
    """Return the outcome of a handler that raised."""
    if context is None:
        return outcome_of_exception(error)
    if find_lease_loss(error, context.run_id) is not None:
        return NOTHING_TO_REPORT
    await context.flush_quietly()
    await context.acknowledge_spends()
    return outcome_of_exception(error, is_final=context.is_final(error))


async def _make_context(task: Task[..., Any], call: SubprocessCall) -> Context:
    app = task.app
    if call.url is not None:
        app.url = call.url  # the worker may use another store than the module names
    engine = await app.claim()
    handle = Handle(BackendTag(call.backend), HandleKind(call.handle_kind), call.handle, call.signature)
    return Context(
        app,
        engine,
        handle,
        task,
        budgets=call.budgets,
        scheduled=call.scheduled,
        lease_until=lambda: call.lease_expires_at,
        life=call.life,
    )
