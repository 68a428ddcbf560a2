"""The OpenAPI document: current, correct and complete."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.specs.openapi import checks

from flowfabric.connector import open_engine
from flowfabric.server.__main__ import render_document
from flowfabric.server.routes import ROUTE_GROUPS
from tests.client.server_thread import run_server

DOCUMENT = Path(__file__).parents[2] / "docs" / "openapi.json"
FEW = 4
EXAMPLES = int(os.environ.get("FF_API_EXAMPLES", FEW))  # a larger number is drawn at random
EXECUTION = "{fp:7}:550e8400-e29b-41d4-a716-446655440000"
FLOW = "550e8400-e29b-41d4-a716-446655440000"


def test_the_committed_openapi_document_is_current() -> None:
    assert DOCUMENT.read_text() == render_document(), "run: python -m flowfabric.server > docs/openapi.json"


def test_every_operation_has_a_unique_name_and_a_summary() -> None:
    operations = [operation for page in ROUTE_GROUPS for operation in page.entries]
    names = [operation.name for operation in operations]

    assert sorted(set(names)) == sorted(names)
    assert [operation.name for operation in operations if not operation.summary] == []


def test_every_route_is_in_the_table_of_the_server_page() -> None:
    table = (DOCUMENT.parent / "server.md").read_text()
    missing = [
        f"{operation.method} {operation.path}"
        for page in ROUTE_GROUPS
        for operation in page.entries
        if f"| {operation.method} | `{operation.path}` |" not in table
    ]

    assert missing == []


async def create_resources(url: str) -> None:
    async with await open_engine(url) as engine:
        await engine.create_execution(execution_id=EXECUTION)
        await engine.create_flow(FLOW)
        await engine.create_budget(FLOW, dimensions=["tokens"], hard_limits=[9], soft_limits=[5])
        await engine.create_quota_policy(FLOW, window_seconds=1, max_requests_per_window=1, max_concurrent=1)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server in a thread, for a synchronous client."""
    url = f"sqlite:///{tmp_path_factory.mktemp('api')}/ff.db"
    asyncio.run(create_resources(url))
    with run_server(url) as server:
        yield server.url


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


schema = schemathesis.openapi.from_path(DOCUMENT)


@schema.hook
def map_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Let half of the requests name an existing resource."""
    given = dict(path_parameters or {})
    known = {"/v1/executions": EXECUTION, "/v1/flows": FLOW, "/v1/budgets": FLOW, "/v1/quotas": FLOW}
    for prefix, name in known.items():
        if "id" in given and context.operation.path.startswith(prefix) and len(str(given["id"])) % 2:
            given["id"] = name
    return given if path_parameters is not None else None


def shorten_wait(values: Any) -> Any:
    if isinstance(values, dict) and isinstance(values.get("wait_ms"), int):
        return values | {"wait_ms": values["wait_ms"] % 20}
    return values


@schema.hook
def map_query(context: Any, query: Any) -> Any:
    return shorten_wait(query)


@schema.hook
def map_body(context: Any, body: Any) -> Any:
    return shorten_wait(body)


@schema.exclude(path_regex="/v1/events/|/stream/events|/stream/tail").parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES == FEW,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_response_conforms_to_the_openapi_document(
    case: schemathesis.Case[Any], address: str, session: requests.Session
) -> None:
    case.call_and_validate(
        base_url=address,
        session=session,
        checks=[
            schemathesis.checks.not_a_server_error,
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_schema_conformance,
        ],
    )
