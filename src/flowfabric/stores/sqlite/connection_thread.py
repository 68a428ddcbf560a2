"""A desk: one thread with one connection of its own, to which the event loops hand their work over."""

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
from flowfabric.stores.sqlite.file_lock import FileIdentity, WriterLock
from flowfabric.stores.sqlite.queue_ids import WriterQueueIds

T = TypeVar("T")

MAX_JOBS_PER_TRANSACTION = 16  # pieces of work in one transaction
MAX_JOIN_AGE_S = 0.005  # how old it may be when another one joins it
MAX_JOIN_AGE_QUEUED_S = 0.02  # the same for one that waited when it began
YIELD_AFTER_S = 0.003  # how long the loop lets work wait before it steps aside, again and again
YIELD_S = 0.0002
POSITIONS_PER_MS = 1024  # of the feed: it may have so many events a millisecond before they run ahead of the clock
WRITE_TIMEOUT_S = (
    10.0  # how long a write waits for the lock, and for what was handed over before it, until it is given up
)
CLOSE_TIMEOUT_S = 10.0  # how long a closing store waits for a writer that is stuck behind another process


class ConnectionJob:
    """A piece of work, who waits for it, and what became of it.

    `overdue` makes the error for work that has not begun after `WAIT_S`; without it the work is waited for.
    """

    __slots__ = ("_begun", "error", "future", "loop", "result", "timeout_error", "work")

    def __init__(
        self,
        work: Callable[[apsw.Connection], Any],
        loop: asyncio.AbstractEventLoop,
        overdue: Callable[[float], Exception] | None = None,
    ) -> None:
        self.work = work
        self.loop = loop
        self.timeout_error = overdue
        self.future: asyncio.Future[Any] = loop.create_future()
        self.result: Any = None
        self.error: Exception | None = None
        self._begun = threading.Lock()

    def try_start(self) -> bool:
        """True for the one caller that decides what becomes of it: the thread that does it, or who gives it up."""
        return not self.future.cancelled() and self._begun.acquire(blocking=False)

    def fail_if_unstarted(self) -> None:
        """Fail unless it has begun: then it is never done. Runs on the waiter's loop."""
        if self.timeout_error is not None and not self.future.done() and self.try_start():
            self.future.set_exception(self.timeout_error(WRITE_TIMEOUT_S))

    def run(self, db: apsw.Connection) -> bool:
        """Do the work; whether it went well. Trouble with the file is raised: it is everybody's."""
        try:
            self.result = self.work(db)
        except Exception as error:
            self.error = translate_error(error)
            if isinstance(self.error, StoreUnavailable):
                raise
        return self.error is None

    def resolve_future(self) -> None:
        """Hand the outcome to whoever still waits; runs on the waiter's loop."""
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class ConnectionThread:
    """Work is done in the order in which it came; the connection is opened with the first and anew after trouble."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], apsw.Connection],
        spot: FileIdentity,
        check: Callable[[apsw.Connection], None],
    ) -> None:
        """`check` raises when the file's schema is not one that this release runs on."""
        self._name = name
        self._connect = connect
        self._check = check
        self._spot = spot
        self._queue: SimpleQueue[ConnectionJob | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._pid = 0  # of the process that this belongs to
        self._farewell: ConnectionJob | None = None
        self._db: apsw.Connection | None = None
        self._overdue: Callable[[float], Exception] | None = None

    async def run(self, work: Callable[[apsw.Connection], T]) -> T:
        """Have the work done; errors of the driver come out as the port knows them."""
        if self._farewell is not None:
            raise unavailable("the store is closed")
        if self._pid != os.getpid():
            self.bind_to_process()
        if self._thread is None:
            self._start()
        job = ConnectionJob(work, asyncio.get_running_loop(), self._overdue)
        self._hand_over(job)
        patience = _patience_of(job.loop)
        patience.add(job)
        try:
            result: T = await job.future
        finally:
            patience.remove(job)
        return result

    def _hand_over(self, job: ConnectionJob) -> None:
        self._queue.put(job)

    def bind_to_process(self) -> None:
        """Belong to this process from now on; raises when it already belongs to another."""
        if self._pid not in (0, os.getpid()):
            raise ForkedProcess("use", "the store was opened before the fork; open one in the child")
        self._pid = os.getpid()

    async def close(self) -> None:
        """Finish what was handed over and end the thread."""
        if self._farewell is None:
            self._farewell = ConnectionJob(lambda db: None, asyncio.get_running_loop())
            if self._thread is not None and self._pid == os.getpid():
                self._queue.put(None)
                if (await asyncio.wait([self._farewell.future], timeout=CLOSE_TIMEOUT_S))[0]:
                    self._thread.join()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                # A daemon: a program that forgets to close its store can still end.
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
        if self._farewell is not None:
            _deliver([self._farewell])

    def _attempt(self, jobs: list[ConnectionJob]) -> None:
        try:
            self._spot.check_same()
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
        """Do the work; an error that comes out of here means that all of it failed and the connection is spoilt."""
        (job,) = jobs
        if not job.run(db) and isinstance(job.error, apsw.SQLError):
            self._check(db)  # it may be the schema of a newer release, for which the words were not written

    def _drop(self) -> None:
        if self._db is not None:
            db, self._db = self._db, None
            with contextlib.suppress(apsw.Error):  # it was beyond help before
                db.close()


def advance_feed_positions(db: apsw.Connection, now: int) -> None:
    """Let the positions of the feed go on from the time of day.

    Each process that writes does this once. The file may be an older copy that was put back: positions that followers
    have seen in the lost one are not given out again.
    """
    db.execute("BEGIN IMMEDIATE")
    for statement in ("raise_positions", "begin_positions"):
        db.execute(statements.statement(statement), (now * POSITIONS_PER_MS,))
    db.execute("COMMIT")


class WriterThread(ConnectionThread):
    """What is handed over before a transaction ends is written in it, each piece whole or not at all."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], apsw.Connection],
        spot: FileIdentity,
        check: Callable[[apsw.Connection], None],
        turn: WriterLock,
        lines: WriterQueueIds,
    ) -> None:
        super().__init__(name, connect, spot, check)
        self._turn = turn
        self._overdue = turn.timeout_error
        self._lines = lines
        self.must_advance_positions = False  # before its next transaction
        self.before_transaction: Callable[[apsw.Connection], None] | None = None  # called before each transaction
        self._staged: dict[asyncio.AbstractEventLoop, list[ConnectionJob]] = {}

    async def close(self) -> None:
        for loop in list(self._staged):
            self._release(loop)
        await super().close()

    def _hand_over(self, job: ConnectionJob) -> None:
        """What one turn of a loop brings is handed over together: the thread would run off with the first piece."""
        staged = self._staged.setdefault(job.loop, [])
        staged.append(job)
        if len(staged) == 1:
            job.loop.call_soon(self._release, job.loop)

    def _release(self, loop: asyncio.AbstractEventLoop) -> None:
        for job in self._staged.pop(loop, ()):
            self._queue.put(job)

    def run_jobs(self, db: apsw.Connection, jobs: list[ConnectionJob]) -> None:
        with self._turn:
            if not jobs[0].try_start():  # given up while this waited for the lock
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
                self._one(db, jobs[0], first=True)
                while self._has_room(jobs, waiting, time.monotonic() - began) and (job := self._next()) is not None:
                    jobs.append(job)
                    self._one(db, job)
                db.execute("COMMIT")
                self._spot.check_same()  # or it was written to a file that is gone
                self._lines.on_commit()
            except BaseException:
                self._lines.on_rollback()
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def _has_room(self, jobs: list[ConnectionJob], waiting: int, age_s: float) -> bool:
        """Whether a transaction that began with so many waiting takes one more piece.

        What came together is kept together for longer: a piece that is left behind is written while the loop goes on
        with the others, and two threads at work at once are in each other's way from then on.
        """
        return len(jobs) < MAX_JOBS_PER_TRANSACTION and age_s < (
            MAX_JOIN_AGE_QUEUED_S if len(jobs) < waiting else MAX_JOIN_AGE_S
        )

    def _next(self) -> ConnectionJob | None:
        """Work that has been handed over meanwhile."""
        with contextlib.suppress(Empty):
            job = self._queue.get_nowait()
            if job is not None and job.try_start():
                return job
            if job is None:
                self._queue.put(None)  # the store is closing, which `_serve` has to know
        return None

    def _one(self, db: apsw.Connection, job: ConnectionJob, *, first: bool = False) -> None:
        """Do one piece; when it fails, what it wrote is taken back, and nothing else."""
        if not first:
            db.execute("SAVEPOINT job")
        if not job.run(db):
            self._lines.on_rollback()
            db.execute("ROLLBACK; BEGIN IMMEDIATE" if first else "ROLLBACK TO job")
        if not first:
            db.execute("RELEASE job")


class GilYielder:
    """Lets the desks' threads have the interpreter for a moment now and then while work of one loop waits for them.

    A loop that never rests lets go of it at each turn, but takes it back before the thread has woken up: without this,
    a commit beside a busy loop was seen to take 300 ms and more. One timer serves all work that waits: if each piece
    had its own, an idle loop would wake again and again in the middle of a commit, and a busy one would sleep through
    a fifth of its time.
    """

    __slots__ = ("_napped_at", "_since", "_timer")

    def __init__(self) -> None:
        self._since: dict[ConnectionJob, float] = {}  # what waits, in the order in which it came
        self._napped_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, job: ConnectionJob) -> None:
        """Something waits."""
        self._since[job] = job.loop.time()
        if self._timer is None:
            self._timer = job.loop.call_later(YIELD_AFTER_S, self._look, job.loop)

    def remove(self, job: ConnectionJob) -> None:
        """It waits no more."""
        del self._since[job]
        if not self._since and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Step aside if something has waited for so long since the last time; look again when something may have."""
        oldest = next(iter(self._since.values()))
        if loop.time() - oldest > WRITE_TIMEOUT_S:
            for job in [job for job, since in self._since.items() if loop.time() - since > WRITE_TIMEOUT_S]:
                job.fail_if_unstarted()
        since = max(self._napped_at, oldest)
        if loop.time() - since >= YIELD_AFTER_S:
            time.sleep(YIELD_S)
            self._napped_at = since = loop.time()
        self._timer = loop.call_at(since + YIELD_AFTER_S, self._look, loop)


_PATIENCE: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, GilYielder] = weakref.WeakKeyDictionary()


def _patience_of(loop: asyncio.AbstractEventLoop) -> GilYielder:
    found = _PATIENCE.get(loop)
    if found is None:
        found = _PATIENCE[loop] = GilYielder()
    return found


def _deliver(jobs: list[ConnectionJob]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[ConnectionJob]] = defaultdict(list)
    for job in jobs:
        by_loop[job.loop].append(job)
    for loop, theirs in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_settle, theirs)


def _settle(jobs: list[ConnectionJob]) -> None:
    for job in jobs:
        job.resolve_future()
