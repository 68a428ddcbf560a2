"""Routes beyond the reference system: bulk creates, graphs, reads, explanations."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.engine.types import OperatorOnly
from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.ids import FlowId, flow_partition
from tests.executions import suspend_args
from tests.server.api_client import ApiClient, new_execution_id, path


async def test_a_bulk_create_has_one_result_per_execution(api: ApiClient) -> None:
    first, bad = api.create_body(), api.create_body(tags={"NO": "x"})
    answer = await api.post("/v1/executions/bulk", {"executions": [first, first, bad, api.create_body()]})

    created, again, refused, last = answer.json()["results"]
    assert created == {"Created": {"execution_id": first["execution_id"], "public_state": "waiting"}}
    assert again == {"Duplicate": {"execution_id": first["execution_id"]}}
    assert (refused["error"], refused["code"]) == ("invalid_tag_key: NO", "invalid_tag_key")
    assert "Created" in last


async def test_a_graph_is_created_in_one_call_and_read_back(api: ApiClient) -> None:
    flow_id, _ = await api.create_flow()
    graph_id = str(uuid.uuid4())
    partition = flow_partition(FlowId(graph_id), api.engine.partitions)
    a, b, c = (new_execution_id(partition) for _ in range(3))
    body = {
        "flow_id": graph_id,
        "namespace": "ns",
        "nodes": [api.create_body(one) for one in (a, b, c)],
        "edges": [{"upstream_execution_id": one, "downstream_execution_id": c} for one in (a, b)],
        "policies": {c: {"kind": "any_of", "on_satisfied": "let_run"}},
    }
    made = await api.post("/v1/flows/graph", body)
    assert (made.status_code, made.json()["GraphCreated"]["edge_count"]) == (201, 2)
    assert (await api.post("/v1/flows/graph", body)).json() == {"AlreadySatisfied": {"flow_id": graph_id}}

    shown = (await api.get(f"/v1/flows/{graph_id}")).json()
    assert (shown["node_count"], shown["edge_count"], shown["edge_groups"][0]["policy"]["kind"]) == (3, 2, "any_of")
    assert sorted((await api.get(f"/v1/flows/{graph_id}/members")).json()["members"]) == sorted([a, b, c])
    edges = (await api.get(f"/v1/flows/{graph_id}/edges", params={"incoming": c})).json()["edges"]
    assert sorted(edge["upstream_execution_id"] for edge in edges) == sorted([a, b])
    assert (await api.get(f"/v1/flows/{graph_id}/edges")).status_code == 400
    listed = (await api.get(f"/v1/flows?partition={partition}")).json()["flows"]
    assert graph_id in [one["flow_id"] for one in listed]
    await api.engine.project_flow_summary(graph_id)
    assert (await api.get(f"/v1/flows/{graph_id}/summary")).json()["total_members"] == 3
    for rest in ("", "/members", "/summary"):
        assert (await api.get(f"/v1/flows/{uuid.uuid4()}{rest}")).json() == {"error": "not found: flow"}
    assert (await api.get(f"/v1/flows/{flow_id}/members")).json() == {"members": []}


@pytest.mark.parametrize("route", ["flows", "executions", "suspended"])
@pytest.mark.parametrize("partition", [256, 65_535])
async def test_a_list_of_a_partition_that_does_not_exist_is_refused(api: ApiClient, route: str, partition: int) -> None:
    answer = await api.get(f"/v1/{route}?partition={partition}")

    assert answer.status_code == 400
    assert "partition" in answer.json()["error"], answer.json()


async def test_a_flow_without_a_summary_is_reported_as_such(api: ApiClient) -> None:
    flow_id, _ = await api.create_flow(1)

    assert await api.get_json(f"/v1/flows/{flow_id}/summary") == (404, {"error": "not found: flow_summary"})


async def test_a_join_is_set_before_its_edges(api: ApiClient) -> None:
    flow_id, [a, b] = await api.create_flow(2)
    url = f"/v1/flows/{flow_id}/joins/{b}"
    quorum = {"policy": {"kind": "quorum", "k": 1, "on_satisfied": "let_run"}}

    assert (await api.put(url, quorum)).json() == {"status": "set"}
    assert (await api.put(url, {"policy": {"kind": "odd"}})).status_code == 400
    await api.apply_edge(flow_id, a, b)


async def test_explain_returns_the_obstacle_of_an_execution(api: ApiClient) -> None:
    execution_id = await api.create()
    reply = (await api.get(path(execution_id, "explain"))).json()

    assert (reply["obstacle"], reply["facts"]["lane_id"]) == ("NoWorker", "L")
    assert "No live worker" in reply["sentence"]
    assert (await api.get(path(new_execution_id(), "explain"))).status_code == 404


async def test_executions_are_searched_by_namespace_tag_lane_and_state(api: ApiClient) -> None:
    wanted = await api.create(namespace="x", tags={"app.user": "ana"})
    await api.create(namespace="y")
    queries: list[dict[str, Any]] = [
        {"namespace": "x"},
        {"tag": "app.user=ana"},
        {"lane": "L", "namespace": "x", "state": "waiting", "created_from": 0},
    ]
    for query in queries:
        page = (await api.get("/v1/executions/search", params=query)).json()
        assert [one["execution_id"] for one in page["executions"]] == [wanted], query
    for bad in ({"tag": "x"}, {"state": "odd"}, {"created_from": "x"}, {"cursor": "x"}):
        assert (await api.get("/v1/executions/search", params=bad)).status_code == 400, bad


async def test_attempts_leases_and_tags_can_be_read(api: ApiClient) -> None:
    held = await api.create_claimed(tags={"app.user": "ana"})
    await api.engine.complete(held.handle)
    url = held.execution_id

    [attempt] = (await api.get(path(url, "attempts"))).json()
    assert (attempt["attempt_index"], attempt["attempt_state"]) == (0, "ended_success")
    assert [entry["event"] for entry in (await api.get(path(url, "leases"))).json()] == ["acquired", "released"]
    assert (await api.get(path(url, "snapshot"))).json()["tags"] == {"app.user": "ana"}
    assert (await api.put(path(url, "tags"), {"tags": {"app.more": "1"}})).json() == {"set": 1}
    assert (await api.put(path(url, "tags"), {"tags": {"Bad": "1"}})).status_code == 400
    assert "L" in (await api.get("/v1/lanes")).json()["lanes"]
    assert "create_execution" in (await api.get("/v1/capabilities")).json()["operations"]


async def test_a_request_can_wait_for_the_result(api: ApiClient) -> None:
    held = await api.create_claimed()
    waiting = asyncio.create_task(api.get(path(held.execution_id, "result") + "?wait_ms=20000"))
    ending = asyncio.create_task(api.get(path(held.execution_id, "end") + "?wait_ms=20000"))
    await asyncio.sleep(0)
    await api.engine.complete(held.handle, result=b"done")
    async with asyncio.timeout(5):
        assert (await waiting).content == b"done"
        assert (await ending).json()["outcome"] == "success"
    assert (await api.get(path(await api.create(), "end"))).status_code == 204
    assert (await api.get(path(new_execution_id(), "result") + "?wait_ms=10")).status_code == 404


async def test_results_of_many_executions_are_read_in_one_request(api: ApiClient) -> None:
    done, waiting = await api.create_completed(b"x"), await api.create()
    answer = await api.post("/v1/executions/results", {"execution_ids": [done, waiting]})

    assert answer.json() == {"results": {done: "eA==", waiting: None}}


async def test_operators_list_and_resume_suspended_executions(api: ApiClient) -> None:
    held = await api.create_claimed()
    await api.engine.suspend(held.handle, suspend_args(await api.engine.ping(), OperatorOnly()))
    listed = (await api.get("/v1/suspended?partition=7")).json()["entries"]
    assert [one["execution_id"] for one in listed] == [held.execution_id]
    assert (await api.post(path(held.execution_id, "resume"), {})).json() == {"Resumed": {"public_state": "waiting"}}


async def test_the_limits_of_a_budget_can_be_changed(api: ApiClient) -> None:
    url = await api.create_budget(90)
    limits = {"dimensions": ["tokens"], "hard_limits": [200], "soft_limits": [0]}

    assert "Changed" in (await api.put(f"{url}/limits", limits)).json()
    assert (await api.get(url)).json()["hard_limits"] == {"tokens": 200}
    assert url.rpartition("/")[2] in (await api.get("/v1/budgets")).json()["budgets"]


@pytest.mark.parametrize(
    ("source", "retryable"), [(StoreFault.TRANSPORT, True), (StoreFault.AUTH, False), (StoreFault.TIMEOUT, True)]
)
async def test_an_unavailable_store_is_reported_without_details(
    api: ApiClient, engine: Engine, monkeypatch: pytest.MonkeyPatch, source: StoreFault, retryable: bool
) -> None:
    async def unavailable(*_: object) -> int:
        raise StoreUnavailable("could not connect to postgres://user:pw@host", backend="x", source=source)

    monkeypatch.setattr(engine, "ping", unavailable)
    answer = await api.get("/healthz")

    assert answer.status_code == 500
    assert answer.json() == {"error": f"backend: {source.value}", "kind": source.value, "retryable": retryable}
    assert "pw@host" not in answer.text
    assert (await api.get("/readyz")).status_code == 503


async def test_an_unexpected_error_is_a_500_without_details(
    api: ApiClient, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(**_: object) -> None:
        raise ZeroDivisionError("secret details")

    monkeypatch.setattr(engine, "list_lanes", broken)
    assert await api.get_json("/v1/lanes") == (500, {"error": "engine: bug", "retryable": False})


@pytest.mark.parametrize("what", ["explain", "progress", "snapshot", "end", "pending-waitpoints"])
async def test_reads_of_an_unknown_execution_are_not_found(api: ApiClient, what: str) -> None:
    answer = await api.get(path(new_execution_id(), what))

    assert answer.status_code == 404
    assert "not found" in answer.json()["error"]
