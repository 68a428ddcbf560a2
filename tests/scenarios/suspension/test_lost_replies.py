"""Calls about suspensions take effect once, whichever request or reply is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.durable import OpenedGate, ParkResult
from flowfabric.engine.operations.suspensions import ConditionAlreadySatisfied, Suspended
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.condition import OperatorOnly
from flowfabric.model.gate import GateKind
from flowfabric.model.states import PublicState
from flowfabric.model.suspension import TimeoutBehavior
from flowfabric.rules.durable.gates import GateArgs
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.stream.append import Appended
from flowfabric.rules.suspension.resume import Resumed, SuspensionExpiry
from flowfabric.rules.suspension.signals import Accepted, DuplicateDelivery
from flowfabric.stores.port import Store
from flowfabric.testing import FlakyStore, Loss, check_invariants
from tests.executions import claim_one
from tests.scenarios.checked_store import dump
from tests.scenarios.env import Env
from tests.scenarios.waits import ANY, SATISFIED, Waits


class FlakyEnv:
    """An engine on a flaky store, and another on the same store without faults."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.faults = FlakyStore(store)
        self.engine = Engine(self.faults, minter=SeededMinter(1))
        self.other = Engine(store, minter=SeededMinter(2))
        self.env = Env(self.engine, clock)
        self.waits = Waits(self.env)
        self.store = store

    async def rows(self, table: str) -> list[Any]:
        return (await dump(self.store))[table]


@pytest.fixture
async def flaky(store: Store, clock: ManualClock) -> FlakyEnv:
    flaky = FlakyEnv(store, clock)
    await flaky.engine.seed_waitpoint_hmac_secret("k1", "00" * 32)
    return flaky


Operation = Callable[[FlakyEnv, Claimed], Awaitable[Callable[[], Awaitable[None]]]]


async def suspend(flaky: FlakyEnv, claim: Claimed) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        outcome = await flaky.engine.suspend(claim.handle, flaky.waits.args())
        assert isinstance(outcome, Suspended)
        assert len(await flaky.rows("ff_waitpoint")) == 1
        assert await flaky.waits.effect(claim.execution_id, "go", outcome.details) == SATISFIED

    return call


async def create_waitpoint(flaky: FlakyEnv, claim: Claimed) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        created = await flaky.engine.create_waitpoint(claim.handle, "k", 60_000)
        assert [row.waitpoint_id for row in await flaky.rows("ff_waitpoint")] == [created.waitpoint_id]

    return call


async def close_waitpoint(flaky: FlakyEnv, claim: Claimed) -> Callable[[], Awaitable[None]]:
    created = await flaky.engine.create_waitpoint(claim.handle, "k", 60_000)

    async def call() -> None:
        assert await flaky.engine.close_waitpoint(created.waitpoint_id) is True

    return call


async def deliver_signal(flaky: FlakyEnv, claim: Claimed) -> Callable[[], Awaitable[None]]:
    p = await flaky.waits.suspend(claim, OperatorOnly())

    async def call() -> None:
        accepted = await flaky.waits.send(claim.execution_id, "go", p)
        assert isinstance(accepted, Accepted)
        assert [row.signal_id for row in await flaky.rows("ff_signal")] == [accepted.signal_id]
        assert len(await flaky.waits.signal_events()) == 1

    return call


async def resuming_signal(flaky: FlakyEnv, claim: Claimed) -> Callable[[], Awaitable[None]]:
    p = await flaky.waits.suspend(claim)

    async def call() -> None:
        assert await flaky.waits.effect(claim.execution_id, "go", p) == SATISFIED
        again = await flaky.env.grant_and_resume(claim.execution_id)
        assert len(await flaky.engine.observe_signals(again.handle)) == 1

    return call


async def resume_execution(flaky: FlakyEnv, claim: Claimed) -> Callable[[], Awaitable[None]]:
    await flaky.waits.suspend(claim)

    async def call() -> None:
        await flaky.engine.resume_execution(claim.execution_id)

    return call


async def expire_suspension(flaky: FlakyEnv, claim: Claimed) -> Callable[[], Awaitable[None]]:
    await flaky.waits.suspend(claim, timeout_at=flaky.env.now)

    async def call() -> None:
        assert await flaky.engine.expire_suspension(claim.execution_id) is SuspensionExpiry.FAILED
        assert await flaky.env.outcomes() == ["failed"]

    return call


