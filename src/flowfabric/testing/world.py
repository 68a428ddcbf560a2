"""`World`: an app, its store and its workers in one process, in virtual time, with nothing to install.

    async with World(app) as world:
        run = await deploy.submit(request)
        await world.advance("3d")
        assert await run.result() == "rejected"

Waiting takes no real time: when nothing can happen before the next timer, the clock jumps to it. Inside the world the
app uses a store in memory; afterwards it uses its own again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import TracebackType
from typing import Any, Literal, Self, get_args

import msgspec

from flowfabric.clock import StoreClockEstimate
from flowfabric.engine.engine import Engine
from flowfabric.ids import ExecutionId, SeededMinter, partition_of
from flowfabric.sdk.approvals import ApprovalLink
from flowfabric.sdk.context import Context
from flowfabric.sdk.durable.attempt import SimulatedCrash
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.fabric import Fabric
from flowfabric.sdk.run import Run
from flowfabric.sdk.worker.worker import Worker
from flowfabric.settings import Settings, Sweeps
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.testing.faults import FlakyStore
from flowfabric.testing.flow_invariants import check_flow_invariants
from flowfabric.testing.invariants import check_invariants
from flowfabric.testing.stubs import Ballots, CompletedChecks, Stub
from flowfabric.testing.virtual_time import VirtualTime

EPOCH_MS = 1_700_000_000_000
RARE_INTERVAL_MS = 100 * 24 * 60 * 60 * 1000
# In one process no wakeup is lost, and sweeps sleep until the next due instant: polling is not needed.
RARE_SWEEPS: dict[str, Any] = {name: RARE_INTERVAL_MS for name in Sweeps.__struct_fields__ if name.endswith("_ms")}
WORLD_SETTINGS = Settings(poll_ms=RARE_INTERVAL_MS, sweeps=Sweeps(**RARE_SWEEPS))

Moment = Literal["before_effect", "after_effect", "after_commit", "lease_expired", "store_down"]
SETTLE_YIELDS = 50  # iterations of the loop in which everything happens that can happen now
AFTER_EXPIRY_S = 1.0  # for which a handler runs on after its lease has expired


def _world_settings(app: Fabric) -> Settings:
    """Return the app's settings, with those of a world in place of defaults."""
    settings, defaults = app._settings or Settings(), Settings()
    sweeps = msgspec.structs.replace(WORLD_SETTINGS.sweeps, **_changed_fields(settings.sweeps, defaults.sweeps))
    return msgspec.structs.replace(WORLD_SETTINGS, **{**_changed_fields(settings, defaults), "sweeps": sweeps})


def _changed_fields(values: msgspec.Struct, defaults: msgspec.Struct) -> dict[str, Any]:
    pairs = ((name, getattr(values, name), getattr(defaults, name)) for name in values.__struct_fields__)
    return {name: value for name, value, default in pairs if value != default}


