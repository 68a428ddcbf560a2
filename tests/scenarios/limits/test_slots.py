"""Quota slots: acquired at the claim, kept over retries and takeovers, released by every terminal transition."""

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
from flowfabric.model.limits.quota import QuotaSlot
from flowfabric.model.outbox import OutboxMessage
from flowfabric.stores.queries import Scan
from flowfabric.testing import FlakyStore, Loss
from tests.scenarios.env import LEASE_MS, WAITING, Env
from tests.scenarios.flow_env import FlowEnv
from tests.scenarios.limits.test_quotas import Q2, Q, check, policy, root
from tests.scenarios.scheduling.test_claims import QUOTA_BLOCKED, claim_admitted
from tests.scenarios.waits import Waits

LIMITED = {"quota_policy_ids": [Q]}
RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 500}}}
TIMED = {"timeout_policy": {"attempt_timeout_ms": 1000}}


async def claim_admitted_one(env: Env, worker: str = "wa", **options: Any) -> Claimed:
    """Claim one execution with admission."""
    [claimed] = await env.engine.claim_admitted(
        "default", worker_id=worker, worker_instance_id=f"{worker}-1", lease_ttl_ms=LEASE_MS, **options
    )
    return claimed


async def create_two(env: Env, terms: Any) -> tuple[str, str]:
    """Create two executions, one older than the other."""
    first = await env.create(policy=terms)
    env.clock.advance_ms(1)
    return first, await env.create(policy=terms)


async def slot_counts(env: Env, policy_id: str = Q) -> tuple[int, int]:
    """Return the slot counter of a policy and the number of its slots."""
    await env.engine.outbox.wait_for_deliveries()
    slots: list[QuotaSlot] = await env.engine.runtime.scan(Scan(QuotaSlot))
    return (await root(env, policy_id)).active, sum(slot.quota_policy_id == policy_id for slot in slots)


async def completed(env: Env, claim: Claimed) -> None:
    await env.engine.complete(claim.handle)


async def completed_in_a_batch(env: Env, claim: Claimed) -> None:
    assert await env.engine.complete_many([(claim.handle, b"r")]) == [Completed(claim.execution_id)]


async def completed_by_an_operator(env: Env, claim: Claimed) -> None:
    await env.engine.complete(execution_id=claim.execution_id, source="operator_override")


async def failed(env: Env, claim: Claimed) -> None:
    await env.engine.fail(claim.handle, reason="no", category="permanent")


async def cancelled_by_its_holder(env: Env, claim: Claimed) -> None:
    await env.engine.cancel(claim.handle)


async def cancelled_by_an_operator(env: Env, claim: Claimed) -> None:
    await env.engine.cancel_execution(claim.execution_id)


async def cancelled_during_backoff(env: Env, claim: Claimed) -> None:
    await env.engine.fail(claim.handle, reason="flaky")
    await env.engine.cancel_execution(claim.execution_id)


async def cancelled_while_suspended(env: Env, claim: Claimed) -> None:
    await Waits(env).suspend(claim)
    await env.engine.cancel_execution(claim.execution_id)


async def suspension_timed_out(env: Env, claim: Claimed) -> None:
    await Waits(env).suspend(claim, timeout_at=env.now + 10)
    assert await env.sweep("suspension_timeout", after_ms=10) == 1


async def deadline_passed(env: Env, claim: Claimed) -> None:
    await env.engine.expire_execution(claim.execution_id, "execution_deadline")


async def attempt_timed_out(env: Env, claim: Claimed) -> None:
    assert await env.sweep("attempt_timeout", after_ms=1000) == 1


async def reclaimed_at_the_cap(env: Env, claim: Claimed) -> None:
    await env.expire_lease(claim)
    assert await env.reclaim(claim.execution_id) == ReclaimCapExceeded(0)


FINISHES = [
    completed,
    completed_in_a_batch,
    completed_by_an_operator,
    failed,
    cancelled_by_its_holder,
    cancelled_by_an_operator,
    cancelled_during_backoff,
    cancelled_while_suspended,
    suspension_timed_out,
    deadline_passed,
    attempt_timed_out,
    reclaimed_at_the_cap,
]


