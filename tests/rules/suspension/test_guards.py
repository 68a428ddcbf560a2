"""The guards of suspension changes: the execution and the suspension as they were loaded, and the time.

A signal that arrives while its execution parks, and a worker that parks while its signal arrives, are decided again.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.model.change import Change, Delete, Guard, LeaseCheck, LeaseRequirement, Upsert
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildCompletion
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.model.states import AttemptState, LifecyclePhase
from flowfabric.model.suspension import IdempotencyRecord, Suspension, TimeoutBehavior, Waitpoint
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.durable import mailbox
from flowfabric.rules.durable import park as park_rules
from flowfabric.rules.security import waitpoint_token as waitpoint_tokens
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import resume, signals
from flowfabric.rules.suspension import suspend as suspend_rules
from flowfabric.rules.suspension import waitpoints as waitpoint_rules
from flowfabric.rules.suspension.arguments import FreshWaitpoint, UsePendingWaitpoint
from tests.rules.execution.rows import EXECUTION, NOW
from tests.rules.execution.test_guards import FENCE, HELD, row
from tests.rules.suspension.test_totality import GATES, HOLDER, KEY, MAIL, SIGNAL, W, _args

LIVE = LeaseCheck(LeaseRequirement.LIVE, "lease-1", 3)
ROOT = Suspension(EXECUTION, 86, gates=wait_encoding.encode_or_none(GATES), revision=4)
SUSPENDED = row(LifecyclePhase.SUSPENDED, attempt_state=AttemptState.ATTEMPT_INTERRUPTED)
PENDING = Waitpoint(
    waitpoint_id=W,
    partition=86,
    execution_id=EXECUTION,
    attempt_index=0,
    waitpoint_key="k",
    created_at=NOW - 9,
    token_kid="k1",
    token_fingerprint=waitpoint_tokens.token_fingerprint(waitpoint_tokens.mint_token(KEY, EXECUTION, W)),
    expires_at=NOW + 5,
    pending_until=NOW + 5,
)


def suspended(behavior: TimeoutBehavior, *, on_gates: bool) -> Suspension:
    """Return a suspension whose timeout has passed."""
    return Suspension(
        execution_id=EXECUTION,
        partition=86,
        suspension_id="s1",
        attempt_index=0,
        waitpoints=None if on_gates else f'[["{W}","k"]]',
        resume_condition=None if on_gates else '{"Single":{"waitpoint_key":"k","matcher":"Wildcard"}}',
        waits_on='["late"]' if on_gates else None,
        gates=wait_encoding.encode_or_none(GATES),
        timeout_at=NOW - 2,
        timeout_behavior=behavior,
        due_at=NOW - 2,
        revision=4,
    )


def guarded_change(decision: Decision[Any], lease: LeaseCheck | None, root: int | None = 4) -> Change:
    """Return the change after checking that it guards the execution and the suspension as they were loaded."""
    change = decision.change
    assert change is not None
    execution = Guard(Execution, (EXECUTION,), 7, lease)
    assert set(change.guards) == {execution, Guard(Suspension, (EXECUTION,), root)}
    return change


@pytest.mark.parametrize("behavior", TimeoutBehavior)
@pytest.mark.parametrize("on_gates", [False, True])
def test_a_timeout_guards_what_was_loaded_and_its_time(behavior: TimeoutBehavior, on_gates: bool) -> None:
    root = suspended(behavior, on_gates=on_gates)

    change = guarded_change(resume.expire_suspension(SUSPENDED, root, "sig", NOW), None)

    assert (change.not_before, change.not_after) == (NOW - 2, None)


def test_a_manual_resume_guards_what_was_loaded() -> None:
    root = suspended(TimeoutBehavior.FAIL, on_gates=False)
    guarded_change(resume.resume_execution(SUSPENDED, root, 0), None)


@pytest.mark.parametrize("names", [("g",), ("g", "late")])
def test_a_park_guards_what_was_loaded_and_the_lease(names: tuple[str, ...]) -> None:
    decision = park_rules.park(
        park_rules.ParkRows(HELD, ROOT),
        (),
        names,
        suspension_id="s2",
        reason_code="x",
        fence=FENCE,
        holder=HOLDER,
        now=NOW,
    )
    guarded_change(decision, LIVE)


def test_collecting_child_results_guards_what_was_loaded() -> None:
    ends = [ChildCompletion(EXECUTION, "c1", 0, "success", NOW), ChildCompletion(EXECUTION, "c2", 0, "success", NOW)]
    for found in (ends, ends[:1], [ChildCompletion(EXECUTION, "c9", 0, "success", NOW)]):
        guarded_change(gate_rules.deliver_child_completions(SUSPENDED, ROOT, found, NOW), None)


@pytest.mark.parametrize("signalled", [0, 1])
def test_a_suspend_guards_what_was_loaded_and_the_time_of_a_pending_waitpoint(signalled: int) -> None:
    place = msgspec.structs.replace(PENDING, signal_count=signalled)
    fresh = suspend_rules.SuspendRows(HELD, None, None, {}, [], [KEY])
    pending = suspend_rules.SuspendRows(HELD, ROOT, None, {W: place}, [], [KEY])

    minted = guarded_change(suspend_rules.suspend(fresh, _args(FreshWaitpoint(W, "k")), FENCE, None, NOW), LIVE, None)
    activated = guarded_change(suspend_rules.suspend(pending, _args(UsePendingWaitpoint(W)), FENCE, None, NOW), LIVE)

    assert (minted.not_after, activated.not_after) == (None, NOW + 4)


def test_a_pending_waitpoint_does_not_expire_before_its_time() -> None:
    place = msgspec.structs.replace(PENDING, expires_at=NOW - 1, pending_until=NOW - 1)

    change = waitpoint_rules.expire_pending(HELD, ROOT, place, NOW).change

    assert change is not None
    assert change.not_before == NOW - 1


ROTATED = [SigningKey("k2", "11" * 32, current=True), SigningKey("k1", "00" * 32, current=False, expires_at=NOW + 3)]
STALE = IdempotencyRecord(EXECUTION, W, "d", NOW - 6, "first")


@pytest.mark.parametrize(
    ("keys", "kept", "place", "bounds"),
    [
        ([KEY], None, msgspec.structs.replace(PENDING, pending_until=None, expires_at=None), (None, None)),
        ([KEY], None, PENDING, (None, NOW + 4)),
        ([KEY], STALE, PENDING, (NOW - 6, NOW + 4)),
        (ROTATED, None, PENDING, (None, NOW + 3)),
    ],
    ids=["any time", "pending", "pending, and known long ago", "pending, signed with a key that ends sooner"],
)
def test_a_signal_guards_what_was_loaded_and_everything_that_admits_it(
    keys: list[SigningKey], kept: IdempotencyRecord | None, place: Waitpoint, bounds: tuple[int | None, int | None]
) -> None:
    decision = signals.deliver_signal(signals.SignalRows(HELD, ROOT, place, kept, keys), SIGNAL, NOW)

    change = guarded_change(decision, None)
    assert (change.not_before, change.not_after) == bounds


def test_each_signal_to_a_full_log_evicts_one_entry_whatever_was_evicted_before() -> None:
    place, ask = PENDING, msgspec.structs.replace(SIGNAL, signal_maxlen=2, max_signals_per_execution=0)
    left = []
    for _ in range(5):
        change = guarded_change(
            signals.deliver_signal(signals.SignalRows(HELD, ROOT, place, None, [KEY]), ask, NOW), None
        )
        [place] = [
            write.row for write in change.writes if isinstance(write, Upsert) and isinstance(write.row, Waitpoint)
        ]
        left.append([write.key[-1] for write in change.writes if isinstance(write, Delete)])

    assert left == [[], [], [1], [2], [3]]


@pytest.mark.parametrize("kept", [None, STALE])
def test_a_call_with_an_old_key_takes_effect_again_only_after_the_key_has_expired(
    kept: IdempotencyRecord | None,
) -> None:
    over = None if kept is None else NOW - 6
    scene = suspend_rules.SuspendRows(HELD, ROOT, kept, {W: PENDING}, [], [KEY])
    args = msgspec.structs.replace(_args(UsePendingWaitpoint(W)), idempotency_key="i")

    suspends = guarded_change(suspend_rules.suspend(scene, args, FENCE, None, NOW), LIVE)
    sent = guarded_change(mailbox.send_message(HELD, ROOT, kept, MAIL, NOW), None)

    assert (suspends.not_before, sent.not_before) == (over, over)


@pytest.mark.parametrize("root", [None, ROOT])
def test_a_new_waitpoint_guards_what_was_loaded_and_the_lease(root: Suspension | None) -> None:
    asked: dict[str, Any] = {"waitpoint_id": W, "waitpoint_key": "k", "expires_in_ms": 5, "now": NOW}

    change = waitpoint_rules.create_waitpoint(HELD, root, [KEY], FENCE, 0, **asked).change

    assert change is not None
    execution, none = Guard(Execution, (EXECUTION,), 7, LIVE), Guard(Suspension, (EXECUTION,), None)
    assert change.guards == ((execution, none) if root is None else (execution,))


GONE_OR_NOT_DUE: list[tuple[Execution | None, Suspension | None, Waitpoint | None]] = [
    (HELD, ROOT, None),
    (None, ROOT, msgspec.structs.replace(PENDING, pending_until=NOW - 1)),
    (HELD, None, msgspec.structs.replace(PENDING, pending_until=NOW - 1)),
    (HELD, ROOT, msgspec.structs.replace(PENDING, pending_until=None)),
    (HELD, ROOT, msgspec.structs.replace(PENDING, pending_until=NOW + 1)),
]


@pytest.mark.parametrize(("execution", "root", "place"), GONE_OR_NOT_DUE)
def test_a_waitpoint_that_changed_since_it_was_selected_is_left_unchanged(
    execution: Execution | None, root: Suspension | None, place: Waitpoint | None
) -> None:
    assert waitpoint_rules.expire_pending(execution, root, place, NOW) == Decision(False)
