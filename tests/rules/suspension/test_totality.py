"""The suspension rules answer or refuse any rows, and guard what they decided on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

import msgspec
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st

from flowfabric.errors import FabricError
from flowfabric.handles import HandleFields
from flowfabric.model.change import Patch, Upsert, Write
from flowfabric.model.condition import Single
from flowfabric.model.execution import Execution
from flowfabric.model.gate import ChildCompletion, Gate, GateKind
from flowfabric.model.instant import FromNow
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.model.states import public_state
from flowfabric.model.suspension import NO_TIMEOUT, IdempotencyRecord, Suspension, TimeoutBehavior, Waitpoint
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import gates as gate_rules
from flowfabric.rules.durable import mailbox
from flowfabric.rules.durable import park as park_rules
from flowfabric.rules.durable.gates import GateArgs
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.security import waitpoint_token as waitpoint_tokens
from flowfabric.rules.suspension import encoding as wait_encoding
from flowfabric.rules.suspension import resume, signals
from flowfabric.rules.suspension import state as wait_state
from flowfabric.rules.suspension import suspend as suspend_rules
from flowfabric.rules.suspension import waitpoints as waitpoint_rules
from flowfabric.rules.suspension.arguments import FreshWaitpoint, SuspendArgs, UsePendingWaitpoint
from flowfabric.rules.suspension.signals import SignalArgs
from tests.rules.execution.test_totality import FENCES, INSTANTS, NOW, REACHING, ROWS, presented_fence

E = "{fp:86}:11111111-1111-4111-8111-111111111111"
W = "22222222-2222-4222-8222-222222222222"
KEY = SigningKey("k1", "00" * 32, current=True)
HOLDER = HandleFields(E, 0, "attempt-1", "lease-1", 1, 1000, "default", "wa-1")  # type: ignore[arg-type]
GATES = {
    "g": Gate(GateKind.SIGNALS, NOW - 5, condition='{"Single":{"waitpoint_key":"k","matcher":"Wildcard"}}'),
    "late": Gate(GateKind.TIMER, NOW - 5, expires_at=NOW),
    "mail": Gate(GateKind.MAILBOX, NOW - 5, mailbox="m"),
    "kids": Gate(GateKind.CHILDREN, NOW - 5, children=("c1", "c2"), need=2),
}


@st.composite
def roots(draw: st.DrawFn) -> Suspension:
    """Any suspension, open or closed, on a condition or on gates."""
    opened = draw(st.booleans())
    timeout = draw(INSTANTS)
    on_gates = draw(st.booleans())
    return Suspension(
        execution_id=E,
        partition=86,
        signal_count=draw(st.integers(0, 3)),
        suspension_id=draw(st.sampled_from([None, "s1"])),
        attempt_index=0,
        waitpoints=None if on_gates else f'[["{W}","k"]]',
        timeout_at=timeout,
        timeout_behavior=draw(st.sampled_from([None, *TimeoutBehavior]))
        if not on_gates
        else TimeoutBehavior.AUTO_RESUME,
        due_at=(timeout or NO_TIMEOUT) if opened else None,
        resume_condition=None if on_gates else '{"Single":{"waitpoint_key":"k","matcher":{"ByName":"go"}}}',
        closed_at=None if opened else NOW - 1,
        close_reason=None if opened else "resumed",
        waits_on='["g","late"]' if on_gates else None,
        gates=draw(st.sampled_from([None, wait_encoding.encode_or_none(GATES)])),
        mail=draw(st.sampled_from([None, '{"m":[1,3]}'])),
        revision=4,
    )


@st.composite
def waitpoints(draw: st.DrawFn) -> Waitpoint:
    """Any waitpoint: pending, of a suspension, of a gate, closed manually; of this execution or of another."""
    expires = draw(INSTANTS)
    return Waitpoint(
        waitpoint_id=W,
        partition=86,
        execution_id=draw(st.sampled_from([E, "{fp:86}:33333333-3333-4333-8333-333333333333"])),
        attempt_index=draw(st.integers(0, 1)),
        waitpoint_key="k",
        created_at=NOW - 9,
        token_kid=draw(st.sampled_from(["k1", "k0", ""])),
        token_fingerprint="f",
        suspension_id=draw(st.sampled_from([None, "s1", "s0"])),
        gate=draw(st.sampled_from([None, None, "g", "gone"])),
        activated_at=draw(st.sampled_from([None, NOW - 3])),
        expires_at=expires,
        pending_until=draw(st.sampled_from([None, expires])),
        closed_at=draw(st.sampled_from([None, None, NOW - 1])),
        signal_count=draw(st.integers(0, 2)),
    )


def _args(*bindings: Any) -> SuspendArgs:
    return SuspendArgs(
        suspension_id="s2",
        waitpoints=bindings,
        resume_condition=Single("k"),
        reason_code="waiting_for_signal",
        now=NOW,
        idempotency_key="i",
    )


SIGNAL = SignalArgs(
    execution_id=E,
    waitpoint_id=W,
    signal_id="s",
    signal_name="go",
    waitpoint_token=waitpoint_tokens.mint_token(KEY, E, W),
    idempotency_key="i",
    max_signals_per_execution=3,
)
KEPT = IdempotencyRecord(E, W, "d", NOW + 5, "first")
STALE = IdempotencyRecord(E, W, "d", NOW, "first")
ENDS = [ChildCompletion(E, "c1", 0, "success", NOW), ChildCompletion(E, "c2", 0, "failed", NOW)]
MAIL = MessageArgs(execution_id=E, mailbox="m", message_id="x", idempotency_key="i")

Row: TypeAlias = Execution | None
Root: TypeAlias = Suspension | None
Place: TypeAlias = Waitpoint | None
Rule: TypeAlias = Callable[[Row, Root, Place, Fence], Decision[Any]]


def _suspend(binding: Any, remembered: IdempotencyRecord | None = None) -> Rule:
    def rule(row: Row, root: Root, waitpoint: Place, fence: Fence) -> Decision[Any]:
        found = {} if waitpoint is None else {W: waitpoint}
        scene = suspend_rules.SuspendRows(row, root, remembered, found, [], [KEY])
        return suspend_rules.suspend(scene, _args(binding), fence, None, NOW)

    return rule


def _open(kind: GateKind, **given: Any) -> Rule:
    def rule(row: Row, root: Root, waitpoint: Place, fence: Fence) -> Decision[Any]:
        scene = gate_rules.GateRows(row, root, ends=ENDS, keys=[KEY])
        return gate_rules.open_gate(scene, GateArgs(name="new", kind=kind, **given), fence, NOW)

    return rule


def _park(row: Row, root: Root, waitpoint: Place, fence: Fence) -> Decision[Any]:
    return park_rules.park(
        park_rules.ParkRows(row, root),
        (),
        ("g",),
        suspension_id="s2",
        reason_code="x",
        fence=fence,
        holder=HOLDER,
        now=NOW,
    )


RULES: dict[str, Rule] = {
    "suspend": _suspend(FreshWaitpoint(W, "k")),
    "suspend on pending": _suspend(UsePendingWaitpoint(W)),
    "suspend after the key's time": _suspend(FreshWaitpoint(W, "k"), IdempotencyRecord(E, "suspend", "d", NOW, "{}")),
    "signal": lambda row, root, waitpoint, _: signals.deliver_signal(
        signals.SignalRows(row, root, waitpoint, None, [KEY]), SIGNAL, NOW
    ),
    "signal again": lambda row, root, waitpoint, _: signals.deliver_signal(
        signals.SignalRows(row, root, waitpoint, KEPT, [KEY]), SIGNAL, NOW
    ),
    "signal much later": lambda row, root, waitpoint, _: signals.deliver_signal(
        signals.SignalRows(row, root, waitpoint, STALE, [KEY]), SIGNAL, NOW
    ),
    "forge": lambda row, root, waitpoint, _: signals.deliver_signal(
        signals.SignalRows(row, root, waitpoint, None, [KEY]),
        msgspec.structs.replace(SIGNAL, waitpoint_token="k1:" + "0" * 64),
        NOW,
    ),
    "resume": lambda row, root, waitpoint, _: resume.resume_execution(row, root, 0),
    "resume later": lambda row, root, waitpoint, _: resume.resume_execution(row, root, 500),
    "time out": lambda row, root, waitpoint, _: resume.expire_suspension(row, root, "sig", NOW),
    "make a waitpoint": lambda row, root, waitpoint, fence: waitpoint_rules.create_waitpoint(
        row, root, [KEY], fence, 0, waitpoint_id=W, waitpoint_key="k", expires_in_ms=5, now=NOW
    ),
    "close a waitpoint": lambda row, root, waitpoint, _: waitpoint_rules.close_waitpoint(
        row, root, waitpoint, "why", NOW
    ),
    "expire a waitpoint": lambda row, root, waitpoint, _: waitpoint_rules.expire_pending(row, root, waitpoint, NOW),
    "open a timer": _open(GateKind.TIMER, expires_in_ms=5),
    "open a mailbox": _open(GateKind.MAILBOX, mailbox="m"),
    "wait for children": _open(GateKind.CHILDREN, children=("c1", "c2"), need=1),
    "open an approval": _open(GateKind.SIGNALS, condition=Single("k"), waitpoints=((W, "k"),)),
    "park": _park,
    "take children in": lambda row, root, waitpoint, _: gate_rules.deliver_child_completions(row, root, ENDS, NOW),
    "send": lambda row, root, waitpoint, _: mailbox.send_message(row, root, None, MAIL, NOW),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@settings(max_examples=80, deadline=None)
@given(row=ROWS, root=st.none() | roots(), waitpoint=st.none() | waitpoints(), fence=FENCES)
def test_a_suspension_rule_is_total_and_guards_what_it_writes(
    rule: Rule, row: Execution | None, root: Suspension | None, waitpoint: Waitpoint | None, fence: Fence | None
) -> None:
    _assert_sound(rule, row, root, waitpoint, presented_fence(fence, row))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_the_drawn_rows_produce_a_change_of_each_suspension_rule(rule: Rule) -> None:
    def changes(case: tuple[Row, Root, Place, Fence | None]) -> bool:
        row, root, waitpoint, fence = case
        return row is not None and rule(row, root, waitpoint, presented_fence(fence, row)).change is not None

    drawn = st.tuples(ROWS, st.none() | roots(), st.none() | waitpoints(), FENCES)
    row, root, waitpoint, fence = find(drawn, changes, settings=REACHING)

    _assert_sound(rule, row, root, waitpoint, presented_fence(fence, row))


def _assert_sound(rule: Rule, row: Row, root: Root, waitpoint: Place, fence: Fence) -> None:
    decision = rule(row, root, waitpoint, fence)
    with contextlib.suppress(FabricError):
        decision.unwrap(NOW)
    if decision.change is None:
        return
    guarded = {(guard.row, guard.key): guard.revision for guard in decision.change.guards}
    assert guarded, "a change is decided on something"
    if row is not None:
        assert guarded[Execution, (E,)] == row.revision, "whatever is written of its waits, its row is guarded"
    if any(_writes_root(write) for write in decision.change.writes):
        assert guarded[Suspension, (E,)] == (None if root is None else root.revision)
    for write in decision.change.writes:
        if isinstance(write, Patch) and write.row is Execution and row is not None:
            values = {name: NOW if isinstance(value, FromNow) else value for name, value in write.fields.items()}
            after = msgspec.structs.replace(row, **values)
            derived = public_state(after.lifecycle_phase, after.eligibility_state, after.terminal_outcome)
            assert after.public_state is derived


def _writes_root(write: Write) -> bool:
    if isinstance(write, Upsert):
        return isinstance(write.row, Suspension)
    return isinstance(write, Patch) and write.row is Suspension


@given(root=st.none() | roots(), waitpoint=waitpoints())
def test_the_views_of_a_waitpoint_agree(root: Suspension | None, waitpoint: Waitpoint) -> None:
    state = wait_state.waitpoint_state(waitpoint, root, NOW)

    assert (waitpoint_rules.waitpoint_view(waitpoint, root, NOW) is None) == (state == "closed")
    assert (wait_state.waitpoint_close_reason(waitpoint, root, NOW) is None) == (
        state != "closed" and waitpoint.close_reason is None
    )
    assert waitpoint_rules.waitpoint_record(waitpoint, root, NOW).state is state
