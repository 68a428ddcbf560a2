"""Large flows: each commit is bounded whatever the width of the flow, and a graph is one call whatever its size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.model.change import Change
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Edge, Flow, FlowMember
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Read, Scan
from flowfabric.stores.verdicts import Verdict
from flowfabric.testing.flaky_store import Loss
from flowfabric.testing.flow_invariants import check_flow_invariants
from flowfabric.testing.invariants import scan_all
from tests.engine.flow_harness import FlowHarness

STEP, WIDTH = 50, 400
NODES = 10_000


class MeasuringStore:
    """A store that records how many writes each change has."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.heaviest = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def commit(self, changes: Sequence[Change], topics: frozenset[str] = frozenset()) -> list[Verdict]:
        self.heaviest = max([self.heaviest, *(len(change.writes) for change in changes)])
        return await self.store.commit(changes, topics)


@pytest.fixture
async def measuring_store(store: Store) -> MeasuringStore:
    return MeasuringStore(store)


@pytest.fixture
async def harness(measuring_store: MeasuringStore) -> AsyncIterator[FlowHarness]:
    harness = FlowHarness(measuring_store)
    yield harness
    await harness.engine.dispatcher.close()


async def test_fan_out_is_written_in_bounded_steps(
    harness: FlowHarness, measuring_store: MeasuringStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.flows.completion_dispatcher.MAX_EDGES_PER_STEP", STEP)
    children = [f"c{number:04}" for number in range(WIDTH)]
    await harness.graph(["a", *children], [("a", child) for child in children])
    measuring_store.heaviest = 0

    await harness.work()
    await harness.engine.dispatcher.wait_idle()

    assert 0 < measuring_store.heaviest <= 3 * STEP + 1, "an edge, a group and a child for each, and the dispatch row"
    assert len(await harness.claim(WIDTH + 1)) == WIDTH


async def test_fan_in_is_resolved_in_bounded_steps(
    harness: FlowHarness, measuring_store: MeasuringStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.flows.join_resolver.MAX_EDGES_PER_BATCH", STEP)
    parents = [f"p{number:04}" for number in range(WIDTH)]
    await harness.graph([*parents, "j"], [(parent, "j") for parent in parents])
    held = await harness.claim(by=harness.mortal)
    await asyncio.gather(*(harness.mortal.complete(one.handle) for one in held))
    measuring_store.heaviest = 0

    await harness.sweep("completion_dispatch")

    assert 0 < measuring_store.heaviest <= STEP + 2, "the edges, their group and the child"
    group = await harness.group("j")
    assert (group.succeeded, group.group_state) == (WIDTH, "satisfied")
    assert [one.execution_id for one in await harness.claim()] == [harness.names["j"]]


@pytest.mark.slow
async def test_ten_thousand_nodes_are_created_once_by_one_call_even_if_its_reply_is_lost(
    harness: FlowHarness, store: Store
) -> None:
    nodes = [f"n{number:05}" for number in range(NODES)]
    harness.store.lose("commit", Loss.REPLY)

    await harness.graph(nodes, [(nodes[number // 2], nodes[number]) for number in range(1, NODES)])

    assert harness.store.losses == [("commit", Loss.REPLY)]
    [flow] = (await store.load((Read(Flow, (harness.flow,)),))).rows[0]
    assert (flow.node_count, flow.edge_count, flow.graph_revision) == (NODES, NODES - 1, 2 * NODES - 1)
    found = [len(await store.scan(Scan(row, limit=2 * NODES))) for row in (Execution, FlowMember, Edge)]
    assert found == [NODES, NODES, NODES - 1]
    assert await harness.work() == ["n00000"]


async def test_a_graph_above_the_limit_is_refused_as_a_whole(harness: FlowHarness, store: Store) -> None:
    with pytest.raises(errors.InvalidInput):
        await harness.graph([f"n{number}" for number in range(NODES + 1)], [])

    assert await scan_all(store, Execution) == await scan_all(store, Flow) == []
    await check_flow_invariants(harness.engine)
