"""Results of many executions: a response has a bounded size, and clients request the rest next."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from flowfabric.client import RemoteEngine
from flowfabric.engine.engine import Engine
from flowfabric.server.request import encode
from flowfabric.server.routes import client, queries
from tests.server.api_client import ApiClient

LIMIT = 1000


@pytest.fixture(autouse=True)
def small_responses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the size limit of responses."""
    monkeypatch.setattr(queries, "MAX_RESULT_BYTES", LIMIT)
    monkeypatch.setattr(client, "MAX_RESULT_BYTES", LIMIT)
    monkeypatch.setattr(queries, "RESULTS_BATCH", 4)


async def complete_with_sizes(api: ApiClient, *sizes: int) -> list[str]:
    return [await api.create_completed(result=b"x" * size) for size in sizes]


async def test_a_response_is_bounded_and_lists_the_remaining_ids(api: ApiClient) -> None:
    executions = await complete_with_sizes(api, *[300] * 10)
    waiting = await api.create()
    pages: list[dict[str, object]] = []
    remaining = [waiting, *executions, *executions]
    while remaining:
        answer = (await api.post("/v1/executions/results", {"execution_ids": remaining})).json()
        pages.append(answer["results"])
        remaining = answer.get("rest", [])

    assert [len(page) for page in pages] == [4, 3, 3, 1]
    assert [one for page in pages for one in page] == [waiting, *executions]
    assert pages[0][waiting] is None
    assert all(len(encode(page)) < 2 * LIMIT for page in pages)


async def test_a_result_above_the_limit_is_returned_alone(api: ApiClient) -> None:
    executions = await complete_with_sizes(api, 10, 5 * LIMIT, 10)
    sizes = []
    remaining = executions
    while remaining:
        answer = (await api.post("/v1/executions/results", {"execution_ids": remaining})).json()
        sizes.append(len(answer["results"]))
        remaining = answer.get("rest", [])

    assert sizes == [1, 1, 1]


async def test_no_more_results_are_loaded_than_returned(api: ApiClient, engine: Engine) -> None:
    executions = await complete_with_sizes(api, *[600] * 20)
    loaded: list[int] = []
    read = engine.read_results

    async def read_results(some: list[str], **ways: Any) -> dict[str, bytes | None]:
        loaded.append(len(some))
        return await read(some, **ways)

    engine.read_results = read_results  # type: ignore[method-assign, assignment]
    await api.post("/v1/executions/results", {"execution_ids": executions})

    assert loaded == [4]


async def test_a_client_reads_all_pages(api: ApiClient) -> None:
    executions = await complete_with_sizes(api, *[400] * 7, 0)
    async with RemoteEngine("http://ff", transport=httpx2.ASGITransport(app=api.app)) as remote:
        found = await remote.read_results([*executions, executions[0]])

    assert found == dict.fromkeys(executions[:7], b"x" * 400) | {executions[7]: found[executions[7]]}
    assert await RemoteEngine("http://ff", transport=httpx2.ASGITransport(app=api.app)).read_results([]) == {}


async def test_a_response_with_outcomes_is_bounded_and_the_others_follow(api: ApiClient) -> None:
    executions = await complete_with_sizes(api, *[400] * 5)
    received: list[str] = []
    while remaining := [one for one in executions if one not in received]:
        answer = (await api.post("/v1/executions/ends", {"execution_ids": remaining, "wait_ms": 0})).json()
        assert 1 <= len(answer["ended"]) <= 2
        received += [one["execution_id"] for one in answer["ended"]]

    assert sorted(received) == sorted(executions)
