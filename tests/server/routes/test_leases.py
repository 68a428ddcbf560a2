"""The worker protocol over HTTP: everything that a worker does without a database connection."""

from __future__ import annotations

import asyncio
import base64
import uuid
from typing import Any

import pytest

from flowfabric.clock import ManualClock
from tests.server.api_client import ApiClient, path, wait_until

CLAIMS = "/v1/workers/w/claims"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def claim_body(**given: Any) -> dict[str, Any]:
    return {"worker_instance_id": "w-1", "lanes": ["L"]} | given


async def claim_new(api: ApiClient, **given: Any) -> Any:
    """Create an execution and claim it over HTTP."""
    await api.create(**given)
    [work] = (await api.post(CLAIMS, claim_body())).json()["claimed"]
    return work


async def call_lease(api: ApiClient, verb: str, work: Any, **given: Any) -> Any:
    """Call a route of the lease holder."""
    return await api.post(f"/v1/leases/{verb}", {"handle": work["handle"]} | given)


async def test_a_claim_returns_the_lease_and_the_input(api: ApiClient) -> None:
    execution_id = await api.create(payload_encoding="text")
    answer = await api.post(CLAIMS, claim_body(limit=5))

    [work] = answer.json()["claimed"]
    assert (work["execution_id"], work["execution_kind"]) == (execution_id, "task")
    assert (work["lease_epoch"], work["attempt_index"], work["attempt_type"]) == (1, 0, "initial")
    assert (base64.b64decode(work["input_payload_b64"]), work["payload_encoding"]) == (b"hi", "text")
    assert await api.state(execution_id) == "active"
    assert (await api.post(CLAIMS, claim_body())).json() == {"claimed": []}


async def test_a_claim_waits_for_work(api: ApiClient) -> None:
    waiting = asyncio.create_task(api.post(CLAIMS, claim_body(wait_ms=20_000)))
    await wait_until(lambda: bool(api.app.on_closing))
    execution_id = await api.create()
    async with asyncio.timeout(5):
        [work] = (await waiting).json()["claimed"]

    assert work["execution_id"] == execution_id


async def test_a_waiting_claim_ends_when_the_server_closes(api: ApiClient) -> None:
    waiting = asyncio.create_task(api.post(CLAIMS, claim_body(wait_ms=20_000)))
    await wait_until(lambda: bool(api.app.on_closing))
    api.app.begin_closing()
    async with asyncio.timeout(5):
        assert (await waiting).json() == {"claimed": []}


async def test_a_claim_whose_caller_disconnected_is_released(api: ApiClient) -> None:
    """The caller disconnects while the claim is in flight, so nobody would use the lease."""
    execution_id = await api.create()
    body = b'{"worker_instance_id": "w-1", "lanes": ["L"], "wait_ms": 20000}'
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
    real = api.engine.claim_from_lanes

    async def slow(*args: Any, **kwargs: Any) -> Any:
        answer = await real(*args, **kwargs)
        await wait_until(lambda: not kwargs["go_on"]())
        return answer

    api.engine.claim_from_lanes = slow  # type: ignore[method-assign]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "raw_path": CLAIMS.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await api.app(scope, receive, send)

    assert sent[-1]["body"] == b'{"claimed":[]}'
    await api.engine.sweep_once("delayed_promoter")
    assert await api.state(execution_id) == "waiting"


async def test_a_batch_of_renewals_has_one_result_per_lease(api: ApiClient, clock: ManualClock) -> None:
    works = [await claim_new(api) for _ in range(2)]
    await call_lease(api, "complete", works[1])
    clock.advance_ms(5000)
    handles = [works[0]["handle"], works[1]["handle"], "nonsense"]
    answer = await api.post("/v1/leases/renew", {"handles": handles, "lease_ttl_ms": 30_000})

    renewed, ended, broken = answer.json()["results"]
    assert renewed["Renewed"]["expires_at"] == await api.engine.ping() + 30_000
    assert (ended["kind"], ended["code"], ended["facts"]["terminal_outcome"]) == (
        "contention",
        "execution_not_active",
        "success",
    )
    assert broken["code"] == "corruption"
    counted = (await api.get("/metrics")).text
    assert 'ff_lease_renewal_total{outcome="ok"} 1' in counted
    assert 'ff_lease_renewal_total{outcome="error"} 1' in counted, "an invalid handle is not counted as a renewal"


