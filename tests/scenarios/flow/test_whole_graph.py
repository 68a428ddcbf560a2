"""The whole graph of a flow in one call: nodes with states, edges and joins."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.model.flow import DependencyKind, FlowState, GroupState, JoinPolicyKind
from flowfabric.rules.flow.views import GraphJoin, GraphLink
from tests.scenarios.flow_env import FlowEnv


async def test_the_graph_shows_members_edges_joins_and_states(flow: FlowEnv) -> None:
    await flow.begin("abcz", ["ac", "bc"], execution_kind="work")
    await flow.succeed_and_cascade("a")

    graph = await flow.engine.read_flow_graph(flow.id)

    assert (graph.flow_id, graph.namespace, graph.public_flow_state) == (flow.id, "default", FlowState.OPEN)
    place = {node.execution_id: number for number, node in enumerate(graph.nodes)}
    a, b, c, z = (place[flow.names[name]] for name in "abcz")
    states = [str(graph.nodes[number].public_state) for number in (a, b, c, z)]
    assert states == ["completed", "waiting", "waiting_children", "waiting"]
    assert {node.execution_kind for node in graph.nodes} == {"work"}
    edges = sorted((edge.upstream, edge.downstream, edge.dependency_kind) for edge in graph.edges)
    assert edges == sorted([(a, c, DependencyKind.SUCCESS_ONLY), (b, c, DependencyKind.SUCCESS_ONLY)])
    assert graph.joins == [GraphJoin(c, JoinPolicyKind.ALL_OF, None, 2, 1, 0, 0, GroupState.PENDING)]
    assert GraphLink(a, c, DependencyKind.SUCCESS_ONLY) in graph.edges


async def test_a_flow_that_does_not_exist_has_no_graph(flow: FlowEnv) -> None:
    with pytest.raises(errors.NotFound):
        await flow.engine.read_flow_graph(flow.id)
