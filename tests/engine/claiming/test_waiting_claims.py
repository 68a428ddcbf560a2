"""A commit that enqueues work serves the waiting claims of its process, and does not wake them a second time."""

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
from flowfabric.stores.port import Store
from tests.engine.claiming.test_claim_after_completion import CountingStore
from tests.engine.lossy_store import Loss, LossyStore
from tests.executions import claim_one, create_request, new_execution
from tests.stores.sample_rows import change, execution

LANE = "mail"


@pytest.fixture
async def counting_store(store: Store) -> CountingStore:
    return CountingStore(store)


@pytest.fixture
def idle_claims(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[None]:
    """A queue that receives an item whenever a claim has found nothing and begins to wait."""
    idle_claims: asyncio.Queue[None] = asyncio.Queue()

    async def recorded_wait(wakeup: asyncio.Future[None], timeout_s: float) -> bool:
        idle_claims.put_nowait(None)
        return await wakeups.wait_for_wakeup(wakeup, timeout_s)

    monkeypatch.setattr(claimer, "wait_for_wakeup", recorded_wait)
    monkeypatch.setattr(poller, "wait_for_wakeup", recorded_wait)
    return idle_claims


@pytest.fixture
async def engine(counting_store: CountingStore) -> Engine:
    return await warm_engine(counting_store)


async def warm_engine(store: Any) -> Engine:
    """Return an engine that has had work in the lane before."""
    engine = Engine(store, minter=SeededMinter(7))
    engine.runtime.poll_interval_s = 60  # Only a wakeup causes a claim.
    await create(engine)  # Register the queue.
    claimed = await claim(engine)
    await engine.complete(claimed.handle)
    return engine


async def create(engine: Engine) -> str:
    return await new_execution(engine, LANE)


async def claim(engine: Engine) -> Claimed:
    return await claim_one(engine, LANE, max_wait_ms=60_000)


async def start_waiting_claim(engine: Engine, idle_claims: asyncio.Queue[None]) -> asyncio.Task[Claimed]:
    """Start a claim, and return it once it has found nothing and waits."""
    waiting = asyncio.create_task(claim(engine))
    await idle_claims.get()
    return waiting


async def test_a_waiting_claim_receives_a_created_execution_with_one_store_claim(
    engine: Engine, counting_store: CountingStore, idle_claims: asyncio.Queue[None]
) -> None:
    for _ in range(5):
        waiting = await start_waiting_claim(engine, idle_claims)
        before = counting_store.claims
        execution_id = await create(engine)
        claimed = await asyncio.wait_for(waiting, 20)

        assert claimed.execution_id == execution_id
        assert counting_store.claims == before + 1
        await engine.complete(claimed.handle)
    assert engine.runtime.commit_queue.notified_changes == set()


async def test_a_worker_with_free_slots_waits_again_at_once(
    engine: Engine, counting_store: CountingStore, idle_claims: asyncio.Queue[None]
) -> None:
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    waiting = asyncio.create_task(pull.claim(10, max_wait_ms=60_000))
    await idle_claims.get()
    for _ in range(5):
        before = counting_store.claims
        execution_id = await create(engine)
        [claimed] = await asyncio.wait_for(waiting, 20)
        waiting = asyncio.create_task(pull.claim(10, max_wait_ms=60_000))
        await idle_claims.get()
        await engine.complete(claimed.handle)

        assert claimed.execution_id == execution_id
        assert counting_store.claims == before + 1
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    pull.close()


async def test_claims_that_find_nothing_keep_waiting(engine: Engine, idle_claims: asyncio.Queue[None]) -> None:
    waiting = [await start_waiting_claim(engine, idle_claims) for _ in range(3)]
    ids = [await create(engine) for _ in range(3)]

    claimed = await asyncio.wait_for(asyncio.gather(*waiting), 20)

    assert sorted(one.execution_id for one in claimed) == sorted(ids)


async def admitted(engine: Engine, namespaces: list[str] | None = None) -> Claimed:
    [claimed] = await engine.claim_admitted(
        LANE, 1, worker_id="w", worker_instance_id="w-1", namespaces=namespaces, max_wait_ms=60_000
    )
    return claimed


async def fair(engine: Engine, key: str) -> str:
    return await new_execution(engine, LANE, policy={"fairness_key": key})


async def test_claims_that_load_before_they_claim_are_woken_by_everything(
    engine: Engine, idle_claims: asyncio.Queue[None]
) -> None:
    for key in "ab":
        await fair(engine, key)
        await claim(engine)

    for key in ("a", "b", "a"):
        waiting = await start_waiting_claim(engine, idle_claims)
        execution_id = await fair(engine, key)
        assert (await asyncio.wait_for(waiting, 20)).execution_id == execution_id


async def test_claims_of_some_namespaces_are_woken_by_everything(
    engine: Engine, idle_claims: asyncio.Queue[None]
) -> None:
    for _ in range(3):
        waiting = asyncio.create_task(admitted(engine, namespaces=["ns"]))
        await idle_claims.get()
        execution_id = await new_execution(engine, LANE, namespace="ns")
        assert (await asyncio.wait_for(waiting, 20)).execution_id == execution_id


async def test_work_behind_a_limit_wakes_a_claim(engine: Engine, idle_claims: asyncio.Queue[None]) -> None:
    quota = "0b000000-0000-4000-8000-000000000002"
    await engine.create_quota_policy(quota, window_seconds=60, max_requests_per_window=1000, max_concurrent=10)

    for limited in (True, False, True, False):
        waiting = asyncio.create_task(admitted(engine))
        await idle_claims.get()
        execution_id = engine.new_execution_id(LANE)
        policy = {"quota_policy_id": quota} if limited else {}
        await engine.create_execution(execution_id=execution_id, lane_id=LANE, policy=policy)
        assert (await asyncio.wait_for(waiting, 20)).execution_id == execution_id


@pytest.mark.parametrize("spoil", ["refused", "unstorable", "given up"])
async def test_no_notification_remains_for_a_change_that_was_not_written(
    engine: Engine, idle_claims: asyncio.Queue[None], clock: ManualClock, spoil: str
) -> None:
    waiting = await start_waiting_claim(engine, idle_claims)
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


async def test_no_notification_remains_for_a_bulk_change_that_was_not_written(
    engine: Engine, idle_claims: asyncio.Queue[None]
) -> None:
    waiting = await start_waiting_claim(engine, idle_claims)
    ask = create_request("", LANE)
    for _ in range(3):
        names = [engine.new_execution_id(LANE) for _ in range(7)]
        await engine.create_executions(msgspec.structs.replace(ask, execution_id=name) for name in names)

    assert await waiting is not None
    assert engine.runtime.commit_queue.notified_changes == set()


async def test_a_waiting_claim_calls_the_store_before_the_creator_continues(
    engine: Engine, counting_store: CountingStore, idle_claims: asyncio.Queue[None]
) -> None:
    waiting = await start_waiting_claim(engine, idle_claims)
    takes = counting_store.claims
    created = await create(engine)

    assert counting_store.claims == takes + 1
    assert (await waiting).execution_id == created
    assert counting_store.claims == takes + 1, "and is not woken again"


async def test_work_committed_beside_an_unstorable_change_wakes_a_claim(
    engine: Engine, idle_claims: asyncio.Queue[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = await start_waiting_claim(engine, idle_claims)
    add: Callable[[Change], Any] = engine.runtime.commit_queue.add

    def beside(one: Change) -> Any:
        add(change(Insert(execution("b\0"))))
        return add(one)

    monkeypatch.setattr(engine.runtime.commit_queue, "add", beside)
    execution_id = await create(engine)

    assert (await asyncio.wait_for(waiting, 20)).execution_id == execution_id


@pytest.mark.parametrize("loss", Loss)
async def test_a_claim_receives_its_work_once_whatever_is_lost(
    store: Store, idle_claims: asyncio.Queue[None], loss: Loss
) -> None:
    lossy = LossyStore(store)
    engine = await warm_engine(lossy)
    waiting = await start_waiting_claim(engine, idle_claims)

    lossy.next_loss = loss
    execution_id = await create(engine)
    claimed = await asyncio.wait_for(waiting, 20)

    assert lossy.losses == 1
    assert claimed.execution_id == execution_id
    assert await engine.claim(LANE, worker_id="w", worker_instance_id="w-2") is None
    await engine.complete(claimed.handle, result=b"done")
    assert len(await engine.attempt_history(execution_id)) == 1
