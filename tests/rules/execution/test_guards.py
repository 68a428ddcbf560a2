"""The guards of a change: the row as the rule saw it, the required lease, and the instants between which it holds.

Other writers commit and time passes between a load and a commit. A rule without its guard would decide about an
outdated row, and only a race would reveal it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest

from flowfabric import errors
from flowfabric.model.answers.execution import NotReclaimable
from flowfabric.model.change import Change, Guard, LeaseCheck, LeaseRequirement
from flowfabric.model.deployment import SweepLease
from flowfabric.model.execution import Execution, Grant, IdempotencyKey
from flowfabric.model.states import (
    AttemptState,
    AttemptType,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    TerminalOutcome,
    public_state,
)
from flowfabric.rules import retention, sweep_lease
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import cancel, claim, create, delay, finish, lease, operator, reclaim, replay
from flowfabric.rules.execution import expire as expire_rules
from flowfabric.rules.execution import grant as grant_rules
from flowfabric.rules.execution import progress as progress_rules
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.execution.grant import GrantRequest
from flowfabric.rules.execution.lease import LeaseHolder
from tests.rules.execution.rows import EXECUTION, NOW, running

FENCE = Fence("lease-1", 3, "attempt-1")
HOLDER = LeaseHolder("wa", "wa-1", "default", "lease-2", "attempt-2", 30_000)
ORDER = GrantRequest(
    worker_id="wa", worker_instance_id="wa-1", lane_id="default", capabilities=frozenset(), grant_ttl_ms=5000
)
GRANT = msgspec.json.encode(Grant("claim", "wa", "wa-1", "default", NOW - 10, NOW + 10)).decode()
LATE_GRANT = msgspec.json.encode(Grant("claim", "wa", "wa-1", "default", NOW - 10, NOW)).decode()

ACTIVE, RUNNABLE, TERMINAL = LifecyclePhase.ACTIVE, LifecyclePhase.RUNNABLE, LifecyclePhase.TERMINAL
ELIGIBLE, UNTIL_TIME = EligibilityState.ELIGIBLE_NOW, EligibilityState.NOT_ELIGIBLE_UNTIL_TIME
LIVE, LAPSED = LeaseRequirement.LIVE, LeaseRequirement.EXPIRED


def row(
    phase: LifecyclePhase, eligibility: EligibilityState = EligibilityState.NOT_APPLICABLE, **own: Any
) -> Execution:
    """Return an execution in or after its first attempt."""
    outcome = own.pop("terminal_outcome", TerminalOutcome.NONE)
    held = phase is ACTIVE
    fields: dict[str, Any] = {
        "lifecycle_phase": phase,
        "eligibility_state": eligibility,
        "terminal_outcome": outcome,
        "public_state": public_state(phase, eligibility, outcome),
        "ownership_state": OwnershipState.LEASED if held else OwnershipState.UNOWNED,
        "attempt_state": AttemptState.RUNNING_ATTEMPT if held else AttemptState.PENDING_FIRST_ATTEMPT,
        "lease_expires_at": NOW + 100 if held else None,
        "total_attempt_count": 1,
        "attempt_index": 0,
        "attempt_type": AttemptType.INITIAL,
        "worker_id": "wa",
        "worker_instance_id": "wa-1",
    }
    return running(**(fields | own))


def failed(row: Execution, retries: int) -> Decision[Any]:
    policy = f'{{"max_retries":{retries}}}'
    return finish.fail(row, FENCE, None, reason="boom", category="transient", retry_policy=policy, chance=0.5, now=NOW)


class GuardCase(NamedTuple):
    """A decision about a row, and what its change requires besides the row's revision."""

    decided: Callable[[Execution], Decision[Any]]
    row: Execution
    lease: LeaseRequirement | None = None
    not_before: int | None = None
    not_after: int | None = None


