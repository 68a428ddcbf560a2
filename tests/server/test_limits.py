"""Protection of a public server: rate limits, timeouts, connection limits, CORS, audit, sweeps."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path

import httpx2
import msgspec
import pytest

from flowfabric.engine.engine import Engine
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server import ConfigError, ServerSettings, connection_limits
from flowfabric.server.lifecycle import engine_lifespan
from flowfabric.server.routes import ROUTE_GROUPS
from flowfabric.server.settings import from_environment
from flowfabric.settings import Secret
from tests.server.api_client import ApiClient, new_bearer, new_execution_id, path, run_server, wait_until

LIST = "/v1/executions?partition=7"
OWN_EVENTS = {"rotate_waitpoint_secret"}  # audited by its own event, which has the result


async def test_each_token_has_its_own_rate_limit(engine: Engine) -> None:
    api = ApiClient.with_root_token(engine, rate_limit=0.01)
    one, other = await new_bearer(engine, ApiScope.READ), await new_bearer(engine, ApiScope.READ)

    assert [(await api.get(LIST, headers=one)).status_code for _ in range(3)] == [200, 429, 429]
    assert [(await api.get(LIST, headers=other)).status_code for _ in range(2)] == [200, 429]
    assert (await api.get(LIST)).status_code == 200


async def test_a_rate_limit_recovers_with_time(engine: Engine) -> None:
    api = ApiClient.with_root_token(engine, rate_limit=4)
    while (await api.get(LIST)).status_code == 200:
        pass
    async with asyncio.timeout(5):
        while (await api.get(LIST)).status_code == 429:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.05)


async def test_long_polls_have_no_request_timeout(engine: Engine) -> None:
    execution_id = await ApiClient(engine).create()
    api = ApiClient(engine, ServerSettings(request_timeout_ms=20))
    claim = {"worker_instance_id": "i", "lanes": ["none"], "wait_ms": 100}

    assert (await api.post("/v1/workers/w/claims", claim)).json() == {"claimed": []}
    assert (await api.get(path(execution_id, "end") + "?wait_ms=100")).status_code == 204
    tail = path(execution_id, "attempts", 0, "stream", "tail") + "?block_ms=100"
    assert (await api.get(tail)).json() == {"frames": [], "count": 0}


async def test_connections_above_the_limit_are_refused_and_open_ones_continue(engine: Engine) -> None:
    api = ApiClient(engine, ServerSettings(max_connections=3))
    async with run_server(api.app) as address, AsyncExitStack() as stack:
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
            while (await clients[4].get("/healthz")).status_code != 200:  # noqa: ASYNC110 - the server notices later
                await asyncio.sleep(0.01)


async def test_connections_far_above_the_limit_are_closed_without_a_response(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_limits, "MAX_REFUSED_CONNECTIONS", 1)
    api = ApiClient(engine, ServerSettings(max_connections=1))
    async with run_server(api.app) as address:
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
def test_every_address_but_loopback_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="without a token"):
        ServerSettings(host=host).check()
    ServerSettings(host=host, api_token=Secret("t")).check()


def test_invalid_cors_origins_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    read = from_environment({"FF_CORS_ORIGINS": "https://a.example, nonsense"})

    assert read.cors_origins == ("https://a.example",)
    assert "nonsense" in caplog.text


async def test_a_preflight_of_an_unknown_origin_allows_nothing(engine: Engine) -> None:
    api = ApiClient.with_root_token(engine, cors_origins=("https://a.example",))
    asks = {"Origin": "https://b.example", "Access-Control-Request-Method": "POST"}
    answer = await api("OPTIONS", LIST, headers=asks)

    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
    unasked = await ApiClient.with_root_token(engine)("OPTIONS", LIST, headers=asks)
    assert (unasked.status_code, [name for name in unasked.headers if "access-control" in name]) == (405, [])


# -- audit --------------------------------------------------------------------------------------------------------


def test_every_change_by_operators_and_administrators_is_audited() -> None:
    operations = [operation for page in ROUTE_GROUPS for operation in page.entries]
    powerful = [one for one in operations if one.scope in (ApiScope.OPERATE, ApiScope.ADMIN) and one.method != "GET"]

    assert len(powerful) > 10
    assert {one.name for one in powerful if not one.audit} == OWN_EVENTS
    assert {one.name for one in operations if one.audit and one.method == "GET"} == {"read_waitpoint_token"}


async def test_refused_actions_are_audited(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "flowfabric.audit")
    api, reader, unknown = (
        ApiClient.with_root_token(engine),
        await new_bearer(engine, ApiScope.READ),
        new_execution_id(),
    )
    execution_id = await api.create_completed()

    await api.post(path(execution_id, "cancel"), api.cancel_body(execution_id), headers=reader)
    await api.post(path(execution_id, "cancel"), api.cancel_body(execution_id))
    await api.post(path(unknown, "replay"))
    await api.post(path(execution_id, "cancel"), api.cancel_body(execution_id), headers={"Authorization": "Bearer no"})

    audited = [(r.getMessage(), r.fields) for r in caplog.records if r.name == "flowfabric.audit"]  # type: ignore[attr-defined]
    assert [(event, facts["about"], facts["outcome"]) for event, facts in audited] == [
        ("cancel_execution", execution_id, "refused: 403"),
        ("cancel_execution", execution_id, "refused: execution_not_active"),
        ("replay_execution", unknown, "refused: execution_not_found"),
    ], "a request without a valid token is not audited"
    assert audited[0][1]["who"].startswith("t (")
    assert audited[1][1]["who"] == "root"


# -- sweeps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_on", [True, False])
async def test_sweeps_run_in_the_server_unless_switched_off(tmp_path: Path, is_on: bool) -> None:
    settings = from_environment({} if is_on else {"FF_NO_SWEEPS": "1"})
    settings = msgspec.structs.replace(settings, log="warning")
    async with engine_lifespan(f"sqlite:///{tmp_path}/ff.db", settings) as engine:
        assert (engine._sweeper is not None) == is_on
        if is_on:
            await wait_until(lambda: bool(engine.metrics.counter_value("ff_scanner_cycle", scanner="delayed_promoter")))
