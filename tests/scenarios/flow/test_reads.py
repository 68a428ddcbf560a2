"""S-036 to S-038: reads of flows, edges, tags and summaries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from flowfabric import errors
from flowfabric.ids import FlowId, flow_partition, mint_for_flow
from flowfabric.model.change import Patch
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Flow, FlowSummary
from flowfabric.stores.queries import Loaded, Read
from tests.executions import create_request, new_execution
from tests.scenarios.flow_env import FlowEnv, any_of, quorum


@pytest.mark.spec("S-036")
async def test_a_finished_flow_accepts_new_members_and_is_projected_again(flow: FlowEnv) -> None:
    await flow.begin("ab")
    await flow.succeed("a", "b")
    assert await flow.sweep("flow_projector", 2) == [1, 0]
    assert (await flow.load(Flow, flow.id)).project_at is None

    await flow.add("c")
    assert await flow.sweep("flow_projector") == [1]

    summary = await flow.summary()
    assert (summary.total_members, summary.sampled_members, summary.members_completed) == (3, 3, 2)
    assert (summary.members_waiting, summary.public_flow_state) == (1, "open")
    await flow.claim("c")
    await flow.sweep("flow_projector")
    summary = await flow.summary()
    assert (summary.members_active, summary.public_flow_state) == (1, "running")


async def test_one_projector_sweep_covers_every_unfinished_flow(flow: FlowEnv) -> None:
    engine = flow.engine
    flows = [FlowId(engine.minter.uuid()) for _ in range(120)]
    names = [mint_for_flow(one, engine.partitions, engine.minter) for one in flows]
    nodes = [create_request(name) for name in names]
    await asyncio.gather(*(engine.create_flow_graph(one, [node]) for one, node in zip(flows, nodes, strict=True)))

    assert await flow.sweep("flow_projector", 2) == [120, 120]

    found = (await engine.runtime.load([Read(FlowSummary, (one,)) for one in flows])).rows
    assert [len(each) for each in found] == [1] * 120


async def test_the_derived_flow_state_follows_its_members(flow: FlowEnv) -> None:
    async def derived() -> str:
        assert await flow.engine.project_flow_summary(flow.id)
        summary = await flow.summary()
        return summary.public_flow_state.value

    assert not await flow.engine.project_flow_summary(flow.id)  # there is no such flow
    await flow.begin()
    assert not await flow.engine.project_flow_summary(flow.id)  # it has no members
    for name in "abcd":
        await flow.add(name)
    assert await derived() == "open"
    await flow.chain("ab")
    assert await derived() == "blocked"
    claim = await flow.claim("c")
    assert await derived() == "running"
    await flow.engine.complete(claim.handle)
    await flow.fail_and_cascade("a")
    await flow.succeed("d")
    assert await derived() == "failed"
    described = await flow.describe()
    assert described.public_flow_state == "open"  # the projector never writes the flow's own state


async def test_a_flow_with_completed_and_skipped_members_is_completed(flow: FlowEnv) -> None:
    await flow.begin("ab")
    await flow.edge("a", "b", dependency_kind="failure_only")
    await flow.succeed_and_cascade("a")

    await flow.sweep("flow_projector")

    summary = await flow.summary()
    assert (summary.members_completed, summary.members_skipped) == (1, 1)
    assert summary.public_flow_state == "completed"


async def test_purged_members_are_counted_in_the_total_only(flow: FlowEnv) -> None:
    await flow.begin("ab")
    await flow.succeed("a")
    flow.clock.advance_ms(24 * 60 * 60 * 1000)
    assert await flow.engine.purge_execution(flow.names["a"])

    await flow.sweep("flow_projector")

    summary = await flow.summary()
    assert (summary.total_members, summary.sampled_members, summary.members_completed) == (2, 1, 0)


async def test_a_replayed_member_registers_its_flow_with_the_projector(flow: FlowEnv) -> None:
    await flow.begin("a")
    await flow.fail("a")
    await flow.sweep("flow_projector")

    await flow.engine.replay_execution(flow.names["a"])
    await flow.sweep("flow_projector")

    summary = await flow.summary()
    assert (summary.members_waiting, summary.public_flow_state) == (1, "open")


async def test_a_member_replayed_during_projection_keeps_its_flow_registered(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    await flow.begin("a")
    await flow.fail("a")
    load = flow.engine.runtime.load

    async def load_then_replay(wants: Sequence[Read]) -> Loaded:
        found = await load(wants)
        if any(want.row is Execution for want in wants):
            monkeypatch.undo()
            await flow.engine.replay_execution(flow.names["a"])
        return found

    monkeypatch.setattr(flow.engine.runtime, "load", load_then_replay)
    await flow.sweep("flow_projector", 2)

    summary = await flow.summary()
    assert (summary.members_waiting, summary.members_failed, summary.public_flow_state) == (1, 0, "open")


@pytest.mark.spec("S-037")
async def test_edges_are_listed_by_direction_and_found_by_id(flow: FlowEnv) -> None:
    await flow.begin("abcd")
    first, second = await flow.stage("a", "b"), await flow.stage("a", "c")
    solo = await new_execution(flow.engine)
    edges = flow.engine.list_edges

    outgoing = await edges(flow.id, outgoing=flow.names["a"])
    incoming = await edges(flow.id, incoming=flow.names["c"])

    assert [edge.edge_id for edge in outgoing] == sorted((first, second))
    assert [edge.edge_id for edge in incoming] == [second]
    assert await edges(flow.id, outgoing=flow.names["d"]) == []
    assert await edges(flow.id, incoming=solo) == []
    assert {(edge.edge_state, edge.satisfaction_condition, edge.created_by) for edge in outgoing + incoming} == {
        ("pending", "all_required", "engine")
    }
    assert await flow.engine.describe_edge(flow.id, first) == next(e for e in outgoing if e.edge_id == first)
    assert await flow.engine.describe_edge(flow.id, flow.engine.minter.uuid()) is None
    assert await flow.engine.describe_edge(flow.engine.minter.uuid(), first) is None
    with pytest.raises(errors.InvalidInput):
        await edges(flow.id)


@pytest.mark.spec("S-038")
async def test_flow_tag_keys_are_validated(flow: FlowEnv) -> None:
    await flow.begin()
    for key in ("app.task", "app.sub.field", "a1_b.x"):
        await flow.engine.set_flow_tag(flow.id, key, f"value of {key}")

    described = await flow.describe()
    assert described.tags == {key: f"value of {key}" for key in ("a1_b.x", "app.sub.field", "app.task")}
    assert described.graph_revision == 0
    assert await flow.engine.get_flow_tag(flow.id, "app.task") == "value of app.task"
    for bad in ("task", "App.x", "app.", "app..x", "app.foo-bar", "app.Foo", ""):
        with pytest.raises(errors.InvalidInput) as caught:
            await flow.engine.set_flow_tag(flow.id, bad, "x")
        assert caught.value.detail == f"invalid tag key: {bad}"
        with pytest.raises(errors.InvalidInput):
            await flow.engine.get_flow_tag(flow.id, bad)
    stranger = flow.engine.minter.uuid()
    with pytest.raises(errors.NotFound):
        await flow.engine.set_flow_tag(stranger, "app.x", "x")
    assert await flow.engine.get_flow_tag(stranger, "app.x") is None


async def test_unreadable_flow_tags_are_reported_as_corruption(flow: FlowEnv) -> None:
    await flow.begin()
    await flow.write(Patch(Flow, (flow.id,), {"tags": "{no tags"}))

    with pytest.raises(errors.Corruption):
        await flow.engine.describe_flow(flow.id)


async def test_a_described_flow_lists_joins_with_edges(flow: FlowEnv) -> None:
    await flow.begin("abcde")
    await flow.set_policy("e", any_of("let_run"))  # it has no edges
    await flow.join("ab", "c", quorum(2, "cancel_remaining"))
    await flow.stage("a", "d")
    await flow.succeed_and_cascade("a")

    described = await flow.engine.describe_flow(flow.id)

    assert described is not None
    groups = {group.downstream_execution_id: group for group in described.edge_groups}
    assert [*groups] == flow.ids("cd")
    join = groups[flow.names["c"]]
    assert join.policy == quorum(2, "cancel_remaining")
    assert (join.total_deps, join.satisfied_count, join.failed_count, join.skipped_count) == (2, 1, 0, 0)
    assert (join.running_count, join.group_state) == (1, "pending")
    assert (groups[flow.names["d"]].policy, groups[flow.names["d"]].total_deps) == ({"kind": "all_of"}, 0)


async def test_flows_of_a_partition_are_listed_in_pages(flow: FlowEnv) -> None:
    wanted: list[FlowId] = []
    while len(wanted) < 5:
        other = FlowId(flow.engine.minter.uuid())
        if flow_partition(other, flow.engine.partitions) == flow.partition:
            wanted.append(other)
            await flow.engine.create_flow(other)
    await flow.engine.create_flow(flow.engine.minter.uuid())
    await flow.engine.cancel_flow(wanted[0])
    wanted.sort()

    first = await flow.engine.list_flows(flow.partition, limit=2)
    second = await flow.engine.list_flows(f"{{fp:{flow.partition}}}", cursor=first.next_cursor, limit=2)
    third = await flow.engine.list_flows(flow.partition, cursor=second.next_cursor, limit=2)

    assert [row.flow_id for page in (first, second, third) for row in page.flows] == wanted
    assert (first.next_cursor, second.next_cursor, third.next_cursor) == (wanted[1], wanted[3], None)
    assert (await flow.engine.list_flows(flow.partition, limit=5)).next_cursor is None
    assert (await flow.engine.list_flows(flow.partition, limit=0)).flows == []
    assert sorted(row.status for page in (first, second, third) for row in page.flows) == ["active"] * 4 + ["cancelled"]
    for bad in ("fp:1", "{b:1}", "{fp:x}"):
        with pytest.raises(errors.InvalidInput):
            await flow.engine.list_flows(bad)


@pytest.mark.parametrize("partition", [256, 65_535, "{fp:256}", "{b:1}", "{q:1}", -1])
async def test_reads_of_a_partition_that_does_not_exist_are_refused(flow: FlowEnv, partition: int | str) -> None:
    engine, waitpoint = flow.engine, flow.engine.minter.uuid()
    for read in (
        engine.list_flows(partition),
        engine.list_executions(partition),  # type: ignore[arg-type]
        engine.list_suspended(partition),
        engine.read_waitpoint_token(partition, waitpoint),
        engine.scan_eligible_executions("default", partition, 10),  # type: ignore[arg-type]
        engine.trim_retention(partition, "default"),  # type: ignore[arg-type]
        engine.reconcile_budget_counters(partition),  # type: ignore[arg-type]
        engine.reconcile_quota_counters(partition),  # type: ignore[arg-type]
    ):
        with pytest.raises(errors.InvalidInput, match="partition"):
            await read


async def test_the_flow_of_an_execution_is_resolved(flow: FlowEnv) -> None:
    await flow.begin("a")
    await flow.create("x")

    assert await flow.engine.resolve_execution_flow_id(flow.names["a"]) == flow.id
    assert await flow.engine.resolve_execution_flow_id(flow.names["x"]) is None
    assert await flow.engine.resolve_execution_flow_id(flow.new_id()) is None
    assert await flow.engine.describe_flow(flow.engine.minter.uuid()) is None
    assert await flow.engine.list_flow_members(flow.id) == [flow.names["a"]]
