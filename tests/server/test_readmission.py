"""Tokens that are revoked or run out while a request waits: feeds, tails and long polls end within 15 seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.model.api_token import ApiScope
from flowfabric.server import ServerSettings, auth
from flowfabric.server.app import REAUTHENTICATE_S
from flowfabric.server.routes import ROUTE_GROUPS
from flowfabric.settings import Secret
from tests.server.asking import Asking, path, serving, until

WORKER: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w:1"}
EVENTS = ["/v1/events/completions", "/v1/events/leases", "/v1/events/signals", "/v1/events/operators"]


@pytest.fixture
def ask(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Asking:
    """A guarded server that asks for tokens again after a moment."""
    monkeypatch.setattr(auth, "TOKEN_CACHE_S", 0.0)
    ask = Asking(engine, ServerSettings(api_token=Secret("s3cret")), Authorization="Bearer s3cret")
    ask.app.reauthenticate_s = 0.05
    return ask


@pytest.fixture
async def client(ask: Asking) -> AsyncIterator[httpx2.AsyncClient]:
    async with serving(ask.app) as address, httpx2.AsyncClient(base_url=address, timeout=20) as client:
        yield client


async def told(lines: AsyncIterator[str]) -> list[str]:
    """Everything that is told until the end."""
    async with asyncio.timeout(10):
        return [line async for line in lines if line]


def test_a_token_is_asked_for_again_within_fifteen_seconds() -> None:
    assert REAUTHENTICATE_S + auth.TOKEN_CACHE_S <= 15


@pytest.mark.parametrize("where", EVENTS)
async def test_a_feed_ends_when_its_token_is_revoked(
    ask: Asking, client: httpx2.AsyncClient, engine: Engine, where: str
) -> None:
    made = await engine.make_api_token("t", [ApiScope.READ])
    headers = {"Authorization": f"Bearer {made.token}"}
    async with client.stream("GET", where, headers=headers) as answer:
        lines = answer.aiter_lines()
        async for line in lines:
            if line == "event: open":
                break
        await engine.revoke_api_token(made.token_id)
        heard = await told(lines)

    assert heard[-2:] == ["event: end", 'data: {"reason":"unauthorized"}']
    assert (await client.get(where, headers=headers)).status_code == 401


async def test_a_feed_tells_nothing_after_its_token_ran_out(
    ask: Asking, client: httpx2.AsyncClient, engine: Engine, clock: ManualClock
) -> None:
    made = await engine.make_api_token("t", [ApiScope.READ], expires_in_ms=60_000)
    headers = {"Authorization": f"Bearer {made.token}"}
    async with client.stream("GET", EVENTS[0], headers=headers) as answer:
        lines = answer.aiter_lines()
        async for line in lines:
            if line == "event: open":
                break
        clock.advance_ms(60_000)
        while_ending = asyncio.create_task(told(lines))
        heard = await while_ending
        late = await ask.completed()

    assert heard[-1] == 'data: {"reason":"unauthorized"}'
    assert not any(late in line for line in heard)


async def test_a_stream_of_frames_ends_with_its_token(ask: Asking, client: httpx2.AsyncClient, engine: Engine) -> None:
    execution_id = await ask.created()
    made = await engine.make_api_token("t", [ApiScope.READ])
    where = path(execution_id, "attempts", 0, "stream", "events")
    async with client.stream("GET", where, headers={"Authorization": f"Bearer {made.token}"}) as answer:
        assert answer.status_code == 200
        await engine.revoke_api_token(made.token_id)
        heard = await told(answer.aiter_lines())

    assert heard[-1] == 'data: {"reason":"unauthorized"}'


async def test_a_feed_whose_token_stays_good_goes_on(ask: Asking, client: httpx2.AsyncClient, engine: Engine) -> None:
    made = await engine.make_api_token("t", [ApiScope.READ])
    asked: list[str] = []
    find = engine.authenticate_token

    async def holder_of(token: str) -> Any:
        asked.append(token)
        return await find(token)

    engine.authenticate_token = holder_of  # type: ignore[method-assign]
    async with client.stream("GET", EVENTS[0], headers={"Authorization": f"Bearer {made.token}"}) as answer:
        await until(lambda: len(asked) > 3)
        execution_id = await ask.completed()
        async with asyncio.timeout(10):
            async for line in answer.aiter_lines():
                if execution_id in line:
                    break


POLLS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "await_end": ("GET", "{one}/end?wait_ms=30000", None),
    "get_result": ("GET", "{one}/result?wait_ms=30000", None),
    "tail_stream": ("GET", "{one}/attempts/0/stream/tail?block_ms=30000", None),
    "await_ends": ("POST", "/v1/executions/ends", {"execution_ids": ["{id}"], "wait_ms": 30_000}),
    "claim": ("POST", "/v1/workers/w/claims", {"worker_instance_id": "i", "lanes": ["idle"], "wait_ms": 30_000}),
}
COMMANDS = {"cancel_flow", "rotate_waitpoint_secret"}  # done once begun; what they answer is told to good tokens only


def test_every_route_that_waits_is_looked_at_here() -> None:
    waiting = {one.name for page in ROUTE_GROUPS for one in page.entries if one.is_long_poll and not one.is_streaming}

    assert waiting == set(POLLS) | COMMANDS


@pytest.mark.parametrize("name", POLLS)
async def test_a_long_poll_ends_when_its_token_is_revoked(
    ask: Asking, client: httpx2.AsyncClient, engine: Engine, name: str
) -> None:
    method, where, body = POLLS[name]
    execution_id = await ask.created()
    made = await engine.make_api_token("t", [ApiScope.READ, ApiScope.WORK])
    where = where.replace("{one}", path(execution_id))
    if body is not None and "execution_ids" in body:
        body = body | {"execution_ids": [execution_id]}
    poll = asyncio.create_task(
        client.request(method, where, json=body, headers={"Authorization": f"Bearer {made.token}"})
    )
    await until(lambda: bool(ask.app.on_closing))  # it waits
    await engine.revoke_api_token(made.token_id)
    async with asyncio.timeout(10):
        answer = await poll

    assert (answer.status_code, answer.json()["error"]) == (401, auth.UNAUTHENTICATED_MESSAGE)


async def test_work_that_is_claimed_for_a_revoked_token_is_handed_back(ask: Asking, engine: Engine) -> None:
    made = await engine.make_api_token("t", [ApiScope.WORK])
    claim = {"worker_instance_id": "i", "lanes": ["L"], "wait_ms": 30_000}
    ask.app.reauthenticate_s = 3600
    poll = asyncio.create_task(
        ask.post("/v1/workers/w/claims", claim, headers={"Authorization": f"Bearer {made.token}"})
    )
    await until(lambda: bool(ask.app.waiting_claims))
    await engine.revoke_api_token(made.token_id)
    ask.app.reauthenticate_s = 0
    execution_id = await ask.created()
    answer = await poll

    assert answer.status_code == 401
    snapshot = await engine.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.current_lease is None, "nobody holds it"
    await engine.sweep_once("delayed_promoter")
    assert [work.execution_id for work in await engine.claim_from_lanes(["L"], 1, **WORKER)] == [execution_id]


async def test_a_store_that_cannot_be_asked_ends_a_feed(
    ask: Asking, client: httpx2.AsyncClient, engine: Engine
) -> None:
    made = await engine.make_api_token("t", [ApiScope.READ])

    async def away(token: str) -> Any:
        raise errors.StoreUnavailable("away")

    async with client.stream("GET", EVENTS[0], headers={"Authorization": f"Bearer {made.token}"}) as answer:
        assert answer.status_code == 200
        engine.authenticate_token = away  # type: ignore[method-assign]
        heard = await told(answer.aiter_lines())

    assert heard[-2] == "event: end"


# -- how many -----------------------------------------------------------------------------------------------------


async def test_each_token_has_so_many_feeds_at_a_time(engine: Engine) -> None:
    ask = Asking(engine, ServerSettings(api_token=Secret("s3cret"), max_feeds=2), Authorization="Bearer s3cret")
    headers = {"Authorization": f"Bearer {(await engine.make_api_token('t', [ApiScope.READ])).token}"}
    async with serving(ask.app) as address, httpx2.AsyncClient(base_url=address) as client:
        first = client.stream("GET", EVENTS[0], headers=headers)
        async with client.stream("GET", EVENTS[1], headers=headers) as second:
            assert (await first.__aenter__()).status_code == second.status_code == 200
            refused = await client.get(EVENTS[2], headers=headers)
            assert (refused.status_code, refused.json()["kind"]) == (429, "resource_exhausted")
            assert "FF_MAX_FEEDS" in refused.json()["error"]
            assert refused.headers["retry-after"] == "1"
            async with client.stream("GET", EVENTS[2], headers=ask.headers) as another:
                assert another.status_code == 200, "another token"
            bad = await client.get(f"{EVENTS[2]}?from=yesterday", headers=ask.headers)
            assert bad.status_code == 400
            await first.__aexit__(None, None, None)
            async with asyncio.timeout(10):
                while (await client.head(EVENTS[2], headers=headers)).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        await until(lambda: not ask.app._feeds._open)
