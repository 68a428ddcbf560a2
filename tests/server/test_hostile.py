"""Hostile requests about waits: whatever is sent is refused in plain words, and nothing is kept of it."""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest

from flowfabric.engine.operations.suspensions import SuspendDetails, Suspended
from flowfabric.engine.types import ByName, FreshWaitpoint, Single, SuspendArgs
from tests.scenarios.checked_store import dump
from tests.server.asking import Asking, fresh, path

MEGABYTES = 10 * 1024 * 1024


@pytest.fixture
async def waiting(ask: Asking) -> tuple[str, SuspendDetails]:
    """An execution that waits for a word."""
    held = await ask.claimed()
    answer = await ask.engine.suspend(
        held.handle,
        SuspendArgs(
            suspension_id=str(uuid.uuid4()),
            waitpoints=(FreshWaitpoint(str(uuid.uuid4()), "k"),),
            resume_condition=Single("k", ByName("go")),
            reason_code="waiting_for_signal",
            now=await ask.engine.ping(),
        ),
    )
    assert isinstance(answer, Suspended)
    return held.execution_id, answer.details


async def kept(ask: Asking) -> dict[str, list[Any]]:
    """Everything in the store but the stamps of failed checks, which are meant to be there."""
    found = await dump(ask.engine.store)
    stamps = ("last_hmac_validation_failed_at", "last_mutation_at", "revision")
    rows = [{name: getattr(row, name) for name in row.__struct_fields__} for row in found.pop("ff_exec_core")]
    return found | {"ff_exec_core": [{n: v for n, v in row.items() if n not in stamps} for row in rows]}


def bent(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """The body of a good signal, with one of its fields as it should not be."""
    good = body["waitpoint_token"]
    kid, _, digest = good.partition(":")
    words: list[Any] = [
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
        good[: chance.randrange(len(good))],
        good + chance.choice("0 \n:"),
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
    name = chance.choice(
        [*sorted(body), "waitpoint_token", "payload", "dedup_ttl_ms", "resume_delay_ms", "signal_maxlen"]
    )
    if name == "waitpoint_token":
        return body | {name: chance.choice([*tokens, *words[:-3]])}
    if name == "payload":
        return body | {name: chance.choice([[256], [-1], ["a"], [None], "text", {"0": 1}, [0] * 65_537, [[[]]], 5])}
    if name in ("waitpoint_id", "execution_id", "signal_id"):
        return body | {name: chance.choice([*words, str(uuid.uuid4())[:-1], "{fp:7}:nonsense", fresh(), "../../x"])}
    return body | {name: chance.choice([word for word in words if word not in ("", None, True)])}


async def test_bent_signals_are_refused_in_plain_words_and_nothing_is_kept_of_them(
    ask: Asking, waiting: tuple[str, SuspendDetails]
) -> None:
    execution_id, details = waiting
    token = details.waitpoint_token.reveal()
    chance, before = random.Random(11), await kept(ask)
    harmless = 0
    for _ in range(300):
        body = bent(ask.signal(execution_id, details.waitpoint_id, token, signal_name="stop"), chance)
        answer = await ask.post(path(execution_id, "signal"), body)
        if answer.status_code == 200:  # any text is a name, any number of the right kind is a number
            harmless += 1
            before = await kept(ask)
            continue
        assert answer.status_code in (400, 404, 413, 422), (answer.status_code, answer.text, body)
        told = answer.json()
        assert isinstance(told["error"], str)
        assert "Traceback" not in answer.text
        assert token not in answer.text
        assert await kept(ask) == before
    assert harmless < 100
    assert await ask.state(execution_id) == "suspended"
    good = await ask.post(path(execution_id, "signal"), ask.signal(execution_id, details.waitpoint_id, token))
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
async def test_bodies_that_are_no_signals_are_refused(
    ask: Asking, waiting: tuple[str, SuspendDetails], name: str
) -> None:
    execution_id, _ = waiting
    content, statuses = RAW[name]
    before = await dump(ask.engine.store)

    for place in ("signal", "messages"):
        answer = await ask.post(
            path(execution_id, place), content=content, headers={"content-type": "application/json"}
        )
        assert answer.status_code in statuses, (place, answer.status_code, answer.text)
        assert isinstance(answer.json()["error"], str)
    assert await dump(ask.engine.store) == before