HELD = row(ACTIVE)
LOST = row(ACTIVE, lease_expires_at=NOW)
GONE = row(
    ACTIVE, ownership_state=OwnershipState.LEASE_EXPIRED_RECLAIMABLE, attempt_state=AttemptState.ATTEMPT_INTERRUPTED
)
WAITS = row(RUNNABLE, ELIGIBLE)
PARKED = row(RUNNABLE, ELIGIBLE, attempt_state=AttemptState.ATTEMPT_INTERRUPTED)
OFFERED = {"grant": GRANT, "granted_until": NOW + 10}

GUARD_CASES = {
    "complete": GuardCase(lambda row: finish.complete(row, FENCE, None, b"r", None, NOW), HELD, LIVE),
    "complete with a stream": GuardCase(
        lambda row: finish.complete(row, FENCE, None, b"r", None, NOW), row(ACTIVE, stream_index=0), LIVE
    ),
    "fail and retry": GuardCase(lambda row: failed(row, 5), HELD, LIVE),
    "fail for good": GuardCase(lambda row: failed(row, 0), HELD, LIVE),
    "complete too late": GuardCase(lambda row: finish.complete(row, FENCE, None, b"r", None, NOW), LOST, LAPSED),
    "delay": GuardCase(lambda row: delay.delay(row, FENCE, None, NOW + 5, NOW), HELD, LIVE),
    "wait for children": GuardCase(
        lambda row: delay.defer_for_children(row, FENCE, None, unresolved=True, now=NOW), HELD, LIVE
    ),
    "progress": GuardCase(lambda row: progress_rules.update_progress(row, FENCE, 50, "half", NOW), HELD, LIVE),
    "tag": GuardCase(lambda row: tag_rules.set_tags(row, {"a.b": "c"}), HELD),
    "promote": GuardCase(
        lambda row: delay.promote_delayed(row, NOW), row(RUNNABLE, UNTIL_TIME, delay_until=NOW - 1), None, NOW - 1
    ),
    "mark a lapse": GuardCase(lambda row: expire_rules.mark_lease_expired_if_due(row, NOW), LOST, LAPSED),
    "expire": GuardCase(lambda row: expire_rules.expire(row, EXECUTION, expire_rules.ATTEMPT_TIMEOUT), HELD),
    "time an attempt out": GuardCase(
        lambda row: expire_rules.expire_if_due(row, EXECUTION, expire_rules.ATTEMPT_TIMEOUT, NOW),
        row(ACTIVE, attempt_timeout_at=NOW - 1, deadline_at=NOW + 9),
        None,
        NOW - 1,
    ),
    "end at the deadline": GuardCase(
        lambda row: expire_rules.expire_if_due(row, EXECUTION, expire_rules.EXECUTION_DEADLINE, NOW),
        row(ACTIVE, attempt_timeout_at=NOW + 9, deadline_at=NOW - 2),
        None,
        NOW - 2,
    ),
    "cancel": GuardCase(lambda row: cancel.cancel(row, FENCE, "operator_override", "stop"), WAITS),
    "cancel as holder": GuardCase(lambda row: cancel.cancel(row, FENCE, cancel.WORKER, "stop"), HELD),
    "revoke": GuardCase(lambda row: operator.revoke_lease(row, "", "", "bad node"), HELD),
    "change priority": GuardCase(lambda row: operator.change_priority(row, 50), WAITS),
    "block": GuardCase(lambda row: operator.block(row, "waiting_for_quota", "full"), WAITS),
    "unblock": GuardCase(
        lambda row: operator.unblock(row, None),
        row(RUNNABLE, EligibilityState.BLOCKED_BY_QUOTA, blocking_reason=BlockingReason.WAITING_FOR_QUOTA),
    ),
    "replay": GuardCase(lambda row: replay.replay(row), row(TERMINAL, terminal_outcome=TerminalOutcome.FAILED)),
    "offer": GuardCase(lambda row: grant_rules.issue_claim_grant(row, ORDER, NOW), WAITS),
    "offer to one who lacks something": GuardCase(
        lambda row: grant_rules.issue_claim_grant(row, ORDER, NOW), row(RUNNABLE, ELIGIBLE, required_capabilities="gpu")
    ),
    "claim what was offered": GuardCase(
        lambda row: claim.claim_execution(row, HOLDER, NOW), row(RUNNABLE, ELIGIBLE, **OFFERED), None, None, NOW + 9
    ),
    "resume what was offered": GuardCase(
        lambda row: claim.claim_resumed_execution(row, HOLDER, NOW),
        msgspec.structs.replace(PARKED, **OFFERED),
        None,
        None,
        NOW + 9,
    ),
    "resume what was offered too long ago": GuardCase(
        lambda row: claim.claim_resumed_execution(row, HOLDER, NOW),
        msgspec.structs.replace(PARKED, grant=LATE_GRANT, granted_until=NOW),
    ),
    "claim": GuardCase(lambda row: claim.claim_ready(row, HOLDER, frozenset(), NOW), WAITS),
    "claim as operator": GuardCase(lambda row: claim.issue_grant_and_claim(row, HOLDER, NOW), PARKED),
    "offer what lost its lease": GuardCase(lambda row: reclaim.issue_reclaim_grant(row, ORDER, NOW), GONE),
    "reclaim": GuardCase(
        lambda row: reclaim.reclaim_execution(row, HOLDER, None, NOW),
        msgspec.structs.replace(GONE, **OFFERED),
        None,
        None,
        NOW + 9,
    ),
    "take over": GuardCase(lambda row: reclaim.take_over(row, HOLDER, frozenset(), NOW), GONE),
    "end at the cap": GuardCase(
        lambda row: reclaim.fail_if_at_cap(row), msgspec.structs.replace(GONE, terms='{"max_reclaim_count":0}')
    ),
    "purge": GuardCase(
        lambda row: retention.purge(row, NOW),
        row(TERMINAL, terminal_outcome=TerminalOutcome.SUCCESS, completed_at=NOW - 10, purge_at=NOW - 3),
        None,
        NOW - 3,
    ),
    "keep for another": GuardCase(
        lambda row: retention.purge(row, NOW, others=[WAITS]),
        row(TERMINAL, terminal_outcome=TerminalOutcome.SUCCESS, completed_at=NOW - 10, purge_at=NOW - 3),
    ),
}


