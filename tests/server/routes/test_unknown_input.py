"""What the reference keeps to its library, or lacks: bulk, graphs, reads, explanations."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.engine.types import FreshWaitpoint, OperatorOnly, SuspendArgs
from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.ids import FlowId, flow_partition
from tests.server.asking import Asking, fresh, path


async def test_many_are_submitted_at_once_and_each_answer_stands_for_itself(ask: Asking) -> None:
    first, bad = ask.creation(), ask.creation(tags={"NO": "x"})
    answer = await ask.post("/v1/executions/bulk", {"executions": [first, first, bad, ask.creation()]})

    created, again, refused, last = answer.json()["results"]
    assert created == {"Created": {"execution_id": first["execution_id"], "public_state": "waiting"}}
    assert again == {"Duplicate": {"execution_id": first["execution_id"]}}
    assert (refused["error"], refused["code"]) == ("invalid_tag_key: NO", "invalid_tag_key")
    assert "Created" in last


async def test_a_graph_is_created_in_one_call_and_read_back(ask: Asking) -> None:
    flow_id, _ = await ask.flow()
    graph_id = str(uuid.uuid4())
    place = flow_partition(FlowId(graph_id), ask.engine.partitions)
    a, b, c = (fresh(place) for _ in range(3))
    body = {
        "flow_id": graph_id,
        "namespace": "ns",
        "nodes": [ask.creation(one) for one in (a, b, c)],
        "edges": [{"upstream_execution_id": one, "downstream_execution_id": c} for one in (a, b)],
        "policies": {c: {"kind": "any_of", "on_satisfied": "let_run"}},
    }
    made = await ask.post("/v1/flows/graph", body)
    assert (made.status_code, made.json()["GraphCreated"]["edge_count"]) == (201, 2)
    assert (await ask.post("/v1/flows/graph", body)).json() == {"AlreadySatisfied": {"flow_id": graph_id}}

    shown = (await ask.get(f"/v1/flows/{graph_id}")).json()
    assert (shown["node_count"], shown["edge_count"], shown["edge_groups"][0]["policy"]["kind"]) == (3, 2, "any_of")
    assert sorted((await ask.get(f"/v1/flows/{graph_id}/members")).json()["members"]) == sorted([a, b, c])
    edges = (await ask.get(f"/v1/flows/{graph_id}/edges", params={"incoming": c})).json()["edges"]
    assert sorted(edge["upstream_execution_id"] for edge in edges) == sorted([a, b])
    assert (await ask.get(f"/v1/flows/{graph_id}/edges")).status_code == 400
    listed = (await ask.get(f"/v1/flows?partition={place}")).json()["flows"]
    assert graph_id in [one["flow_id"] for one in listed]
    await ask.engine.project_flow_summary(graph_id)
    assert (await ask.get(f"/v1/flows/{graph_id}/summary")).json()["total_members"] == 3
    for rest in ("", "/members", "/summary"):
        assert (await ask.get(f"/v1/flows/{uuid.uuid4()}{rest}")).json() == {"error": "not found: flow"}
    assert (await ask.get(f"/v1/flows/{flow_id}/members")).json() == {"members": []}


@pytest.mark.parametrize("route", ["flows", "executions", "suspended"])
@pytest.mark.parametrize("partition", [256, 65_535])
async def test_a_list_of_a_partition_that_does_not_exist_is_refused(ask: Asking, route: str, partition: int) -> None:
    answer = await ask.get(f"/v1/{route}?partition={partition}")

    assert answer.status_code == 400
    assert "partition" in answer.json()["error"], answer.json()


async def test_a_flow_that_nobody_has_counted_yet_is_not_said_to_be_missing(ask: Asking) -> None:
    flow_id, _ = await ask.flow(1)

    told = await ask.get(f"/v1/flows/{flow_id}/summary")

    assert (told.status_code, told.json()) == (404, {"error": "not found: flow_summary"})


async def test_a_join_is_set_before_its_edges(ask: Asking) -> None:
    flow_id, [a, b] = await ask.flow(2)
    where = f"/v1/flows/{flow_id}/joins/{b}"
    quorum = {"policy": {"kind": "quorum", "k": 1, "on_satisfied": "let_run"}}

    assert (await ask.put(where, quorum)).json() == {"status": "set"}
    assert (await ask.put(where, {"policy": {"kind": "odd"}})).status_code == 400
    await ask.connected(flow_id, a, b)


async def test_why_an_execution_does_not_run_is_explained(ask: Asking) -> None:
    execution_id = await ask.created()
    told = (await ask.get(path(execution_id, "explain"))).json()

    assert (told["obstacle"], told["facts"]["lane_id"]) == ("NoWorker", "L")
    assert "No live worker" in told["sentence"]
    assert (await ask.get(path(fresh(), "explain"))).status_code == 404


async def test_executions_are_found_by_what_is_known_of_them(ask: Asking) -> None:
    wanted = await ask.created(namespace="x", tags={"app.user": "ana"})
    await ask.created(namespace="y")
    queries: list[dict[str, Any]] = [
        {"namespace": "x"},
        {"tag": "app.user=ana"},
        {"lane": "L", "namespace": "x", "state": "waiting", "created_from": 0},
    ]
    for query in queries:
        page = (await ask.get("/v1/executions/search", params=query)).json()
        assert [one["execution_id"] for one in page["executions"]] == [wanted], query
    for bad in ({"tag": "x"}, {"state": "odd"}, {"created_from": "x"}, {"cursor": "x"}):
        assert (await ask.get("/v1/executions/search", params=bad)).status_code == 400, bad


async def test_history_is_told(ask: Asking) -> None:
    held = await ask.claimed(tags={"app.user": "ana"})
    await ask.engine.complete(held.handle)
    where = held.execution_id

    [attempt] = (await ask.get(path(where, "attempts"))).json()
    assert (attempt["attempt_index"], attempt["attempt_state"]) == (0, "ended_success")
    assert [entry["event"] for entry in (await ask.get(path(where, "leases"))).json()] == ["acquired", "released"]
    assert (await ask.get(path(where, "snapshot"))).json()["tags"] == {"app.user": "ana"}
    assert (await ask.put(path(where, "tags"), {"tags": {"app.more": "1"}})).json() == {"set": 1}
    assert (await ask.put(path(where, "tags"), {"tags": {"Bad": "1"}})).status_code == 400
    assert "L" in (await ask.get("/v1/lanes")).json()["lanes"]
    assert "create_execution" in (await ask.get("/v1/capabilities")).json()["operations"]


async def test_a_result_is_waited_for(ask: Asking) -> None:
    held = await ask.claimed()
    waiting = asyncio.create_task(ask.get(path(held.execution_id, "result") + "?wait_ms=20000"))
    ending = asyncio.create_task(ask.get(path(held.execution_id, "end") + "?wait_ms=20000"))
    await asyncio.sleep(0)
    await ask.engine.complete(held.handle, result=b"done")
    async with asyncio.timeout(5):
        assert (await waiting).content == b"done"
        assert (await ending).json()["outcome"] == "success"
    assert (await ask.get(path(await ask.created(), "end"))).status_code == 204
    assert (await ask.get(path(fresh(), "result") + "?wait_ms=10")).status_code == 404


async def test_results_of_many_are_read_together(ask: Asking) -> None:
    done, waiting = await ask.completed(b"x"), await ask.created()
    answer = await ask.post("/v1/executions/results", {"execution_ids": [done, waiting]})

    assert answer.json() == {"results": {done: "eA==", waiting: None}}


async def test_operators_resume_and_list_what_is_suspended(ask: Asking) -> None:
    held = await ask.claimed()
    await ask.engine.suspend(held.handle, _forever(await ask.engine.ping()))
    listed = (await ask.get("/v1/suspended?partition=7")).json()["entries"]
    assert [one["execution_id"] for one in listed] == [held.execution_id]
    assert (await ask.post(path(held.execution_id, "resume"), {})).json() == {"Resumed": {"public_state": "waiting"}}


def _forever(now: int) -> Any:
    return SuspendArgs(
        suspension_id=str(uuid.uuid4()),
        waitpoints=(FreshWaitpoint(str(uuid.uuid4()), "k"),),
        resume_condition=OperatorOnly(),
        reason_code="waiting_for_operator_review",
        now=now,
    )


async def test_limits_of_a_budget_are_changed(ask: Asking) -> None:
    where = await ask.budgeted(90)
    limits = {"dimensions": ["tokens"], "hard_limits": [200], "soft_limits": [0]}

    assert "Changed" in (await ask.put(f"{where}/limits", limits)).json()
    assert (await ask.get(where)).json()["hard_limits"] == {"tokens": 200}
    assert where.rpartition("/")[2] in (await ask.get("/v1/budgets")).json()["budgets"]


@pytest.mark.parametrize(
    ("source", "retryable"), [(StoreFault.TRANSPORT, True), (StoreFault.AUTH, False), (StoreFault.TIMEOUT, True)]
)
async def test_a_store_that_is_away_is_a_fault_that_tells_no_details(
    ask: Asking, engine: Engine, monkeypatch: pytest.MonkeyPatch, source: StoreFault, retryable: bool
) -> None:
    async def away(*_: object) -> int:
        raise StoreUnavailable("could not connect to postgres://user:pw@host", backend="x", source=source)

    monkeypatch.setattr(engine, "ping", away)
    answer = await ask.get("/healthz")

    assert answer.status_code == 500
    assert answer.json() == {"error": f"backend: {source.value}", "kind": source.value, "retryable": retryable}
    assert "pw@host" not in answer.text
    assert (await ask.get("/readyz")).status_code == 503


async def test_a_bug_is_a_500_without_its_story(ask: Asking, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(**_: object) -> None:
        raise ZeroDivisionError("secret story")

    monkeypatch.setattr(engine, "list_lanes", broken)
    answer = await ask.get("/v1/lanes")

    assert (answer.status_code, answer.json()) == (500, {"error": "engine: bug", "retryable": False})


@pytest.mark.parametrize("what", ["explain", "progress", "snapshot", "end", "pending-waitpoints"])
async def test_of_an_execution_that_is_not_there_nothing_is_told(ask: Asking, what: str) -> None:
    answer = await ask.get(path(fresh(), what))

    assert answer.status_code == 404
    assert "not found" in answer.json()["error"]
