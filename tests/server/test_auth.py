"""Authentication: tokens, scopes, namespaces, rate limits, and secrets that are not logged."""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Any
from urllib.parse import quote

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.errors import InvalidInput, NotFound
from flowfabric.ids import FlowId, flow_partition
from flowfabric.server import ConfigError, ServerSettings
from flowfabric.server.logging import JsonFormatter
from flowfabric.server.settings import from_environment
from flowfabric.settings import Secret
from tests.server.api_client import ROOT_TOKEN, ApiClient, bearer, new_execution_id, path, wait_until

ROOT = bearer(ROOT_TOKEN)
LIST = "/v1/executions?partition=7"
UUID = "550e8400-e29b-41d4-a716-446655440000"


@pytest.fixture
def api(engine: Engine) -> ApiClient:
    return ApiClient.with_root_token(engine)


async def create_token(api: ApiClient, *scopes: str, **given: Any) -> dict[str, str]:
    """Create a token over HTTP; return its header and id."""
    made = await api.post("/v1/admin/tokens", {"name": "t", "scopes": list(scopes)} | given)
    assert made.status_code == 201, made.text
    assert made.headers["cache-control"] == "no-store"
    return {"Authorization": f"Bearer {made.json()['token']}", "id": made.json()["token_id"]}


async def status(api: ApiClient, method: str, url: str, headers: dict[str, str], body: object = None) -> int:
    return (await api(method, url, body, headers=headers)).status_code


async def test_a_token_is_valid_for_its_scopes_only(api: ApiClient) -> None:
    execution_id = await api.create()
    asked: dict[str, tuple[str, str, Any]] = {
        "read": ("GET", path(execution_id), None),
        "submit": ("POST", "/v1/executions", api.create_body()),
        "work": ("POST", "/v1/workers/w/claim", {"lane_id": "x", "worker_instance_id": "i", "grant_ttl_ms": 1}),
        "operate": ("POST", path(execution_id, "cancel"), api.cancel_body(execution_id)),
        "admin": ("GET", "/v1/admin/tokens", None),
    }
    for scope in asked:
        headers = await create_token(api, scope)
        refused = [
            name for name, (how, url, body) in asked.items() if await status(api, how, url, headers, body) == 403
        ]
        assert refused == [name for name in asked if name != scope]
    reply = await api.get("/v1/admin/tokens", headers=await create_token(api, "read"))
    assert reply.json() == {"error": "token lacks scope: admin", "kind": "forbidden", "retryable": False}


async def test_a_bound_token_sees_nothing_of_other_namespaces(api: ApiClient) -> None:
    mine, other = await api.create(namespace="a"), await api.create(namespace="b")
    headers = await create_token(api, "read", "submit", "operate", "work", namespaces=["a"])

    assert await status(api, "GET", path(mine), headers) == 200
    hidden = await api.get(path(other), headers=headers)
    unknown = await api.get(path(new_execution_id()), headers=headers)
    assert (
        (hidden.status_code, hidden.json())
        == (unknown.status_code, unknown.json())
        == (
            404,
            {"error": "not found: execution"},
        )
    )
    assert await status(api, "POST", path(other, "cancel"), headers, api.cancel_body(other)) == 404
    assert await status(api, "POST", "/v1/executions", headers, api.create_body(namespace="a")) == 201
    assert await status(api, "POST", "/v1/executions", headers, api.create_body(namespace="b")) == 403
    child = api.create_body(namespace="a", parent_id=other)
    assert await status(api, "POST", "/v1/executions", headers, child) == 404
    bulk = {"executions": [api.create_body(namespace="a"), api.create_body(namespace="b")]}
    assert await status(api, "POST", "/v1/executions/bulk", headers, bulk) == 403
    flow_id, _ = await api.create_flow(namespace="b")
    assert await status(api, "GET", f"/v1/flows/{flow_id}", headers) == 404
    for concerns_all in (LIST, "/v1/lanes"):
        assert await status(api, "GET", concerns_all, headers) == 403
    every = (await api.get("/v1/executions/search", headers=headers)).json()["executions"]
    assert {one["namespace"] for one in every} == {"a"}
    assert await status(api, "GET", "/v1/executions/search?namespace=b", headers) == 403
    found = await api.get("/v1/executions/search?namespace=a", headers=headers)
    assert mine in [one["execution_id"] for one in found.json()["executions"]]


