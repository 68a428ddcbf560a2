"""A whole graph in one call: atomic, validated and idempotent."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import CreateExecution, errors
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.model.answers import flow as flow_answers
from tests.scenarios.flow_env import WAITING, WAITS, FlowEnv, quorum


def node(flow: FlowEnv, name: str, **options: Any) -> CreateExecution:
    flow.names.setdefault(name, flow.new_id())
    defaults: dict[str, Any] = {"partition": 0, "namespace": "default", "lane_id": "default", "execution_kind": "task"}
    return CreateExecution(execution_id=flow.names[name], **(defaults | options))


def edge(flow: FlowEnv, pair: str, **options: Any) -> GraphEdge:
    return GraphEdge(flow.names[pair[0]], flow.names[pair[1]], **options)


async def test_a_graph_created_in_one_call_equals_one_built_step_by_step(flow: FlowEnv) -> None:
    built = await FlowEnv(flow.engine, flow.clock).begin("abcd", policy=None)
    for upstream, downstream in ("ab", "ac", "bd", "cd"):
        await built.edge(upstream, downstream)

    nodes = [node(flow, name) for name in "abcd"]
    answer = await flow.engine.create_flow_graph(
        flow.id, nodes, [edge(flow, pair) for pair in ("ab", "ac", "bd", "cd")]
    )

    assert answer == flow_answers.GraphCreated(flow.id, graph_revision=8, node_count=4, edge_count=4)
    assert [await flow.vector(name) for name in "abcd"] == [WAITING, WAITS, WAITS, WAITS]
    for name in "bcd":
        one, other = await flow.group(name), await built.group(name)
        assert (one.n, one.staged, one.policy_variant) == (other.n, other.staged, other.policy_variant)
    described, expected = await flow.engine.describe_flow(flow.id), await built.engine.describe_flow(built.id)
    assert described is not None
    assert expected is not None
    assert (described.graph_revision, described.node_count) == (expected.graph_revision, expected.node_count)
    for name in "abcd":
        outgoing = await flow.engine.list_outgoing_edges(flow.id, flow.names[name])
        assert len(outgoing) == len(await built.engine.list_outgoing_edges(built.id, built.names[name]))
    await flow.succeed_and_cascade("a")
    assert await flow.state(*"bcd") == "waiting waiting waiting_children"
    await flow.succeed_and_cascade("b", "c")
    assert await flow.counts("d") == "2/0/0 of 2 satisfied"


async def test_a_graph_stores_policies_kinds_and_data_references(flow: FlowEnv) -> None:
    nodes = [node(flow, name, input_payload=b"orig") for name in "123jf"]
    edges = [edge(flow, f"{name}j", data_passing_ref="r") for name in "123"]
    edges.append(edge(flow, "jf", dependency_kind="failure_only"))

    await flow.engine.create_flow_graph(flow.id, nodes, edges, policies={flow.names["j"]: quorum(2, "let_run")})
    await flow.succeed("1", result=b"one")
    await flow.succeed("2", result=b"two")
    await flow.cascade("1", "2")

    assert (await flow.counts("j"), await flow.payload("j")) == ("2/0/0 of 3 satisfied", b"two")
    await flow.fail_and_cascade("j")
    assert await flow.state("f") == "waiting"


async def test_creating_a_graph_again_changes_nothing(flow: FlowEnv) -> None:
    nodes = [node(flow, name) for name in "ab"]
    await flow.engine.create_flow_graph(flow.id, nodes, [edge(flow, "ab")])
    before = await flow.engine.describe_flow(flow.id)

    again = await flow.engine.create_flow_graph(flow.id, nodes, [edge(flow, "ab")])

    assert again == flow_answers.FlowExists(flow.id)
    assert await flow.engine.describe_flow(flow.id) == before


async def nothing_was_created(flow: FlowEnv) -> bool:
    return await flow.engine.describe_flow(flow.id) is None and not any(
        [await flow.engine.describe_execution(name) for name in flow.names.values()]
    )


@pytest.mark.parametrize(
    ("edges", "error"),
    [
        (("ab", "bc", "ca"), errors.CycleDetected),
        (("aa",), errors.SelfReferencingEdge),
        (("ax",), errors.ExecutionNotInFlow),
    ],
)
async def test_an_invalid_graph_creates_nothing(
    flow: FlowEnv, edges: tuple[str, ...], error: type[errors.FabricError]
) -> None:
    nodes = [node(flow, name) for name in "abc"]
    flow.names["x"] = flow.new_id()

    with pytest.raises(error):
        await flow.engine.create_flow_graph(flow.id, nodes, [edge(flow, pair) for pair in edges])

    assert await nothing_was_created(flow)


async def test_a_graph_with_an_invalid_node_or_edge_creates_nothing(flow: FlowEnv) -> None:
    a, b = node(flow, "a"), node(flow, "b")
    create = flow.engine.create_flow_graph
    twice = flow.engine.minter.uuid()
    other = FlowEnv(flow.engine, flow.clock)
    while other.partition == flow.partition:
        other = FlowEnv(flow.engine, flow.clock)

    with pytest.raises(errors.InvalidInput, match="twice"):
        await create(flow.id, [a, a])
    with pytest.raises(errors.DependencyAlreadyExists):
        await create(flow.id, [a, b], [edge(flow, "ab", edge_id=twice), edge(flow, "ab", edge_id=twice)])
    with pytest.raises(errors.InvalidInput, match="partition"):
        await create(flow.id, [node(other, "z")])
    with pytest.raises(errors.InvalidInput, match="idempotency"):
        await create(flow.id, [node(flow, "a", idempotency_key="k")])
    late = node(flow, "b", delay_until=flow.clock.now + 1000)
    with pytest.raises(errors.InvalidInput, match="delayed"):
        await create(flow.id, [a, late], [edge(flow, "ab")])
    with pytest.raises(errors.InvalidPolicyJson):
        await create(flow.id, [a, node(flow, "b", policy="{no policy")])
    with pytest.raises(errors.InvalidInput, match="k must be"):
        await create(flow.id, [a, b], policies={flow.names["b"]: quorum(0, "let_run")})
    with pytest.raises(errors.ExecutionNotInFlow):
        await create(flow.id, [a], policies={flow.new_id(): quorum(1, "let_run")})
    with pytest.raises(errors.InvalidInput, match="flow_kind"):
        await create(flow.id, [a], flow_kind="")
    with pytest.raises(errors.InvalidInput, match="10001"):
        await create(flow.id, [a] * 10_001)

    assert await nothing_was_created(flow)


async def test_a_graph_with_an_existing_node_is_refused(flow: FlowEnv) -> None:
    await flow.create("a")
    before = await flow.row("a")

    with pytest.raises(errors.InvalidInput, match="exists already"):
        await flow.engine.create_flow_graph(flow.id, [node(flow, "a"), node(flow, "b")])

    assert await flow.row("a") == before
    assert await flow.engine.describe_execution(flow.names["b"]) is None
    member = FlowEnv(flow.engine, flow.clock)
    while member.partition != flow.partition:
        member = FlowEnv(flow.engine, flow.clock)
    await member.begin("m")
    flow.names["m"] = member.names["m"]
    with pytest.raises(errors.ExecutionAlreadyInFlow):
        await flow.engine.create_flow_graph(flow.id, [node(flow, "m")])


async def test_an_empty_graph_is_a_flow(flow: FlowEnv) -> None:
    answer = await flow.engine.create_flow_graph(flow.id, [])

    assert answer == flow_answers.GraphCreated(flow.id, 0, 0, 0)
    await flow.add("a")


async def test_a_delayed_root_blocks_its_successor(flow: FlowEnv) -> None:
    nodes = [node(flow, "a", delay_until=flow.clock.now + 1000), node(flow, "b")]

    await flow.engine.create_flow_graph(flow.id, nodes, [edge(flow, "ab")])

    assert await flow.state("a", "b") == "delayed waiting_children"


async def test_the_lane_of_a_waiting_node_is_listed(flow: FlowEnv) -> None:
    roots = [node(flow, "a", lane_id="root"), node(flow, "l", lane_id="late", delay_until=flow.clock.now + 1000)]
    nodes = [*roots, node(flow, "b", lane_id="then"), node(flow, "c", lane_id="then", policy='{"fairness_key":"k"}')]

    await flow.engine.create_flow_graph(flow.id, nodes, [edge(flow, "ab"), edge(flow, "ac")])

    assert (await flow.engine.list_lanes()).lanes == ["late", "root", "then"]