@pytest.mark.parametrize("finish", FINISHES, ids=lambda finish: finish.__name__)
async def test_every_terminal_transition_releases_the_slots_and_unblocks_the_next(
    env: Env, finish: Callable[[Env, Claimed], Awaitable[None]]
) -> None:
    await policy(env, cap=1)
    await policy(env, Q2, cap=1)
    terms = {"quota_policy_ids": [Q, Q2], "max_reclaim_count": 0, **RETRY, **TIMED}
    first, second = await create_two(env, terms)
    claim = await claim_admitted_one(env)
    assert claim.execution_id == first
    assert await claim_admitted(env) == []
    assert await env.vector(second) == QUOTA_BLOCKED
    assert await slot_counts(env) == (1, 1)

    await finish(env, claim)

    assert (await slot_counts(env), await slot_counts(env, Q2)) == ((0, 0), (0, 0))
    assert await env.vector(second) == WAITING, "the release unblocked it without a sweep"
    assert (await claim_admitted_one(env)).execution_id == second
    assert await env.engine.runtime.scan(Scan(OutboxMessage)) == []


@pytest.mark.parametrize("finish", ["skipped", "cancelled"])
async def test_a_skipped_or_cancelled_member_releases_its_slot(env: Env, finish: str) -> None:
    await policy(env, cap=1)
    flow = await FlowEnv(env.engine, env.clock).begin("b", policy=LIMITED)
    await flow.add("a")
    claim = await claim_admitted_one(env)
    assert (claim.execution_id, await slot_counts(env)) == (flow.names["b"], (1, 1))

    if finish == "skipped":
        await flow.stage("a", "b")
        await flow.apply("a", "b")
        await flow.cancel("a")
        await env.engine.dispatcher.wait_idle()
    else:
        await env.engine.cancel_flow(flow.id, wait=WaitIndefinite())

    assert (await flow.state("b"), await slot_counts(env)) == (finish, (0, 0))


async def test_a_slot_is_kept_over_a_retry_a_delay_and_a_takeover(env: Env) -> None:
    await policy(env, cap=1)
    e = await env.create(policy=LIMITED | RETRY)
    waiting = await env.create(policy=LIMITED)
    claim = await claim_admitted_one(env)

    await env.engine.fail(claim.handle, reason="flaky")
    await env.promote(e)
    claim = await claim_admitted_one(env)
    assert (claim.execution_id, claim.lease_epoch) == (e, 2)
    await env.delay(claim)
    assert await claim_admitted(env) == []
    await env.promote(e)
    claim = await claim_admitted_one(env)
    env.clock.advance_ms(LEASE_MS)
    claim = await claim_admitted_one(env, "wb")
    assert (claim.execution_id, claim.lease_epoch) == (e, 4)

    assert await slot_counts(env) == (1, 1)
    assert await env.vector(waiting) == QUOTA_BLOCKED
    await env.engine.complete(claim.handle)
    assert await slot_counts(env) == (0, 0)


async def test_a_late_release_from_before_a_replay_keeps_the_new_slot(env: Env) -> None:
    await policy(env, cap=1)
    e = await env.create(policy=LIMITED)
    engine = env.engine
    engine.runtime.write_listeners.pop(OutboxMessage)  # the process dies before it delivers
    await engine.complete((await claim_admitted_one(env)).handle)
    [message] = await engine.runtime.scan(Scan(OutboxMessage))
    await engine.replay_execution(e)
    assert (await claim_admitted_one(env)).execution_id == e, "its old slot is still there"

    await engine.outbox.deliver_outbox_message(message)
    await engine.outbox.deliver_outbox_message(message)

    assert await slot_counts(env) == (1, 1)
    assert await check(env, await env.create(), concurrency_cap=1) == ConcurrencyExceeded()


async def test_a_replay_needs_a_new_admission_while_its_old_slot_is_unreleased(env: Env) -> None:
    await policy(env, rate=1, cap=5)
    e = await env.create(policy=LIMITED)
    env.engine.runtime.write_listeners.pop(OutboxMessage)  # the process dies before it delivers
    await env.engine.complete((await claim_admitted_one(env)).handle)
    await env.engine.replay_execution(e)

    assert await claim_admitted(env) == []

    assert await env.vector(e) == QUOTA_BLOCKED.replace("first", "replay")
    assert await check(env, e, rate_limit=1) == RateExceeded(60_000)


