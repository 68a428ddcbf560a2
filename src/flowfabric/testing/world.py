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
# No hint gets lost in one process, and sweeps sleep until the next instant: nobody has to look in between.
RARE_SWEEPS: dict[str, Any] = {name: RARE_INTERVAL_MS for name in Sweeps.__struct_fields__ if name.endswith("_ms")}
WORLD_SETTINGS = Settings(poll_ms=RARE_INTERVAL_MS, sweeps=Sweeps(**RARE_SWEEPS))

Moment = Literal["before_effect", "after_effect", "after_commit", "lease_expired", "store_down"]
SETTLE_YIELDS = 50  # of the loop, in which everything happens that can happen now
AFTER_EXPIRY_S = 1.0  # how long after its lease a handler finds out that it is a zombie


def _settings_of(app: Fabric) -> Settings:
    """The app's settings; where they are the defaults, a world's: nobody polls in it."""
    own, usual = app._settings or Settings(), Settings()
    sweeps = _chosen(own.sweeps, usual.sweeps)
    return msgspec.structs.replace(
        WORLD_SETTINGS, **{**_chosen(own, usual), "sweeps": msgspec.structs.replace(WORLD_SETTINGS.sweeps, **sweeps)}
    )


def _chosen(own: msgspec.Struct, usual: msgspec.Struct) -> dict[str, Any]:
    """The fields that differ from the defaults."""
    return {name: getattr(own, name) for name in own.__struct_fields__ if getattr(own, name) != getattr(usual, name)}


class World:
    """A small, repeatable universe around an app."""

    def __init__(self, app: Fabric, *, seed: int = 0, workers: int = 1, slots: int = 10) -> None:
        self.app = app
        self._seed = seed
        self._count = workers
        self._slots = slots
        self._started = 0  # workers
        self._workers: list[tuple[Worker, asyncio.Task[None]]] = []
        self._faults: list[tuple[str, str, float]] = []
        self._shapes: dict[tuple[str, str], Any] = {}
        self._ballots: dict[tuple[tuple[str, str], ...], Ballots] = {}  # by waitpoints: who has which link

    async def __aenter__(self) -> Self:
        self._time = VirtualTime(asyncio.get_running_loop())
        self._time.start()
        self._began = self._time.now()
        self.store = FlakyStore(MemoryStore(clock=self.now_ms))
        await self.store.open(migrate=True)
        self.engine = Engine(self.store, minter=SeededMinter(self._seed), settings=_settings_of(self.app))
        self.engine.estimate = StoreClockEstimate(monotonic_s=self._time.now)
        self.engine.random = random.Random(self._seed).random
        await self.engine.ensure_signing_key("00" * 32)
        self._outside = self.app.bind(await self.engine_for_app())
        self.app.on_fault_point = self._pass_point
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
        self.app.unbind(self._outside)
        self.app.on_fault_point = self.app.thread_scheduler = self.app.on_approval = None
        self.app.stubs.clear()
        self.app.use_subprocesses = True
        await self.engine.close()
        self._time.stop()
        if kind is None and self._faults:
            point, moment, _ = self._faults[0]
            raise AssertionError(f"nothing came to {point} {moment}: what should have gone wrong there did not")

    async def engine_for_app(self) -> Engine:
        """What the app sees of the engine."""
        return self.engine

    # -- workers --------------------------------------------------------------------------------------------------

    def start_worker(self) -> Worker:
        """One more worker."""
        self._started += 1
        worker = Worker(
            self.app,
            slots=self._slots,
            presence_ttl=RARE_INTERVAL_MS / 1000,
            worker_id="world",
            instance_id=f"world:{self._started}",
        )
        self._workers.append((worker, asyncio.create_task(worker.work())))
        return worker

    async def kill(self, worker: Worker) -> None:
        """End a worker as SIGKILL would: nothing is finished, nothing is handed back, its leases lapse."""
        for known, task in self._workers:
            if known is worker:
                worker.simulate_kill()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._workers = [(known, task) for known, task in self._workers if known is not worker]

    # -- time -----------------------------------------------------------------------------------------------------

    async def advance(self, length: Duration) -> None:
        """Let time pass, and everything happen that falls due meanwhile."""
        await asyncio.sleep(to_ms(length) / 1000)
        await self.settle()

    async def settle(self) -> None:
        """Let everything happen that can happen now, also in threads.

        Raises TimeoutError when plain code is still running after 30 s of real time.
        """
        for _ in range(SETTLE_YIELDS):
            await asyncio.sleep(0)
        while self._time.has_running_threads:
            await self._time.wait_idle()
            for _ in range(SETTLE_YIELDS):
                await asyncio.sleep(0)

    def now_ms(self) -> int:
        """The store's time."""
        return EPOCH_MS + round((self._time.now() - self._began) * 1000)

    # -- what goes wrong ------------------------------------------------------------------------------------------

    def crash_at(self, point: str, moment: Moment, *, lasts: Duration = "10s") -> None:
        """Let something go wrong once, at "step:<name>" or "spend:<budget>".

        The process dies `before_effect`, `after_effect` (before it is remembered) or `after_commit`. After the effect,
        with `lease_expired` the work is taken over by another while this handler goes on, and with `store_down` the
        store is away for as long as it `lasts`.
        """
        if moment not in get_args(Moment):
            raise ValueError(f"{moment!r} is none of {', '.join(get_args(Moment))}")
        self._faults.append((point, moment, to_ms(lasts, "lasts") / 1000))

    async def _pass_point(self, context: Context, point: str, moment: str) -> None:
        for fault in self._faults:
            known, what, lasts_s = fault
            if known != point or (what if what in ("before_effect", "after_commit") else "after_effect") != moment:
                continue
            self._faults.remove(fault)
            if what == "lease_expired":
                await self._let_lapse(context)
            elif what == "store_down":
                self.store.go_down()
                asyncio.get_running_loop().call_later(lasts_s, self.store.heal)
            else:
                raise SimulatedCrash(f"{point} {moment}")
            return

    async def _let_lapse(self, context: Context) -> None:
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
        """Let something else run instead of a step's function, or of a task: a function, a value, or an error."""
        stub = self.app.stubs[target] = Stub(instead, returns, raises)
        return stub

    # -- people ---------------------------------------------------------------------------------------------------

    async def approval(self, run: Run[Any], name: str) -> Ballots:
        """The open approval of this name, once the run has come to it."""
        for _ in range(10_000):
            waits = await self.engine.read_waits(run.id)
            for gate in waits.open.values():
                if any(key.rpartition(".")[0] == name for _, key in gate.waitpoints):
                    if gate.waitpoints not in self._ballots:
                        links = [await self._link(run.id, one) for one, _ in gate.waitpoints]
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
        """Raise when anything that must always hold does not; may be awaited, but is done when it returns."""
        return CompletedChecks(check_invariants(self.engine), check_flow_invariants(self.engine))
