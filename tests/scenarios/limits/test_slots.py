"""The life of a quota slot: got at the claim, kept over retries and lost leases, given back at every end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import WaitIndefinite
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.execution import Claimed, ClaimGrant, Completed, ReclaimCapExceeded
from flowfabric.model.answers.limits import Admitted, AlreadyAdmitted, ConcurrencyExceeded, RateExceeded
from flowfabric.model.outbox import OutboxMessage
from flowfabric.model.quota import QuotaSlot
from flowfabric.stores.queries import Scan
from flowfabric.testing import FlakyStore, Loss
from tests.scenarios.flowing import Flowing
from tests.scenarios.limits.test_quotas import Q2, Q, check, policy, root
from tests.scenarios.play import LEASE_MS, WAITING, Play
from tests.scenarios.scheduling.test_claims import QUOTA_BLOCKED, pull
from tests.scenarios.waits import Waits

LIMITED = {"quota_policy_ids": [Q]}
RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 500}}}
TIMED = {"timeout_policy": {"attempt_timeout_ms": 1000}}


async def take(play: Play, worker: str = "wa", **given: Any) -> Claimed:
    """One execution by way of admission."""
    [claimed] = await play.engine.claim_admitted(
        "default", worker_id=worker, worker_instance_id=f"{worker}-1", lease_ttl_ms=LEASE_MS, **given
    )
    return claimed


async def two(play: Play, terms: Any) -> tuple[str, str]:
    """Two executions, one older than the other."""
    first = await play.create(policy=terms)
    play.clock.advance_ms(1)
    return first, await play.create(policy=terms)


async def books(play: Play, policy_id: str = Q) -> tuple[int, int]:
    """The counter, and a recount."""
    await play.engine.outbox.wait_for_deliveries()
    slots: list[QuotaSlot] = await play.engine.runtime.scan(Scan(QuotaSlot))
    return (await root(play, policy_id)).active, sum(slot.quota_policy_id == policy_id for slot in slots)


async def completed(play: Play, held: Claimed) -> None:
    await play.engine.complete(held.handle)


async def completed_together_with_others(play: Play, held: Claimed) -> None:
    assert await play.engine.complete_many([(held.handle, b"r")]) == [Completed(held.execution_id)]


async def completed_by_an_operator(play: Play, held: Claimed) -> None:
    await play.engine.complete(execution_id=held.execution_id, source="operator_override")


async def failed(play: Play, held: Claimed) -> None:
    await play.engine.fail(held.handle, reason="no", category="permanent")


async def cancelled_by_its_holder(play: Play, held: Claimed) -> None:
    await play.engine.cancel(held.handle)


async def cancelled_by_an_operator(play: Play, held: Claimed) -> None:
    await play.engine.cancel_execution(held.execution_id)


async def cancelled_while_it_waits_for_a_retry(play: Play, held: Claimed) -> None:
    await play.engine.fail(held.handle, reason="flaky")
    await play.engine.cancel_execution(held.execution_id)


async def cancelled_while_it_is_suspended(play: Play, held: Claimed) -> None:
    await Waits(play).suspend(held)
    await play.engine.cancel_execution(held.execution_id)


async def suspended_for_too_long(play: Play, held: Claimed) -> None:
    await Waits(play).suspend(held, timeout_at=play.now + 10)
    play.clock.advance_ms(10)
    assert (await play.engine.sweep_once("suspension_timeout")).processed == 1


async def past_its_deadline(play: Play, held: Claimed) -> None:
    await play.engine.expire_execution(held.execution_id, "execution_deadline")


async def past_its_time(play: Play, held: Claimed) -> None:
    play.clock.advance_ms(1000)
    assert (await play.engine.sweep_once("attempt_timeout")).processed == 1


async def at_its_reclaim_cap(play: Play, held: Claimed) -> None:
    await play.expired(held)
    assert await play.reclaim(held.execution_id) == ReclaimCapExceeded(0)


ENDS = [
    completed,
    completed_together_with_others,
    completed_by_an_operator,
    failed,
    cancelled_by_its_holder,
    cancelled_by_an_operator,
    cancelled_while_it_waits_for_a_retry,
    cancelled_while_it_is_suspended,
    suspended_for_too_long,
    past_its_deadline,
    past_its_time,
    at_its_reclaim_cap,
]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
async def test_every_end_gives_the_slots_back_and_the_next_one_runs(
    play: Play, end: Callable[[Play, Claimed], Awaitable[None]]
) -> None:
    await policy(play, cap=1)
    await policy(play, Q2, cap=1)
    terms = {"quota_policy_ids": [Q, Q2], "max_reclaim_count": 0, **RETRY, **TIMED}
    first, second = await two(play, terms)
    held = await take(play)
    assert held.execution_id == first
    assert await pull(play) == []
    assert await play.vector(second) == QUOTA_BLOCKED
    assert await books(play) == (1, 1)

    await end(play, held)

    assert (await books(play), await books(play, Q2)) == ((0, 0), (0, 0))
    assert await play.vector(second) == WAITING, "the release woke it, no sweep did"
    assert (await take(play)).execution_id == second
    assert await play.engine.runtime.scan(Scan(OutboxMessage)) == []


@pytest.mark.parametrize("end", ["skipped", "cancelled"])
async def test_the_end_of_a_flow_s_member_gives_its_slot_back(play: Play, end: str) -> None:
    await policy(play, cap=1)
    flow = await Flowing(play.engine, play.clock).begin("b", policy=LIMITED)
    await flow.add("a")
    held = await take(play)
    assert (held.execution_id, await books(play)) == (flow.names["b"], (1, 1))

    if end == "skipped":
        await flow.stage("a", "b")
        await flow.apply("a", "b")
        await flow.cancel("a")
        await play.engine.dispatcher.wait_idle()
    else:
        await play.engine.cancel_flow(flow.id, wait=WaitIndefinite())

    assert (await flow.state("b"), await books(play)) == (end, (0, 0))


async def test_a_slot_is_kept_over_a_retry_a_delay_and_a_lost_lease(play: Play) -> None:
    await policy(play, cap=1)
    e = await play.create(policy=LIMITED | RETRY)
    waiting = await play.create(policy=LIMITED)
    held = await take(play)

    await play.engine.fail(held.handle, reason="flaky")
    await play.promoted(e)
    held = await take(play)
    assert (held.execution_id, held.lease_epoch) == (e, 2)
    await play.delayed(held)
    assert await pull(play) == []
    await play.promoted(e)
    held = await take(play)
    play.clock.advance_ms(LEASE_MS)
    held = await take(play, "wb")
    assert (held.execution_id, held.lease_epoch) == (e, 4)

    assert await books(play) == (1, 1)
    assert await play.vector(waiting) == QUOTA_BLOCKED
    await play.engine.complete(held.handle)
    assert await books(play) == (0, 0)


async def test_the_release_of_an_earlier_life_does_not_take_the_slot_of_a_later_one(play: Play) -> None:
    await policy(play, cap=1)
    e = await play.create(policy=LIMITED)
    engine = play.engine
    engine.runtime.write_listeners.pop(OutboxMessage)  # the process dies before it delivers
    await engine.complete((await take(play)).handle)
    [message] = await engine.runtime.scan(Scan(OutboxMessage))
    await engine.replay_execution(e)
    assert (await take(play)).execution_id == e, "its old slot is still there"

    await engine.outbox.deliver_outbox_message(message)
    await engine.outbox.deliver_outbox_message(message)

    assert await books(play) == (1, 1)
    assert await check(play, await play.create(), concurrency_cap=1) == ConcurrencyExceeded()


async def test_a_replay_needs_a_fresh_admission_though_its_slot_was_not_given_back_yet(play: Play) -> None:
    await policy(play, rate=1, cap=5)
    e = await play.create(policy=LIMITED)
    play.engine.runtime.write_listeners.pop(OutboxMessage)  # the process dies before it delivers
    await play.engine.complete((await take(play)).handle)
    await play.engine.replay_execution(e)

    assert await pull(play) == []

    assert await play.vector(e) == QUOTA_BLOCKED.replace("first", "replay")
    assert await check(play, e, rate_limit=1) == RateExceeded(60_000)


async def test_what_was_admitted_between_the_end_and_the_replay_is_for_the_life_to_come(play: Play) -> None:
    await policy(play, rate=2, cap=1)
    e = await play.create(policy=LIMITED)
    play.engine.runtime.write_listeners.pop(OutboxMessage)
    await play.engine.complete((await take(play)).handle)
    assert await check(play, e, rate_limit=2, concurrency_cap=1) == Admitted()
    play.clock.advance_ms(2000)
    assert (await play.engine.sweep_once("outbox_relay")).processed == 1
    await play.engine.replay_execution(e)

    assert (await take(play)).execution_id == e
    assert await books(play) == (1, 1)


async def test_the_release_of_an_earlier_life_does_not_take_what_an_application_had_admitted_since(play: Play) -> None:
    await policy(play, cap=1)
    e = await play.create(policy=LIMITED)
    play.engine.runtime.write_listeners.pop(OutboxMessage)
    await play.engine.complete((await take(play)).handle)
    await play.engine.replay_execution(e)
    assert await check(play, e, concurrency_cap=1) == Admitted()

    play.clock.advance_ms(2000)
    assert (await play.engine.sweep_once("outbox_relay")).processed == 1

    assert await books(play) == (1, 1)
    assert await check(play, e, concurrency_cap=1) == AlreadyAdmitted()


async def test_an_end_before_the_claim_gives_back_what_was_admitted_for_it(play: Play) -> None:
    await policy(play, cap=1)
    e = await play.create(policy=LIMITED)
    grant = await play.next_for()
    assert (grant.execution_id, await books(play)) == (e, (1, 1))

    await play.engine.cancel_execution(e)
    assert await books(play) == (0, 0)
    await play.engine.replay_execution(e)
    assert (await take(play)).execution_id == e
    assert await books(play) == (1, 1)


async def test_what_a_dead_process_did_not_deliver_the_relay_delivers(play: Play) -> None:
    await policy(play, cap=1)
    first, second = await two(play, LIMITED)
    held = await take(play)
    assert (held.execution_id, await pull(play)) == (first, [])
    play.engine.runtime.write_listeners.pop(OutboxMessage)
    await play.engine.complete(held.handle)
    assert await books(play) == (1, 1)

    survivor = Engine(play.engine.store, minter=SeededMinter(9))
    assert (await survivor.sweep_once("outbox_relay")).processed == 0, "the sender gets a head start"
    play.clock.advance_ms(2000)
    assert (await survivor.sweep_once("outbox_relay")).processed == 1

    assert await books(play) == (0, 0)
    assert await play.vector(second) == WAITING
    assert await play.engine.runtime.scan(Scan(OutboxMessage)) == []


async def test_a_message_that_nobody_takes_waits_longer_each_time(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    await policy(play, cap=1)
    await play.create(policy=LIMITED)
    held = await take(play)

    async def refuse(message: OutboxMessage) -> None:
        raise errors.StoreUnavailable("quota", backend="test", in_doubt=False)

    monkeypatch.setitem(play.engine.outbox._receivers, "release_admission", refuse)
    await play.engine.complete(held.handle)
    await play.engine.outbox.wait_for_deliveries()
    waits = []
    for _ in range(4):
        [message] = await play.engine.runtime.scan(Scan(OutboxMessage))
        waits.append(message.due_at - play.now)
        play.clock.now = message.due_at
        await play.engine.sweep_once("outbox_relay")

    assert waits == [2000, 2000, 4000, 8000]
    monkeypatch.undo()
    play.clock.advance_ms(60_000)
    assert (await play.engine.sweep_once("outbox_relay")).processed == 1
    assert await books(play) == (0, 0)


async def test_a_claim_that_fails_gives_back_exactly_its_own_admission(play: Play) -> None:
    await policy(play, cap=5)
    e = await play.create(policy=LIMITED)
    other = Engine(play.store.store, minter=SeededMinter(9))
    gate = play.slowed("commit")

    slow = asyncio.create_task(pull(play))
    await gate.reached()  # about to write its admission
    [fast] = await other.claim_admitted("default", worker_id="wb", worker_instance_id="wb-1")
    gate.release()

    assert (fast.execution_id, await slow) == (e, [])
    assert await books(play) == (1, 1), "the winner keeps its slot"


async def test_a_call_that_lost_the_claim_leaves_a_slot_alone_that_another_call_relies_on(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    await policy(play, cap=5)
    e = await play.create(policy=LIMITED)
    other = Engine(play.store.store, minter=SeededMinter(9))
    claiming = asyncio.Event()
    proceed = asyncio.Event()
    claim_row = play.engine.guarded_claims._claim_row

    async def late(*given: Any) -> Any:
        claiming.set()
        await proceed.wait()
        return await claim_row(*given)

    monkeypatch.setattr(play.engine.guarded_claims, "_claim_row", late)
    slow = asyncio.create_task(pull(play))
    await claiming.wait()  # admitted, not yet claimed
    [fast] = await other.claim_admitted("default", worker_id="wb", worker_instance_id="wb-1")
    proceed.set()

    assert (fast.execution_id, await slow) == (e, [])
    assert await books(play) == (1, 1)


async def test_room_that_is_made_while_work_is_being_blocked_is_not_missed(play: Play) -> None:
    await policy(play, cap=1)
    first, second = await two(play, LIMITED)
    held = await take(play)
    other = Engine(play.store.store, minter=SeededMinter(9))
    assert held.execution_id == first
    gate = play.slowed("commit")

    asking = asyncio.create_task(pull(play))
    await gate.reached()  # refused, and about to be blocked
    await other.complete(held.handle)
    await other.outbox.wait_for_deliveries()
    gate.release()

    assert await asking == [second], "blocked, woken and claimed in one call"


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("loss", [Loss.REPLY, Loss.UNSURE, Loss.REQUEST])
async def test_books_are_right_whichever_answer_is_lost(play: Play, after: int, loss: Loss) -> None:
    await policy(play, cap=1)
    first, second = await two(play, LIMITED)
    flaky = FlakyStore(play.engine.store)
    engine = Engine(flaky, minter=SeededMinter(5))
    flaky.lose("commit", loss, after=after)

    done = []
    for _ in range(10):
        for claimed in await engine.claim_admitted("default", 2, worker_id="wa", worker_instance_id="wa-1"):
            assert (await root(play)).active == 1
            await engine.complete(claimed.handle)
            done.append(claimed.execution_id)
        await engine.outbox.wait_for_deliveries()
        if len(done) == 2:
            break
        play.clock.advance_ms(LEASE_MS)  # a claim whose answer was lost for good is taken over
        await engine.sweep_once("outbox_relay")
        await engine.sweep_once("unblock")

    assert done == [first, second]
    assert [loss for _, loss in flaky.losses] == [loss]
    play.clock.advance_ms(60_000)
    await engine.sweep_once("outbox_relay")
    assert await books(play) == (0, 0)


async def test_a_grant_that_outlives_its_slot_gets_it_again_when_it_is_redeemed(play: Play) -> None:
    await policy(play, window=1, cap=1)
    first, second = await two(play, LIMITED)
    granted = await play.engine.claim_for_worker(
        "default", worker_id="wa", worker_instance_id="wa-1", grant_ttl_ms=60_000
    )
    assert isinstance(granted, ClaimGrant)
    play.clock.advance_ms(2000)
    await play.engine.reconcile_quota_counters((await root(play)).partition)
    assert await books(play) == (0, 0), "the slot lapsed with its window, and nothing runs"

    held = await play.claim(first, "wa")

    assert held.execution_id == first
    assert await books(play) == (1, 1)
    assert await pull(play) == [], "the cap is one"
    assert await play.vector(second) == QUOTA_BLOCKED


async def test_a_grant_whose_slot_went_to_another_execution_is_not_redeemed(play: Play) -> None:
    await policy(play, window=1, cap=1)
    first, second = await two(play, LIMITED)
    assert await play.engine.claim_for_worker("default", worker_id="wa", worker_instance_id="wa-1", grant_ttl_ms=60_000)
    play.clock.advance_ms(2000)
    await play.engine.reconcile_quota_counters((await root(play)).partition)
    other = await take(play, "wb")
    assert other.execution_id == second

    with pytest.raises(errors.ExecutionNotLeaseable):
        await play.claim(first, "wa")

    assert await books(play) == (1, 1)
    await play.engine.complete(other.handle)
    await play.engine.outbox.wait_for_deliveries()
    assert (await play.claim(first, "wa")).execution_id == first, "there is room again, and the grant still holds"
    assert await books(play) == (1, 1)
