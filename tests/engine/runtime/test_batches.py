"""Commit batches: no two changes of a batch write one row, and the rows of large batches are split over two commits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.runtime.commit_queue import MAX_BATCH_ROWS
from flowfabric.engine.runtime.load_queue import LoadQueue
from flowfabric.ids import FlowId, LaneId, SeededMinter, mint_for_flow, mint_solo
from flowfabric.model.change import Change, Guard, Insert, Patch
from flowfabric.model.execution import Execution
from flowfabric.model.flow import CompletionDispatch, Dependency, DependencyKind, EdgeGroup, Flow, FlowMember
from flowfabric.model.instant import NOW
from flowfabric.model.states import TerminalOutcome
from flowfabric.rules.execution import replay
from flowfabric.rules.flow import build, joins, successors
from flowfabric.rules.flow.build import StageEdge
from flowfabric.rules.flow.joins import JoinContext, UpstreamOutcome
from flowfabric.settings import Settings
from flowfabric.stores.memory.store import MemoryStore
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Loaded, Read
from flowfabric.stores.verdicts import Verdict
from flowfabric.testing.flow_invariants import check_flow_invariants
from tests.executions import create_request
from tests.scenarios.flow_env import FlowEnv
from tests.stores.sample_rows import execution


@pytest.fixture
async def flow(store: Store, clock: ManualClock) -> FlowEnv:
    """A flow on an engine that dispatches nothing by itself."""
    return FlowEnv(Engine(store, minter=SeededMinter(1), settings=Settings(dispatch=False)), clock)


async def commit_together(flow: FlowEnv, *changes: Change | None) -> list[int | None]:
    """Return the results of changes that are submitted at the same moment."""
    engine = flow.engine
    given = [msgspec.structs.replace(one, id=engine.minter.change_id()) for one in changes if one is not None]
    assert len(given) == len(changes)
    return await asyncio.gather(*(engine.runtime.commit_queue.add(one) for one in given))


async def stage_edge(flow: FlowEnv, upstream: str, downstream: str) -> Change | None:
    names = (flow.names[upstream], flow.names[downstream])
    ask = StageEdge(flow.id, flow.engine.minter.uuid(), *names, DependencyKind.SUCCESS_ONLY, None, None)
    members: Any = tuple([await flow.load(FlowMember, flow.id, name) for name in names])
    found = await flow.load(Flow, flow.id)
    return build.stage_edge(found, None, members, None, ask, closes_cycle=False).change


async def test_a_replay_does_not_undo_concurrent_changes_of_its_flow(flow: FlowEnv) -> None:
    await flow.begin("abc")
    await flow.fail("c")
    await flow.sweep("flow_projector")
    staged = await stage_edge(flow, "a", "b")
    replayed = replay.replay(await flow.row("c")).change

    assert None not in await commit_together(flow, staged, replayed)

    found = await flow.load(Flow, flow.id)
    assert (found.edge_count, found.graph_revision, found.project_at) == (1, 4, flow.clock.now)
    await check_flow_invariants(flow.engine)


async def test_an_outcome_recorded_while_an_earlier_one_is_counted_leaves_the_count_unchanged(flow: FlowEnv) -> None:
    await flow.begin("ab")
    await flow.edge("a", "b")
    group, child = await flow.group("b"), await flow.row("b")
    counted = joins.count_outcomes(group, [UpstreamOutcome(await flow.dependency("a", "b"), TerminalOutcome.FAILED)])
    fold = joins.resolve_join(group, child, counted, JoinContext()).change
    above = await flow.row("a")
    note = successors.record_outcome(flow.names["b"], flow.edges["a", "b"], TerminalOutcome.SUCCESS)
    ended = Change(
        guards=(Guard(Execution, (above.execution_id,), above.revision),),
        writes=(Patch(Execution, (above.execution_id,), {"last_mutation_at": NOW}), note),
    )

    assert None not in await commit_together(flow, fold, ended)

    dependency = await flow.dependency("a", "b")
    assert (dependency.state, dependency.outcome, dependency.unfolded_at) == ("impossible", "failed", None)
    assert await flow.counts("b") == "0/1/0 of 1 impossible"
    await check_flow_invariants(flow.engine)


async def test_a_replay_resets_the_rest_of_its_outcome_while_some_of_it_is_dispatched(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", 1)
    await flow.begin("abc")
    await flow.edge("a", "b")
    await flow.edge("a", "c")
    await flow.fail("a")
    unprocessed: CompletionDispatch = await flow.load(CompletionDispatch, flow.names["a"])
    recorded = Change(
        guards=(Guard(CompletionDispatch, (unprocessed.execution_id,), unprocessed.revision),),
        writes=(Patch(CompletionDispatch, (unprocessed.execution_id,), {"after_edge": flow.edges["a", "b"]}),),
    )

    assert None not in await commit_together(flow, recorded, replay.replay(await flow.row("a")).change)

    assert await flow.load(CompletionDispatch, flow.names["a"]) is None
    assert (await flow.load(EdgeGroup, *flow.downstream("c"))).group_state == "pending"
    assert (await flow.load(Dependency, flow.names["c"], flow.edges["a", "c"])).outcome is None


class RecordingStore(MemoryStore):
    """Has two commits in flight at a time, and records how many changes each of them had."""

    concurrent_commits = 2

    def __init__(self) -> None:
        super().__init__()
        self.held: list[int] = []
        self.under_way = self.most = 0

    async def commit(self, changes: Sequence[Change], topics: frozenset[str] = frozenset()) -> list[Verdict]:
        self.held.append(len(changes))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        for _ in range(5):
            await asyncio.sleep(0)
        self.under_way -= 1
        return await super().commit(changes, topics)


async def test_an_unstorable_change_fails_its_own_caller_only(store: Store) -> None:
    engine = Engine(store, minter=SeededMinter(1))
    names = [mint_solo(LaneId("mail"), engine.partitions, engine.minter) for _ in range(5)]
    rows = [execution(name, tags="a\0b" if place == 2 else None) for place, name in enumerate(names)]
    there = Change((), (Insert(rows[3]),), id=engine.minter.change_id())
    assert await store.commit([there]) != [None]

    results = await asyncio.gather(
        *(engine.runtime.commit_queue.add(Change((), (Insert(row),), id=engine.minter.change_id())) for row in rows),
        return_exceptions=True,
    )

    kinds = [type(result) for result in results]
    assert kinds == [int, int, errors.InvalidInput, type(None), int]
    assert "the store cannot keep this" in str(results[2])


class TwoClocks(MemoryStore):
    """Has a clock for each partition: that of partition n is n seconds ahead."""

    async def load(self, reads: Sequence[Read]) -> Loaded:
        loaded = await super().load(reads)
        times = [loaded.now + 1000 * int(read.key[0][4 : read.key[0].index("}")]) for read in reads]
        return Loaded(times[0], loaded.rows, times)


async def test_loads_that_share_a_round_trip_get_the_time_of_their_own_partition() -> None:
    queue = LoadQueue(TwoClocks(ManualClock(0)))
    reads = [[Read(Execution, (f"{{fp:{place}}}:a",)), Read(Execution, ("{fp:9}:b",))] for place in range(5)]

    loaded = await asyncio.gather(*(queue.load(one) for one in reads))

    assert [found.now for found in loaded] == [0, 1000, 2000, 3000, 4000]
    assert [found.times for found in loaded] == [[1000 * place, 9000] for place in range(5)]


async def graph_of(engine: Engine, size: int) -> str:
    """Create a flow of this many members without edges and return its id."""
    flow_id = FlowId(str(uuid4()))
    names = [mint_for_flow(flow_id, engine.partitions, engine.minter) for _ in range(size)]
    nodes = [create_request(name) for name in names]
    await engine.create_flow_graph(flow_id, nodes)
    return flow_id


async def test_many_rows_are_written_by_two_concurrent_commits() -> None:
    store = RecordingStore()
    async with Engine(store) as engine:
        made = await asyncio.gather(*(graph_of(engine, 75) for _ in range(4)))  # each of them 226 rows
        assert (store.held, store.most) == ([2, 2], 2)
        made_flows = [await engine.describe_flow(flow_id) for flow_id in made]
        assert [found and found.node_count for found in made_flows] == [75] * 4


async def test_a_change_that_waits_for_its_root_does_not_reduce_the_batch_of_others() -> None:
    store = RecordingStore()
    async with Engine(store) as engine:
        made = [await graph_of(engine, 1) for _ in range(5)]
        store.held.clear()
        hot, *others = (Patch(Flow, (flow_id,), {"last_mutation_at": NOW}) for flow_id in made)
        patches = [hot] * (MAX_BATCH_ROWS + 1) + others
        await asyncio.gather(
            *(engine.runtime.commit_queue.add(Change((), (one,), id=place)) for place, one in enumerate(patches))
        )
        assert store.held[0] == 1 + len(others)


async def test_few_rows_are_written_by_one_commit() -> None:
    store = RecordingStore()
    async with Engine(store) as engine:
        await asyncio.gather(*(graph_of(engine, 30) for _ in range(4)))
        assert store.held == [4]
