"""Gates of a second life, and what a gate takes for a vote."""

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
from tests.scenarios.functions import Function, all_of, closed, opened
from tests.scenarios.play import Play
from tests.scenarios.waits import APPENDED, SATISFIED, Waits

YES_OR_NO = '{"type":"boolean"}'


async def passed(function: Function, play: Play, *pairs: tuple[str, str]) -> None:
    """The function asks, everybody votes, and it ends well; then it gets another life."""
    gate = opened(await asked(function, *pairs))
    for _, key in pairs:
        await function.vote(gate, key, payload=b"true", idempotency_key="once")
    await function.engine.complete(function.held.handle)
    await function.engine.replay_execution(function.e)
    function.held = await play.claimed_again(function.e)


async def asked(function: Function, *pairs: tuple[str, str]) -> OpenedGate | GateMemo:
    keys = tuple(key for _, key in pairs)
    args = GateArgs(name="approve", kind=GateKind.SIGNALS, condition=all_of(*keys), waitpoints=pairs)
    return await function.engine.open_gate(function.held.handle, args)


async def test_a_function_that_is_replayed_asks_anew_at_the_same_places(
    function: Function, play: Play, waits: Waits
) -> None:
    pairs = ((waits.id(), "ana"), (waits.id(), "bo"))
    await passed(function, play, *pairs)

    gate = opened(await asked(function, *pairs))

    assert [link.waitpoint_id for link in gate.links] == [one for one, _ in pairs]
    for one, _ in pairs:
        record = await waits.record(function.e, one)
        assert (record.state, record.signal_count, record.closed_at) == ("active", 0, None)
    assert await function.vote(gate, "ana", payload=b"1", idempotency_key="once") == APPENDED
    assert await function.vote(gate, "bo", payload=b"2", idempotency_key="once") == SATISFIED
    votes = await function.engine.read_votes(closed(await asked(function, *pairs)))
    assert [vote.payload for vote in votes] == [b"1", b"2"]


async def test_the_links_of_a_former_life_lead_nowhere(function: Function, play: Play, waits: Waits) -> None:
    old = (waits.id(), "ana")
    await passed(function, play, old)
    token = mint_token(await function.engine.signing_keys.require_signing_key("test"), function.e, old[0])

    gate = opened(await asked(function, (waits.id(), "ana")))

    async with play.refused(errors.TargetNotSignalable):
        await function.engine.deliver_signal(waits.signal(function.e, "vote", old[0], token))
    listed = (await function.engine.list_pending_waitpoints(function.e)).entries
    assert [one.waitpoint_id for one in listed] == [link.waitpoint_id for link in gate.links]
    assert await function.engine.read_token_of(function.e, old[0]) is None


async def test_a_place_that_is_in_use_cannot_be_asked_at(function: Function, play: Play, waits: Waits) -> None:
    other = await play.claimed()
    taken = (waits.id(), "ana")
    args = GateArgs(name="theirs", kind=GateKind.SIGNALS, condition=all_of("ana"), waitpoints=(taken,))
    await play.engine.open_gate(other.handle, args)
    pending = await play.engine.create_waitpoint(function.held.handle, "ana", 60_000)

    for one in (taken, (pending.waitpoint_id, "ana")):
        async with play.refused(errors.WaitpointAlreadyExists):
            await asked(function, one)


@pytest.mark.parametrize(
    ("payload", "words"),
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
async def test_a_vote_that_nobody_could_read_is_refused_and_leaves_no_trace(
    function: Function, play: Play, payload: bytes | None, words: str
) -> None:
    await function.engine.set_tags(function.held.handle, {schema_tag("pay"): YES_OR_NO})
    gate = opened(await function.approval("approve", "pay.1"))

    async with play.untouched():
        with pytest.raises(errors.InvalidInput) as refusal:
            await function.vote(gate, "pay.1", payload=payload)
    assert refusal.value.detail == words
    assert await function.vote(gate, "pay.1", payload=b"false") == SATISFIED


async def test_whoever_cannot_vote_hears_nothing_of_what_is_asked(function: Function, play: Play, waits: Waits) -> None:
    await function.engine.set_tags(function.held.handle, {schema_tag("pay"): YES_OR_NO})
    gate = opened(await function.approval("approve", "pay.1"))
    [link] = gate.links

    with pytest.raises(errors.InvalidToken):
        await function.engine.deliver_signal(
            waits.signal(function.e, "vote", link.waitpoint_id, "k1:" + "0" * 64, payload=b"5")
        )
    await function.engine.cancel_execution(function.e, reason="over")
    assert await function.engine.read_execution_state(function.e) is PublicState.CANCELLED
    with pytest.raises(errors.TargetNotSignalable):
        await function.vote(gate, "pay.1", payload=b"5")


@pytest.mark.parametrize("tag", ["", "{", "5", "[]", '{"type":"moon"}', "[" * 5000], ids=str)
async def test_what_is_asked_in_no_known_words_is_answered_by_anything(function: Function, tag: str) -> None:
    await function.engine.set_tags(function.held.handle, {schema_tag("pay"): tag[:200]})
    gate = opened(await function.approval("approve", "pay.1"))

    assert await function.vote(gate, "pay.1", payload=msgspec.json.encode({"any": "thing"})) == SATISFIED


async def test_a_waitpoint_of_a_suspension_asks_for_nothing(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    await play.engine.set_tags(held.handle, {schema_tag("k"): YES_OR_NO})
    p = await waits.suspend(held)

    assert await waits.effect(held.execution_id, "go", p, payload=b"\xff") == SATISFIED


@pytest.mark.parametrize(
    ("waitpoints", "detail"),
    [
        ((("{one}", "ana"), ("{one}", "bo")), "waitpoints: one of them twice"),
        ((("{one}", "ana"), ("{two}",)), "waitpoints: not a list of pairs"),
        ((("{one}", "ana"), 7), "waitpoints: not a list of pairs"),
        ((("{one}", "ana"), ("{two}", "eve")), "waitpoints: not those that the condition names"),
    ],
)
async def test_links_that_could_never_open_a_gate_are_refused_and_leave_no_trace(
    function: Function, play: Play, waits: Waits, waitpoints: tuple[object, ...], detail: str
) -> None:
    one, two = waits.id(), waits.id()
    named = {"{one}": one, "{two}": two}
    bent = tuple(
        tuple(named.get(part, part) for part in pair) if isinstance(pair, tuple) else pair for pair in waitpoints
    )
    before = await play.engine.describe_execution(function.e)
    args = GateArgs(name="approve", kind=GateKind.SIGNALS, condition=all_of("ana", "bo"), waitpoints=bent)  # type: ignore[arg-type]

    with pytest.raises(errors.InvalidInput) as refused:
        await function.engine.open_gate(function.held.handle, args)

    assert refused.value.detail == detail
    assert await play.engine.describe_execution(function.e) == before
    assert await play.engine.describe_waitpoint(function.e, one) is None
