"""Virtual time on the running event loop: when nothing can happen before the next timer, it is the next timer's time.

Time stands still while a thread is at work or a socket could answer, so that a handler in a thread never sees its own
lease lapse because the loop looked idle. Only the standard event loops can be bent like this.

Threads take turns, so that equal seeds give equal runs: a thread runs only while the loop has nothing to do, one at a
time, in the order in which they were started or got their answers, until it ends or asks the loop for something. What
it sends to the loop is delivered then. A thread that is still running after `STUCK_S` may wait for another one: the
next thread starts beside it, and the order of these two is left to chance.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextvars import Context, copy_context
from typing import Any, cast

REAL_POLL_S = 0.005
STUCK_S = 1.0  # of real time
IDLE_TIMEOUT_S = 30.0  # of real time: how long `quiet` waits for threads that are stuck
MAX_BUSY_SPINS = 200  # turns of a busy loop after which a thread gets its turn all the same


class ThreadTurn:
    """One call in a thread."""

    __slots__ = ("awaits_reply", "cancelled", "done", "may_run")

    def __init__(self) -> None:
        self.may_run = threading.Event()  # set while it may run
        self.awaits_reply = False  # whether what it sends next is a question that it waits for
        self.done = False
        self.cancelled = False  # cancelled before its turn: it never runs


class VirtualTime:
    """Bends the time of one running loop until it is let go."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = cast("Any", loop)
        if not hasattr(loop, "_selector"):
            raise RuntimeError(f"virtual time needs asyncio's own event loop, not {type(loop).__name__}")
        self._selector: selectors.BaseSelector = self._loop._selector
        self._now = loop.time()
        self._spins = 0
        self._local = threading.local()
        self._waiting: dict[int, ThreadTurn] = {}  # by thread: who waits for an answer of the loop
        self._queue: deque[ThreadTurn] = deque()  # who may run next
        self._running: ThreadTurn | None = None
        self._since = 0.0  # when it began to run, in real time
        self._stuck: dict[ThreadTurn, float] = {}
        self._elsewhere = 0  # calls in other processes
        self._sent: deque[tuple[ThreadTurn, Callable[..., object], tuple[Any, ...], Context]] = deque()
        self._quiet: list[asyncio.Future[None]] = []
        self._is_over = False

    def start(self) -> None:
        """Take the loop's time over."""
        loop, selector = self._loop, self._selector
        self._real_select = selector.select
        self._real_executor = loop.run_in_executor
        self._real_call = loop.call_soon_threadsafe
        loop.time = lambda: self._now
        selector.select = self._select  # type: ignore[method-assign]
        loop.run_in_executor = self._run_in_executor
        loop.call_soon_threadsafe = self._call_soon_threadsafe

    def stop(self) -> None:
        """Give it back. Timers that were set meanwhile belong to what was stopped before."""
        self._is_over = True
        del self._loop.time
        del self._loop.run_in_executor
        del self._loop.call_soon_threadsafe
        self._selector.select = self._real_select  # type: ignore[method-assign]
        for ticket in self._queue:  # what has not begun never does
            ticket.cancelled = True
        for ticket in (*self._queue, *self._waiting.values()):
            ticket.may_run.set()
        while self._sent:
            self._deliver()

    def now(self) -> float:
        """Seconds of virtual time."""
        return self._now

    @property
    def has_running_threads(self) -> bool:
        """Whether plain code runs or is about to."""
        return bool(self._running or self._queue or self._stuck or self._elsewhere)

    async def wait_idle(self) -> None:
        """Wait until neither the loop nor a thread can do anything before time goes on; raise when one is stuck."""
        quiet = self._loop.create_future()
        self._quiet.append(quiet)
        await quiet

    # -- what threads say: the first and the last on their own, the others on the loop ----------------------------

    def will_wait(self) -> None:
        """This thread will ask the loop for something and wait."""
        if (ticket := getattr(self._local, "ticket", None)) is not None:
            ticket.asks = True

    def answered(self, thread: int) -> None:
        """The thread has its answer and may go on when it is its turn."""
        if (ticket := self._waiting.pop(thread, None)) is not None:
            self._queue.append(ticket)

    def wait_turn(self) -> None:
        """Wait until it is the turn of this thread."""
        if (ticket := getattr(self._local, "ticket", None)) is not None and not self._is_over:
            ticket.go.wait()

    # -- turns ----------------------------------------------------------------------------------------------------

    def _select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real_select(0)
        if ready:
            return ready
        if timeout == 0:
            self._spins += 1
            if self._spins < MAX_BUSY_SPINS or not self.has_running_threads:
                return ready
        self._spins = 0
        if self.has_running_threads:
            return self._give_turn()
        if self._quiet:
            self._end_quiet(None)
            return []
        if timeout is None:  # something real is under way: wait for it in real time
            return self._real_select(REAL_POLL_S)
        self._now += max(timeout, 0.0)
        return []

    def _give_turn(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Let a thread run until it has something to say."""
        if self._running is None and self._queue:
            self._running, self._since = self._queue.popleft(), time.monotonic()
            self._running.may_run.set()
        if self._deliver():
            return []
        ready = self._real_select(REAL_POLL_S)
        if self._running is not None and time.monotonic() - self._since > STUCK_S:
            self._stuck[self._running], self._running = self._since, None
        if self._stuck and not self._queue and time.monotonic() - min(self._stuck.values()) > IDLE_TIMEOUT_S:
            self._end_quiet(
                TimeoutError(f"plain code in a thread has been running for {IDLE_TIMEOUT_S:g} s of real time")
            )
        return ready

    def _deliver(self) -> bool:
        """Hand one message of a thread to the loop; whether there was one."""
        if not self._sent:
            return False
        ticket, callback, args, context = self._sent.popleft()
        if ticket.done or ticket.awaits_reply:
            ticket.awaits_reply = False
            self._stuck.pop(ticket, None)
            if ticket is self._running:
                self._running = None
        self._loop.call_soon(callback, *args, context=context)
        return True

    def _end_quiet(self, fault: Exception | None) -> None:
        for quiet in self._quiet:
            if not quiet.done():
                quiet.set_exception(fault) if fault else quiet.set_result(None)
        self._quiet.clear()

    def _call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        ticket: ThreadTurn | None = getattr(self._local, "ticket", None)
        if ticket is None or self._is_over:
            return self._real_call(callback, *args, context=context)
        if ticket.awaits_reply:
            ticket.may_run.clear()
            self._waiting[threading.get_ident()] = ticket
        self._sent.append((ticket, callback, args, context or copy_context()))  # what it runs in is this thread's
        self._loop._write_to_self()
        return None

    def _run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        if isinstance(executor, ProcessPoolExecutor):
            return self._run_elsewhere(executor, function, *args)
        ticket = ThreadTurn()

        def in_turn() -> Any:
            self._local.ticket = ticket
            try:
                ticket.may_run.wait()
                return None if ticket.cancelled else function(*args)
            finally:
                ticket.done = True

        future: asyncio.Future[Any] = self._real_executor(executor, in_turn)
        self._queue.append(ticket)

        def over(future: asyncio.Future[Any]) -> None:
            if future.cancelled() and ticket in self._queue:
                self._queue.remove(ticket)
                ticket.cancelled = True
                ticket.may_run.set()

        future.add_done_callback(over)
        return future

    def _run_elsewhere(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._real_executor(executor, function, *args)
        self._elsewhere += 1

        def over(_: asyncio.Future[Any]) -> None:
            self._elsewhere -= 1

        future.add_done_callback(over)
        return future
