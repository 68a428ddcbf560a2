"""Transport, health, auth, decoding: scenarios R01 to R10."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.server import ServerSettings
from flowfabric.settings import Secret
from tests.server.api_client import ApiClient, bearer, path

LIST = "/v1/executions?partition=0"


@pytest.fixture
def guarded(engine: Engine) -> ApiClient:
    """A client without a token, of a server that requires one."""
    return ApiClient(engine, ServerSettings(api_token=Secret("s3cret")))


@pytest.mark.spec("R01")
async def test_health_check(api: ApiClient) -> None:
    answer = await api.get("/healthz")

    assert answer.status_code == 200
    assert answer.json() == {"status": "ok"}
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.spec("R02")
async def test_the_health_check_needs_no_token(guarded: ApiClient) -> None:
    assert await guarded.get_json("/healthz") == (200, {"status": "ok"})


@pytest.mark.spec("R03")
async def test_a_request_needs_a_valid_token(guarded: ApiClient) -> None:
    for headers in ({}, bearer("nope")):
        refused = await guarded.get(LIST, headers=headers)
        assert refused.status_code == 401
        assert refused.json() == {"error": "missing or invalid Authorization header"}
        assert "www-authenticate" not in refused.headers

    assert await guarded.get_json(LIST, headers=bearer("s3cret")) == (200, {"executions": [], "next_cursor": None})


@pytest.mark.spec("R04")
@pytest.mark.parametrize(
    "shown", ["bearer s3cret", "Bearer  s3cret", "BEARER s3cret", "s3cret", "Bearer", "Basic s3cret"]
)
async def test_the_bearer_scheme_is_case_sensitive(guarded: ApiClient, shown: str) -> None:
    assert (await guarded.get(LIST, headers={"Authorization": shown})).status_code == 401


@pytest.mark.spec("R05")
async def test_an_unknown_path_needs_a_token_before_it_is_404(guarded: ApiClient) -> None:
    assert (await guarded.get("/v1/nothing-here")).status_code == 401
    assert (await guarded.get("/v1/nothing-here", headers=bearer("s3cret"))).status_code == 404


@pytest.mark.spec("R06")
@pytest.mark.parametrize(
    "url",
    [
        *("/v1/nothing-here", "/", "/v1", "/v1/", "/v1/executions/", "//v1/executions", "/V1/executions"),
        *("/healthz/", "/v1/workers//claim"),
    ],
)
async def test_an_unknown_path_is_404(api: ApiClient, url: str) -> None:
    answer = await api.get(f"http://ff{url}")

    assert (answer.status_code, answer.content) == (404, b"")


@pytest.mark.spec("R07")
async def test_a_wrong_method_is_405_with_the_allowed_ones(api: ApiClient) -> None:
    answer = await api("DELETE", "/v1/executions")

    assert (answer.status_code, answer.content) == (405, b"")
    assert {"GET", "POST"} <= {name.strip() for name in answer.headers["allow"].split(",")}


@pytest.mark.spec("R08")
async def test_metrics_need_no_token(guarded: ApiClient) -> None:
    await guarded.get(LIST)
    answer = await guarded.get("/metrics")

    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'ff_http_requests_total{method="GET",path="/v1/executions",status="401"} 1' in answer.text
    assert 'path="/metrics"' not in answer.text


async def test_metrics_have_no_token_no_cors_and_are_not_counted(engine: Engine) -> None:
    api = ApiClient(engine, ServerSettings(api_token=Secret("s3cret"), cors_origins=("*",)))
    origin = {"Origin": "https://a.example"}
    answers = [
        await api.get("/metrics", headers=origin),
        await api.post("/metrics", headers=origin),
        await api("OPTIONS", "/metrics", headers=origin | {"Access-Control-Request-Method": "GET"}),
    ]

    assert [one.status_code for one in answers] == [200, 405, 405]
    assert not [name for one in answers for name in one.headers if name.startswith("access-control")]
    assert 'path="/metrics"' not in (await api.get("/metrics")).text
    hidden = ApiClient(engine, ServerSettings(api_token=Secret("s3cret"), serve_metrics=False))
    assert (await hidden.get("/metrics")).status_code == 404


@pytest.mark.spec("R09")
async def test_a_missing_required_field_is_unprocessable(api: ApiClient) -> None:
    flow = {"flow_id": "550e8400-e29b-41d4-a716-446655440000", "namespace": "ns", "now": 1}
    assert await api.post_json("/v1/flows", flow) == (422, {"error": "invalid JSON: Unprocessable Entity"})


@pytest.mark.spec("R10")
async def test_a_cancel_body_above_the_limit_is_refused(api: ApiClient) -> None:
    execution_id = await api.create()
    refused = json.dumps(api.cancel_body(execution_id)).encode().ljust(65_537)
    accepted = refused[:-1]
    headers = {"content-type": "application/json"}

    assert await api.post_json(path(execution_id, "cancel"), content=refused, headers=headers) == (
        413,
        {
            "error": "payload_too_large",
            "limit_bytes": 65_536,
            "route": "/v1/executions/{id}/cancel",
        },
    )
    assert await api.state(execution_id) == "waiting"
    assert (await api.post(path(execution_id, "cancel"), content=accepted, headers=headers)).status_code == 200


async def test_a_chunked_body_is_counted_while_it_arrives(api: ApiClient) -> None:
    execution_id = await api.create()

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(70):
            yield b" " * 1024

    answer = await api.post(
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
async def test_bodies_have_a_status_for_media_type_syntax_and_shape(
    api: ApiClient, content_type: str, body: bytes, status: int, text: str
) -> None:
    answer = await api.post("/v1/flows", content=body, headers={"content-type": content_type} if content_type else {})

    assert (answer.status_code, answer.json()) == (status, {"error": text})


@pytest.mark.parametrize(
    "url",
    [
        "/v1/executions?" + "&".join(f"p{number}=1" for number in range(200)),
        "/v1/executions?partition=" + "9" * 5000,
        "/v1/executions/{fp:1}:550e8400-e29b-41d4-a716-446655440000/attempts/" + "9" * 5000 + "/stream",
        "/v1/executions/%ff%fe/state",
        "/v1/executions/%00/state",
        "/v1/flows/%F0%9F%92%A9",
    ],
)
async def test_malformed_paths_and_queries_are_bad_requests(api: ApiClient, url: str) -> None:
    answer = await api.get(url)

    assert answer.status_code == 400
    assert answer.json()["error"]


async def test_the_app_can_be_mounted_below_a_path(api: ApiClient) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/ff/healthz", "root_path": "/ff", "headers": []}
    await api.app(scope | {"query_string": b""}, receive, send)

    assert sent[0]["status"] == 200


async def test_head_is_served_for_every_get(api: ApiClient) -> None:
    answer = await api("HEAD", "/healthz")

    assert (answer.status_code, answer.content) == (200, b"")
    assert answer.headers["content-length"] == "15"


async def test_a_request_id_is_returned_or_generated(api: ApiClient) -> None:
    assert (await api.get("/healthz", headers={"x-request-id": "abc-1"})).headers["x-request-id"] == "abc-1"
    made = (await api.get("/healthz", headers={"x-request-id": "a b\t"})).headers["x-request-id"]
    assert len(made) == 36


async def test_no_cors_header_is_sent_unless_origins_are_named(api: ApiClient, engine: Engine) -> None:
    origin = {"Origin": "https://a.example"}
    assert not [name for name in (await api.get("/healthz", headers=origin)).headers if "access-control" in name]

    some = ApiClient(engine, ServerSettings(cors_origins=("https://a.example",), api_token=Secret("t")))
    assert (await some.get("/healthz", headers=origin)).headers["access-control-allow-origin"] == "https://a.example"
    assert (
        "access-control-allow-origin"
        not in (await some.get("/healthz", headers={"Origin": "https://b.example"})).headers
    )
    preflight = await some("OPTIONS", LIST, headers=origin | {"Access-Control-Request-Method": "POST"})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-methods"] == "GET, POST, PUT"
    assert preflight.headers["access-control-allow-headers"] == "content-type, authorization"

    anybody = ApiClient(engine, ServerSettings(cors_origins=("*",)))
    assert (await anybody.get("/healthz", headers=origin)).headers["access-control-allow-origin"] == "*"
