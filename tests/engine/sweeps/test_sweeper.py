"""The sweeper: it survives failures and crashes, skips items that keep failing, and stops on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.sweeps.failure_backoff import FailureBackoff
from flowfabric.engine.sweeps.sweeper import Sweep, Sweeper, SweepResult
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Promotion
from flowfabric.model.deployment import SweepLease
from flowfabric.model.states import PublicState
from flowfabric.rules.feed import Filter
from flowfabric.settings import Settings, Sweeps
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.queries import Scan
from flowfabric.testing.virtual_time import VirtualTime


def only(name: str, interval_ms: int = 100) -> Sweeps:
    """Return settings that run one sweep."""
    quiet: dict[str, Any] = {field: 0 for field in Sweeps.__struct_fields__ if field.endswith("_ms")}
    return Sweeps(**{**quiet, f"{name}_ms": interval_ms})


@pytest.fixture
async def engine(clock: ManualClock) -> AsyncIterator[Engine]:
    engine = Engine(MemoryStore(clock), minter=SeededMinter(1))
    yield engine
    await engine.close()


async def delayed(engine: Engine, clock: ManualClock, count: int) -> list[str]:
    """Create executions that are due, one before the other."""
    executions: list[str] = [engine.new_execution_id() for _ in range(count)]
    for place, execution in enumerate(executions):
        await engine.create_execution(execution_id=execution, delay_until=clock.now + 1 + place)
    clock.advance_ms(1 + count)
    return executions


class Promoter:
    """The promoter, with items that fail."""

    def __init__(self, engine: Engine, fault: Exception, *failing: str) -> None:
        self._engine = engine
        self._fault = fault
        self._failing = failing
        self.tried: list[str] = []
        self.sweep = Sweep("delayed_promoter", "delay_until", self._act)

    async def _act(self, execution_id: str) -> bool:
        self.tried.append(execution_id)
        if execution_id in self._failing:
            raise self._fault
        await self._engine.promote_delayed(execution_id)
        return True


AWAY = errors.StoreUnavailable("a fault", backend="test", in_doubt=False)
POISON = errors.Corruption("a fault")


@pytest.mark.parametrize("fault", [POISON, RuntimeError("a bug")], ids=["poison", "bug"])
async def test_an_item_that_fails_three_times_in_a_row_is_skipped_for_ten_cycles(
    engine: Engine, clock: ManualClock, fault: Exception
) -> None:
    [bad, good] = await delayed(engine, clock, 2)
    promoter = Promoter(engine, fault, bad)
    sweeper = Sweeper(engine.runtime, Sweeps(), [promoter.sweep])

    passes = [await sweeper.sweep_once("delayed_promoter") for _ in range(14)]

    assert [done.errors for done in passes] == [1, 1, 1, *[0] * 10, 1]
    assert (passes[0].processed, promoter.tried.count(good), promoter.tried.count(bad)) == (1, 1, 4)


async def test_skipped_items_do_not_hide_the_others(engine: Engine, clock: ManualClock) -> None:
    *bad, good = await delayed(engine, clock, 8)
    promoter = Promoter(engine, POISON, *bad)
    sweeper = Sweeper(engine.runtime, Sweeps(), [promoter.sweep])
    for _ in range(9):  # Each pass handles three: all of them are tried, one batch after the other.
        await sweeper.sweep_once("delayed_promoter", 3)

    assert await engine.read_execution_state(good) is PublicState.WAITING


async def test_passes_reach_the_items_behind_any_number_of_failing_ones(engine: Engine, clock: ManualClock) -> None:
    *bad, good = await delayed(engine, clock, 13)
    promoter = Promoter(engine, POISON, *bad)
    sweeper = Sweeper(engine.runtime, Sweeps(), [promoter.sweep])

    passes = [await sweeper.sweep_once("delayed_promoter", 2) for _ in range(7)]

    assert [done.errors for done in passes] == [2] * 6 + [0]
    assert passes[-1].processed == 1
    assert await engine.read_execution_state(good) is PublicState.WAITING
    assert (await sweeper.sweep_once("delayed_promoter", 2)).errors == 2  # The next pass starts at the front again.
    assert promoter.tried[-2:] == bad[:2]


def test_a_success_clears_the_failure_count_and_the_counts_are_bounded() -> None:
    forbearance = FailureBackoff()
    for failed in (True, True, False, True, True):
        forbearance.next_cycle()
        forbearance.record("x", failed=failed)
    assert not forbearance.is_backing_off("x")
    for item in range(600):
        forbearance.record(item, failed=True)
    for _ in range(50):
        forbearance.next_cycle()
    forbearance.record(1, failed=True)
    forbearance.record(1, failed=True)
    assert not forbearance.is_backing_off(1), "its one failure was forgotten when too many were kept"


async def test_a_pass_in_which_the_store_was_unavailable_for_every_item_is_an_error(
    engine: Engine, clock: ManualClock
) -> None:
    executions = await delayed(engine, clock, 2)
    sweeper = Sweeper(engine.runtime, Sweeps(), [Promoter(engine, AWAY, *executions).sweep])

    with pytest.raises(errors.StoreUnavailable):
        await sweeper.sweep_once("delayed_promoter")


async def test_a_sweep_that_crashes_is_restarted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.engine.sweeps.sweeper.RESTART_DELAY_S", 0.01)
    runs = 0
    well = asyncio.Event()

    async def run(batch: int) -> SweepResult:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise RuntimeError("a bug")
        well.set()
        return SweepResult(0, 0)

    sweeper = Sweeper(engine.runtime, only("unblock"), [Sweep("unblock", run_pass=run)])
    sweeper.start()
    await asyncio.wait_for(well.wait(), 10)

    assert await sweeper.stop() == 0
    assert sweeper.restarts == 2
    assert engine.metrics.counter_value("ff_scanner_restart", scanner="unblock") == 2


async def test_a_sweep_that_crashes_releases_its_lease(engine: Engine) -> None:
    crashed, well = asyncio.Event(), asyncio.Event()

    async def crash(batch: int) -> SweepResult:
        crashed.set()
        raise RuntimeError("a bug of one process")

    async def run(batch: int) -> SweepResult:
        well.set()
        return SweepResult(0, 0)

    sick, healthy = (
        Sweeper(engine.runtime, only("unblock"), [Sweep("unblock", run_pass=whole)]) for whole in (crash, run)
    )
    sick.start()
    await asyncio.wait_for(crashed.wait(), 10)
    healthy.start()
    await asyncio.wait_for(well.wait(), 10)

    assert await sick.stop() == await healthy.stop() == 0


async def test_a_sweep_whose_store_is_unavailable_is_retried(engine: Engine) -> None:
    runs = 0
    well = asyncio.Event()

    async def run(batch: int) -> SweepResult:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise AWAY
        well.set()
        return SweepResult(0, 0)

    sweeper = Sweeper(engine.runtime, only("unblock"), [Sweep("unblock", run_pass=run)])
    sweeper.start()
    await asyncio.wait_for(well.wait(), 10)

    assert await sweeper.stop() == 0
    assert sweeper.restarts == 0


async def test_stopping_waits_for_the_current_item_and_aborts_what_takes_too_long(engine: Engine) -> None:
    begun, finish = asyncio.Event(), asyncio.Event()

    async def run(batch: int) -> SweepResult:
        begun.set()
        await finish.wait()
        return SweepResult(1, 0)

    sweeper = Sweeper(engine.runtime, only("unblock"), [Sweep("unblock", run_pass=run)])
    sweeper.start()
    await begun.wait()
    stopping = asyncio.create_task(sweeper.stop())
    await asyncio.sleep(0)
    assert not stopping.done()
    finish.set()
    assert await stopping == 0
    assert await sweeper.stop() == 0, "again is the same"

    begun.clear()
    finish.clear()
    stubborn = Sweeper(engine.runtime, only("unblock"), [Sweep("unblock", run_pass=run)])
    stubborn.start()
    await begun.wait()
    assert await stubborn.stop(grace_s=0.01) == 1
    assert engine.metrics.counter_value("ff_shutdown_timeout") == 1


async def test_an_interval_of_zero_disables_a_sweep_and_the_first_pass_is_immediate(engine: Engine) -> None:
    ran: list[str] = []
    first = asyncio.Event()

    def completing(name: str) -> Sweep:
        async def run(batch: int) -> SweepResult:
            ran.append(name)
            first.set()
            return SweepResult(0, 0)

        return Sweep(name, run_pass=run)

    settings = only("unblock", 3_600_000)
    sweeper = Sweeper(engine.runtime, settings, [completing("unblock"), completing("quota_reconciler")])
    sweeper.start()
    await asyncio.wait_for(first.wait(), 10)
    await sweeper.stop()

    assert ran == ["unblock"]


async def test_one_process_at_a_time_runs_a_sweep(engine: Engine) -> None:
    ran: list[int] = []
    enough = asyncio.Event()

    def numbered(number: int) -> Sweep:
        async def run(batch: int) -> SweepResult:
            ran.append(number)
            if len(ran) == 4:
                enough.set()
            return SweepResult(0, 0)

        return Sweep("unblock", run_pass=run)

    settings = only("unblock")
    sweepers = [Sweeper(engine.runtime, settings, [numbered(number)]) for number in range(3)]
    for sweeper in sweepers:
        sweeper.start()
    await asyncio.wait_for(enough.wait(), 10)
    for sweeper in sweepers:
        await sweeper.stop()

    assert len(set(ran[:4])) == 1, "the next one may have begun when the first gave it back"
    [lease] = [row for row in await engine.store.scan(Scan(SweepLease)) if row.sweep == "unblock"]
    assert lease.lease_until == 0, "given back for others"


async def test_sweeps_of_different_executions_run_concurrently(engine: Engine, clock: ManualClock) -> None:
    choices = [Filter("n1"), Filter("n2"), Filter("n2", ("app.instance_id", "i1"))]
    promoted: set[str] = set()
    enough = asyncio.Event()

    async def promote(execution_id: str) -> bool:
        promoted.add(execution_id)
        if len(promoted) == len(choices):
            enough.set()
        return await engine.promote_delayed(execution_id) is Promotion.PROMOTED

    async def nothing(batch: int) -> SweepResult:
        return SweepResult(0, 0)

    for choice in choices:
        tags = {} if choice.instance_tag is None else dict([choice.instance_tag])
        given: dict[str, Any] = {"namespace": choice.namespace, "tags": tags}
        await engine.create_execution(execution_id=engine.new_execution_id(), delay_until=clock.now + 1, **given)
    clock.advance_ms(1)
    settings, promoter = only("delayed_promoter"), Sweep("delayed_promoter", "delay_until", promote)
    everything = Sweeper(engine.runtime, settings, [Sweep("delayed_promoter", run_pass=nothing)])
    sweepers = [everything, *(Sweeper(engine.runtime, settings, [promoter], choice) for choice in choices)]
    for sweeper in sweepers:
        sweeper.start()
    await asyncio.wait_for(enough.wait(), 10)
    for sweeper in sweepers:
        await sweeper.stop()

    leases = [row for row in await engine.store.scan(Scan(SweepLease)) if row.sweep.startswith("delayed_promoter")]
    assert len(leases) == len(sweepers)


async def test_passes_are_counted_and_timed(engine: Engine) -> None:
    before = engine.metrics.counter_value("ff_scanner_cycle", scanner="budget_reset")
    for _ in range(3):
        await engine.sweep_once("budget_reset")

    assert engine.metrics.counter_value("ff_scanner_cycle", scanner="budget_reset") == before + 3
    timing = engine.metrics.histograms["ff_scanner_cycle_duration", (("scanner", "budget_reset"),)]
    assert (timing.count, sum(timing.buckets)) == (3, 3)


async def test_a_sweep_handles_as_many_items_as_its_own_batch_setting(clock: ManualClock) -> None:
    settings = Settings(sweeps=Sweeps(batches={"delayed_promoter": 2}))
    engine = Engine(MemoryStore(clock), minter=SeededMinter(1), settings=settings)
    await delayed(engine, clock, 5)

    passes = [(await engine.sweep_once("delayed_promoter")).processed for _ in range(3)]

    assert passes == [2, 2, 1]


# -- pauses, in virtual time ---------------------------------------------------------------------------------------


async def passes_of(
    run: Callable[[int], Awaitable[SweepResult]],
    seconds: float,
    *,
    interval_ms: int,
    seed: int = 1,
    goes_round: bool = False,
) -> list[float]:
    """Return the times of the passes of a sweep that runs for this long."""
    at: list[float] = []
    time = VirtualTime(asyncio.get_running_loop())
    time.start()
    began = time.now()

    async def noted(batch: int) -> SweepResult:
        at.append(time.now() - began)
        return await run(len(at))

    try:
        engine = Engine(MemoryStore(ManualClock()), minter=SeededMinter(seed))
        sweeper = Sweeper(
            engine.runtime, only("unblock", interval_ms), [Sweep("unblock", run_pass=noted, cyclic=goes_round)]
        )
        sweeper.start()
        await asyncio.sleep(seconds)
        assert await sweeper.stop() == 0
    finally:
        time.stop()
    return at


async def quiet(number: int) -> SweepResult:
    return SweepResult(0, 0)


async def test_intervals_have_a_jitter_that_differs_between_processes() -> None:
    found = {seed: await passes_of(quiet, 25, interval_ms=10_000, seed=seed) for seed in range(1, 6)}

    pauses = {seed: round(at[1] - at[0], 3) for seed, at in found.items()}
    assert all(10.0 <= pause <= 11.0 for pause in pauses.values())
    assert len(set(pauses.values())) == len(pauses), "no two march in step"
    for at in found.values():
        assert at[0] == pytest.approx(0, abs=0.01), "the first pass is at once"
        assert at[2] - at[1] == pytest.approx(at[1] - at[0], abs=0.002), "and each keeps its own pace"


class LoopClock:
    """The time of the running loop as a store's clock."""

    def __call__(self) -> int:
        return 1_000_000 + round(asyncio.get_running_loop().time() * 1000)


