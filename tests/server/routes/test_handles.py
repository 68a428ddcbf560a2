"""Handles over HTTP: signed by the server, refused when altered, and worth no more than the lease they name."""

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
from flowfabric.model.api_token import ApiScope
from flowfabric.server import ServerSettings
from flowfabric.server.routes import ROUTE_GROUPS
from flowfabric.server.routing import Route, Subject
from flowfabric.settings import Secret
from flowfabric.stores.port import Store
from tests.server.asking import Asking, path
from tests.server.routes.test_leases import CLAIMS, claimed, said, wish

HOLDER_ROUTES = [route for page in ROUTE_GROUPS for route in page.entries if route.subject is Subject.HANDLE]
UUID = "11111111-1111-4111-8111-111111111111"
READS = {"observe_signals"}  # it changes nothing, and a suspended holder may ask


def unsigned(handle: Handle, made_up: bytes = b"") -> str:
    """An engine's handle in the text form of the wire, without a signature or with one that nobody made."""
    return f"{handle.kind.value}.{base64.urlsafe_b64encode(handle.opaque + made_up).decode()}"


def flipped(text: str, place: int) -> str:
    """The handle with one bit changed; places count from the end when they are negative."""
    kind, _, rest = text.partition(".")
    raw = bytearray(base64.urlsafe_b64decode(rest))
    raw[place] ^= 1
    return f"{kind}.{base64.urlsafe_b64encode(bytes(raw)).decode()}"


def body_of(route: Route, handle: str, execution_id: str = "{fp:7}:" + UUID) -> dict[str, Any]:
    """A body that each holder route reads without complaint."""
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
    }
    fields = set(route.body.__struct_fields__)
    if route.name == "open_gate":
        fields -= {"waitpoints"}
    return {"handle": handle} | {name: value for name, value in given.items() if name in fields}


async def test_the_engines_handle_is_refused_and_the_servers_own_is_taken(ask: Asking) -> None:
    held = await ask.claimed()
    refused = await ask.post("/v1/leases/complete", {"handle": unsigned(held.handle)})

    assert (refused.status_code, refused.json()) == (400, {"error": "validation_error: handle: not one of ours"})
    assert await ask.state(held.execution_id) == "active"
    work = await claimed(ask)
    assert (await said(ask, "complete", work)).status_code == 200


@pytest.mark.parametrize("place", [0, 3, 10, 60, -33, -32, -1])
async def test_a_handle_with_one_altered_bit_is_refused(ask: Asking, place: int) -> None:
    work = await claimed(ask)
    refused = await ask.post("/v1/leases/complete", {"handle": flipped(work["handle"], place)})

    assert (refused.status_code, refused.json()) == (400, {"error": "validation_error: handle: not one of ours"})
    assert await ask.state(work["execution_id"]) == "active"


async def test_the_kind_of_a_handle_is_signed_too(ask: Asking) -> None:
    work = await claimed(ask)
    refused = await ask.post("/v1/leases/complete", {"handle": work["handle"].replace("Fresh", "Resumed")})

    assert refused.status_code == 400


async def test_a_handle_is_its_bytes_followed_by_32_bytes(ask: Asking) -> None:
    work = await claimed(ask)
    raw = base64.urlsafe_b64decode(work["handle"].partition(".")[2])

    assert decode_handle(raw[:-32])[1].lease_id == work["lease_id"]


@pytest.mark.parametrize("route", HOLDER_ROUTES, ids=lambda route: route.name)
async def test_every_holder_route_refuses_an_unsigned_handle(ask: Asking, route: Route) -> None:
    held = await ask.claimed()
    before = await ask.engine.describe_execution(held.execution_id)
    answer = await ask.post(route.path, body_of(route, unsigned(held.handle)))

    assert (answer.status_code, answer.json()) == (400, {"error": "validation_error: handle: not one of ours"})
    assert await ask.engine.describe_execution(held.execution_id) == before


@pytest.mark.parametrize(
    "route", [route for route in HOLDER_ROUTES if route.name not in READS], ids=lambda route: route.name
)
async def test_every_holder_route_refuses_the_handle_of_an_earlier_lease(ask: Asking, route: Route) -> None:
    """The execution waits for a worker again after a second lease: only that one was the last."""
    work = await claimed(ask)
    await said(ask, "delay", work, delay_ms=0)
    await ask.engine.sweep_once("delayed_promoter")
    [later] = (await ask.post(CLAIMS, wish())).json()["claimed"]
    await said(ask, "delay", later, delay_ms=60_000)
    before = await ask.engine.describe_execution(work["execution_id"])
    answer = await ask.post(route.path, body_of(route, work["handle"], work["execution_id"]))

    if route.name == "append_frames":
        assert answer.json()["results"][0]["kind"] in ("contention", "state_conflict")
    else:
        assert answer.status_code == 409, answer.text
    assert await ask.engine.describe_execution(work["execution_id"]) == before


def test_every_field_that_takes_or_gives_a_handle_is_known() -> None:
    """A new route with a handle has to go through the server's signer, so it has to be named here."""
    found = {
        (route.name, name)
        for page in ROUTE_GROUPS
        for route in page.entries
        for name in getattr(route.body, "__struct_fields__", ())
        if "handle" in name and route.subject is not Subject.HANDLE
    }
    assert found == {("renew", "handles")}