async def test_progress_and_completion_are_reported_over_http(api: ApiClient) -> None:
    work = await claim_new(api)
    assert (await call_lease(api, "progress", work, pct=40, message="half")).json() == {
        "ProgressNoted": {"execution_id": work["execution_id"]}
    }
    assert (await api.get(path(work["execution_id"], "progress"))).json() == {"pct": 40, "message": "half"}
    for _ in range(2):  # a retry after a lost reply succeeds
        done = await call_lease(api, "complete", work, result_b64=b64(b"\x00\xff"), encoding="raw")
        assert done.json() == {"Completed": {"execution_id": work["execution_id"], "public_state": "completed"}}
    assert (await api.get(path(work["execution_id"], "result"))).content == b"\x00\xff"
    end = (await api.get(path(work["execution_id"], "end"))).json()
    assert (end["outcome"], end["has_result"], end["encoding"]) == ("success", True, "raw")


async def test_a_failure_is_retried_by_policy(api: ApiClient) -> None:
    retry = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
    work = await claim_new(api, policy=retry)
    first = await call_lease(api, "fail", work, reason="boom")
    assert first.json()["RetryScheduled"]["next_attempt_index"] == 1
    stale = await call_lease(api, "complete", work)
    assert stale.status_code == 409
    assert await api.state(work["execution_id"]) != "completed"


async def test_a_worker_that_lost_its_lease_is_fenced_off(api: ApiClient, clock: ManualClock) -> None:
    stale = await claim_new(api)
    clock.advance_ms(60_000)
    [successor] = (await api.post(CLAIMS, claim_body(worker_instance_id="w-2"))).json()["claimed"]
    assert (successor["attempt_type"], successor["lease_epoch"]) == ("reclaim", 2)

    for verb, given in (
        ("complete", {}),
        ("fail", {"reason": "x"}),
        ("progress", {"pct": 1}),
        ("delay", {"delay_ms": 5}),
    ):
        refused = await call_lease(api, verb, stale, **given)
        assert (refused.status_code, refused.json()["error"]) == (409, "state_conflict: StaleLease"), verb
    frames = await call_lease(api, "frames", stale, frames=[{"payload_b64": b64(b"late")}])
    assert frames.json()["results"][0]["code"] == "stale_owner_cannot_append"
    assert (await call_lease(api, "complete", successor)).status_code == 200


async def test_a_delayed_attempt_is_claimed_again_later(api: ApiClient, clock: ManualClock) -> None:
    work = await claim_new(api)
    assert (await call_lease(api, "delay", work)).status_code == 400
    delayed = await call_lease(api, "delay", work, delay_ms=1000, reason="not before noon")
    assert delayed.json()["Delayed"]["public_state"] == "delayed"
    assert "not before noon" in (await api.engine.explain(work["execution_id"])).sentence
    clock.advance_ms(1000)
    await api.engine.sweep_once("delayed_promoter")
    [again] = (await api.post(CLAIMS, claim_body())).json()["claimed"]

    assert (again["attempt_index"], again["lease_epoch"]) == (0, 2)


async def test_a_signal_resumes_a_suspended_execution(api: ApiClient) -> None:
    work = await claim_new(api)
    suspended = await call_lease(
        api,
        "suspend",
        work,
        waitpoints=[{"Fresh": {"waitpoint_key": "k"}}],
        resume_condition={"Single": {"waitpoint_key": "k", "matcher": {"ByName": "go"}}},
        reason_code="WaitingForApproval",
        timeout_behavior="Escalate",
    )
    waiting = suspended.json()["Suspended"]
    [point] = waiting["waitpoints"]
    assert waiting["handle"].startswith("Suspended.")
    execution_id = work["execution_id"]
    vector = (await api.get(path(execution_id))).json()["state_vector"]
    assert vector["blocking_reason"] == "waiting_for_approval"
    signal = api.signal_body(execution_id, point["waitpoint_id"], point["waitpoint_token"], payload=[1, 2])
    assert (await api.post(path(execution_id, "signal"), signal)).status_code == 200
    [resumed] = (await api.post(CLAIMS, claim_body())).json()["claimed"]

    assert (resumed["execution_id"], resumed["attempt_index"], resumed["lease_epoch"]) == (execution_id, 0, 2)
    [seen] = (await call_lease(api, "signals", resumed)).json()["signals"]
    assert (seen["signal_name"], base64.b64decode(seen["payload_b64"])) == ("go", b"\x01\x02")


async def test_a_pending_waitpoint_buffers_early_signals(api: ApiClient) -> None:
    work = await claim_new(api)
    made = (await call_lease(api, "waitpoints", work, waitpoint_key="k", expires_in_ms=60_000)).json()
    execution_id = work["execution_id"]
    early = api.signal_body(execution_id, made["waitpoint_id"], made["token"])
    reply = await api.post(path(execution_id, "signal"), early)
    assert reply.json()["Accepted"]["effect"] == "buffered_for_pending_waitpoint"
    answer = await call_lease(
        api,
        "suspend",
        work,
        waitpoints=[{"UsePending": {"waitpoint_id": made["waitpoint_id"]}}],
        resume_condition={"Single": {"waitpoint_key": "k", "matcher": "Wildcard"}},
    )

    assert "handle" not in answer.json()["AlreadySatisfied"]
    assert (await call_lease(api, "complete", work)).status_code == 200