@pytest.mark.parametrize("case", GUARD_CASES.values(), ids=GUARD_CASES.keys())
def test_a_change_guards_the_row_it_was_decided_on_and_the_required_lease_and_time(
    case: GuardCase,
) -> None:
    change = case.decided(case.row).change

    assert change is not None
    lease = None if case.lease is None else LeaseCheck(case.lease, "lease-1", 3)
    assert change.guards == (Guard(Execution, (EXECUTION,), 7, lease),)
    assert (change.not_before, change.not_after) == (case.not_before, case.not_after)


def test_a_sweep_lease_is_taken_from_another_process_only_after_expiry_and_renewed_at_any_time() -> None:
    held = SweepLease("purge", "one", NOW - 4, revision=7)

    def taken(holder: str) -> Change | None:
        return sweep_lease.hold_sweep(held, "purge", holder, 1000, NOW).change

    guards = (Guard(SweepLease, ("purge",), 7),)
    assert (other := taken("two")) is not None
    assert (own := taken("one")) is not None
    assert (other.guards, other.not_before) == (guards, NOW - 4)
    assert (own.guards, own.not_before) == (guards, None)


# Each: when to run, the expiry of the dedup key, and the instants between which the create is decided so.
BIRTHS: dict[str, tuple[int | None, int | None, int | None, int | None]] = {
    "plain": (None, None, None, None),
    "delayed": (NOW + 1, None, None, NOW),
    "due": (NOW, None, NOW, None),
    "with a key that is over": (None, NOW, NOW, None),
    "due, with a key that was over earlier": (NOW - 2, NOW - 3, NOW - 2, None),
    "due, with a key that was over later": (NOW - 3, NOW - 2, NOW - 2, None),
    "delayed, with a key that is over": (NOW + 1, NOW, NOW, NOW),
}


