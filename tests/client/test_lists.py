"""Reads for people give the same answers through a server as on a store."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from flowfabric import errors
from flowfabric.client import RemoteEngine
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import GraphEdge
from flowfabric.engine.types import CreateExecution
from flowfabric.ids import FlowId, mint_for_flow
from flowfabric.server import ServerSettings, create_app
from flowfabric.settings import Secret
from tests.executions import claim_one

NOBODY = "{fp:7}:550e8400-e29b-41d4-a716-446655440000"


def create_request(engine: Engine, **fields: Any) -> CreateExecution:
    given: dict[str, Any] = {
        "execution_id": engine.new_execution_id(),
        "partition": 0,
        "namespace": "default",
        "lane_id": "default",
        "execution_kind": "k",
        "input_payload": b"",
    }
    return CreateExecution(**given | fields)


@pytest.fixture
async def remote(engine: Engine) -> Any:
    async with RemoteEngine("http://ff", transport=httpx2.ASGITransport(app=create_app(engine))) as remote:
        yield remote


async def test_a_search_is_the_same_with_every_filter(engine: Engine, remote: RemoteEngine) -> None:
    parent = create_request(engine, execution_kind="mail", tags={"app.q": "a=b, ü"}, namespace="n1")
    await engine.create(parent)
    await engine.create(create_request(engine, execution_kind="sub", parent_id=parent.execution_id, namespace="n2"))

    filters: list[dict[str, Any]] = [
        *({}, {"limit": 1}, {"namespace": "n1"}, {"kind": "mail"}, {"public_state": "waiting"}),
        *({"public_state": ("waiting", "failed")}, {"lane_id": "default"}, {"tag": ("app.q", "a=b, ü")}),
        *({"parent_id": parent.execution_id}, {"worker_instance_id": "w"}, {"error": "x"}),
        {"created_from": 5, "created_before": 2**45},
    ]
    for given in filters:
        assert await remote.search_executions(**given) == await engine.search_executions(**given)
    first = await remote.search_executions(limit=1)
    rest = await remote.search_executions(limit=1, cursor=first.next_cursor)
    # Runs of one millisecond are in the order of their identifiers, so the order is asked of the engine.
    assert [*first.executions, *rest.executions] == (await engine.search_executions()).executions
    assert await remote.list_children(parent.execution_id) == await engine.list_children(parent.execution_id)
    assert len((await remote.list_children(parent.execution_id)).executions) == 1


async def test_input_and_explanation_are_the_same(engine: Engine, remote: RemoteEngine) -> None:
    request = create_request(
        engine, execution_kind="mail", input_payload=b"\x00\xff", policy={"max_replay_count": 3}, creator_identity="me"
    )
    await engine.create(request)

    found = await remote.read_input(request.execution_id)

    assert found == await engine.read_input(request.execution_id)
    assert (found.payload, found.policy, found.creator_identity) == (b"\x00\xff", {"max_replay_count": 3}, "me")
    assert await remote.explain(request.execution_id) == await engine.explain(request.execution_id)
    with pytest.raises(errors.NotFound):
        await remote.read_input(NOBODY)


async def test_a_graph_is_the_same(engine: Engine, remote: RemoteEngine) -> None:
    flow = FlowId(engine.minter.uuid())
    a, b, c = (mint_for_flow(flow, engine.partitions, engine.minter) for _ in range(3))
    nodes = [create_request(engine, execution_id=node, execution_kind=f"k-{node[-1]}") for node in (a, b, c)]
    await engine.create_flow_graph(flow, nodes, [GraphEdge(a, c), GraphEdge(b, c)])

    graph = await remote.read_flow_graph(flow)

    assert graph == await engine.read_flow_graph(flow)
    places = {node.execution_id: place for place, node in enumerate(graph.nodes)}
    assert {(edge.upstream, edge.downstream) for edge in graph.edges} == {
        (places[a], places[c]),
        (places[b], places[c]),
    }
    assert graph.nodes[places[a]].execution_kind == f"k-{a[-1]}"
    with pytest.raises(errors.NotFound):
        await remote.read_flow_graph(engine.minter.uuid())
    assert await remote.list_approvals() == await engine.list_approvals()


async def test_whoami_describes_the_token(engine: Engine) -> None:
    app = create_app(engine, ServerSettings(api_token=Secret("s3cret")))
    made = await engine.make_api_token("ana", ["read", "submit"], namespaces=["n2", "n1"])
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://ff") as http:

        async def ask(token: str) -> Any:
            return await http.get("/v1/whoami", headers={"Authorization": f"Bearer {token}"})

        bound, root = (await ask(made.token)).json(), (await ask("s3cret")).json()
        assert bound == {"name": f"ana ({made.token_id})", "scopes": ["read", "submit"], "namespaces": ["n1", "n2"]}
        assert (root["name"], root["namespaces"]) == ("root", None)
        assert (await ask("wrong")).status_code == 401


async def test_reads_across_executions_are_the_same(engine: Engine, remote: RemoteEngine) -> None:
    budget, quota = engine.minter.uuid(), engine.minter.uuid()
    await engine.create_budget(budget, dimensions=["usd"], hard_limits=[99], soft_limits=[0])
    await engine.create_quota_policy(quota, window_seconds=1, max_requests_per_window=1, max_concurrent=1)
    await engine.create_flow(engine.minter.uuid())
    request = create_request(engine)
    await engine.create(request)
    await engine.record_spend(budget, request.execution_id, {"usd": 3})
    await claim_one(engine)
    await engine.register_worker(
        namespace="n1", worker_instance_id="w-1", worker_id="w", lanes=["default"], liveness_ttl_ms=60_000
    )

    levels = await remote.read_levels()
    assert levels.lanes == (await engine.read_levels()).lanes
    assert await remote.list_worker_executions("w-1") == await engine.list_worker_executions("w-1")
    assert len((await remote.list_worker_executions("w-1")).executions) == 1
    assert await remote.read_spending(request.execution_id) == await engine.read_spending(request.execution_id)
    assert await remote.list_spenders(budget) == await engine.list_spenders(budget)
    assert await remote.list_quotas() == await engine.list_quotas()
    assert await remote.list_events() == await engine.list_events()
    assert await remote.list_events(topics=["lease"], limit=1) == await engine.list_events(topics=["lease"], limit=1)
    assert await remote.search_flows() == await engine.search_flows()
    assert await remote.list_workers(all_namespaces=True) == await engine.list_workers(all_namespaces=True)
    assert await remote.list_worker_events("n1", "w-1") == await engine.list_worker_events("n1", "w-1")


async def test_a_bulk_operation_is_started_followed_and_cancelled_through_a_server(
    engine: Engine, remote: RemoteEngine
) -> None:
    for _ in range(3):
        await engine.create(create_request(engine, execution_kind="mail", tags={"app.q": "x"}))

    preview = await remote.preview_operation("cancel", {"kind": "mail", "tag": ("app.q", "x")})
    assert preview == await engine.preview_operation("cancel", {"kind": "mail", "tag": ("app.q", "x")})
    started = await remote.start_operation("cancel", {"kind": "mail"}, reason="why", ceiling=2)
    await engine.sweep_once("bulk_operations")
    done = await remote.read_operation(started.operation_id)
    stopped = await remote.cancel_operation(started.operation_id)

    assert (preview.count, started.requested_by, done.changed) == (3, "anybody", 2)
    assert stopped == done == await engine.read_operation(started.operation_id)
    assert await remote.list_operations() == await engine.list_operations()
    with pytest.raises(errors.NotFound):
        await remote.read_operation(engine.minter.uuid())


async def test_a_bound_token_acts_within_its_namespaces_only(engine: Engine) -> None:
    app = create_app(engine, ServerSettings(api_token=Secret("s3cret")))
    own, other = create_request(engine, namespace="n1"), create_request(engine, namespace="n2")
    for request in (own, other):
        await engine.create(request)
    bound = (await engine.make_api_token("ana", ["read", "operate"], namespaces=["n1"])).token
    wire = httpx2.ASGITransport(app=app)
    async with RemoteEngine("http://ff", token=Secret(bound), transport=wire) as remote:
        started = await remote.start_operation("cancel", {"lane_id": "default"}, reason="x")
        foreign = await engine.start_operation("cancel", {"lane_id": "other"}, reason="x")
        await engine.sweep_once("bulk_operations")

        assert (await remote.read_operation(started.operation_id)).changed == 1
        assert [one.execution_id for one in (await remote.search_executions()).executions] == [own.execution_id]
        assert [one.operation_id for one in (await remote.list_operations()).operations] == [started.operation_id]
        with pytest.raises(errors.NotFound):
            await remote.read_operation(foreign.operation_id)
        with pytest.raises(errors.NotFound):
            await remote.read_input(other.execution_id)
    assert str(await engine.read_execution_state(other.execution_id)) == "waiting"
