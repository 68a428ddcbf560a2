"""Two processes about one wait: whoever commits second looks again, and nothing is lost, doubled or passed over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.suspensions import ConditionAlreadySatisfied, Suspended
from flowfabric.ids import SeededMinter
from flowfabric.model.condition import ByName, Count, CountKind
from flowfabric.model.gate import GateKind
from flowfabric.model.suspension import TimeoutBehavior
from flowfabric.rules.durable.gates import GateArgs
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.durable.park import GatesReady
from flowfabric.rules.suspension.resume import SuspensionExpiry
from flowfabric.rules.suspension.signals import Accepted
from flowfabric.rules.suspension.waitpoints import PendingWaitpoint
from flowfabric.stores.port import Store
from tests.scenarios.functions import Function, closed, opened
from tests.scenarios.play import RESUMABLE, Play, terminal
from tests.scenarios.waits import ANY, BUFFERED, SATISFIED, Waits, count

DAY = 86_400_000


@pytest.fixture
async def rival(store: Store, engine: Engine) -> AsyncIterator[Engine]:
    """Another process on the same store."""
    rival = Engine(store, minter=SeededMinter(2))
    yield rival
    await rival.bulk_canceller.close()


async def overtaken(play: Play, slow: Awaitable[Any], fast: Callable[[], Awaitable[Any]]) -> tuple[Any, Any]:
    """What comes of a call that has decided, and of another that is decided and written before the first is written."""
    gate = play.slowed("commit")
    first = asyncio.ensure_future(slow)
    async with asyncio.timeout(20):
        await gate.reached()
        second = await _outcome(fast())
        gate.release()
        return await _outcome(first), second


async def _outcome(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except errors.FabricError as refused:
        return refused


def to(waits: Waits, e: str, place: Any, name: str = "go", **given: Any) -> Any:
    token = place.token if isinstance(place, PendingWaitpoint) else place.waitpoint_token
    return waits.signal(e, name, place.waitpoint_id, token, **given)


async def test_a_signal_that_comes_while_its_waitpoint_is_activated_counts(
    play: Play, waits: Waits, rival: Engine
) -> None:
    held = await play.claimed()
    pending = await play.engine.create_waitpoint(held.handle, "k", DAY)
    signal = to(waits, held.execution_id, pending)

    outcome, sent = await overtaken(play, waits.on_pending(held, pending, ANY), lambda: rival.deliver_signal(signal))

    assert sent == Accepted(signal.signal_id, BUFFERED)
    assert isinstance(outcome, ConditionAlreadySatisfied)


async def test_a_waitpoint_that_is_closed_while_it_is_activated_is_closed(
    play: Play, waits: Waits, rival: Engine
) -> None:
    held = await play.claimed()
    pending = await play.engine.create_waitpoint(held.handle, "k", DAY)

    outcome, was_open = await overtaken(
        play, waits.on_pending(held, pending, ANY), lambda: rival.close_waitpoint(pending.waitpoint_id)
    )

    assert was_open is True
    assert isinstance(outcome, errors.WaitpointNotPending)


async def test_closing_a_waitpoint_forgets_no_signal(play: Play, waits: Waits, rival: Engine) -> None:
    held, p = await waits.suspended(count(2))
    e = held.execution_id

    was_open, sent = await overtaken(
        play, play.engine.close_waitpoint(p.waitpoint_id), lambda: rival.deliver_signal(to(waits, e, p))
    )

    assert (was_open, isinstance(sent, Accepted)) == (True, True)
    record = await waits.record(e, p.waitpoint_id)
    assert (record.state, record.signal_count, record.matched_signal_count) == ("closed", 1, 1)


async def test_a_signal_is_too_late_for_what_was_closed_meanwhile(play: Play, waits: Waits, rival: Engine) -> None:
    held, p = await waits.suspended()
    e = held.execution_id

    sent, was_open = await overtaken(
        play, play.engine.deliver_signal(to(waits, e, p)), lambda: rival.close_waitpoint(p.waitpoint_id)
    )

    assert was_open is True
    assert isinstance(sent, errors.WaitpointClosed)
    assert (await waits.record(e, p.waitpoint_id)).signal_count == 0


async def test_of_a_timeout_and_a_signal_the_first_wins(play: Play, waits: Waits, rival: Engine) -> None:
    held, p = await waits.suspended(timeout_at=play.now)
    e = held.execution_id
    expiry, sent = await overtaken(
        play, play.engine.expire_suspension(e), lambda: rival.deliver_signal(to(waits, e, p))
    )
    assert (expiry, sent.effect) == (SuspensionExpiry.NOT_SUSPENDED, SATISFIED)
    assert await play.vector(e) == RESUMABLE

    held, p = await waits.suspended(timeout_at=play.now)
    e = held.execution_id
    sent, expiry = await overtaken(
        play, play.engine.deliver_signal(to(waits, e, p)), lambda: rival.expire_suspension(e)
    )
    assert isinstance(sent, errors.TargetNotSignalable)
    assert (expiry, await play.vector(e)) == (SuspensionExpiry.FAILED, terminal("failed"))
    assert len(await play.completions(e)) == 1


async def test_a_signal_is_not_lost_to_an_escalation(play: Play, waits: Waits, rival: Engine) -> None:
    held, p = await waits.suspended(timeout_at=play.now, timeout_behavior=TimeoutBehavior.ESCALATE)
    e = held.execution_id

    sent, expiry = await overtaken(
        play, play.engine.deliver_signal(to(waits, e, p)), lambda: rival.expire_suspension(e)
    )

    assert (sent.effect, expiry) == (SATISFIED, SuspensionExpiry.ESCALATED)
    assert await play.vector(e) == RESUMABLE


async def test_two_last_signals_resume_once(play: Play, waits: Waits, rival: Engine) -> None:
    held, p = await waits.suspended()
    e = held.execution_id

    first, second = await overtaken(
        play,
        play.engine.deliver_signal(to(waits, e, p, idempotency_key="i")),
        lambda: rival.deliver_signal(to(waits, e, p, idempotency_key="j")),
    )

    assert second.effect == SATISFIED
    assert isinstance(first, errors.TargetNotSignalable)
    assert [news.effect for news in await waits.signals_told(e)] == ["Satisfied"]


async def test_two_suspends_with_one_key_are_one(play: Play, waits: Waits, rival: Engine) -> None:
    held = await play.claimed()
    ours, theirs = (waits.args(idempotency_key="once") for _ in range(2))

    first, second = await overtaken(
        play, play.engine.suspend(held.handle, ours), lambda: rival.suspend(held.handle, theirs)
    )

    assert isinstance(second, Suspended)
    assert first == second
    assert second.details.suspension_id == theirs.suspension_id


async def test_a_vote_that_comes_while_its_function_parks_is_seen(
    function: Function, play: Play, waits: Waits, rival: Engine
) -> None:
    gate = opened(await function.approval("approve", "ana"))
    signal = to(waits, function.e, PendingWaitpoint(gate.links[0].waitpoint_id, gate.links[0].token), "vote")

    parked, sent = await overtaken(play, function.park("approve"), lambda: rival.deliver_signal(signal))

    assert (parked, sent.effect) == (GatesReady(("approve",)), SATISFIED)


async def test_a_message_that_comes_while_its_function_asks_for_it_is_received(
    function: Function, play: Play, waits: Waits, rival: Engine
) -> None:
    message = MessageArgs(execution_id=function.e, mailbox="steer", message_id=waits.id(), payload=b"left")

    memo, _ = await overtaken(play, function.receive("r"), lambda: rival.send_message(message))

    assert closed(memo).payload == b"left"


async def test_a_key_that_lapsed_long_ago_disturbs_no_other(play: Play, waits: Waits) -> None:
    await play.engine.rotate_waitpoint_hmac_secret_all("k2", "bb" * 32, 0)
    play.clock.advance_ms(DAY)
    held, p = await waits.suspended()

    async with asyncio.timeout(20):
        assert await waits.effect(held.execution_id, "go", p) == SATISFIED


async def test_the_names_that_a_gate_waits_for_are_listed(function: Function, waits: Waits) -> None:
    args = GateArgs(
        name="g",
        kind=GateKind.SIGNALS,
        condition=Count(1, CountKind.DISTINCT_SIGNALS, ("k",), ByName("yes")),
        waitpoints=((waits.id(), "k"),),
    )
    opened(await function.engine.open_gate(function.held.handle, args))

    [listed] = (await function.engine.list_pending_waitpoints(function.e)).entries
    assert (listed.state, listed.required_signal_names) == ("active", ["yes"])
