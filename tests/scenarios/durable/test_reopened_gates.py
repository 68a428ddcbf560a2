"""Gates after a replay, and the validation of votes."""

from __future__ import annotations

import msgspec
import pytest

from flowfabric import errors
from flowfabric.engine.operations.durable import OpenedGate
from flowfabric.model.gate import GateKind, GateMemo
from flowfabric.model.states import PublicState
from flowfabric.rules.durable.gates import GateArgs
from flowfabric.rules.durable.vote_schema import schema_tag
from flowfabric.rules.security.waitpoint_token import mint_token
from tests.scenarios.durable_function import DurableFunction, all_of, closed, opened
from tests.scenarios.env import Env
from tests.scenarios.waits import APPENDED, SATISFIED, Waits

YES_OR_NO = '{"type":"boolean"}'


async def approve_and_replay(function: DurableFunction, env: Env, *pairs: tuple[str, str]) -> None:
    """Open an approval, vote, complete the function and replay it."""
    gate = opened(await open_approval(function, *pairs))
    for _, key in pairs:
        await function.vote(gate, key, payload=b"true", idempotency_key="once")
    await function.engine.complete(function.claim.handle)
    await function.engine.replay_execution(function.e)
    function.claim = await env.grant_and_claim(function.e)


async def open_approval(function: DurableFunction, *pairs: tuple[str, str]) -> OpenedGate | GateMemo:
    keys = tuple(key for _, key in pairs)
    args = GateArgs(name="approve", kind=GateKind.SIGNALS, condition=all_of(*keys), waitpoints=pairs)
    return await function.engine.open_gate(function.claim.handle, args)


async def test_a_replayed_function_reopens_its_gate_on_the_same_waitpoints(
    function: DurableFunction, env: Env, waits: Waits
) -> None:
    pairs = ((waits.new_id(), "ana"), (waits.new_id(), "bo"))
    await approve_and_replay(function, env, *pairs)

    gate = opened(await open_approval(function, *pairs))

    assert [link.waitpoint_id for link in gate.links] == [one for one, _ in pairs]
    for one, _ in pairs:
        record = await waits.record(function.e, one)
        assert (record.state, record.signal_count, record.closed_at) == ("active", 0, None)
    assert await function.vote(gate, "ana", payload=b"1", idempotency_key="once") == APPENDED
    assert await function.vote(gate, "bo", payload=b"2", idempotency_key="once") == SATISFIED
    votes = await function.engine.read_votes(closed(await open_approval(function, *pairs)))
    assert [vote.payload for vote in votes] == [b"1", b"2"]


async def test_approval_links_from_before_a_replay_are_refused(
    function: DurableFunction, env: Env, waits: Waits
) -> None:
    old = (waits.new_id(), "ana")
    await approve_and_replay(function, env, old)
    token = mint_token(await function.engine.signing_keys.require_signing_key("test"), function.e, old[0])

    gate = opened(await open_approval(function, (waits.new_id(), "ana")))

    async with env.refused(errors.TargetNotSignalable):
        await function.engine.deliver_signal(waits.signal_args(function.e, "vote", old[0], token))
    listed = (await function.engine.list_pending_waitpoints(function.e)).entries
    assert [one.waitpoint_id for one in listed] == [link.waitpoint_id for link in gate.links]
    assert await function.engine.read_token_of(function.e, old[0]) is None


