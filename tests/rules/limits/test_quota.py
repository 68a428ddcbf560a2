"""Admission: caps hold in every window and counters equal recounts for any sequence of requests."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.change import Delete, Upsert
from flowfabric.model.execution import Execution
from flowfabric.model.limits.quota import QuotaPolicy, QuotaRequest, QuotaSlot
from flowfabric.model.states import EligibilityState, LifecyclePhase
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.quota import AdmissionRequest, QuotaState
from tests.stores.sample_rows import execution, loaded

NOW = 1_700_000_000_000
Q = "0c000000-0000-4000-8000-000000000001"
WINDOW = 1000
EMPTY = QuotaState(Q, 3)

executions = st.sampled_from([f"e{n}" for n in range(8)])
steps = st.one_of(
    st.tuples(st.just("ask"), executions),
    st.tuples(st.just("ask"), executions),
    st.tuples(st.just("release"), executions),
    st.tuples(st.just("reconcile"), st.frozensets(executions)),
    st.tuples(st.just("wait"), st.integers(1, WINDOW)),
)


def asking(e: str, rate: int, cap: int, call: int, **given: Any) -> AdmissionRequest:
    return AdmissionRequest(
        execution_id=e, window_ms=WINDOW, rate_limit=rate, concurrency_cap=cap, call_id=call, **given
    )


@settings(max_examples=300)
@given(st.integers(0, 4), st.integers(0, 4), st.lists(steps, max_size=60))
def test_caps_hold_in_every_window_and_counters_equal_recounts(
    rate: int, cap: int, life: list[tuple[Any, ...]]
) -> None:
    _, state = quota.define_policy(EMPTY, limit_answers.QuotaLimits(1, rate, cap), NOW)
    now, admitted = NOW, list[tuple[int, str]]()
    for call, step in enumerate(life):
        before = state
        match step:
            case ("wait", length):
                now += length
            case ("ask", e):
                had = state.slots.get(e)
                answer, state = quota.admit(state, asking(e, rate, cap, call), now)
                if isinstance(answer, limit_answers.Admitted):
                    admitted.append((now, e))
                if isinstance(answer, limit_answers.RateExceeded):
                    later, _ = quota.admit(state, asking(e, rate, 0, call), now + answer.retry_after_ms)
                    assert isinstance(later, limit_answers.Admitted | limit_answers.AlreadyAdmitted), (
                        "the retry time is true"
                    )
                if isinstance(answer, limit_answers.AlreadyAdmitted):
                    assert had is not None
                    assert quota.is_slot_live(had, now)
                if not isinstance(answer, limit_answers.Admitted):
                    assert quota.change_between(before, state) is None, "a refusal leaves no trace"
            case ("release", e):
                _, state = quota.release_slot(state, e)
                assert e not in state.slots
            case ("reconcile", idle):
                _, state = quota.reconcile(state, idle, now)
            case _:
                raise AssertionError(step)
        if cap:
            assert state.root_or_new().active == sum(slot.counted for slot in state.slots.values()) <= cap
        if rate:  # An execution that requests again moves its request: only its latest one counts.
            window = {e for at, e in admitted if at > now - WINDOW}
            latest = {e for e in window if max(at for at, who in admitted if who == e) > now - WINDOW}
            assert len(latest) <= rate
        assert reread(before, state) == state, "what is written is what was decided"


def reread(before: QuotaState, after: QuotaState) -> QuotaState:
    """Return the quota state that is read back after the change between two states."""
    change = quota.change_between(before, after)
    rows: dict[Any, Any] = {("root",): before.root}
    rows |= {("slot", key): row for key, row in before.slots.items()}
    rows |= {("request", *key): row for key, row in before.requests.items()}
    for write in change.writes if change else ():
        match write:
            case Delete(row=kind, key=key):
                del rows["slot" if kind is QuotaSlot else "request", *key[2:]]
            case Upsert(row=QuotaSlot() as slot):
                rows["slot", slot.execution_id] = slot
            case Upsert(row=QuotaRequest() as request):
                rows["request", request.dimension, request.execution_id] = request
            case Upsert(row=QuotaPolicy() as root):
                rows["root",] = root
            case _:
                raise AssertionError(write)
    return quota.quota_state(Q, 3, [row for row in rows.values() if row is not None])


def test_a_release_names_a_life_and_does_not_affect_a_later_one() -> None:
    _, state = quota.admit(EMPTY, asking("e", 0, 5, 1, life=2), NOW)

    _, same = quota.release_slot(state, "e", life=1)
    assert same is state
    for life in (2, 3, None):
        _, freed = quota.release_slot(state, "e", life=life)
        assert (freed.slots, freed.root_or_new().active) == ({}, 0)


def test_a_call_releases_only_its_own_slot() -> None:
    _, state = quota.admit(EMPTY, asking("e", 0, 5, 1), NOW)
    answer, taken = quota.admit(state, asking("e", 0, 5, 2, takes_over_slot=True), NOW)
    assert isinstance(answer, limit_answers.AlreadyAdmitted)

    _, same = quota.release_slot(taken, "e", admission=1)
    assert same is taken
    _, freed = quota.release_slot(taken, "e", admission=2)
    assert freed.slots == {}


def test_a_repeated_call_is_answered_as_admitted() -> None:
    _, state = quota.admit(EMPTY, asking("e", 1, 1, 7), NOW)

    answer, same = quota.admit(state, asking("e", 1, 1, 7), NOW)

    assert isinstance(answer, limit_answers.Admitted)
    assert same is state


def test_a_later_life_inherits_a_slot_that_was_not_released_yet() -> None:
    _, state = quota.admit(EMPTY, asking("e", 0, 5, 1, life=0), NOW)
    _, state = quota.admit(state, asking("e", 0, 5, 2, life=1, takes_over_slot=True), NOW)

    _, same = quota.release_slot(state, "e", life=0)

    assert same is state
    assert state.slots["e"].life == 1


def test_capacity_and_the_next_opening_follow_the_stored_limits() -> None:
    _, state = quota.define_policy(EMPTY, limit_answers.QuotaLimits(1, 2, 0), NOW)
    assert (quota.free_capacity(state, NOW), quota.next_capacity_at(state, NOW)) == (2, None)
    for n, e in enumerate("ab"):
        _, state = quota.admit(state, asking(e, 2, 0, n), NOW + n * 300)
    assert (quota.free_capacity(state, NOW + 300), quota.next_capacity_at(state, NOW + 300)) == (0, NOW + 1000)
    assert (quota.free_capacity(state, NOW + 1000), quota.next_capacity_at(state, NOW + 1000)) == (1, NOW + 1300)
    _, unlimited = quota.define_policy(EMPTY, limit_answers.QuotaLimits(1, 0, 0), NOW)
    _, unlimited = quota.admit(unlimited, asking("a", 0, 0, 1), NOW)
    broken = replace(state, root=replace(state.root_or_new(), max_requests_per_window=-1))
    for one in (EMPTY, unlimited, broken):
        assert (quota.free_capacity(one, NOW), quota.next_capacity_at(one, NOW)) == (None, None)


def test_a_short_window_hides_nothing_of_another_dimension() -> None:
    _, state = quota.admit(EMPTY, asking("a", 1, 0, 1, dimension="slow"), NOW)

    _, state = quota.admit(state, replace(asking("b", 1, 0, 2, dimension="fast"), window_ms=10), NOW + 500)

    answer, _ = quota.admit(state, asking("c", 1, 0, 3, dimension="slow"), NOW + 500)
    assert answer == limit_answers.RateExceeded(500)


def test_without_a_cap_a_dead_slot_removes_only_what_it_counted() -> None:
    _, state = quota.define_policy(EMPTY, limit_answers.QuotaLimits(1, 5, 0), NOW)
    for n, e in enumerate("abc"):
        _, state = quota.admit(state, asking(e, 5, 9, n), NOW + n)
    assert state.root_or_new().active == 3

    moved, after = quota.reconcile(state, frozenset("ab"), NOW + WINDOW)

    assert (moved, sorted(after.slots), after.root_or_new().active) == (True, ["b", "c"], 2)


def provisional(state: QuotaState, call: int) -> tuple[Any, QuotaState]:
    return quota.admit(state, asking("e", 0, 1, call, takes_over_slot=True, provisional=True), NOW)


def active(state: QuotaState) -> int:
    assert state.root_or_new().active == sum(slot.counted for slot in state.slots.values())
    return state.root_or_new().active


def test_the_last_of_several_calls_refused_by_another_policy_leaves_nothing_behind() -> None:
    first, state = provisional(EMPTY, 1)
    second, state = provisional(state, 2)
    assert (first, second) == (limit_answers.Admitted(), limit_answers.AlreadyAdmitted())

    _, state = quota.undo_admission(state, "e", 1, acquired=True)
    assert active(state) == 1, "the second relies on it"
    _, state = quota.undo_admission(state, "e", 2, acquired=False)

    assert (active(state), state.slots, state.requests) == (0, {}, {})


def test_an_admission_by_all_policies_is_not_undone_by_an_earlier_refused_call() -> None:
    _, state = provisional(EMPTY, 1)
    _, state = provisional(state, 2)
    confirmed, state = quota.confirm(
        state, asking("e", 0, 1, 1, takes_over_slot=True, provisional=True), NOW, acquired=True
    )
    assert confirmed == limit_answers.AlreadyAdmitted()

    _, state = quota.undo_admission(state, "e", 2, acquired=False)
    _, state = quota.release_slot(state, "e", admission=2)

    assert active(state) == 1, "the first may be the one that claims"


def test_an_admission_that_was_revoked_before_its_confirmation_is_requested_again() -> None:
    ask = asking("e", 0, 1, 1, takes_over_slot=True, provisional=True)
    _, state = provisional(EMPTY, 1)
    _, state = provisional(state, 2)
    _, free = quota.undo_admission(state, "e", 2, acquired=False)
    _, full = quota.admit(free, asking("other", 0, 1, 3), NOW)

    confirmed, state = quota.confirm(free, ask, NOW, acquired=True)
    assert (confirmed, active(state)) == (limit_answers.Admitted(), 1)
    _, state = quota.undo_admission(state, "e", 9, acquired=False)
    assert active(state) == 1
    assert quota.confirm(full, ask, NOW, acquired=True) == (limit_answers.ConcurrencyExceeded(), full)


def test_a_slot_of_an_earlier_call_is_not_undone_by_one_that_is_refused_elsewhere() -> None:
    _, state = quota.admit(EMPTY, asking("e", 0, 1, 1), NOW)
    again, state = provisional(state, 2)

    _, state = quota.undo_admission(state, "e", 2, acquired=False)

    assert (again, active(state)) == (limit_answers.AlreadyAdmitted(), 1)


def test_the_state_of_an_admitted_row_decides_whether_its_slot_is_orphaned() -> None:
    row = loaded(execution("e", replay_count=1))
    over = replace(row, lifecycle_phase=LifecyclePhase.TERMINAL)
    held_up = replace(row, eligibility_state=EligibilityState.BLOCKED_BY_QUOTA)
    running = replace(row, lifecycle_phase=LifecyclePhase.ACTIVE)
    found: list[tuple[Execution | None, bool, bool]] = [
        (None, True, False),
        (over, True, False),
        (held_up, False, True),
        (running, False, False),
        (replace(over, replay_count=2), False, False),
        (replace(held_up, replay_count=2), False, False),
    ]

    assert [(quota.is_life_over(row, one), quota.is_blocked_by_quota(row, one)) for one, _, _ in found] == [
        (is_over, is_held_up) for _, is_over, is_held_up in found
    ]


def test_an_admission_is_kept_while_its_row_waits_for_a_worker_or_for_quota() -> None:
    row = loaded(execution("e", replay_count=1))
    waits = replace(row, lifecycle_phase=LifecyclePhase.RUNNABLE, eligibility_state=EligibilityState.ELIGIBLE_NOW)
    held_up = replace(waits, eligibility_state=EligibilityState.BLOCKED_BY_QUOTA)
    paused = replace(waits, eligibility_state=EligibilityState.BLOCKED_BY_LANE_STATE)
    running = replace(waits, lifecycle_phase=LifecyclePhase.ACTIVE)
    later = replace(waits, replay_count=2)

    kept = [quota.keeps_admission(row, one) for one in (waits, held_up, paused, running, later)]

    assert kept == [True, True, False, False, False]


def test_an_expired_slot_is_dead_unless_its_execution_is_active() -> None:
    active = loaded(execution("active", lifecycle_phase=LifecyclePhase.ACTIVE))
    ended = loaded(execution("ended", lifecycle_phase=LifecyclePhase.TERMINAL))

    idle = quota.idle_executions(["active", "ended", "purged"], [active, ended, None])

    assert idle == {"ended", "purged"}
