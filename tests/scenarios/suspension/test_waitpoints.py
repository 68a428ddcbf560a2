"""SS-020 to SS-025: pending waitpoints and their listing."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.engine.operations.suspensions import ConditionAlreadySatisfied, Suspended
from flowfabric.model.answers.execution import Completed
from flowfabric.model.condition import AllConditions, CountKind, Single
from flowfabric.rules.suspension.arguments import FreshWaitpoint, UsePendingWaitpoint
from tests.scenarios.env import ACTIVE, LEASE_MS, Env
from tests.scenarios.waits import BUFFERED, SATISFIED, Waits, count, named, partition, printed_form


@pytest.mark.spec("SS-020")
async def test_a_suspend_activates_a_pending_waitpoint(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("kp", 60_000)
    e = claim.execution_id
    assert (await waits.record(e, pending.waitpoint_id)).state == "pending"

    env.clock.advance_ms(5)
    outcome = await waits.suspend_on_pending(claim, pending, Single("kp"), timeout_at=env.now + 90_000)

    assert isinstance(outcome, Suspended)
    details = outcome.details
    assert (details.waitpoint_id, details.waitpoint_key) == (pending.waitpoint_id, "kp")
    assert details.waitpoint_token == pending.token
    record = await waits.record(e, pending.waitpoint_id)
    assert (record.state, record.activated_at, record.expires_at) == ("active", env.now, env.now + 90_000)
    env.clock.advance_ms(60_000)  # the pending deadline no longer applies
    assert await env.sweep("pending_wp_expiry") == 0
    assert await waits.effect(e, "go", pending) == SATISFIED


@pytest.mark.spec("SS-021")
async def test_a_buffered_signal_satisfies_a_suspend(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("kp", 60_000)
    e = claim.execution_id
    assert await waits.effect(e, "callback", pending, payload=b"early") == BUFFERED
    before = await env.lease_feed(e)

    outcome = await waits.suspend_on_pending(claim, pending, named("callback", key="kp"))

    assert isinstance(outcome, ConditionAlreadySatisfied)
    details = outcome.details
    assert (details.waitpoint_id, details.waitpoint_key) == (pending.waitpoint_id, "kp")
    assert (details.waitpoint_token, details.additional_waitpoints) == (pending.token, [])
    assert await env.vector(e) == ACTIVE
    assert (await env.core(e))["current_lease_epoch"] == 1
    assert await env.lease_feed(e) == before
    record = await waits.record(e, pending.waitpoint_id)
    assert (record.state, record.close_reason, record.satisfied_at) == ("closed", "resumed", env.now)
    [observed] = await env.engine.observe_signals(claim.handle)
    assert (observed.signal_name, observed.payload) == ("callback", b"early")
    assert await env.engine.complete(claim.handle) == Completed(e)


@pytest.mark.spec("SS-021")
async def test_buffered_signals_satisfy_a_composite_condition(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("kp", 60_000)
    for name in ("a", "noise", "b"):
        assert await waits.effect(claim.execution_id, name, pending) == BUFFERED

    outcome = await waits.suspend_on_pending(claim, pending, named("a", "b", key="kp"))

    assert isinstance(outcome, ConditionAlreadySatisfied)
    observed = await env.engine.observe_signals(claim.handle)
    assert [signal.signal_name for signal in observed] == ["a", "b"]


@pytest.mark.spec("SS-022")
async def test_a_buffered_signal_counts_towards_the_condition(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("kp", 60_000)
    e = claim.execution_id
    assert await waits.effect(e, "ok", pending, source="alice") == BUFFERED

    assert isinstance(await waits.suspend_on_pending(claim, pending, count(2, count(1).count_kind, "kp")), Suspended)
    assert await waits.effect(e, "ok", pending, source="bob") == SATISFIED

    again = await env.grant_and_resume(e)
    observed = await env.engine.observe_signals(again.handle)
    assert [signal.source_identity for signal in observed] == ["alice", "bob"]


@pytest.mark.spec("SS-023")
async def test_an_expired_pending_waitpoint_is_closed_before_and_after_the_sweep(env: Env, waits: Waits) -> None:
    claim, e = await env.create_claimed(ttl=10 * LEASE_MS)
    pending = await env.engine.create_waitpoint(claim.handle, "kp", 1000)
    assert await waits.effect(e, "go", pending) == BUFFERED
    env.clock.advance_ms(1000)

    for swept in (False, True):
        async with env.refused(errors.WaitpointClosed):
            await waits.send(e, "go", pending)
        async with env.refused(errors.PendingWaitpointExpired):
            await waits.suspend_on_pending(claim, pending, Single("kp"))
        record = await waits.record(e, pending.waitpoint_id)
        assert (record.state, record.close_reason) == ("closed", "never_committed")
        assert await env.engine.read_waitpoint_token(partition(e), pending.waitpoint_id) is None
        assert (await env.engine.list_pending_waitpoints(e)).entries == []
        if not swept:
            assert await env.sweep("pending_wp_expiry") == 1
    assert await env.vector(e) == ACTIVE


@pytest.mark.spec("SS-023")
async def test_a_closed_pending_waitpoint_is_reported_as_expired_after_its_deadline(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("kp", 1000)
    await env.engine.close_waitpoint(pending.waitpoint_id)
    async with env.refused(errors.WaitpointNotPending):
        await waits.suspend_on_pending(claim, pending, Single("kp"))
    env.clock.advance_ms(1000)

    async with env.refused(errors.PendingWaitpointExpired):
        await waits.suspend_on_pending(claim, pending, Single("kp"))
    record = await waits.record(claim.execution_id, pending.waitpoint_id)
    assert (record.state, record.close_reason) == ("closed", "proactive_close")


@pytest.mark.spec("SS-023")
async def test_a_pending_waitpoint_is_open_until_its_last_millisecond(env: Env, waits: Waits) -> None:
    claim, pending = await waits.create_pending("kp", 1000)
    env.clock.advance_ms(999)

    assert await env.sweep("pending_wp_expiry") == 0
    assert await waits.effect(claim.execution_id, "go", pending) == BUFFERED


@pytest.mark.spec("SS-024")
async def test_the_list_of_pending_waitpoints_hides_tokens(env: Env, waits: Waits) -> None:
    claim, details = await waits.create_suspended(named("approve"), timeout_at=env.now + 1000)

    page = await env.engine.list_pending_waitpoints(claim.execution_id)

    [entry] = page.entries
    digest = details.waitpoint_token.reveal().partition(":")[2]
    assert (entry.state, entry.required_signal_names) == ("active", ["approve"])
    assert (entry.activated_at, entry.expires_at) == (env.now, env.now + 1000)
    assert (entry.token_kid, entry.token_fingerprint) == ("k1", digest[:16])
    assert digest not in printed_form(page)


@pytest.mark.spec("SS-025")
async def test_the_list_of_pending_waitpoints_is_paged(env: Env, waits: Waits) -> None:
    claim, e = await env.create_claimed()
    ids = sorted([(await env.engine.create_waitpoint(claim.handle, "k", 60_000)).waitpoint_id for _ in range(5)])
    c1, a1, c2, a2, a3 = ids
    for closed in (c1, c2):
        assert await env.engine.close_waitpoint(closed) is True

    first = await env.engine.list_pending_waitpoints(e, limit=2)
    assert ([entry.waitpoint_id for entry in first.entries], first.next_cursor) == ([a1, a2], a2)
    last = await env.engine.list_pending_waitpoints(e, after=a2, limit=2)
    assert ([entry.waitpoint_id for entry in last.entries], last.next_cursor) == ([a3], None)
    for limit, length in ((None, 3), (0, 1), (-3, 1), (5000, 3)):
        page = await env.engine.list_pending_waitpoints(e, limit=limit)
        assert len(page.entries) == length
    async with env.refused(errors.NotFound, entity="execution"):
        await env.engine.list_pending_waitpoints(env.engine.new_execution_id())


@pytest.mark.spec("SS-025")
async def test_a_page_of_pending_waitpoints_has_100_entries_and_at_most_1000(env: Env, waits: Waits) -> None:
    claim = await env.create_and_claim()
    extra = await env.engine.create_waitpoint(claim.handle, "extra", 60_000)
    fresh = [FreshWaitpoint(waits.new_id(), f"k{n}") for n in range(1000)]
    keys = [one.waitpoint_key for one in fresh]
    await waits.suspend(claim, count(1, CountKind.DISTINCT_SIGNALS, *keys), *fresh)
    order = sorted([extra.waitpoint_id, *(one.waitpoint_id for one in fresh)])

    for limit, length in ((None, 100), (0, 1), (1000, 1000), (1001, 1000), (5000, 1000)):
        page = await env.engine.list_pending_waitpoints(claim.execution_id, limit=limit)
        assert ([entry.waitpoint_id for entry in page.entries], page.next_cursor) == (order[:length], order[length - 1])
    last = await env.engine.list_pending_waitpoints(claim.execution_id, after=order[999], limit=5000)
    assert ([entry.waitpoint_id for entry in last.entries], last.next_cursor) == (order[1000:], None)


@pytest.mark.spec("SS-025")
async def test_waitpoints_of_closed_suspensions_are_not_listed(env: Env, waits: Waits) -> None:
    claim, e = await env.create_claimed()
    for _ in range(7):
        details = await waits.suspend(claim)
        await waits.send(e, "go", details)
        claim = await env.grant_and_resume(e, f"w{_}")
    open_one = await waits.suspend(claim)

    page = await env.engine.list_pending_waitpoints(e, limit=1)

    assert [entry.waitpoint_id for entry in page.entries] == [open_one.waitpoint_id]
    assert page.next_cursor is None


async def test_closing_an_active_waitpoint_refuses_signals_and_does_not_resume(env: Env, waits: Waits) -> None:
    both = AllConditions((Single("a"), Single("b")))
    claim, a = await waits.create_suspended(
        both, FreshWaitpoint(waits.new_id(), "a"), FreshWaitpoint(waits.new_id(), "b")
    )
    e, [b] = claim.execution_id, a.additional_waitpoints
    before = await env.vector(e)

    assert await env.engine.close_waitpoint(a.waitpoint_id) is True
    assert await env.engine.close_waitpoint(a.waitpoint_id) is False

    assert await env.vector(e) == before
    assert (await waits.record(e, a.waitpoint_id)).close_reason == "proactive_close"
    async with env.refused(errors.WaitpointClosed):
        await waits.send(e, "go", a)
    assert await waits.effect(e, "go", b) == "appended_to_waitpoint"
    async with env.refused(errors.WaitpointNotFound):
        await env.engine.close_waitpoint(waits.new_id())


async def test_a_pending_waitpoint_is_bound_to_its_execution_and_attempt(env: Env, waits: Waits) -> None:
    claim, other = await env.create_and_claim(), await env.create_and_claim()
    pending = await env.engine.create_waitpoint(claim.handle, "kp", 3_600_000)

    async with env.refused(errors.InvalidWaitpointForExecution):
        await waits.suspend_on_pending(other, pending, Single("kp"))
    async with env.refused(errors.InvalidInput, "waitpoint_key_mismatch"):
        await waits.suspend_on_pending(claim, pending, Single("other"))
    await env.expire_lease(claim)
    later = await env.grant_and_reclaim(claim.execution_id)
    async with env.refused(errors.InvalidWaitpointForExecution):
        await waits.suspend_on_pending(later, pending, Single("kp"))


async def test_a_pending_waitpoint_of_another_partition_is_refused(env: Env, waits: Waits) -> None:
    claim, other = await env.create_and_claim(), await env.create_and_claim(lane="elsewhere")
    assert partition(claim.execution_id) != partition(other.execution_id)
    pending = await env.engine.create_waitpoint(claim.handle, "kp", 1000)

    async with env.refused(errors.InvalidWaitpointForExecution):
        await waits.suspend_on_pending(other, pending, Single("kp"))
    env.clock.advance_ms(1000)
    async with env.refused(errors.PendingWaitpointExpired):
        await waits.suspend_on_pending(other, pending, Single("kp"))
    async with env.refused(errors.WaitpointNotFound):
        await env.engine.suspend(other.handle, waits.args(Single("kp"), UsePendingWaitpoint(waits.new_id())))


async def test_a_waitpoint_is_created_only_under_a_live_lease(env: Env, waits: Waits) -> None:
    claim, e = await env.create_claimed()
    env.clock.advance_ms(LEASE_MS)
    async with env.refused(errors.LeaseExpired):
        await env.engine.create_waitpoint(claim.handle, "k", 1000)
    await env.engine.mark_lease_expired_if_due(e)
    async with env.refused(errors.NoActiveLease):
        await env.engine.create_waitpoint(claim.handle, "k", 1000)
    later = await env.grant_and_reclaim(e)
    async with env.refused(errors.StaleLease):
        await env.engine.create_waitpoint(claim.handle, "k", 1000)
    await env.engine.complete(later.handle)
    async with env.refused(errors.ExecutionNotActive):
        await env.engine.create_waitpoint(later.handle, "k", 1000)
    assert (await env.engine.list_pending_waitpoints(e)).entries == []


async def test_a_waitpoint_expiry_is_capped_at_the_largest_instant(env: Env, waits: Waits) -> None:
    claim = await env.create_and_claim()

    pending = await env.engine.create_waitpoint(claim.handle, "k", 2**63 - 1)

    assert (await waits.record(claim.execution_id, pending.waitpoint_id)).expires_at == 2**63 - 1


async def test_a_waitpoint_expiry_saturates_at_the_largest_instant(env: Env, waits: Waits) -> None:
    claim = await env.create_and_claim()
    most = 2**63 - 1
    for length, end in (
        (2**62, env.now + 2**62),
        (most - env.now, most),
        (most - env.now - 1, most - 1),
        (most - env.now + 1, most),
        (most, most),
    ):
        made = await env.engine.create_waitpoint(claim.handle, "kp", length)
        record = await waits.record(claim.execution_id, made.waitpoint_id)
        assert (record.state, record.expires_at) == ("pending", end)
