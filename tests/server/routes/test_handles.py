"""Handles over HTTP: signed by the server, refused if altered, and valid as long as their lease."""

from __future__ import annotations

import base64
import json
import logging
import uuid
from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.handles import Handle, decode_handle
from flowfabric.model.security.api_token import ApiScope
from flowfabric.server import ServerSettings
from flowfabric.server.routes import ROUTE_GROUPS
from flowfabric.server.routing import Route, Subject
from flowfabric.stores.port import Store
from tests.executions import claim_one
from tests.server.api_client import ApiClient, bearer, path
from tests.server.routes.test_leases import CLAIMS, call_lease, claim_body, claim_new

HOLDER_ROUTES = [route for page in ROUTE_GROUPS for route in page.entries if route.subject is Subject.HANDLE]
UUID = "11111111-1111-4111-8111-111111111111"
READS = {"observe_signals"}  # changes nothing, and is allowed to a suspended holder


def unsigned(handle: Handle, forged_signature: bytes = b"") -> str:
    """Encode an engine's handle as on the wire, without a signature or with a forged one."""
    return f"{handle.kind.value}.{base64.urlsafe_b64encode(handle.opaque + forged_signature).decode()}"


def flip_bit(text: str, index: int) -> str:
    """Return the handle with one bit of the byte at `index` changed."""
    kind, _, rest = text.partition(".")
    raw = bytearray(base64.urlsafe_b64decode(rest))
    raw[index] ^= 1
    return f"{kind}.{base64.urlsafe_b64encode(bytes(raw)).decode()}"


def body_of(route: Route, handle: str, execution_id: str = "{fp:7}:" + UUID) -> dict[str, Any]:
    """Return a valid body for a route of the lease holder."""
    given: dict[str, Any] = {
        "execution_ids": [execution_id],
        "delay_ms": 0,
        "waitpoints": [{"Fresh": {}}],
        "resume_condition": "OperatorOnly",
        "waitpoint_key": "k",
        "expires_in_ms": 1000,
        "frames": [{"payload_b64": ""}],
        "budget_id": UUID,
        "reservation_id": UUID,
        "dimensions": {"tokens": 1},
        "amounts": {"tokens": 1},
        "ttl_ms": 1000,
        "reason": "r",
        "name": "n",
        "occurrence": 0,
        "result_b64": "",
        "kind": "timer",
        "gates": ["n"],
        "tags": {"app.a": "b"},
        "operations": [{"name": "n"}],
        "patch": "p",
        "is_new": True,
        "version": "1",
        "message_id": UUID,
        "memo": {"name": "n"},
        "place": "n",
        "count": 1,
        "value": [1],
    }
    if route.name == "spawn":
        new_execution = {"namespace": "default", "lane_id": "l", "execution_kind": "k", "input_payload": []}
        given["children"] = [{"execution": new_execution, "memo": {"name": "child:k"}}]
    if route.name in ("open_gates", "open_gates_and_park"):
        given["gates"] = [{"name": "n", "kind": "timer", "expires_in_ms": 1000}]
    fields = set(route.body.__struct_fields__)
    if route.name == "open_gate":
        fields -= {"waitpoints"}
    return {"handle": handle} | {name: value for name, value in given.items() if name in fields}


async def test_an_unsigned_handle_is_refused_and_a_signed_one_is_accepted(api: ApiClient) -> None:
    held = await api.create_claimed()
    assert await api.post_json("/v1/leases/complete", {"handle": unsigned(held.handle)}) == (
        400,
        {"error": "validation_error: handle: not a handle of this system"},
    )
    assert await api.state(held.execution_id) == "active"
    work = await claim_new(api)
    assert (await call_lease(api, "complete", work)).status_code == 200


@pytest.mark.parametrize("place", [0, 3, 10, 60, -33, -32, -1])
async def test_a_handle_with_one_altered_bit_is_refused(api: ApiClient, place: int) -> None:
    work = await claim_new(api)
    assert await api.post_json("/v1/leases/complete", {"handle": flip_bit(work["handle"], place)}) == (
        400,
        {"error": "validation_error: handle: not a handle of this system"},
    )
    assert await api.state(work["execution_id"]) == "active"


