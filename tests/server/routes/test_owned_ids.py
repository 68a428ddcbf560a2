"""Ids that exist in another namespace, over HTTP: a conflict without a word about what is there."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.server import ServerSettings
from flowfabric.settings import Secret
from tests.server.asking import NOW, Asking, fresh
from tests.server.test_auth import token


@pytest.fixture
def ask(engine: Engine) -> Asking:
    return Asking(engine, ServerSettings(api_token=Secret("s3cret")), Authorization="Bearer s3cret")


def is_conflict(told: Any) -> bool:
    """Whether an answer says that the id is taken, and nothing else."""
    expected = {"error": "id_in_other_namespace: IdInOtherNamespace", "kind": "id_in_other_namespace"}
    return bool(told.status_code == 409 and told.json() == expected | {"retryable": False})


async def test_an_execution_id_of_another_namespace_is_a_conflict_for_every_token(ask: Asking) -> None:
    taken = await ask.created(namespace="b", tags={"app.secret": "yes"})
    body = ask.creation(taken, namespace="a")

    assert is_conflict(await ask.post("/v1/executions", body))
    bound = await token(ask, "submit", namespaces=["a"])
    assert is_conflict(await ask.post("/v1/executions", body, headers=bound))
    bulk = await ask.post("/v1/executions/bulk", {"executions": [body, ask.creation(namespace="a")]}, headers=bound)
    refused, made = bulk.json()["results"]
    assert (refused["code"], refused["facts"]) == ("id_in_other_namespace", {"execution_id": taken})
    assert "Created" in made
    assert (await ask.post("/v1/executions", body | {"namespace": "b"})).status_code == 200


async def test_a_flow_id_of_another_namespace_is_a_conflict_for_every_token(ask: Asking) -> None:
    flow_id, _ = await ask.flow(namespace="b")
    bound = await token(ask, "submit", namespaces=["a"])
    single = {"flow_id": flow_id, "flow_kind": "dag", "namespace": "a", "now": NOW}
    graph = {"flow_id": flow_id, "nodes": [], "namespace": "a"}

    for headers in (bound, {}):
        assert is_conflict(await ask.post("/v1/flows", single, headers=headers))
        assert is_conflict(await ask.post("/v1/flows/graph", graph, headers=headers))
    assert (await ask.post("/v1/flows", single | {"namespace": "b"})).status_code == 200


async def test_an_unbound_token_does_not_mix_namespaces_in_a_flow(ask: Asking) -> None:
    flow_id, [member] = await ask.flow(members=1, namespace="b")
    theirs = await ask.created(namespace="a", execution_id=fresh(int(member.partition(":")[2].partition("}")[0])))

    body = {"flow_id": flow_id, "execution_id": theirs, "now": NOW}
    assert is_conflict(await ask.post(f"/v1/flows/{flow_id}/members", body))


async def test_results_can_be_asked_for_in_one_namespace(ask: Asking) -> None:
    mine, theirs = await ask.completed(b"1", namespace="a"), await ask.completed(b"2", namespace="b")
    where, body = "/v1/executions/results", {"execution_ids": [mine], "namespace": "a"}

    assert set((await ask.post(where, body)).json()["results"]) == {mine}
    assert is_conflict(await ask.post(where, body | {"execution_ids": [mine, theirs]}))
    ended = (await ask.post("/v1/executions/ends", {"execution_ids": [mine]})).json()["ended"]
    assert [one["namespace"] for one in ended] == ["a"]
