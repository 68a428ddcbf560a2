"""The worker protocol over HTTP: everything a worker does with no database of its own."""

from __future__ import annotations

import asyncio
import base64
import uuid
from typing import Any

import pytest

from flowfabric.clock import ManualClock
from tests.server.asking import Asking, path, until

CLAIMS = "/v1/workers/w/claims"


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def wish(**given: Any) -> dict[str, Any]:
    return {"worker_instance_id": "w-1", "lanes": ["L"]} | given


async def claimed(ask: Asking, **given: Any) -> Any:
    """A new execution, claimed over HTTP."""
    await ask.created(**given)
    [work] = (await ask.post(CLAIMS, wish())).json()["claimed"]
    return work


async def said(ask: Asking, verb: str, work: Any, **given: Any) -> Any:
    """What the holder says."""
    return await ask.post(f"/v1/leases/{verb}", {"handle": work["handle"]} | given)


async def test_a_claim_brings_the_lease_and_what_to_work_on(ask: Asking) -> None:
    execution_id = await ask.created(payload_encoding="text")
    answer = await ask.post(CLAIMS, wish(limit=5))

    [work] = answer.json()["claimed"]
    assert (work["execution_id"], work["execution_kind"]) == (execution_id, "task")
    assert (work["lease_epoch"], work["attempt_index"], work["attempt_type"]) == (1, 0, "initial")
    assert (base64.b64decode(work["input_payload_b64"]), work["payload_encoding"]) == (b"hi", "text")
    assert await ask.state(execution_id) == "active"
    assert (await ask.post(CLAIMS, wish())).json() == {"claimed": []}


async def test_a_claim_waits_for_work(ask: Asking) -> None:
    waiting = asyncio.create_task(ask.post(CLAIMS, wish(wait_ms=20_000)))
    await until(lambda: bool(ask.app.on_closing))
    execution_id = await ask.created()
    async with asyncio.timeout(5):
        [work] = (await waiting).json()["claimed"]

    assert work["execution_id"] == execution_id


async def test_a_claim_that_waits_ends_when_the_server_does(ask: Asking) -> None:
    waiting = asyncio.create_task(ask.post(CLAIMS, wish(wait_ms=20_000)))
    await until(lambda: bool(ask.app.on_closing))
    ask.app.begin_closing()
    async with asyncio.timeout(5):
        assert (await waiting).json() == {"claimed": []}


async def test_a_claim_whose_caller_is_gone_is_handed_back(ask: Asking) -> None:
    """The caller hangs up while the claim is on its way: nobody waits for a lease that nobody knows of."""
    execution_id = await ask.created()
    body = b'{"worker_instance_id": "w-1", "lanes": ["L"], "wait_ms": 20000}'
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": body}, {"type": "http.disconnect"}]
    real = ask.engine.claim_from_lanes

    async def slow(*args: Any, **kwargs: Any) -> Any:
        answer = await real(*args, **kwargs)
        await until(lambda: not kwargs["go_on"]())
        return answer

    ask.engine.claim_from_lanes = slow  # type: ignore[method-assign]

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
    await ask.app(scope, receive, send)

    assert sent[-1]["body"] == b'{"claimed":[]}'
    await ask.engine.sweep_once("delayed_promoter")
    assert await ask.state(execution_id) == "waiting"


async def test_leases_are_renewed_in_batches_and_each_answer_stands_for_itself(ask: Asking, clock: ManualClock) -> None:
    works = [await claimed(ask) for _ in range(2)]
    await said(ask, "complete", works[1])
    clock.advance_ms(5000)
    handles = [works[0]["handle"], works[1]["handle"], "nonsense"]
    answer = await ask.post("/v1/leases/renew", {"handles": handles, "lease_ttl_ms": 30_000})

    renewed, ended, broken = answer.json()["results"]
    assert renewed["Renewed"]["expires_at"] == await ask.engine.ping() + 30_000
    assert (ended["kind"], ended["code"], ended["facts"]["terminal_outcome"]) == (
        "contention",
        "execution_not_active",
        "success",
    )
    assert broken["code"] == "corruption"
    counted = (await ask.get("/metrics")).text
    assert 'ff_lease_renewal_total{outcome="ok"} 1' in counted
    assert 'ff_lease_renewal_total{outcome="error"} 1' in counted, "what is no handle is no lease either"


