"""SS-012 to SS-019: which signals meet a condition, and which only arrive."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.model.condition import (
    AllConditions,
    ByName,
    Condition,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    Wildcard,
)
from flowfabric.model.states import PublicState
from flowfabric.rules.suspension.arguments import FreshWaitpoint
from flowfabric.rules.suspension.resume import Resumed
from tests.scenarios.play import RESUMABLE, Play
from tests.scenarios.waits import ANY, APPENDED, NO_OP, REPEATED, SATISFIED, SUSPENDED, Waits, count, named

WAITS = SUSPENDED.format(reason="waiting_for_signal")


@pytest.mark.spec("SS-012")
async def test_all_of_two_names(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(named("a", "b"))
    e = held.execution_id

    assert await waits.effect(e, "a", p) == APPENDED
    assert await play.vector(e) == WAITS
    assert await waits.effect(e, "a", p, source="bo") == REPEATED
    assert await waits.effect(e, "b", p) == SATISFIED
    assert await play.vector(e) == RESUMABLE


@pytest.mark.spec("SS-013")
async def test_all_of_three_waitpoints(play: Play, waits: Waits) -> None:
    fresh = [FreshWaitpoint(waits.id(), key) for key in "xyz"]
    held, details = await waits.suspended(AllConditions(tuple(Single(key) for key in "xyz")), *fresh)
    e = held.execution_id
    x, (y, z) = details, details.additional_waitpoints

    assert [await waits.effect(e, "go", one) for one in (y, z, x)] == [APPENDED, APPENDED, SATISFIED]

    for one in (x, y, z):
        record = await waits.record(e, one.waitpoint_id)
        assert (record.state, record.close_reason, record.closed_at) == ("closed", "resumed", play.now)
    again = await play.resumed(e)
    observed = [signal.signal_id for signal in await play.engine.observe_signals(again.handle)]
    told = [news.signal_id for news in await waits.signals_told(e)]
    assert observed == told
    assert len(observed) == 3


@pytest.mark.spec("SS-014")
async def test_count_distinct_sources(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(count(2))
    e = held.execution_id
    sources = ["alice", "alice", "bob"]

    effects = [await waits.effect(e, "ok", p, source=source) for source in sources]

    assert effects == [APPENDED, REPEATED, SATISFIED]


@pytest.mark.spec("SS-014")
async def test_a_source_is_a_pair(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(count(4))
    e = held.execution_id
    pairs = [("user", "alice"), ("bot", "alice"), ("a", "b:c"), ("a:b", "c")]

    effects = [await waits.effect(e, "ok", p, source=name, source_type=kind) for kind, name in pairs]

    assert effects == [APPENDED, APPENDED, APPENDED, SATISFIED]


@pytest.mark.spec("SS-015")
async def test_one_signal_two_leaves(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(AllConditions((Single("k", ByName("go")), Single("k", Wildcard()))))

    assert await waits.effect(held.execution_id, "go", p) == SATISFIED


def nested(depth: int) -> Condition:
    condition: Condition = ANY
    for _ in range(depth):
        condition = AllConditions((condition,))
    return condition


@pytest.mark.spec("SS-016")
@pytest.mark.parametrize(
    ("condition", "detail"),
    [
        (nested(5), "depth 5 exceeds cap 4 at path members[0].members[0].members[0].members[0]"),
        (AllConditions(()), "allof_empty_members"),
        (count(0), "count_n_zero"),
        (Count(1, CountKind.DISTINCT_SIGNALS, ()), "count_waitpoints_empty"),
        (count(3, CountKind.DISTINCT_WAITPOINTS, "k", "l"), "count_exceeds_waitpoint_set"),
    ],
)
async def test_structural_limits(play: Play, waits: Waits, condition: Condition, detail: str) -> None:
    held = await play.claimed()
    keys = ("k", "l") if condition == count(3, CountKind.DISTINCT_WAITPOINTS, "k", "l") else ("k",)

    with pytest.raises(errors.InvalidInput) as refusal:
        await play.engine.suspend(
            held.handle, waits.args(condition, *(FreshWaitpoint(waits.id(), key) for key in keys))
        )

    assert detail in refusal.value.detail


@pytest.mark.spec("SS-016")
async def test_what_is_within_the_limits(play: Play, waits: Waits) -> None:
    await waits.suspended(nested(4))
    held, p = await waits.suspended(
        count(3, CountKind.DISTINCT_SIGNALS, "k", "l"), FreshWaitpoint(waits.id(), "k"), FreshWaitpoint(waits.id(), "l")
    )

    effects = [await waits.effect(held.execution_id, "x", p) for _ in range(3)]

    assert effects == [APPENDED, APPENDED, SATISFIED]


@pytest.mark.spec("SS-017")
async def test_operator_only(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(OperatorOnly())
    e = held.execution_id

    assert await waits.effect(e, "anything", p) == NO_OP
    assert await play.vector(e) == WAITS
    [entry] = (await play.engine.list_pending_waitpoints(e)).entries
    assert entry.required_signal_names == ["__operator_only__"]
    assert await play.engine.resume_execution(e, trigger_type="operator") == Resumed(PublicState.WAITING)


@pytest.mark.spec("SS-018")
async def test_single_mismatch_is_no_op(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(named("go"))
    e = held.execution_id

    assert await waits.effect(e, "stop", p) == NO_OP

    record = await waits.record(e, p.waitpoint_id)
    assert (record.signal_count, record.matched_signal_count, record.last_signal_at) == (1, 0, play.now)
    assert [news.effect for news in await waits.signals_told(e)] == ["Other(no_op)"]
    assert await play.vector(e) == WAITS


@pytest.mark.spec("SS-019")
async def test_never_by_signal_member(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(AllConditions((Single("k", ByName("go")), OperatorOnly())))
    e = held.execution_id

    effects = [await waits.effect(e, name, p) for name in ("go", "go", "stop")]

    assert effects == [APPENDED, REPEATED, "signal_ignored_matcher_failed"]
    assert await play.vector(e) == WAITS
    assert await play.engine.resume_execution(e) == Resumed(PublicState.WAITING)


async def test_a_signal_to_a_waitpoint_the_condition_does_not_name_is_ignored(play: Play, waits: Waits) -> None:
    held, p = await waits.suspended(AllConditions((Single("other"),)))

    assert await waits.effect(held.execution_id, "go", p) == "signal_ignored_not_in_condition"


async def test_counts_beside_each_other_do_not_share_satisfiers(play: Play, waits: Waits) -> None:
    ayes = Count(2, CountKind.DISTINCT_SOURCES, ("k",), ByName("aye"))
    oks = Count(1, CountKind.DISTINCT_SOURCES, ("k",), ByName("ok"))
    held, p = await waits.suspended(AllConditions((ayes, oks)))
    e = held.execution_id

    effects = [await waits.effect(e, name, p, source=who) for name, who in (("aye", "a"), ("ok", "b"), ("aye", "b"))]

    assert effects == [APPENDED, APPENDED, SATISFIED]
