"""A spread lane through a server: the client mints over all its partitions, and a key stays one run."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx2
import pytest

from flowfabric import Fabric, errors
from flowfabric.client import RemoteEngine
from flowfabric.client import lanes as client_lanes
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.ids import ExecutionId, LaneId, PartitionCounts, key_partition, lane_partitions, partition_of
from flowfabric.model.answers.execution import Created, Duplicate
from flowfabric.model.scheduling.lane import LaneSpread
from flowfabric.rules.scheduling.lane_spread import GRACE_MS, SETTLE_MS
from flowfabric.server import create_app
from flowfabric.stores.memory.store import MemoryStore

COUNTS = PartitionCounts()
MAIL = LaneId("mail")
MOVING = next(key for key in map(str, range(99)) if len({key_partition(MAIL, n, COUNTS, key) for n in (1, 8)}) == 2)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def engine(clock: ManualClock) -> AsyncIterator[Engine]:
    store = MemoryStore(clock)
    await store.open(migrate=True)
    async with Engine(store) as engine:
        yield engine


@pytest.fixture
async def remote(engine: Engine) -> AsyncIterator[RemoteEngine]:
    transport = httpx2.ASGITransport(app=create_app(engine))
    async with await RemoteEngine.connect("http://ff", transport=transport) as remote:
        yield remote


async def test_a_client_spreads_a_lane_and_mints_over_its_partitions(remote: RemoteEngine, clock: ManualClock) -> None:
    answer = await remote.set_lane_spread("mail", 8)
    assert answer == await remote.read_lane("mail") == LaneSpread("mail", 1, 8, clock.now + GRACE_MS)

    clock.advance_ms(GRACE_MS)
    await remote.refresh_lanes()

    assert {partition_of(remote.new_execution_id("mail")) for _ in range(200)} == set(lane_partitions(MAIL, 8, COUNTS))
    assert partition_of(remote.new_execution_id("mail", "k")) == key_partition(MAIL, 8, COUNTS, "k")


async def test_a_client_reads_the_spreads_again_while_it_creates(
    remote: RemoteEngine, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await remote.set_lane_spread("mail", 8)
    clock.advance_ms(GRACE_MS)
    monkeypatch.setattr(client_lanes, "REFRESH_S", 0.0)

    await remote.create_execution(execution_id=remote.new_execution_id("mail"), lane_id="mail")
    assert remote._reading_spreads is not None
    await remote._reading_spreads

    assert remote.spreads == {"mail": 8}


async def test_a_bad_spread_is_refused_by_the_server(remote: RemoteEngine) -> None:
    for spread in (0, 257, -3):
        with pytest.raises(errors.InvalidInput):
            await remote.set_lane_spread("mail", spread)
    await remote.set_lane_spread("mail", 2)
    with pytest.raises(errors.SpreadChangePending):
        await remote.set_lane_spread("mail", 3)


async def test_a_client_that_missed_the_change_gets_the_existing_run_or_mints_again(
    remote: RemoteEngine, engine: Engine, clock: ManualClock
) -> None:
    stale = remote.new_execution_id("mail", MOVING)
    await engine.set_lane_spread("mail", 8)
    clock.advance_ms(GRACE_MS + SETTLE_MS)

    with pytest.raises(errors.KeyElsewhere):
        await remote.create_execution(execution_id=stale, lane_id="mail", idempotency_key=MOVING)
    fresh = engine.new_execution_id("mail", MOVING)
    made = await engine.create_execution(execution_id=fresh, lane_id="mail", idempotency_key=MOVING)

    assert isinstance(made, Created)
    again = await remote.create_execution(execution_id=stale, lane_id="mail", idempotency_key=MOVING)
    assert again == Duplicate(fresh)


async def test_a_task_with_a_key_is_submitted_once_whatever_its_process_knows_of_the_spread(
    remote: RemoteEngine, engine: Engine, clock: ManualClock
) -> None:
    fabric = Fabric("memory://")

    @fabric.task(lane="mail")
    async def send(to: str) -> None: ...

    keys = [f"k{n}" for n in range(12)]
    fabric.bind(remote)
    first = [await send.options(key=key).submit(key) for key in keys]
    await engine.set_lane_spread("mail", 8)
    clock.advance_ms(GRACE_MS + SETTLE_MS)
    again = [await send.options(key=key).submit(key) for key in keys]
    other_lane = [await send.options(key=key, lane="slow").submit(key) for key in keys]
    new = await send.submit_many([send.options(key=f"new-{key}").s(key) for key in keys])

    assert [run.id for run in again] == [run.id for run in other_lane] == [run.id for run in first]
    assert all(run.created for run in new)
    assert {partition_of(ExecutionId(run.id)) for run in new} <= set(lane_partitions(MAIL, 8, COUNTS))
    assert len({partition_of(ExecutionId(run.id)) for run in new}) > 3
