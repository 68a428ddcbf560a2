"""Facts, asks and replies over HTTP."""

from __future__ import annotations

import base64
import uuid
from typing import Any

from flowfabric.rules.durable.facts import FactArgs
from tests.server.api_client import ApiClient, path


def encoded(text: bytes) -> str:
    return base64.b64encode(text).decode()


async def ask(api: ApiClient, execution_id: str, **fields: Any) -> Any:
    body = {"mailbox": "add", "payload_b64": encoded(b"1"), "payload_encoding": "json"} | fields
    return await api.post(path(execution_id, "asks"), body)


async def test_an_ask_is_sent_once_and_answered_once(api: ApiClient) -> None:
    held = await api.create_claimed()
    asked = await ask(api, held.execution_id, idempotency_key="click-7")
    again = await ask(api, held.execution_id, idempotency_key="click-7", wait_ms=10)

    assert (asked.status_code, asked.json()["state"]) == (200, "open")
    assert again.json()["message_id"] == asked.json()["message_id"]
    found = await api.get(path(held.execution_id, f"asks/{asked.json()['message_id']}"))
    assert found.json() == asked.json()


async def test_an_ask_of_an_ended_run_is_not_answered(api: ApiClient) -> None:
    held = await api.create_claimed()
    asked = (await ask(api, held.execution_id)).json()
    await api.engine.complete(held.handle)

    found = (await api.get(path(held.execution_id, f"asks/{asked['message_id']}?wait_ms=1000"))).json()
    assert (found["state"], found["reason"]) == ("not_answered", "ended as success")
    late = await ask(api, held.execution_id)
    assert (late.status_code, late.json()["error"]) == (409, "state_conflict: TargetNotSignalable")


async def test_a_reply_to_an_unknown_message_is_not_found(api: ApiClient) -> None:
    held = await api.create_claimed()
    missing = await api.get(path(held.execution_id, f"asks/{uuid.uuid4()}"))
    assert (missing.status_code, missing.json()["error"]) == (404, "not found: reply")


async def test_facts_are_listed_and_waited_for(api: ApiClient) -> None:
    held = await api.create_claimed()
    assert (await api.get(path(held.execution_id, "facts"))).json() == {"facts": []}
    nothing = (await api.get(path(held.execution_id, "facts/total?wait_ms=10"))).json()
    assert nothing == {"fact": None, "has_ended": False}

    await api.engine.set_fact(held.handle, FactArgs(name="total", value=b"7", encoding="json", place="total", count=1))

    [fact] = (await api.get(path(held.execution_id, "facts"))).json()["facts"]
    assert (fact["name"], fact["number"], fact["value"]) == ("total", 1, encoded(b"7"))
    assert (await api.get(path(held.execution_id, "facts/total"))).json()["fact"] == fact
    assert (await api.get(path(held.execution_id, "facts/total?after=1"))).json()["fact"] is None


async def test_a_message_that_the_run_does_not_take_is_refused(api: ApiClient) -> None:
    held = await api.create_claimed(policy={"inbox": {"add": {"type": "integer"}}})
    for mailbox, payload in (("ad", b"1"), ("add", b'"one"')):
        body = {"mailbox": mailbox, "payload_b64": encoded(payload)}
        for route in ("messages", "asks"):
            refused = await api.post(path(held.execution_id, route), body)
            assert refused.status_code == 400
            assert mailbox in refused.json()["error"]
