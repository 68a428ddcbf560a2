"""The world: an app, its store and its workers in one process, in virtual time, with nothing to install.

    async with World(app) as world:
        run = await deploy.submit(request)
        await world.advance("3d")
        assert await run.result() == "rejected"

Waiting costs nothing: when nobody has anything to do before the next timer, it is already that time. Within the world
the app's store is one in memory; afterwards everything is as it was.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from flowfabric.clock import Estimate
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.fabric import Fabric
from flowfabric.sdk.worker import Worker
from flowfabric.settings import Settings, Sweeps
from flowfabric.stores.memory import MemoryStore
from flowfabric.testing.invariants import check_invariants
from flowfabric.testing.virtual import VirtualTime

EPOCH_MS = 1_700_000_000_000
SELDOM_MS = 100 * 24 * 60 * 60 * 1000
# No hint gets lost in one process, and sweeps sleep until the next instant: nobody has to look in between.
SETTINGS = Settings(
    poll_ms=SELDOM_MS,
    sweeps=Sweeps(
        lease_expiry_ms=SELDOM_MS,
        delayed_promoter_ms=SELDOM_MS,
        attempt_timeout_ms=SELDOM_MS,
        execution_deadline_ms=SELDOM_MS,
        retention_trimmer_ms=SELDOM_MS,
    ),
)


class World:
    """A small, repeatable universe around an app."""

    def __init__(self, app: Fabric, *, seed: int = 0, workers: int = 1, slots: int = 10) -> None:
        self.app = app
        self._seed = seed
        self._count = workers
        self._slots = slots
        self._workers: list[tuple[Worker, asyncio.Task[None]]] = []

    async def __aenter__(self) -> Self:
        self._time = VirtualTime(asyncio.get_running_loop())
        self._time.start()
        self._began = self._time.now()
        store = MemoryStore(clock=self.now_ms)
        await store.open(migrate=True)
        self.engine = Engine(store, minter=SeededMinter(self._seed), settings=SETTINGS)
        self.engine.estimate = Estimate(passing=self._time.now)
        await self.engine.ensure_signing_key("00" * 32)
        self._outside = self.app.bind(self.engine)
        for _ in range(self._count):
            self.start_worker()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, task in self._workers:
            task.cancel()
        await asyncio.gather(*(task for _, task in self._workers), return_exceptions=True)
        self.app.unbind(self._outside)
        await self.engine.close()
        self._time.stop()

    def start_worker(self) -> Worker:
        """One more worker."""
        worker = Worker(self.app, slots=self._slots)
        self._workers.append((worker, asyncio.create_task(worker.work())))
        return worker

    async def kill(self, worker: Worker) -> None:
        """End a worker as SIGKILL would: nothing is finished, nothing is handed back, its leases lapse."""
        for known, task in self._workers:
            if known is worker:
                worker.abandon()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._workers = [(known, task) for known, task in self._workers if known is not worker]

    async def advance(self, length: Duration) -> None:
        """Let time pass, and everything happen that falls due meanwhile."""
        await asyncio.sleep(to_ms(length) / 1000)
        await self.settle()

    async def settle(self) -> None:
        """Let everything happen that can happen now."""
        for _ in range(50):
            await asyncio.sleep(0)

    async def assert_invariants(self) -> None:
        """Raise when anything that must always hold does not."""
        await check_invariants(self.engine)

    def now_ms(self) -> int:
        """The store's time."""
        return EPOCH_MS + round((self._time.now() - self._began) * 1000)