class World:
    """An app with its own store, workers and clock for one test; equal seeds give equal runs."""

    def __init__(self, app: Fabric, *, seed: int = 0, workers: int = 1, slots: int = 10) -> None:
        self.app = app
        self._seed = seed
        self._count = workers
        self._slots = slots
        self._started_workers = 0
        self._workers: list[tuple[Worker, asyncio.Task[None]]] = []
        self._faults: list[tuple[str, str, float]] = []
        self._shapes: dict[tuple[str, str], Any] = {}
        self._ballots: dict[tuple[tuple[str, str], ...], Ballots] = {}  # by the waitpoints of the approval

    async def __aenter__(self) -> Self:
        self._time = VirtualTime(asyncio.get_running_loop())
        self._time.start()
        self._started_at = self._time.now()
        self.store = FlakyStore(MemoryStore(clock=self.now_ms))
        await self.store.open(migrate=True)
        self.engine = Engine(self.store, minter=SeededMinter(self._seed), settings=_world_settings(self.app))
        self.engine.runtime.estimate = StoreClockEstimate(monotonic_s=self._time.now)
        self.engine.runtime.random = random.Random(self._seed).random
        await self.engine.ensure_signing_key("00" * 32)
        self._previous_engine = self.app.bind(await self.engine_for_app())
        self.app.on_fault_point = self._inject_fault
        self.app.thread_scheduler = self._time
        self.app.on_approval = self._note_shape
        self.app.use_subprocesses = False
        for _ in range(self._count):
            self.start_worker()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.heal()
        for _, task in self._workers:
            task.cancel()
        await asyncio.gather(*(task for _, task in self._workers), return_exceptions=True)
        self.app.unbind(self._previous_engine)
        self.app.on_fault_point = self.app.thread_scheduler = self.app.on_approval = None
        self.app.stubs.clear()
        self.app.use_subprocesses = True
        await self.engine.close()
        self._time.stop()
        if kind is None and self._faults:
            point, moment, _ = self._faults[0]
            raise AssertionError(f"{point} {moment} was never reached: the fault was not injected")

    async def engine_for_app(self) -> Engine:
        """Return the engine that the app uses; tests replace it by a client."""
        return self.engine

    # -- workers --------------------------------------------------------------------------------------------------

    def start_worker(self) -> Worker:
        """Start another worker."""
        self._started_workers += 1
        worker = Worker(
            self.app,
            slots=self._slots,
            presence_ttl=RARE_INTERVAL_MS / 1000,
            worker_id="world",
            instance_id=f"world:{self._started_workers}",
        )
        self._workers.append((worker, asyncio.create_task(worker.work())))
        return worker

    async def kill(self, worker: Worker) -> None:
        """Kill a worker as SIGKILL would: nothing is finished or released, and its leases expire."""
        for known, task in self._workers:
            if known is worker:
                worker.simulate_kill()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._workers = [(known, task) for known, task in self._workers if known is not worker]

    # -- time -----------------------------------------------------------------------------------------------------

    async def advance(self, length: Duration) -> None:
        """Advance the clock, and run everything that falls due meanwhile."""
        await asyncio.sleep(to_ms(length) / 1000)
        await self.settle()

    async def settle(self) -> None:
        """Run everything that can happen now, also in threads.

        Raises `TimeoutError` if plain code is still running after 30 s of real time.
        """
        for _ in range(SETTLE_YIELDS):
            await asyncio.sleep(0)
        while self._time.has_running_threads:
            await self._time.wait_idle()
            for _ in range(SETTLE_YIELDS):
                await asyncio.sleep(0)

    def now_ms(self) -> int:
        """Return the time of the store's clock."""
        return EPOCH_MS + round((self._time.now() - self._started_at) * 1000)

    # -- faults ---------------------------------------------------------------------------------------------------

    def crash_at(self, point: str, moment: Moment, *, lasts: Duration = "10s") -> None:
        """Inject a fault once, at the point "step:<name>" or "spend:<budget>".

        The process dies `before_effect`, `after_effect` (before the result is recorded) or `after_commit`. The other
        two happen after the effect: with `lease_expired` another worker claims the run while this handler continues,
        and with `store_down` the store is unavailable for the time `lasts`. It is an error if the point is not reached.
        """
        if moment not in get_args(Moment):
            raise ValueError(f"{moment!r} is none of {', '.join(get_args(Moment))}")
        self._faults.append((point, moment, to_ms(lasts, "lasts") / 1000))

    async def _inject_fault(self, context: Context, point: str, moment: str) -> None:
        for fault in self._faults:
            fault_point, kind, lasts_s = fault
            fault_moment = kind if kind in ("before_effect", "after_commit") else "after_effect"
            if fault_point != point or fault_moment != moment:
                continue
            self._faults.remove(fault)
            if kind == "lease_expired":
                await self._let_lease_expire(context)
            elif kind == "store_down":
                self.store.go_down()
                asyncio.get_running_loop().call_later(lasts_s, self.store.heal)
            else:
                raise SimulatedCrash(f"{point} {moment}")
            return

    async def _let_lease_expire(self, context: Context) -> None:
        left_s = context.lease_seconds_left
        for worker, _ in self._workers:
            worker.stop_renewing(context.handle.fields.lease_id)
        await asyncio.sleep(left_s + AFTER_EXPIRY_S)

    def stub(
        self,
        target: Callable[..., Any],
        instead: Callable[..., Any] | None = None,
        *,
        returns: Any = None,
        raises: BaseException | None = None,
    ) -> Stub:
        """Replace a step's function or a task by another function, a value, or an error."""
        stub = self.app.stubs[target] = Stub(instead, returns, raises)
        return stub

    # -- people ---------------------------------------------------------------------------------------------------

    async def approval(self, run: Run[Any], name: str) -> Ballots:
        """Wait until the run asks for the approval of this name; return it, to be answered."""
        for _ in range(10_000):
            waits = await self.engine.read_waits(run.id)
            for gate in waits.open.values():
                if any(key.rpartition(".")[0] == name for _, key in gate.waitpoints):
                    if gate.waitpoints not in self._ballots:
                        links = [await self._link(run.id, waitpoint_id) for waitpoint_id, _ in gate.waitpoints]
                        self._ballots[gate.waitpoints] = Ballots(run, links, self._shapes.get((run.id, name), bool))
                    return self._ballots[gate.waitpoints]
            await asyncio.sleep(0.01)
        raise AssertionError(f"{run} does not ask for {name!r}")

    def _note_shape(self, context: Context, name: str, shape: Any) -> None:
        self._shapes[context.run_id, name] = shape

    async def _link(self, run_id: str, waitpoint_id: str) -> str:
        token = await self.engine.read_waitpoint_token(partition_of(ExecutionId(run_id)), waitpoint_id)
        return ApprovalLink.for_waitpoint(self.app.public_url, run_id, waitpoint_id, token.reveal() if token else "")

    def assert_invariants(self) -> Any:
        """Raise if an invariant of the store is broken. May be awaited, but has finished when it returns."""
        return CompletedChecks(check_invariants(self.engine), check_flow_invariants(self.engine))