@pytest.mark.parametrize(("due", "over", "not_before", "not_after"), BIRTHS.values(), ids=BIRTHS.keys())
@pytest.mark.parametrize("window", [None, 0])
def test_a_create_guards_an_unused_id_an_unused_key_and_the_time(
    window: int | None, due: int | None, over: int | None, not_before: int | None, not_after: int | None
) -> None:
    ask = create.CreateExecution(
        execution_id=EXECUTION,
        partition=86,
        namespace="n",
        lane_id="default",
        execution_kind="task",
        idempotency_key="k",
        delay_until=due,
        policy=None if window is None else f'{{"dedup_window_ms":{window}}}',
    )
    remembered = None if over is None else IdempotencyKey(86, ask.digest, "another", over, revision=7)

    change = create.create(None, remembered, ask, NOW).change

    assert change is not None
    key = Guard(IdempotencyKey, (86, ask.digest), None if remembered is None else 7)
    assert change.guards == (Guard(Execution, (EXECUTION,), None), key)
    assert (change.not_before, change.not_after) == (not_before, not_after)
    assert bool(change.queues) == (not_after is not None), "a lane is listed though nothing stands in its lines yet"


# -- the second load -------------------------------------------------------------------------------------------------

CAPPED = {"terms": '{"max_reclaim_count":0}'}
NEEDS_GPU = {"required_capabilities": "gpu"}
ENDED = row(TERMINAL, terminal_outcome=TerminalOutcome.SUCCESS)
BLOCKED = row(RUNNABLE, EligibilityState.BLOCKED_BY_QUOTA, blocking_reason=BlockingReason.WAITING_FOR_QUOTA)


def end_at_cap(row: Execution | None) -> Decision[Any]:
    return reclaim.fail_if_at_cap(row)


def take_over(row: Execution | None) -> Decision[Any]:
    return reclaim.take_over(row, HOLDER, frozenset(), NOW)


def claim_guarded(row: Execution | None) -> Decision[Any]:
    return reclaim.claim_guarded(row, HOLDER, frozenset(), NOW)


def changed(row: Execution, fields: dict[str, Any]) -> Execution:
    return msgspec.structs.replace(row, **fields)


UNCHANGED: dict[str, tuple[Callable[[Execution | None], Decision[Any]], Execution | None, Any]] = {
    "the cap: gone": (end_at_cap, None, None),
    "the cap: taken over by another": (end_at_cap, changed(HELD, CAPPED), None),
    "the cap: put away by another": (end_at_cap, changed(PARKED, CAPPED), None),
    "the cap: ended by another": (end_at_cap, changed(ENDED, CAPPED), None),
    "the cap: not reached": (end_at_cap, GONE, None),
    "taking over: gone": (take_over, None, NotReclaimable()),
    "taking over: held": (take_over, HELD, NotReclaimable()),
    "taking over: put away by another": (take_over, PARKED, NotReclaimable()),
    "taking over: ended by another": (take_over, ENDED, NotReclaimable()),
    "taking over: offered to another": (take_over, changed(GONE, OFFERED), NotReclaimable()),
    "taking over: beyond this worker": (
        take_over,
        changed(GONE, NEEDS_GPU),
        NotReclaimable("capability_mismatch: gpu"),
    ),
    "claiming: gone": (claim_guarded, None, NotReclaimable()),
    "claiming: held": (claim_guarded, HELD, None),
    "claiming: blocked by another": (claim_guarded, BLOCKED, None),
    "claiming: ended by another": (claim_guarded, ENDED, None),
    "claiming: offered to another": (claim_guarded, changed(WAITS, OFFERED), None),
    "claiming: beyond this worker": (claim_guarded, changed(WAITS, NEEDS_GPU), None),
}


@pytest.mark.parametrize(("rule", "row", "answer"), UNCHANGED.values(), ids=UNCHANGED.keys())
def test_a_row_that_changed_since_it_was_selected_is_left_unchanged(
    rule: Callable[[Execution | None], Decision[Any]], row: Execution | None, answer: Any
) -> None:
    assert rule(row) == Decision(answer)


# -- order of checks --------------------------------------------------------------------------------------------------

