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
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, get_args

import msgspec

from flowfabric.clock import StoreClockEstimate
from flowfabric.engine.engine import Engine
from flowfabric.engine.runtime.wakeups import due_topic
from flowfabric.engine_protocol import EngineAPI
from flowfabric.errors import Unavailable
from flowfabric.event_loop import start_task
from flowfabric.ids import ExecutionId, SeededMinter, partition_of
from flowfabric.model.execution import Execution
from flowfabric.model.gate import StepMemo, StepState, step_row_name
from flowfabric.model.scheduling.schedule import Schedule
from flowfabric.sdk.approvals import ApprovalLink
from flowfabric.sdk.context import Context
from flowfabric.sdk.durable.attempt import SimulatedCrash
from flowfabric.sdk.durable.timeline import TimelineEntry, read_timeline
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.fabric import Fabric
from flowfabric.sdk.run import Run
from flowfabric.sdk.worker.worker import Worker
from flowfabric.settings import Settings, Sweeps
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.queries import Read
from flowfabric.testing.flaky_store import FlakyStore
from flowfabric.testing.flow_invariants import check_flow_invariants
from flowfabric.testing.invariants import InvariantBroken, check_invariants
from flowfabric.testing.schedule_invariants import check_schedule_invariants
from flowfabric.testing.stubs import Ballots, CompletedChecks, Stub, complete_now
from flowfabric.testing.virtual_time import VirtualTime

EPOCH_MS = 1_700_000_000_000
RARE_INTERVAL_MS = 100 * 24 * 60 * 60 * 1000
# In one process no wakeup is lost, and sweeps sleep until the next due instant: polling is not needed.
RARE_SWEEPS: dict[str, Any] = {name: RARE_INTERVAL_MS for name in Sweeps.__struct_fields__ if name.endswith("_ms")}
WORLD_SETTINGS = Settings(poll_ms=RARE_INTERVAL_MS, sweeps=Sweeps(**RARE_SWEEPS))

