"""Words for tests of the API: requests with every required field, and what has to be there before them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import quote

import httpx2
import msgspec

from flowfabric.engine.engine import Engine
from flowfabric.ids import FlowId, PartitionCounts, flow_partition
from flowfabric.model.answers.execution import Claimed
from flowfabric.server import App, ServerSettings, create_app
from flowfabric.server.lifecycle import Server

SECRET = "00112233445566778899aabbccddeeff" * 2
NOW = int(time.time() * 1000)


def fresh(partition: int = 7) -> str:
    """A fresh execution id."""
    return f"{{fp:{partition}}}:{uuid.uuid4()}"


def path(execution_id: str, *rest: object) -> str:
    """The path of an execution, its braces encoded as clients do."""
    return "/".join(("/v1/executions", quote(execution_id, safe=":"), *map(str, rest)))


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in this process."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - there is nothing to be told by
            await asyncio.sleep(0.001)


class Asking:
    """A client of one server."""

    def __init__(self, engine: Engine, settings: ServerSettings | None = None, **headers: str) -> None:
        self.engine = engine
        self.app: App = create_app(engine, settings or ServerSettings())
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    async def __call__(self, method: str, where: str, body: Any = None, **given: Any) -> httpx2.Response:
        """One request; `body` goes as JSON."""
        if body is not None:
            given["json"] = body
        given["headers"] = self.headers | given.get("headers", {})
        transport = httpx2.ASGITransport(app=self.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://ff") as client:
            return await client.request(method, where, **given)

    async def get(self, where: str, **given: Any) -> httpx2.Response:
        return await self("GET", where, **given)

    async def post(self, where: str, body: Any = None, **given: Any) -> httpx2.Response:
        return await self("POST", where, body, **given)

    async def put(self, where: str, body: Any = None, **given: Any) -> httpx2.Response:
        return await self("PUT", where, body, **given)

    # -- what has to be there -------------------------------------------------------------------------------------

    def creation(self, execution_id: str | None = None, **given: Any) -> dict[str, Any]:
        """A create with all required fields of the reference."""
        return {
            "execution_id": execution_id or fresh(),
            "namespace": "ns",
            "lane_id": "L",
            "execution_kind": "task",
            "input_payload": [104, 105],
            "priority": 0,
            "creator_identity": "test",
            "partition_id": 7,
            "now": NOW,
        } | given

    async def created(self, **given: Any) -> str:
        """The id of a new execution."""
        body = self.creation(**given)
        answer = await self.post("/v1/executions", body)
        assert answer.status_code == 201, answer.text
        return str(body["execution_id"])

    async def claimed(self, **given: Any) -> Claimed:
        """A new execution, and its holder."""
        await self.created(**given)
        claimed = await self.engine.claim("L", worker_id="w", worker_instance_id="w-1")
        assert claimed is not None
        return claimed

    async def completed(self, result: bytes | None = None, **given: Any) -> str:
        """A new execution that has ended well."""
        held = await self.claimed(**given)
        await self.engine.complete(held.handle, result=result)
        return held.execution_id

    async def state(self, execution_id: str) -> str:
        """The public word."""
        answer = await self.get(path(execution_id, "state"))
        assert answer.status_code == 200, answer.text
        return str(answer.json())

    def cancel(self, execution_id: str, reason: str = "r", **given: Any) -> dict[str, Any]:
        return {"execution_id": execution_id, "reason": reason, "now": NOW} | given

    async def flow(self, members: int = 0, **given: Any) -> tuple[str, list[str]]:
        """A new flow with so many members."""
        flow_id = str(uuid.uuid4())
        made = await self.post(
            "/v1/flows", {"flow_id": flow_id, "flow_kind": "dag", "namespace": "ns", "now": NOW} | given
        )
        assert made.status_code == 201, made.text
        partition = flow_partition(FlowId(flow_id), PartitionCounts())
        found = []
        for _ in range(members):
            member = await self.created(execution_id=fresh(partition), namespace=given.get("namespace", "ns"))
            body = {"flow_id": flow_id, "execution_id": member, "now": NOW}
            added = await self.post(f"/v1/flows/{flow_id}/members", body)
            assert added.status_code == 201, added.text
            found.append(member)
        return flow_id, found

    def edge(self, flow_id: str, upstream: str, downstream: str, **given: Any) -> dict[str, Any]:
        return {
            "flow_id": flow_id,
            "edge_id": str(uuid.uuid4()),
            "upstream_execution_id": upstream,
            "downstream_execution_id": downstream,
            "dependency_kind": "success_only",
            "now": NOW,
        } | given

    async def connected(self, flow_id: str, upstream: str, downstream: str) -> None:
        """An edge that is staged and applied."""
        edge = self.edge(flow_id, upstream, downstream)
        staged = await self.post(f"/v1/flows/{flow_id}/edges", edge)
        assert staged.status_code == 201, staged.text
        revision = staged.json()["Staged"]["new_graph_revision"]
        applied = await self.post(f"/v1/flows/{flow_id}/edges/apply", edge | {"graph_revision": revision})
        assert applied.status_code == 200, applied.text

    def budget(self, **given: Any) -> dict[str, Any]:
        return {
            "budget_id": str(uuid.uuid4()),
            "scope_type": "lane",
            "scope_id": "L",
            "enforcement_mode": "strict",
            "on_hard_limit": "fail",
            "on_soft_limit": "warn",
            "reset_interval_ms": 0,
            "dimensions": ["tokens"],
            "hard_limits": [100],
            "soft_limits": [50],
            "now": NOW,
        } | given

    async def budgeted(self, used: int = 0, **given: Any) -> str:
        """A new budget of which so much is used."""
        body = self.budget(**given)
        assert (await self.post("/v1/budgets", body)).status_code == 201
        where = f"/v1/budgets/{body['budget_id']}"
        if used:
            owner = {"namespace": given["namespace"]} if "namespace" in given else {}
            await self.post(f"{where}/usage", {"dimensions": {"tokens": used}, "now": NOW} | owner)
        return where

    def signal(self, execution_id: str, waitpoint_id: str, token: str, **given: Any) -> dict[str, Any]:
        return {
            "execution_id": execution_id,
            "waitpoint_id": waitpoint_id,
            "signal_id": str(uuid.uuid4()),
            "signal_name": "go",
            "signal_category": "test",
            "source_type": "user",
            "source_identity": "alice",
            "target_scope": "waitpoint",
            "waitpoint_token": token,
            "now": NOW,
        } | given


@asynccontextmanager
async def serving(app: App) -> AsyncIterator[str]:
    """A real server on a free port; its address."""
    app.settings = msgspec.structs.replace(app.settings, port=0)
    server = Server(app)
    running = asyncio.create_task(server.serve())
    await server.listening.wait()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.should_exit = True
        await running