# Each row has one reason less than the one before: the first failing check is reported, whatever else is wrong.
LEASED, RUNNING = {"ownership_state": OwnershipState.LEASED}, {"attempt_state": AttemptState.RUNNING_ATTEMPT}
FAILED = {"terminal_outcome": TerminalOutcome.FAILED}
DELAYED = {"eligibility_state": UNTIL_TIME}


def claimed(row: Execution | None) -> Decision[Any]:
    return claim.claim_execution(row, HOLDER, NOW)


def resumed(row: Execution | None) -> Decision[Any]:
    return claim.claim_resumed_execution(row, HOLDER, NOW)


def taken(row: Execution | None) -> Decision[Any]:
    return claim.issue_grant_and_claim(row, HOLDER, NOW)


REFUSED: dict[str, tuple[Callable[[Execution | None], Decision[Any]], Execution | None, type[errors.FabricError]]] = {
    "claim: gone": (claimed, None, errors.NotFound),
    "claim: not runnable": (claimed, changed(ENDED, LEASED), errors.ExecutionNotLeaseable),
    "claim: leased": (claimed, changed(WAITS, LEASED | DELAYED | FAILED | RUNNING), errors.LeaseConflict),
    "claim: delayed": (claimed, changed(WAITS, DELAYED | RUNNING), errors.ExecutionNotLeaseable),
    "claim: with an outcome": (claimed, changed(WAITS, FAILED | RUNNING), errors.ExecutionNotLeaseable),
    "claim: running": (claimed, changed(WAITS, RUNNING), errors.ActiveAttemptExists),
    "claim: interrupted": (claimed, PARKED, errors.UseClaimResumedExecution),
    "claim: without a grant": (claimed, WAITS, errors.InvalidClaimGrant),
    "resume: gone": (resumed, None, errors.NotFound),
    "resume: not runnable": (resumed, HELD, errors.ExecutionNotLeaseable),
    "resume: not interrupted": (resumed, changed(WAITS, LEASED), errors.NotAResumedExecution),
    "resume: leased": (resumed, changed(PARKED, LEASED | DELAYED), errors.LeaseConflict),
    "resume: with an outcome": (resumed, changed(PARKED, FAILED), errors.ExecutionNotLeaseable),
    "resume: without a grant": (resumed, PARKED, errors.InvalidClaimGrant),
    "operator: gone": (taken, None, errors.NotFound),
    "operator: not runnable": (taken, HELD, errors.ExecutionNotEligible),
    "operator: leased": (taken, changed(WAITS, LEASED | FAILED | RUNNING | OFFERED), errors.LeaseConflict),
    "operator: with an outcome": (taken, changed(WAITS, FAILED | RUNNING | OFFERED), errors.ExecutionNotEligible),
    "operator: running": (taken, changed(WAITS, RUNNING | OFFERED), errors.ActiveAttemptExists),
    "operator: offered": (taken, changed(WAITS, OFFERED | DELAYED), errors.GrantAlreadyExists),
    "operator: delayed": (taken, changed(WAITS, DELAYED), errors.ExecutionNotEligible),
}


@pytest.mark.parametrize(("rule", "row", "error"), REFUSED.values(), ids=REFUSED.keys())
def test_a_claim_is_refused_by_the_first_check_that_fails(
    rule: Callable[[Execution | None], Decision[Any]], row: Execution | None, error: type[errors.FabricError]
) -> None:
    decision = rule(row)

    assert type(decision.answer) is error
    assert decision.change is None


def test_a_lease_is_renewed_by_the_attempt_that_holds_it() -> None:
    assert lease.check_renewal(HELD, 0, FENCE, NOW) == Decision(None)
    assert isinstance(lease.check_renewal(HELD, 1, FENCE, NOW).answer, errors.StaleLease)
    assert isinstance(lease.check_renewal(None, 0, FENCE, NOW).answer, errors.NotFound)
    assert isinstance(lease.check_renewal(LOST, 0, FENCE, NOW).answer, errors.LeaseExpired)