async def append_frame(flaky: FlakyEnv, claim: Claimed) -> Callable[[], Awaitable[None]]:
    await flaky.engine.append_frame(claim.handle, b"one")

    async def call() -> None:
        appended = await flaky.engine.append_frame(claim.handle, b"two")
        assert isinstance(appended, Appended)
        assert appended.frame_count == 2
        page = await flaky.engine.read_stream(claim.execution_id, 0)
        assert [frame.fields["payload"] for frame in page.frames] == ["one", "two"]

    return call


async def send_message(flaky: FlakyEnv, claim: Claimed) -> Callable[[], Awaitable[None]]:
    args = MessageArgs(execution_id=claim.execution_id, mailbox="m", message_id=flaky.waits.new_id(), payload=b"hi")

    async def call() -> None:
        assert isinstance(await flaky.engine.send_message(args), Accepted)
        assert [row.message_id for row in await flaky.rows("ff_mail")] == [args.message_id]

    return call


async def open_gate(flaky: FlakyEnv, claim: Claimed) -> Callable[[], Awaitable[None]]:
    args = GateArgs(name="nap", kind=GateKind.TIMER, expires_in_ms=1000)

    async def call() -> None:
        assert isinstance(await flaky.engine.open_gate(claim.handle, args), OpenedGate)

    return call


async def park(flaky: FlakyEnv, claim: Claimed) -> Callable[[], Awaitable[None]]:
    await (await open_gate(flaky, claim))()

    async def call() -> None:
        assert isinstance(await flaky.engine.park(claim.handle, ("nap",)), ParkResult)

    return call


async def record_step(flaky: FlakyEnv, claim: Claimed) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        memo = await flaky.engine.record_step(claim.handle, "pay", 0, b"receipt")
        assert [row.result for row in await flaky.rows("ff_step")] == [memo.result]

    return call


OPERATIONS: list[Operation] = [
    suspend,
    create_waitpoint,
    close_waitpoint,
    deliver_signal,
    resuming_signal,
    resume_execution,
    expire_suspension,
    append_frame,
    send_message,
    open_gate,
    park,
    record_step,
]


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
async def test_a_call_takes_effect_once_whichever_message_is_lost(
    flaky: FlakyEnv, operation: Operation, loss: Loss
) -> None:
    call = await operation(flaky, await flaky.env.create_and_claim())
    flaky.faults.lose("commit", loss)

    await call()

    assert len(flaky.faults.losses) == 1
    await check_invariants(flaky.other)


async def lose_reply_after(
    flaky: FlakyEnv, call: Callable[[], Awaitable[None]], concurrently: Callable[[], Awaitable[Any]]
) -> None:
    """Commit the call, run a concurrent write, and then lose the reply to the call."""
    done = flaky.faults.stop_after("commit")
    flaky.faults.lose("commit", Loss.REPLY)
    running = asyncio.ensure_future(call())
    await done.reached()
    await concurrently()
    done.release()
    await running
    assert len(flaky.faults.losses) == 1


@pytest.mark.parametrize(
    ("options", "kept"),
    [({}, ["mine", "theirs"]), ({"signal_maxlen": 1}, ["theirs"])],
    ids=["it is in the log", "it left the log"],
)
async def test_a_signal_with_a_lost_reply_counts_once_when_another_follows(
    flaky: FlakyEnv, options: dict[str, Any], kept: list[str]
) -> None:
    claim = await flaky.env.create_and_claim()
    p = await flaky.waits.suspend(claim, OperatorOnly())

    async def call() -> None:
        assert isinstance(await flaky.waits.send(claim.execution_id, "mine", p), Accepted)

    async def concurrently() -> None:
        other = flaky.waits.signal_args(claim.execution_id, "theirs", p.waitpoint_id, p.waitpoint_token, **options)
        await flaky.other.deliver_signal(other)

    await lose_reply_after(flaky, call, concurrently)

    assert [row.signal_name for row in await flaky.rows("ff_signal")] == kept
    assert (await flaky.waits.record(claim.execution_id, p.waitpoint_id)).signal_count == 2


