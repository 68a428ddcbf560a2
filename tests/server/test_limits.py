"""What keeps a server safe in the open: rates by token, limits of time and number, doors, audit, sweeps."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from flowfabric.engine.engine import Engine
from flowfabric.model.api_token import ApiScope
from flowfabric.server import ConfigError, ServerSettings, connection_limits
from flowfabric.server.lifecycle import engine_lifespan
from flowfabric.server.routes import ROUTE_GROUPS
from flowfabric.server.settings import from_environment
from flowfabric.settings import Secret
from tests.server.asking import Asking, fresh, path, serving, until

LIST = "/v1/executions?partition=7"
OWN_EVENTS = {"rotate_waitpoint_secret"}  # told with what came of it, in words of their own


def guarded(engine: Engine, **settings: Any) -> Asking:
    return Asking(engine, ServerSettings(api_token=Secret("s3cret"), **settings), Authorization="Bearer s3cret")


async def header(engine: Engine, *scopes: ApiScope) -> dict[str, str]:
    """The header of a new token."""
    return {"Authorization": f"Bearer {(await engine.make_api_token('t', scopes)).token}"}


async def test_each_token_has_a_rate_of_its_own(engine: Engine) -> None:
    ask = guarded(engine, rate_limit=0.01)
    one, other = await header(engine, ApiScope.READ), await header(engine, ApiScope.READ)

    assert [(await ask.get(LIST, headers=one)).status_code for _ in range(3)] == [200, 429, 429]
    assert [(await ask.get(LIST, headers=other)).status_code for _ in range(2)] == [200, 429]
    assert (await ask.get(LIST)).status_code == 200


async def test_a_rate_comes_back_with_time(engine: Engine) -> None:
    ask = guarded(engine, rate_limit=4)
    while (await ask.get(LIST)).status_code == 200:
        pass
    async with asyncio.timeout(5):
        while (await ask.get(LIST)).status_code == 429:  # noqa: ASYNC110 - there is nothing to be told by
            await asyncio.sleep(0.05)


async def test_requests_that_wait_on_purpose_have_no_time_limit(engine: Engine) -> None:
    execution_id = await Asking(engine).created()
    ask = Asking(engine, ServerSettings(request_timeout_ms=20))
    claim = {"worker_instance_id": "i", "lanes": ["none"], "wait_ms": 100}

    assert (await ask.post("/v1/workers/w/claims", claim)).json() == {"claimed": []}
    assert (await ask.get(path(execution_id, "end") + "?wait_ms=100")).status_code == 204
    tail = path(execution_id, "attempts", 0, "stream", "tail") + "?block_ms=100"
    assert (await ask.get(tail)).json() == {"frames": [], "count": 0}


async def test_connections_beyond_their_number_are_turned_away_and_the_first_ones_go_on(engine: Engine) -> None:
    ask = Asking(engine, ServerSettings(max_connections=3))
    async with serving(ask.app) as address, AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(httpx2.AsyncClient(base_url=address)) for _ in range(5)]
        answers = [await client.get("/healthz") for client in clients]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 503, 503]
        assert answers[3].json() == {
            "error": "too many connections; retry later",
            "kind": "unavailable",
            "retryable": True,
        }
        assert (answers[3].headers["connection"], answers[3].headers["retry-after"]) == ("close", "1")
        assert [(await client.get("/healthz")).status_code for client in clients[:3]] == [200, 200, 200]
        await clients[0].aclose()
        async with asyncio.timeout(10):
            while (await clients[4].get("/healthz")).status_code != 200:  # noqa: ASYNC110 - the server hears of it later
                await asyncio.sleep(0.01)


async def test_far_too_many_connections_are_closed_unheard(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "MAX_REFUSED_CONNECTIONS", 1)
    ask = Asking(engine, ServerSettings(max_connections=1))
    async with serving(ask.app) as address:
        port = int(address.rpartition(":")[2])
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        async with asyncio.timeout(10):
            closed = [await reader.read() for reader, _ in opened[2:]]
        assert closed == [b"", b"", b""]
        opened[0][1].write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (await opened[0][0].readline()).startswith(b"HTTP/1.1 200")
        for _, writer in opened:
            writer.close()


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1.example.org", "localhost.example.org", "", "1270.0.0.1"],
)
def test_every_address_that_others_can_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="without a token"):
        ServerSettings(host=host).check()
    ServerSettings(host=host, api_token=Secret("t")).check()


def test_origins_that_cannot_be_read_are_passed_over_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    read = from_environment({"FF_CORS_ORIGINS": "https://a.example, nonsense"})

    assert read.cors_origins == ("https://a.example",)
    assert "nonsense" in caplog.text


async def test_a_preflight_of_a_stranger_allows_nothing(engine: Engine) -> None:
    ask = guarded(engine, cors_origins=("https://a.example",))
    asks = {"Origin": "https://b.example", "Access-Control-Request-Method": "POST"}
    answer = await ask("OPTIONS", LIST, headers=asks)

    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
    unasked = await guarded(engine)("OPTIONS", LIST, headers=asks)
    assert (unasked.status_code, [name for name in unasked.headers if "access-control" in name]) == (405, [])


# -- audit --------------------------------------------------------------------------------------------------------


def test_whatever_operators_and_administrators_change_is_audited() -> None:
    operations = [operation for page in ROUTE_GROUPS for operation in page.entries]
    powerful = [one for one in operations if one.scope in (ApiScope.OPERATE, ApiScope.ADMIN) and one.method != "GET"]

    assert len(powerful) > 10
    assert {one.name for one in powerful if not one.is_audited} == OWN_EVENTS
    assert {one.name for one in operations if one.is_audited and one.method == "GET"} == {"read_waitpoint_token"}


async def test_refused_actions_are_audited_too(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flowfabric.audit")
    ask, reader, unknown = guarded(engine), await header(engine, ApiScope.READ), fresh()
    execution_id = await ask.completed()

    await ask.post(path(execution_id, "cancel"), ask.cancel(execution_id), headers=reader)
    await ask.post(path(execution_id, "cancel"), ask.cancel(execution_id))
    await ask.post(path(unknown, "replay"))
    await ask.post(path(execution_id, "cancel"), ask.cancel(execution_id), headers={"Authorization": "Bearer no"})

    told = [(r.getMessage(), r.fields) for r in caplog.records if r.name == "flowfabric.audit"]  # type: ignore[attr-defined]
    assert [(event, facts["about"], facts["outcome"]) for event, facts in told] == [
        ("cancel_execution", execution_id, "refused: 403"),
        ("cancel_execution", execution_id, "refused: execution_not_active"),
        ("replay_execution", unknown, "refused: execution_not_found"),
    ], "somebody without a good token is nobody, and not worth a line of the audit"
    assert told[0][1]["who"].startswith("t (")
    assert told[1][1]["who"] == "root"


# -- sweeps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_on", [True, False])
async def test_sweeps_run_in_the_server_unless_switched_off(tmp_path: Path, is_on: bool) -> None:
    settings = from_environment({} if is_on else {"FF_NO_SWEEPS": "1"})
    settings = msgspec.structs.replace(settings, log="warning")
    async with engine_lifespan(f"sqlite:///{tmp_path}/ff.db", settings) as engine:
        assert (engine._sweeper is not None) == is_on
        if is_on:
            await until(lambda: bool(engine.metrics.counter_value("ff_scanner_cycle", scanner="delayed_promoter")))
