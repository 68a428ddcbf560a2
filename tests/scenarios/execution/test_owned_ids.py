"""An id that exists in another namespace is a conflict: it is never taken for one's own, and nothing of it is shown."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import CreateExecution, errors
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.model.answers import execution as answers
from flowfabric.model.answers import flow as flow_answers
from tests.scenarios.flowing import Flowing
from tests.scenarios.play import Play


def ask(execution_id: str, namespace: str, **given: Any) -> CreateExecution:
    defaults: dict[str, Any] = {"partition": 0, "lane_id": "default", "execution_kind": "task"}
    return CreateExecution(execution_id=execution_id, namespace=namespace, **(defaults | given))


async def test_creating_an_execution_whose_id_exists_in_another_namespace_is_a_conflict(play: Play) -> None:
    taken = await play.create(namespace="theirs", tags={"app.owner": "them"})

    with pytest.raises(errors.IdInOtherNamespace) as refused:
        await play.engine.create(ask(taken, "mine"))

    assert refused.value == errors.IdInOtherNamespace(execution_id=taken), "nothing of the other row is told"
    assert await play.engine.create(ask(taken, "theirs")) == answers.Duplicate(taken)
    assert await play.engine.get_execution_namespace(taken) == "theirs"


async def test_of_two_namespaces_that_create_one_id_at_once_one_gets_it(play: Play) -> None:
    wanted = play.engine.new_execution_id("default")
    made = await asyncio.gather(
        *(play.engine.create(ask(wanted, name)) for name in ("mine", "theirs") * 5), return_exceptions=True
    )

    owner = await play.engine.get_execution_namespace(wanted)
    for name, answer in zip(("mine", "theirs") * 5, made, strict=True):
        assert isinstance(answer, answers.Created | answers.Duplicate if name == owner else errors.IdInOtherNamespace)


@pytest.mark.parametrize("count", [1, 40])
async def test_a_bulk_create_refuses_the_ids_of_others_and_creates_the_rest(play: Play, count: int) -> None:
    taken = [await play.create(namespace="theirs") for _ in range(2)]
    fresh = [play.engine.new_execution_id("default") for _ in range(count)]

    made = await play.engine.create_executions([ask(one, "mine") for one in (taken[0], *fresh, taken[1])])

    assert [type(one) for one in made[1:-1]] == [answers.Created] * count
    assert [made[0], made[-1]] == [errors.IdInOtherNamespace(execution_id=one) for one in taken]


async def test_a_key_of_its_own_namespace_still_stands_for_an_execution(play: Play) -> None:
    mine = await play.create(namespace="mine", idempotency_key="k")
    taken = await play.create(namespace="theirs", idempotency_key="k")

    again = await play.engine.create(ask(taken, "mine", idempotency_key="k"))

    assert again == answers.Duplicate(mine)


async def test_creating_a_flow_whose_id_exists_in_another_namespace_is_a_conflict(flow: Flowing) -> None:
    await flow.engine.create_flow(flow.id, namespace="theirs", flow_kind="secret")

    with pytest.raises(errors.IdInOtherNamespace) as refused:
        await flow.engine.create_flow(flow.id, namespace="mine")

    assert refused.value == errors.IdInOtherNamespace(flow_id=flow.id)
    again = await flow.engine.create_flow(flow.id, namespace="theirs")
    assert again == flow_answers.FlowExists(flow.id)


async def test_a_graph_is_not_satisfied_by_a_flow_of_another_namespace(flow: Flowing) -> None:
    nodes = [ask(flow.new_id(), "theirs") for _ in range(2)]
    edges = [GraphEdge(nodes[0].execution_id, nodes[1].execution_id)]
    await flow.engine.create_flow_graph(flow.id, nodes, edges, namespace="theirs")
    mine = [ask(node.execution_id, "mine") for node in nodes]

    with pytest.raises(errors.IdInOtherNamespace) as refused:
        await flow.engine.create_flow_graph(flow.id, mine, edges, namespace="mine")

    assert refused.value == errors.IdInOtherNamespace(flow_id=flow.id)
    again = await flow.engine.create_flow_graph(flow.id, nodes, edges, namespace="theirs")
    assert again == flow_answers.FlowExists(flow.id)


async def test_a_graph_whose_node_exists_in_another_namespace_is_refused_whole(flow: Flowing) -> None:
    other = Flowing(flow.engine, flow.clock)
    other.id = flow.id  # on the same partition
    taken = await other.create("x", namespace="theirs")
    fresh = flow.new_id()

    with pytest.raises(errors.IdInOtherNamespace) as refused:
        await flow.engine.create_flow_graph(flow.id, [ask(fresh, "mine"), ask(taken, "mine")], namespace="mine")

    assert refused.value == errors.IdInOtherNamespace(execution_id=taken)
    assert await flow.engine.describe_flow(flow.id) is None
    assert await flow.engine.describe_execution(fresh) is None


async def test_an_execution_of_another_namespace_does_not_become_a_member(flow: Flowing) -> None:
    await flow.engine.create_flow(flow.id, namespace="mine")
    theirs = await flow.create("x", namespace="theirs")

    with pytest.raises(errors.IdInOtherNamespace) as refused:
        await flow.engine.add_execution_to_flow(flow.id, theirs)

    assert refused.value == errors.IdInOtherNamespace(execution_id=theirs)
    assert await flow.engine.list_flow_members(flow.id) == []


async def test_results_are_read_of_the_namespace_that_is_named_only(play: Play) -> None:
    mine, theirs = [await play.create(namespace=name, lane=name) for name in ("mine", "theirs")]

    assert await play.engine.read_results([mine], namespace="mine") == {mine: None}
    assert await play.engine.read_results([mine, theirs]) == {mine: None, theirs: None}
    with pytest.raises(errors.IdInOtherNamespace):
        await play.engine.read_results([mine, theirs], namespace="mine")
