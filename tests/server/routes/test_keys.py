"""Keys over HTTP: a submit comes to the run that has the key, or creates one, as its mode says."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from tests.server.api_client import ApiClient, path, why_refused

URL = "/v1/keys/task/cart-7"
OF_LANE = {"namespace": "ns", "lane_id": "L"}
SINGLE = {"until": "ended"}
LATEST = {"mode": "latest", "until": "ended"}
DEBOUNCE = {"mode": "debounce", "until": "started", "wait_ms": 5000}
BATCH = {"mode": "batch", "until": "started", "wait_ms": 5000, "most": 3}


def encoded(text: bytes) -> str:
    return base64.b64encode(text).decode()


def message(api: ApiClient, mailbox: str, payload: bytes = b"1") -> dict[str, Any]:
    return {"mailbox": mailbox, "message_id": str(api.engine.minter.uuid()), "payload_b64": encoded(payload)}


async def submit(api: ApiClient, mode: dict[str, Any], *, sent: dict[str, Any] | None = None, **fields: Any) -> Any:
    run = {"namespace": "ns", "lane_id": "L", "execution_kind": "task", "input_payload_b64": ""} | fields
    return await api.post(URL, {"execution": run, "message": sent} | mode)


@pytest.mark.parametrize("policy", [{}, SINGLE, DEBOUNCE], ids=["kept", "single", "debounce"])
async def test_a_submit_returns_the_run_that_has_the_key(api: ApiClient, policy: dict[str, Any]) -> None:
    missing = await api.get(URL, params=OF_LANE)
    assert (missing.status_code, missing.json()["error"]) == (404, "not found: key")

    first, again = await submit(api, policy), await submit(api, policy)

    assert (first.status_code, again.status_code) == (201, 200)
    run = first.json()["execution_id"]
    assert (again.json()["execution_id"], again.json()["is_new"]) == (run, False)
    assert (await api.get(URL, params=OF_LANE)).json() == {"execution_id": run}


async def test_the_latest_submit_cancels_the_run_that_has_the_key(api: ApiClient) -> None:
    first, second = await submit(api, LATEST), await submit(api, LATEST)

    assert second.json()["superseded"] == first.json()["execution_id"]
    assert await api.state(first.json()["execution_id"]) == "cancelled"
    assert (await api.get(URL, params=OF_LANE)).json()["execution_id"] == second.json()["execution_id"]


async def test_submits_of_a_batch_are_its_inputs(api: ApiClient) -> None:
    made = [(await submit(api, BATCH, sent=message(api, "ff.batch"))).json() for _ in range(4)]

    assert [one["item"] for one in made] == [0, 1, 2, 0]
    assert len({one["execution_id"] for one in made}) == 2


async def test_a_taken_key_is_refused_with_the_run_that_has_it(api: ApiClient) -> None:
    refusing = {"mode": "refuse", "until": "ended"}
    run = (await submit(api, refusing)).json()["execution_id"]

    taken = await submit(api, refusing)

    assert (taken.status_code, taken.json()["kind"]) == (409, "key_taken")
    assert run in taken.headers["x-ff-error"]


async def test_the_first_message_creates_the_run_and_the_next_ones_reach_it(api: ApiClient) -> None:
    policy = {"inbox": {"add": {"type": "integer"}}}
    first = await submit(api, SINGLE, sent=message(api, "add"), policy=policy)
    again = await submit(api, SINGLE, sent=message(api, "add"), policy=policy)

    run = first.json()["execution_id"]
    assert again.json()["execution_id"] == run
    assert (await api.get(path(run))).json()["execution_id"] == run
    described = await api.engine.describe_execution(run)
    assert described is not None
    assert described.unread == {"add": 2}


@pytest.mark.parametrize(
    ("policy", "fields", "why"),
    [
        (DEBOUNCE | {"until": "ended"}, {}, "does not go with the mode debounce"),
        (DEBOUNCE | {"wait_ms": 0}, {}, "wait_ms"),
        (DEBOUNCE, {"delay_until": 2**47}, "leave the delay out"),
        (BATCH, {}, "a batch has none"),
        ({"ttl_ms": 0}, {}, "ttl_ms"),
        ({"mode": "often"}, {}, "mode: invalid enum value 'often'"),
        ({}, {"execution_kind": "other"}, "task"),
        (SINGLE | {"message": {"mailbox": "add"}}, {}, "message: object missing required field `message_id`"),
    ],
)
async def test_a_policy_that_cannot_be_is_refused_and_creates_nothing(
    api: ApiClient, policy: dict[str, Any], fields: dict[str, Any], why: str
) -> None:
    refused = await submit(api, policy, **fields)

    assert refused.status_code in (400, 422), refused.text
    assert why in why_refused(refused)
    assert (await api.get(URL, params=OF_LANE)).status_code == 404
    assert (await api.engine.search_executions()).executions == []


async def test_a_first_message_that_the_run_does_not_take_creates_nothing(api: ApiClient) -> None:
    refused = await submit(api, SINGLE, sent=message(api, "ad"), policy={"inbox": {"add": {"type": "integer"}}})

    assert (refused.status_code, "its inbox has add" in refused.text) == (400, True)
    assert (await api.engine.search_executions()).executions == []