async def test_an_admission_between_completion_and_replay_is_for_the_replay(env: Env) -> None:
    await policy(env, rate=2, cap=1)
    e = await env.create(policy=LIMITED)
    env.engine.runtime.write_listeners.pop(OutboxMessage)
    await env.engine.complete((await claim_admitted_one(env)).handle)
    assert await check(env, e, rate_limit=2, concurrency_cap=1) == Admitted()
    assert await env.sweep("outbox_relay", after_ms=2000) == 1
    await env.engine.replay_execution(e)

    assert (await claim_admitted_one(env)).execution_id == e
    assert await slot_counts(env) == (1, 1)


async def test_a_late_release_from_before_a_replay_keeps_an_explicit_admission(env: Env) -> None:
    await policy(env, cap=1)
    e = await env.create(policy=LIMITED)
    env.engine.runtime.write_listeners.pop(OutboxMessage)
    await env.engine.complete((await claim_admitted_one(env)).handle)
    await env.engine.replay_execution(e)
    assert await check(env, e, concurrency_cap=1) == Admitted()

    assert await env.sweep("outbox_relay", after_ms=2000) == 1

    assert await slot_counts(env) == (1, 1)
    assert await check(env, e, concurrency_cap=1) == AlreadyAdmitted()


async def test_a_cancel_before_the_claim_releases_the_admission(env: Env) -> None:
    await policy(env, cap=1)
    e = await env.create(policy=LIMITED)
    grant = await env.grant_next()
    assert (grant.execution_id, await slot_counts(env)) == (e, (1, 1))

    await env.engine.cancel_execution(e)
    assert await slot_counts(env) == (0, 0)
    await env.engine.replay_execution(e)
    assert (await claim_admitted_one(env)).execution_id == e
    assert await slot_counts(env) == (1, 1)


async def test_the_outbox_relay_delivers_after_a_process_died(env: Env) -> None:
    await policy(env, cap=1)
    first, second = await create_two(env, LIMITED)
    claim = await claim_admitted_one(env)
    assert (claim.execution_id, await claim_admitted(env)) == (first, [])
    env.engine.runtime.write_listeners.pop(OutboxMessage)
    await env.engine.complete(claim.handle)
    assert await slot_counts(env) == (1, 1)

    survivor = Engine(env.engine.store, minter=SeededMinter(9))
    assert (await survivor.sweep_once("outbox_relay")).processed == 0, "the relay waits for the sender"
    env.clock.advance_ms(2000)
    assert (await survivor.sweep_once("outbox_relay")).processed == 1

    assert await slot_counts(env) == (0, 0)
    assert await env.vector(second) == WAITING
    assert await env.engine.runtime.scan(Scan(OutboxMessage)) == []


