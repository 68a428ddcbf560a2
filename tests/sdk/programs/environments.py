"""Worker processes on one store, in virtual time, with faults at chosen calls of the store.

Each process has its own app, engine and connection to the store. A process that crashes can no longer reach the store,
and its journal is closed: whatever its handlers still do has not happened. Time stands still while a store answers, so
that SQLite and Postgres run in virtual time, too.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import Context
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec
from hypothesis import strategies as st

from flowfabric import Engine, Fabric, Retry
from flowfabric.clock import StoreClockEstimate
from flowfabric.ids import DEFAULT_PARTITIONS, PartitionCounts, SeededMinter
from flowfabric.model.change import Change
from flowfabric.sdk.worker.worker import Worker
from flowfabric.settings import Settings, Sweeps
from flowfabric.stores.claims import ClaimRequest, CommitAndClaimResult
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import SchemaVersion, Store
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.sqlite import SQLiteStore
from flowfabric.stores.valkey.address import parse_url
from flowfabric.stores.valkey.store import ValkeyStore
from flowfabric.stores.verdicts import Verdict
from flowfabric.testing.flaky_store import FlakyStore, Loss
from flowfabric.testing.invariants import check_invariants
from flowfabric.testing.virtual_time import VirtualTime
from tests.conftest import emptied, emptied_valkey
from tests.sdk.programs.interpreter import BACKOFF, make_app, make_purse
from tests.sdk.programs.journal import Journal
from tests.sdk.programs.model import End, Violation, find_violations
from tests.sdk.programs.outside import collected_alarms, grant_wishes, wait_for_end
from tests.sdk.programs.program import Program, total_minutes

EPOCH_MS = 1_700_000_000_000
LEASE_S = 15.0
POLL_MS = 60_000
AFTERMATH_S = 120.0  # in which processes that lost their lease or were asked to stop come to an end
SECRET = "00" * 32

_USED_SWEEPS = ("lease_expiry", "delayed_promoter", "suspension_timeout", "child_ends", "unblock", "outbox_relay")
_INTERVALS: dict[str, int] = {
    name: POLL_MS if name.removesuffix("_ms") in _USED_SWEEPS else 0
    for name in Sweeps.__struct_fields__
    if name.endswith("_ms")
}
SETTINGS = Settings(poll_ms=POLL_MS, sweeps=Sweeps(**_INTERVALS))  # type: ignore[arg-type]

T = TypeVar("T")


class FaultKind(StrEnum):
    CRASH = "crash"  # the process dies before the call
    CRASH_AFTER = "crash after"  # the process dies after the call, before its reply
    LOST_REQUEST = "lost request"
    LOST_REPLY = "lost reply"
    LEASE_LAPSES = "lease lapses"  # the process stalls in the call until another one has its work
    SIGTERM = "SIGTERM"
    DEPLOY = "deploy"  # SIGTERM, and the next process has the other program


class Fault(msgspec.Struct, frozen=True):
    """A fault at the n-th call of the store that a process makes while it runs handlers."""

    kind: FaultKind
    call: int


RANDOM_FAULTS = [kind for kind in FaultKind if kind is not FaultKind.DEPLOY]
faults: st.SearchStrategy[tuple[Fault, ...]] = st.lists(
    st.builds(Fault, st.sampled_from(RANDOM_FAULTS), st.integers(0, 40)), max_size=3
).map(tuple)


class Process:
    """A process with its own engine; with a worker, unless it is a client."""

    def __init__(self, environment: Environment, number: int, program: Program) -> None:
        self.is_dead = False
        self.environment = environment
        self.number = number
        self.store = ProcessStore(environment.new_store(), self)
        self.app: Fabric = make_app(environment.journal, lambda: self, program)
        self.worker: Worker | None = None
        self._working: asyncio.Task[None] | None = None

    async def open(self) -> None:
        await self.store.open(migrate=True)
        self.engine = ProcessEngine(self.store, minter=SeededMinter(self.number), settings=SETTINGS)
        self.engine.runtime.estimate = StoreClockEstimate(monotonic_s=self.environment.time.now)
        self.engine.runtime.random = random.Random(self.number).random
        await self.engine.ensure_signing_key(SECRET)
        self.app.bind(self.engine)

    def work(self) -> None:
        """Start a worker."""
        name = f"worker:{self.number}"
        self.worker = Worker(
            self.app,
            lease_ttl=LEASE_S,
            grace="1ms",
            presence_ttl="100d",
            worker_id=name,
            instance_id=name,
        )
        self._working = asyncio.create_task(self.worker.work())

    def has_died(self) -> bool:
        """True if it has died; a call, since it may die during any await."""
        return self.is_dead

    @property
    def is_busy(self) -> bool:
        return self.worker is not None and self.worker.running > 0

    def stop_renewing(self) -> None:
        """Let the leases of all running handlers expire."""
        assert self.worker is not None
        for lease_id in self.worker._running:
            self.worker.stop_renewing(lease_id)

    async def kill(self) -> None:
        """Remove what is left of a dead process."""
        assert self.worker is not None
        assert self._working is not None
        self.worker.simulate_kill()
        self._working.cancel()
        await asyncio.gather(self._working, return_exceptions=True)
        await self._close_engine()

    async def terminate(self) -> None:
        """Stop as by SIGTERM."""
        if self.worker is not None and self._working is not None:
            self.worker.stop()
            await asyncio.wait((self._working,))
            if not self.is_dead:
                self._working.result()
        await self._close_engine()

    async def _close_engine(self) -> None:
        self.app.unbind(None)
        await self.engine.close()


class ProcessEngine(Engine):
    """An engine whose leases are renewed on the loop, in virtual time."""

    @property
    def is_shared(self) -> bool:
        return False


class ProcessStore(FlakyStore):
    """The connection of one process to the store."""

    def __init__(self, store: Store, process: Process) -> None:
        super().__init__(store)
        self._process = process
        self._environment = process.environment

    def on_notify(self, callback: Callable[[frozenset[str]], None]) -> None:
        self._environment.listeners.append((self._process, callback))

    def notify(self, topics: frozenset[str]) -> None:
        self._environment.notify(self._process, topics)

    async def open(self, *, migrate: bool, partitions: PartitionCounts = DEFAULT_PARTITIONS) -> SchemaVersion:
        with self._environment.time.stopped():
            return await self.inner.open(migrate=migrate, partitions=partitions)

    async def close(self) -> None:
        with self._environment.time.stopped():
            await self.inner.close()

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[Verdict]:
        return await self._call("commit", lambda: self._notified(self.inner.commit(changes, hint), hint))

    async def commit_and_claim(
        self, changes: Sequence[Change], hint: frozenset[str], take: ClaimRequest
    ) -> CommitAndClaimResult:
        return await self._call(
            "commit", lambda: self._notified(self.inner.commit_and_claim(changes, hint, take), hint)
        )

    async def _notified(self, writing: Awaitable[T], topics: frozenset[str]) -> T:
        answer = await writing
        self._environment.notify(self._process, topics)
        return answer

    async def _call(self, verb: str, call: Callable[[], Awaitable[T]]) -> T:
        process, environment = self._process, self._environment
        if process.is_dead:
            raise self._error(verb, Loss.REQUEST)
        kind = environment.next_fault() if process.is_busy else None
        match kind:
            case FaultKind.CRASH:
                environment.crash(process)
                raise self._error(verb, Loss.REQUEST)
            case FaultKind.LOST_REQUEST:
                raise self._error(verb, Loss.REQUEST)
            case FaultKind.SIGTERM | FaultKind.DEPLOY:
                environment.terminate(process, deploy=kind is FaultKind.DEPLOY)
            case FaultKind.LEASE_LAPSES:
                process.stop_renewing()
                environment.start_soon()
                await asyncio.sleep(LEASE_S + 2)
                if process.has_died():
                    raise self._error(verb, Loss.REQUEST)
            case _:
                pass
        with environment.time.stopped():
            answer = await call()
        if kind is FaultKind.CRASH_AFTER and not process.has_died():
            environment.crash(process)
        if process.has_died() or kind is FaultKind.LOST_REPLY:
            raise self._error(verb, Loss.REPLY)
        return answer


class Environment:
    """Processes on one store for one run of a program."""

    def __init__(
        self,
        new_store: Callable[[Callable[[], int]], Store],
        program: Program,
        faults: Sequence[Fault],
        deployed: Program | None,
    ) -> None:
        """`deployed` is the program of all processes after the fault `DEPLOY`."""
        self.time = VirtualTime(asyncio.get_running_loop())
        self._started_s = self.time.now()
        self._new_store = new_store
        self._program = program
        self._deployed = deployed
        self._faults = {fault.call: fault.kind for fault in faults}
        self.journal = Journal(self.time.now)
        self.listeners: list[tuple[Process, Callable[[frozenset[str]], None]]] = []
        self._processes: list[Process] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls = 0
        self._numbers = itertools.count(1)

    def new_store(self) -> Store:
        """Return another connection to the store."""
        return self._new_store(self._now_ms)

    def _now_ms(self) -> int:
        return EPOCH_MS + round((self.time.now() - self._started_s) * 1000)

    def notify(self, sender: Process, topics: frozenset[str]) -> None:
        """Wake up the other processes."""
        loop = asyncio.get_running_loop()
        for process, callback in self.listeners:
            if process is not sender and not process.is_dead and topics:
                loop.call_soon(callback, topics)

    # -- faults --------------------------------------------------------------------------------------------------------

    def next_fault(self) -> FaultKind | None:
        """Count a call of the store; return the fault that happens in it."""
        self._calls += 1
        return self._faults.pop(self._calls - 1, None)

    def crash(self, process: Process) -> None:
        """Let a process die, and start another one."""
        process.is_dead = True
        self._forget(process)
        self._spawn(process.kill())
        self.start_soon()

    def terminate(self, process: Process, *, deploy: bool) -> None:
        """Let a process stop, and start another one."""
        if process not in self._processes:
            return
        if deploy and self._deployed is not None:
            self._program = self._deployed
        self._forget(process)
        self._spawn(process.terminate())
        self.start_soon()

    def _forget(self, process: Process) -> None:
        if process in self._processes:
            self._processes.remove(process)

    def start_soon(self) -> None:
        """Start another process."""
        self._spawn(self._start())

    async def _start(self) -> None:
        process = await self.open_process()
        process.work()

    async def open_process(self) -> Process:
        """Open a process without a worker."""
        process = Process(self, next(self._numbers), self._program)
        await process.open()
        self._processes.append(process)
        return process

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task in a context of its own: a fault happens in the context of some handler."""
        self._tasks.add(asyncio.create_task(work, context=Context()))

    # -- the run -------------------------------------------------------------------------------------------------------

    async def run(self, losses: int) -> tuple[End, Engine]:
        """Submit the program, play the outside world, and wait for the end."""
        client = await self.open_process()
        await self._start()
        await asyncio.sleep(1)  # until the first pass of the sweeps is over: faults are for the program
        task = client.app.tasks["program"]
        retry = Retry(max=self._program.retries + losses, base=BACKOFF, jitter=False)
        run = await task.options(retry=retry).submit()
        people = asyncio.create_task(grant_wishes(self.journal, run))
        end = await wait_for_end(run, (total_minutes(self._program.body) + 60 * (losses + 1)) * 60)
        await asyncio.sleep(AFTERMATH_S)
        people.cancel()
        await asyncio.gather(people, return_exceptions=True)
        for done in [task for task in self._tasks if task.done()]:
            done.result()
        usage, _ = await client.engine.read_budget_usage_and_limits(make_purse().id("default"))
        return msgspec.structs.replace(end, spent=usage.get("tokens", 0)), client.engine

    async def close(self) -> None:
        """Stop all processes."""
        self._faults.clear()
        for process in list(self._processes):
            await process.terminate()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# -- places ------------------------------------------------------------------------------------------------------------


