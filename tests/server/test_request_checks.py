"""The edge of the server: hosts, authentication headers, idempotency keys, rate limits, and limits of parsing."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import msgspec
import pytest

from flowfabric.engine.engine import Engine
from flowfabric.json_limits import MAX_DIGITS
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server import ConfigError, ServerSettings, create_app, openapi
from flowfabric.server.routes import ROUTE_GROUPS
from flowfabric.server.security import auth
from flowfabric.server.security.auth import rate_limit_address
from flowfabric.server.settings import from_environment
from flowfabric.settings import Secret
from tests.server.api_client import (
    ROOT_TOKEN,
    ApiClient,
    bearer,
    new_bearer,
    new_execution_id,
    path,
    run_server,
    wait_until,
)

LIST = "/v1/executions?partition=7"
GOOD = bearer(ROOT_TOKEN)
FOREIGN = ["evil.example", "evil.example:9090", "127.0.0.1.evil.example", "localhost.evil.example", "x@127.0.0.1", ""]


def guarded(engine: Engine, **settings: Any) -> ApiClient:
    return ApiClient(engine, ServerSettings(api_token=Secret("s3cret"), **settings))


# -- hosts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", FOREIGN)
async def test_a_server_without_a_token_refuses_a_foreign_host(api: ApiClient, host: str) -> None:
    for url in (LIST, "/healthz", "/metrics", "/openapi.json", "/v1/waitpoints/x/y?token=z", "/nowhere"):
        answer = await api.get(url, headers={"Host": host})
        assert (answer.status_code, answer.json()["kind"]) == (421, "misdirected_request"), url
    body = api.create_body()
    assert (await api.post("/v1/executions", body, headers={"Host": host})).status_code == 421
    assert await api.engine.describe_execution(body["execution_id"]) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:9090", "localhost:9090", "LOCALHOST", "[::1]:9090", "[::1]"])
async def test_a_server_without_a_token_accepts_loopback_hosts(api: ApiClient, host: str) -> None:
    assert (await api.get(LIST, headers={"Host": host})).status_code == 200


async def test_a_server_without_a_token_accepts_configured_hosts(engine: Engine) -> None:
    settings = from_environment(
        {
            "FF_LISTEN_ADDR": "10.1.2.3:9090",
            "FF_PUBLIC_URL": "https://Flows.example.com/ff",
            "FF_ALLOWED_HOSTS": "flowfabric, other.internal",
        }
    )
    api = ApiClient(engine, settings)
    known = ["10.1.2.3:9090", "flows.example.com", "flowfabric:9090", "other.internal", "OTHER.internal."]
    statuses = [
        (await api.get(LIST, headers={"Host": host})).status_code for host in (*known, "evil.example", "10.1.2.4")
    ]

    assert statuses == [200] * len(known) + [421, 421]


async def test_a_server_on_all_addresses_accepts_ip_addresses_as_host(engine: Engine) -> None:
    api = ApiClient(engine, ServerSettings(host="0.0.0.0", allow_unauthenticated=True))

    assert (await api.get(LIST, headers={"Host": "192.168.1.7:9090"})).status_code == 200
    assert (await api.get(LIST, headers={"Host": "evil.example"})).status_code == 421


async def test_a_server_with_a_token_accepts_every_host(engine: Engine) -> None:
    api = guarded(engine)

    assert (await api.get(LIST, headers=GOOD | {"Host": "evil.example"})).status_code == 200
    any_host = ApiClient(engine, ServerSettings(allowed_hosts=("*",)))
    assert (await any_host.get(LIST, headers={"Host": "evil.example"})).status_code == 200


async def test_a_mounted_application_does_not_check_hosts_by_default(engine: Engine) -> None:
    async def status(settings: ServerSettings) -> int:
        transport = httpx2.ASGITransport(app=create_app(engine, settings), root_path="/flows")
        async with httpx2.AsyncClient(transport=transport, base_url="http://ff") as client:
            return (await client.get("/flows/healthz", headers={"Host": "shop.example"})).status_code

    assert await status(ServerSettings()) == 200
    assert await status(ServerSettings(allowed_hosts=("flows.example",))) == 421


async def test_the_listener_itself_refuses_a_foreign_host(api: ApiClient) -> None:
    async with run_server(api.app) as address, httpx2.AsyncClient(base_url=address) as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/healthz", headers={"Host": "evil.example"})).status_code == 421


# -- callers ------------------------------------------------------------------------------------------------------


async def test_two_authorization_headers_are_refused(engine: Engine) -> None:
    api = guarded(engine)
    for pair in (("Bearer s3cret", "Bearer no"), ("Bearer no", "Bearer s3cret"), ("Bearer s3cret", "Bearer s3cret")):
        answer = await api.get(LIST, headers=httpx2.Headers([("Authorization", one) for one in pair]))
        assert (answer.status_code, answer.json()["error"]) == (400, "more than one Authorization header")


async def test_an_idempotency_key_with_another_request_is_a_conflict(api: ApiClient) -> None:
    once = {"Idempotency-Key": "k"}
    body = api.create_body()
    first = await api.post("/v1/executions", body, headers=once)
    again = await api.post("/v1/executions", body, headers=once)
    others = [
        await api.post("/v1/executions", body | {"priority": 5}, headers=once),
        await api.post("/v1/executions", api.create_body(), headers=once),
        await api.post("/v1/executions?x=1", body, headers=once),
    ]

    assert (first.status_code, first.content) == (again.status_code, again.content) == (201, first.content)
    assert [(one.status_code, one.json()["kind"]) for one in others] == [(409, "idempotency_conflict")] * 3
    assert msgspec.json.decode(others[0].headers["x-ff-error"])["code"] == "idempotency_conflict"
    assert (await api.post("/v1/executions", api.create_body(), headers={"Idempotency-Key": "l"})).status_code == 201


async def test_an_idempotency_key_in_flight_with_another_body_is_a_conflict(api: ApiClient) -> None:
    claim = {"worker_instance_id": "i", "lanes": ["L"], "wait_ms": 20_000}
    once = {"Idempotency-Key": "k"}
    waiting = asyncio.create_task(api.post("/v1/workers/w/claims", claim, headers=once))
    await wait_until(lambda: bool(api.app.waiting_claims))
    other = await api.post("/v1/workers/w/claims", claim | {"limit": 2}, headers=once)
    assert (other.status_code, other.json()["kind"]) == (409, "idempotency_conflict")
    execution_id = await api.create()
    [work] = (await waiting).json()["claimed"]
    assert work["execution_id"] == execution_id


async def test_a_stored_response_is_not_returned_to_another_token(engine: Engine) -> None:
    api = guarded(engine)
    body, once = api.create_body(), {"Idempotency-Key": "k"}
    one, other = await new_bearer(engine, ApiScope.SUBMIT), await new_bearer(engine, ApiScope.SUBMIT)

    assert (await api.post("/v1/executions", body, headers=one | once)).status_code == 201
    assert (await api.post("/v1/executions", body, headers=other | once)).status_code == 200, "a repeated create"
    changed = body | {"priority": 7}
    assert (await api.post("/v1/executions", changed, headers=other | once)).status_code == 409


# -- rate limits --------------------------------------------------------------------------------------------------


async def test_wrong_tokens_are_rate_limited_by_address_and_a_valid_one_is_not(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = guarded(engine, rate_limit=0.01)
    good = await new_bearer(engine, ApiScope.READ)
    looked_up: list[str] = []
    find = engine.authenticate_token

    async def recorded(token: str) -> Any:
        looked_up.append(token)
        return await find(token)

    engine.authenticate_token = recorded  # type: ignore[method-assign]
    assert (await api.get(LIST, headers=good)).status_code == 200
    wrong = [{"Authorization": f"Bearer ff_{'0' * 32}_{number}"} for number in range(5)]
    statuses = [(await api.get(LIST, headers=one)).status_code for one in wrong]

    assert statuses == [401, 429, 429, 429, 429]
    assert len(looked_up) == 2, "a rate-limited request does not reach the store"
    assert (await api.get(LIST)).status_code == 429
    assert (await api.get("/v1/store", headers=wrong[0])).status_code == 429
    assert (await api.get(LIST, headers=GOOD)).status_code == 200, "the server's own token"
    monkeypatch.setattr(auth, "TOKEN_CACHE_S", 0.0)
    known = await api.app.authenticator.authenticate(good["Authorization"].encode(), "127.0.0.1")
    assert known.name.startswith("t ("), "a token that was valid before is looked up"


@pytest.mark.parametrize("url", ["/healthz", "/readyz", "/metrics", "/openapi.json", "/v1/waitpoints/x/y?token=z"])
async def test_routes_without_a_token_are_rate_limited_by_address(engine: Engine, url: str) -> None:
    api = guarded(engine, rate_limit=0.01)

    assert (await api.get(url)).status_code in (200, 404)
    refused = await api.get(url)
    assert (refused.status_code, refused.json()["kind"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) > 0
    others = [one for one in ("/healthz", "/readyz") if one != url]
    assert (await api.get(others[0])).status_code == 200, "each route has its own limit"


async def test_callers_of_a_server_without_a_token_are_rate_limited_by_address(engine: Engine) -> None:
    app = create_app(engine, ServerSettings(rate_limit=0.01))

    async def status(address: str) -> int:
        transport = httpx2.ASGITransport(app=app, client=(address, 1))
        async with httpx2.AsyncClient(transport=transport, base_url="http://ff") as client:
            return (await client.get(LIST)).status_code

    addresses = ("10.0.0.1", "10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")
    assert [await status(one) for one in addresses] == [200, 429, 200, 200, 429, 200]


def test_rate_limits_group_ipv6_addresses_by_network() -> None:
    assert [
        rate_limit_address(one) for one in (None, ("", 0), ("a:b", 1), ("::ffff:10.0.0.1", 5), ("fe80::1%eth0", 2))
    ] == [
        "",
        "",
        "a:b",
        "10.0.0.1",
        "fe80::/64",
    ]


# -- limits of parsing --------------------------------------------------------------------------------------------


async def test_the_openapi_document_is_built_once(api: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    document = openapi.build_document

    def counted(table: Any) -> dict[str, Any]:
        made.append(table)
        return document(table)

    monkeypatch.setattr(openapi, "build_document", counted)
    answers = [await api.get("/openapi.json") for _ in range(3)]

    assert len(made) == 1
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].json()["openapi"] == "3.1.0"


WITH_BODY = [operation for page in ROUTE_GROUPS for operation in page.entries if operation.decoder is not None]
LONG = b"9" * (MAX_DIGITS + 1)


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda operation: operation.name)
@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_every_route_refuses_long_numbers_and_deep_json(api: ApiClient, operation: Any) -> None:
    url = operation.path.replace("{id}", new_execution_id()).replace("{", "").replace("}", "")
    headers = {"content-type": "application/json"}
    bodies = [b'{"x": [' + LONG + b"]}", b'{"policy": ' + b"[" * 60_000, b'{"policy": ' + b'{"a":' * 5000]
    for body in bodies:
        answer = await api(operation.method, url, content=body, headers=headers)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"].startswith("invalid JSON: ")
    if operation.octets_field is not None:
        headers = {"content-type": "application/octet-stream", "x-ff-fields": '{"x": ' + LONG.decode() + "}"}
        assert (await api(operation.method, url, content=b"", headers=headers)).status_code == 400


DEEP = msgspec.json.decode("[" * 500 + "]" * 500)


@pytest.mark.parametrize("field", ["policy", "tags", "input_payload", "execution_kind"])
async def test_a_create_with_extreme_values_is_no_server_error(api: ApiClient, field: str) -> None:
    for odd in (DEEP, {"a": DEEP}, 10**300, -(10**300), {"a": 10**300}, [10**300]):
        answer = await api.post("/v1/executions", content=msgspec.json.encode(api.create_body() | {field: odd}),
                                headers={"content-type": "application/json"})  # fmt: skip
        assert answer.status_code in (201, 400, 422), answer.text


# -- settings -----------------------------------------------------------------------------------------------------


def test_connection_and_feed_limits_have_defaults() -> None:
    usual = from_environment({})
    assert (usual.max_connections, usual.max_feeds) == (1000, 100)
    off = from_environment({"FF_MAX_CONNECTIONS": "0", "FF_MAX_FEEDS": "0"})
    assert (off.max_connections, off.max_feeds) == (0, 0)
    with pytest.raises(ConfigError, match="FF_MAX_FEEDS"):
        from_environment({"FF_MAX_FEEDS": "many"})


async def test_an_execution_is_still_found_by_its_path(api: ApiClient) -> None:
    assert await api.state(await api.create()) == "waiting"
    assert (await api.get(path(new_execution_id(), "state"))).status_code == 404