async def test_an_undeliverable_outbox_message_is_retried_with_backoff(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    await policy(env, cap=1)
    await env.create(policy=LIMITED)
    claim = await claim_admitted_one(env)

    async def refuse(message: OutboxMessage) -> None:
        raise errors.StoreUnavailable("quota", backend="test", in_doubt=False)

    monkeypatch.setitem(env.engine.outbox._receivers, "release_admission", refuse)
    await env.complete_and_deliver(claim)
    waits = []
    for _ in range(4):
        [message] = await env.engine.runtime.scan(Scan(OutboxMessage))
        waits.append(message.due_at - env.now)
        env.clock.now = message.due_at
        await env.engine.sweep_once("outbox_relay")

    assert waits == [2000, 2000, 4000, 8000]
    monkeypatch.undo()
    assert await env.sweep("outbox_relay", after_ms=60_000) == 1
    assert await slot_counts(env) == (0, 0)


async def test_a_failed_claim_releases_only_its_own_admission(env: Env) -> None:
    await policy(env, cap=5)
    e = await env.create(policy=LIMITED)
    other = Engine(env.store.store, minter=SeededMinter(9))

    slow, [fast] = await env.race(
        claim_admitted(env), lambda: other.claim_admitted("default", worker_id="wb", worker_instance_id="wb-1")
    )

    assert (fast.execution_id, slow) == (e, [])
    assert await slot_counts(env) == (1, 1), "the winner keeps its slot"


async def test_a_call_that_lost_the_claim_keeps_a_slot_used_by_another_call(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    await policy(env, cap=5)
    e = await env.create(policy=LIMITED)
    other = Engine(env.store.store, minter=SeededMinter(9))
    claiming = asyncio.Event()
    proceed = asyncio.Event()
    claim_row = env.engine.guarded_claims._claim_row

    async def delayed_claim(*args: Any) -> Any:
        claiming.set()
        await proceed.wait()
        return await claim_row(*args)

    monkeypatch.setattr(env.engine.guarded_claims, "_claim_row", delayed_claim)
    slow = asyncio.create_task(claim_admitted(env))
    await claiming.wait()  # admitted, not yet claimed
    [fast] = await other.claim_admitted("default", worker_id="wb", worker_instance_id="wb-1")
    proceed.set()

    assert (fast.execution_id, await slow) == (e, [])
    assert await slot_counts(env) == (1, 1)


async def test_capacity_freed_during_a_block_is_not_missed(env: Env) -> None:
    await policy(env, cap=1)
    first, second = await create_two(env, LIMITED)
    claim = await claim_admitted_one(env)
    other = Engine(env.store.store, minter=SeededMinter(9))
    assert claim.execution_id == first

    claimed, _ = await env.race(claim_admitted(env), lambda: Env(other, env.clock).complete_and_deliver(claim))

    assert claimed == [second], "one call blocks, unblocks and claims it"


@pytest.mark.parametrize("after", range(4))
@pytest.mark.parametrize("loss", [Loss.REPLY, Loss.UNSURE, Loss.REQUEST])
async def test_slot_counts_are_right_whichever_message_is_lost(env: Env, after: int, loss: Loss) -> None:
    await policy(env, cap=1)
    first, second = await create_two(env, LIMITED)
    flaky = FlakyStore(env.engine.store)
    engine = Engine(flaky, minter=SeededMinter(5))
    flaky.lose("commit", loss, after=after)

    done = []
    for _ in range(10):
        for claimed in await engine.claim_admitted("default", 2, worker_id="wa", worker_instance_id="wa-1"):
            assert (await root(env)).active == 1
            await engine.complete(claimed.handle)
            done.append(claimed.execution_id)
        await engine.outbox.wait_for_deliveries()
        if len(done) == 2:
            break
        env.clock.advance_ms(LEASE_MS)  # a claim whose reply was lost is taken over
        await engine.sweep_once("outbox_relay")
        await engine.sweep_once("unblock")

    assert done == [first, second]
    assert [loss for _, loss in flaky.losses] == [loss]
    env.clock.advance_ms(60_000)
    await engine.sweep_once("outbox_relay")
    assert await slot_counts(env) == (0, 0)


async def test_a_grant_that_outlives_its_slot_is_admitted_again_when_redeemed(env: Env) -> None:
    await policy(env, window=1, cap=1)
    first, second = await create_two(env, LIMITED)
    granted = await env.engine.claim_for_worker(
        "default", worker_id="wa", worker_instance_id="wa-1", grant_ttl_ms=60_000
    )
    assert isinstance(granted, ClaimGrant)
    env.clock.advance_ms(2000)
    await env.engine.reconcile_quota_counters((await root(env)).partition)
    assert await slot_counts(env) == (0, 0), "the slot expired with its window"

    claim = await env.claim(first, "wa")

    assert claim.execution_id == first
    assert await slot_counts(env) == (1, 1)
    assert await claim_admitted(env) == [], "the cap is one"
    assert await env.vector(second) == QUOTA_BLOCKED


async def test_a_grant_whose_slot_went_to_another_execution_is_not_redeemed(env: Env) -> None:
    await policy(env, window=1, cap=1)
    first, second = await create_two(env, LIMITED)
    assert await env.engine.claim_for_worker("default", worker_id="wa", worker_instance_id="wa-1", grant_ttl_ms=60_000)
    env.clock.advance_ms(2000)
    await env.engine.reconcile_quota_counters((await root(env)).partition)
    other = await claim_admitted_one(env, "wb")
    assert other.execution_id == second

    with pytest.raises(errors.ExecutionNotLeaseable):
        await env.claim(first, "wa")

    assert await slot_counts(env) == (1, 1)
    await env.complete_and_deliver(other)
    assert (await env.claim(first, "wa")).execution_id == first, "a slot is free and the grant is live"
    assert await slot_counts(env) == (1, 1)
