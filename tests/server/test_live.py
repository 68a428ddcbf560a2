"""Real connections: feeds and tails as server-sent events, shutdown under load, limits of the listener."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import msgspec
import pytest

from flowfabric.engine.engine import Engine
from flowfabric.server import ServerSettings, create_app
from flowfabric.server.connection_limits import BoundedProtocol
from flowfabric.server.lifecycle import Server, seed_signing_key
from flowfabric.settings import Secret
from tests.server.api_client import ApiClient, path, run_server, wait_until


class Events:
    """The server-sent events of one response."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.last_id = ""

    async def next(self, name: str) -> Any:
        """Return the data of the next event of this name."""
        event = ""
        async with asyncio.timeout(10):
            async for line in self._lines:
                field, _, value = line.partition(": ")
                match field:
                    case "id":
                        self.last_id = value
                    case "event":
                        event = value
                    case "data" if event == name:
                        return json.loads(value)
        raise AssertionError(f"the events ended without {name}")

    async def ended(self) -> bool:
        """True if no event follows."""
        async with asyncio.timeout(10):
            return not [line async for line in self._lines if line]


@pytest.fixture
async def address(api: ApiClient) -> AsyncIterator[str]:
    async with run_server(api.app) as address:
        yield address


async def test_a_feed_resumes_without_gap_or_repetition(api: ApiClient, address: str) -> None:
    async with httpx2.AsyncClient(base_url=address) as client:
        async with client.stream("GET", "/v1/events/completions") as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            events = Events(answer.aiter_lines())
            await events.next("open")
            first = await api.create_completed()
            reply = await events.next("completion")
            assert (reply["execution_id"], reply["outcome"]) == (first, "success")
        missed = await api.create_completed()
        headers = {"Last-Event-ID": events.last_id}
        async with client.stream("GET", "/v1/events/completions", headers=headers) as answer:
            resumed = Events(answer.aiter_lines())
            assert (await resumed.next("completion"))["execution_id"] == missed
        async with client.stream("GET", "/v1/events/completions?from=start&namespace=ns") as answer:
            everything = Events(answer.aiter_lines())
            received = [(await everything.next("completion"))["execution_id"] for _ in range(2)]
            assert received == [first, missed]
        bad = await client.get("/v1/events/completions", headers={"Last-Event-ID": "zz"})
        assert bad.status_code == 400


async def test_all_topics_are_followed_on_one_line_and_each_resumes_where_it_was(api: ApiClient, address: str) -> None:
    async with httpx2.AsyncClient(base_url=address) as client:
        async with client.stream("GET", "/v1/events/all") as answer:
            events = Events(answer.aiter_lines())
            await events.next("open")
            first = await api.create_completed()
            assert (await events.next("completion"))["execution_id"] == first
        missed = await api.create_completed()
        after_first = {"Last-Event-ID": events.last_id}
        async with client.stream("GET", "/v1/events/all?topics=completion,lease", headers=after_first) as answer:
            resumed = Events(answer.aiter_lines())
            assert (await resumed.next("completion"))["execution_id"] == missed
        async with client.stream("GET", "/v1/events/all?topics=lease,completion&from=start&namespace=ns") as answer:
            lines = answer.aiter_lines()
            names: list[str] = []
            async with asyncio.timeout(10):
                async for line in lines:
                    if line.startswith("event: "):
                        names.append(line.removeprefix("event: "))
                    if names.count("completion") == 2 and names.count("lease") >= 2:
                        break
            assert set(names) == {"open", "completion", "lease"}
        for wrong in ("zz", "completion.", "completion.zz,lease.00", "lease.00"):
            headers = {"Last-Event-ID": wrong}
            answer = await client.get("/v1/events/all?topics=completion,lease", headers=headers)
            assert answer.status_code == 400, wrong
        assert (await client.get("/v1/events/all?topics=completion,x")).status_code == 400