async def test_progress_complete_and_the_result(ask: Asking) -> None:
    work = await claimed(ask)
    assert (await said(ask, "progress", work, pct=40, message="half")).json() == {
        "ProgressNoted": {"execution_id": work["execution_id"]}
    }
    assert (await ask.get(path(work["execution_id"], "progress"))).json() == {"pct": 40, "message": "half"}
    for _ in range(2):  # the answer got lost: saying it again is success
        done = await said(ask, "complete", work, result_b64=b64(b"\x00\xff"), encoding="raw")
        assert done.json() == {"Completed": {"execution_id": work["execution_id"], "public_state": "completed"}}
    assert (await ask.get(path(work["execution_id"], "result"))).content == b"\x00\xff"
    end = (await ask.get(path(work["execution_id"], "end"))).json()
    assert (end["outcome"], end["has_result"], end["encoding"]) == ("success", True, "raw")


async def test_a_failure_is_retried_by_policy(ask: Asking) -> None:
    retry = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 0}}}
    work = await claimed(ask, policy=retry)
    first = await said(ask, "fail", work, reason="boom")
    assert first.json()["RetryScheduled"]["next_attempt_index"] == 1
    stale = await said(ask, "complete", work)
    assert stale.status_code == 409
    assert await ask.state(work["execution_id"]) != "completed"


async def test_a_zombie_is_fenced_off(ask: Asking, clock: ManualClock) -> None:
    zombie = await claimed(ask)
    clock.advance_ms(60_000)
    [heir] = (await ask.post(CLAIMS, wish(worker_instance_id="w-2"))).json()["claimed"]
    assert (heir["attempt_type"], heir["lease_epoch"]) == ("reclaim", 2)

    for verb, given in (
        ("complete", {}),
        ("fail", {"reason": "x"}),
        ("progress", {"pct": 1}),
        ("delay", {"delay_ms": 5}),
    ):
        refused = await said(ask, verb, zombie, **given)
        assert (refused.status_code, refused.json()["error"]) == (409, "state_conflict: StaleLease"), verb
    frames = await said(ask, "frames", zombie, frames=[{"payload_b64": b64(b"late")}])
    assert frames.json()["results"][0]["code"] == "stale_owner_cannot_append"
    assert (await said(ask, "complete", heir)).status_code == 200


async def test_work_is_put_away_and_comes_back(ask: Asking, clock: ManualClock) -> None:
    work = await claimed(ask)
    assert (await said(ask, "delay", work)).status_code == 400
    delayed = await said(ask, "delay", work, delay_ms=1000, reason="not before noon")
    assert delayed.json()["Delayed"]["public_state"] == "delayed"
    assert "not before noon" in (await ask.engine.explain(work["execution_id"])).sentence
    clock.advance_ms(1000)
    await ask.engine.sweep_once("delayed_promoter")
    [again] = (await ask.post(CLAIMS, wish())).json()["claimed"]

    assert (again["attempt_index"], again["lease_epoch"]) == (0, 2)