Moment = Literal["before_effect", "after_effect", "after_commit", "lease_expired", "store_down"]
TAKEOVER_S = 1.0  # time after which another process fires what a dead one left
AFTER_EXPIRY_S = 1.0  # time for which a handler runs on after its lease has expired


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
        self._wakeups: set[asyncio.Task[None]] = set()
        self._faults: list[tuple[str, str, float]] = []
        self._failures: dict[str, list[Exception]] = {}  # what the next tries at a point raise
        self._repeated: list[str] = []  # effects of steps whose failure stood
        self._bound: list[tuple[Fabric, asyncio.Task[EngineAPI] | None]] = []  # apps, with their engines of before
        self._shapes: dict[tuple[str, str], Any] = {}
        self._ballots: dict[tuple[tuple[str, str], ...], Ballots] = {}  # keyed by the waitpoints of the approval

    async def __aenter__(self) -> Self:
        self._time = VirtualTime(asyncio.get_running_loop())
        self._time.start()
        self._started_at = self._time.now()
        self.store = self.new_store()
        await self.store.open(migrate=True)
        self.engine = Engine(self.store, minter=SeededMinter(self._seed), settings=_world_settings(self.app))
        self.engine.runtime.estimate = StoreClockEstimate(monotonic_s=self._time.now)
        self.engine.runtime.random = random.Random(self._seed).random
        await self.engine.ensure_signing_key("00" * 32)
        await self._bind()
        for _ in range(self._count):
            self.start_worker()
        return self

    async def _bind(self) -> None:
        """Let the app use this world."""
        self._bound.append((self.app, self.app.bind(await self.engine_for_app())))
        self.app.on_fault_point = self._inject_fault
        self.app.on_step = self._on_step
        self.app.thread_scheduler = self._time
        self.app.on_approval = self._note_shape
        self.app.use_subprocesses = False

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.store.heal()
        tasks = [*(task for _, task in self._workers), *self._wakeups]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for app, previous_engine in self._bound:
            app.unbind(previous_engine)
            app.on_fault_point = app.on_step = app.thread_scheduler = app.on_approval = None
            app.stubs.clear()
            app.use_subprocesses = True
        await self.engine.close()
        self._time.stop()
        if kind is None and self._faults:
            point, moment, _ = self._faults[0]
            raise AssertionError(f"{point} {moment} was never reached: the fault was not injected")
        if kind is None and (unmet := next((point for point, left in self._failures.items() if left), None)):
            raise AssertionError(f"{unmet} was tried less often than it was set to fail")

    def new_store(self) -> FlakyStore:
        """Return the store of this world; tests replace it by others."""
        return FlakyStore(MemoryStore(clock=self.now_ms))

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
        self._workers.append((worker, start_task(worker.work())))
        return worker

    async def kill(self, worker: Worker) -> None:
        """Kill a worker as SIGKILL would: nothing is finished or released, and its leases expire."""
        for known, task in self._workers:
            if known is worker:
                worker.simulate_kill()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._workers = [(known, task) for known, task in self._workers if known is not worker]
        wakeup = start_task(self._wake_after_commits())
        self._wakeups.add(wakeup)
        wakeup.add_done_callback(self._wakeups.discard)

    async def _wake_after_commits(self) -> None:
        """Wake everything that waits, once the commits in flight are written: who sent them may have been killed.

        Other processes would find what such a commit wrote with their next poll; a world does not poll.
        """
        await self.engine.runtime.commit_queue.drain()
        self.engine.runtime.wakeups.notify_prefix("")

    async def deploy(self, app: Fabric) -> None:
        """Stop all workers as SIGTERM does, and start as many of another app on the same store.

        Runs of the first app continue in the other one, by the names of their tasks.
        """
        workers, self._workers = self._workers, []
        for worker, _ in workers:
            worker.stop()
        await asyncio.gather(*(task for _, task in workers))
        self.app = app
        if all(app is not known for known, _ in self._bound):
            await self._bind()
        for _ in workers:
            self.start_worker()

    # -- time -----------------------------------------------------------------------------------------------------

    async def advance(self, length: Duration) -> None:
        """Advance the clock, and run everything that falls due meanwhile."""
        await asyncio.sleep(to_ms(length) / 1000)
        await self.settle()

    async def settle(self) -> None:
        """Run everything that can happen now, also in threads.

        Raises `TimeoutError` if plain code is still running after 30 s of real time.
        """
        await self._time.wait_idle()

    def now_ms(self) -> int:
        """Return the time of the store's clock."""
        return EPOCH_MS + round((self._time.now() - self._started_at) * 1000)

    # -- faults ---------------------------------------------------------------------------------------------------

    def crash_at(self, point: str, moment: Moment, *, lasts: Duration = "10s") -> None:
        """Inject a fault once, at the point "step:<name>" or "spend:<budget>".

        Other points are "failed:<name>", "left:<name>" and "hold:<name>": the record that a step failed, that a step or
        wait was left, and that the run is held there. They have no effect, so `before_effect` means before the record.

        "fire:<schedule>" is the change by which an instant creates its run; it has `before_effect` and `after_commit`.

        The process dies `before_effect`, `after_effect` (before the result is recorded) or `after_commit`. The other
        two happen after the effect: with `lease_expired` another worker claims the run while this handler continues,
        and with `store_down` the store is unavailable for the time `lasts`. It is an error if the point is not reached.
        """
        if moment not in get_args(Moment):
            raise ValueError(f"{moment!r} is not one of {', '.join(get_args(Moment))}")
        self._faults.append((point, moment, to_ms(lasts, "lasts") / 1000))
        if point.startswith("fire:"):
            self.engine.scheduler.on_fault_point = self._inject_fire_fault

    async def _inject_fire_fault(self, schedule: str, moment: str) -> None:
        for fault in self._faults:
            if fault[:2] == (f"fire:{schedule}", moment):
                self._faults.remove(fault)
                wake = partial(self.engine.runtime.wakeups.notify, (due_topic(Schedule, "next_at"),))
                asyncio.get_running_loop().call_later(TAKEOVER_S, wake)  # the sweep of another process comes later
                raise Unavailable("fire", "the process died, as the test requested")

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

    def fail(self, point: str, failure: Exception, *, times: int = 1) -> None:
        """Let the next tries of the step at the point "step:<name>" raise this exception instead of running.

        It is an error if the step is tried less often.
        """
        if not point.startswith("step:") or times < 1:
            raise ValueError(f"{point!r}, {times} times: a point is step:<name>, and it fails once or more")
        self._failures.setdefault(point, []).extend([failure] * times)

    def _on_step(self, context: Context, place: tuple[str, int], label: str) -> Exception | None:
        """Note an effect that must not happen; return the exception that a try shall raise instead."""
        self._note_repeated(context, place)
        failures = self._failures.get(f"step:{label}")
        return failures.pop(0).with_traceback(None) if failures else None

    def _note_repeated(self, context: Context, place: tuple[str, int]) -> None:
        """Note an effect whose recorded failure is final; the store in memory answers at once, also in a thread."""
        name, occurrence = place
        memo_key = (context.run_id, step_row_name(name, StepState.FAILED), occurrence)
        reads = [Read(StepMemo, memo_key), Read(Execution, (context.run_id,))]
        memos, rows = complete_now(self.store.inner.load(reads)).rows
        holds_lease = any(row.lease_epoch == context.handle.fields.lease_epoch for row in rows)
        if memos and holds_lease:
            self._repeated.append(f"{context.run_id}: step {name!r} (number {occurrence}) ran after its failure stood")

    async def timeline(self, run: Run[Any]) -> list[TimelineEntry]:
        """Return what a durable function has done and waits for, in order."""
        return await read_timeline(self.engine, run.id)

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
        """Raise if an invariant of the store is broken, or a step ran after its failure was remembered.

        May be awaited, but has finished when it returns.
        """
        if self._repeated:
            raise InvariantBroken("\n".join(self._repeated))
        return CompletedChecks(
            check_invariants(self.engine), check_flow_invariants(self.engine), check_schedule_invariants(self.engine)
        )
