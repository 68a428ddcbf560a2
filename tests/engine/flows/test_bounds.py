"""Large flows: whatever their width, what one step writes is bounded; whatever their size, a graph is one call."""

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
from flowfabric.testing.faults import Loss
from flowfabric.testing.flow_invariants import check_flow_invariants
from flowfabric.testing.invariants import scan_all
from tests.engine.crew import Crew

STEP, WIDTH = 50, 400
NODES = 10_000


class Weighing:
    """A store that notes how much each change writes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.heaviest = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        self.heaviest = max([self.heaviest, *(len(change.writes) for change in changes)])
        return await self.store.commit(changes, hint)


@pytest.fixture
async def weighing(store: Store) -> Weighing:
    return Weighing(store)


@pytest.fixture
async def crew(weighing: Weighing) -> AsyncIterator[Crew]:
    crew = Crew(weighing)
    yield crew
    await crew.engine.dispatcher.close()


async def test_fan_out_is_written_in_bounded_steps(
    crew: Crew, weighing: Weighing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.flows.completion_dispatcher.MAX_EDGES_PER_STEP", STEP)
    children = [f"c{number:04}" for number in range(WIDTH)]
    await crew.graph(["a", *children], [("a", child) for child in children])
    weighing.heaviest = 0

    await crew.work()
    await crew.engine.dispatcher.wait_idle()

    assert 0 < weighing.heaviest <= 3 * STEP + 1, "an edge, a group and a child for each, and the dispatch row"
    assert len(await crew.claim(WIDTH + 1)) == WIDTH


async def test_fan_in_is_folded_in_bounded_steps(
    crew: Crew, weighing: Weighing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.flows.join_resolver.MAX_EDGES_PER_BATCH", STEP)
    parents = [f"p{number:04}" for number in range(WIDTH)]
    await crew.graph([*parents, "j"], [(parent, "j") for parent in parents])
    held = await crew.claim(by=crew.mortal)
    await asyncio.gather(*(crew.mortal.complete(one.handle) for one in held))
    weighing.heaviest = 0

    await crew.sweep("completion_dispatch")

    assert 0 < weighing.heaviest <= STEP + 2, "the edges, their group and the child"
    group = await crew.group("j")
    assert (group.succeeded, group.group_state) == (WIDTH, "satisfied")
    assert [one.execution_id for one in await crew.claim()] == [crew.names["j"]]


@pytest.mark.slow
async def test_ten_thousand_nodes_are_one_call_and_once_though_its_answer_is_lost(crew: Crew, store: Store) -> None:
    nodes = [f"n{number:05}" for number in range(NODES)]
    crew.store.lose("commit", Loss.REPLY)

    await crew.graph(nodes, [(nodes[number // 2], nodes[number]) for number in range(1, NODES)])

    assert crew.store.losses == [("commit", Loss.REPLY)]
    [flow] = (await store.load((Read(Flow, (crew.flow,)),))).rows[0]
    assert (flow.node_count, flow.edge_count, flow.graph_revision) == (NODES, NODES - 1, 2 * NODES - 1)
    found = [len(await store.scan(Scan(row, limit=2 * NODES))) for row in (Execution, FlowMember, Edge)]
    assert found == [NODES, NODES, NODES - 1]
    assert await crew.work() == ["n00000"]


async def test_one_node_more_is_refused_whole(crew: Crew, store: Store) -> None:
    with pytest.raises(errors.InvalidInput):
        await crew.graph([f"n{number}" for number in range(NODES + 1)], [])

    assert await scan_all(store, Execution) == await scan_all(store, Flow) == []
    await check_flow_invariants(crew.engine)
