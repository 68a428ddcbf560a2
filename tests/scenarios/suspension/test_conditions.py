"""SS-012 to SS-019: which signals satisfy a condition."""

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
from tests.scenarios.env import RESUMABLE, Env
from tests.scenarios.waits import ANY, APPENDED, NO_OP, REPEATED, SATISFIED, SUSPENDED, Waits, count, named

WAITS = SUSPENDED.format(reason="waiting_for_signal")


@pytest.mark.spec("SS-012")
async def test_a_condition_on_two_names_is_satisfied_by_both(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(named("a", "b"))
    e = claim.execution_id

    assert await waits.effect(e, "a", p) == APPENDED
    assert await env.vector(e) == WAITS
    assert await waits.effect(e, "a", p, source="bo") == REPEATED
    assert await waits.effect(e, "b", p) == SATISFIED
    assert await env.vector(e) == RESUMABLE


@pytest.mark.spec("SS-013")
async def test_a_condition_on_three_waitpoints_is_satisfied_by_all(env: Env, waits: Waits) -> None:
    fresh = [FreshWaitpoint(waits.new_id(), key) for key in "xyz"]
    claim, details = await waits.create_suspended(AllConditions(tuple(Single(key) for key in "xyz")), *fresh)
    e = claim.execution_id
    x, (y, z) = details, details.additional_waitpoints

    assert [await waits.effect(e, "go", one) for one in (y, z, x)] == [APPENDED, APPENDED, SATISFIED]

    for one in (x, y, z):
        record = await waits.record(e, one.waitpoint_id)
        assert (record.state, record.close_reason, record.closed_at) == ("closed", "resumed", env.now)
    again = await env.grant_and_resume(e)
    observed = [signal.signal_id for signal in await env.engine.observe_signals(again.handle)]
    emitted = [event.signal_id for event in await waits.signal_events(e)]
    assert observed == emitted
    assert len(observed) == 3


@pytest.mark.spec("SS-014")
async def test_a_count_of_distinct_sources_ignores_repetitions(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(count(2))
    sources = ["alice", "alice", "bob"]

    effects = [await waits.effect(claim.execution_id, "ok", p, source=source) for source in sources]

    assert effects == [APPENDED, REPEATED, SATISFIED]


@pytest.mark.spec("SS-014")
async def test_a_source_is_a_pair_of_type_and_identity(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(count(4))
    pairs = [("user", "alice"), ("bot", "alice"), ("a", "b:c"), ("a:b", "c")]

    effects = [await waits.effect(claim.execution_id, "ok", p, source=name, source_type=kind) for kind, name in pairs]

    assert effects == [APPENDED, APPENDED, APPENDED, SATISFIED]


@pytest.mark.spec("SS-015")
async def test_one_signal_satisfies_two_leaves(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(AllConditions((Single("k", ByName("go")), Single("k", Wildcard()))))

    assert await waits.effect(claim.execution_id, "go", p) == SATISFIED


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
async def test_a_malformed_condition_is_refused(env: Env, waits: Waits, condition: Condition, detail: str) -> None:
    claim = await env.create_and_claim()
    keys = ("k", "l") if condition == count(3, CountKind.DISTINCT_WAITPOINTS, "k", "l") else ("k",)

    with pytest.raises(errors.InvalidInput) as refusal:
        await env.engine.suspend(
            claim.handle, waits.args(condition, *(FreshWaitpoint(waits.new_id(), key) for key in keys))
        )

    assert detail in refusal.value.detail


@pytest.mark.spec("SS-016")
async def test_a_condition_within_the_limits_is_accepted(env: Env, waits: Waits) -> None:
    await waits.create_suspended(nested(4))
    claim, p = await waits.create_suspended(
        count(3, CountKind.DISTINCT_SIGNALS, "k", "l"),
        FreshWaitpoint(waits.new_id(), "k"),
        FreshWaitpoint(waits.new_id(), "l"),
    )

    effects = [await waits.effect(claim.execution_id, "x", p) for _ in range(3)]

    assert effects == [APPENDED, APPENDED, SATISFIED]


@pytest.mark.spec("SS-017")
async def test_an_operator_only_condition_ignores_signals(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(OperatorOnly())
    e = claim.execution_id

    assert await waits.effect(e, "anything", p) == NO_OP
    assert await env.vector(e) == WAITS
    [entry] = (await env.engine.list_pending_waitpoints(e)).entries
    assert entry.required_signal_names == ["__operator_only__"]
    assert await env.engine.resume_execution(e, trigger_type="operator") == Resumed(PublicState.WAITING)


@pytest.mark.spec("SS-018")
async def test_a_signal_with_another_name_is_a_no_op(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(named("go"))
    e = claim.execution_id

    assert await waits.effect(e, "stop", p) == NO_OP

    record = await waits.record(e, p.waitpoint_id)
    assert (record.signal_count, record.matched_signal_count, record.last_signal_at) == (1, 0, env.now)
    assert [event.effect for event in await waits.signal_events(e)] == ["Other(no_op)"]
    assert await env.vector(e) == WAITS


@pytest.mark.spec("SS-019")
async def test_a_condition_with_an_operator_only_member_is_never_satisfied_by_signals(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(AllConditions((Single("k", ByName("go")), OperatorOnly())))
    e = claim.execution_id

    effects = [await waits.effect(e, name, p) for name in ("go", "go", "stop")]

    assert effects == [APPENDED, REPEATED, "signal_ignored_matcher_failed"]
    assert await env.vector(e) == WAITS
    assert await env.engine.resume_execution(e) == Resumed(PublicState.WAITING)


async def test_a_signal_to_a_waitpoint_the_condition_does_not_name_is_ignored(env: Env, waits: Waits) -> None:
    claim, p = await waits.create_suspended(AllConditions((Single("other"),)))

    assert await waits.effect(claim.execution_id, "go", p) == "signal_ignored_not_in_condition"


async def test_sibling_counts_do_not_share_satisfiers(env: Env, waits: Waits) -> None:
    ayes = Count(2, CountKind.DISTINCT_SOURCES, ("k",), ByName("aye"))
    oks = Count(1, CountKind.DISTINCT_SOURCES, ("k",), ByName("ok"))
    claim, p = await waits.create_suspended(AllConditions((ayes, oks)))
    e = claim.execution_id

    effects = [await waits.effect(e, name, p, source=who) for name, who in (("aye", "a"), ("ok", "b"), ("aye", "b"))]

    assert effects == [APPENDED, APPENDED, SATISFIED]
