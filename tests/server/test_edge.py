"""The first lines of a request: its host, who sends it, how often, and how much work reading it is."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import msgspec
import pytest

from flowfabric.engine.engine import Engine
from flowfabric.json_limits import MAX_DIGITS
from flowfabric.model.api_token import ApiScope
from flowfabric.server import ConfigError, ServerSettings, auth, create_app, openapi
from flowfabric.server.auth import rate_limit_address
from flowfabric.server.routes import ROUTE_GROUPS
from flowfabric.server.settings import from_environment
from flowfabric.settings import Secret
from tests.server.asking import Asking, fresh, path, serving

LIST = "/v1/executions?partition=7"
GOOD = {"Authorization": "Bearer s3cret"}
FOREIGN = ["evil.example", "evil.example:9090", "127.0.0.1.evil.example", "localhost.evil.example", "x@127.0.0.1", ""]


def guarded(engine: Engine, **settings: Any) -> Asking:
    return Asking(engine, ServerSettings(api_token=Secret("s3cret"), **settings))


async def bearer(engine: Engine, *scopes: ApiScope) -> dict[str, str]:
    """The header of a new token."""
    return {"Authorization": f"Bearer {(await engine.make_api_token('t', scopes)).token}"}


# -- hosts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", FOREIGN)
async def test_an_open_server_does_not_answer_to_a_foreign_host(ask: Asking, host: str) -> None:
    for where in (LIST, "/healthz", "/metrics", "/openapi.json", "/v1/waitpoints/x/y?token=z", "/nowhere"):
        answer = await ask.get(where, headers={"Host": host})
        assert (answer.status_code, answer.json()["kind"]) == (421, "misdirected_request"), where
    body = ask.creation()
    assert (await ask.post("/v1/executions", body, headers={"Host": host})).status_code == 421
    assert await ask.engine.describe_execution(body["execution_id"]) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:9090", "localhost:9090", "LOCALHOST", "[::1]:9090", "[::1]"])
async def test_an_open_server_answers_on_its_own_machine(ask: Asking, host: str) -> None:
    assert (await ask.get(LIST, headers={"Host": host})).status_code == 200


async def test_an_open_server_answers_to_the_names_it_was_given(engine: Engine) -> None:
    settings = from_environment(
        {
            "FF_LISTEN_ADDR": "10.1.2.3:9090",
            "FF_PUBLIC_URL": "https://Flows.example.com/ff",
            "FF_ALLOWED_HOSTS": "flowfabric, other.internal",
        }
    )
    ask = Asking(engine, settings)
    known = ["10.1.2.3:9090", "flows.example.com", "flowfabric:9090", "other.internal", "OTHER.internal."]
    statuses = [
        (await ask.get(LIST, headers={"Host": host})).status_code for host in (*known, "evil.example", "10.1.2.4")
    ]

    assert statuses == [200] * len(known) + [421, 421]


async def test_a_server_on_every_address_answers_to_addresses_which_no_name_can_become(engine: Engine) -> None:
    ask = Asking(engine, ServerSettings(host="0.0.0.0", allow_unauthenticated=True))

    assert (await ask.get(LIST, headers={"Host": "192.168.1.7:9090"})).status_code == 200
    assert (await ask.get(LIST, headers={"Host": "evil.example"})).status_code == 421


async def test_a_server_with_a_token_answers_to_every_host(engine: Engine) -> None:
    ask = guarded(engine)

    assert (await ask.get(LIST, headers=GOOD | {"Host": "evil.example"})).status_code == 200
    anyhow = Asking(engine, ServerSettings(allowed_hosts=("*",)))
    assert (await anyhow.get(LIST, headers={"Host": "evil.example"})).status_code == 200


async def test_a_mounted_application_leaves_hosts_to_the_one_around_it(engine: Engine) -> None:
    async def status(settings: ServerSettings) -> int:
        transport = httpx2.ASGITransport(app=create_app(engine, settings), root_path="/flows")
        async with httpx2.AsyncClient(transport=transport, base_url="http://ff") as client:
            return (await client.get("/flows/healthz", headers={"Host": "shop.example"})).status_code

    assert await status(ServerSettings()) == 200
    assert await status(ServerSettings(allowed_hosts=("flows.example",))) == 421


async def test_the_listener_itself_refuses_a_foreign_host(ask: Asking) -> None:
    async with serving(ask.app) as address, httpx2.AsyncClient(base_url=address) as client:
        assert (await client.get("/healthz")).status_code == 200
        assert (await client.get("/healthz", headers={"Host": "evil.example"})).status_code == 421


# -- who asks -----------------------------------------------------------------------------------------------------


async def test_two_authorization_headers_are_refused(engine: Engine) -> None:
    ask = guarded(engine)
    for pair in (("Bearer s3cret", "Bearer no"), ("Bearer no", "Bearer s3cret"), ("Bearer s3cret", "Bearer s3cret")):
        answer = await ask.get(LIST, headers=httpx2.Headers([("Authorization", one) for one in pair]))
        assert (answer.status_code, answer.json()["error"]) == (400, "more than one Authorization header")


async def test_a_key_with_another_body_query_or_fields_is_a_conflict(ask: Asking) -> None:
    once = {"Idempotency-Key": "k"}
    body = ask.creation()
    first = await ask.post("/v1/executions", body, headers=once)
    again = await ask.post("/v1/executions", body, headers=once)
    others = [
        await ask.post("/v1/executions", body | {"priority": 5}, headers=once),
        await ask.post("/v1/executions", ask.creation(), headers=once),
        await ask.post("/v1/executions?x=1", body, headers=once),
    ]

    assert (first.status_code, first.content) == (again.status_code, again.content) == (201, first.content)
    assert [(one.status_code, one.json()["kind"]) for one in others] == [(409, "idempotency_conflict")] * 3
    assert msgspec.json.decode(others[0].headers["x-ff-error"])["code"] == "idempotency_conflict"
    assert (await ask.post("/v1/executions", ask.creation(), headers={"Idempotency-Key": "l"})).status_code == 201


async def test_a_key_under_way_with_another_body_is_a_conflict_at_once(ask: Asking) -> None:
    claim = {"worker_instance_id": "i", "lanes": ["L"], "wait_ms": 20_000}
    once = {"Idempotency-Key": "k"}
    waiting = asyncio.create_task(ask.post("/v1/workers/w/claims", claim, headers=once))
    while not ask.app.waiting_claims:  # noqa: ASYNC110 - there is nothing to be told by
        await asyncio.sleep(0.001)
    other = await ask.post("/v1/workers/w/claims", claim | {"limit": 2}, headers=once)
    assert (other.status_code, other.json()["kind"]) == (409, "idempotency_conflict")
    execution_id = await ask.created()
    [work] = (await waiting).json()["claimed"]
    assert work["execution_id"] == execution_id


async def test_nobody_hears_the_answer_that_another_was_given(engine: Engine) -> None:
    ask = guarded(engine)
    body, once = ask.creation(), {"Idempotency-Key": "k"}
    one, other = await bearer(engine, ApiScope.SUBMIT), await bearer(engine, ApiScope.SUBMIT)

    assert (await ask.post("/v1/executions", body, headers=one | once)).status_code == 201
    assert (await ask.post("/v1/executions", body, headers=other | once)).status_code == 200, "a repeated create"
    changed = body | {"priority": 7}
    assert (await ask.post("/v1/executions", changed, headers=other | once)).status_code == 409


# -- how often ----------------------------------------------------------------------------------------------------


async def test_wrong_tokens_are_counted_by_address_and_a_good_one_is_not_kept_out(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = guarded(engine, rate_limit=0.01)
    good = await bearer(engine, ApiScope.READ)
    looked_up: list[str] = []
    find = engine.authenticate_token

    async def holder_of(token: str) -> Any:
        looked_up.append(token)
        return await find(token)

    engine.authenticate_token = holder_of  # type: ignore[method-assign]
    assert (await ask.get(LIST, headers=good)).status_code == 200
    wrong = [{"Authorization": f"Bearer ff_{'0' * 32}_{number}"} for number in range(5)]
    statuses = [(await ask.get(LIST, headers=one)).status_code for one in wrong]

    assert statuses == [401, 429, 429, 429, 429]
    assert len(looked_up) == 2, "what is refused costs no look at the store"
    assert (await ask.get(LIST)).status_code == 429
    assert (await ask.get("/v1/store", headers=wrong[0])).status_code == 429
    assert (await ask.get(LIST, headers=GOOD)).status_code == 200, "the server's own token"
    monkeypatch.setattr(auth, "TOKEN_CACHE_S", 0.0)
    known = await ask.app.authenticator.authenticate(good["Authorization"].encode(), "127.0.0.1")
    assert known.name.startswith("t ("), "a token that was good before is looked up"


@pytest.mark.parametrize("where", ["/healthz", "/readyz", "/metrics", "/openapi.json", "/v1/waitpoints/x/y?token=z"])
async def test_routes_without_a_token_are_counted_by_address(engine: Engine, where: str) -> None:
    ask = guarded(engine, rate_limit=0.01)

    assert (await ask.get(where)).status_code in (200, 404)
    refused = await ask.get(where)
    assert (refused.status_code, refused.json()["kind"]) == (429, "rate_limit_exceeded")
    assert int(refused.headers["retry-after"]) > 0
    others = [one for one in ("/healthz", "/readyz") if one != where]
    assert (await ask.get(others[0])).status_code == 200, "a route of its own"


async def test_callers_of_an_open_server_are_counted_by_address(engine: Engine) -> None:
    app = create_app(engine, ServerSettings(rate_limit=0.01))

    async def status(address: str) -> int:
        transport = httpx2.ASGITransport(app=app, client=(address, 1))
        async with httpx2.AsyncClient(transport=transport, base_url="http://ff") as client:
            return (await client.get(LIST)).status_code

    addresses = ("10.0.0.1", "10.0.0.1", "10.0.0.2", "2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")
    assert [await status(one) for one in addresses] == [200, 429, 200, 200, 429, 200]


def test_an_address_without_a_form_is_counted_as_it_is() -> None:
    assert [
        rate_limit_address(one) for one in (None, ("", 0), ("a:b", 1), ("::ffff:10.0.0.1", 5), ("fe80::1%eth0", 2))
    ] == [
        "",
        "",
        "a:b",
        "10.0.0.1",
        "fe80::/64",
    ]


# -- how much work ------------------------------------------------------------------------------------------------


async def test_the_document_is_made_once(ask: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    document = openapi.build_document

    def counted(table: Any) -> dict[str, Any]:
        made.append(table)
        return document(table)

    monkeypatch.setattr(openapi, "build_document", counted)
    answers = [await ask.get("/openapi.json") for _ in range(3)]

    assert len(made) == 1
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].json()["openapi"] == "3.1.0"


WITH_BODY = [operation for page in ROUTE_GROUPS for operation in page.entries if operation.decoder is not None]
LONG = b"9" * (MAX_DIGITS + 1)


@pytest.mark.parametrize("operation", WITH_BODY, ids=lambda operation: operation.name)
@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_no_route_reads_a_number_of_many_digits_or_falls_over_deep_json(ask: Asking, operation: Any) -> None:
    where = operation.path.replace("{id}", fresh()).replace("{", "").replace("}", "")
    headers = {"content-type": "application/json"}
    bodies = [b'{"x": [' + LONG + b"]}", b'{"policy": ' + b"[" * 60_000, b'{"policy": ' + b'{"a":' * 5000]
    for body in bodies:
        answer = await ask(operation.method, where, content=body, headers=headers)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"].startswith("invalid JSON: ")
    if operation.octets_field is not None:
        headers = {"content-type": "application/octet-stream", "x-ff-fields": '{"x": ' + LONG.decode() + "}"}
        assert (await ask(operation.method, where, content=b"", headers=headers)).status_code == 400


DEEP = msgspec.json.decode("[" * 500 + "]" * 500)


@pytest.mark.parametrize("field", ["policy", "tags", "input_payload", "execution_kind"])
async def test_a_create_with_odd_fields_is_a_typed_refusal(ask: Asking, field: str) -> None:
    for odd in (DEEP, {"a": DEEP}, 10**300, -(10**300), {"a": 10**300}, [10**300]):
        answer = await ask.post("/v1/executions", content=msgspec.json.encode(ask.creation() | {field: odd}),
                                headers={"content-type": "application/json"})  # fmt: skip
        assert answer.status_code in (201, 400, 422), answer.text


# -- settings -----------------------------------------------------------------------------------------------------


def test_limits_are_on_unless_switched_off() -> None:
    usual = from_environment({})
    assert (usual.max_connections, usual.max_feeds) == (1000, 100)
    off = from_environment({"FF_MAX_CONNECTIONS": "0", "FF_MAX_FEEDS": "0"})
    assert (off.max_connections, off.max_feeds) == (0, 0)
    with pytest.raises(ConfigError, match="FF_MAX_FEEDS"):
        from_environment({"FF_MAX_FEEDS": "many"})


async def test_an_execution_is_still_found_by_its_path(ask: Asking) -> None:
    assert await ask.state(await ask.created()) == "waiting"
    assert (await ask.get(path(fresh(), "state"))).status_code == 404
