"""Waitpoints, signals and keys: scenarios R32 to R37, R58, R59, SS-071 and SS-072."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.suspensions import SuspendDetails, Suspended
from flowfabric.engine.types import ByName, Count, CountKind, Single
from flowfabric.model.change import Change, Guard, Upsert
from flowfabric.model.security.signing_key import Keystore, SigningKey
from flowfabric.rules.security.keystore import KeyUnchanged
from flowfabric.server.lifecycle import seed_signing_key
from flowfabric.server.settings import ServerSettings
from flowfabric.settings import Secret
from flowfabric.stores.port import Store
from tests.executions import suspend_args
from tests.server.api_client import ApiClient, new_execution_id, path

GO = Single("k", ByName("go"))
SOURCES = Count(2, CountKind.DISTINCT_SOURCES, ("k",))


async def suspend_new(api: ApiClient, condition: Any = GO) -> tuple[str, SuspendDetails]:
    """Create an execution and suspend it on a waitpoint."""
    held = await api.create_claimed()
    answer = await api.engine.suspend(held.handle, suspend_args(await api.engine.ping(), condition))
    assert isinstance(answer, Suspended)
    return held.execution_id, answer.details


async def send_signal(api: ApiClient, execution_id: str, details: SuspendDetails, **given: Any) -> Any:
    body = api.signal_body(execution_id, details.waitpoint_id, details.waitpoint_token.reveal(), **given)
    return await api.post(path(execution_id, "signal"), body)


@pytest.mark.spec("R32")
async def test_list_pending_waitpoints(api: ApiClient) -> None:
    execution_id, details = await suspend_new(api)
    answer = await api.get(path(execution_id, "pending-waitpoints"))

    assert answer.status_code == 200
    [entry] = answer.json()
    assert (entry["state"], entry["required_signal_names"]) == ("active", ["go"])
    assert entry["token_kid"] == "k1"
    assert len(entry["token_fingerprint"]) == 16
    assert "expires_at" not in entry
    assert details.waitpoint_token.reveal() not in answer.text
    assert (await api.get(path(await api.create(), "pending-waitpoints"))).json() == []
    assert (await api.get(path(new_execution_id(), "pending-waitpoints"))).json() == {"error": "not found: execution"}


@pytest.mark.spec("R33")
async def test_a_waitpoint_token_is_read_without_caching(api: ApiClient) -> None:
    execution_id, details = await suspend_new(api)
    [entry] = (await api.get(path(execution_id, "pending-waitpoints"))).json()
    answer = await api.get(path(execution_id, "waitpoints", details.waitpoint_id, "token"))

    assert answer.status_code == 200
    kid, _, digest = answer.json()["token"].partition(":")
    assert kid == "k1"
    assert digest.startswith(entry["token_fingerprint"])
    assert answer.headers["cache-control"] == "no-store"


@pytest.mark.spec("SS-072")
async def test_the_token_of_a_closed_or_unknown_waitpoint_is_not_found(api: ApiClient) -> None:
    execution_id, details = await suspend_new(api)
    other, _ = await suspend_new(api)
    used, closed = await suspend_new(api)
    assert (await send_signal(api, used, closed)).status_code == 200
    live = await api.get(path(execution_id, "waitpoints", details.waitpoint_id, "token"))
    assert (live.status_code, live.json()) == (200, {"token": details.waitpoint_token.reveal()})
    assert live.headers["cache-control"] == "no-store"
    for url in (
        path(execution_id, "waitpoints", uuid.uuid4(), "token"),
        path(other, "waitpoints", details.waitpoint_id, "token"),
        path(used, "waitpoints", closed.waitpoint_id, "token"),
    ):
        missing = await api.get(url)
        assert missing.status_code == 404
        assert missing.json() == {"error": "waitpoint token not found (consumed, expired, or unknown id)"}
        assert missing.headers["cache-control"] == "no-store"
    bad = await api.get(path(execution_id, "waitpoints", "nope", "token"))
    assert bad.status_code == 400
    assert bad.json()["error"].startswith("waitpoint_id: ")


@pytest.mark.spec("R34")
async def test_a_matching_signal_resumes_the_execution(api: ApiClient) -> None:
    execution_id, details = await suspend_new(api)
    signal_id = str(uuid.uuid4())
    answer = await send_signal(api, execution_id, details, signal_id=signal_id)

    assert answer.status_code == 200
    assert answer.json() == {"Accepted": {"signal_id": signal_id, "effect": "resume_condition_satisfied"}}
    assert await api.state(execution_id) != "suspended"


@pytest.mark.spec("R35")
async def test_a_signal_with_another_name_has_no_effect(api: ApiClient) -> None:
    execution_id, details = await suspend_new(api)
    answer = await send_signal(api, execution_id, details, signal_name="other")

    assert (answer.status_code, answer.json()["Accepted"]["effect"]) == (200, "no_op")
    assert await api.state(execution_id) == "suspended"


@pytest.mark.spec("R36")
async def test_a_signal_with_the_same_idempotency_key_is_a_duplicate(api: ApiClient) -> None:
    execution_id, details = await suspend_new(api, SOURCES)
    first = await send_signal(api, execution_id, details, idempotency_key="i1")
    second = await send_signal(api, execution_id, details, idempotency_key="i1")

    assert second.status_code == 200
    assert second.json() == {"Duplicate": {"existing_signal_id": first.json()["Accepted"]["signal_id"]}}


@pytest.mark.spec("R37")
async def test_a_count_of_distinct_sources_ignores_a_repeated_source(api: ApiClient) -> None:
    execution_id, details = await suspend_new(api, SOURCES)
    effects = [
        (await send_signal(api, execution_id, details, source_identity=who)).json()["Accepted"]["effect"]
        for who in ("alice", "alice", "bob")
    ]

    assert effects == [
        "appended_to_waitpoint",
        "appended_to_waitpoint_duplicate",
        "resume_condition_satisfied",
    ]


@pytest.mark.spec("SS-071")
async def test_a_signal_is_refused_for_a_bad_token_a_closed_waitpoint_or_a_large_body(api: ApiClient) -> None:
    execution_id, details = await suspend_new(api)
    url = path(execution_id, "signal")
    token = details.waitpoint_token.reveal()
    tampered = token[:-1] + ("0" if token[-1] != "0" else "1")
    for waitpoint_id, shown in ((details.waitpoint_id, tampered), (str(uuid.uuid4()), token)):
        refused = await api.post(url, api.signal_body(execution_id, waitpoint_id, shown))
        assert (refused.status_code, refused.json()) == (400, {"error": "invalid_token"})
    assert await api.state(execution_id) == "suspended"

    assert (await send_signal(api, execution_id, details)).status_code == 200
    late = await send_signal(api, execution_id, details)
    assert (late.status_code, late.json()["error"]) == (409, "state_conflict: TargetNotSignalable")
    unknown = new_execution_id()
    missing = await api.post(path(unknown, "signal"), api.signal_body(unknown, details.waitpoint_id, token))
    assert missing.status_code == 404
    large = api.signal_body(execution_id, details.waitpoint_id, token, correlation_id="x" * 262_144)
    refused = await api.post(url, large)
    assert (refused.status_code, refused.json()["limit_bytes"]) == (413, 262_144)
    heavy = api.signal_body(execution_id, details.waitpoint_id, token, payload=[1] * 65_537)
    assert (await api.post(url, heavy)).json()["error"].startswith("payload_too_large")


async def test_every_wrong_link_loads_the_same_rows(api: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    execution_id, details = await suspend_new(api)
    other, elsewhere = await suspend_new(api)
    used, closed = await suspend_new(api)
    assert (await send_signal(api, used, closed)).status_code == 200
    good, zeros = details.waitpoint_token.reveal(), "k1:" + "0" * 64
    links = [
        (execution_id, details.waitpoint_id, ""),
        (execution_id, details.waitpoint_id, zeros),
        (execution_id, details.waitpoint_id, elsewhere.waitpoint_token.reveal()),
        (execution_id, elsewhere.waitpoint_id, good),
        (other, details.waitpoint_id, good),
        (execution_id, str(uuid.uuid4()), good),
        (execution_id, str(uuid.uuid4()), ""),
        (new_execution_id(), details.waitpoint_id, good),
        (used, closed.waitpoint_id, closed.waitpoint_token.reveal()),
    ]
    load, loads = api.engine.runtime.load, list[list[str]]()

    async def recorded(wants: Any) -> Any:
        loads.append([want.row.__name__ for want in wants])
        return await load(wants)

    monkeypatch.setattr(api.engine.runtime, "load", recorded)
    for owner, waitpoint_id, token in links:
        url = f"/v1/waitpoints/{owner}/{waitpoint_id}"
        shown = await api.get(url, params={"token": token})
        answered = await api.post(url, data={"token": token, "value": "yes"})
        assert (shown.status_code, answered.status_code, shown.text) == (404, 404, answered.text)

    assert loads == [["Waitpoint", "Suspension", "SigningKey"]] * 2 * len(links)
    assert (await api.get(f"/v1/waitpoints/{execution_id}/{details.waitpoint_id}?token={good}")).status_code == 200


async def test_a_null_number_has_the_default(api: ApiClient) -> None:
    execution_id, details = await suspend_new(api)
    numbers = dict.fromkeys(("dedup_ttl_ms", "resume_delay_ms", "max_signals_per_execution", "signal_maxlen"))

    first = await send_signal(api, execution_id, details, idempotency_key="once", **numbers)

    assert first.json()["Accepted"]["effect"] == "resume_condition_satisfied"
    again = await send_signal(api, execution_id, details, idempotency_key="once", **numbers)
    assert again.json() == {"Duplicate": {"existing_signal_id": first.json()["Accepted"]["signal_id"]}}


# ---------------------------------------------------------------------------------------------------------------
# Keys

ROTATE = "/v1/admin/rotate-waitpoint-secret"


@pytest.mark.spec("R58")
@pytest.mark.parametrize("secret", ["abc", "zz", ""])
async def test_an_invalid_secret_is_refused(api: ApiClient, secret: str) -> None:
    assert await api.post_json(ROTATE, {"new_kid": "k2", "new_secret_hex": secret}) == (
        400,
        {"error": "new_secret_hex must be a non-empty even-length hex string"},
    )


@pytest.mark.parametrize("kid", ["", "a:b"])
async def test_an_invalid_key_id_is_refused(api: ApiClient, kid: str) -> None:
    answer = await api.post(ROTATE, {"new_kid": kid, "new_secret_hex": "ab"})

    assert (answer.status_code, answer.json()) == (400, {"error": "new_kid must be non-empty and must not contain ':'"})


@pytest.mark.spec("R59")
async def test_a_token_of_the_previous_key_is_accepted_during_its_grace(api: ApiClient) -> None:
    execution_id, details = await suspend_new(api)
    rotation = {"new_kid": "k2", "new_secret_hex": "ab" * 32}
    for _ in range(2):
        assert await api.post_json(ROTATE, rotation) == (200, {"rotated": 1, "failed": [], "new_kid": "k2"})
    clash = await api.post(ROTATE, rotation | {"new_secret_hex": "cd" * 32})
    assert clash.status_code == 400
    assert clash.json()["error"].startswith("rotation failed on all partitions")

    assert "Accepted" in (await send_signal(api, execution_id, details)).json()


@pytest.mark.parametrize("secret", ["ab", "ab" * 31])
async def test_a_secret_below_32_bytes_is_refused(api: ApiClient, secret: str) -> None:
    answer = await api.post(ROTATE, {"new_kid": "k2", "new_secret_hex": secret})

    words = f"invalid_secret_hex: {len(secret) // 2} bytes; a signing secret has at least 32"
    assert (answer.status_code, answer.json()) == (400, {"error": words})
    assert (await api.engine.list_waitpoint_hmac_kids()).current_kid == "k1"


async def test_a_second_concurrent_rotation_is_refused(api: ApiClient) -> None:
    async with api.app.rotation_lock:
        answer = await api.post(ROTATE, {"new_kid": "k2", "new_secret_hex": "ab"})

    assert (answer.status_code, answer.json()) == (
        429,
        {"error": "too many concurrent admin_rotate calls (server max: 1); retry with backoff", "retryable": True},
    )


@pytest.mark.parametrize("secret", ["AB" * 32, "cd" * 32, "ef" * 100])
async def test_a_server_installs_its_secret_once_and_warns_of_another(
    store: Store, secret: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(store)
    settings = ServerSettings(waitpoint_secret=Secret(secret))
    for _ in range(2):
        await seed_signing_key(engine, settings)
    assert (await engine.list_waitpoint_hmac_kids()).current_kid == "k1"
    assert caplog.records == []

    await seed_signing_key(engine, ServerSettings(waitpoint_secret=Secret("77" * 32)))
    await seed_signing_key(engine, ServerSettings())
    [warning] = caplog.records
    assert "the stored one is used" in warning.getMessage()
    [entry] = await engine.rotate_waitpoint_hmac_secret_all("k1", secret.lower(), 0)
    assert entry.result == KeyUnchanged("k1")
    assert "7777" not in caplog.text


async def test_a_server_does_not_install_a_secret_below_32_bytes(store: Store) -> None:
    engine = Engine(store)
    with pytest.raises(errors.InvalidSecretHex, match="16 bytes"):
        await seed_signing_key(engine, ServerSettings(waitpoint_secret=Secret("ab" * 16)))

    assert (await engine.list_waitpoint_hmac_kids()).current_kid is None


async def test_a_stored_key_below_32_bytes_keeps_signing(store: Store) -> None:
    """The configured secret is the stored one, from before the bound existed."""
    engine, short = Engine(store), "ab" * 16
    rows = (Upsert(Keystore(0, "k1")), Upsert(SigningKey("k1", short, current=True)))
    await store.commit([Change(guards=(Guard(Keystore, (0,), None),), writes=rows, id=1)])
    await seed_signing_key(engine, ServerSettings(waitpoint_secret=Secret(short)))
    api = ApiClient(engine)
    execution_id, details = await suspend_new(api)

    assert "Accepted" in (await send_signal(api, execution_id, details)).json()