@pytest.mark.parametrize("feed", ["leases", "signals", "operators"])
async def test_every_feed_can_be_followed(api: ApiClient, address: str, feed: str) -> None:
    async with httpx2.AsyncClient(base_url=address) as client, client.stream("GET", f"/v1/events/{feed}") as answer:
        events = Events(answer.aiter_lines())
        await events.next("open")
        execution_id = await api.create_completed()
        if feed == "leases":
            assert (await events.next("lease"))["execution_id"] == execution_id
        elif feed == "operators":
            await api.post(path(execution_id, "replay"))
            assert (await events.next("operator"))["execution_id"] == execution_id


async def test_a_stream_resumes_and_ends_when_it_is_closed(api: ApiClient, address: str) -> None:
    held = await api.create_claimed()
    await api.engine.append_frame(held.handle, b"one", frame_type="log")
    url = path(held.execution_id, "attempts", 0, "stream", "events")
    async with httpx2.AsyncClient(base_url=address) as client:
        async with client.stream("GET", url) as answer:
            events = Events(answer.aiter_lines())
            assert (await events.next("frame"))["payload"] == "one"
            seen = events.last_id
            await api.engine.append_frame(held.handle, b"two", frame_type="log")
            assert (await events.next("frame"))["payload"] == "two"
        await api.engine.complete(held.handle)
        async with client.stream("GET", url, headers={"Last-Event-ID": seen}) as answer:
            rest = Events(answer.aiter_lines())
            assert (await rest.next("frame"))["payload"] == "two"
            assert (await rest.next("closed"))["closed_reason"] == "attempt_success"
            assert await rest.ended()


async def test_a_disconnected_follower_releases_its_resources(api: ApiClient, address: str) -> None:
    execution_id = await api.create()
    async with httpx2.AsyncClient(base_url=address) as client:
        url = path(execution_id, "attempts", 0, "stream", "events")
        async with client.stream("GET", url) as answer:
            await anext(answer.aiter_lines())
            await wait_until(lambda: api.engine.stream_reads.running == 1)
    await wait_until(lambda: api.engine.stream_reads.running == 0 and not api.app.on_closing)


async def test_shutdown_under_load_finishes_requests_and_loses_nothing(api: ApiClient) -> None:
    """Requests in flight are answered, feeds end with an event, and acknowledged creates are stored."""
    api.app.settings = msgspec.structs.replace(api.app.settings, port=0)
    server = Server(api.app)
    running = asyncio.create_task(server.serve())
    await server.listening.wait()
    address = f"http://127.0.0.1:{server.port}"
    created: list[str] = []
    stopped: list[str] = []

    async def submit(client: httpx2.AsyncClient) -> None:
        while True:
            body = api.create_body()
            try:
                answer = await client.post("/v1/executions", json=body)
            except httpx2.TransportError:  # a connection that was refused, or closed between two requests
                stopped.append(body["execution_id"])
                return
            if answer.status_code != 201:
                stopped.append(body["execution_id"])
                return
            created.append(body["execution_id"])

    waiting_id = await api.create(lane_id="other")
    async with httpx2.AsyncClient(base_url=address, timeout=30) as client:  # noqa: SIM117 - the second is the first's
        async with client.stream("GET", "/v1/events/completions") as followed:
            events = Events(followed.aiter_lines())
            await events.next("open")
            tail = asyncio.create_task(
                client.get(path(waiting_id, "attempts", 0, "stream", "tail") + "?block_ms=30000")
            )
            claim = asyncio.create_task(
                client.post(
                    "/v1/workers/w/claims",
                    json={"worker_instance_id": "i", "lanes": ["empty"], "wait_ms": 30_000},
                )
            )
            load = [asyncio.create_task(submit(client)) for _ in range(8)]
            await wait_until(lambda: len(created) > 20 and api.engine.stream_reads.running > 0)
            server.should_exit = True
            async with asyncio.timeout(20):
                assert await events.next("end") == {"reason": "shutdown"}
                assert await events.ended()
                assert (await tail).json() == {"frames": [], "count": 0}
                assert (await claim).json() == {"claimed": []}
                await asyncio.gather(*load)
                await running
    assert len(stopped) == 8
    for execution_id in created:
        assert await api.engine.read_execution_state(execution_id) is not None