async def takeover_s(*, dies_at_s: float, interval_ms: int, seeds: tuple[int, int]) -> float:
    """Return how long after the death of its holder another process makes a pass of a sweep."""
    time = VirtualTime(asyncio.get_running_loop())
    time.start()
    store = MemoryStore(LoopClock())
    at: dict[int, list[float]] = {seed: [] for seed in seeds}

    def noted(seed: int) -> Sweep:
        async def run(batch: int) -> SweepResult:
            at[seed].append(time.now())
            return SweepResult(0, 0)

        return Sweep("unblock", run_pass=run)

    try:
        engines = [Engine(store, minter=SeededMinter(seed)) for seed in seeds]
        sweepers = [
            Sweeper(engine.runtime, only("unblock", interval_ms), [noted(seed)])
            for engine, seed in zip(engines, seeds, strict=True)
        ]
        for sweeper in sweepers:
            sweeper.start()
        await asyncio.sleep(dies_at_s)
        holder = max(seeds, key=lambda seed: at[seed][-1] if at[seed] else 0.0)
        dead, heir = (sweepers if holder == seeds[0] else sweepers[::-1])[:2]
        died = time.now()
        for task in dead._tasks:  # As after SIGKILL: no lease is released.
            task.cancel()
        [waiting] = [seed for seed in seeds if seed != holder]
        before = len(at[waiting])
        await asyncio.sleep(4 * interval_ms / 1000)
        await heir.stop()
        return at[waiting][before] - died
    finally:
        time.stop()


