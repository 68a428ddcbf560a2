"""SS-020 to SS-025: waitpoints that are there before the wait, and how reviewers see them."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.engine.operations.suspensions import ConditionAlreadySatisfied, Suspended
from flowfabric.model.answers.execution import Completed
from flowfabric.model.condition import AllConditions, CountKind, Single
from flowfabric.rules.suspension.arguments import FreshWaitpoint, UsePendingWaitpoint
from tests.scenarios.play import ACTIVE, LEASE_MS, Play
from tests.scenarios.waits import BUFFERED, SATISFIED, Waits, count, named, partition, plain


@pytest.mark.spec("SS-020")
async def test_pending_then_activate(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e = held.execution_id
    pending = await play.engine.create_waitpoint(held.handle, "kp", 60_000)
    assert (await waits.record(e, pending.waitpoint_id)).state == "pending"

    play.clock.advance_ms(5)
    outcome = await waits.on_pending(held, pending, Single("kp"), timeout_at=play.now + 90_000)

    assert isinstance(outcome, Suspended)
    details = outcome.details
    assert (details.waitpoint_id, details.waitpoint_key) == (pending.waitpoint_id, "kp")
    assert details.waitpoint_token == pending.token
    record = await waits.record(e, pending.waitpoint_id)
    assert (record.state, record.activated_at, record.expires_at) == ("active", play.now, play.now + 90_000)
    play.clock.advance_ms(60_000)  # its own deadline as a pending one means nothing any more
    assert (await play.engine.sweep_once("pending_wp_expiry")).processed == 0
    assert await waits.effect(e, "go", pending) == SATISFIED


@pytest.mark.spec("SS-021")
async def test_buffered_signal_satisfies(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e = held.execution_id
    pending = await play.engine.create_waitpoint(held.handle, "kp", 60_000)
    assert await waits.effect(e, "callback", pending, payload=b"early") == BUFFERED
    before = await play.lease_feed(e)

    outcome = await waits.on_pending(held, pending, named("callback", key="kp"))

    assert isinstance(outcome, ConditionAlreadySatisfied)
    details = outcome.details
    assert (details.waitpoint_id, details.waitpoint_key) == (pending.waitpoint_id, "kp")
    assert (details.waitpoint_token, details.additional_waitpoints) == (pending.token, [])
    assert await play.vector(e) == ACTIVE
    assert (await play.core(e))["current_lease_epoch"] == 1
    assert await play.lease_feed(e) == before
    record = await waits.record(e, pending.waitpoint_id)
    assert (record.state, record.close_reason, record.satisfied_at) == ("closed", "resumed", play.now)
    [observed] = await play.engine.observe_signals(held.handle)
    assert (observed.signal_name, observed.payload) == ("callback", b"early")
    assert await play.engine.complete(held.handle) == Completed(e)


@pytest.mark.spec("SS-021")
async def test_a_composite_is_satisfied_from_the_buffer_too(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    pending = await play.engine.create_waitpoint(held.handle, "kp", 60_000)
    for name in ("a", "noise", "b"):
        assert await waits.effect(held.execution_id, name, pending) == BUFFERED

    outcome = await waits.on_pending(held, pending, named("a", "b", key="kp"))

    assert isinstance(outcome, ConditionAlreadySatisfied)
    observed = await play.engine.observe_signals(held.handle)
    assert [signal.signal_name for signal in observed] == ["a", "b"]


@pytest.mark.spec("SS-022")
async def test_partial_buffer(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e = held.execution_id
    pending = await play.engine.create_waitpoint(held.handle, "kp", 60_000)
    assert await waits.effect(e, "ok", pending, source="alice") == BUFFERED

    assert isinstance(await waits.on_pending(held, pending, count(2, count(1).count_kind, "kp")), Suspended)
    assert await waits.effect(e, "ok", pending, source="bob") == SATISFIED

    again = await play.resumed(e)
    observed = await play.engine.observe_signals(again.handle)
    assert [signal.source_identity for signal in observed] == ["alice", "bob"]


@pytest.mark.spec("SS-023")
async def test_pending_expiry(play: Play, waits: Waits) -> None:
    held = await play.claimed(ttl=10 * LEASE_MS)
    e = held.execution_id
    pending = await play.engine.create_waitpoint(held.handle, "kp", 1000)
    assert await waits.effect(e, "go", pending) == BUFFERED
    play.clock.advance_ms(1000)

    for swept in (False, True):
        async with play.refused(errors.WaitpointClosed):
            await waits.send(e, "go", pending)
        async with play.refused(errors.PendingWaitpointExpired):
            await waits.on_pending(held, pending, Single("kp"))
        record = await waits.record(e, pending.waitpoint_id)
        assert (record.state, record.close_reason) == ("closed", "never_committed")
        assert await play.engine.read_waitpoint_token(partition(e), pending.waitpoint_id) is None
        assert (await play.engine.list_pending_waitpoints(e)).entries == []
        if not swept:
            assert (await play.engine.sweep_once("pending_wp_expiry")).processed == 1
    assert await play.vector(e) == ACTIVE


@pytest.mark.spec("SS-023")
async def test_one_that_was_closed_by_hand_is_too_late_too_once_its_time_is_over(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    pending = await play.engine.create_waitpoint(held.handle, "kp", 1000)
    await play.engine.close_waitpoint(pending.waitpoint_id)
    async with play.refused(errors.WaitpointNotPending):
        await waits.on_pending(held, pending, Single("kp"))
    play.clock.advance_ms(1000)

    async with play.refused(errors.PendingWaitpointExpired):
        await waits.on_pending(held, pending, Single("kp"))
    record = await waits.record(held.execution_id, pending.waitpoint_id)
    assert (record.state, record.close_reason) == ("closed", "proactive_close")


@pytest.mark.spec("SS-023")
async def test_one_millisecond_earlier_it_is_open(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    pending = await play.engine.create_waitpoint(held.handle, "kp", 1000)
    play.clock.advance_ms(999)

    assert (await play.engine.sweep_once("pending_wp_expiry")).processed == 0
    assert await waits.effect(held.execution_id, "go", pending) == BUFFERED


@pytest.mark.spec("SS-024")
async def test_pending_list_redaction(play: Play, waits: Waits) -> None:
    held, details = await waits.suspended(named("approve"), timeout_at=play.now + 1000)

    page = await play.engine.list_pending_waitpoints(held.execution_id)

    [entry] = page.entries
    digest = details.waitpoint_token.reveal().partition(":")[2]
    assert (entry.state, entry.required_signal_names) == ("active", ["approve"])
    assert (entry.activated_at, entry.expires_at) == (play.now, play.now + 1000)
    assert (entry.token_kid, entry.token_fingerprint) == ("k1", digest[:16])
    assert digest not in plain(page)


@pytest.mark.spec("SS-025")
async def test_pending_list_paging(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e = held.execution_id
    ids = sorted([(await play.engine.create_waitpoint(held.handle, "k", 60_000)).waitpoint_id for _ in range(5)])
    c1, a1, c2, a2, a3 = ids
    for closed in (c1, c2):
        assert await play.engine.close_waitpoint(closed) is True

    first = await play.engine.list_pending_waitpoints(e, limit=2)
    assert ([entry.waitpoint_id for entry in first.entries], first.next_cursor) == ([a1, a2], a2)
    last = await play.engine.list_pending_waitpoints(e, after=a2, limit=2)
    assert ([entry.waitpoint_id for entry in last.entries], last.next_cursor) == ([a3], None)
    for limit, length in ((None, 3), (0, 1), (-3, 1), (5000, 3)):
        page = await play.engine.list_pending_waitpoints(e, limit=limit)
        assert len(page.entries) == length
    async with play.refused(errors.NotFound, entity="execution"):
        await play.engine.list_pending_waitpoints(play.engine.new_execution_id())


@pytest.mark.spec("SS-025")
async def test_a_page_holds_a_hundred_and_at_most_a_thousand(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e = held.execution_id
    extra = await play.engine.create_waitpoint(held.handle, "extra", 60_000)
    fresh = [FreshWaitpoint(waits.id(), f"k{n}") for n in range(1000)]
    keys = [one.waitpoint_key for one in fresh]
    await waits.suspend(held, count(1, CountKind.DISTINCT_SIGNALS, *keys), *fresh)
    order = sorted([extra.waitpoint_id, *(one.waitpoint_id for one in fresh)])

    for limit, length in ((None, 100), (0, 1), (1000, 1000), (1001, 1000), (5000, 1000)):
        page = await play.engine.list_pending_waitpoints(e, limit=limit)
        assert ([entry.waitpoint_id for entry in page.entries], page.next_cursor) == (order[:length], order[length - 1])
    last = await play.engine.list_pending_waitpoints(e, after=order[999], limit=5000)
    assert ([entry.waitpoint_id for entry in last.entries], last.next_cursor) == (order[1000:], None)


@pytest.mark.spec("SS-025")
async def test_waitpoints_that_closed_with_their_suspension_are_passed_over(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e = held.execution_id
    for _ in range(7):
        details = await waits.suspend(held)
        await waits.send(e, "go", details)
        held = await play.resumed(e, f"w{_}")
    open_one = await waits.suspend(held)

    page = await play.engine.list_pending_waitpoints(e, limit=1)

    assert [entry.waitpoint_id for entry in page.entries] == [open_one.waitpoint_id]
    assert page.next_cursor is None


async def test_closing_an_active_waitpoint_wakes_nobody_and_refuses_signals(play: Play, waits: Waits) -> None:
    both = AllConditions((Single("a"), Single("b")))
    held, a = await waits.suspended(both, FreshWaitpoint(waits.id(), "a"), FreshWaitpoint(waits.id(), "b"))
    e, [b] = held.execution_id, a.additional_waitpoints
    before = await play.vector(e)

    assert await play.engine.close_waitpoint(a.waitpoint_id) is True
    assert await play.engine.close_waitpoint(a.waitpoint_id) is False

    assert await play.vector(e) == before
    assert (await waits.record(e, a.waitpoint_id)).close_reason == "proactive_close"
    async with play.refused(errors.WaitpointClosed):
        await waits.send(e, "go", a)
    assert await waits.effect(e, "go", b) == "appended_to_waitpoint"
    async with play.refused(errors.WaitpointNotFound):
        await play.engine.close_waitpoint(waits.id())


async def test_a_pending_waitpoint_serves_its_own_execution_and_attempt_only(play: Play, waits: Waits) -> None:
    held, other = await play.claimed(), await play.claimed()
    pending = await play.engine.create_waitpoint(held.handle, "kp", 3_600_000)

    async with play.refused(errors.InvalidWaitpointForExecution):
        await waits.on_pending(other, pending, Single("kp"))
    async with play.refused(errors.InvalidInput, "waitpoint_key_mismatch"):
        await waits.on_pending(held, pending, Single("other"))
    await play.expired(held)
    later = await play.reclaimed(held.execution_id)
    async with play.refused(errors.InvalidWaitpointForExecution):
        await waits.on_pending(later, pending, Single("kp"))


async def test_a_pending_waitpoint_of_another_partition_is_another_execution_s(play: Play, waits: Waits) -> None:
    held, other = await play.claimed(), await play.claimed(lane="elsewhere")
    assert partition(held.execution_id) != partition(other.execution_id)
    pending = await play.engine.create_waitpoint(held.handle, "kp", 1000)

    async with play.refused(errors.InvalidWaitpointForExecution):
        await waits.on_pending(other, pending, Single("kp"))
    play.clock.advance_ms(1000)
    async with play.refused(errors.PendingWaitpointExpired):
        await waits.on_pending(other, pending, Single("kp"))
    async with play.refused(errors.WaitpointNotFound):
        await play.engine.suspend(other.handle, waits.args(Single("kp"), UsePendingWaitpoint(waits.id())))


async def test_a_waitpoint_is_made_only_under_a_live_lease(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    e = held.execution_id
    play.clock.advance_ms(LEASE_MS)
    async with play.refused(errors.LeaseExpired):
        await play.engine.create_waitpoint(held.handle, "k", 1000)
    await play.engine.mark_lease_expired_if_due(e)
    async with play.refused(errors.NoActiveLease):
        await play.engine.create_waitpoint(held.handle, "k", 1000)
    later = await play.reclaimed(e)
    async with play.refused(errors.StaleLease):
        await play.engine.create_waitpoint(held.handle, "k", 1000)
    await play.engine.complete(later.handle)
    async with play.refused(errors.ExecutionNotActive):
        await play.engine.create_waitpoint(later.handle, "k", 1000)
    assert (await play.engine.list_pending_waitpoints(e)).entries == []


async def test_a_deadline_beyond_all_numbers_is_the_last_one(play: Play, waits: Waits) -> None:
    held = await play.claimed()

    pending = await play.engine.create_waitpoint(held.handle, "k", 2**63 - 1)

    assert (await waits.record(held.execution_id, pending.waitpoint_id)).expires_at == 2**63 - 1


async def test_a_pending_waitpoint_may_have_as_much_time_as_fits_and_no_more(play: Play, waits: Waits) -> None:
    held = await play.claimed()
    most = 2**63 - 1
    for length, end in (
        (2**62, play.now + 2**62),
        (most - play.now, most),
        (most - play.now - 1, most - 1),
        (most - play.now + 1, most),
        (most, most),
    ):
        made = await play.engine.create_waitpoint(held.handle, "kp", length)
        record = await waits.record(held.execution_id, made.waitpoint_id)
        assert (record.state, record.expires_at) == ("pending", end)
