"""Connection threads: each owns one connection and executes the jobs that event loops send to it.

`WriterThread` executes several jobs in one transaction. `GilYielder` lets these threads run beside a busy event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import apsw

from flowfabric.errors import ForkedProcess, SchemaTooNew, StoreUnavailable
from flowfabric.stores.sqlite import statements
from flowfabric.stores.sqlite.errors import translate_error, unavailable
from flowfabric.stores.sqlite.file_identity import FileIdentity
from flowfabric.stores.sqlite.file_lock import WriterLock
from flowfabric.stores.sqlite.queue_ids import WriterQueueIds
from flowfabric.stores.verdicts import Unstorable

T = TypeVar("T")

MAX_JOBS_PER_TRANSACTION = 16
MAX_JOIN_AGE_S = 0.005  # the age up to which a transaction accepts further jobs
MAX_JOIN_AGE_QUEUED_S = 0.02  # the same for jobs that were queued when the transaction began
YIELD_AFTER_S = 0.003  # the time that a job waits before the event loop yields the GIL, and again after each yield
YIELD_S = 0.0002
POSITIONS_PER_MS = 1024  # positions of the feed run ahead of the clock only above this rate of events
WRITE_TIMEOUT_S = 10.0  # the time that a write waits for the lock and for earlier jobs before it fails
CLOSE_TIMEOUT_S = 10.0  # the time that a closing store waits for a writer that is blocked by another process


class ConnectionJob:
    """A function to run on a connection, the future of its caller, and its outcome.

    `timeout_error` makes the error of a job that has not started after `WRITE_TIMEOUT_S`; without it the job never
    times out. `on_unstorable` is tried after `work` failed with `Unstorable` and was rolled back.
    """

    __slots__ = ("_started", "error", "future", "loop", "on_unstorable", "result", "timeout_error", "work")

    def __init__(
        self,
        work: Callable[[apsw.Connection], Any],
        loop: asyncio.AbstractEventLoop,
        timeout_error: Callable[[float], Exception] | None = None,
        on_unstorable: Callable[[apsw.Connection, Unstorable], Any] | None = None,
    ) -> None:
        self.work = work
        self.on_unstorable = on_unstorable
        self.loop = loop
        self.timeout_error = timeout_error
        self.future: asyncio.Future[Any] = loop.create_future()
        self.result: Any = None
        self.error: Exception | None = None
        self._started = threading.Lock()

    def try_start(self) -> bool:
        """Return True to exactly one caller: the thread that executes the job, or the timeout that fails it."""
        return not self.future.cancelled() and self._started.acquire(blocking=False)

    def fail_if_unstarted(self) -> None:
        """Fail the job if it has not started; it is then never executed. Runs on the caller's loop."""
        if self.timeout_error is not None and not self.future.done() and self.try_start():
            self.future.set_exception(self.timeout_error(WRITE_TIMEOUT_S))

    def run(self, db: apsw.Connection) -> bool:
        """Execute the job and return whether it succeeded. Raise errors of the file, which concern all jobs."""
        try:
            self.result = self.work(db)
        except Exception as error:
            self.error = translate_error(error)
            if isinstance(self.error, StoreUnavailable):
                raise
        return self.error is None

    def fall_back(self) -> bool:
        """Replace work that failed with `Unstorable` by what is tried instead; False if there is nothing."""
        fault, retry = self.error, self.on_unstorable
        if retry is None or not isinstance(fault, Unstorable):
            return False
        self.work, self.on_unstorable, self.error = lambda db: retry(db, fault), None, None
        return True

    def resolve_future(self) -> None:
        """Set the outcome on the future unless that is done. Runs on the caller's loop."""
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class ConnectionThread:
    """A thread that executes jobs in order. It connects for the first job, and again after an error of the file."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], apsw.Connection],
        identity: FileIdentity,
        check: Callable[[apsw.Connection], None],
    ) -> None:
        """`check` raises if this release cannot run on the file's schema."""
        self._name = name
        self._connect = connect
        self._check = check
        self._identity = identity
        self._queue: SimpleQueue[ConnectionJob | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._start_lock = threading.Lock()
        self._pid = 0  # the process that owns the thread
        self._closing: ConnectionJob | None = None
        self._db: apsw.Connection | None = None
        self._timeout_error: Callable[[float], Exception] | None = None

    async def run(
        self,
        work: Callable[[apsw.Connection], T],
        on_unstorable: Callable[[apsw.Connection, Unstorable], T] | None = None,
    ) -> T:
        """Execute a function on the thread; driver errors are translated to errors of the port."""
        if self._closing is not None:
            raise unavailable("the store is closed")
        if self._pid != os.getpid():
            self.bind_to_process()
        if self._thread is None:
            self._start()
        job = ConnectionJob(work, asyncio.get_running_loop(), self._timeout_error, on_unstorable)
        self._enqueue(job)
        yielder = _yielder_of(job.loop)
        yielder.add(job)
        try:
            result: T = await job.future
        finally:
            yielder.remove(job)
        return result

    def _enqueue(self, job: ConnectionJob) -> None:
        self._queue.put(job)

    def bind_to_process(self) -> None:
        """Make this process the owner; raise `ForkedProcess` if another process is."""
        if self._pid not in (0, os.getpid()):
            raise ForkedProcess("use", "the store was opened before the fork; open one in the child")
        self._pid = os.getpid()

    async def close(self) -> None:
        """Finish the queued jobs and end the thread."""
        if self._closing is None:
            self._closing = ConnectionJob(lambda db: None, asyncio.get_running_loop())
            if self._thread is not None and self._pid == os.getpid():
                self._queue.put(None)
                if (await asyncio.wait([self._closing.future], timeout=CLOSE_TIMEOUT_S))[0]:
                    self._thread.join()

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None:
                # A daemon thread: a program that does not close its store can still exit.
                thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                thread.start()
                self._thread = thread

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            if not job.future.cancelled():
                jobs = [job]
                self._attempt(jobs)
                _deliver(jobs)
        self._drop()
        if self._closing is not None:
            _deliver([self._closing])

    def _attempt(self, jobs: list[ConnectionJob]) -> None:
        try:
            self._identity.check_same()
            if self._db is None:
                self._db = self._connect()
            self.run_jobs(self._db, jobs)
        except Exception as error:
            self._drop()
            for job in jobs:
                job.error = (
                    translate_error(error) if isinstance(error, SchemaTooNew) else job.error or translate_error(error)
                )

    def run_jobs(self, db: apsw.Connection, jobs: list[ConnectionJob]) -> None:
        """Execute jobs. An exception means that all of them failed and the connection must be closed."""
        (job,) = jobs
        if not job.run(db) and isinstance(job.error, apsw.SQLError):
            self._check(db)  # the statement may have failed because of a newer schema

    def _drop(self) -> None:
        if self._db is not None:
            db, self._db = self._db, None
            with contextlib.suppress(apsw.Error):
                db.close()


def advance_feed_positions(db: apsw.Connection, now: int) -> None:
    """Advance the positions of the feed to the wall clock.

    Each writing process does this once. The file may be a restored older copy: positions that followers have seen in
    the lost file are not assigned again.
    """
    db.execute("BEGIN IMMEDIATE")
    for statement in ("advance_positions", "start_positions"):
        db.execute(statements.statement(statement), (now * POSITIONS_PER_MS,))
    db.execute("COMMIT")


class WriterThread(ConnectionThread):
    """Executes jobs that are queued before a transaction ends in that transaction, each completely or not at all."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], apsw.Connection],
        identity: FileIdentity,
        check: Callable[[apsw.Connection], None],
        writer_lock: WriterLock,
        queue_ids: WriterQueueIds,
    ) -> None:
        super().__init__(name, connect, identity, check)
        self._writer_lock = writer_lock
        self._timeout_error = writer_lock.timeout_error
        self._queue_ids = queue_ids
        self.must_advance_positions = False  # True if the next transaction has to do so first
        self.before_transaction: Callable[[apsw.Connection], None] | None = None
        self._staged: dict[asyncio.AbstractEventLoop, list[ConnectionJob]] = {}

    async def close(self) -> None:
        for loop in list(self._staged):
            self._release(loop)
        await super().close()

    def _enqueue(self, job: ConnectionJob) -> None:
        """Queue the jobs of one loop iteration together; otherwise the thread would start with the first job alone."""
        staged = self._staged.setdefault(job.loop, [])
        staged.append(job)
        if len(staged) == 1:
            job.loop.call_soon(self._release, job.loop)

    def _release(self, loop: asyncio.AbstractEventLoop) -> None:
        for job in self._staged.pop(loop, ()):
            self._queue.put(job)

    def run_jobs(self, db: apsw.Connection, jobs: list[ConnectionJob]) -> None:
        with self._writer_lock:
            if not jobs[0].try_start():  # it timed out while this thread waited for the lock
                jobs.clear()
                return
            if self.before_transaction is not None:
                self.before_transaction(db)
            try:
                if self.must_advance_positions:
                    advance_feed_positions(db, time.time_ns() // 1_000_000)
                    self.must_advance_positions = False
                db.execute("BEGIN IMMEDIATE")
                self._check(db)
                began, waiting = time.monotonic(), 1 + self._queue.qsize()
                self._run_job(db, jobs[0], first=True)
                while self._has_room(jobs, waiting, time.monotonic() - began) and (job := self._next_job()) is not None:
                    jobs.append(job)
                    self._run_job(db, job)
                db.execute("COMMIT")
                self._identity.check_same()  # otherwise the commit went to a file that was replaced
                self._queue_ids.on_commit()
            except BaseException:
                self._queue_ids.on_rollback()
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def _has_room(self, jobs: list[ConnectionJob], waiting: int, age_s: float) -> bool:
        """True if a transaction that began with `waiting` queued jobs accepts one more.

        Jobs that were queued together are kept together for longer. A job that is left behind is executed while the
        event loop continues with the results of the others, and the two threads then compete for the GIL.
        """
        return len(jobs) < MAX_JOBS_PER_TRANSACTION and age_s < (
            MAX_JOIN_AGE_QUEUED_S if len(jobs) < waiting else MAX_JOIN_AGE_S
        )

    def _next_job(self) -> ConnectionJob | None:
        """Return a job that was queued meanwhile."""
        with contextlib.suppress(Empty):
            job = self._queue.get_nowait()
            if job is not None and job.try_start():
                return job
            if job is None:
                self._queue.put(None)  # the store is closing: leave the mark to `_serve`
        return None

    def _run_job(self, db: apsw.Connection, job: ConnectionJob, *, first: bool = False) -> None:
        """Execute one job; if it fails, roll back its writes only."""
        if not first:
            db.execute("SAVEPOINT job")
        while not job.run(db):
            self._queue_ids.on_rollback()
            db.execute("ROLLBACK; BEGIN IMMEDIATE" if first else "ROLLBACK TO job")
            if not job.fall_back():
                break
        if not first:
            db.execute("RELEASE job")


class GilYielder:
    """Yields the GIL to the connection threads from time to time while jobs of one event loop wait for them.

    A busy loop releases the GIL at each iteration, but acquires it again before the thread has woken up: without this
    class, a commit beside a busy loop was seen to take 300 ms and more. One timer serves all waiting jobs: with a timer
    per job, an idle loop would wake up repeatedly during a commit, and a busy loop would sleep a fifth of its time.
    """

    __slots__ = ("_since", "_timer", "_yielded_at")

    def __init__(self) -> None:
        self._since: dict[ConnectionJob, float] = {}  # the waiting jobs, oldest first
        self._yielded_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, job: ConnectionJob) -> None:
        """Start watching a job."""
        self._since[job] = job.loop.time()
        if self._timer is None:
            self._timer = job.loop.call_later(YIELD_AFTER_S, self._tick, job.loop)

    def remove(self, job: ConnectionJob) -> None:
        """Stop watching a job."""
        del self._since[job]
        if not self._since and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        """Yield if a job has waited long enough since the last yield, fail overdue jobs, and set the timer again."""
        oldest = next(iter(self._since.values()))
        if loop.time() - oldest > WRITE_TIMEOUT_S:
            for job in [job for job, since in self._since.items() if loop.time() - since > WRITE_TIMEOUT_S]:
                job.fail_if_unstarted()
        since = max(self._yielded_at, oldest)
        if loop.time() - since >= YIELD_AFTER_S:
            time.sleep(YIELD_S)
            self._yielded_at = since = loop.time()
        self._timer = loop.call_at(since + YIELD_AFTER_S, self._tick, loop)


_YIELDERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, GilYielder] = weakref.WeakKeyDictionary()


def _yielder_of(loop: asyncio.AbstractEventLoop) -> GilYielder:
    yielder = _YIELDERS.get(loop)
    if yielder is None:
        yielder = _YIELDERS[loop] = GilYielder()
    return yielder


def _deliver(jobs: list[ConnectionJob]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[ConnectionJob]] = defaultdict(list)
    for job in jobs:
        by_loop[job.loop].append(job)
    for loop, loop_jobs in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_resolve_futures, loop_jobs)


def _resolve_futures(jobs: list[ConnectionJob]) -> None:
    for job in jobs:
        job.resolve_future()