@pytest.mark.parametrize("key", [None, "i1"])
async def test_a_signal_delivered_twice_emits_two_events_despite_an_unknown_outcome(
    flaky: FlakyEnv, key: str | None
) -> None:
    claim = await flaky.env.create_and_claim()
    p = await flaky.waits.suspend(claim, OperatorOnly())
    e = claim.execution_id
    signal = flaky.waits.signal_args(e, "go", p.waitpoint_id, p.waitpoint_token, idempotency_key=key)
    paused = flaky.faults.stop_before("commit")
    flaky.faults.lose("commit", Loss.UNSURE)
    request = asyncio.ensure_future(flaky.engine.deliver_signal(signal))
    await paused.reached()
    first = await flaky.other.deliver_signal(signal)
    paused.release()

    assert isinstance(first, Accepted)
    assert await request == (first if key is None else DuplicateDelivery(signal.signal_id))

    kept = 2 if key is None else 1
    assert (await flaky.waits.record(e, p.waitpoint_id)).signal_count == kept == len(await flaky.rows("ff_signal"))
    assert [event.effect for event in await flaky.waits.signal_events(e)][1:] == [
        "Other(no_op)" if key is None else "Deduped"
    ]


async def test_each_duplicate_signal_emits_an_event_despite_an_unknown_outcome(flaky: FlakyEnv) -> None:
    claim = await flaky.env.create_and_claim()
    p = await flaky.waits.suspend(claim, OperatorOnly())
    e = claim.execution_id
    signal = flaky.waits.signal_args(e, "go", p.waitpoint_id, p.waitpoint_token, idempotency_key="i1")
    await flaky.engine.deliver_signal(signal)
    assert await flaky.engine.deliver_signal(signal) == DuplicateDelivery(signal.signal_id)
    flaky.faults.lose("commit", Loss.UNSURE)

    assert await flaky.engine.deliver_signal(signal) == DuplicateDelivery(signal.signal_id)

    assert [event.effect for event in await flaky.waits.signal_events(e)] == ["Other(no_op)", "Deduped", "Deduped"]


async def test_a_resuming_signal_with_a_lost_reply_is_recognised_after_completion(flaky: FlakyEnv) -> None:
    claim = await flaky.env.create_and_claim()
    p = await flaky.waits.suspend(claim)

    async def call() -> None:
        assert await flaky.waits.effect(claim.execution_id, "go", p) == SATISFIED

    async def concurrently() -> None:
        claimed = await claim_one(flaky.other, worker_id="wz", worker_instance_id="wz-1")
        await flaky.other.complete(claimed.handle)

    await lose_reply_after(flaky, call, concurrently)


async def test_a_message_with_a_lost_reply_is_not_sent_again_after_it_was_received(flaky: FlakyEnv) -> None:
    claim = await flaky.env.create_and_claim()
    receive = GateArgs(name="r0", kind=GateKind.MAILBOX, mailbox="m")

    async def call() -> None:
        args = MessageArgs(
            execution_id=claim.execution_id, mailbox="m", message_id=flaky.waits.new_id(), payload=b"mine"
        )
        assert isinstance(await flaky.engine.send_message(args), Accepted)

    await lose_reply_after(flaky, call, lambda: flaky.other.open_gate(claim.handle, receive))

    assert await flaky.rows("ff_mail") == []
    assert (await flaky.other.read_waits(claim.execution_id)).memos["r0"].payload == b"mine"


@pytest.mark.parametrize("expires_in", [0, 60_000], ids=["swept", "signalled"])
async def test_a_waitpoint_with_a_lost_reply_is_created_once(flaky: FlakyEnv, expires_in: int) -> None:
    claim, e = await flaky.env.create_claimed()
    first = await flaky.engine.create_waitpoint(claim.handle, "first", 60_000)

    async def call() -> None:
        async with asyncio.timeout(20):
            created = await flaky.engine.create_waitpoint(claim.handle, "k", expires_in)
        waitpoints = {row.waitpoint_id for row in await flaky.rows("ff_waitpoint")}
        assert waitpoints == {first.waitpoint_id, created.waitpoint_id}

    async def concurrently() -> None:
        if not expires_in:
            assert (await flaky.other.sweep_once("pending_wp_expiry")).processed == 1
            return
        found = (await flaky.other.list_pending_waitpoints(e)).entries
        [waitpoint_id] = [one.waitpoint_id for one in found if one.waitpoint_key == "k"]
        token = await flaky.other.read_token_of(e, waitpoint_id)
        assert token is not None
        await flaky.other.deliver_signal(flaky.waits.signal_args(e, "go", waitpoint_id, token))

    await lose_reply_after(flaky, call, concurrently)


