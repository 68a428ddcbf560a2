"""Results of many executions: an answer holds so many bytes, and the rest is asked for next, by clients, too."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from flowfabric.client import RemoteEngine
from flowfabric.engine.engine import Engine
from flowfabric.server.request import encode
from flowfabric.server.routes import client, queries
from tests.server.asking import Asking

LIMIT = 1000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let answers hold few bytes, so that results of a few hundred are many."""
    monkeypatch.setattr(queries, "MAX_RESULT_BYTES", LIMIT)
    monkeypatch.setattr(client, "MAX_RESULT_BYTES", LIMIT)
    monkeypatch.setattr(queries, "RESULTS_BATCH", 4)


async def ended(ask: Asking, *sizes: int) -> list[str]:
    return [await ask.completed(result=b"x" * size) for size in sizes]


async def test_an_answer_holds_so_many_bytes_and_names_the_rest(ask: Asking) -> None:
    executions = await ended(ask, *[300] * 10)
    waiting = await ask.created()
    pages: list[dict[str, object]] = []
    wanted = [waiting, *executions, *executions]
    while wanted:
        answer = (await ask.post("/v1/executions/results", {"execution_ids": wanted})).json()
        pages.append(answer["results"])
        wanted = answer.get("rest", [])

    assert [len(page) for page in pages] == [4, 3, 3, 1]
    assert [one for page in pages for one in page] == [waiting, *executions]
    assert pages[0][waiting] is None
    assert all(len(encode(page)) < 2 * LIMIT for page in pages)


async def test_a_result_beyond_the_limit_comes_alone(ask: Asking) -> None:
    executions = await ended(ask, 10, 5 * LIMIT, 10)
    sizes = []
    wanted = executions
    while wanted:
        answer = (await ask.post("/v1/executions/results", {"execution_ids": wanted})).json()
        sizes.append(len(answer["results"]))
        wanted = answer.get("rest", [])

    assert sizes == [1, 1, 1]


async def test_no_more_results_are_loaded_than_are_told(ask: Asking, engine: Engine) -> None:
    executions = await ended(ask, *[600] * 20)
    loaded: list[int] = []
    read = engine.read_results

    async def read_results(some: list[str], **ways: Any) -> dict[str, bytes | None]:
        loaded.append(len(some))
        return await read(some, **ways)

    engine.read_results = read_results  # type: ignore[method-assign, assignment]
    await ask.post("/v1/executions/results", {"execution_ids": executions})

    assert loaded == [4]


async def test_a_client_reads_page_after_page(ask: Asking) -> None:
    executions = await ended(ask, *[400] * 7, 0)
    async with RemoteEngine("http://ff", transport=httpx2.ASGITransport(app=ask.app)) as remote:
        found = await remote.read_results([*executions, executions[0]])

    assert found == dict.fromkeys(executions[:7], b"x" * 400) | {executions[7]: found[executions[7]]}
    assert await RemoteEngine("http://ff", transport=httpx2.ASGITransport(app=ask.app)).read_results([]) == {}


async def test_ends_hold_so_many_bytes_and_the_others_are_told_when_asked_again(ask: Asking) -> None:
    executions = await ended(ask, *[400] * 5)
    heard: list[str] = []
    while wanted := [one for one in executions if one not in heard]:
        answer = (await ask.post("/v1/executions/ends", {"execution_ids": wanted, "wait_ms": 0})).json()
        assert 1 <= len(answer["ended"]) <= 2
        heard += [one["execution_id"] for one in answer["ended"]]

    assert sorted(heard) == sorted(executions)