async def test_applying_an_edge_to_a_hidden_execution_is_like_to_an_unknown_one(api: ApiClient) -> None:
    mine, _ = await api.create_flow(namespace="a")
    place = flow_partition(FlowId(mine), api.engine.partitions)
    hidden, unknown = await api.create(namespace="b", execution_id=new_execution_id(place)), new_execution_id(place)
    headers = await create_token(api, "submit", namespaces=["a"])

    reply = [
        (
            await api.post(
                f"/v1/flows/{mine}/edges/apply", api.edge_body(mine, new_execution_id(place), child), headers=headers
            )
        )
        for child in (hidden, unknown)
    ]

    assert [(one.status_code, one.json()) for one in reply] == [(404, {"error": "not found: execution"})] * 2


async def test_a_handle_of_another_namespace_is_refused(api: ApiClient) -> None:
    await api.create(namespace="b")
    claims = {"lanes": ["L"], "worker_instance_id": "i"}
    [work] = (await api.post("/v1/workers/w/claims", claims)).json()["claimed"]
    headers = await create_token(api, "work", namespaces=["a"])

    assert await status(api, "POST", "/v1/leases/complete", headers, {"handle": work["handle"]}) == 404
    renewed = await api.post("/v1/leases/renew", {"handles": [work["handle"]]}, headers=headers)
    assert renewed.json()["results"][0]["code"] == "execution_not_found"
    assert await api.state(work["execution_id"]) == "active"


async def test_a_bound_token_cannot_call_routes_that_concern_all_namespaces(api: ApiClient) -> None:
    headers = await create_token(api, "work", "read", "operate", namespaces=["a"])

    for url in (LIST, "/v1/lanes", "/v1/suspended?partition=7"):
        assert await status(api, "GET", url, headers) == 403


async def test_a_bound_token_claims_only_work_of_its_namespaces(api: ApiClient) -> None:
    theirs, mine, also = [await api.create(namespace=one, priority=9 - ord(one)) for one in "bac"]
    headers = await create_token(api, "work", namespaces=["a", "c"])
    claim: dict[str, Any] = {"lanes": ["L"], "worker_instance_id": "i", "limit": 10}

    async def got(**more: Any) -> Any:
        answer = await api.post("/v1/workers/w/claims", claim | more, headers=headers)
        assert answer.status_code == 200, answer.text
        return [one["execution_id"] for one in answer.json()["claimed"]]

    assert await got(namespaces=["c"]) == [also]
    assert await got() == [mine]
    assert await got() == []
    refused = await api.post("/v1/workers/w/claims", claim | {"namespaces": ["a", "b"]}, headers=headers)
    assert (refused.status_code, refused.json()["kind"]) == (403, "forbidden")
    assert await api.state(theirs) == "waiting"


async def test_a_bound_token_gets_and_redeems_grants_of_its_namespaces_only(api: ApiClient) -> None:
    theirs, mine = await api.create(namespace="b", priority=9), await api.create(namespace="a")
    headers = await create_token(api, "work", namespaces=["a"])
    wish = {"lane_id": "L", "worker_instance_id": "i", "grant_ttl_ms": 5000}
    redeem = {"grant_kind": "claim", "worker_id": "w", "worker_instance_id": "i", "lane_id": "L"}

    grant = await api.post("/v1/workers/w/claim", wish, headers=headers)
    assert grant.json()["execution_id"] == mine
    redeem["grant_key"] = grant.json()["grant_key"]
    assert "Claimed" in (await api.post(path(mine, "redeem"), redeem, headers=headers)).json()
    assert await status(api, "POST", "/v1/workers/w/claim", headers, wish) == 204
    assert (await api.post("/v1/workers/w/claim", wish)).json()["execution_id"] == theirs
    assert await status(api, "POST", path(theirs, "redeem"), headers, redeem) == 404


