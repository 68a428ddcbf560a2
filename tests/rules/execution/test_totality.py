"""Every rule answers or refuses any row, and writes only valid states."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from flowfabric.errors import FabricError
from flowfabric.model.change import Patch, expand
from flowfabric.model.execution import Execution, Grant
from flowfabric.model.instant import FromNow
from flowfabric.model.states import (
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
    public_state,
)
from flowfabric.rules import retention
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import cancel, claim, delay, finish, operator, reclaim, replay
from flowfabric.rules.execution import expire as expire_rules
from flowfabric.rules.execution import grant as grant_rules
from flowfabric.rules.execution import progress as progress_rules
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.execution.grant import GrantRequest
from flowfabric.rules.execution.lease import LeaseHolder

NOW = 1_700_000_000_000
INSTANTS = st.sampled_from([None, NOW - 1, NOW, NOW + 1, NOW + 60_000])
HOLDER = LeaseHolder("wa", "wa-1", "default", "lease-2", "attempt-2", 30_000)
ORDER = GrantRequest(
    worker_id="wa", worker_instance_id="wa-1", lane_id="default", capabilities=frozenset({"gpu"}), grant_ttl_ms=5000
)
REACHING = settings(max_examples=1000, phases=[Phase.generate], derandomize=True, database=None)
GRANT = Grant("claim", "wa", "wa-1", "default", NOW - 10, NOW + 10)


@st.composite
def executions(draw: st.DrawFn) -> Execution:
    """Any combination of dimensions, including ones that no operation produces."""
    phase = draw(st.sampled_from(LifecyclePhase))
    eligibility = draw(st.sampled_from(EligibilityState))
    outcome = draw(st.sampled_from(TerminalOutcome))
    began = draw(st.booleans())
    return Execution(
        execution_id="{fp:86}:11111111-1111-4111-8111-111111111111",
        partition=86,
        namespace="n",
        lane_id="default",
        priority=draw(st.integers(0, 9000)),
        created_at=NOW - 1000,
        last_transition_at=NOW - 1000,
        last_mutation_at=NOW - 1000,
        lifecycle_phase=phase,
        ownership_state=draw(st.sampled_from(OwnershipState)),
        eligibility_state=eligibility,
        blocking_reason=draw(st.sampled_from(BlockingReason)),
        terminal_outcome=outcome,
        attempt_state=draw(st.sampled_from(AttemptState)),
        public_state=public_state(phase, eligibility, outcome),
        required_capabilities=draw(st.sampled_from([None, "gpu", "cpu,gpu"])),
        terms=draw(st.sampled_from([None, '{"retry":{"max_retries":1}}', '{"max_reclaim_count":0}'])),
        total_attempt_count=1 if began else 0,
        retry_count=draw(st.integers(0, 2)),
        replay_count=draw(st.integers(0, 11)),
        lease_reclaim_count=draw(st.integers(0, 2)),
        attempt_index=0 if began else None,
        attempt_id="attempt-1" if began else None,
        attempt_type=AttemptType.INITIAL if began else None,
        attempt_started_at=NOW - 500 if began else None,
        lease_epoch=draw(st.integers(0, 3)),
        lease_id=draw(st.sampled_from([None, "lease-1"])),
        worker_id="wa",
        worker_instance_id="wa-1",
        lease_expires_at=draw(INSTANTS),
        delay_until=draw(INSTANTS),
        attempt_timeout_at=draw(INSTANTS),
        deadline_at=draw(INSTANTS),
        purge_at=draw(INSTANTS),
        granted_until=draw(INSTANTS),
        grant=draw(st.sampled_from([None, msgspec.json.encode(GRANT).decode()])),
        revision=7,
    )


# States in which executions really are. The rest is drawn; most rules refuse a state vector that is drawn, too.
STANDS: list[dict[str, Any]] = [
    {
        "lifecycle_phase": LifecyclePhase.ACTIVE,
        "ownership_state": ownership,
        "eligibility_state": EligibilityState.NOT_APPLICABLE,
        "attempt_state": attempt,
        "lease_expires_at": until,
    }
    for ownership, attempt, until in (
        (OwnershipState.LEASED, AttemptState.RUNNING_ATTEMPT, NOW + 1),
        (OwnershipState.LEASED, AttemptState.RUNNING_ATTEMPT, NOW),
        (OwnershipState.LEASE_EXPIRED_RECLAIMABLE, AttemptState.ATTEMPT_INTERRUPTED, NOW - 1),
        (OwnershipState.LEASE_REVOKED, AttemptState.ATTEMPT_INTERRUPTED, None),
    )
]
STANDS += [
    {
        "lifecycle_phase": phase,
        "ownership_state": OwnershipState.UNOWNED,
        "eligibility_state": eligibility,
        "attempt_state": attempt,
        "lease_expires_at": None,
    }
    for phase, eligibility, attempt in (
        (LifecyclePhase.RUNNABLE, EligibilityState.ELIGIBLE_NOW, AttemptState.PENDING_FIRST_ATTEMPT),
        (LifecyclePhase.RUNNABLE, EligibilityState.ELIGIBLE_NOW, AttemptState.ATTEMPT_INTERRUPTED),
        (LifecyclePhase.RUNNABLE, EligibilityState.NOT_ELIGIBLE_UNTIL_TIME, AttemptState.PENDING_RETRY_ATTEMPT),
        (LifecyclePhase.RUNNABLE, EligibilityState.BLOCKED_BY_QUOTA, AttemptState.PENDING_FIRST_ATTEMPT),
        (LifecyclePhase.SUSPENDED, EligibilityState.NOT_APPLICABLE, AttemptState.ATTEMPT_INTERRUPTED),
    )
]


@st.composite
def reachable_executions(draw: st.DrawFn) -> Execution:
    """An execution in a reachable state, with an attempt that has started."""
    vector = draw(st.sampled_from(STANDS))
    public = public_state(vector["lifecycle_phase"], vector["eligibility_state"], TerminalOutcome.NONE)
    return msgspec.structs.replace(
        draw(executions()),
        **vector,
        terminal_outcome=TerminalOutcome.NONE,
        public_state=public,
        lease_id="lease-1",
        attempt_index=0,
        attempt_id="attempt-1",
        attempt_type=AttemptType.INITIAL,
        attempt_started_at=NOW - 500,
        total_attempt_count=1,
    )


ROWS = st.none() | executions() | reachable_executions()
FENCES = st.none() | st.builds(
    Fence,
    st.sampled_from([None, "lease-1", "lease-9"]),
    st.sampled_from([None, 0, 1, 2, 3]),
    st.sampled_from([None, "attempt-1", "attempt-9"]),
)


def presented_fence(fence: Fence | None, row: Execution | None) -> Fence:
    """Return the fence that was drawn, or the one of the lease holder."""
    if fence is not None or row is None:
        return fence or Fence()
    return Fence(row.lease_id, row.lease_epoch, row.attempt_id)


Rule: TypeAlias = Callable[[Execution | None, Fence], Decision[Any]]
RULES: dict[str, Rule] = {
    "complete": lambda row, fence: finish.complete(row, fence, None, b"r", None, NOW),
    "complete by override": lambda row, fence: finish.complete(row, fence, "operator_override", None, None, NOW),
    "fail": lambda row, fence: finish.fail(
        row, fence, None, reason="boom", category="transient", retry_policy=None, chance=0.5, now=NOW
    ),
    "delay": lambda row, fence: delay.delay(row, fence, None, NOW + 5, NOW),
    "wait for children": lambda row, fence: delay.defer_for_children(row, fence, None, unresolved=True, now=NOW),
    "wait for nobody": lambda row, fence: delay.defer_for_children(row, fence, None, unresolved=False, now=NOW),
    "promote": lambda row, _: delay.promote_delayed(row, NOW),
    "cancel": lambda row, fence: cancel.cancel(row, fence, "operator_override", "stop"),
    "cancel as holder": lambda row, fence: cancel.cancel(row, fence, cancel.WORKER, "stop"),
    "mark expired": lambda row, _: expire_rules.mark_lease_expired_if_due(row, NOW),
    "expire": lambda row, _: expire_rules.expire(row, "x", expire_rules.ATTEMPT_TIMEOUT),
    "expire at the deadline": lambda row, _: expire_rules.expire_if_due(row, "x", expire_rules.EXECUTION_DEADLINE, NOW),
    "revoke": lambda row, _: operator.revoke_lease(row, "", "", "bad node"),
    "change priority": lambda row, _: operator.change_priority(row, 50),
    "block": lambda row, _: operator.block(row, "waiting_for_quota", "full"),
    "block by route": lambda row, _: operator.block(row, "waiting_for_capable_worker", ""),
    "unblock": lambda row, _: operator.unblock(row, None),
    "replay": lambda row, _: replay.replay(row),
    "progress": lambda row, fence: progress_rules.update_progress(row, fence, 50, "half", NOW),
    "tag": lambda row, _: tag_rules.set_tags(row, {"a.b": "c"}),
    "grant": lambda row, _: grant_rules.issue_claim_grant(row, ORDER, NOW),
    "claim": lambda row, _: claim.claim_execution(row, HOLDER, NOW),
    "resume": lambda row, _: claim.claim_resumed_execution(row, HOLDER, NOW),
    "claim as operator": lambda row, _: claim.issue_grant_and_claim(row, HOLDER, NOW),
    "reclaim grant": lambda row, _: reclaim.issue_reclaim_grant(row, ORDER, NOW),
    "reclaim": lambda row, _: reclaim.reclaim_execution(row, HOLDER, None, NOW),
    "take over": lambda row, _: reclaim.take_over(row, HOLDER, frozenset({"cpu", "gpu"}), NOW),
    "purge": lambda row, _: retention.purge(row, NOW),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@settings(max_examples=60, deadline=None)
@given(row=ROWS, fence=FENCES)
def test_a_rule_is_total_and_writes_only_valid_states(rule: Rule, row: Execution | None, fence: Fence | None) -> None:
    _assert_sound(rule, row, presented_fence(fence, row))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_the_drawn_rows_produce_a_change_of_each_rule(rule: Rule) -> None:
    def changes(case: tuple[Execution | None, Fence | None]) -> bool:
        row, fence = case
        return row is not None and rule(row, presented_fence(fence, row)).change is not None

    row, fence = find(st.tuples(ROWS, FENCES), changes, settings=REACHING)

    _assert_sound(rule, row, presented_fence(fence, row))


def _assert_sound(rule: Rule, row: Execution | None, fence: Fence) -> None:
    decision = rule(row, fence)
    with contextlib.suppress(FabricError):
        decision.unwrap(NOW)
    if decision.change is None or row is None:
        return
    [guard] = decision.change.guards
    assert (guard.row, guard.key, guard.revision) == (Execution, (row.execution_id,), row.revision)
    after = _after(row, decision)
    if after is None:
        return
    assert after.public_state is public_state(after.lifecycle_phase, after.eligibility_state, after.terminal_outcome)
    assert after.lease_epoch in (row.lease_epoch, row.lease_epoch + 1)
    if after.lifecycle_phase is LifecyclePhase.TERMINAL and row.lifecycle_phase is not LifecyclePhase.TERMINAL:
        _assert_ended(after)
    if after.lifecycle_phase is LifecyclePhase.ACTIVE and row.lifecycle_phase is LifecyclePhase.RUNNABLE:
        assert after.ownership_state is OwnershipState.LEASED
        assert after.attempt_state is AttemptState.RUNNING_ATTEMPT
        assert after.public_state is PublicState.ACTIVE
        assert after.line is None
        assert after.lease_epoch == row.lease_epoch + 1


def _assert_ended(after: Execution) -> None:
    assert after.eligibility_state is EligibilityState.NOT_APPLICABLE
    assert after.blocking_reason is BlockingReason.NONE
    assert after.terminal_outcome is not TerminalOutcome.NONE
    assert (after.line, after.grant, after.granted_until, after.delay_until, after.deadline_at) == (None,) * 5


def _after(row: Execution, decision: Decision[Any]) -> Execution | None:
    assert decision.change is not None
    for write in expand(decision.change, row).writes:
        if isinstance(write, Patch) and write.row is Execution:
            fields = {
                name: NOW + value.offset if isinstance(value, FromNow) else value
                for name, value in write.fields.items()
            }
            return msgspec.structs.replace(row, **fields)
    return None
