"""Cells: processes that run one handler at a time and can be killed in the middle of it.

For work that keeps a processor busy, and for work that does not listen: a timeout, a cancelled run or a lost lease ends
the process, whatever it is doing. A cell is told which function to call by its names and gets its input as JSON; it
opens the store by its address when the handler uses its context. Nothing is pickled, and a cell ends with its worker.
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
START_TIMEOUT_S = 60.0  # that a process may take to start and to import what its handler needs


class SubprocessCall(msgspec.Struct, frozen=True):
    """A handler to call: where it is defined, its name as a task, and its input."""

    module: str
    task: str
    input: bytes
    url: str | None  # of the store, if other processes can open it
    backend: int
    handle_kind: str
    handle: bytes
    signature: bytes  # of the server that gave the handle out; empty on a store
    budgets: dict[str, str]
    lease_expires_at: int


class SubprocessPool:
    """The cells of one worker: as many as are busy at once, kept for the next order."""

    def __init__(self) -> None:
        self._threads = DaemonThreadPool("flowfabric-cell")
        self._idle: list[_Cell] = []

    async def run(self, order: SubprocessCall, timeout_s: float | None, begun: Callable[[], None]) -> Outcome:
        """What comes of the order. When it takes too long, or nobody wants it any more, its process is killed.

        Its time begins when the handler does, and `begun` is called then: a process may take long to start.
        """
        loop = asyncio.get_running_loop()
        cell = self._idle.pop() if self._idle else await self._start()
        try:
            beginning = loop.run_in_executor(self._threads, cell.begin, order)
            await asyncio.wait((beginning,), timeout=START_TIMEOUT_S)
            if not beginning.done():
                words = f"the process of {order.task} has not begun after {START_TIMEOUT_S:g} s; it was killed"
                return Failed(words, "infra_crash")
            if not beginning.result():
                return _died(order, cell)
            begun()
            answer = loop.run_in_executor(self._threads, cell.end)
            await asyncio.wait((answer,), timeout=timeout_s)
            if not answer.done():
                words = f"TimeoutError: {order.task} has not returned after {timeout_s:g} s; its process was killed"
                return Failed(words, "timeout")
            outcome = answer.result()
            if outcome is None:
                return _died(order, cell)
            self._idle.append(cell)
            return outcome
        finally:
            if cell not in self._idle:
                self._end(cell)

    async def _start(self) -> _Cell:
        starting = asyncio.get_running_loop().run_in_executor(self._threads, _Cell)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:  # it is there in a moment, and nobody would know of it
            starting.add_done_callback(lambda started: self._end(started.result()))
            raise

    def _end(self, cell: _Cell) -> None:
        cell.kill()
        self._threads.submit(cell.bury)

    def close(self) -> None:
        """End the cells that have nothing to do; the others were killed or end with this process."""
        for cell in self._idle:
            self._end(cell)
        self._idle.clear()
        self._threads.shutdown()


class _Cell:
    """The worker's end of one cell."""

    def __init__(self) -> None:
        # A fresh interpreter: a fork would inherit threads, locks and connections in the middle of whatever they do.
        spawn = multiprocessing.get_context("spawn")
        self._wire, far = spawn.Pipe()
        self._process = spawn.Process(target=subprocess_main, args=(far,), name="flowfabric-cell", daemon=True)
        self._process.start()
        far.close()
        self._in_use = threading.Lock()  # by the thread that waits for its answer

    def begin(self, order: SubprocessCall) -> bool:
        """Hand an order over; True when it has begun, False when the process died. Blocks its thread."""
        with self._in_use:
            try:
                self._wire.send_bytes(msgspec.msgpack.encode(order))
                return self._wire.recv_bytes() == STARTED
            except (EOFError, OSError):
                return False

    def end(self) -> Outcome | None:
        """What comes of the order; None when the process died. Blocks its thread."""
        with self._in_use:
            try:
                outcome: Outcome = msgspec.msgpack.decode(self._wire.recv_bytes(), type=Outcome)
                return outcome
            except (EOFError, OSError):
                return None

    def how_it_ended(self) -> str:
        """Its end in words."""
        self._process.join(5)
        code = self._process.exitcode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return signal.Signals(-code).name
        return f"exit code {code}"

    def kill(self) -> None:
        """End it at once; the thread that waits for its answer hears of it."""
        self._process.kill()

    def bury(self) -> None:
        """Let go of what was held for a process that was killed. Blocks its thread until that is gone."""
        with self._in_use:  # who waits for its answer hears first: a closed wire could be somebody else's by then
            self._process.join()
            self._process.close()
            self._wire.close()


