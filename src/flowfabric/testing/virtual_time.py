"""Virtual time on the running event loop: when nothing can happen before the next timer, the clock jumps to it.

The clock stops while a thread runs or a socket could answer, so that a handler in a thread never loses its lease
because the loop looked idle. If a server has not answered for `STALL_S`, the clock runs at the pace of real time:
the call may itself be waiting for a timer, as before a retry after a deadlock. This works on asyncio's own event loops
only.

Threads take turns, so that equal seeds give equal runs. A thread runs only while the loop has nothing to do, one at a
time, in the order in which they were started or got their answers, until it ends or calls the loop. Its messages to the
loop are delivered then. A thread that still runs after `STUCK_S` may be waiting for another thread: the next one starts
beside it, and the order of these two is undefined.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from contextvars import Context, copy_context
from typing import Any, cast

REAL_POLL_S = 0.005
STUCK_S = 1.0  # real time, as are the next two
IDLE_TIMEOUT_S = 30.0  # `wait_idle` waits so long for stuck threads
STALL_S = 1.0
RESOLUTION_S = 1e-6  # asyncio's nanosecond is lost in the sum with a clock beyond 194 days: no timer would be due
MAX_BUSY_SPINS = 200  # iterations of a busy loop after which a thread gets a turn anyway
MAX_BUSY_SPINS_OF_WAIT = 10_000  # turns of a loop that is never idle, after which a wait for idleness ends


class ThreadTurn:
    """One call in a thread, and whether it may run."""

    __slots__ = ("awaits_reply", "cancelled", "done", "may_run")

    def __init__(self) -> None:
        self.may_run = threading.Event()  # set while it may run
        self.awaits_reply = False  # True if it will wait for the answer to its next message
        self.done = False
        self.cancelled = False  # cancelled before its turn: it never runs


class VirtualTime:
    """Replaces the clock of one running loop, and schedules its threads, from `start` to `stop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = cast("Any", loop)
        if not hasattr(loop, "_selector"):
            raise RuntimeError(f"virtual time needs asyncio's own event loop, not {type(loop).__name__}")
        self._selector: selectors.BaseSelector = self._loop._selector
        self._now = loop.time()
        self._spins = 0
        self._local = threading.local()
        self._waiting: dict[int, ThreadTurn] = {}  # turns that wait for an answer of the loop, by thread id
        self._queue: deque[ThreadTurn] = deque()  # turns that may run next
        self._running: ThreadTurn | None = None
        self._running_since = 0.0  # real time
        self._stuck: dict[ThreadTurn, float] = {}  # turns that do not end, and since when they run
        self._process_calls = 0
        self._server_calls = 0
        self._stalled_since: float | None = None  # real time since which no server has answered
        self._sent: deque[tuple[ThreadTurn, Callable[..., object], tuple[Any, ...], Context]] = deque()
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._is_stopped = False

    def start(self) -> None:
        """Replace the loop's clock."""
        loop, selector = self._loop, self._selector
        self._real_resolution = loop._clock_resolution
        self._real_select = selector.select
        self._real_executor = loop.run_in_executor
        self._real_call = loop.call_soon_threadsafe
        loop.time = lambda: self._now
        loop._clock_resolution = RESOLUTION_S
        selector.select = self._select  # type: ignore[method-assign]
        loop.run_in_executor = self._run_in_executor
        loop.call_soon_threadsafe = self._call_soon_threadsafe

    def stop(self) -> None:
        """Restore the loop's clock. Timers set in virtual time belong to tasks that have been stopped before."""
        self._is_stopped = True
        self._loop._clock_resolution = self._real_resolution
        del self._loop.time
        del self._loop.run_in_executor
        del self._loop.call_soon_threadsafe
        self._selector.select = self._real_select  # type: ignore[method-assign]
        for turn in self._queue:  # calls that have not started never run
            turn.cancelled = True
        for turn in (*self._queue, *self._waiting.values()):
            turn.may_run.set()
        while self._sent:
            self._deliver()

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock while the answer of a server is awaited."""
        self._server_calls += 1
        try:
            yield
        finally:
            self._server_calls -= 1

    @property
    def has_running_threads(self) -> bool:
        """True if a thread or process runs or is about to, or a server is asked."""
        return bool(self._running or self._queue or self._stuck or self._process_calls or self._server_calls)

    async def wait_idle(self) -> None:
        """Wait until neither the loop, a thread nor a server can do anything before the next timer.

        Raises `TimeoutError` if a thread is stuck. Ends after a while if code keeps the loop busy without end.
        """
        self._spins = 0
        idle = self._loop.create_future()
        self._idle_waiters.append(idle)
        await idle

    # -- ThreadScheduler: `answered` is called on the loop, the others in the thread ------------------------------

    def will_wait(self) -> None:
        """Record that this thread is about to call the loop and wait."""
        if (turn := self._this_turn()) is not None:
            turn.awaits_reply = True

    def answered(self, thread: int) -> None:
        """Queue a thread that has its answer for its next turn."""
        if (turn := self._waiting.pop(thread, None)) is not None:
            self._queue.append(turn)

    def wait_turn(self) -> None:
        """Block until it is the turn of this thread."""
        if (turn := self._this_turn()) is not None and not self._is_stopped:
            turn.may_run.wait()

    def _this_turn(self) -> ThreadTurn | None:
        turn: ThreadTurn | None = getattr(self._local, "turn", None)
        return turn

    # -- turns ----------------------------------------------------------------------------------------------------

    def _select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real_select(0)
        if ready:
            self._stalled_since = None
            return ready
        if timeout == 0:
            self._spins += 1
            max_spins = MAX_BUSY_SPINS if self.has_running_threads else MAX_BUSY_SPINS_OF_WAIT
            if self._spins < max_spins or not (self.has_running_threads or self._idle_waiters):
                return ready
        self._spins = 0
        if self.has_running_threads:
            return self._run_threads()
        if self._idle_waiters:
            self._end_idle_waits(None)
            return ready
        if timeout is None:  # there is no timer, so the loop waits for something real
            return self._real_select(REAL_POLL_S)
        self._now += max(timeout, 0.0)
        return []

    def _run_threads(self) -> list[tuple[selectors.SelectorKey, int]]:
        """Let a thread run until it sends a message."""
        if self._running is None and self._queue:
            self._running, self._running_since = self._queue.popleft(), time.monotonic()
            self._running.may_run.set()
        if self._deliver():
            return []
        ready = self._real_select(REAL_POLL_S)
        self._advance_if_stalled(bool(ready))
        if self._running is not None and time.monotonic() - self._running_since > STUCK_S:
            self._stuck[self._running], self._running = self._running_since, None
        if self._stuck and not self._queue and time.monotonic() - min(self._stuck.values()) > IDLE_TIMEOUT_S:
            self._end_idle_waits(
                TimeoutError(f"plain code in a thread has been running for {IDLE_TIMEOUT_S:g} s of real time")
            )
        return ready

    def _advance_if_stalled(self, is_ready: bool) -> None:
        """Let the clock run at the pace of real time if a server has not answered for long."""
        now = time.monotonic()
        if is_ready or not self._server_calls or self._process_calls:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = now
        elif now - self._stalled_since > STALL_S:
            self._now += REAL_POLL_S

    def _deliver(self) -> bool:
        """Deliver one message of a thread to the loop; False if there is none."""
        if not self._sent:
            return False
        turn, callback, args, context = self._sent.popleft()
        if turn.done or turn.awaits_reply:
            turn.awaits_reply = False
            self._stuck.pop(turn, None)
            if turn is self._running:
                self._running = None
        self._loop.call_soon(callback, *args, context=context)
        return True

    def _end_idle_waits(self, error: Exception | None) -> None:
        for idle in self._idle_waiters:
            if not idle.done():
                idle.set_exception(error) if error else idle.set_result(None)
        self._idle_waiters.clear()

    def _call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Any:
        turn = self._this_turn()
        if turn is None or self._is_stopped:
            return self._real_call(callback, *args, context=context)
        if turn.awaits_reply:
            turn.may_run.clear()
            self._waiting[threading.get_ident()] = turn
        self._sent.append((turn, callback, args, context or copy_context()))  # with this thread's context variables
        self._loop._write_to_self()
        return None

    def _run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        if isinstance(executor, ProcessPoolExecutor):
            return self._run_in_process(executor, function, *args)
        turn = ThreadTurn()

        def run_in_turn() -> Any:
            self._local.turn = turn
            try:
                turn.may_run.wait()
                return None if turn.cancelled else function(*args)
            finally:
                turn.done = True

        future: asyncio.Future[Any] = self._real_executor(executor, run_in_turn)
        self._queue.append(turn)

        def on_done(future: asyncio.Future[Any]) -> None:
            if future.cancelled() and turn in self._queue:
                self._queue.remove(turn)
                turn.cancelled = True
                turn.may_run.set()

        future.add_done_callback(on_done)
        return future

    def _run_in_process(self, executor: Any, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._real_executor(executor, function, *args)
        self._process_calls += 1

        def on_done(_: asyncio.Future[Any]) -> None:
            self._process_calls -= 1

        future.add_done_callback(on_done)
        return future
