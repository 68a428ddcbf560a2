"""Whatever becomes of the wire, a call about waiting work does what it says once, and says what it did."""

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
from tests.scenarios.play import Play
from tests.scenarios.waits import ANY, SATISFIED, Waits


class Stage:
    """An engine on a wire that can be cut, and another one on a wire that holds."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.wire = FlakyStore(store)
        self.engine = Engine(self.wire, minter=SeededMinter(1))
        self.other = Engine(store, minter=SeededMinter(2))
        self.play = Play(self.engine, clock)
        self.waits = Waits(self.play)
        self.store = store

    async def rows(self, table: str) -> list[Any]:
        from tests.scenarios.watched import dump

        return (await dump(self.store))[table]


@pytest.fixture
async def stage(store: Store, clock: ManualClock) -> Stage:
    stage = Stage(store, clock)
    await stage.engine.seed_waitpoint_hmac_secret("k1", "00" * 32)
    return stage


Verb = Callable[[Stage, Claimed], Awaitable[Callable[[], Awaitable[None]]]]


async def suspend(stage: Stage, held: Claimed) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        outcome = await stage.engine.suspend(held.handle, stage.waits.args())
        assert isinstance(outcome, Suspended)
        assert len(await stage.rows("ff_waitpoint")) == 1
        assert await stage.waits.effect(held.execution_id, "go", outcome.details) == SATISFIED

    return call


async def create_waitpoint(stage: Stage, held: Claimed) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        made = await stage.engine.create_waitpoint(held.handle, "k", 60_000)
        assert [row.waitpoint_id for row in await stage.rows("ff_waitpoint")] == [made.waitpoint_id]

    return call


async def close_waitpoint(stage: Stage, held: Claimed) -> Callable[[], Awaitable[None]]:
    made = await stage.engine.create_waitpoint(held.handle, "k", 60_000)

    async def call() -> None:
        assert await stage.engine.close_waitpoint(made.waitpoint_id) is True

    return call


async def deliver_signal(stage: Stage, held: Claimed) -> Callable[[], Awaitable[None]]:
    p = await stage.waits.suspend(held, OperatorOnly())

    async def call() -> None:
        accepted = await stage.waits.send(held.execution_id, "go", p)
        assert isinstance(accepted, Accepted)
        assert [row.signal_id for row in await stage.rows("ff_signal")] == [accepted.signal_id]
        assert len(await stage.waits.signals_told()) == 1

    return call


async def resuming_signal(stage: Stage, held: Claimed) -> Callable[[], Awaitable[None]]:
    p = await stage.waits.suspend(held)

    async def call() -> None:
        assert await stage.waits.effect(held.execution_id, "go", p) == SATISFIED
        again = await stage.play.resumed(held.execution_id)
        assert len(await stage.engine.observe_signals(again.handle)) == 1

    return call


async def resume_execution(stage: Stage, held: Claimed) -> Callable[[], Awaitable[None]]:
    await stage.waits.suspend(held)

    async def call() -> None:
        await stage.engine.resume_execution(held.execution_id)

    return call


async def expire_suspension(stage: Stage, held: Claimed) -> Callable[[], Awaitable[None]]:
    await stage.waits.suspend(held, timeout_at=stage.play.now)

    async def call() -> None:
        assert await stage.engine.expire_suspension(held.execution_id) is SuspensionExpiry.FAILED
        assert await stage.play.outcomes() == ["failed"]

    return call


async def append_frame(stage: Stage, held: Claimed) -> Callable[[], Awaitable[None]]:
    await stage.engine.append_frame(held.handle, b"one")

    async def call() -> None:
        appended = await stage.engine.append_frame(held.handle, b"two")
        assert isinstance(appended, Appended)
        assert appended.frame_count == 2
        page = await stage.engine.read_stream(held.execution_id, 0)
        assert [frame.fields["payload"] for frame in page.frames] == ["one", "two"]

    return call


async def send_message(stage: Stage, held: Claimed) -> Callable[[], Awaitable[None]]:
    args = MessageArgs(execution_id=held.execution_id, mailbox="m", message_id=stage.waits.id(), payload=b"hi")

    async def call() -> None:
        assert isinstance(await stage.engine.send_message(args), Accepted)
        assert [row.message_id for row in await stage.rows("ff_mail")] == [args.message_id]

    return call


async def open_gate(stage: Stage, held: Claimed) -> Callable[[], Awaitable[None]]:
    args = GateArgs(name="nap", kind=GateKind.TIMER, expires_in_ms=1000)

    async def call() -> None:
        assert isinstance(await stage.engine.open_gate(held.handle, args), OpenedGate)

    return call


async def park(stage: Stage, held: Claimed) -> Callable[[], Awaitable[None]]:
    await (await open_gate(stage, held))()

    async def call() -> None:
        assert isinstance(await stage.engine.park(held.handle, ("nap",)), ParkResult)

    return call


async def record_step(stage: Stage, held: Claimed) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        memo = await stage.engine.record_step(held.handle, "pay", 0, b"receipt")
        assert [row.result for row in await stage.rows("ff_step")] == [memo.result]

    return call


VERBS: list[Verb] = [
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
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
async def test_a_call_is_done_once_whatever_is_lost(stage: Stage, verb: Verb, loss: Loss) -> None:
    call = await verb(stage, await stage.play.claimed())
    stage.wire.lose("commit", loss)

    await call()

    assert len(stage.wire.losses) == 1
    await check_invariants(stage.other)


async def overtaken(stage: Stage, call: Callable[[], Awaitable[None]], meanwhile: Callable[[], Awaitable[Any]]) -> None:
    """The call is written, somebody else writes over it, and only then its answer is lost."""
    done = stage.wire.stop_after("commit")
    stage.wire.lose("commit", Loss.REPLY)
    running = asyncio.ensure_future(call())
    await done.reached()
    await meanwhile()
    done.release()
    await running
    assert len(stage.wire.losses) == 1


async def test_a_signal_that_others_followed_before_its_answer_was_lost_counts_once(stage: Stage) -> None:
    held = await stage.play.claimed()
    p = await stage.waits.suspend(held, OperatorOnly())

    async def call() -> None:
        assert isinstance(await stage.waits.send(held.execution_id, "mine", p), Accepted)

    async def meanwhile() -> None:
        other = stage.waits.signal(held.execution_id, "theirs", p.waitpoint_id, p.waitpoint_token)
        await stage.other.deliver_signal(other)

    await overtaken(stage, call, meanwhile)

    assert [row.signal_name for row in await stage.rows("ff_signal")] == ["mine", "theirs"]
    assert (await stage.waits.record(held.execution_id, p.waitpoint_id)).signal_count == 2


@pytest.mark.parametrize("key", [None, "i1"])
async def test_the_same_signal_sent_twice_is_told_twice_though_one_got_lost_on_the_way(
    stage: Stage, key: str | None
) -> None:
    held = await stage.play.claimed()
    p = await stage.waits.suspend(held, OperatorOnly())
    e = held.execution_id
    signal = stage.waits.signal(e, "go", p.waitpoint_id, p.waitpoint_token, idempotency_key=key)
    stopped = stage.wire.stop_before("commit")
    stage.wire.lose("commit", Loss.UNSURE)
    late = asyncio.ensure_future(stage.engine.deliver_signal(signal))
    await stopped.reached()
    first = await stage.other.deliver_signal(signal)
    stopped.release()

    assert isinstance(first, Accepted)
    assert await late == (first if key is None else DuplicateDelivery(signal.signal_id))

    kept = 2 if key is None else 1
    assert (await stage.waits.record(e, p.waitpoint_id)).signal_count == kept == len(await stage.rows("ff_signal"))
    assert [news.effect for news in await stage.waits.signals_told(e)][1:] == [
        "Other(no_op)" if key is None else "Deduped"
    ]


async def test_each_repetition_is_told_though_one_got_lost_on_the_way(stage: Stage) -> None:
    held = await stage.play.claimed()
    p = await stage.waits.suspend(held, OperatorOnly())
    e = held.execution_id
    signal = stage.waits.signal(e, "go", p.waitpoint_id, p.waitpoint_token, idempotency_key="i1")
    await stage.engine.deliver_signal(signal)
    assert await stage.engine.deliver_signal(signal) == DuplicateDelivery(signal.signal_id)
    stage.wire.lose("commit", Loss.UNSURE)

    assert await stage.engine.deliver_signal(signal) == DuplicateDelivery(signal.signal_id)

    assert [news.effect for news in await stage.waits.signals_told(e)] == ["Other(no_op)", "Deduped", "Deduped"]


async def test_the_resuming_signal_is_recognised_after_the_work_went_on(stage: Stage) -> None:
    held = await stage.play.claimed()
    p = await stage.waits.suspend(held)

    async def call() -> None:
        assert await stage.waits.effect(held.execution_id, "go", p) == SATISFIED

    async def meanwhile() -> None:
        claimed = await stage.other.claim("default", worker_id="wz", worker_instance_id="wz-1")
        assert claimed is not None
        await stage.other.complete(claimed.handle)

    await overtaken(stage, call, meanwhile)


async def test_a_message_that_was_received_before_its_answer_was_lost_is_not_sent_again(stage: Stage) -> None:
    held = await stage.play.claimed()
    receive = GateArgs(name="r0", kind=GateKind.MAILBOX, mailbox="m")

    async def call() -> None:
        args = MessageArgs(execution_id=held.execution_id, mailbox="m", message_id=stage.waits.id(), payload=b"mine")
        assert isinstance(await stage.engine.send_message(args), Accepted)

    await overtaken(stage, call, lambda: stage.other.open_gate(held.handle, receive))

    assert await stage.rows("ff_mail") == []
    assert (await stage.other.read_waits(held.execution_id)).memos["r0"].payload == b"mine"


async def test_a_signal_that_left_the_log_before_its_answer_was_lost_counts_once(stage: Stage) -> None:
    held = await stage.play.claimed()
    p = await stage.waits.suspend(held, OperatorOnly())

    async def call() -> None:
        assert isinstance(await stage.waits.send(held.execution_id, "mine", p), Accepted)

    async def meanwhile() -> None:
        other = stage.waits.signal(held.execution_id, "theirs", p.waitpoint_id, p.waitpoint_token, signal_maxlen=1)
        await stage.other.deliver_signal(other)

    await overtaken(stage, call, meanwhile)

    assert [row.signal_name for row in await stage.rows("ff_signal")] == ["theirs"]
    assert (await stage.waits.record(held.execution_id, p.waitpoint_id)).signal_count == 2


@pytest.mark.parametrize("expires_in", [0, 60_000], ids=["swept", "signalled"])
async def test_a_waitpoint_that_others_came_to_before_its_answer_was_lost_is_made_once(
    stage: Stage, expires_in: int
) -> None:
    held = await stage.play.claimed()
    e = held.execution_id
    first = await stage.engine.create_waitpoint(held.handle, "first", 60_000)

    async def call() -> None:
        async with asyncio.timeout(20):
            made = await stage.engine.create_waitpoint(held.handle, "k", expires_in)
        waitpoints = {row.waitpoint_id for row in await stage.rows("ff_waitpoint")}
        assert waitpoints == {first.waitpoint_id, made.waitpoint_id}

    async def meanwhile() -> None:
        if not expires_in:
            assert (await stage.other.sweep_once("pending_wp_expiry")).processed == 1
            return
        found = (await stage.other.list_pending_waitpoints(e)).entries
        [waitpoint_id] = [one.waitpoint_id for one in found if one.waitpoint_key == "k"]
        token = await stage.other.read_token_of(e, waitpoint_id)
        assert token is not None
        await stage.other.deliver_signal(stage.waits.signal(e, "go", waitpoint_id, token))

    await overtaken(stage, call, meanwhile)


async def test_a_wait_that_was_over_at_once_is_still_known_when_its_answer_was_lost(stage: Stage) -> None:
    held = await stage.play.claimed()
    p = await stage.engine.create_waitpoint(held.handle, "k", 60_000)
    await stage.waits.send(held.execution_id, "go", p)

    async def call() -> None:
        assert isinstance(await stage.waits.on_pending(held, p, ANY), ConditionAlreadySatisfied)

    message = MessageArgs(execution_id=held.execution_id, mailbox="m", message_id=stage.waits.id(), payload=b"hi")
    await overtaken(stage, call, lambda: stage.other.send_message(message))

    assert [one.signal_name for one in await stage.engine.observe_signals(held.handle)] == ["go"]


async def test_a_resume_whose_answer_was_lost_does_not_end_the_next_wait(stage: Stage) -> None:
    held = await stage.play.claimed()
    await stage.waits.suspend(held)

    async def call() -> None:
        assert await stage.engine.resume_execution(held.execution_id) == Resumed(PublicState.WAITING)

    async def meanwhile() -> None:
        claimed = await stage.other.claim("default", worker_id="wz", worker_instance_id="wz-1")
        assert claimed is not None
        await stage.other.suspend(claimed.handle, stage.waits.args())

    await overtaken(stage, call, meanwhile)

    assert await stage.other.read_execution_state(held.execution_id) is PublicState.SUSPENDED


async def test_a_resume_whose_answer_was_lost_is_known_after_the_work_went_on(stage: Stage) -> None:
    held = await stage.play.claimed()
    await stage.waits.suspend(held)
    message = MessageArgs(execution_id=held.execution_id, mailbox="m", message_id=stage.waits.id(), payload=b"hi")

    async def call() -> None:
        assert await stage.engine.resume_execution(held.execution_id) == Resumed(PublicState.WAITING)

    async def meanwhile() -> None:
        assert await stage.other.claim("default", worker_id="wz", worker_instance_id="wz-1") is not None
        await stage.other.send_message(message)

    await overtaken(stage, call, meanwhile)


async def test_a_timeout_whose_answer_was_lost_is_known_after_the_work_went_on(stage: Stage) -> None:
    held = await stage.play.claimed()
    await stage.waits.suspend(held, timeout_at=stage.play.now, timeout_behavior=TimeoutBehavior.AUTO_RESUME)
    message = MessageArgs(execution_id=held.execution_id, mailbox="m", message_id=stage.waits.id(), payload=b"hi")

    async def call() -> None:
        assert await stage.engine.expire_suspension(held.execution_id) is SuspensionExpiry.RESUMED

    async def meanwhile() -> None:
        assert await stage.other.claim("default", worker_id="wz", worker_instance_id="wz-1") is not None
        await stage.other.send_message(message)

    await overtaken(stage, call, meanwhile)


@pytest.mark.parametrize("loss", [Loss.REQUEST, Loss.UNSURE])
async def test_a_resume_that_never_arrived_is_not_taken_for_another_s(stage: Stage, loss: Loss) -> None:
    held = await stage.play.claimed()
    await stage.waits.suspend(held)
    stopped = stage.wire.stop_before("commit")
    stage.wire.lose("commit", loss)
    late = asyncio.ensure_future(stage.engine.resume_execution(held.execution_id))
    await stopped.reached()
    await stage.other.resume_execution(held.execution_id)
    stopped.release()

    with pytest.raises(errors.ExecutionNotSuspended):
        await late


async def test_frames_that_were_followed_before_their_answer_was_lost_stand_once(stage: Stage) -> None:
    held = await stage.play.claimed()

    async def call() -> None:
        await stage.engine.append_frame(held.handle, b"mine")

    await overtaken(stage, call, lambda: stage.other.append_frame(held.handle, b"theirs"))

    page = await stage.other.read_stream(held.execution_id, 0)
    assert [frame.fields["payload"] for frame in page.frames] == ["mine", "theirs"]


async def test_a_stale_owner_s_frame_loses_against_a_reclaim_that_came_between(stage: Stage) -> None:
    held = await stage.play.claimed()
    await stage.engine.append_frame(held.handle, b"before")
    stopped = stage.wire.stop_before("commit")
    late = asyncio.create_task(stage.engine.append_frame(held.handle, b"late"))
    await stopped.reached()
    stage.play.clock.now = (await stage.play.core(held.execution_id))["lease_expires_at"]
    taken = await stage.other.claim("default", worker_id="wz", worker_instance_id="wz-1")
    assert taken is not None
    stopped.release()

    with pytest.raises(Exception, match="stale_owner_cannot_append"):
        await late

    page = await stage.other.read_stream(held.execution_id, 0)
    assert [frame.fields["payload"] for frame in page.frames] == ["before"]
    assert page.closed_reason == "lease_expired"