@pytest.mark.parametrize("dies_at_s", [0.01, 7.3, 9.9, 10.2, 24.0])
async def test_a_dead_holder_is_replaced_within_one_interval(dies_at_s: float) -> None:
    for seeds in ((1, 2), (2, 1), (3, 4)):
        taken_over_s = await takeover_s(dies_at_s=dies_at_s, interval_ms=10_000, seeds=seeds)

        assert taken_over_s <= 10 * 1.1 + 0.01, "the interval, and the share by which a process may be late"


async def test_a_long_pass_keeps_its_lease(engine: Engine, clock: ManualClock) -> None:
    begun, finish = asyncio.Event(), asyncio.Event()

    async def long(batch: int) -> SweepResult:
        begun.set()
        await finish.wait()
        return SweepResult(0, 0)

    sweeper = Sweeper(engine.runtime, only("unblock"), [Sweep("unblock", run_pass=long)])
    sweeper.start()
    await begun.wait()
    first = await lease_of(engine, "unblock")
    clock.advance_ms(70)
    async with asyncio.timeout(10):
        while (await lease_of(engine, "unblock")).lease_until < first.lease_until + 70:  # noqa: ASYNC110 - polled
            await asyncio.sleep(0.01)
    finish.set()
    await sweeper.stop()


async def lease_of(engine: Engine, sweep: str) -> SweepLease:
    leases: list[SweepLease] = await engine.store.scan(Scan(SweepLease))
    return next(row for row in leases if row.sweep == sweep)