async def test_a_gate_on_a_waitpoint_in_use_is_refused(function: DurableFunction, env: Env, waits: Waits) -> None:
    other = await env.create_and_claim()
    used = (waits.new_id(), "ana")
    args = GateArgs(name="theirs", kind=GateKind.SIGNALS, condition=all_of("ana"), waitpoints=(used,))
    await env.engine.open_gate(other.handle, args)
    pending = await env.engine.create_waitpoint(function.claim.handle, "ana", 60_000)

    for one in (used, (pending.waitpoint_id, "ana")):
        async with env.refused(errors.WaitpointAlreadyExists):
            await open_approval(function, one)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (None, "value: true or false is needed"),
        (b"", "value: true or false is needed"),
        (b"1", "value: true or false is needed"),
        (b"{", "value: not JSON"),
        (b"\xff\xfe", "value: not JSON"),
        (b'"\xed\xa0\x80"', "value: not JSON"),
        (b"[" * 60_000, "value: nested too deeply"),
        (b'{"a":' * 10_000, "value: nested too deeply"),
    ],
    ids=str,
)
async def test_a_vote_that_violates_the_schema_is_refused_and_writes_nothing(
    function: DurableFunction, env: Env, payload: bytes | None, message: str
) -> None:
    await function.engine.set_tags(function.claim.handle, {schema_tag("pay"): YES_OR_NO})
    gate = opened(await function.approval("approve", "pay.1"))

    async with env.unchanged():
        with pytest.raises(errors.InvalidInput) as refusal:
            await function.vote(gate, "pay.1", payload=payload)
    assert refusal.value.detail == message
    assert await function.vote(gate, "pay.1", payload=b"false") == SATISFIED


async def test_a_vote_is_authorized_before_it_is_checked_against_the_schema(
    function: DurableFunction, env: Env, waits: Waits
) -> None:
    await function.engine.set_tags(function.claim.handle, {schema_tag("pay"): YES_OR_NO})
    gate = opened(await function.approval("approve", "pay.1"))
    [link] = gate.links

    with pytest.raises(errors.InvalidToken):
        await function.engine.deliver_signal(
            waits.signal_args(function.e, "vote", link.waitpoint_id, "k1:" + "0" * 64, payload=b"5")
        )
    await function.engine.cancel_execution(function.e, reason="over")
    assert await function.engine.read_execution_state(function.e) is PublicState.CANCELLED
    with pytest.raises(errors.TargetNotSignalable):
        await function.vote(gate, "pay.1", payload=b"5")


@pytest.mark.parametrize("tag", ["", "{", "5", "[]", '{"type":"moon"}', "[" * 5000], ids=str)
async def test_an_unreadable_schema_accepts_every_vote(function: DurableFunction, tag: str) -> None:
    await function.engine.set_tags(function.claim.handle, {schema_tag("pay"): tag[:200]})
    gate = opened(await function.approval("approve", "pay.1"))

    assert await function.vote(gate, "pay.1", payload=msgspec.json.encode({"any": "thing"})) == SATISFIED


async def test_a_suspension_waitpoint_has_no_vote_schema(env: Env, waits: Waits) -> None:
    claim = await env.create_and_claim()
    await env.engine.set_tags(claim.handle, {schema_tag("k"): YES_OR_NO})
    p = await waits.suspend(claim)

    assert await waits.effect(claim.execution_id, "go", p, payload=b"\xff") == SATISFIED


@pytest.mark.parametrize(
    ("waitpoints", "detail"),
    [
        ((("{one}", "ana"), ("{one}", "bo")), "waitpoints: one of them twice"),
        ((("{one}", "ana"), ("{two}",)), "waitpoints: not a list of pairs"),
        ((("{one}", "ana"), 7), "waitpoints: not a list of pairs"),
        ((("{one}", "ana"), ("{two}", "eve")), "waitpoints: not those that the condition names"),
    ],
)
async def test_a_gate_with_inconsistent_waitpoints_is_refused_and_writes_nothing(
    function: DurableFunction, env: Env, waits: Waits, waitpoints: tuple[object, ...], detail: str
) -> None:
    one, two = waits.new_id(), waits.new_id()
    named = {"{one}": one, "{two}": two}
    bindings = tuple(
        tuple(named.get(part, part) for part in pair) if isinstance(pair, tuple) else pair for pair in waitpoints
    )
    before = await env.engine.describe_execution(function.e)
    args = GateArgs(name="approve", kind=GateKind.SIGNALS, condition=all_of("ana", "bo"), waitpoints=bindings)  # type: ignore[arg-type]

    with pytest.raises(errors.InvalidInput) as refused:
        await function.engine.open_gate(function.claim.handle, args)

    assert refused.value.detail == detail
    assert await env.engine.describe_execution(function.e) == before
    assert await env.engine.describe_waitpoint(function.e, one) is None