async def test_renewals_of_handles_that_are_not_signed_are_refused_one_by_one(ask: Asking) -> None:
    work, held = await claimed(ask), await ask.claimed()
    handles = [unsigned(held.handle), work["handle"], flipped(work["handle"], -1)]
    results = (await ask.post("/v1/leases/renew", {"handles": handles})).json()["results"]

    assert [one.get("code") for one in results] == ["corruption", None, "corruption"]


# -- keys -----------------------------------------------------------------------------------------------------------


async def test_another_server_on_the_store_takes_the_handle(ask: Asking) -> None:
    work = await claimed(ask)
    other = Asking(ask.engine)

    assert (await said(other, "progress", work, pct=10)).status_code == 200


async def test_a_handle_signed_with_a_key_that_another_server_rotated_to_is_taken(ask: Asking) -> None:
    other = Asking(ask.engine)
    await said(other, "complete", await claimed(other))  # it has seen the keystore before the rotation
    await ask.post("/v1/admin/rotate-waitpoint-secret", {"new_kid": "k2", "new_secret_hex": "ab" * 32})
    work = await claimed(ask)

    assert (await said(other, "complete", work)).status_code == 200


async def test_handles_of_a_retired_key_are_good_for_its_grace_and_no_longer(
    engine: Engine, clock: ManualClock
) -> None:
    ask = Asking(engine, ServerSettings(waitpoint_grace_ms=10_000))
    work = await claimed(ask)
    await ask.post("/v1/admin/rotate-waitpoint-secret", {"new_kid": "k2", "new_secret_hex": "ab" * 32})
    assert (await said(ask, "progress", work, pct=1)).status_code == 200
    clock.advance_ms(10_001)

    assert (await said(ask, "progress", work, pct=2)).status_code == 400


async def test_a_server_on_an_empty_keystore_seeds_it_before_it_gives_a_handle(store: Store) -> None:
    engine = Engine(store)
    ask = Asking(engine)
    work = await claimed(ask)

    assert (await engine.list_waitpoint_hmac_kids()).current_kid == "k1"
    assert (await said(ask, "complete", work)).status_code == 200


