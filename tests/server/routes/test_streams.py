"""Streams: scenarios R38 to R45, and the same as server-sent events."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from tests.server.asking import Asking, path, until


def stream(execution_id: str, rest: str = "") -> str:
    return path(execution_id, "attempts", 0, f"stream{rest}")


async def written(ask: Asking, *payloads: bytes) -> Any:
    """A running attempt that has written some frames."""
    held = await ask.claimed()
    for payload in payloads:
        await ask.engine.append_frame(held.handle, payload, frame_type="log")
    return held


@pytest.mark.spec("R38")
async def test_no_stream_yet(ask: Asking) -> None:
    answer = await ask.get(stream(await ask.created()))

    assert (answer.status_code, answer.json()) == (200, {"frames": [], "count": 0})


@pytest.mark.spec("R39")
async def test_read_frames(ask: Asking) -> None:
    held = await written(ask, b"one", b"two", b"three")
    page = (await ask.get(stream(held.execution_id, "?limit=2"))).json()

    assert page["count"] == len(page["frames"]) == 2
    places = [tuple(map(int, frame["id"].split("-"))) for frame in page["frames"]]
    assert places == sorted(places)
    fields = page["frames"][0]["fields"]
    assert (fields["frame_type"], fields["payload"], fields["mode"]) == ("log", "one", "durable")


@pytest.mark.spec("R40")
async def test_closed_marker(ask: Asking) -> None:
    held = await written(ask, b"one")
    await ask.engine.complete(held.handle)
    page = (await ask.get(stream(held.execution_id))).json()

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
async def test_limit_bounds(ask: Asking, query: str, text: str) -> None:
    answer = await ask.get(stream(await ask.created(), query))

    assert (answer.status_code, answer.json()) == (400, {"error": text})


@pytest.mark.parametrize("cursor", ["-", "+", "", "x", "1-", "1-2-3"])
async def test_a_malformed_cursor_is_a_bad_request(ask: Asking, cursor: str) -> None:
    execution_id = await ask.created()

    assert (await ask.get(stream(execution_id), params={"from": cursor})).status_code == 400
    assert (await ask.get(stream(execution_id, "/tail"), params={"after": cursor})).status_code == 400
    assert (await ask.get(path(execution_id, "attempts", "x", "stream"))).status_code == 400


@pytest.mark.spec("R42")
async def test_tail_is_exclusive(ask: Asking) -> None:
    held = await written(ask, b"f1", b"f2")
    first = (await ask.get(stream(held.execution_id))).json()["frames"][0]["id"]
    page = (await ask.get(stream(held.execution_id, f"/tail?after={first}"))).json()

    assert [frame["fields"]["payload"] for frame in page["frames"]] == ["f2"]


@pytest.mark.spec("R43")
@pytest.mark.parametrize("cursor", ["start", "end"])
async def test_tail_symbolic_cursor(ask: Asking, cursor: str) -> None:
    answer = await ask.get(stream(await ask.created(), f"/tail?after={cursor}"))

    assert (answer.status_code, answer.json()) == (
        400,
        {"error": "after: XREAD cursor must be a concrete entry id; pass '0-0' to start from the beginning"},
    )


async def waiting_tail(ask: Asking, execution_id: str, engine: Engine) -> asyncio.Task[Any]:
    """A tail that has begun to wait."""
    tail = asyncio.create_task(ask.get(stream(execution_id, "/tail?block_ms=20000")))
    await until(lambda: engine.stream_reads.running > 0)
    return tail


@pytest.mark.spec("R44")
async def test_tail_wakes_on_append(ask: Asking) -> None:
    held = await ask.claimed()
    tail = await waiting_tail(ask, held.execution_id, ask.engine)
    await ask.engine.append_frame(held.handle, b"hello")
    async with asyncio.timeout(5):
        page = (await tail).json()

    assert [frame["fields"]["payload"] for frame in page["frames"]] == ["hello"]


async def test_a_tail_wakes_when_the_stream_closes(ask: Asking) -> None:
    held = await written(ask, b"f1")
    [frame] = (await ask.get(stream(held.execution_id))).json()["frames"]
    where = stream(held.execution_id, f"/tail?block_ms=20000&after={frame['id']}")
    tail = asyncio.create_task(ask.get(where))
    await until(lambda: ask.engine.stream_reads.running > 0)
    async with asyncio.timeout(5):
        await ask.engine.complete(held.handle)
        page = (await tail).json()

    assert (page["frames"], page["closed_reason"]) == ([], "attempt_success")


@pytest.mark.spec("R45")
async def test_pool_limit(ask: Asking) -> None:
    execution_id = await ask.created()
    ask.engine.stream_reads.limit = 1
    tail = await waiting_tail(ask, execution_id, ask.engine)
    answer = await ask.get(stream(execution_id))

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
