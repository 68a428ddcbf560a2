"""A worker's next claim is ordered after the completions that it has just sent, and finds what they unblocked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest

from flowfabric.engine.claiming.poller import LARGE_CLAIM
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.ids import FlowId, SeededMinter, mint_for_flow
from flowfabric.model.answers.execution import Claimed, Completed
from flowfabric.model.change import Change
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult
from flowfabric.stores.port import Store
from flowfabric.stores.verdicts import Verdict
from tests.executions import create_request

LANE = "mail"
CHAINS = 3
# Claims needed to continue a chain, by `executes_in_order`; 0 where the commit also claims.
CLAIMS = {True: 1, False: 0}


class CountingStore:
    """Delegates to a store, counts the claims, and records the order of calls."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.claims = 0
        self.commit_and_claims = 0  # commit-and-claim calls
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def claim_rows(self, request: ClaimRequest) -> ClaimedRows:
        self.claims += 1
        self.calls.append("take")
        return await self.store.claim_rows(request)

    async def commit(self, changes: Sequence[Change], topics: frozenset[str] = frozenset()) -> list[Verdict]:
        self.calls.append("commit")
        return await self.store.commit(changes, topics)

    async def commit_and_claim(
        self, changes: Sequence[Change], topics: frozenset[str], request: ClaimRequest
    ) -> CommitAndClaimResult:
        self.commit_and_claims += 1
        self.calls.append("commit")
        return await self.store.commit_and_claim(changes, topics, request)


@pytest.fixture
def counting_store(store: Store) -> CountingStore:
    return CountingStore(store)


@pytest.fixture
async def engine(counting_store: CountingStore) -> Engine:
    return engine_without_polling(counting_store, seed=7)


def engine_without_polling(store: Any, *, seed: int) -> Engine:
    engine = Engine(store, minter=SeededMinter(seed))
    engine.runtime.poll_interval_s = 60  # Only a wakeup causes a claim.
    return engine


async def create_chain(engine: Engine, steps: int, *, ref: str | None = None, **given: Any) -> list[str]:
    flow_id = FlowId(str(UUID(engine.minter.uuid())))
    names = [mint_for_flow(flow_id, engine.partitions, engine.minter) for _ in range(steps)]
    nodes = [create_request(name, LANE, **given) for name in names]
    edges = [GraphEdge(*pair, data_passing_ref=ref) for pair in pairwise(names)]
    await engine.create_flow_graph(flow_id, nodes, edges, namespace="n")
    return list(names)


def ids_of(claimed: list[Claimed]) -> set[str]:
    return {one.execution_id for one in claimed}


async def test_full_slots_are_refilled_with_at_most_one_claim(engine: Engine, counting_store: CountingStore) -> None:
    chains = [await create_chain(engine, 4) for _ in range(CHAINS)]
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    claimed = await pull.claim(CHAINS)
    for step in range(1, 4):
        before = counting_store.claims
        completing = asyncio.create_task(engine.complete_many([(one.handle, b"{}") for one in claimed]))
        claimed = await asyncio.wait_for(pull.claim(CHAINS, max_wait_ms=60_000), 20)

        assert ids_of(claimed) == {names[step] for names in chains}
        assert counting_store.claims == before + CLAIMS[counting_store.executes_in_order]
        assert all(isinstance(answer, Completed) for answer in await completing)
    assert engine.runtime.commit_queue.notified_changes == set()
    pull.close()


async def test_a_lane_that_was_seen_empty_is_not_claimed_from_again(
    engine: Engine, counting_store: CountingStore
) -> None:
    """All slots stay occupied, so no claim returns fewer executions than it requested."""
    names = await create_chain(engine, 3)
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    held = await pull.claim(1)
    for _ in names[1:]:
        completing = asyncio.create_task(engine.complete_many([(one.handle, b"{}") for one in held]))
        held = await asyncio.wait_for(pull.claim(1, max_wait_ms=60_000), 20)
        await completing
    before = counting_store.claims
    waiting = asyncio.create_task(pull.claim(1, max_wait_ms=60_000))
    await engine.complete(held[0].handle)
    new = engine.new_execution_id()
    await engine.create_execution(execution_id=new, lane_id=LANE)

    [claimed] = await asyncio.wait_for(waiting, 20)
    assert claimed.execution_id == new
    if not counting_store.executes_in_order:
        assert counting_store.claims == before + 1
    pull.close()


async def test_free_slots_are_refilled_with_at_most_one_claim_after_a_batch_of_completions(
    engine: Engine, counting_store: CountingStore
) -> None:
    chains = [await create_chain(engine, 4) for _ in range(CHAINS)]
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    claimed = await pull.claim(CHAINS + 1)  # It has a free slot, so the next claim waits for a wakeup.
    for step in range(1, 4):
        claiming = asyncio.create_task(pull.claim(CHAINS + 1, max_wait_ms=60_000))
        before = counting_store.claims
        await engine.complete_many([(one.handle, b"{}") for one in claimed])
        claimed = await asyncio.wait_for(claiming, 20)

        assert ids_of(claimed) == {names[step] for names in chains}
        assert counting_store.claims == before + CLAIMS[counting_store.executes_in_order]
    assert engine.runtime.commit_queue.notified_changes == set()
    pull.close()