async def test_a_bound_token_refunds_only_reservations_of_its_namespaces(api: ApiClient) -> None:
    headers, budget = await create_token(api, "work", namespaces=["a"]), await api.create_budget(namespace="a")
    own = f"{budget}?namespace=a"
    budget_id = budget.rpartition("/")[2]
    body = {"budget_id": budget_id, "amounts": {"tokens": 3}, "ttl_ms": 60_000}
    theirs, mine = str(uuid.uuid4()), str(uuid.uuid4())
    for namespace, reservation in (("b", theirs), ("a", mine)):
        made = await api.create(namespace=namespace)
        asked = body | {"reservation_id": reservation, "namespace": "a"}  # an unbound token may mix namespaces
        assert (await api.post(path(made, "reserve"), asked)).status_code == 200

    assert await status(api, "POST", f"{budget}/refund", headers, {"reservation_id": theirs}) == 404
    assert (await api.get(own)).json()["reserved"] == {"tokens": 6}
    assert await status(api, "POST", f"{budget}/refund", headers, {"reservation_id": mine}) == 200
    assert (await api.get(own)).json()["reserved"] == {"tokens": 3}
    assert await status(api, "POST", f"{budget}/refund", headers, {"reservation_id": str(uuid.uuid4())}) == 200
    assert await status(api, "POST", f"{budget}/wake", headers) == 200


async def test_a_token_cannot_end_the_waiting_claims_of_another(api: ApiClient) -> None:
    """A worker that stops ends its own claims; the name of an instance is not secret."""
    claim = {"lanes": ["none"], "worker_instance_id": "i", "wait_ms": 30_000}
    waiting = asyncio.create_task(api.post("/v1/workers/w/claims", claim))
    await wait_until(lambda: bool(api.app.waiting_claims))
    end, other = "/v1/workers/w/claims/end", await create_token(api, "work")

    ended = await api.post(end, {"worker_instance_id": "i"}, headers=other)
    assert (ended.json(), waiting.done()) == ({"ended": 0}, False)
    assert (await api.post(end, {"worker_instance_id": "i"})).json() == {"ended": 1}
    async with asyncio.timeout(5):
        assert (await waiting).json() == {"claimed": []}


async def test_a_rotated_token_is_valid_until_its_grace_ends(api: ApiClient, clock: ManualClock) -> None:
    old = await create_token(api, "read")
    rotated = await api.post(f"/v1/admin/tokens/{old['id']}/rotate", {"grace_ms": 1000})
    new = bearer(rotated.json()["token"])

    assert [await status(api, "GET", LIST, headers) for headers in (old, new)] == [200, 200]
    clock.advance_ms(1000)
    api.app.authenticator.clear_cache()
    assert [await status(api, "GET", LIST, headers) for headers in (old, new)] == [401, 200]


async def test_a_revoked_or_expired_token_is_refused(api: ApiClient, clock: ManualClock) -> None:
    revoked, short = await create_token(api, "read"), await create_token(api, "read", expires_in_ms=500)
    url = f"/v1/admin/tokens/{revoked['id']}"
    assert (await api("DELETE", url)).json() == {"revoked": True}
    assert (await api("DELETE", url)).json() == {"revoked": False}
    assert await status(api, "POST", f"{url}/rotate", ROOT, {}) == 404
    assert [await status(api, "GET", LIST, headers) for headers in (revoked, short)] == [401, 200]
    clock.advance_ms(500)
    api.app.authenticator.clear_cache()
    assert await status(api, "GET", LIST, short) == 401


async def test_a_repeated_request_gets_the_stored_response_while_its_token_is_valid(api: ApiClient) -> None:
    headers = await create_token(api, "submit") | {"Idempotency-Key": "k"}
    body = {"namespace": "a", "lane_id": "L", "execution_kind": "t", "input_payload": []}
    first, again = [await api.post("/v1/executions", body, headers=headers) for _ in range(2)]
    assert first.json() == again.json()
    other = await api.post("/v1/executions", body, headers={"Idempotency-Key": "k"})
    assert other.json() != first.json()

    await api("DELETE", f"/v1/admin/tokens/{headers['id']}")
    assert (await api.post("/v1/executions", body, headers=headers)).status_code == 401