async def test_a_handle_costs_no_look_at_the_keystore_once_it_is_known(
    ask: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = await claimed(ask)
    loads: list[Any] = []
    real = ask.engine.signing_keys.handle_keys

    async def counted() -> Any:
        loads.append(None)
        return await real()

    monkeypatch.setattr(ask.engine.signing_keys, "handle_keys", counted)
    for _ in range(20):
        await said(ask, "progress", work, pct=1)

    assert loads == []


async def test_a_crowd_of_forged_handles_costs_few_looks_at_the_keystore(
    ask: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = await claimed(ask)
    loads: list[Any] = []
    real = ask.engine.signing_keys.handle_keys

    async def counted() -> Any:
        loads.append(None)
        return await real()

    monkeypatch.setattr(ask.engine.signing_keys, "handle_keys", counted)
    forged = [flipped(work["handle"], place) for place in range(-30, -1)]
    results = (await ask.post("/v1/leases/renew", {"handles": forged * 50})).json()["results"]

    assert {one["code"] for one in results} == {"corruption"}
    assert len(loads) <= 1


# -- what a lease may do ----------------------------------------------------------------------------------------------


async def test_the_holder_cancels_what_it_suspended_with_the_last_lease(ask: Asking) -> None:
    work = await claimed(ask)
    await said(ask, "suspend", work, waitpoints=[{"Fresh": {}}], resume_condition="OperatorOnly")
    answer = await said(ask, "cancel", work, reason="no")

    assert answer.json() == {"Cancelled": {"execution_id": work["execution_id"], "public_state": "cancelled"}}
    assert (await said(ask, "cancel", work)).status_code == 200, "again is success"


async def test_the_last_holder_cancels_after_its_lease_lapsed(ask: Asking, clock: ManualClock) -> None:
    work = await claimed(ask)
    clock.advance_ms(60_000)

    assert (await said(ask, "cancel", work)).status_code == 200


async def test_a_handle_of_an_ended_attempt_cancels_no_later_one(ask: Asking) -> None:
    work = await claimed(ask, policy={"retry_policy": {"max_retries": 3, "backoff": {"Fixed": {"delay_ms": 60_000}}}})
    assert "RetryScheduled" in (await said(ask, "fail", work, reason="boom")).json()
    refused = await said(ask, "cancel", work)

    assert (refused.status_code, refused.json()["error"]) == (409, "state_conflict: StaleLease")


async def test_a_handle_of_a_former_life_does_not_cancel_a_replay(ask: Asking) -> None:
    work = await claimed(ask)
    await said(ask, "complete", work)
    await ask.engine.replay_execution(work["execution_id"])

    assert (await said(ask, "cancel", work)).status_code == 409
    assert await ask.state(work["execution_id"]) == "waiting"


async def test_the_engines_own_cancel_stays_as_written(ask: Asking) -> None:
    held = await ask.claimed()
    await ask.engine.delay_for(held.handle, 0)
    await ask.engine.sweep_once("delayed_promoter")
    again = await ask.engine.claim("L", worker_id="w", worker_instance_id="w-1")
    assert again is not None
    await ask.engine.delay_for(again.handle, 60_000)

    await ask.engine.cancel(held.handle)
    assert await ask.state(held.execution_id) == "cancelled"


async def test_a_holders_cancel_is_audited_with_its_execution(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    ask = Asking(engine, ServerSettings(api_token=Secret("s3cret")), Authorization="Bearer s3cret")
    caplog.set_level(logging.INFO, logger="flowfabric.audit")
    work = await claimed(ask)
    await said(ask, "cancel", work)
    await ask.post("/v1/leases/cancel", {"handle": "Fresh.AAAA"})

    entries = [entry.__dict__["fields"] for entry in caplog.records if entry.getMessage() == "cancel"]
    assert [(one["who"], one["about"], one["outcome"]) for one in entries] == [
        ("root", work["execution_id"], "done"),
        ("root", None, "refused: corruption"),
    ]


@pytest.mark.parametrize("verb", ["usage", "spend", "reserve", "settle", "refund"])
async def test_budgets_are_closed_to_a_lease_that_lapsed(ask: Asking, clock: ManualClock, verb: str) -> None:
    where = await ask.budgeted()
    work = await claimed(ask)
    clock.advance_ms(60_000)
    [route] = [one for one in HOLDER_ROUTES if one.path == f"/v1/leases/{verb}"]
    body = body_of(route, work["handle"]) | {"budget_id": where.rpartition("/")[2]}
    answer = await ask.post(route.path, body)

    assert (answer.status_code, json.loads(answer.headers["x-ff-error"])["code"]) == (409, "lease_expired")
    status = (await ask.get(where)).json()
    assert (status["usage"], status["reserved"]) == ({}, {})


async def test_a_refund_touches_only_reservations_of_its_own_execution(ask: Asking) -> None:
    where = await ask.budgeted()
    budget_id = where.rpartition("/")[2]
    mine, theirs = await claimed(ask), await claimed(ask)
    kept = str(uuid.uuid4())
    room = {"budget_id": budget_id, "amounts": {"tokens": 30}, "ttl_ms": 60_000, "reservation_id": kept}
    await said(ask, "reserve", theirs, **room)
    refused = await said(ask, "refund", mine, budget_id=budget_id, reservation_id=kept)

    assert (refused.status_code, refused.json()) == (
        400,
        {"error": "invalid_input: reservation_id: of another execution"},
    )
    assert (await ask.get(where)).json()["reserved"] == {"tokens": 30}
    given = (await said(ask, "refund", theirs, budget_id=budget_id, reservation_id=kept)).json()
    assert given["Refunded"]["amounts"] == {"tokens": 30}


# -- grants ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["claim", "reclaim"])
@pytest.mark.parametrize("shown", ["nothing", "altered", "of another execution"])
async def test_a_grant_is_redeemed_only_with_the_key_that_was_issued(
    ask: Asking, clock: ManualClock, kind: str, shown: str
) -> None:
    wanted = {"lane_id": "L", "worker_instance_id": "w-9", "grant_ttl_ms": 60_000}
    await ask.created()
    other = (await ask.post("/v1/workers/w/claim", wanted)).json()["grant_key"]
    if kind == "reclaim":
        await claimed(ask)
        clock.advance_ms(20_000)
    else:
        await ask.created()
    grant = (await ask.post("/v1/workers/w/claim", wanted)).json()
    key = grant["grant_key"]
    forged = {"nothing": {}, "altered": {"grant_key": key[:-1] + "0x"[key[-1] == "0"]}}.get(shown, {"grant_key": other})
    redeem = {"grant_kind": kind, "worker_id": "w", "worker_instance_id": "w-9"}
    refused = await ask.post(path(grant["execution_id"], "redeem"), redeem | forged)

    assert grant["grant_kind"] == kind
    if kind == "claim":
        assert (refused.status_code, refused.json()["error"]) == (409, "contention: InvalidClaimGrant")
    else:
        assert "GrantNotFound" in refused.json()
    taken = await ask.post(path(grant["execution_id"], "redeem"), redeem | {"grant_key": key})
    assert "Claimed" in taken.json()


@pytest.mark.parametrize("made_up", [b"", bytes(32), bytes(range(32))], ids=["none", "zeros", "counted"])
async def test_a_scope_that_reads_cannot_build_a_handle(engine: Engine, made_up: bytes) -> None:
    """All parts of a handle can be read; without the key that is no handle."""
    ask = Asking(engine, ServerSettings(api_token=Secret("s3cret")), Authorization="Bearer s3cret")
    held = await ask.claimed()
    token = (await engine.make_api_token("t", [ApiScope.WORK])).token
    headers = {"Authorization": f"Bearer {token}"}
    answer = await ask.post("/v1/leases/cancel", {"handle": unsigned(held.handle, made_up)}, headers=headers)

    assert answer.status_code == 400
    assert await ask.state(held.execution_id) == "active"
