"""Tokens that are revoked or expire while a request waits: feeds, tails and long polls end within 15 seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.model.security.api_token import ApiScope
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.server.app import REAUTHENTICATE_S
from flowfabric.server.routes import ROUTE_GROUPS
from flowfabric.server.security import auth
from tests.server.api_client import ApiClient, bearer, new_bearer, path, run_server, wait_until

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w:1"}
EVENTS = [f"/v1/events/{name}" for name in ("completions", "leases", "signals", "operators", "all")]


@pytest.fixture
def api(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> ApiClient:
    """A client of a server that checks tokens again after 50 ms."""
    monkeypatch.setattr(auth, "TOKEN_CACHE_S", 0.0)
    api = ApiClient.with_root_token(engine)
    api.app.reauthenticate_s = 0.05
    return api


@pytest.fixture
async def client(api: ApiClient) -> AsyncIterator[httpx2.AsyncClient]:
    async with run_server(api.app) as address, httpx2.AsyncClient(base_url=address, timeout=20) as client:
        yield client


async def read_lines(lines: AsyncIterator[str]) -> list[str]:
    """Return all lines up to the end."""
    async with asyncio.timeout(10):
        return [line async for line in lines if line]


def test_a_token_is_checked_again_within_fifteen_seconds() -> None:
    assert REAUTHENTICATE_S + auth.TOKEN_CACHE_S <= 15


@pytest.mark.parametrize("url", EVENTS)
async def test_a_feed_ends_when_its_token_is_revoked(
    api: ApiClient, client: httpx2.AsyncClient, engine: Engine, url: str
) -> None:
    made = await engine.make_api_token("t", [ApiScope.READ])
    headers = bearer(made.token)
    async with client.stream("GET", url, headers=headers) as answer:
        lines = answer.aiter_lines()
        async for line in lines:
            if line == "event: open":
                break
        await engine.revoke_api_token(made.token_id)
        received = await read_lines(lines)

    assert received[-2:] == ["event: end", 'data: {"reason":"unauthorized"}']
    assert (await client.get(url, headers=headers)).status_code == 401


async def test_a_feed_sends_nothing_after_its_token_expired(
    api: ApiClient, client: httpx2.AsyncClient, engine: Engine, clock: ManualClock
) -> None:
    made = await engine.make_api_token("t", [ApiScope.READ], expires_in_ms=60_000)
    headers = bearer(made.token)
    async with client.stream("GET", EVENTS[0], headers=headers) as answer:
        lines = answer.aiter_lines()
        async for line in lines:
            if line == "event: open":
                break
        clock.advance_ms(60_000)
        received = await read_lines(lines)
        late = await api.create_completed()

    assert received[-1] == 'data: {"reason":"unauthorized"}'
    assert not any(late in line for line in received)


async def test_a_stream_of_frames_ends_when_its_token_is_revoked(
    api: ApiClient, client: httpx2.AsyncClient, engine: Engine
) -> None:
    execution_id = await api.create()
    made = await engine.make_api_token("t", [ApiScope.READ])
    url = path(execution_id, "attempts", 0, "stream", "events")
    async with client.stream("GET", url, headers=bearer(made.token)) as answer:
        assert answer.status_code == 200
        await engine.revoke_api_token(made.token_id)
        received = await read_lines(answer.aiter_lines())

    assert received[-1] == 'data: {"reason":"unauthorized"}'


async def test_a_feed_continues_while_its_token_is_valid(
    api: ApiClient, client: httpx2.AsyncClient, engine: Engine
) -> None:
    made = await engine.make_api_token("t", [ApiScope.READ])
    asked: list[str] = []
    find = engine.authenticate_token

    async def recorded(token: str) -> Any:
        asked.append(token)
        return await find(token)

    engine.authenticate_token = recorded  # type: ignore[method-assign]
    async with client.stream("GET", EVENTS[0], headers=bearer(made.token)) as answer:
        await wait_until(lambda: len(asked) > 3)
        execution_id = await api.create_completed()
        async with asyncio.timeout(10):
            async for line in answer.aiter_lines():
                if execution_id in line:
                    break


MESSAGE = "11111111-1111-4111-8111-111111111111"
POLLS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "await_end": ("GET", "{one}/end?wait_ms=30000", None),
    "get_result": ("GET", "{one}/result?wait_ms=30000", None),
    "tail_stream": ("GET", "{one}/attempts/0/stream/tail?block_ms=30000", None),
    "ask": ("POST", "{one}/asks", {"mailbox": "m", "message_id": MESSAGE, "wait_ms": 30_000}),
    "read_reply": ("GET", "{one}/asks/" + MESSAGE + "?wait_ms=30000", None),
    "read_fact": ("GET", "{one}/facts/f?wait_ms=30000", None),
    "await_ends": ("POST", "/v1/executions/ends", {"execution_ids": ["{id}"], "wait_ms": 30_000}),
    "claim": ("POST", "/v1/workers/w/claims", {"worker_instance_id": "i", "lanes": ["idle"], "wait_ms": 30_000}),
}
# These run to their end; the token is checked before the response.
COMMANDS = {"cancel_flow", "rotate_waitpoint_secret"}


def test_every_long_poll_is_covered_here() -> None:
    waiting = {one.name for page in ROUTE_GROUPS for one in page.entries if one.long and not one.is_streaming}

    assert waiting == set(POLLS) | COMMANDS


@pytest.mark.parametrize("name", POLLS)
async def test_a_long_poll_ends_when_its_token_is_revoked(
    api: ApiClient, client: httpx2.AsyncClient, engine: Engine, name: str
) -> None:
    method, url, body = POLLS[name]
    execution_id = await api.create()
    made = await engine.make_api_token("t", [ApiScope.READ, ApiScope.SUBMIT, ApiScope.WORK])
    url = url.replace("{one}", path(execution_id))
    if name == "read_reply":
        await engine.ask(MessageArgs(execution_id=execution_id, message_id=MESSAGE, mailbox="m"))
    if body is not None and "execution_ids" in body:
        body = body | {"execution_ids": [execution_id]}
    poll = asyncio.create_task(client.request(method, url, json=body, headers=bearer(made.token)))
    await wait_until(lambda: bool(api.app.on_closing))  # it waits
    await engine.revoke_api_token(made.token_id)
    async with asyncio.timeout(10):
        answer = await poll

    assert (answer.status_code, answer.json()["error"]) == (401, auth.UNAUTHENTICATED_MESSAGE)


async def test_work_that_is_claimed_with_a_revoked_token_is_released(api: ApiClient, engine: Engine) -> None:
    made = await engine.make_api_token("t", [ApiScope.WORK])
    claim = {"worker_instance_id": "i", "lanes": ["L"], "wait_ms": 30_000}
    api.app.reauthenticate_s = 3600
    poll = asyncio.create_task(api.post("/v1/workers/w/claims", claim, headers=bearer(made.token)))
    await wait_until(lambda: bool(api.app.waiting_claims))
    await engine.revoke_api_token(made.token_id)
    api.app.reauthenticate_s = 0
    execution_id = await api.create()
    answer = await poll

    assert answer.status_code == 401
    snapshot = await engine.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.current_lease is None, "the lease is released"
    await engine.sweep_once("delayed_promoter")
    assert [work.execution_id for work in await engine.claim_from_lanes(["L"], 1, **WORKER)] == [execution_id]


async def test_a_feed_ends_when_its_token_cannot_be_checked(
    api: ApiClient, client: httpx2.AsyncClient, engine: Engine
) -> None:
    made = await engine.make_api_token("t", [ApiScope.READ])

    async def unavailable(token: str) -> Any:
        raise errors.StoreUnavailable("unavailable")

    async with client.stream("GET", EVENTS[0], headers=bearer(made.token)) as answer:
        assert answer.status_code == 200
        engine.authenticate_token = unavailable  # type: ignore[method-assign]
        received = await read_lines(answer.aiter_lines())

    assert received[-2] == "event: end"


# -- the number of feeds ------------------------------------------------------------------------------------------


async def test_the_number_of_feeds_per_token_is_limited(engine: Engine) -> None:
    api = ApiClient.with_root_token(engine, max_feeds=2)
    headers = await new_bearer(engine, ApiScope.READ)
    async with run_server(api.app) as address, httpx2.AsyncClient(base_url=address) as client:
        first = client.stream("GET", EVENTS[0], headers=headers)
        async with client.stream("GET", EVENTS[1], headers=headers) as second:
            assert (await first.__aenter__()).status_code == second.status_code == 200
            refused = await client.get(EVENTS[2], headers=headers)
            assert (refused.status_code, refused.json()["kind"]) == (429, "resource_exhausted")
            assert "FF_MAX_FEEDS" in refused.json()["error"]
            assert refused.headers["retry-after"] == "1"
            async with client.stream("GET", EVENTS[2], headers=api.headers) as another:
                assert another.status_code == 200, "another token"
            bad = await client.get(f"{EVENTS[2]}?from=yesterday", headers=api.headers)
            assert bad.status_code == 400
            await first.__aexit__(None, None, None)
            async with asyncio.timeout(10):
                while (await client.head(EVENTS[2], headers=headers)).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        await wait_until(lambda: not api.app._feeds._open)