async def test_suspend_signal_and_the_resumed_claim(ask: Asking) -> None:
    work = await claimed(ask)
    suspended = await said(
        ask,
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
    vector = (await ask.get(path(execution_id))).json()["state_vector"]
    assert vector["blocking_reason"] == "waiting_for_approval"
    signal = ask.signal(execution_id, point["waitpoint_id"], point["waitpoint_token"], payload=[1, 2])
    assert (await ask.post(path(execution_id, "signal"), signal)).status_code == 200
    [resumed] = (await ask.post(CLAIMS, wish())).json()["claimed"]

    assert (resumed["execution_id"], resumed["attempt_index"], resumed["lease_epoch"]) == (execution_id, 0, 2)
    [seen] = (await said(ask, "signals", resumed)).json()["signals"]
    assert (seen["signal_name"], base64.b64decode(seen["payload_b64"])) == ("go", b"\x01\x02")


async def test_a_waitpoint_made_before_the_wait_keeps_what_came_early(ask: Asking) -> None:
    work = await claimed(ask)
    made = (await said(ask, "waitpoints", work, waitpoint_key="k", expires_in_ms=60_000)).json()
    execution_id = work["execution_id"]
    early = ask.signal(execution_id, made["waitpoint_id"], made["token"])
    told = await ask.post(path(execution_id, "signal"), early)
    assert told.json()["Accepted"]["effect"] == "buffered_for_pending_waitpoint"
    answer = await said(
        ask,
        "suspend",
        work,
        waitpoints=[{"UsePending": {"waitpoint_id": made["waitpoint_id"]}}],
        resume_condition={"Single": {"waitpoint_key": "k", "matcher": "Wildcard"}},
    )

    assert "handle" not in answer.json()["AlreadySatisfied"]
    assert (await said(ask, "complete", work)).status_code == 200


@pytest.mark.parametrize("wrong", [{}, {"UsePending": {}}, {"Other": {}}, {"Fresh": {"waitpoint_id": "x"}}])
async def test_a_suspend_with_a_wrong_binding_changes_nothing(ask: Asking, wrong: Any) -> None:
    work = await claimed(ask)
    answer = await said(ask, "suspend", work, waitpoints=[wrong], resume_condition="OperatorOnly")

    assert answer.status_code == 400
    assert await ask.state(work["execution_id"]) == "active"


async def test_frames_are_appended_in_order(ask: Asking) -> None:
    work = await claimed(ask)
    frames = [{"payload_b64": b64(f"f{number}".encode()), "frame_type": "log"} for number in range(20)]
    answer = await said(ask, "frames", work, frames=frames)

    assert [one["Appended"]["frame_count"] for one in answer.json()["results"]] == list(range(1, 21))
    page = (await ask.get(path(work["execution_id"], "attempts", 0, "stream"))).json()
    assert [frame["fields"]["payload"] for frame in page["frames"]] == [f"f{number}" for number in range(20)]


async def test_usage_spend_and_reservations(ask: Asking) -> None:
    where = await ask.budgeted()
    budget_id = where.rpartition("/")[2]
    work = await claimed(ask)
    given = {"budget_id": budget_id, "dimensions": {"tokens": 10}}

    assert (await said(ask, "usage", work, **given, dedup_key="d")).json() == "Ok"
    assert (await said(ask, "usage", work, **given, dedup_key="d")).json() == "AlreadyApplied"
    assert (await said(ask, "spend", work, **given)).json() == "Ok"
    room = {"budget_id": budget_id, "amounts": {"tokens": 30}, "ttl_ms": 60_000}
    assert "Reserved" in (await said(ask, "reserve", work, **room)).json()
    status = (await ask.get(where)).json()
    assert (status["usage"]["tokens"], status["reserved"]["tokens"]) == (20, 30)
    kept = (await said(ask, "reserve", work, **room | {"amounts": {"tokens": 5}})).json()["Reserved"]
    spent = {"budget_id": budget_id, "reservation_id": kept["reservation_id"]}
    assert (await said(ask, "settle", work, **spent, amounts={"tokens": 4})).json() == "Ok"
    assert (await said(ask, "refund", work, **spent)).json()["Refunded"]["amounts"] == {}
    released = await ask.post(f"{where}/release", {"execution_id": work["execution_id"]})
    assert released.json()["Released"]["amounts"] == {"tokens": 14}


@pytest.mark.spec("EX-031")
@pytest.mark.parametrize("kind", ["claim", "resume", "reclaim"])
async def test_a_grant_stays_good_until_it_is_redeemed(ask: Asking, clock: ManualClock, kind: str) -> None:
    """A worker that is full redeems later: an unused grant is untouched, of whichever kind it is."""
    work = await claimed(ask)
    execution_id = work["execution_id"]
    if kind == "claim":
        await said(ask, "complete", work)
        execution_id = await ask.created()
    elif kind == "resume":
        await said(ask, "delay", work, delay_ms=0)
        await ask.engine.sweep_once("delayed_promoter")
    else:
        clock.advance_ms(60_000)
    grant = (
        await ask.post("/v1/workers/w/claim", {"lane_id": "L", "worker_instance_id": "w-9", "grant_ttl_ms": 5000})
    ).json()
    assert (grant["execution_id"], grant["grant_kind"]) == (execution_id, kind)
    clock.advance_ms(4000)
    redeem = {"grant_kind": kind, "grant_key": grant["grant_key"], "worker_id": "w", "worker_instance_id": "w-9"}
    stranger = await ask.post(path(execution_id, "redeem"), redeem | {"worker_id": "v"})
    assert stranger.status_code == 409 or "GrantNotFound" in stranger.json()

    answer = await ask.post(path(execution_id, "redeem"), redeem)

    taken = answer.json()["Claimed"]
    assert base64.b64decode(taken["input_payload_b64"]) == b"hi"
    assert (await said(ask, "complete", taken)).status_code == 200


async def test_workers_register_and_stay(ask: Asking) -> None:
    body = {"worker_instance_id": "w-1", "lanes": ["L"], "liveness_ttl_ms": 10_000, "capabilities": ["gpu"]}
    instance = {"worker_instance_id": "w-1"}

    assert "WorkerRegistered" in (await ask.post("/v1/workers/w/register", body)).json()
    assert "WorkerRefreshed" in (await ask.post("/v1/workers/w/heartbeat", instance)).json()
    [entry] = (await ask.get("/v1/workers?namespace=default")).json()["entries"]
    assert (entry["worker_id"], entry["lanes"], entry["capabilities"]) == ("w", ["L"], ["gpu"])
    assert "MarkedDead" in (await ask.post("/v1/workers/w/dead", instance)).json()
    assert "NotRegistered" in (await ask.post("/v1/workers/w/heartbeat", instance)).json()


async def test_a_durable_function_over_http(ask: Asking) -> None:
    work = await claimed(ask)
    execution_id = work["execution_id"]
    step = {"name": "charge", "occurrence": 0, "result_b64": b64(b"1"), "encoding": "json"}
    first = (await said(ask, "steps", work, **step)).json()
    again = (await said(ask, "steps", work, **step | {"result_b64": b64(b"2")})).json()
    assert base64.b64decode(again["result"]) == base64.b64decode(first["result"]) == b"1"
    assert len((await ask.get(path(execution_id, "steps"))).json()["steps"]) == 1

    point = str(uuid.uuid4())
    gate = {
        "name": "approval:ok/1",
        "kind": "signals",
        "condition": {"Composite": {"kind": "Count", "n": 1, "count_kind": "DistinctSignals", "waitpoints": ["k"]}},
        "waitpoints": [[point, "k"]],
    }
    opened = (await said(ask, "gates", work, **gate)).json()["OpenedGate"]
    parked = (await said(ask, "park", work, gates=[gate["name"]])).json()["Parked"]
    assert parked["handle"].startswith("Suspended.")
    vote = ask.signal(execution_id, point, opened["links"][0]["token"], payload=[116])
    assert (await ask.post(path(execution_id, "signal"), vote)).status_code == 200
    [resumed] = (await ask.post(CLAIMS, wish())).json()["claimed"]
    memo = (await said(ask, "gates", resumed, **gate)).json()["GateMemo"]
    assert memo["ended_as"] == "satisfied"
    assert gate["name"] in (await ask.get(path(execution_id, "waits"))).json()["memos"]
    votes = (await ask.get(path(execution_id, "gates", "approval:ok%2F1", "votes"))).json()["signals"]
    assert base64.b64decode(votes[0]["payload_b64"]) == b"t"


async def test_a_message_reaches_the_mailbox(ask: Asking) -> None:
    work = await claimed(ask)
    body = {"mailbox": "news", "payload": [49], "idempotency_key": "once"}
    where = path(work["execution_id"], "messages")

    assert "Accepted" in (await ask.post(where, body)).json()
    assert "Duplicate" in (await ask.post(where, body)).json()
    memo = (await said(ask, "gates", work, name="receive:news", kind="mailbox", mailbox="news")).json()["GateMemo"]
    assert base64.b64decode(memo["payload"]) == b"1"


@pytest.mark.parametrize("text", ["", "Fresh", "Fresh.", "Fresh.!!!", "Odd.AAAA", "Fresh.AAAA"])
async def test_a_broken_handle_is_a_bad_request(ask: Asking, text: str) -> None:
    answer = await ask.post("/v1/leases/complete", {"handle": text})

    assert answer.status_code == 400
    assert answer.json()["error"].startswith("validation_error")
