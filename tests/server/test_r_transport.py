"""Transport, health, auth, decoding: scenarios R01 to R10."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.server import ServerSettings
from flowfabric.settings import Secret
from tests.server.asking import Asking, path

LIST = "/v1/executions?partition=0"


@pytest.fixture
def guarded(engine: Engine) -> Asking:
    """A client of a server that wants a token."""
    return Asking(engine, ServerSettings(api_token=Secret("s3cret")))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


@pytest.mark.spec("R01")
async def test_health_check(ask: Asking) -> None:
    answer = await ask.get("/healthz")

    assert answer.status_code == 200
    assert answer.json() == {"status": "ok"}
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.spec("R02")
async def test_health_check_ignores_auth(guarded: Asking) -> None:
    answer = await guarded.get("/healthz")

    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


@pytest.mark.spec("R03")
async def test_token_check(guarded: Asking) -> None:
    for headers in ({}, bearer("nope")):
        refused = await guarded.get(LIST, headers=headers)
        assert refused.status_code == 401
        assert refused.json() == {"error": "missing or invalid Authorization header"}
        assert "www-authenticate" not in refused.headers

    allowed = await guarded.get(LIST, headers=bearer("s3cret"))
    assert (allowed.status_code, allowed.json()) == (200, {"executions": [], "next_cursor": None})


@pytest.mark.spec("R04")
@pytest.mark.parametrize(
    "shown", ["bearer s3cret", "Bearer  s3cret", "BEARER s3cret", "s3cret", "Bearer", "Basic s3cret"]
)
async def test_scheme_is_case_sensitive(guarded: Asking, shown: str) -> None:
    assert (await guarded.get(LIST, headers={"Authorization": shown})).status_code == 401


@pytest.mark.spec("R05")
async def test_unknown_path_with_auth_on(guarded: Asking) -> None:
    assert (await guarded.get("/v1/nothing-here")).status_code == 401
    assert (await guarded.get("/v1/nothing-here", headers=bearer("s3cret"))).status_code == 404


@pytest.mark.spec("R06")
async def test_unknown_path_with_auth_off(ask: Asking) -> None:
    answer = await ask.get("/v1/nothing-here")

    assert (answer.status_code, answer.content) == (404, b"")


@pytest.mark.parametrize(
    "where",
    ["/", "/v1", "/v1/", "/v1/executions/", "//v1/executions", "/V1/executions", "/healthz/", "/v1/workers//claim"],
)
async def test_a_path_that_is_nearly_right_is_unknown(ask: Asking, where: str) -> None:
    answer = await ask.get(f"http://ff{where}")

    assert (answer.status_code, answer.content) == (404, b"")


@pytest.mark.spec("R07")
async def test_wrong_method(ask: Asking) -> None:
    answer = await ask("DELETE", "/v1/executions")

    assert (answer.status_code, answer.content) == (405, b"")
    assert {"GET", "POST"} <= {name.strip() for name in answer.headers["allow"].split(",")}


@pytest.mark.spec("R08")
async def test_metrics_need_no_token(guarded: Asking) -> None:
    await guarded.get(LIST)
    answer = await guarded.get("/metrics")

    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'ff_http_requests_total{method="GET",path="/v1/executions",status="401"} 1' in answer.text
    assert 'path="/metrics"' not in answer.text


async def test_metrics_stand_outside_of_tokens_cors_and_counts(engine: Engine) -> None:
    ask = Asking(engine, ServerSettings(api_token=Secret("s3cret"), cors_origins=("*",)))
    origin = {"Origin": "https://a.example"}
    answers = [
        await ask.get("/metrics", headers=origin),
        await ask.post("/metrics", headers=origin),
        await ask("OPTIONS", "/metrics", headers=origin | {"Access-Control-Request-Method": "GET"}),
    ]

    assert [one.status_code for one in answers] == [200, 405, 405]
    assert not [name for one in answers for name in one.headers if name.startswith("access-control")]
    assert 'path="/metrics"' not in (await ask.get("/metrics")).text
    hidden = Asking(engine, ServerSettings(api_token=Secret("s3cret"), serve_metrics=False))
    assert (await hidden.get("/metrics")).status_code == 404


@pytest.mark.spec("R09")
async def test_missing_required_field(ask: Asking) -> None:
    flow = {"flow_id": "550e8400-e29b-41d4-a716-446655440000", "namespace": "ns", "now": 1}
    answer = await ask.post("/v1/flows", flow)

    assert (answer.status_code, answer.json()) == (422, {"error": "invalid JSON: Unprocessable Entity"})


@pytest.mark.spec("R10")
async def test_oversize_cancel_body(ask: Asking) -> None:
    execution_id = await ask.created()
    refused = json.dumps(ask.cancel(execution_id)).encode().ljust(65_537)
    accepted = refused[:-1]
    headers = {"content-type": "application/json"}

    answer = await ask.post(path(execution_id, "cancel"), content=refused, headers=headers)

    assert answer.status_code == 413
    assert answer.json() == {
        "error": "payload_too_large",
        "limit_bytes": 65_536,
        "route": "/v1/executions/{id}/cancel",
    }
    assert await ask.state(execution_id) == "waiting"
    assert (await ask.post(path(execution_id, "cancel"), content=accepted, headers=headers)).status_code == 200


async def test_a_body_in_chunks_is_counted_while_it_comes(ask: Asking) -> None:
    execution_id = await ask.created()

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(70):
            yield b" " * 1024

    answer = await ask.post(
        path(execution_id, "cancel"), content=chunks(), headers={"content-type": "application/json"}
    )

    assert (answer.status_code, answer.json()["limit_bytes"]) == (413, 65_536)


@pytest.mark.parametrize(
    ("content_type", "body", "status", "text"),
    [
        ("text/plain", b"{}", 415, "invalid JSON: Unsupported Media Type"),
        ("", b"{}", 415, "invalid JSON: Unsupported Media Type"),
        ("application/json", b"", 400, "invalid JSON: Bad Request"),
        ("application/json", b"{", 400, "invalid JSON: Bad Request"),
        ("application/json", b"\xff", 400, "invalid JSON: Bad Request"),
        ("application/json", b"[1,", 400, "invalid JSON: Bad Request"),
        ("application/json", b'{"flow_id": 1} {', 400, "invalid JSON: Bad Request"),
        ("application/json", b'{"flow_id": 1, "flow_kind"', 400, "invalid JSON: Bad Request"),
        ("application/json", b"[]", 422, "invalid JSON: Unprocessable Entity"),
        ("application/vnd.ff+json; charset=utf-8", b"[]", 422, "invalid JSON: Unprocessable Entity"),
    ],
)
async def test_a_body_that_is_no_json_or_another_is_told_apart(
    ask: Asking, content_type: str, body: bytes, status: int, text: str
) -> None:
    answer = await ask.post("/v1/flows", content=body, headers={"content-type": content_type} if content_type else {})

    assert (answer.status_code, answer.json()) == (status, {"error": text})


@pytest.mark.parametrize(
    "where",
    [
        "/v1/executions?" + "&".join(f"p{number}=1" for number in range(200)),
        "/v1/executions?partition=" + "9" * 5000,
        "/v1/executions/{fp:1}:550e8400-e29b-41d4-a716-446655440000/attempts/" + "9" * 5000 + "/stream",
        "/v1/executions/%ff%fe/state",
        "/v1/executions/%00/state",
        "/v1/flows/%F0%9F%92%A9",
    ],
)
async def test_odd_paths_and_queries_are_bad_requests(ask: Asking, where: str) -> None:
    answer = await ask.get(where)

    assert answer.status_code == 400
    assert answer.json()["error"]


async def test_the_app_can_be_mounted_below_a_path(ask: Asking) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/ff/healthz", "root_path": "/ff", "headers": []}
    await ask.app(scope | {"query_string": b""}, receive, send)

    assert sent[0]["status"] == 200


async def test_head_is_served_for_every_get(ask: Asking) -> None:
    answer = await ask("HEAD", "/healthz")

    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == "15"


async def test_a_request_id_is_kept_or_made(ask: Asking) -> None:
    assert (await ask.get("/healthz", headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
    made = (await ask.get("/healthz", headers={"x-request-id": "a b\t"})).headers["x-request-id"]
    assert len(made) == 36


async def test_no_cors_header_is_sent_unless_origins_are_named(ask: Asking, engine: Engine) -> None:
    origin = {"Origin": "https://a.example"}
    assert not [name for name in (await ask.get("/healthz", headers=origin)).headers if "access-control" in name]

    some = Asking(engine, ServerSettings(cors_origins=("https://a.example",), api_token=Secret("t")))
    assert (await some.get("/healthz", headers=origin)).headers["access-control-allow-origin"] == "https://a.example"
    assert (
        "access-control-allow-origin"
        not in (await some.get("/healthz", headers={"Origin": "https://b.example"})).headers
    )
    preflight = await some("OPTIONS", LIST, headers=origin | {"Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-methods"] == "GET, POST, PUT"
    assert preflight.headers["access-control-allow-headers"] == "content-type, authorization"

    anybody = Asking(engine, ServerSettings(cors_origins=("*",)))
    assert (await anybody.get("/healthz", headers=origin)).headers["access-control-allow-origin"] == "*"
