"""Many schedules: idle ones cost no more than none, and those that are due at once fire within their minute."""

from __future__ import annotations

import asyncio
from time import monotonic, process_time
from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.scheduling.schedule import Overlap, Schedule, ScheduleSpec
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Scan
from flowfabric.testing import FlakyStore
from tests.executions import create_request

HOUR_MS = 3_600_000
CONCURRENT = 64


async def put_many(engine: Engine, count: int, **spec: Any) -> None:
    """Put schedules in place that all fire at the next full hour."""
    slots = asyncio.Semaphore(CONCURRENT)

    async def put(number: int) -> None:
        async with slots:
            run = create_request(engine.new_execution_id(), execution_kind="report")
            await engine.put_schedule(f"s{number:05}", ScheduleSpec(cron="0 * * * *", **spec), run)

    await asyncio.gather(*(put(number) for number in range(count)))


class CountedStore(FlakyStore):
    """Counts the calls of each operation."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.calls: list[str] = []

    async def _call(self, verb: str, call: Any) -> Any:
        self.calls.append(verb)
        return await super()._call(verb, call)


async def test_a_pass_over_a_thousand_idle_schedules_costs_one_call_as_without_any(store: Store) -> None:
    counted = CountedStore(store)
    engine = Engine(counted, minter=SeededMinter(1))
    counted.calls.clear()
    await engine.sweep_once("schedules")
    without = list(counted.calls)

    await put_many(engine, 1000)
    counted.calls.clear()
    result = await engine.sweep_once("schedules")

    assert counted.calls == without == ["due"]
    assert result.next_at is not None  # the sweep sleeps until then
    assert result.next_at % HOUR_MS == 0


@pytest.mark.parametrize("overlap", [Overlap.SKIP, Overlap.ALLOW])
async def test_schedules_that_are_due_at_once_are_fired_in_batches(
    store: Store, clock: ManualClock, overlap: Overlap
) -> None:
    counted = CountedStore(store)
    engine = Engine(counted, minter=SeededMinter(1))
    await put_many(engine, 150, overlap=overlap)
    clock.advance_ms(HOUR_MS - clock.now % HOUR_MS)
    counted.calls.clear()

    assert (await engine.sweep_once("schedules")).processed == 150

    commits = counted.calls.count("commit")
    assert commits <= 150 / store.batch_limit + 10
    rows: list[Schedule] = await engine.store.scan(Scan(Schedule, (), ("name",), limit=1000))
    assert [row.fired for row in rows] == [1] * 150


@pytest.mark.soak
@pytest.mark.serial
@pytest.mark.timeout(600)
async def test_ten_thousand_that_are_due_fire_within_a_minute(store: Store, clock: ManualClock) -> None:
    """Prints the time and the CPU of the sweep, beside those of as many creates."""
    engine = Engine(store, minter=SeededMinter(1))
    await put_many(engine, 10_000)
    clock.advance_ms(HOUR_MS - clock.now % HOUR_MS)

    began, cpu, fired = monotonic(), process_time(), 0
    while (done := (await engine.sweep_once("schedules")).processed) > 0:
        fired += done
    elapsed, used = monotonic() - began, process_time() - cpu

    began, cpu = monotonic(), process_time()
    slots = asyncio.Semaphore(200)

    async def create() -> None:
        async with slots:
            await engine.create_execution(execution_id=engine.new_execution_id())

    await asyncio.gather(*(create() for _ in range(10_000)))
    control, control_cpu = monotonic() - began, process_time() - cpu
    print(
        f"10,000 schedules fired in {elapsed:.1f} s ({used:.1f} s of CPU); "
        f"10,000 single creates take {control:.1f} s ({control_cpu:.1f} s)"
    )
    assert fired == 10_000
    assert elapsed < 60