@pytest.mark.parametrize("wrong", [{}, {"UsePending": {}}, {"Other": {}}, {"Fresh": {"waitpoint_id": "x"}}])
async def test_a_suspend_with_a_wrong_binding_changes_nothing(api: ApiClient, wrong: Any) -> None:
    work = await claim_new(api)
    answer = await call_lease(api, "suspend", work, waitpoints=[wrong], resume_condition="OperatorOnly")

    assert answer.status_code == 400
    assert await api.state(work["execution_id"]) == "active"


async def test_frames_are_appended_in_order(api: ApiClient) -> None:
    work = await claim_new(api)
    frames = [{"payload_b64": b64(f"f{number}".encode()), "frame_type": "log"} for number in range(20)]
    answer = await call_lease(api, "frames", work, frames=frames)

    assert [one["Appended"]["frame_count"] for one in answer.json()["results"]] == list(range(1, 21))
    page = (await api.get(path(work["execution_id"], "attempts", 0, "stream"))).json()
    assert [frame["fields"]["payload"] for frame in page["frames"]] == [f"f{number}" for number in range(20)]


async def test_a_holder_reports_usage_and_reserves_budget(api: ApiClient) -> None:
    url = await api.create_budget()
    budget_id = url.rpartition("/")[2]
    work = await claim_new(api)
    given = {"budget_id": budget_id, "dimensions": {"tokens": 10}}

    assert (await call_lease(api, "usage", work, **given, dedup_key="d")).json() == "Ok"
    assert (await call_lease(api, "usage", work, **given, dedup_key="d")).json() == "AlreadyApplied"
    assert (await call_lease(api, "spend", work, **given)).json() == "Ok"
    reservation = {"budget_id": budget_id, "amounts": {"tokens": 30}, "ttl_ms": 60_000}
    assert "Reserved" in (await call_lease(api, "reserve", work, **reservation)).json()
    status = (await api.get(url)).json()
    assert (status["usage"]["tokens"], status["reserved"]["tokens"]) == (20, 30)
    kept = (await call_lease(api, "reserve", work, **reservation | {"amounts": {"tokens": 5}})).json()["Reserved"]
    spent = {"budget_id": budget_id, "reservation_id": kept["reservation_id"]}
    assert (await call_lease(api, "settle", work, **spent, amounts={"tokens": 4})).json() == "Ok"
    assert (await call_lease(api, "refund", work, **spent)).json()["Refunded"]["amounts"] == {}
    released = await api.post(f"{url}/release", {"execution_id": work["execution_id"]})
    assert released.json()["Released"]["amounts"] == {"tokens": 14}


@pytest.mark.spec("EX-031")
@pytest.mark.parametrize("kind", ["claim", "resume", "reclaim"])
async def test_a_grant_is_valid_until_it_is_redeemed(api: ApiClient, clock: ManualClock, kind: str) -> None:
    """A worker without a free slot redeems its grant later."""
    work = await claim_new(api)
    execution_id = work["execution_id"]
    if kind == "claim":
        await call_lease(api, "complete", work)
        execution_id = await api.create()
    elif kind == "resume":
        await call_lease(api, "delay", work, delay_ms=0)
        await api.engine.sweep_once("delayed_promoter")
    else:
        clock.advance_ms(60_000)
    grant = (
        await api.post("/v1/workers/w/claim", {"lane_id": "L", "worker_instance_id": "w-9", "grant_ttl_ms": 5000})
    ).json()
    assert (grant["execution_id"], grant["grant_kind"]) == (execution_id, kind)
    clock.advance_ms(4000)
    redeem = {"grant_kind": kind, "grant_key": grant["grant_key"], "worker_id": "w", "worker_instance_id": "w-9"}
    stranger = await api.post(path(execution_id, "redeem"), redeem | {"worker_id": "v"})
    assert stranger.status_code == 409 or "GrantNotFound" in stranger.json()

    answer = await api.post(path(execution_id, "redeem"), redeem)

    claimed = answer.json()["Claimed"]
    assert base64.b64decode(claimed["input_payload_b64"]) == b"hi"
    assert (await call_lease(api, "complete", claimed)).status_code == 200