async def test_the_kind_of_a_handle_is_signed(api: ApiClient) -> None:
    work = await claim_new(api)
    refused = await api.post("/v1/leases/complete", {"handle": work["handle"].replace("Fresh", "Resumed")})

    assert refused.status_code == 400


async def test_a_signed_handle_ends_with_a_signature_of_32_bytes(api: ApiClient) -> None:
    work = await claim_new(api)
    raw = base64.urlsafe_b64decode(work["handle"].partition(".")[2])

    assert decode_handle(raw[:-32])[1].lease_id == work["lease_id"]


@pytest.mark.parametrize("route", HOLDER_ROUTES, ids=lambda route: route.name)
async def test_every_holder_route_refuses_an_unsigned_handle(api: ApiClient, route: Route) -> None:
    held = await api.create_claimed()
    before = await api.engine.describe_execution(held.execution_id)
    assert await api.post_json(route.path, body_of(route, unsigned(held.handle))) == (
        400,
        {"error": "validation_error: handle: not a handle of this system"},
    )
    assert await api.engine.describe_execution(held.execution_id) == before


@pytest.mark.parametrize(
    "route", [route for route in HOLDER_ROUTES if route.name not in READS], ids=lambda route: route.name
)
async def test_every_holder_route_refuses_the_handle_of_an_earlier_lease(api: ApiClient, route: Route) -> None:
    """The execution had a second lease since, which is the last one."""
    work = await claim_new(api)
    await call_lease(api, "delay", work, delay_ms=0)
    await api.engine.sweep_once("delayed_promoter")
    [later] = (await api.post(CLAIMS, claim_body())).json()["claimed"]
    await call_lease(api, "delay", later, delay_ms=60_000)
    before = await api.engine.describe_execution(work["execution_id"])
    answer = await api.post(route.path, body_of(route, work["handle"], work["execution_id"]))

    if route.name == "append_frames":
        assert answer.json()["results"][0]["kind"] in ("contention", "state_conflict")
    else:
        assert answer.status_code == 409, answer.text
    assert await api.engine.describe_execution(work["execution_id"]) == before


def test_every_field_with_a_handle_is_listed_here() -> None:
    """A new route with a handle has to use the server's signer, so it has to be listed here."""
    found = {
        (route.name, name)
        for page in ROUTE_GROUPS
        for route in page.entries
        for name in getattr(route.body, "__struct_fields__", ())
        if "handle" in name and route.subject is not Subject.HANDLE
    }
    assert found == {("renew", "handles")}


async def test_unsigned_handles_in_a_renewal_are_refused_one_by_one(api: ApiClient) -> None:
    work, held = await claim_new(api), await api.create_claimed()
    handles = [unsigned(held.handle), work["handle"], flip_bit(work["handle"], -1)]
    results = (await api.post("/v1/leases/renew", {"handles": handles})).json()["results"]

    assert [one.get("code") for one in results] == ["corruption", None, "corruption"]


# -- keys -----------------------------------------------------------------------------------------------------------


async def test_another_server_on_the_same_store_accepts_the_handle(api: ApiClient) -> None:
    work = await claim_new(api)
    other = ApiClient(api.engine)

    assert (await call_lease(other, "progress", work, pct=10)).status_code == 200


async def test_a_handle_signed_with_a_key_rotated_by_another_server_is_accepted(api: ApiClient) -> None:
    other = ApiClient(api.engine)
    await call_lease(other, "complete", await claim_new(other))  # it loads the keystore before the rotation
    await api.post("/v1/admin/rotate-waitpoint-secret", {"new_kid": "k2", "new_secret_hex": "ab" * 32})
    work = await claim_new(api)

    assert (await call_lease(other, "complete", work)).status_code == 200


async def test_handles_of_a_retired_key_are_valid_until_its_grace_ends(engine: Engine, clock: ManualClock) -> None:
    api = ApiClient(engine, ServerSettings(waitpoint_grace_ms=10_000))
    work = await claim_new(api)
    await api.post("/v1/admin/rotate-waitpoint-secret", {"new_kid": "k2", "new_secret_hex": "ab" * 32})
    assert (await call_lease(api, "progress", work, pct=1)).status_code == 200
    clock.advance_ms(10_001)

    assert (await call_lease(api, "progress", work, pct=2)).status_code == 400