async def test_tokens_are_stored_as_digests(api: ApiClient, engine: Engine) -> None:
    headers = await create_token(api, "read", namespaces=["b", "a"])
    listed = await api.get("/v1/admin/tokens")
    _, _, secret = headers["Authorization"].split("_", 2)  # the secret may contain the separator

    [shown] = [one for one in listed.json()["tokens"] if one["token_id"] == headers["id"]]
    assert (shown["name"], shown["scopes"], shown["namespaces"]) == ("t", ["read"], ["a", "b"])
    assert secret not in listed.text
    assert await engine.authenticate_token(f"ff_{'0' * 32}_{secret}") is None
    with pytest.raises(InvalidInput, match="scopes: empty"):
        await engine.make_api_token("t", [])
    with pytest.raises(InvalidInput, match="'write' is not one of"):
        await engine.make_api_token("t", ["write"])
    with pytest.raises(NotFound):
        await engine.revoke_api_token("550e8400-e29b-41d4-a716-446655440000")


async def test_the_previous_root_token_is_accepted(engine: Engine) -> None:
    both = ApiClient(engine, ServerSettings(api_token=Secret("new"), previous_api_token=Secret("old")))
    shown = [await status(both, "GET", LIST, bearer(one)) for one in ("new", "old", "older")]

    assert shown == [200, 200, 401]


async def test_too_many_requests_of_a_token_are_refused(engine: Engine) -> None:
    limited = ApiClient(engine, ServerSettings(rate_limit=2))
    answers = [await limited.get(LIST) for _ in range(4)]

    assert [one.status_code for one in answers][:3] == [200, 200, 429]
    refused = next(one for one in answers if one.status_code == 429)
    assert refused.json()["kind"] == "rate_limit_exceeded"
    assert refused.headers["retry-after"] == "1"
    assert (await limited.get("/healthz")).status_code == 200


def test_listening_beyond_loopback_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="refusing to listen on 0.0.0.0 without a token"):
        ServerSettings(host="0.0.0.0").check()
    ServerSettings(host="0.0.0.0", api_token=Secret("t")).check()
    ServerSettings(host="0.0.0.0", allow_unauthenticated=True).check()
    for loopback in ("127.0.0.1", "127.8.0.1", "localhost", "::1"):
        ServerSettings(host=loopback).check()


def test_settings_are_read_from_the_environment() -> None:
    read = from_environment(
        {
            "FF_LISTEN_ADDR": "0.0.0.0:8080",
            "FF_API_TOKEN": "t",
            "FF_CORS_ORIGINS": "https://a.example, nonsense ,*",
            "FF_LANES": " a, ,b",
            "FF_LANE_AGEING_MS": "bulk=60000, a=b=5",
            "FF_MAX_CONCURRENT_TAIL": "3",
            "FF_LEASE_EXPIRY_INTERVAL_MS": "100",
            "FF_UNBLOCK_INTERVAL_S": "2.5",
            "FF_FLOW_PARTITIONS": "8",
            "FF_POSTGRES_POOL_SIZE": "3",
            "RUST_LOG": "ff_server=debug,audit=info",
        }
    )
    assert (read.host, read.port, read.cors_origins, read.lanes) == (
        "0.0.0.0",
        8080,
        ("https://a.example", "*"),
        ("a", "b"),
    )
    assert (read.engine.max_concurrent_stream_ops, read.engine.partitions.flow) == (3, 8)
    assert (read.engine.postgres_pool_size, from_environment({}).engine.postgres_pool_size) == (3, None)
    assert (read.engine.sweeps.lease_expiry_ms, read.engine.sweeps.unblock_ms) == (100, 2500)
    assert read.engine.ageing_ms == {"bulk": 60000, "a=b": 5}
    assert read.log == "debug"
    assert from_environment({}).host == "127.0.0.1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FF_LISTEN_ADDR", "nowhere"),
        ("FF_FLOW_PARTITIONS", "0"),
        ("FF_FLOW_PARTITIONS", "many"),
        ("FF_CORS_ORIGINS", ""),
        ("FF_LANES", ","),
        ("FF_LANE_AGEING_MS", "bulk"),
        ("FF_LANE_AGEING_MS", "bulk=soon"),
        ("FF_WAITPOINT_HMAC_SECRET", "abc"),
        ("FF_LEASE_EXPIRY_INTERVAL_MS", "1.5"),
        ("FF_MAX_CONCURRENT_STREAM_OPS", "0"),
        ("FF_POSTGRES_POOL_SIZE", "0"),
        ("FF_SQLITE_POOL_SIZE", "0"),
        ("FF_RATE_LIMIT", "nan"),
        ("FF_RATE_LIMIT", "-1"),
        ("FF_LOG", "loud"),
    ],
)
def test_an_invalid_variable_is_reported(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as refused:
        from_environment({name: value})
    assert str(refused.value).startswith(f"invalid value for {name}: ")
    assert value not in ("abc",) or "abc" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "level"),
    [
        ({}, "info"),
        ({"FF_LOG": "warn", "RUST_LOG": "debug"}, "warning"),
        ({"RUST_LOG": "off"}, "critical"),
        ({"RUST_LOG": "ff_server"}, "debug"),
    ],
)
def test_a_rust_log_filter_is_translated_to_a_level(given: dict[str, str], level: str) -> None:
    assert from_environment(given).log == level


