"""Races of two processes on one suspension: the second to commit decides again, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
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
from tests.scenarios.durable_function import DurableFunction, closed, opened
from tests.scenarios.env import RESUMABLE, Env, terminal
from tests.scenarios.waits import ANY, BUFFERED, SATISFIED, Waits, count

DAY = 86_400_000


@pytest.fixture
async def rival(store: Store, engine: Engine) -> AsyncIterator[Engine]:
    """Another process on the same store."""
    rival = Engine(store, minter=SeededMinter(2))
    yield rival
    await rival.bulk_canceller.close()


def signal_to(waits: Waits, e: str, waitpoint: Any, name: str = "go", **options: Any) -> Any:
    token = waitpoint.token if isinstance(waitpoint, PendingWaitpoint) else waitpoint.waitpoint_token
    return waits.signal_args(e, name, waitpoint.waitpoint_id, token, **options)


async def test_a_signal_concurrent_with_activation_counts(env: Env, waits: Waits, rival: Engine) -> None:
    claim, pending = await waits.create_pending("k", DAY)
    signal = signal_to(waits, claim.execution_id, pending)

    outcome, sent = await env.race(waits.suspend_on_pending(claim, pending, ANY), lambda: rival.deliver_signal(signal))

    assert sent == Accepted(signal.signal_id, BUFFERED)
    assert isinstance(outcome, ConditionAlreadySatisfied)


async def test_a_waitpoint_closed_during_activation_stays_closed(env: Env, waits: Waits, rival: Engine) -> None:
    claim, pending = await waits.create_pending("k", DAY)

    outcome, was_open = await env.race(
        waits.suspend_on_pending(claim, pending, ANY), lambda: rival.close_waitpoint(pending.waitpoint_id)
    )

    assert was_open is True
    assert isinstance(outcome, errors.WaitpointNotPending)


async def test_closing_a_waitpoint_keeps_a_concurrent_signal(env: Env, waits: Waits, rival: Engine) -> None:
    claim, p = await waits.create_suspended(count(2))
    e = claim.execution_id

    was_open, sent = await env.race(
        env.engine.close_waitpoint(p.waitpoint_id), lambda: rival.deliver_signal(signal_to(waits, e, p))
    )

    assert (was_open, isinstance(sent, Accepted)) == (True, True)
    record = await waits.record(e, p.waitpoint_id)
    assert (record.state, record.signal_count, record.matched_signal_count) == ("closed", 1, 1)


async def test_a_signal_to_a_waitpoint_closed_concurrently_is_refused(env: Env, waits: Waits, rival: Engine) -> None:
    claim, p = await waits.create_suspended()
    e = claim.execution_id

    sent, was_open = await env.race(
        env.engine.deliver_signal(signal_to(waits, e, p)), lambda: rival.close_waitpoint(p.waitpoint_id)
    )

    assert was_open is True
    assert isinstance(sent, errors.WaitpointClosed)
    assert (await waits.record(e, p.waitpoint_id)).signal_count == 0


async def test_the_first_of_a_timeout_and_a_signal_wins(env: Env, waits: Waits, rival: Engine) -> None:
    claim, p = await waits.create_suspended(timeout_at=env.now)
    e = claim.execution_id
    expiry, sent = await env.race(env.engine.expire_suspension(e), lambda: rival.deliver_signal(signal_to(waits, e, p)))
    assert (expiry, sent.effect) == (SuspensionExpiry.NOT_SUSPENDED, SATISFIED)
    assert await env.vector(e) == RESUMABLE

    claim, p = await waits.create_suspended(timeout_at=env.now)
    e = claim.execution_id
    sent, expiry = await env.race(env.engine.deliver_signal(signal_to(waits, e, p)), lambda: rival.expire_suspension(e))
    assert isinstance(sent, errors.TargetNotSignalable)
    assert (expiry, await env.vector(e)) == (SuspensionExpiry.FAILED, terminal("failed"))
    assert len(await env.completions(e)) == 1


async def test_a_signal_concurrent_with_an_escalation_resumes(env: Env, waits: Waits, rival: Engine) -> None:
    claim, p = await waits.create_suspended(timeout_at=env.now, timeout_behavior=TimeoutBehavior.ESCALATE)
    e = claim.execution_id

    sent, expiry = await env.race(env.engine.deliver_signal(signal_to(waits, e, p)), lambda: rival.expire_suspension(e))

    assert (sent.effect, expiry) == (SATISFIED, SuspensionExpiry.ESCALATED)
    assert await env.vector(e) == RESUMABLE


async def test_two_concurrent_resuming_signals_resume_once(env: Env, waits: Waits, rival: Engine) -> None:
    claim, p = await waits.create_suspended()
    e = claim.execution_id

    first, second = await env.race(
        env.engine.deliver_signal(signal_to(waits, e, p, idempotency_key="i")),
        lambda: rival.deliver_signal(signal_to(waits, e, p, idempotency_key="j")),
    )

    assert second.effect == SATISFIED
    assert isinstance(first, errors.TargetNotSignalable)
    assert [event.effect for event in await waits.signal_events(e)] == ["Satisfied"]


async def test_two_concurrent_suspends_with_one_key_are_one(env: Env, waits: Waits, rival: Engine) -> None:
    claim = await env.create_and_claim()
    ours, theirs = (waits.args(idempotency_key="once") for _ in range(2))

    first, second = await env.race(env.engine.suspend(claim.handle, ours), lambda: rival.suspend(claim.handle, theirs))

    assert isinstance(second, Suspended)
    assert first == second
    assert second.details.suspension_id == theirs.suspension_id


async def test_a_vote_concurrent_with_park_is_seen(
    function: DurableFunction, env: Env, waits: Waits, rival: Engine
) -> None:
    gate = opened(await function.approval("approve", "ana"))
    signal = signal_to(waits, function.e, PendingWaitpoint(gate.links[0].waitpoint_id, gate.links[0].token), "vote")

    parked, sent = await env.race(function.park("approve"), lambda: rival.deliver_signal(signal))

    assert (parked, sent.effect) == (GatesReady(("approve",)), SATISFIED)


async def test_a_message_concurrent_with_receive_is_received(
    function: DurableFunction, env: Env, waits: Waits, rival: Engine
) -> None:
    message = MessageArgs(execution_id=function.e, mailbox="steer", message_id=waits.new_id(), payload=b"left")

    memo, _ = await env.race(function.receive("r"), lambda: rival.send_message(message))

    assert closed(memo).payload == b"left"


async def test_an_expired_signing_key_does_not_affect_new_tokens(env: Env, waits: Waits) -> None:
    await env.engine.rotate_waitpoint_hmac_secret_all("k2", "bb" * 32, 0)
    env.clock.advance_ms(DAY)
    claim, p = await waits.create_suspended()

    async with asyncio.timeout(20):
        assert await waits.effect(claim.execution_id, "go", p) == SATISFIED


async def test_the_required_signal_names_of_a_gate_are_listed(function: DurableFunction, waits: Waits) -> None:
    args = GateArgs(
        name="g",
        kind=GateKind.SIGNALS,
        condition=Count(1, CountKind.DISTINCT_SIGNALS, ("k",), ByName("yes")),
        waitpoints=((waits.new_id(), "k"),),
    )
    opened(await function.engine.open_gate(function.claim.handle, args))

    [listed] = (await function.engine.list_pending_waitpoints(function.e)).entries
    assert (listed.state, listed.required_signal_names) == ("active", ["yes"])
