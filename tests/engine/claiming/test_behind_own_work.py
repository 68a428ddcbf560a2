"""A worker's next look goes behind the ends that it has just told, and finds what those set free."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.ids import FlowId, SeededMinter, mint_for_flow
from flowfabric.model.answers.execution import Claimed, Completed
from flowfabric.model.change import Change
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult
from flowfabric.stores.port import Store

LANE = "mail"
CHAINS = 3
TAKES = {True: 1, False: 0}  # that it costs to go on: where the store keeps the order, and where it hands work over


class Counting:
    """Hands everything on to a store, counts the takes, and notes in which order it is asked."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.takes = 0
        self.wishes = 0  # that went along with a commit
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def claim_rows(self, take: ClaimRequest) -> ClaimedRows:
        self.takes += 1
        self.asked.append("take")
        return await self.store.claim_rows(take)

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        self.asked.append("commit")
        return await self.store.commit(changes, hint)

    async def commit_and_claim(
        self, changes: Sequence[Change], hint: frozenset[str], take: ClaimRequest
    ) -> CommitAndClaimResult:
        self.wishes += 1
        self.asked.append("commit")
        return await self.store.commit_and_claim(changes, hint, take)


@pytest.fixture
def counting(store: Store) -> Counting:
    return Counting(store)


@pytest.fixture
async def engine(counting: Counting) -> Engine:
    return working(counting, seed=7)


def working(store: Any, *, seed: int) -> Engine:
    engine = Engine(store, minter=SeededMinter(seed))
    engine.runtime.poll_interval_s = 60  # nobody looks without a hint
    return engine


async def chain(engine: Engine, steps: int, *, ref: str | None = None, **given: Any) -> list[str]:
    flow_id = FlowId(str(UUID(engine.minter.uuid())))
    names = [mint_for_flow(flow_id, engine.partitions, engine.minter) for _ in range(steps)]
    nodes = [
        CreateExecution(execution_id=name, partition=0, namespace="n", lane_id=LANE, execution_kind="k", **given)
        for name in names
    ]
    edges = [GraphEdge(*pair, data_passing_ref=ref) for pair in pairwise(names)]
    await engine.create_flow_graph(flow_id, nodes, edges, namespace="n")
    return list(names)


def ids_of(claimed: list[Claimed]) -> set[str]:
    return {one.execution_id for one in claimed}


async def test_full_slots_are_filled_anew_with_one_take_at_most(engine: Engine, counting: Counting) -> None:
    chains = [await chain(engine, 4) for _ in range(CHAINS)]
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    claimed = await pull.claim(CHAINS)
    for place in range(1, 4):
        before = counting.takes
        telling = asyncio.create_task(engine.complete_many([(one.handle, b"{}") for one in claimed]))
        claimed = await asyncio.wait_for(pull.claim(CHAINS, max_wait_ms=60_000), 20)

        assert ids_of(claimed) == {names[place] for names in chains}
        assert counting.takes == before + TAKES[counting.executes_in_order]
        assert all(isinstance(answer, Completed) for answer in await telling)
    assert engine.runtime.commit_queue.notified_changes == set()
    pull.close()


async def test_nobody_looks_for_more_in_a_lane_that_was_seen_to_be_empty(engine: Engine, counting: Counting) -> None:
    """Slots are full all the time, so that none of these claims finds less than it asked for."""
    names = await chain(engine, 3)
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    held = await pull.claim(1)
    for _ in names[1:]:
        telling = asyncio.create_task(engine.complete_many([(one.handle, b"{}") for one in held]))
        held = await asyncio.wait_for(pull.claim(1, max_wait_ms=60_000), 20)
        await telling
    before = counting.takes
    waiting = asyncio.create_task(pull.claim(1, max_wait_ms=60_000))
    await engine.complete(held[0].handle)
    new = engine.new_execution_id()
    await engine.create_execution(execution_id=new, lane_id=LANE)

    [claimed] = await asyncio.wait_for(waiting, 20)
    assert claimed.execution_id == new
    if not counting.executes_in_order:
        assert counting.takes == before + 1
    pull.close()


async def test_free_slots_are_filled_with_one_take_at_most_when_ends_are_told_together(
    engine: Engine, counting: Counting
) -> None:
    chains = [await chain(engine, 4) for _ in range(CHAINS)]
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    claimed = await pull.claim(CHAINS + 1)  # it has room for more, so the next look waits for a hint
    for place in range(1, 4):
        looking = asyncio.create_task(pull.claim(CHAINS + 1, max_wait_ms=60_000))
        before = counting.takes
        await engine.complete_many([(one.handle, b"{}") for one in claimed])
        claimed = await asyncio.wait_for(looking, 20)

        assert ids_of(claimed) == {names[place] for names in chains}
        assert counting.takes == before + TAKES[counting.executes_in_order]
    assert engine.runtime.commit_queue.notified_changes == set()
    pull.close()


async def test_a_look_waits_no_longer_than_what_it_stands_behind(engine: Engine, store: Store) -> None:
    """Here it is refused: somebody else told the same end before."""
    first, second = await chain(engine, 2)
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    [held] = await pull.claim(1)
    other = working(store, seed=8)
    await other.complete(held.handle, result=b"{}")

    telling = asyncio.create_task(engine.complete_many([(held.handle, b"{}")]))
    [claimed] = await asyncio.wait_for(pull.claim(1), 20)

    assert (held.execution_id, claimed.execution_id) == (first, second)
    assert isinstance((await telling)[0], Completed)
    assert engine.runtime.commit_queue.notified_changes == set()
    pull.close()


async def test_a_look_for_ordinary_work_goes_first_unless_the_store_keeps_the_order(
    engine: Engine, counting: Counting
) -> None:
    """Nobody waits for these ends, and there is more in the lane: the store may begin while they are put together."""
    for _ in range(3 * CHAINS):
        await engine.create_execution(execution_id=engine.new_execution_id(), lane_id=LANE)
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    ended: set[str] = set()
    claimed = await pull.claim(CHAINS)
    for _ in range(2):
        counting.asked.clear()
        telling = asyncio.create_task(engine.complete_many([(one.handle, b"{}") for one in claimed]))
        ended |= ids_of(claimed)
        claimed = await asyncio.wait_for(pull.claim(CHAINS), 20)

        assert len(claimed) == CHAINS
        assert ids_of(claimed).isdisjoint(ended)
        assert all(isinstance(answer, Completed) for answer in await telling)
        assert counting.asked == (["commit", "take"] if counting.executes_in_order else ["take", "commit"])
    pull.close()


async def test_a_look_stands_behind_the_end_of_a_child(engine: Engine, counting: Counting) -> None:
    """Its parent may be waiting for it, in a lane of the same worker."""
    parent = engine.new_execution_id()
    await engine.create_execution(execution_id=parent, lane_id="other")
    for _ in range(2):
        await engine.create_execution(execution_id=engine.new_execution_id(), lane_id=LANE, parent_id=parent)
    pull = engine.pulling([LANE], worker_id="w", worker_instance_id="w-1")
    [held] = await pull.claim(1)
    counting.asked.clear()

    telling = asyncio.create_task(engine.complete_many([(held.handle, b"{}")]))
    await asyncio.wait_for(pull.claim(1), 20)

    await telling
    assert counting.asked[0] == "commit"
    pull.close()