async def run_program(
    place: str,
    program: Program,
    faults: Sequence[Fault] = (),
    *,
    dsn: str | None = None,
    deployed: Program | None = None,
) -> tuple[list[Violation], Journal, End]:
    """Run a program on a store by its name; return what the contract forbids."""
    async with _opened_store(place, dsn) as new_store:
        environment = Environment(new_store, program, faults, deployed)
        environment.time.start()
        try:
            with collected_alarms(environment.journal):
                end, engine = await environment.run(len(faults))
                await check_invariants(engine)
        finally:
            await environment.close()
            environment.time.stop()
        journal = environment.journal
        if any(
            fault.kind is FaultKind.LEASE_LAPSES for fault in faults
        ):  # that process stalls in a call, longer than 10 s
            journal.alarms = [alarm for alarm in journal.alarms if not alarm.startswith("stall:")]
        violations = find_violations(deployed or program, journal, end, faults=len(faults))
        return violations, journal, end


@asynccontextmanager
async def _opened_store(place: str, dsn: str | None) -> AsyncIterator[Callable[[Callable[[], int]], Store]]:
    match place:
        case "memory":
            stores: list[Store] = []

            def shared(clock: Callable[[], int]) -> Store:
                if not stores:
                    stores.append(MemoryStore(clock))
                return stores[0]

            yield shared
        case "sqlite":
            with TemporaryDirectory() as folder:
                yield lambda clock: SQLiteStore(Path(folder) / "ff.db", clock)
        case "valkey":
            address = parse_url(emptied_valkey())
            yield lambda clock: ValkeyStore(address, clock)
        case _:
            assert dsn is not None
            database = await emptied(dsn)
            yield lambda clock: PostgresStore(database, clock)


def explain(violations: Sequence[Violation], journal: Journal, end: End) -> str:
    """Return a report of what went wrong, with the journal."""
    events = "\n".join(
        f"  {event.at_s:10.2f} #{event.invocation} {event.what:10} {event.path} {event.value or ''}"
        for event in journal.events
    )
    return "\n".join([*map(str, violations), f"end: {end}", events])