async def test_each_failure_doubles_the_backoff_up_to_half_a_minute_and_a_success_resets_it() -> None:
    async def away_for_six(number: int) -> SweepResult:
        if number <= 6:
            raise AWAY
        return SweepResult(0, 0)

    at = await passes_of(away_for_six, 110, interval_ms=1000)

    pause = at[8] - at[7]
    assert 1.0 <= pause <= 1.1
    gaps = [later - earlier for earlier, later in pairwise(at[:8])]
    assert gaps == pytest.approx([2 * pause, 4 * pause, 8 * pause, 16 * pause, 30, 30, pause], abs=0.01)


async def test_a_full_batch_is_followed_by_the_next_one_at_once() -> None:
    async def busy(number: int) -> SweepResult:
        return SweepResult(200 if number < 4 else 0, 0)

    at = await passes_of(busy, 5, interval_ms=10_000)

    assert len(at) == 4
    assert at[3] < 0.1


async def test_a_cyclic_sweep_pauses_however_much_it_found() -> None:
    async def busy(number: int) -> SweepResult:
        return SweepResult(200, 0)

    at = await passes_of(busy, 5, interval_ms=10_000, goes_round=True)

    assert len(at) == 1


async def test_a_crash_is_followed_by_a_pause_of_five_seconds() -> None:
    async def crashing(number: int) -> SweepResult:
        if number == 2:
            raise RuntimeError("a bug")
        return SweepResult(0, 0)

    at = await passes_of(crashing, 7.5, interval_ms=1000)

    assert at[2] - at[1] == pytest.approx(5, abs=0.01)


async def test_a_stop_request_is_noticed_after_the_current_item(engine: Engine, clock: ManualClock) -> None:
    first, *others = await delayed(engine, clock, 3)
    begun, proceed = asyncio.Event(), asyncio.Event()

    async def act(execution_id: str) -> bool:
        begun.set()
        await proceed.wait()
        return await engine.promote_delayed(execution_id) is not None

    settings = msgspec.structs.replace(only("delayed_promoter"), batch=1)
    sweeper = Sweeper(engine.runtime, settings, [Sweep("delayed_promoter", "delay_until", act)])
    sweeper.start()
    await asyncio.wait_for(begun.wait(), 10)
    stopping = asyncio.create_task(sweeper.stop())
    await asyncio.sleep(0)
    proceed.set()

    assert await asyncio.wait_for(stopping, 10) == 0
    assert await engine.read_execution_state(first) is PublicState.WAITING, "what was begun is finished"
    assert {await engine.read_execution_state(one) for one in others} == {PublicState.DELAYED}
