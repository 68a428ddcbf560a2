"""Hostile input: forged, truncated, stale, foreign and re-encoded tokens, oversized and malformed values.

Each is refused with a typed error; only the timestamp of the failed check is written.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.handles import Handle
from flowfabric.model.condition import AllConditions, ByName, Count, CountKind, Single
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.security.waitpoint_token import WaitpointToken
from flowfabric.rules.suspension.arguments import FreshWaitpoint, ResumePolicy, SuspendArgs
from flowfabric.rules.suspension.conditions import parse_condition
from flowfabric.rules.suspension.signals import SignalArgs
from tests.scenarios.env import Env
from tests.scenarios.waits import ANY, SATISFIED, Waits

MEGABYTES = 10 * 1024 * 1024


def forge(good: str, rng: random.Random) -> str:
    """Return an altered token."""
    kid, _, digest = good.partition(":")
    index = rng.randrange(len(digest))
    forgeries = [
        lambda: good[: rng.randrange(len(good))],
        lambda: good + rng.choice("0 \n\t\x00:"),
        lambda: rng.choice(" \n\t\ufeff") + good,
        lambda: f"{kid}:{digest.upper()}" if digest.upper() != digest else "",
        lambda: f"{kid.upper()}:{digest}",
        lambda: (
            f"{kid}:{digest[:index]}{rng.choice('0123456789abcdef'.replace(digest[index], ''))}{digest[index + 1 :]}"
        ),
        lambda: f"{kid}::{digest[1:]}",
        lambda: f"{kid}%3A{digest}",
        lambda: f"{kid}:{digest[::-1]}" if digest[::-1] != digest else "",
        lambda: good.translate({ord("0"): "０", ord("1"): "１", ord("a"): "а"}) if set("01a") & set(digest) else "",
        lambda: f"{kid}:{'f' * 64}",
        lambda: "".join(chr(rng.randrange(0x20, 0x3000)) for _ in range(rng.randrange(80))),
        lambda: "\ud800" * rng.randrange(1, 70),
        lambda: f"{kid}:" + "\udfff" * 64,
        lambda: ":" * rng.randrange(1, 70),
    ]
    return rng.choice(forgeries)()


async def test_forged_tokens_change_only_the_failure_timestamp(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended()
    other, q = await waits.create_suspended()
    e, good, rng = claim.execution_id, p.waitpoint_token.reveal(), random.Random(4)
    tokens = [forge(good, rng) for _ in range(60)]
    tokens += [q.waitpoint_token.reveal(), "k1:" + "a" * MEGABYTES, "x" * MEGABYTES]
    before = await env.dump()

    for token in tokens:
        with pytest.raises(errors.InvalidToken) as refusal:
            await env.engine.deliver_signal(waits.signal_args(e, "go", p.waitpoint_id, token))
        assert refusal.value.detail in ("missing_token", "invalid_token")
        assert token == "" or token not in str(refusal.value)

    after = await env.dump()
    assert {name for name in before if before[name] != after[name]} == {"ff_exec_core"}
    stamped = {row.execution_id: row for row in after["ff_exec_core"]}[e]
    assert stamped.last_hmac_validation_failed_at == env.now
    assert await waits.effect(e, "go", p) == SATISFIED
    assert await waits.effect(other.execution_id, "go", q) == SATISFIED


async def test_a_token_is_valid_for_its_own_waitpoint_and_execution_only(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended()
    other, q = await waits.create_suspended()

    for e, waitpoint, token in (
        (claim.execution_id, q.waitpoint_id, q.waitpoint_token),
        (claim.execution_id, q.waitpoint_id, p.waitpoint_token),
        (claim.execution_id, p.waitpoint_id, q.waitpoint_token),
        (other.execution_id, p.waitpoint_id, p.waitpoint_token),
    ):
        with pytest.raises(errors.InvalidToken, match="invalid_token"):
            await env.engine.deliver_signal(waits.signal_args(e, "go", waitpoint, token))


async def test_a_used_token_is_refused_by_a_later_suspension(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended()
    await waits.send(claim.execution_id, "go", p)
    await waits.suspend(await env.grant_and_resume(claim.execution_id))

    async with env.refused(errors.WaitpointClosed):
        await waits.send(claim.execution_id, "go", p)


BAD_SIGNALS: list[dict[str, Any]] = [
    {"payload": b"x" * MEGABYTES},
    {"payload": "text"},
    {"payload": 5},
    {"signal_name": "a\x00b"},
    {"signal_name": "\ud800"},
    {"signal_name": None},
    {"signal_name": "x" * MEGABYTES},
    {"source_identity": b"bytes"},
    {"source_type": "\x00"},
    {"idempotency_key": "\udfff"},
    {"idempotency_key": "k" * MEGABYTES},
    {"correlation_id": 7},
    {"execution_id": "{fp:86}:nonsense"},
    {"execution_id": None},
    {"waitpoint_id": "nonsense"},
    {"waitpoint_id": 12},
    {"signal_id": "nonsense"},
    {"waitpoint_token": 5},
    {"dedup_ttl_ms": -1},
    {"dedup_ttl_ms": 2**70},
    {"dedup_ttl_ms": 1.5},
    {"resume_delay_ms": -5},
    {"resume_delay_ms": True},
    {"max_signals_per_execution": -1},
    {"signal_maxlen": 0},
    {"created_at": 10**30},
    {"target_scope": {}},
]


async def test_malformed_signals_are_refused_and_write_nothing(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended()
    async with env.unchanged():
        for bad in BAD_SIGNALS:
            args = waits.signal_args(claim.execution_id, "go", p.waitpoint_id, p.waitpoint_token)
            with pytest.raises(errors.ValidationError):
                await env.engine.deliver_signal(msgspec.structs.replace(args, **bad))
        nothings: list[Any] = [None, {}, "signal", b""]
        for nonsense in nothings:
            with pytest.raises(errors.InvalidInput):
                await env.engine.deliver_signal(nonsense)


def nested_document(levels: int) -> Any:
    plain: Any = {"Single": {"waitpoint_key": "k", "matcher": "Wildcard"}}
    for _ in range(levels):
        plain = {"Composite": {"kind": "AllOf", "members": [plain]}}
    return plain


def nested_condition(levels: int) -> Any:
    condition: Any = ANY
    for _ in range(levels):
        condition = AllConditions((condition,))
    return condition


BAD_SUSPENDS: list[dict[str, Any]] = [
    {"resume_condition": nested_document(5)},
    {"resume_condition": nested_document(5000)},
    {"resume_condition": nested_condition(50_000)},
    {"resume_condition": {"Composite": {"kind": "AnyOf", "members": []}}},
    {"resume_condition": {"Single": {"waitpoint_key": 5, "matcher": "Wildcard"}}},
    {"resume_condition": Single("k", ByName("x\x00"))},
    {"resume_condition": Single("k", ByName("\ud800"))},
    {"resume_condition": Single("k", "go")},  # type: ignore[arg-type]
    {"resume_condition": Count("2", CountKind.DISTINCT_SIGNALS, ("k",))},  # type: ignore[arg-type]
    {"resume_condition": Count(True, CountKind.DISTINCT_SIGNALS, ("k",))},
    {"resume_condition": Count(1, "DistinctMoons", ("k",))},  # type: ignore[arg-type]
    {"resume_condition": AllConditions(tuple(Single("k", ByName(f"n{n}")) for n in range(20_000)))},
    {"resume_condition": None},
    {"waitpoints": None},
    {"waitpoints": ("k",)},
    {"waitpoints": (FreshWaitpoint("nonsense", "k"),)},
    {"waitpoints": (FreshWaitpoint("11111111-1111-4111-8111-111111111111", "k\x00"),)},
    {"suspension_id": "nonsense"},
    {"reason_code": None},
    {"timeout_at": "soon"},
    {"timeout_at": 10**30},
    {"timeout_behavior": "explode"},
    {"requested_by": "nobody"},
    {"resume_policy": {"resume_delay_ms": 5}},
    {"resume_policy": ResumePolicy(resume_delay_ms=-1)},
    {"resume_policy": ResumePolicy(resume_target="moon")},
    {"resume_policy": ResumePolicy(consume_matched_signals="yes")},  # type: ignore[arg-type]
    {"resume_policy": ResumePolicy(close_waitpoint_on_resume=1)},  # type: ignore[arg-type]
    {"resume_policy": ResumePolicy(retain_signal_buffer_until_closed=None)},  # type: ignore[arg-type]
    {"resume_policy": ResumePolicy(resume_delay_ms=1.5)},  # type: ignore[arg-type]
    {"continuation_metadata_pointer": 5},
    {"idempotency_key": b"k"},
    {"now": "now"},
]


async def test_malformed_suspends_are_refused_and_write_nothing(env: Env, waits: Waits) -> None:
    claim = await env.create_and_claim()
    async with env.unchanged():
        for bad in BAD_SUSPENDS:
            with pytest.raises(errors.ValidationError):
                await env.engine.suspend(claim.handle, msgspec.structs.replace(waits.args(), **bad))
        for handle in (None, "handle", Handle(claim.handle.backend, claim.handle.kind, b"\x02\x01")):
            with pytest.raises(errors.ValidationError):
                await env.engine.suspend(handle, waits.args())  # type: ignore[arg-type]
    await waits.suspend(claim)


async def test_malformed_frames_and_messages_are_refused_and_write_nothing(env: Env) -> None:
    claim = await env.create_and_claim()
    frames: list[dict[str, Any]] = [
        {"payload": "text"},
        {"payload": b"x" * MEGABYTES},
        {"payload": b"", "kind": "smoke"},
        {"payload": b"", "frame_type": "a\x00"},
        {"payload": b"", "frame_type": "\ud800"},
        {"payload": b"", "frame_type": "x" * 5000},
        {"payload": b"", "mode": "maybe"},
        {"payload": b"", "best_effort": 5},
        {"payload": b"", "correlation_id": 5},
    ]
    messages: list[dict[str, Any]] = [
        {"payload": b"x" * MEGABYTES},
        {"payload": "text"},
        {"mailbox": ""},
        {"mailbox": "x" * 5000},
        {"mailbox": "\x00"},
        {"message_id": "nonsense"},
        {"sender": None},
        {"dedup_ttl_ms": -1},
    ]
    good = MessageArgs(execution_id=claim.execution_id, mailbox="m", message_id=env.engine.minter.uuid())
    async with env.unchanged():
        for bad in frames:
            with pytest.raises(errors.ValidationError):
                await env.engine.append_frame(claim.handle, **bad)
        for bad in messages:
            with pytest.raises(errors.ValidationError):
                await env.engine.send_message(msgspec.structs.replace(good, **bad))


def test_random_documents_parse_as_conditions_or_are_refused() -> None:
    rng = random.Random(5)
    leaves: list[Any] = ["OperatorOnly", "TimeoutOnly", "Wildcard", None, 5, -1, 1.5, True, "", "k", [], {}, "AllOf"]
    keys = [
        "Single",
        "Composite",
        "kind",
        "members",
        "waitpoint_key",
        "matcher",
        "ByName",
        "n",
        "waitpoints",
        "count_kind",
    ]

    def document(depth: int) -> Any:
        if depth == 0 or rng.random() < 0.3:
            return rng.choice(leaves)
        if rng.random() < 0.3:
            return [document(depth - 1) for _ in range(rng.randrange(3))]
        return {rng.choice(keys): document(depth - 1) for _ in range(rng.randrange(1, 5))}

    for _ in range(5000):
        try:
            parse_condition(document(5))
        except errors.InvalidInput:
            continue


def test_signal_args_wrap_a_plain_token() -> None:
    args = SignalArgs(
        execution_id="e", waitpoint_id="w", signal_id="s", signal_name="n", waitpoint_token="k1:" + "a" * 64
    )

    assert "a" * 64 not in repr(args)
    assert isinstance(args.waitpoint_token, WaitpointToken)
    assert isinstance(args, SignalArgs)
    assert "a" * 64 not in repr(msgspec.structs.replace(args, waitpoint_token="k1:" + "a" * 64))


def test_suspend_args_require_their_fields() -> None:
    with pytest.raises(TypeError):
        SuspendArgs()  # type: ignore[call-arg]