@pytest.mark.parametrize("comes", ["before", "meanwhile"])
async def test_long_polls_are_answered_at_once_when_the_server_closes(api: ApiClient, comes: str) -> None:
    """So are requests that begin to wait after the shutdown has started."""
    execution_id = await api.create()
    if comes == "meanwhile":
        api.app.begin_closing()
    asks = [
        asyncio.create_task(api.post("/v1/executions/ends", {"execution_ids": [execution_id], "wait_ms": 30_000})),
        asyncio.create_task(api.get(path(execution_id, "end") + "?wait_ms=30000")),
        asyncio.create_task(api.get(path(execution_id, "result") + "?wait_ms=30000")),
        asyncio.create_task(api.post("/v1/workers/w/claims", {"worker_instance_id": "i", "lanes": ["none"]})),
    ]
    if comes == "before":
        await wait_until(lambda: len(api.app.on_closing) == 3)
        api.app.begin_closing()

    async with asyncio.timeout(5):
        statuses = [(await one).status_code for one in asks]
    assert statuses == [200, 204, 404, 200]
    assert not api.app.on_closing


async def test_an_outcome_is_returned_while_the_server_closes(api: ApiClient) -> None:
    execution_id = await api.create_completed(b"r")
    api.app.begin_closing()

    assert (await api.get(path(execution_id, "end"))).status_code == 200
    assert (await api.get(path(execution_id, "end") + "?wait_ms=1000")).status_code == 200
    ends = await api.post("/v1/executions/ends", {"execution_ids": [execution_id]})
    assert [one["execution_id"] for one in ends.json()["ended"]] == [execution_id]


async def test_a_server_that_shuts_down_is_not_ready(api: ApiClient) -> None:
    assert (await api.get("/readyz")).json() == {"status": "ready"}
    api.app.begin_closing()
    assert (await api.get("/readyz")).status_code == 503


async def test_a_connection_that_comes_while_the_server_closes_is_closed(api: ApiClient, address: str) -> None:
    api.app.begin_closing()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()


async def test_large_headers_are_refused(api: ApiClient, address: str) -> None:
    async with httpx2.AsyncClient(base_url=address) as client:
        answer = await client.get("/healthz", headers={"x-long": "x" * 100_000})

    assert (answer.status_code, answer.json()) == (431, {"error": "headers too large"})


async def test_an_endless_request_head_is_cut_off(api: ApiClient, address: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    writer.write(b"GET /healthz HTTP/1.1\r\nx-endless: ")
    with contextlib.suppress(ConnectionError):
        for _ in range(20):
            writer.write(b"x" * 8192)
            await writer.drain()
        async with asyncio.timeout(10):
            assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("begun", [b"", b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"])
async def test_a_request_head_has_a_timeout(
    api: ApiClient, address: str, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_timeout_s", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    writer.write(begun)
    async with asyncio.timeout(10):
        assert await reader.read() == b""
    writer.close()


async def test_a_request_body_has_a_timeout(api: ApiClient, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.server.request_body.BODY_TIMEOUT_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
    head = (
        b"POST /v1/flows HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    )
    writer.write(head)
    async with asyncio.timeout(10):
        answer = await reader.read()
    assert b" 408 " in answer.partition(b"\r\n")[0]
    assert answer.endswith(b'{"error":"the body took too long"}')
    writer.close()


async def test_raw_braces_and_chunked_bodies_are_accepted(api: ApiClient, address: str) -> None:
    execution_id = await api.create()
    port = int(address.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"GET /v1/executions/{execution_id}/state HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()
    )
    assert (await reader.read()).endswith(b'"waiting"')
    writer.close()

    body = json.dumps(api.cancel_body(execution_id)).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path(execution_id, 'cancel')} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    writer.write(f"{head}content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    for part in (body[:10], body[10:]):
        writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
    writer.write(b"0\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b"\r\n")
    writer.close()


async def test_the_signing_key_is_seeded_once(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    await seed_signing_key(engine, ServerSettings(waitpoint_secret=Secret("ff" * 32)))

    assert (await engine.list_waitpoint_hmac_kids()).current_kid == "k1"
    assert "the stored one is used" in caplog.text
    assert "ff" * 32 not in caplog.text


async def test_the_app_supports_the_asgi_lifespan(engine: Engine) -> None:
    sent: list[Any] = []
    messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await create_app(engine)({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