async def test_a_satisfied_suspend_with_a_lost_reply_is_recognised(flaky: FlakyEnv) -> None:
    claim = await flaky.env.create_and_claim()
    p = await flaky.engine.create_waitpoint(claim.handle, "k", 60_000)
    await flaky.waits.send(claim.execution_id, "go", p)

    async def call() -> None:
        assert isinstance(await flaky.waits.suspend_on_pending(claim, p, ANY), ConditionAlreadySatisfied)

    message = MessageArgs(execution_id=claim.execution_id, mailbox="m", message_id=flaky.waits.new_id(), payload=b"hi")
    await lose_reply_after(flaky, call, lambda: flaky.other.send_message(message))

    assert [one.signal_name for one in await flaky.engine.observe_signals(claim.handle)] == ["go"]


async def test_a_resume_with_a_lost_reply_does_not_end_the_next_suspension(flaky: FlakyEnv) -> None:
    claim = await flaky.env.create_and_claim()
    await flaky.waits.suspend(claim)

    async def call() -> None:
        assert await flaky.engine.resume_execution(claim.execution_id) == Resumed(PublicState.WAITING)

    async def concurrently() -> None:
        claimed = await claim_one(flaky.other, worker_id="wz", worker_instance_id="wz-1")
        await flaky.other.suspend(claimed.handle, flaky.waits.args())

    await lose_reply_after(flaky, call, concurrently)

    assert await flaky.other.read_execution_state(claim.execution_id) is PublicState.SUSPENDED


@pytest.mark.parametrize("by", ["an operator", "the timeout"])
async def test_a_resume_with_a_lost_reply_is_recognised_after_the_next_claim(flaky: FlakyEnv, by: str) -> None:
    claim = await flaky.env.create_and_claim()
    timeout: dict[str, Any] = {"timeout_at": flaky.env.now, "timeout_behavior": TimeoutBehavior.AUTO_RESUME}
    await flaky.waits.suspend(claim, **(timeout if by == "the timeout" else {}))
    message = MessageArgs(execution_id=claim.execution_id, mailbox="m", message_id=flaky.waits.new_id(), payload=b"hi")

    async def call() -> None:
        if by == "the timeout":
            assert await flaky.engine.expire_suspension(claim.execution_id) is SuspensionExpiry.RESUMED
        else:
            assert await flaky.engine.resume_execution(claim.execution_id) == Resumed(PublicState.WAITING)

    async def concurrently() -> None:
        assert await flaky.other.claim("default", worker_id="wz", worker_instance_id="wz-1") is not None
        await flaky.other.send_message(message)

    await lose_reply_after(flaky, call, concurrently)


@pytest.mark.parametrize("loss", [Loss.REQUEST, Loss.UNSURE])
async def test_a_lost_resume_is_not_confused_with_another(flaky: FlakyEnv, loss: Loss) -> None:
    claim = await flaky.env.create_and_claim()
    await flaky.waits.suspend(claim)
    paused = flaky.faults.stop_before("commit")
    flaky.faults.lose("commit", loss)
    request = asyncio.ensure_future(flaky.engine.resume_execution(claim.execution_id))
    await paused.reached()
    await flaky.other.resume_execution(claim.execution_id)
    paused.release()

    with pytest.raises(errors.ExecutionNotSuspended):
        await request


async def test_a_frame_with_a_lost_reply_is_appended_once(flaky: FlakyEnv) -> None:
    claim = await flaky.env.create_and_claim()

    async def call() -> None:
        await flaky.engine.append_frame(claim.handle, b"mine")

    await lose_reply_after(flaky, call, lambda: flaky.other.append_frame(claim.handle, b"theirs"))

    page = await flaky.other.read_stream(claim.execution_id, 0)
    assert [frame.fields["payload"] for frame in page.frames] == ["mine", "theirs"]


async def test_a_late_frame_loses_against_a_concurrent_takeover(flaky: FlakyEnv) -> None:
    claim = await flaky.env.create_and_claim()
    await flaky.engine.append_frame(claim.handle, b"before")
    paused = flaky.faults.stop_before("commit")
    request = asyncio.create_task(flaky.engine.append_frame(claim.handle, b"late"))
    await paused.reached()
    flaky.env.clock.now = (await flaky.env.core(claim.execution_id))["lease_expires_at"]
    await claim_one(flaky.other, worker_id="wz", worker_instance_id="wz-1")
    paused.release()

    with pytest.raises(Exception, match="stale_owner_cannot_append"):
        await request

    page = await flaky.other.read_stream(claim.execution_id, 0)
    assert [frame.fields["payload"] for frame in page.frames] == ["before"]
    assert page.closed_reason == "lease_expired"
