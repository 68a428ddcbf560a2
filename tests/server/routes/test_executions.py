"""Executions, listing, claims, reclaims: scenarios R11 to R31 and the HTTP clauses of the execution scenarios."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.errors import LeaseRevoked
from tests.server.api_client import ApiClient, new_execution_id, path

CLAIM = "/v1/workers/w1/claim"


def claim(**given: object) -> dict[str, object]:
    return {"lane_id": "L", "worker_instance_id": "w1-a", "grant_ttl_ms": 5000} | given


@pytest.mark.spec("R11")
async def test_create(api: ApiClient) -> None:
    execution_id = new_execution_id()
    answer = await api.post("/v1/executions", api.create_body(execution_id))

    assert answer.status_code == 201
    assert answer.json() == {"Created": {"execution_id": execution_id, "public_state": "waiting"}}


@pytest.mark.spec("R12")
async def test_a_second_create_with_the_same_id_is_a_duplicate(api: ApiClient) -> None:
    body = api.create_body()
    await api.post("/v1/executions", body)
    assert await api.post_json("/v1/executions", body) == (200, {"Duplicate": {"execution_id": body["execution_id"]}})


@pytest.mark.spec("R13")
async def test_get(api: ApiClient) -> None:
    execution_id = await api.create()
    info = (await api.get(path(execution_id))).json()

    assert info["created_at"].isdigit()
    assert info["flow_id"] is None
    assert not {"started_at", "completed_at"} & set(info)
    vector = info["state_vector"]
    assert (vector["lifecycle_phase"], vector["eligibility_state"], vector["ownership_state"]) == (
        "runnable",
        "eligible_now",
        "unowned",
    )
    assert info["public_state"] == vector["public_state"] == "waiting"
    assert (info["priority"], info["current_attempt_index"], info["blocking_detail"]) == (0, 0, "")


@pytest.mark.spec("R14")
async def test_get_of_an_unknown_execution_is_not_found(api: ApiClient) -> None:
    unknown = new_execution_id()
    assert await api.get_json(path(unknown)) == (404, {"error": f"execution not found: {unknown}"})


@pytest.mark.spec("R15")
async def test_state_is_a_bare_string(api: ApiClient) -> None:
    execution_id = await api.create()
    answer = await api.get(f"/v1/executions/{execution_id}/state")  # raw braces are fine, too

    assert (answer.status_code, answer.text) == (200, '"waiting"')


@pytest.mark.spec("R16")
async def test_a_priority_above_the_maximum_is_clamped(api: ApiClient) -> None:
    execution_id = await api.create(priority=20_000)

    assert (await api.get(path(execution_id))).json()["priority"] == 9000


@pytest.mark.spec("R17")
async def test_a_second_cancel_returns_the_same_response(api: ApiClient) -> None:
    execution_id = await api.create()
    for _ in range(2):
        answer = await api.post(path(execution_id, "cancel"), api.cancel_body(execution_id))
        assert answer.status_code == 200
        assert answer.json() == {"Cancelled": {"execution_id": execution_id, "public_state": "cancelled"}}


@pytest.mark.spec("R18")
async def test_a_cancelled_execution_is_replayed(api: ApiClient) -> None:
    execution_id = await api.create()
    await api.post(path(execution_id, "cancel"), api.cancel_body(execution_id))
    assert await api.post_json(path(execution_id, "replay")) == (200, {"Replayed": {"public_state": "waiting"}})
    assert await api.state(execution_id) == "waiting"


@pytest.mark.spec("R19")
async def test_the_result_is_returned_as_octets(api: ApiClient) -> None:
    execution_id = await api.create_completed(b"\x00\xffA")
    answer = await api.get(path(execution_id, "result"))

    assert (answer.status_code, answer.content) == (200, b"\x00\xffA")
    assert answer.headers["content-type"] == "application/octet-stream"


@pytest.mark.spec("R20")
async def test_the_result_before_the_completion_is_not_found(api: ApiClient) -> None:
    execution_id = await api.create()
    answer = await api.get(path(execution_id, "result"))

    assert (answer.status_code, answer.json()) == (404, {"error": f"execution result not found: {execution_id}"})


@pytest.mark.spec("R21")
async def test_revoke_without_a_lease_is_already_satisfied(api: ApiClient) -> None:
    execution_id = await api.create()
    answer = await api.post(path(execution_id, "revoke-lease"))

    assert (answer.status_code, answer.json()) == (200, {"AlreadySatisfied": {"reason": "no_active_lease"}})


@pytest.mark.spec("R22")
async def test_a_revoked_lease_cannot_be_renewed(api: ApiClient) -> None:
    held = await api.create_claimed()
    assert await api.post_json(path(held.execution_id, "revoke-lease")) == (
        200,
        {"Revoked": {"lease_id": held.lease_id, "lease_epoch": "1"}},
    )
    with pytest.raises(LeaseRevoked):
        await api.engine.renew(held.handle)


@pytest.mark.spec("R23")
async def test_an_empty_partition_has_an_empty_list(api: ApiClient) -> None:
    assert await api.get_json("/v1/executions?partition=9") == (200, {"executions": [], "next_cursor": None})


@pytest.mark.spec("R24")
async def test_an_invalid_cursor_is_refused(api: ApiClient) -> None:
    answer = await api.get("/v1/executions?partition=3&cursor=zzz")

    assert answer.status_code == 400
    assert answer.json()["error"].startswith("invalid cursor: ")


@pytest.mark.parametrize("query", ["", "partition=x", "partition=-1", "partition=65536", "partition=1&limit=x"])
async def test_an_invalid_query_is_refused_in_json(api: ApiClient, query: str) -> None:
    answer = await api.get(f"/v1/executions?{query}")

    assert answer.status_code == 400
    assert answer.json()["error"]


@pytest.mark.spec("R25")
async def test_a_claim_without_work_has_status_204(api: ApiClient) -> None:
    answer = await api.post(CLAIM, claim())

    assert (answer.status_code, answer.content) == (204, b"")


@pytest.mark.spec("R26")
async def test_a_claim_issues_a_grant(api: ApiClient, clock: ManualClock) -> None:
    execution_id = await api.create()
    answer = await api.post(CLAIM, claim())

    assert answer.status_code == 200
    grant = answer.json()
    assert (grant["execution_id"], grant["partition_key"], grant["grant_kind"]) == (execution_id, "{fp:7}", "claim")
    assert grant["grant_key"]
    assert 0 < grant["expires_at_ms"] - await api.engine.ping() <= 5000


@pytest.mark.spec("R27")
@pytest.mark.parametrize("ttl", [0, 60_001])
async def test_a_grant_ttl_out_of_range_is_refused(api: ApiClient, ttl: int) -> None:
    assert await api.post_json(CLAIM, claim(grant_ttl_ms=ttl)) == (400, {"error": "grant_ttl_ms must be in 1..=60000"})


@pytest.mark.spec("R28")
async def test_a_grant_needs_the_required_capability(api: ApiClient) -> None:
    policy = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    execution_id = await api.create(policy=policy)

    assert (await api.post(CLAIM, claim())).status_code == 204
    granted = await api.post(CLAIM, claim(capabilities=["gpu", "x"]))
    assert (granted.status_code, granted.json()["execution_id"]) == (200, execution_id)


@pytest.mark.spec("R29")
async def test_higher_priorities_are_granted_first(api: ApiClient) -> None:
    low, high = await api.create(priority=1), await api.create(priority=10)
    granted = [(await api.post(CLAIM, claim())).json()["execution_id"] for _ in range(2)]

    assert granted == [high, low]


def reclaim(**given: object) -> dict[str, object]:
    return {"worker_id": "w", "worker_instance_id": "w-2", "lane_id": "L", "grant_ttl_ms": 5000} | given


@pytest.mark.spec("R30")
async def test_a_reclaim_of_an_unknown_execution_is_not_found(api: ApiClient) -> None:
    answer = await api.post(path(new_execution_id(), "reclaim"), reclaim())

    assert (answer.status_code, answer.json()) == (404, {"error": "not found: execution"})


@pytest.mark.spec("R31")
async def test_a_waiting_execution_is_not_reclaimable(api: ApiClient) -> None:
    execution_id = await api.create()
    assert await api.post_json(path(execution_id, "reclaim"), reclaim()) == (
        200,
        {"status": "not_reclaimable", "execution_id": execution_id, "detail": "execution_not_reclaimable"},
    )


@pytest.mark.parametrize(
    ("url", "body", "text"),
    [
        ("/v1/workers/%20/claim", claim(), "worker_id: must not contain whitespace or control characters"),
        (f"/v1/workers/{'w' * 257}/claim", claim(), "worker_id: exceeds 256 bytes (got 257)"),
        (CLAIM, claim(worker_instance_id=""), "worker_instance_id: must not be empty"),
        (CLAIM, claim(lane_id=""), "lane_id: lane_id is empty"),
        (CLAIM, claim(lane_id="x" * 65), "lane_id: lane_id exceeds 64 bytes (got 65)"),
        (CLAIM, claim(lane_id="a\tb"), "lane_id: lane_id contains non-ASCII-printable byte at index 1"),
    ],
)
async def test_ids_in_a_claim_are_validated(api: ApiClient, url: str, body: object, text: str) -> None:
    assert await api.post_json(url, body) == (400, {"error": text})


@pytest.mark.spec("S-081")
@pytest.mark.parametrize("token", ["", "a,b", "a b", "a\nb"])
async def test_capabilities_of_a_claim_are_validated(api: ApiClient, token: str) -> None:
    answer = await api.post(CLAIM, claim(capabilities=[token]))

    assert answer.status_code == 400
    assert answer.json()["error"].startswith("invalid_input")


# ---------------------------------------------------------------------------------------------------------------
# The HTTP clauses of the execution scenarios


UUID = "550e8400-e29b-41d4-a716-446655440000"


@pytest.mark.spec("EX-001")
@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (UUID, f"execution_id is missing the `{{fp:N}}:` hash-tag prefix: {UUID}"),
        (f"{{fp:1}}{UUID}", f"execution_id is missing the `{{fp:N}}:` hash-tag prefix: {{fp:1}}{UUID}"),
        (f"{{fp:70000}}:{UUID}", f"execution_id partition index is not a valid u16: {{fp:70000}}:{UUID}"),
        (f"{{fp:}}:{UUID}", f"execution_id partition index is not a valid u16: {{fp:}}:{UUID}"),
        ("{fp:3}:not-a-uuid", "execution_id UUID suffix is not a valid UUID: {fp:3}:not-a-uuid"),
    ],
)
async def test_an_invalid_execution_id_is_refused(api: ApiClient, bad: str, text: str) -> None:
    assert await api.get_json(path(bad)) == (400, {"error": f"invalid execution_id: {text}"})
    assert (await api.post("/v1/executions", api.create_body(bad))).status_code == 422


@pytest.mark.spec("EX-016")
async def test_create_has_status_201_then_200_and_a_body_limit(api: ApiClient) -> None:
    body = api.create_body()
    assert [(await api.post("/v1/executions", body)).status_code for _ in range(2)] == [201, 200]
    size = 1_048_577
    padded = json.dumps(api.create_body(creator_identity="")).encode()
    padded += b" " * (size - len(padded))
    headers = {"content-type": "application/json"}

    large = await api.post("/v1/executions", content=padded, headers=headers)

    assert large.status_code == 413
    assert large.json() == {"error": "payload_too_large", "limit_bytes": 1_048_576, "route": "/v1/executions"}
    assert (await api.post("/v1/executions", content=padded[:-1], headers=headers)).status_code == 201
    assert (await api.post("/v1/executions", api.create_body(UUID))).status_code == 422


@pytest.mark.spec("EX-043")
async def test_an_empty_result_is_different_from_no_result(api: ApiClient) -> None:
    answers = [await api.get(path(await api.create_completed(result), "result")) for result in (None, b"", b"x")]

    assert [(one.status_code, one.content) for one in answers[1:]] == [(200, b""), (200, b"x")]
    assert answers[0].status_code == 404


@pytest.mark.spec("EX-055")
async def test_cancel_of_a_completed_execution_is_a_conflict(api: ApiClient) -> None:
    execution_id = await api.create_completed()
    answer = await api.post(path(execution_id, "cancel"), api.cancel_body(execution_id))

    assert (answer.status_code, answer.json()) == (
        409,
        {"error": "contention: ExecutionNotActive", "kind": "contention", "retryable": True},
    )
    exact = json.loads(answer.headers["x-ff-error"])
    assert exact["code"] == "execution_not_active"
    assert exact["facts"]["terminal_outcome"] == "success"


@pytest.mark.spec("EX-063")
async def test_a_reclaim_grant_is_refused_unless_the_lease_has_expired(api: ApiClient, clock: ManualClock) -> None:
    held = await api.create_claimed()
    url = path(held.execution_id, "reclaim")
    assert (await api.post(url, reclaim())).json()["status"] == "not_reclaimable"
    for ttl in (0, 60_001):
        assert (await api.post(url, reclaim(grant_ttl_ms=ttl))).status_code == 400

    clock.advance_ms(60_000)
    granted = await api.post(url, reclaim())
    assert (granted.status_code, granted.json()["status"], granted.json()["lane_id"]) == (200, "granted", "L")
    assert await api.post_json(url, reclaim()) == (
        409,
        {"error": "state_conflict: GrantAlreadyExists", "kind": "state_conflict", "retryable": False},
    )


@pytest.mark.spec("EX-073")
async def test_change_priority_clamps_and_refuses_ended_or_unknown_executions(api: ApiClient) -> None:
    execution_id = await api.create()
    url = path(execution_id, "priority")
    changed = await api.put(url, {"new_priority": 7})
    assert (changed.status_code, changed.json()) == (200, {"Changed": {"execution_id": execution_id}})
    for given, stored in ((10_000, 9000), (-5, 0)):
        await api.put(url, {"new_priority": given})
        assert (await api.get(path(execution_id))).json()["priority"] == stored

    await api.post(path(execution_id, "cancel"), api.cancel_body(execution_id))
    refused = await api.put(url, {"new_priority": 7})
    assert (refused.status_code, refused.json()["error"]) == (409, "contention: ExecutionNotEligible")
    assert (await api.put(path(new_execution_id(), "priority"), {"new_priority": 7})).status_code == 404


@pytest.mark.spec("EX-075")
async def test_replay_is_limited_and_needs_a_terminal_execution(api: ApiClient) -> None:
    execution_id = await api.create(policy={"max_replay_count": 1})
    early = await api.post(path(execution_id, "replay"))
    assert (early.status_code, early.json()["kind"]) == (409, "execution_not_terminal")
    await api.post(path(execution_id, "cancel"), api.cancel_body(execution_id))
    assert (await api.post(path(execution_id, "replay"))).status_code == 200
    await api.post(path(execution_id, "cancel"), api.cancel_body(execution_id))

    assert await api.post_json(path(execution_id, "replay")) == (
        409,
        {"error": "max_replays_exhausted: MaxReplaysExhausted", "kind": "max_replays_exhausted", "retryable": False},
    )
    assert (await api.post(path(new_execution_id(), "replay"))).status_code == 404


@pytest.mark.spec("EX-078")
async def test_executions_of_a_partition_are_listed_in_pages(api: ApiClient) -> None:
    five = sorted([await api.create(execution_id=new_execution_id(5)) for _ in range(15)])
    for _ in range(3):
        await api.create(execution_id=new_execution_id(6))
    pages = []
    page: dict[str, Any] = {"next_cursor": ""}
    for _ in range(3):
        page = (
            await api.get("/v1/executions", params={"partition": 5, "limit": 5, "cursor": page["next_cursor"]})
        ).json()
        pages.append(page["executions"])

    assert [len(page) for page in pages] == [5, 5, 5]
    assert [one for page in pages for one in page] == five
    assert page["next_cursor"] is None
    nothing = await api.get("/v1/executions?partition=5&limit=0")
    assert nothing.json() == {"executions": [], "next_cursor": None}
    assert len((await api.get("/v1/executions?partition=5&limit=5000")).json()["executions"]) == 15
    gone = new_execution_id(5)
    after = (await api.get("/v1/executions", params={"partition": 5, "cursor": gone})).json()["executions"]
    assert after == [one for one in five if one > gone]


async def test_optional_fields_of_a_create_have_defaults(api: ApiClient) -> None:
    short = {"namespace": "ns", "lane_id": "L", "execution_kind": "task", "input_payload_b64": "aGk="}
    made = await api.post("/v1/executions", short)

    assert made.status_code == 201
    execution_id = made.json()["Created"]["execution_id"]
    assert (await api.engine.read_execution_context(execution_id)).input_payload == b"hi"


@pytest.mark.parametrize(
    "wrong",
    [
        {"input_payload": [256]},
        {"input_payload": "hi"},
        {"lane_id": ""},
        {"lane_id": "x" * 65},
        {"tags": {"a.b": 1}},
        {"policy": []},
        {"priority": "high"},
        {"priority": 2**31},
        {"partition_id": 65_536},
        {"execution_id": ""},
        {"input_payload_b64": "aGk="},
    ],
)
async def test_a_create_with_an_invalid_field_is_unprocessable_and_creates_nothing(
    api: ApiClient, wrong: object
) -> None:
    body = api.create_body() | wrong  # type: ignore[operator]
    assert await api.post_json("/v1/executions", body) == (422, {"error": "invalid JSON: Unprocessable Entity"})
    assert (await api.get(path(str(body["execution_id"])))).status_code == 404


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        ({"routing_requirements": {"required_capabilities": ["a b"]}}, "invalid_capabilities: required:"),
        ({"retry_policy": {"max_retries": "many"}}, "invalid_policy_json: "),
    ],
)
async def test_an_invalid_policy_is_a_bad_request(api: ApiClient, policy: object, code: str) -> None:
    answer = await api.post("/v1/executions", api.create_body(policy=policy))

    assert answer.status_code == 400
    assert answer.json()["error"].startswith(code)


async def test_an_unknown_policy_key_is_reported_in_a_warning_header(api: ApiClient) -> None:
    odd = await api.post("/v1/executions", api.create_body(policy={"required_capabilities": ["gpu"], "é\r\n": 1}))
    plain = await api.post("/v1/executions", api.create_body(policy={"priority": 1}))

    assert odd.status_code == 201
    assert odd.headers["warning"].startswith("299 flowfabric \"policy keys ignored: 'required_capabilities'")
    assert "\n" not in odd.headers["warning"]
    assert "warning" not in plain.headers


async def test_a_body_that_names_another_execution_than_the_path_is_refused(api: ApiClient) -> None:
    execution_id = await api.create()
    assert await api.post_json(path(execution_id, "cancel"), api.cancel_body(new_execution_id())) == (
        400,
        {"error": "path execution_id does not match body execution_id"},
    )


async def test_a_cancel_by_the_lease_holder_needs_its_fence(api: ApiClient) -> None:
    held = await api.create_claimed()
    url = path(held.execution_id, "cancel")
    bare = await api.post(url, api.cancel_body(held.execution_id, source="lease_holder"))
    assert (bare.status_code, bare.json()) == (400, {"error": "invalid_input: fence_required"})
    fence: dict[str, Any] = {"lease_id": held.lease_id, "lease_epoch": held.lease_epoch, "attempt_id": held.attempt_id}
    stale = await api.post(url, api.cancel_body(held.execution_id, source="lease_holder", **fence | {"lease_epoch": 9}))
    assert (stale.status_code, stale.json()["error"]) == (409, "state_conflict: StaleLease")
    assert (await api.post(url, api.cancel_body(held.execution_id, source="lease_holder", **fence))).status_code == 200
