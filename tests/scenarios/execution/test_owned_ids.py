"""An id that exists in another namespace is a conflict, and the error reveals nothing about it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import CreateExecution, errors
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.model.answers import execution as answers
from flowfabric.model.answers import flow as flow_answers
from tests.scenarios.env import Env
from tests.scenarios.flow_env import FlowEnv


def create_request(execution_id: str, namespace: str, **options: Any) -> CreateExecution:
    defaults: dict[str, Any] = {"partition": 0, "lane_id": "default", "execution_kind": "task"}
    return CreateExecution(execution_id=execution_id, namespace=namespace, **(defaults | options))


async def test_creating_an_execution_whose_id_exists_in_another_namespace_is_a_conflict(env: Env) -> None:
    existing = await env.create(namespace="theirs", tags={"app.owner": "them"})

    with pytest.raises(errors.IdInOtherNamespace) as refused:
        await env.engine.create(create_request(existing, "mine"))

    assert refused.value == errors.IdInOtherNamespace(execution_id=existing), (
        "the error reveals nothing about the other row"
    )
    assert await env.engine.create(create_request(existing, "theirs")) == answers.Duplicate(existing)
    assert await env.engine.get_execution_namespace(existing) == "theirs"


async def test_one_of_two_namespaces_that_create_an_id_concurrently_owns_it(env: Env) -> None:
    execution_id = env.engine.new_execution_id("default")
    results = await asyncio.gather(
        *(env.engine.create(create_request(execution_id, name)) for name in ("mine", "theirs") * 5),
        return_exceptions=True,
    )

    owner = await env.engine.get_execution_namespace(execution_id)
    for name, answer in zip(("mine", "theirs") * 5, results, strict=True):
        assert isinstance(answer, answers.Created | answers.Duplicate if name == owner else errors.IdInOtherNamespace)


@pytest.mark.parametrize("count", [1, 40])
async def test_a_bulk_create_refuses_ids_of_other_namespaces_and_creates_the_rest(env: Env, count: int) -> None:
    existing = [await env.create(namespace="theirs") for _ in range(2)]
    fresh = [env.engine.new_execution_id("default") for _ in range(count)]

    results = await env.engine.create_executions(
        [create_request(one, "mine") for one in (existing[0], *fresh, existing[1])]
    )

    assert [type(one) for one in results[1:-1]] == [answers.Created] * count
    assert [results[0], results[-1]] == [errors.IdInOtherNamespace(execution_id=one) for one in existing]


async def test_an_idempotency_key_matches_within_its_own_namespace_only(env: Env) -> None:
    mine = await env.create(namespace="mine", idempotency_key="k")
    existing = await env.create(namespace="theirs", idempotency_key="k")

    again = await env.engine.create(create_request(existing, "mine", idempotency_key="k"))

    assert again == answers.Duplicate(mine)


async def test_creating_a_flow_whose_id_exists_in_another_namespace_is_a_conflict(flow: FlowEnv) -> None:
    await flow.engine.create_flow(flow.id, namespace="theirs", flow_kind="secret")

    with pytest.raises(errors.IdInOtherNamespace) as refused:
        await flow.engine.create_flow(flow.id, namespace="mine")

    assert refused.value == errors.IdInOtherNamespace(flow_id=flow.id)
    again = await flow.engine.create_flow(flow.id, namespace="theirs")
    assert again == flow_answers.FlowExists(flow.id)


async def test_creating_a_graph_whose_flow_id_exists_in_another_namespace_is_a_conflict(flow: FlowEnv) -> None:
    nodes = [create_request(flow.new_id(), "theirs") for _ in range(2)]
    edges = [GraphEdge(nodes[0].execution_id, nodes[1].execution_id)]
    await flow.engine.create_flow_graph(flow.id, nodes, edges, namespace="theirs")
    mine = [create_request(node.execution_id, "mine") for node in nodes]

    with pytest.raises(errors.IdInOtherNamespace) as refused:
        await flow.engine.create_flow_graph(flow.id, mine, edges, namespace="mine")

    assert refused.value == errors.IdInOtherNamespace(flow_id=flow.id)
    again = await flow.engine.create_flow_graph(flow.id, nodes, edges, namespace="theirs")
    assert again == flow_answers.FlowExists(flow.id)


async def test_a_graph_with_a_node_of_another_namespace_creates_nothing(flow: FlowEnv) -> None:
    other = FlowEnv(flow.engine, flow.clock)
    other.id = flow.id  # on the same partition
    existing = await other.create("x", namespace="theirs")
    fresh = flow.new_id()

    with pytest.raises(errors.IdInOtherNamespace) as refused:
        await flow.engine.create_flow_graph(
            flow.id, [create_request(fresh, "mine"), create_request(existing, "mine")], namespace="mine"
        )

    assert refused.value == errors.IdInOtherNamespace(execution_id=existing)
    assert await flow.engine.describe_flow(flow.id) is None
    assert await flow.engine.describe_execution(fresh) is None


async def test_an_execution_of_another_namespace_cannot_join_a_flow(flow: FlowEnv) -> None:
    await flow.engine.create_flow(flow.id, namespace="mine")
    theirs = await flow.create("x", namespace="theirs")

    with pytest.raises(errors.IdInOtherNamespace) as refused:
        await flow.engine.add_execution_to_flow(flow.id, theirs)

    assert refused.value == errors.IdInOtherNamespace(execution_id=theirs)
    assert await flow.engine.list_flow_members(flow.id) == []


async def test_read_results_refuses_executions_of_another_namespace(env: Env) -> None:
    mine, theirs = [await env.create(namespace=name, lane=name) for name in ("mine", "theirs")]

    assert await env.engine.read_results([mine], namespace="mine") == {mine: None}
    assert await env.engine.read_results([mine, theirs]) == {mine: None, theirs: None}
    with pytest.raises(errors.IdInOtherNamespace):
        await env.engine.read_results([mine, theirs], namespace="mine")