async def test_secrets_are_not_logged_and_operator_actions_are_audited(
    api: ApiClient, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    execution_id = await api.create()
    headers = await create_token(api, "read", "operate")
    secret_hex = "ab" * 32
    await api.post("/v1/admin/rotate-waitpoint-secret", {"new_kid": "k2", "new_secret_hex": secret_hex})
    await api.post(path(execution_id, "cancel"), api.cancel_body(execution_id), headers=headers)
    await api.get(path(execution_id), headers={"Authorization": "Bearer wr0ng-t0ken"})
    await api.get(f"/v1/waitpoints/{execution_id}/550e8400-e29b-41d4-a716-446655440000?token=k1:deadbeef")
    signal = api.signal_body(execution_id, "550e8400-e29b-41d4-a716-446655440000", "k1:deadbeef")
    await api.post(path(execution_id, "signal"), signal)

    ours = [record for record in caplog.records if not record.name.startswith("httpx2")]  # the test's own client
    lines = "\n".join(JsonFormatter().format(record) for record in ours)
    for secret in ("s3cret", headers["Authorization"][7:], secret_hex, "wr0ng-t0ken", "deadbeef"):
        assert secret not in lines
    audited = [(r.getMessage(), r.fields) for r in caplog.records if r.name == "flowfabric.audit"]  # type: ignore[attr-defined]
    events = [event for event, _ in audited]
    assert "waitpoint_hmac_rotation_complete" in events
    assert "make_api_token" in events
    [(_, cancelled)] = [one for one in audited if one[0] == "cancel_execution"]
    assert (cancelled["about"], cancelled["outcome"]) == (execution_id, "done")
    assert headers["id"] in cancelled["who"]
    assert cancelled["request_id"]


async def test_a_slow_request_times_out_if_a_timeout_is_set(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    api_with_timeout = ApiClient(engine, ServerSettings(request_timeout_ms=50))

    async def never(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(engine, "list_lanes", never)
    assert await api_with_timeout.get_json("/v1/lanes") == (
        504,
        {"error": "timeout: request", "kind": "timeout", "retryable": False},
    )


async def test_a_prefix_is_resolved_within_the_namespaces_of_the_token(api: ApiClient) -> None:
    own, other = await api.create(namespace="a"), await api.create(namespace="b")
    headers = await create_token(api, "read", namespaces=["a"])

    for short, execution, expected in ((own[:-1], own, [own]), (other[:-1], other, [])):
        url = f"/v1/executions/ids?prefix={quote(short)}"
        assert (await api.get(url, headers=headers)).json() == {"execution_ids": expected, "more": False}
        assert (await api.get(url)).json() == {"execution_ids": [execution], "more": False}
    assert (await api.get("/v1/executions/ids?prefix=nonsense")).status_code == 400
    assert (await api.get("/v1/executions/ids")).status_code == 400


async def test_a_bulk_operation_names_the_token_that_started_it(api: ApiClient) -> None:
    token = await create_token(api, "operate")
    name = f"t ({token.pop('id')})"
    body = {"verb": "cancel", "criteria": {"kind": "mail"}, "reason": "wrong price"}
    for claimed, recorded in (("", name), (name, name), ("ana", f"ana with {name}")):
        started = await api.post("/v1/operations", {**body, "requested_by": claimed}, headers=token)
        assert started.json()["requested_by"] == recorded, started.text
