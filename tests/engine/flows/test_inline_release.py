"""A claim that waits comes along with the change that has work for it, and is not woken twice for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.claiming import claimer, poller
from flowfabric.engine.engine import Engine
from flowfabric.engine.runtime import wakeups
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.change import Change, Insert
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.stores.claims import ClaimedRows, ClaimRequest
from flowfabric.stores.port import Store
from tests.engine.losing import LosingStore, Loss
from tests.stores.samples import change, execution

LANE = "mail"


class Counting:
    """Hands everything on to a store and counts the takes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.takes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def claim_rows(self, take: ClaimRequest) -> ClaimedRows:
        self.takes += 1
        return await self.store.claim_rows(take)


@pytest.fixture
async def counting(store: Store) -> Counting:
    return Counting(store)


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[None]:
    """Tells each time a claim has found nothing and begins to wait."""
    rests: asyncio.Queue[None] = asyncio.Queue()

    async def waited(hint: asyncio.Future[None], timeout_s: float) -> bool:
        rests.put_nowait(None)
        return await wakeups.wait_for_wakeup(hint, timeout_s)

    monkeypatch.setattr(claimer, "wait_for_wakeup", waited)
    monkeypatch.setattr(poller, "wait_for_wakeup", waited)
    return rests


@pytest.fixture
async def engine(counting: Counting) -> Engine:
    return await begun(counting)


async def begun(store: Any) -> Engine:
    """An engine that has had work in the lane before."""
    engine = Engine(store, minter=SeededMinter(7))
    engine.runtime.poll_interval_s = 60  # nobody looks without a hint
    await create(engine)  # so that the line is known
    claimed = await claim(engine)
    await engine.complete(claimed.handle)
    return engine


async def create(engine: Engine) -> str:
    execution_id = engine.new_execution_id(LANE)
    await engine.create_execution(execution_id=execution_id, lane_id=LANE)
    return execution_id


async def claim(engine: Engine) -> Claimed:
    claimed = await engine.claim(LANE, worker_id="w", worker_instance_id="w-1", max_wait_ms=60_000)
    assert claimed is not None
    return claimed


async def at_rest(engine: Engine, rests: asyncio.Queue[None]) -> asyncio.Task[Claimed]:
    """A claim that has found nothing and waits."""
    waiting = asyncio.create_task(claim(engine))
    await rests.get()
    return waiting


async def test_a_waiting_claim_has_what_is_created_with_one_take(
    engine: Engine, counting: Counting, rests: asyncio.Queue[None]
) -> None:
    for _ in range(5):
        waiting = await at_rest(engine, rests)
        before = counting.takes
        execution_id = await create(engine)
        claimed = await asyncio.wait_for(waiting, 20)

        assert claimed.execution_id == execution_id
        assert counting.takes == before + 1
        await engine.complete(claimed.handle)
    assert engine.runtime.commit_queue.notified_changes == set()


async def test_a_worker_with_room_for_more_goes_back_to_rest_at_once(
    engine: Engine, counting: Counting, rests: asyncio.Queue[None]
) -> None:
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    waiting = asyncio.create_task(pull.claim(10, max_wait_ms=60_000))
    await rests.get()
    for _ in range(5):
        before = counting.takes
        execution_id = await create(engine)
        [claimed] = await asyncio.wait_for(waiting, 20)
        waiting = asyncio.create_task(pull.claim(10, max_wait_ms=60_000))
        await rests.get()
        await engine.complete(claimed.handle)

        assert claimed.execution_id == execution_id
        assert counting.takes == before + 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    pull.close()


async def test_claims_that_find_nothing_wait_on(engine: Engine, rests: asyncio.Queue[None]) -> None:
    waiting = [await at_rest(engine, rests) for _ in range(3)]
    ids = [await create(engine) for _ in range(3)]

    claimed = await asyncio.wait_for(asyncio.gather(*waiting), 20)

    assert sorted(one.execution_id for one in claimed) == sorted(ids)


async def admitted(engine: Engine, namespaces: list[str] | None = None) -> Claimed:
    [claimed] = await engine.claim_admitted(
        LANE, 1, worker_id="w", worker_instance_id="w-1", namespaces=namespaces, max_wait_ms=60_000
    )
    return claimed


async def fair(engine: Engine, key: str) -> str:
    execution_id = engine.new_execution_id(LANE)
    await engine.create_execution(execution_id=execution_id, lane_id=LANE, policy={"fairness_key": key})
    return execution_id


async def test_claims_that_read_before_they_take_hear_of_everything(engine: Engine, rests: asyncio.Queue[None]) -> None:
    for key in "ab":
        await fair(engine, key)
        await claim(engine)

    for key in ("a", "b", "a"):
        waiting = await at_rest(engine, rests)
        execution_id = await fair(engine, key)
        assert (await asyncio.wait_for(waiting, 20)).execution_id == execution_id


