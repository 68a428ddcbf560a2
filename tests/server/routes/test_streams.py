"""Streams: scenarios R38 to R45."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from tests.server.api_client import ApiClient, path, wait_until


def stream(execution_id: str, rest: str = "") -> str:
    return path(execution_id, "attempts", 0, f"stream{rest}")


async def write_frames(api: ApiClient, *payloads: bytes) -> Any:
    """Claim an execution and append frames to its stream."""
    held = await api.create_claimed()
    for payload in payloads:
        await api.engine.append_frame(held.handle, payload, frame_type="log")
    return held


@pytest.mark.spec("R38")
async def test_an_attempt_without_frames_has_an_empty_stream(api: ApiClient) -> None:
    assert await api.get_json(stream(await api.create())) == (200, {"frames": [], "count": 0})


@pytest.mark.spec("R39")
async def test_frames_are_read_in_order_up_to_the_limit(api: ApiClient) -> None:
    held = await write_frames(api, b"one", b"two", b"three")
    page = (await api.get(stream(held.execution_id, "?limit=2"))).json()

    assert page["count"] == len(page["frames"]) == 2
    ids = [tuple(map(int, frame["id"].split("-"))) for frame in page["frames"]]
    assert ids == sorted(ids)
    fields = page["frames"][0]["fields"]
    assert (fields["frame_type"], fields["payload"], fields["mode"]) == ("log", "one", "durable")


@pytest.mark.spec("R40")
async def test_the_stream_of_an_ended_attempt_is_closed(api: ApiClient) -> None:
    held = await write_frames(api, b"one")
    await api.engine.complete(held.handle)
    page = (await api.get(stream(held.execution_id))).json()

    assert page["closed_at"] > 0
    assert page["closed_reason"] == "attempt_success"


@pytest.mark.spec("R41")
@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("?limit=0", "limit must be >= 1"),
        ("?limit=1001", "limit exceeds REST ceiling 1000; paginate via from/to for larger spans"),
        ("/tail?limit=0", "limit must be >= 1"),
        ("/tail?block_ms=30001", "block_ms exceeds 30000ms ceiling"),
    ],
)
async def test_limits_out_of_range_are_refused(api: ApiClient, query: str, text: str) -> None:
    assert await api.get_json(stream(await api.create(), query)) == (400, {"error": text})


@pytest.mark.parametrize("cursor", ["-", "+", "", "x", "1-", "1-2-3"])
async def test_a_malformed_cursor_is_a_bad_request(api: ApiClient, cursor: str) -> None:
    execution_id = await api.create()

    assert (await api.get(stream(execution_id), params={"from": cursor})).status_code == 400
    assert (await api.get(stream(execution_id, "/tail"), params={"after": cursor})).status_code == 400
    assert (await api.get(path(execution_id, "attempts", "x", "stream"))).status_code == 400


@pytest.mark.spec("R42")
async def test_a_tail_starts_after_its_cursor(api: ApiClient) -> None:
    held = await write_frames(api, b"f1", b"f2")
    first = (await api.get(stream(held.execution_id))).json()["frames"][0]["id"]
    page = (await api.get(stream(held.execution_id, f"/tail?after={first}"))).json()

    assert [frame["fields"]["payload"] for frame in page["frames"]] == ["f2"]


@pytest.mark.spec("R43")
@pytest.mark.parametrize("cursor", ["start", "end"])
async def test_a_symbolic_cursor_is_refused_for_a_tail(api: ApiClient, cursor: str) -> None:
    assert await api.get_json(stream(await api.create(), f"/tail?after={cursor}")) == (
        400,
        {"error": "after: XREAD cursor must be a concrete entry id; pass '0-0' to start from the beginning"},
    )


async def waiting_tail(api: ApiClient, execution_id: str, engine: Engine) -> asyncio.Task[Any]:
    """Start a tail that waits for frames."""
    tail = asyncio.create_task(api.get(stream(execution_id, "/tail?block_ms=20000")))
    await wait_until(lambda: engine.stream_reads.running > 0)
    return tail


@pytest.mark.spec("R44")
async def test_a_tail_wakes_up_on_an_append(api: ApiClient) -> None:
    held = await api.create_claimed()
    tail = await waiting_tail(api, held.execution_id, api.engine)
    await api.engine.append_frame(held.handle, b"hello")
    async with asyncio.timeout(5):
        page = (await tail).json()

    assert [frame["fields"]["payload"] for frame in page["frames"]] == ["hello"]


async def test_a_tail_wakes_up_when_the_stream_closes(api: ApiClient) -> None:
    held = await write_frames(api, b"f1")
    [frame] = (await api.get(stream(held.execution_id))).json()["frames"]
    url = stream(held.execution_id, f"/tail?block_ms=20000&after={frame['id']}")
    tail = asyncio.create_task(api.get(url))
    await wait_until(lambda: api.engine.stream_reads.running > 0)
    async with asyncio.timeout(5):
        await api.engine.complete(held.handle)
        page = (await tail).json()

    assert (page["frames"], page["closed_reason"]) == ([], "attempt_success")


@pytest.mark.spec("R45")
async def test_too_many_concurrent_stream_reads_are_refused(api: ApiClient) -> None:
    execution_id = await api.create()
    api.engine.stream_reads.limit = 1
    tail = await waiting_tail(api, execution_id, api.engine)
    answer = await api.get(stream(execution_id))

    assert answer.status_code == 429
    assert answer.json() == {
        "error": "too many concurrent stream_ops calls (server max: 1); retry with backoff",
        "kind": "resource_exhausted",
        "retryable": True,
    }
    assert int(answer.headers["retry-after"]) >= 1
    tail.cancel()
    with pytest.raises(asyncio.CancelledError):
        await tail
