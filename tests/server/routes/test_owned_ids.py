"""Ids that exist in another namespace, over HTTP: a conflict that reveals nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from tests.server.api_client import NOW, ApiClient, new_execution_id
from tests.server.test_auth import create_token


@pytest.fixture
def api(engine: Engine) -> ApiClient:
    return ApiClient.with_root_token(engine)


def is_conflict(reply: Any) -> bool:
    """True if a response says that the id is in use, and nothing else."""
    expected = {"error": "id_in_other_namespace: IdInOtherNamespace", "kind": "id_in_other_namespace"}
    return bool(reply.status_code == 409 and reply.json() == expected | {"retryable": False})


async def test_an_execution_id_of_another_namespace_is_a_conflict_for_every_token(api: ApiClient) -> None:
    taken = await api.create(namespace="b", tags={"app.secret": "yes"})
    body = api.create_body(taken, namespace="a")

    assert is_conflict(await api.post("/v1/executions", body))
    bound = await create_token(api, "submit", namespaces=["a"])
    assert is_conflict(await api.post("/v1/executions", body, headers=bound))
    bulk = await api.post("/v1/executions/bulk", {"executions": [body, api.create_body(namespace="a")]}, headers=bound)
    refused, made = bulk.json()["results"]
    assert (refused["code"], refused["facts"]) == ("id_in_other_namespace", {"execution_id": taken})
    assert "Created" in made
    assert (await api.post("/v1/executions", body | {"namespace": "b"})).status_code == 200


async def test_a_flow_id_of_another_namespace_is_a_conflict_for_every_token(api: ApiClient) -> None:
    flow_id, _ = await api.create_flow(namespace="b")
    bound = await create_token(api, "submit", namespaces=["a"])
    single = {"flow_id": flow_id, "flow_kind": "dag", "namespace": "a", "now": NOW}
    graph = {"flow_id": flow_id, "nodes": [], "namespace": "a"}

    for headers in (bound, {}):
        assert is_conflict(await api.post("/v1/flows", single, headers=headers))
        assert is_conflict(await api.post("/v1/flows/graph", graph, headers=headers))
    assert (await api.post("/v1/flows", single | {"namespace": "b"})).status_code == 200


async def test_an_unbound_token_does_not_mix_namespaces_in_a_flow(api: ApiClient) -> None:
    flow_id, [member] = await api.create_flow(members=1, namespace="b")
    theirs = await api.create(
        namespace="a", execution_id=new_execution_id(int(member.partition(":")[2].partition("}")[0]))
    )

    body = {"flow_id": flow_id, "execution_id": theirs, "now": NOW}
    assert is_conflict(await api.post(f"/v1/flows/{flow_id}/members", body))


async def test_results_can_be_read_within_one_namespace(api: ApiClient) -> None:
    mine, theirs = await api.create_completed(b"1", namespace="a"), await api.create_completed(b"2", namespace="b")
    url, body = "/v1/executions/results", {"execution_ids": [mine], "namespace": "a"}

    assert set((await api.post(url, body)).json()["results"]) == {mine}
    assert is_conflict(await api.post(url, body | {"execution_ids": [mine, theirs]}))
    ended = (await api.post("/v1/executions/ends", {"execution_ids": [mine]})).json()["ended"]
    assert [one["namespace"] for one in ended] == ["a"]