async def test_a_claim_waits_no_longer_than_the_completion_before_it(engine: Engine, store: Store) -> None:
    """The completion is refused here: another process completed the execution before."""
    first, second = await create_chain(engine, 2)
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    [held] = await pull.claim(1)
    other = engine_without_polling(store, seed=8)
    await other.complete(held.handle, result=b"{}")

    completing = asyncio.create_task(engine.complete_many([(held.handle, b"{}")]))
    [claimed] = await asyncio.wait_for(pull.claim(1), 20)

    assert (held.execution_id, claimed.execution_id) == (first, second)
    assert isinstance((await completing)[0], Completed)
    assert engine.runtime.commit_queue.notified_changes == set()
    pull.close()


async def test_a_claim_of_unrelated_work_goes_first_unless_the_store_executes_in_order(
    engine: Engine, counting_store: CountingStore
) -> None:
    """No execution depends on these completions and the lane has more work: the claim need not wait for the batch."""
    for _ in range(3 * CHAINS):
        await engine.create_execution(execution_id=engine.new_execution_id(), lane_id=LANE)
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    ended: set[str] = set()
    claimed = await pull.claim(CHAINS)
    for _ in range(2):
        counting_store.calls.clear()
        completing = asyncio.create_task(engine.complete_many([(one.handle, b"{}") for one in claimed]))
        ended |= ids_of(claimed)
        claimed = await asyncio.wait_for(pull.claim(CHAINS), 20)

        assert len(claimed) == CHAINS
        assert ids_of(claimed).isdisjoint(ended)
        assert all(isinstance(answer, Completed) for answer in await completing)
        assert counting_store.calls == (["commit", "take"] if counting_store.executes_in_order else ["take", "commit"])
    pull.close()


@pytest.mark.parametrize("parts", [1, 2])
async def test_a_large_claim_goes_before_unrelated_completions_where_claims_are_made_in_parts(
    engine: Engine, counting_store: CountingStore, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """The store works on it while this process runs the handlers of the other part; not if it may find little."""
    monkeypatch.setattr(counting_store.store, "claim_parts", parts)
    for _ in range(2 * LARGE_CLAIM + 1):
        await engine.create_execution(execution_id=engine.new_execution_id(), lane_id=LANE)
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    claimed = await pull.claim(LARGE_CLAIM)
    for found in (LARGE_CLAIM, LARGE_CLAIM, 1):  # by the claim before
        assert len(claimed) == found
        goes_first = not counting_store.executes_in_order or (parts == 2 and found == LARGE_CLAIM)
        counting_store.calls.clear()
        completing = asyncio.create_task(engine.complete_many([(one.handle, b"{}") for one in claimed]))
        claimed = await asyncio.wait_for(pull.claim(LARGE_CLAIM), 20)

        assert all(isinstance(answer, Completed) for answer in await completing)
        if found > 1 or counting_store.executes_in_order:  # elsewhere the lane is known to be empty
            assert counting_store.calls[:2] == (["take", "commit"] if goes_first else ["commit", "take"])
    pull.close()


@pytest.mark.parametrize("parts", [1, 2])
async def test_a_large_claim_goes_after_completions_that_release_work(
    engine: Engine, counting_store: CountingStore, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    monkeypatch.setattr(counting_store.store, "claim_parts", parts)
    chains = [await create_chain(engine, 2) for _ in range(LARGE_CLAIM)]
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    claimed = await pull.claim(LARGE_CLAIM)
    completing = asyncio.create_task(engine.complete_many([(one.handle, b"{}") for one in claimed]))

    claimed = await asyncio.wait_for(pull.claim(LARGE_CLAIM, max_wait_ms=60_000), 20)

    assert ids_of(claimed) == {second for _, second in chains}
    assert all(isinstance(answer, Completed) for answer in await completing)
    pull.close()


async def test_a_claim_goes_after_the_completion_of_a_child(engine: Engine, counting_store: CountingStore) -> None:
    """Its parent may be waiting for it in a lane of the same worker."""
    parent = engine.new_execution_id()
    await engine.create_execution(execution_id=parent, lane_id="other")
    for _ in range(2):
        await engine.create_execution(execution_id=engine.new_execution_id(), lane_id=LANE, parent_id=parent)
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    [held] = await pull.claim(1)
    counting_store.calls.clear()

    completing = asyncio.create_task(engine.complete_many([(held.handle, b"{}")]))
    await asyncio.wait_for(pull.claim(1), 20)

    await completing
    assert counting_store.calls[0] == "commit"
    pull.close()
