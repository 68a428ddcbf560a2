"""A client for tests of the API: requests with every required field, and rows that a test needs first."""

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
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server import App, ServerSettings, create_app
from flowfabric.server.lifecycle import Server
from flowfabric.settings import Secret
from tests.executions import claim_one

SECRET = "00112233445566778899aabbccddeeff" * 2
ROOT_TOKEN = "s3cret"
NOW = int(time.time() * 1000)


def new_execution_id(partition: int = 7) -> str:
    return f"{{fp:{partition}}}:{uuid.uuid4()}"


def path(execution_id: str, *rest: object) -> str:
    """Return the path of an execution; braces are encoded as clients do."""
    return "/".join(("/v1/executions", quote(execution_id, safe=":"), *map(str, rest)))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def new_bearer(engine: Engine, *scopes: ApiScope) -> dict[str, str]:
    """Return the header of a new token with these scopes."""
    return bearer((await engine.make_api_token("t", scopes)).token)


async def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a condition of this process."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.001)


def why_refused(response: httpx2.Response) -> str:
    """Return the detail in the error header, which the client raises."""
    return str(msgspec.json.decode(response.headers["x-ff-error"])["detail"])


def _status_and_json(response: httpx2.Response) -> tuple[int, Any]:
    return response.status_code, response.json()


class ApiClient:
    """A client of one server, which runs in this process."""

    def __init__(
        self, engine: Engine, settings: ServerSettings | None = None, headers: dict[str, str] | None = None
    ) -> None:
        self.engine = engine
        self.app: App = create_app(engine, settings or ServerSettings())
        self.headers = headers or {}

    @classmethod
    def with_root_token(cls, engine: Engine, **settings: Any) -> ApiClient:
        """Return a client that sends the root token to a server that requires tokens."""
        return cls(engine, ServerSettings(api_token=Secret(ROOT_TOKEN), **settings), bearer(ROOT_TOKEN))

    async def __call__(self, method: str, url: str, body: Any = None, **options: Any) -> httpx2.Response:
        """Send one request; `body` is encoded as JSON."""
        if body is not None:
            options["json"] = body
        options["headers"] = self.headers | options.get("headers", {})
        transport = httpx2.ASGITransport(app=self.app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://ff") as client:
            return await client.request(method, url, **options)

    async def get(self, url: str, **options: Any) -> httpx2.Response:
        return await self("GET", url, **options)

    async def post(self, url: str, body: Any = None, **options: Any) -> httpx2.Response:
        return await self("POST", url, body, **options)

    async def put(self, url: str, body: Any = None, **options: Any) -> httpx2.Response:
        return await self("PUT", url, body, **options)

    async def get_json(self, url: str, **options: Any) -> tuple[int, Any]:
        """Send a GET; return the status and the decoded body of the answer."""
        return _status_and_json(await self.get(url, **options))

    async def post_json(self, url: str, body: Any = None, **options: Any) -> tuple[int, Any]:
        return _status_and_json(await self.post(url, body, **options))

    # -- executions -------------------------------------------------------------------------------------------------

    def create_body(self, execution_id: str | None = None, **fields: Any) -> dict[str, Any]:
        return {
            "execution_id": execution_id or new_execution_id(),
            "namespace": "ns",
            "lane_id": "L",
            "execution_kind": "task",
            "input_payload": [104, 105],
            "priority": 0,
            "creator_identity": "test",
            "partition_id": 7,
            "now": NOW,
        } | fields

    async def create(self, **fields: Any) -> str:
        """Create an execution; return its id."""
        body = self.create_body(**fields)
        answer = await self.post("/v1/executions", body)
        assert answer.status_code == 201, answer.text
        return str(body["execution_id"])

    async def create_claimed(self, **fields: Any) -> Claimed:
        """Create an execution and claim it on the engine, so that its handle is not signed."""
        await self.create(**fields)
        return await claim_one(self.engine, "L")

    async def create_completed(self, result: bytes | None = None, **fields: Any) -> str:
        held = await self.create_claimed(**fields)
        await self.engine.complete(held.handle, result=result)
        return held.execution_id

    async def state(self, execution_id: str) -> str:
        """Return the public state."""
        answer = await self.get(path(execution_id, "state"))
        assert answer.status_code == 200, answer.text
        return str(answer.json())

    def cancel_body(self, execution_id: str, reason: str = "r", **fields: Any) -> dict[str, Any]:
        return {"execution_id": execution_id, "reason": reason, "now": NOW} | fields

    def signal_body(self, execution_id: str, waitpoint_id: str, token: str, **fields: Any) -> dict[str, Any]:
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
        } | fields

    # -- flows and budgets ------------------------------------------------------------------------------------------

    async def create_flow(self, members: int = 0, **fields: Any) -> tuple[str, list[str]]:
        """Create a flow with this many members; return its id and theirs."""
        flow_id = str(uuid.uuid4())
        body = {"flow_id": flow_id, "flow_kind": "dag", "namespace": "ns", "now": NOW} | fields
        created = await self.post("/v1/flows", body)
        assert created.status_code == 201, created.text
        partition = flow_partition(FlowId(flow_id), PartitionCounts())
        member_ids = []
        for _ in range(members):
            member = await self.create(execution_id=new_execution_id(partition), namespace=body["namespace"])
            added = await self.post(
                f"/v1/flows/{flow_id}/members", {"flow_id": flow_id, "execution_id": member, "now": NOW}
            )
            assert added.status_code == 201, added.text
            member_ids.append(member)
        return flow_id, member_ids

    def edge_body(self, flow_id: str, upstream: str, downstream: str, **fields: Any) -> dict[str, Any]:
        return {
            "flow_id": flow_id,
            "edge_id": str(uuid.uuid4()),
            "upstream_execution_id": upstream,
            "downstream_execution_id": downstream,
            "dependency_kind": "success_only",
            "now": NOW,
        } | fields

    async def apply_edge(self, flow_id: str, upstream: str, downstream: str) -> None:
        """Stage and apply an edge."""
        edge = self.edge_body(flow_id, upstream, downstream)
        staged = await self.post(f"/v1/flows/{flow_id}/edges", edge)
        assert staged.status_code == 201, staged.text
        revision = staged.json()["Staged"]["new_graph_revision"]
        applied = await self.post(f"/v1/flows/{flow_id}/edges/apply", edge | {"graph_revision": revision})
        assert applied.status_code == 200, applied.text

    def budget_body(self, **fields: Any) -> dict[str, Any]:
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
        } | fields

    async def create_budget(self, used: int = 0, **fields: Any) -> str:
        """Create a budget with this usage; return its URL."""
        body = self.budget_body(**fields)
        assert (await self.post("/v1/budgets", body)).status_code == 201
        url = f"/v1/budgets/{body['budget_id']}"
        if used:
            owner = {"namespace": fields["namespace"]} if "namespace" in fields else {}
            await self.post(f"{url}/usage", {"dimensions": {"tokens": used}, "now": NOW} | owner)
        return url


@asynccontextmanager
async def run_server(app: App) -> AsyncIterator[str]:
    """Run a real server on a free port; yield its URL."""
    app.settings = msgspec.structs.replace(app.settings, port=0)
    server = Server(app)
    running = asyncio.create_task(server.serve())
    await server.listening.wait()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.should_exit = True
        await running