async def test_claims_of_some_namespaces_hear_of_everything(engine: Engine, rests: asyncio.Queue[None]) -> None:
    for _ in range(3):
        waiting = asyncio.create_task(admitted(engine, namespaces=["ns"]))
        await rests.get()
        execution_id = engine.new_execution_id(LANE)
        await engine.create_execution(execution_id=execution_id, lane_id=LANE, namespace="ns")
        assert (await asyncio.wait_for(waiting, 20)).execution_id == execution_id


async def test_work_behind_a_limit_is_heard_of(engine: Engine, rests: asyncio.Queue[None]) -> None:
    quota = "0b000000-0000-4000-8000-000000000002"
    await engine.create_quota_policy(quota, window_seconds=60, max_requests_per_window=1000, max_concurrent=10)

    for limited in (True, False, True, False):
        waiting = asyncio.create_task(admitted(engine))
        await rests.get()
        execution_id = engine.new_execution_id(LANE)
        policy = {"quota_policy_id": quota} if limited else {}
        await engine.create_execution(execution_id=execution_id, lane_id=LANE, policy=policy)
        assert (await asyncio.wait_for(waiting, 20)).execution_id == execution_id


@pytest.mark.parametrize("spoil", ["refused", "unstorable", "given up"])
async def test_nothing_stays_announced_that_was_not_written(
    engine: Engine, rests: asyncio.Queue[None], clock: ManualClock, spoil: str
) -> None:
    waiting = await at_rest(engine, rests)
    [line] = await engine.queues.lane_queues(LANE)

    def step(name: str) -> Change:
        return change(Insert(execution(name, lane_id=LANE, line=line, rank=clock.now)))

    changes: Sequence[Change] = (step("a"),)
    match spoil:
        case "refused":
            changes = (change(*step("a").writes, not_after=clock.now - 1),)
        case "unstorable":
            changes = (step("a"), step("b\0"))
    writing = [engine.runtime.commit_queue.add(one) for one in changes]
    if spoil == "given up":
        writing[0].cancel()
    verdicts = await asyncio.gather(*writing, return_exceptions=True)
    await engine.runtime.commit_queue.drain()
    for one, verdict in zip(changes, verdicts, strict=True):
        if isinstance(verdict, int):
            engine.runtime.publish_commit(one, [[]], verdict)

    assert engine.runtime.commit_queue.notified_changes == set()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_nothing_stays_announced_of_many_that_are_alike(engine: Engine, rests: asyncio.Queue[None]) -> None:
    waiting = await at_rest(engine, rests)
    ask = CreateExecution(execution_id="", partition=0, namespace="n", lane_id=LANE, execution_kind="task")
    for _ in range(3):
        names = [engine.new_execution_id(LANE) for _ in range(7)]
        await engine.create_executions(msgspec.structs.replace(ask, execution_id=name) for name in names)

    assert await waiting is not None
    assert engine.runtime.commit_queue.notified_changes == set()


async def test_a_claim_that_waits_has_asked_before_whoever_created_goes_on(
    engine: Engine, counting: Counting, rests: asyncio.Queue[None]
) -> None:
    waiting = await at_rest(engine, rests)
    takes = counting.takes
    created = await create(engine)

    assert counting.takes == takes + 1
    assert (await waiting).execution_id == created
    assert counting.takes == takes + 1, "and is not woken again"


async def test_work_beside_something_that_cannot_be_written_is_heard_of(
    engine: Engine, rests: asyncio.Queue[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = await at_rest(engine, rests)
    add: Callable[[Change], Any] = engine.runtime.commit_queue.add

    def beside(one: Change) -> Any:
        add(change(Insert(execution("b\0"))))
        return add(one)

    monkeypatch.setattr(engine.runtime.commit_queue, "add", beside)
    execution_id = await create(engine)

    assert (await asyncio.wait_for(waiting, 20)).execution_id == execution_id


@pytest.mark.parametrize("loss", Loss)
async def test_a_claim_has_its_work_once_whatever_got_lost_on_the_way(
    store: Store, rests: asyncio.Queue[None], loss: Loss
) -> None:
    losing = LosingStore(store)
    engine = await begun(losing)
    waiting = await at_rest(engine, rests)

    losing.next_loss = loss
    execution_id = await create(engine)
    claimed = await asyncio.wait_for(waiting, 20)

    assert losing.losses == 1
    assert claimed.execution_id == execution_id
    assert await engine.claim(LANE, worker_id="w", worker_instance_id="w-2") is None
    await engine.complete(claimed.handle, result=b"done")
    assert len(await engine.attempt_history(execution_id)) == 1