async def test_workers_register_send_heartbeats_and_are_listed(api: ApiClient) -> None:
    body = {"worker_instance_id": "w-1", "lanes": ["L"], "liveness_ttl_ms": 10_000, "capabilities": ["gpu"]}
    instance = {"worker_instance_id": "w-1"}

    assert "WorkerRegistered" in (await api.post("/v1/workers/w/register", body)).json()
    assert "WorkerRefreshed" in (await api.post("/v1/workers/w/heartbeat", instance)).json()
    [entry] = (await api.get("/v1/workers?namespace=default")).json()["entries"]
    assert (entry["worker_id"], entry["lanes"], entry["capabilities"]) == ("w", ["L"], ["gpu"])
    assert "MarkedDead" in (await api.post("/v1/workers/w/dead", instance)).json()
    assert "NotRegistered" in (await api.post("/v1/workers/w/heartbeat", instance)).json()


async def test_a_durable_function_records_steps_and_parks_over_http(api: ApiClient) -> None:
    work = await claim_new(api)
    execution_id = work["execution_id"]
    step = {"name": "charge", "occurrence": 0, "result_b64": b64(b"1"), "encoding": "json"}
    first = (await call_lease(api, "steps", work, **step)).json()
    again = (await call_lease(api, "steps", work, **step | {"result_b64": b64(b"2")})).json()
    assert base64.b64decode(again["result"]) == base64.b64decode(first["result"]) == b"1"
    assert len((await api.get(path(execution_id, "steps"))).json()["steps"]) == 1

    point = str(uuid.uuid4())
    gate = {
        "name": "approval:ok/1",
        "kind": "signals",
        "condition": {"Composite": {"kind": "Count", "n": 1, "count_kind": "DistinctSignals", "waitpoints": ["k"]}},
        "waitpoints": [[point, "k"]],
    }
    opened = (await call_lease(api, "gates", work, **gate)).json()["OpenedGate"]
    parked = (await call_lease(api, "park", work, gates=[gate["name"]])).json()["Parked"]
    assert parked["handle"].startswith("Suspended.")
    vote = api.signal_body(execution_id, point, opened["links"][0]["token"], payload=[116])
    assert (await api.post(path(execution_id, "signal"), vote)).status_code == 200
    [resumed] = (await api.post(CLAIMS, claim_body())).json()["claimed"]
    memo = (await call_lease(api, "gates", resumed, **gate)).json()["GateMemo"]
    assert memo["ended_as"] == "satisfied"
    assert gate["name"] in (await api.get(path(execution_id, "waits"))).json()["memos"]
    votes = (await api.get(path(execution_id, "gates", "approval:ok%2F1", "votes"))).json()["signals"]
    assert base64.b64decode(votes[0]["payload_b64"]) == b"t"


async def test_a_message_is_delivered_to_its_mailbox_once(api: ApiClient) -> None:
    work = await claim_new(api)
    body = {"mailbox": "news", "payload": [49], "idempotency_key": "once"}
    url = path(work["execution_id"], "messages")

    assert "Accepted" in (await api.post(url, body)).json()
    assert "Duplicate" in (await api.post(url, body)).json()
    memo = (await call_lease(api, "gates", work, name="receive:news", kind="mailbox", mailbox="news")).json()[
        "GateMemo"
    ]
    assert base64.b64decode(memo["payload"]) == b"1"


@pytest.mark.parametrize("text", ["", "Fresh", "Fresh.", "Fresh.!!!", "Odd.AAAA", "Fresh.AAAA"])
async def test_a_broken_handle_is_a_bad_request(api: ApiClient, text: str) -> None:
    answer = await api.post("/v1/leases/complete", {"handle": text})

    assert answer.status_code == 400
    assert answer.json()["error"].startswith("validation_error")


async def test_a_failure_with_an_error_is_found_in_the_outcome_and_the_attempt(api: ApiClient) -> None:
    error = {"type": "shop.Declined", "text": "card 4242", "category": "Declined", "data": {"code": 7}}
    work = await claim_new(api)

    await call_lease(api, "fail", work, reason="it failed", category="permanent", error=error)

    ended = (await api.get(path(work["execution_id"], "end"))).json()
    assert (ended["error"], ended["has_result"], ended["encoding"]) == (error, False, None)
    [attempt] = (await api.get(path(work["execution_id"], "attempts"))).json()
    assert attempt["error"] == error


@pytest.mark.parametrize("error", [{"type": "x"}, {"type": "x", "text": 1}, "x", {"type": "x", "text": "y" * 20_000}])
async def test_an_error_of_another_shape_is_refused(api: ApiClient, error: Any) -> None:
    work = await claim_new(api)

    answer = await call_lease(api, "fail", work, reason="it failed", error=error)

    assert answer.status_code in (400, 422)
    assert await api.state(work["execution_id"]) == "active"