def _died(order: SubprocessCall, cell: _Cell) -> Outcome:
    return Failed(f"the process of {order.task} died ({cell.how_it_ended()})", "infra_crash")


def subprocess_main(wire: Connection) -> None:
    """The life of a cell: one order after the other, until the worker is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker, which decides what becomes of its cells
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_worker, daemon=True).start()
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="flowfabric-cell-loop", daemon=True).start()
    while True:
        try:
            order = msgspec.msgpack.decode(wire.recv_bytes(), type=SubprocessCall)
        except (EOFError, OSError):
            return
        outcome = _perform(order, loop, lambda: wire.send_bytes(STARTED))
        wire.send_bytes(msgspec.msgpack.encode(outcome))


def _end_with_worker() -> None:
    """A worker that was killed cannot tell its cells to stop; its lease goes, and so do they."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _perform(order: SubprocessCall, loop: asyncio.AbstractEventLoop, begin: Callable[[], None]) -> Outcome:
    """Find the handler and make its context; then begin, and call it."""
    try:
        task = _find(order)
        context = None
        if order.url is not None:
            context = asyncio.run_coroutine_threadsafe(_context(task, order), loop).result()
        elif task.signature.context_name is not None:
            raise RuntimeError("a store in memory cannot be reached from another process: this handler gets no context")
        arguments = task.signature.load(order.input)
    except Exception as failure:
        begin()
        return outcome_of_exception(failure)
    begin()
    if task.is_async:
        return asyncio.run_coroutine_threadsafe(_await(task, arguments, context), loop).result()
    return _call(task, arguments, context, loop)


def _find(order: SubprocessCall) -> Task[..., Any]:
    """The task by its name, in the module that defines it."""
    module = sys.modules.get(order.module) or importlib.import_module(order.module)
    for value in vars(module).values():
        if isinstance(value, Task) and value.name == order.task:
            return value
    raise LookupError(f"{order.module} has no task {order.task!r} at its top level, so no process can find it")


def _call(
    task: Task[..., Any], arguments: dict[str, Any], context: Context | None, loop: asyncio.AbstractEventLoop
) -> Outcome:
    """Call a plain handler in this, the main thread; its context stands on the loop beside it."""
    surroundings = contextvars.copy_context()
    if context is not None:
        surroundings.run(set_current, context)
        arguments = task.with_context(arguments, lambda: context)
    try:
        value = surroundings.run(lambda: task.handler(**arguments))
        if context is not None:
            asyncio.run_coroutine_threadsafe(context.flush(), loop).result()
    except HandlerUnwound:
        return NOTHING_TO_REPORT
    except Exception as failure:
        if context is not None and find_lease_loss(failure, context.run_id) is not None:
            return NOTHING_TO_REPORT
        if context is not None:
            asyncio.run_coroutine_threadsafe(context.flush_quietly(), loop).result()
        return outcome_of_exception(failure)
    return outcome_of_result(task, value)


async def _await(task: Task[..., Any], arguments: dict[str, Any], context: Context | None) -> Outcome:
    """Call an `async def` handler on the cell's loop."""
    if context is not None:
        context.handler_task = asyncio.current_task()
        set_current(context)
        arguments = task.with_context(arguments, lambda: context)
    try:
        try:
            value = await task.handler(**arguments)
        finally:
            if context is not None:
                context.close()
        if context is not None:
            await context.flush()
    except asyncio.CancelledError as ended:
        return NOTHING_TO_REPORT if context is not None and context.is_parked else outcome_of_exception(ended)
    except (Exception, SystemExit) as failure:  # an exit would end the loop, and nobody would hear of it
        if context is not None and find_lease_loss(failure, context.run_id) is not None:
            return NOTHING_TO_REPORT
        if context is not None:
            await context.flush_quietly()
        return outcome_of_exception(failure)
    return outcome_of_result(task, value)


async def _context(task: Task[..., Any], order: SubprocessCall) -> Context:
    app = task.app
    if order.url is not None:
        app.url = order.url  # the worker may have been told another store than the module names
    engine = await app.claim()
    handle = Handle(BackendTag(order.backend), HandleKind(order.handle_kind), order.handle, order.signature)
    return Context(app, engine, handle, task, budgets=order.budgets, lease_until=lambda: order.lease_expires_at)
