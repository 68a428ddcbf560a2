"""Hostile signals: whatever is sent is refused with an error message, and nothing is stored."""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest

from flowfabric.engine.operations.suspensions import SuspendDetails
from tests.scenarios.checked_store import dump
from tests.server.api_client import ApiClient, new_execution_id, path
from tests.server.routes.test_signals import suspend_new

MEGABYTES = 10 * 1024 * 1024


@pytest.fixture
async def waiting(api: ApiClient) -> tuple[str, SuspendDetails]:
    """A suspended execution."""
    return await suspend_new(api)


async def load_rows(api: ApiClient) -> dict[str, list[Any]]:
    """Return all rows, without the timestamps of failed token checks, which are stored on purpose."""
    found = await dump(api.engine.store)
    stamps = ("last_hmac_validation_failed_at", "last_mutation_at", "revision")
    rows = [{name: getattr(row, name) for name in row.__struct_fields__} for row in found.pop("ff_exec_core")]
    return found | {"ff_exec_core": [{n: v for n, v in row.items() if n not in stamps} for row in rows]}


def corrupt(body: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return the body of a signal with one invalid field."""
    good = body["waitpoint_token"]
    kid, _, digest = good.partition(":")
    values: list[Any] = [
        None,
        5,
        -1,
        2**70,
        1.5,
        True,
        [],
        {},
        "",
        "\x00",
        "x" * 70_000,
        {"a": [1]},
        [""],
        "🙂" * 20_000,
    ]
    tokens = [
        good[: rng.randrange(len(good))],
        good + rng.choice("0 \n:"),
        good.upper(),
        f"{kid}:{digest[::-1]}",
        f"{kid}::{digest[1:]}",
        f"{kid}%3A{digest}",
        f"k2:{digest}",
        good.encode().hex(),
        f"{kid}:{'０' * 64}",
        "k1:" + "a" * 100_000,
        ":" * 70,
    ]
    name = rng.choice([*sorted(body), "waitpoint_token", "payload", "dedup_ttl_ms", "resume_delay_ms", "signal_maxlen"])
    if name == "waitpoint_token":
        return body | {name: rng.choice([*tokens, *values[:-3]])}
    if name == "payload":
        return body | {name: rng.choice([[256], [-1], ["a"], [None], "text", {"0": 1}, [0] * 65_537, [[[]]], 5])}
    if name in ("waitpoint_id", "execution_id", "signal_id"):
        return body | {
            name: rng.choice([*values, str(uuid.uuid4())[:-1], "{fp:7}:nonsense", new_execution_id(), "../../x"])
        }
    return body | {name: rng.choice([value for value in values if value not in ("", None, True)])}


async def test_invalid_signals_are_refused_and_store_nothing(
    api: ApiClient, waiting: tuple[str, SuspendDetails]
) -> None:
    execution_id, details = waiting
    token = details.waitpoint_token.reveal()
    rng, before = random.Random(11), await load_rows(api)
    harmless = 0
    for _ in range(300):
        body = corrupt(api.signal_body(execution_id, details.waitpoint_id, token, signal_name="stop"), rng)
        answer = await api.post(path(execution_id, "signal"), body)
        if answer.status_code == 200:  # the random value was valid for its field
            harmless += 1
            before = await load_rows(api)
            continue
        assert answer.status_code in (400, 404, 413, 422), (answer.status_code, answer.text, body)
        reply = answer.json()
        assert isinstance(reply["error"], str)
        assert "Traceback" not in answer.text
        assert token not in answer.text
        assert await load_rows(api) == before
    assert harmless < 100
    assert await api.state(execution_id) == "suspended"
    good = await api.post(path(execution_id, "signal"), api.signal_body(execution_id, details.waitpoint_id, token))
    assert good.json()["Accepted"]["effect"] == "resume_condition_satisfied"


RAW: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "deep lists": (b"[" * 100_000, (400,)),
    "deep objects": (b'{"a":' * 50_000, (400,)),
    "a deep field": (b'{"signal_name":' + b"[" * 100_000 + b"]" * 100_000 + b"}", (400,)),
    "no UTF-8": (b'{"signal_name":"\xff\xfe"}', (400,)),
    "half a surrogate": (b'{"signal_name":"\\ud800"}', (400,)),
    "not JSON": (b"signal_name=go", (400,)),
    "nothing": (b"", (400,)),
    "a list": (b"[]", (400, 422)),
    "a text": (b'"go"', (400, 422)),
    "ten megabytes": (b'{"signal_name":"' + b"x" * MEGABYTES + b'"}', (413,)),
    "ten megabytes of zeros": (b"\x00" * MEGABYTES, (413,)),
    "a number without end": (b'{"created_at":' + b"9" * 100_000 + b"}", (400, 422)),
}


@pytest.mark.parametrize("name", RAW)
async def test_bodies_that_are_not_signals_are_refused_and_store_nothing(
    api: ApiClient, waiting: tuple[str, SuspendDetails], name: str
) -> None:
    execution_id, _ = waiting
    content, statuses = RAW[name]
    before = await dump(api.engine.store)

    for route in ("signal", "messages"):
        answer = await api.post(
            path(execution_id, route), content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code in statuses, (route, answer.status_code, answer.text)
        assert isinstance(answer.json()["error"], str)
    assert await dump(api.engine.store) == before