async def test_a_server_seeds_an_empty_keystore_before_it_signs_a_handle(store: Store) -> None:
    engine = Engine(store)
    api = ApiClient(engine)
    work = await claim_new(api)

    assert (await engine.list_waitpoint_hmac_kids()).current_kid == "k1"
    assert (await call_lease(api, "complete", work)).status_code == 200


def record_keystore_loads(api: ApiClient, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    loads: list[None] = []
    real = api.engine.signing_keys.handle_keys

    async def counted() -> Any:
        loads.append(None)
        return await real()

    monkeypatch.setattr(api.engine.signing_keys, "handle_keys", counted)
    return loads


async def test_verifying_a_handle_does_not_load_the_keystore_again(
    api: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = await claim_new(api)
    loads = record_keystore_loads(api, monkeypatch)
    for _ in range(20):
        await call_lease(api, "progress", work, pct=1)

    assert loads == []


async def test_many_forged_handles_load_the_keystore_at_most_once(
    api: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = await claim_new(api)
    loads = record_keystore_loads(api, monkeypatch)
    forged = [flip_bit(work["handle"], place) for place in range(-30, -1)]
    results = (await api.post("/v1/leases/renew", {"handles": forged * 50})).json()["results"]

    assert {one["code"] for one in results} == {"corruption"}
    assert len(loads) <= 1


# -- what a lease may do ----------------------------------------------------------------------------------------------


async def test_the_last_holder_cancels_a_suspended_execution(api: ApiClient) -> None:
    work = await claim_new(api)
    await call_lease(api, "suspend", work, waitpoints=[{"Fresh": {}}], resume_condition="OperatorOnly")
    answer = await call_lease(api, "cancel", work, reason="no")

    assert answer.json() == {"Cancelled": {"execution_id": work["execution_id"], "public_state": "cancelled"}}
    assert (await call_lease(api, "cancel", work)).status_code == 200, "a repeated cancel succeeds"


async def test_the_last_holder_cancels_after_its_lease_expired(api: ApiClient, clock: ManualClock) -> None:
    work = await claim_new(api)
    clock.advance_ms(60_000)

    assert (await call_lease(api, "cancel", work)).status_code == 200


async def test_a_handle_of_an_ended_attempt_cancels_no_later_one(api: ApiClient) -> None:
    work = await claim_new(api, policy={"retry_policy": {"max_retries": 3, "backoff": {"Fixed": {"delay_ms": 60_000}}}})
    assert "RetryScheduled" in (await call_lease(api, "fail", work, reason="boom")).json()
    refused = await call_lease(api, "cancel", work)

    assert (refused.status_code, refused.json()["error"]) == (409, "state_conflict: StaleLease")


async def test_a_handle_of_a_former_life_does_not_cancel_a_replay(api: ApiClient) -> None:
    work = await claim_new(api)
    await call_lease(api, "complete", work)
    await api.engine.replay_execution(work["execution_id"])

    assert (await call_lease(api, "cancel", work)).status_code == 409
    assert await api.state(work["execution_id"]) == "waiting"


async def test_a_cancel_on_the_engine_accepts_an_earlier_lease(api: ApiClient) -> None:
    held = await api.create_claimed()
    await api.engine.delay_for(held.handle, 0)
    await api.engine.sweep_once("delayed_promoter")
    again = await claim_one(api.engine, "L")
    await api.engine.delay_for(again.handle, 60_000)

    await api.engine.cancel(held.handle)
    assert await api.state(held.execution_id) == "cancelled"


async def test_a_holders_cancel_is_audited_with_its_execution(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    api = ApiClient.with_root_token(engine)
    caplog.set_level(logging.INFO, logger="flowfabric.audit")
    work = await claim_new(api)
    await call_lease(api, "cancel", work)
    await api.post("/v1/leases/cancel", {"handle": "Fresh.AAAA"})

    entries = [entry.__dict__["fields"] for entry in caplog.records if entry.getMessage() == "cancel"]
    assert [(one["who"], one["about"], one["outcome"]) for one in entries] == [
        ("root", work["execution_id"], "done"),
        ("root", None, "refused: corruption"),
    ]


@pytest.mark.parametrize("verb", ["usage", "spend", "reserve", "settle", "refund"])
async def test_an_expired_lease_cannot_use_a_budget(api: ApiClient, clock: ManualClock, verb: str) -> None:
    url = await api.create_budget()
    work = await claim_new(api)
    clock.advance_ms(60_000)
    [route] = [one for one in HOLDER_ROUTES if one.path == f"/v1/leases/{verb}"]
    body = body_of(route, work["handle"]) | {"budget_id": url.rpartition("/")[2]}
    answer = await api.post(route.path, body)

    assert (answer.status_code, json.loads(answer.headers["x-ff-error"])["code"]) == (409, "lease_expired")
    status = (await api.get(url)).json()
    assert (status["usage"], status["reserved"]) == ({}, {})


async def test_a_refund_is_refused_for_a_reservation_of_another_execution(api: ApiClient) -> None:
    url = await api.create_budget()
    budget_id = url.rpartition("/")[2]
    mine, theirs = await claim_new(api), await claim_new(api)
    reservation_id = str(uuid.uuid4())
    reservation = {
        "budget_id": budget_id,
        "amounts": {"tokens": 30},
        "ttl_ms": 60_000,
        "reservation_id": reservation_id,
    }
    await call_lease(api, "reserve", theirs, **reservation)
    refused = await call_lease(api, "refund", mine, budget_id=budget_id, reservation_id=reservation_id)

    assert (refused.status_code, refused.json()) == (
        400,
        {"error": "invalid_input: reservation_id: of another execution"},
    )
    assert (await api.get(url)).json()["reserved"] == {"tokens": 30}
    given = (await call_lease(api, "refund", theirs, budget_id=budget_id, reservation_id=reservation_id)).json()
    assert given["Refunded"]["amounts"] == {"tokens": 30}


# -- grants ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["claim", "reclaim"])
@pytest.mark.parametrize("shown", ["nothing", "altered", "of another execution"])
async def test_a_grant_is_redeemed_only_with_the_key_that_was_issued(
    api: ApiClient, clock: ManualClock, kind: str, shown: str
) -> None:
    wanted = {"lane_id": "L", "worker_instance_id": "w-9", "grant_ttl_ms": 60_000}
    await api.create()
    other = (await api.post("/v1/workers/w/claim", wanted)).json()["grant_key"]
    if kind == "reclaim":
        await claim_new(api)
        clock.advance_ms(20_000)
    else:
        await api.create()
    grant = (await api.post("/v1/workers/w/claim", wanted)).json()
    key = grant["grant_key"]
    forged = {"nothing": {}, "altered": {"grant_key": key[:-1] + "0x"[key[-1] == "0"]}}.get(shown, {"grant_key": other})
    redeem = {"grant_kind": kind, "worker_id": "w", "worker_instance_id": "w-9"}
    refused = await api.post(path(grant["execution_id"], "redeem"), redeem | forged)

    assert grant["grant_kind"] == kind
    if kind == "claim":
        assert (refused.status_code, refused.json()["error"]) == (409, "contention: InvalidClaimGrant")
    else:
        assert "GrantNotFound" in refused.json()
    taken = await api.post(path(grant["execution_id"], "redeem"), redeem | {"grant_key": key})
    assert "Claimed" in taken.json()


@pytest.mark.parametrize("forged_signature", [b"", bytes(32), bytes(range(32))], ids=["none", "zeros", "counted"])
async def test_a_handle_cannot_be_built_from_its_readable_parts(engine: Engine, forged_signature: bytes) -> None:
    """All parts of a handle can be read, but not the signature."""
    api = ApiClient.with_root_token(engine)
    held = await api.create_claimed()
    token = (await engine.make_api_token("t", [ApiScope.WORK])).token
    headers = bearer(token)
    answer = await api.post("/v1/leases/cancel", {"handle": unsigned(held.handle, forged_signature)}, headers=headers)

    assert answer.status_code == 400
    assert await api.state(held.execution_id) == "active"
