"""Admission: may this execution run now, by the rate and the concurrency of a quota policy.

A policy is decided on as one sheet, like a budget. An admission is a slot and an entry in a sliding window. The slot is
given back when the execution's life ends, or by the call that got it and could not use it; the entry stays, since the
request was made. Only when another policy of the execution refuses it, neither stays. A slot that lapsed still counts
until it is released, replaced or found dead by the reconciler, which asks the execution first: work that runs longer
than the window keeps its slot.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from flowfabric import errors
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.change import Change, Delete, Guard, Upsert, Write
from flowfabric.model.execution import Execution
from flowfabric.model.owned_id import DEFAULT_NAMESPACE, NamespacedId
from flowfabric.model.quota import QuotaPolicy, QuotaRequest, QuotaSlot
from flowfabric.model.states import EligibilityState, LifecyclePhase
from flowfabric.rules import outbox
from flowfabric.rules.execution.policy import decode_terms

DEFAULT_DIMENSION = "default"
DEFAULT_WINDOW_MS = 60_000  # of a policy with window 0, for the scheduler

RELEASE_ADMISSION = "release_admission"  # the kind of message that the end of a life sends to its quota policies

A = TypeVar("A")


class ReleaseAdmission(msgspec.Struct, frozen=True):
    """The body of that message: whose slot, of which life.

    The slot is one of a policy of the execution's namespace, or of a shared one; the end does not know which. A message
    of a release before ids had owners names no namespace.
    """

    execution_id: str
    life: int
    namespace: str = DEFAULT_NAMESPACE


class QuotaState(msgspec.Struct, frozen=True):
    """A quota policy as it was loaded, with all its slots and windows."""

    quota_policy_id: str
    partition: int
    root: QuotaPolicy | None = None
    slots: dict[str, QuotaSlot] = {}
    requests: dict[tuple[str, str], QuotaRequest] = {}
    namespace: str = DEFAULT_NAMESPACE

    @property
    def key(self) -> NamespacedId:
        """What begins the key of every row."""
        return NamespacedId(self.namespace, self.quota_policy_id)

    def root_or_new(self) -> QuotaPolicy:
        """The root, or the one that admissions of an undefined policy make."""
        return self.root or QuotaPolicy(self.quota_policy_id, self.partition, namespace=self.namespace)


QuotaDecision = tuple[A | errors.FabricError, QuotaState]


class AdmissionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks to be admitted, by which numbers (0 is no limit)."""

    execution_id: str
    window_ms: int
    rate_limit: int
    concurrency_cap: int
    jitter_ms: int = 0
    dimension: str = DEFAULT_DIMENSION
    life: int = 0
    call_id: int  # names this call
    takes_over_slot: bool = False  # whether a slot that the execution has already is this call's from now on
    provisional: bool = False  # whether other policies are asked after this one
    chance: float = 0.0


def quota_state(
    quota_policy_id: str, partition: int, rows: Iterable[Any], namespace: str = DEFAULT_NAMESPACE
) -> QuotaState:
    """The sheet of whatever rows were loaded."""
    root: QuotaPolicy | None = None
    slots, requests = {}, {}
    for row in rows:
        match row:
            case QuotaPolicy():
                root = row
            case QuotaSlot():
                slots[row.execution_id] = row
            case QuotaRequest():
                requests[row.dimension, row.execution_id] = row
    return QuotaState(quota_policy_id, partition, root, slots, requests, namespace)


def change_between(before: QuotaState, after: QuotaState) -> Change | None:
    """What makes the one of the other; None when nothing differs."""
    name = before.key
    writes: list[Write] = [Delete(QuotaSlot, (*name, key)) for key in before.slots.keys() - after.slots.keys()]
    writes += [Delete(QuotaRequest, (*name, *key)) for key in before.requests.keys() - after.requests.keys()]
    writes += [Upsert(row) for key, row in after.slots.items() if before.slots.get(key) != row]
    writes += [Upsert(row) for key, row in after.requests.items() if before.requests.get(key) != row]
    if not writes and after.root == before.root:
        return None
    revision = None if before.root is None else before.root.revision
    return Change(guards=(Guard(QuotaPolicy, name, revision),), writes=(Upsert(after.root_or_new()), *writes))


def define_policy(
    sheet: QuotaState, limits: limit_answers.QuotaLimits, now: int
) -> QuotaDecision[limit_answers.QuotaPolicyCreated | limit_answers.QuotaPolicyExists]:
    """Define a policy once."""
    if sheet.root is not None and sheet.root.defined:
        return limit_answers.QuotaPolicyExists(sheet.quota_policy_id), sheet
    root = replace(
        sheet.root_or_new(),
        defined=True,
        requests_per_window_seconds=limits.requests_per_window_seconds,
        max_requests_per_window=limits.max_requests_per_window,
        active_concurrency_cap=limits.active_concurrency_cap,
        jitter_ms=limits.jitter_ms,
        created_at=now,
    )
    return limit_answers.QuotaPolicyCreated(sheet.quota_policy_id), replace(sheet, root=root)


def limits_of(root: QuotaPolicy | None) -> limit_answers.QuotaLimits | errors.FabricError | None:
    """The stored numbers; None for a policy that was not defined."""
    if root is None or not root.defined:
        return None
    numbers = (
        root.requests_per_window_seconds,
        root.max_requests_per_window,
        root.active_concurrency_cap,
        root.jitter_ms,
    )
    if min(numbers) < 0:
        return errors.Corruption(f"quota_policy {root.quota_policy_id}: a negative limit")
    return limit_answers.QuotaLimits(*numbers)


def admit(sheet: QuotaState, ask: AdmissionRequest, now: int) -> QuotaDecision[limit_answers.AdmissionResult]:
    """Admit an execution, or say what is in the way; a refusal leaves no trace."""
    held = sheet.slots.get(ask.execution_id)
    # A slot of an earlier life was given back by the end of that life, whether or not the word has arrived.
    if held is not None and held.life >= ask.life and is_slot_live(held, now):
        if abs(held.admission) == ask.call_id:
            return limit_answers.Admitted(), sheet  # this very call, whose first answer got lost
        if not ask.takes_over_slot:
            return limit_answers.AlreadyAdmitted(), sheet
        stays_provisional = ask.provisional and held.admission < 0
        mine = replace(held, admission=-ask.call_id if stays_provisional else ask.call_id)
        return limit_answers.AlreadyAdmitted(), _with_slot(sheet, mine)
    passed = now - ask.window_ms
    window = _window(sheet, ask.dimension, passed)
    if ask.rate_limit and len(window) >= ask.rate_limit:
        oldest = min(request.admitted_at for request in window)
        jitter = min(int(ask.chance * (ask.jitter_ms + 1)), ask.jitter_ms)
        return limit_answers.RateExceeded(max(0, oldest + ask.window_ms - now) + jitter), sheet
    row = sheet.root_or_new()
    others = row.active - (held is not None and held.counted)
    if ask.concurrency_cap and others >= ask.concurrency_cap:
        return limit_answers.ConcurrencyExceeded(), sheet
    counts = ask.concurrency_cap > 0
    until = now + ask.window_ms if ask.window_ms else None
    name = -ask.call_id if ask.provisional else ask.call_id
    whose, policy = sheet.namespace, sheet.quota_policy_id
    slot = QuotaSlot(policy, ask.execution_id, ask.life, name, counts, until, whose)
    request = QuotaRequest(policy, ask.dimension, ask.execution_id, now, now + ask.window_ms, whose)
    requests = {key: one for key, one in sheet.requests.items() if key[0] != ask.dimension or one.admitted_at > passed}
    requests[ask.dimension, ask.execution_id] = request
    admitted = replace(_with_slot(sheet, slot), root=replace(row, active=max(0, others) + counts), requests=requests)
    return limit_answers.Admitted(), admitted


def life_of(row: Execution | None) -> int:
    """The life of an execution that an admission asked for now is for: of one that has ended, the next."""
    if row is None:
        return 0
    return row.replay_count + (row.lifecycle_phase is LifecyclePhase.TERMINAL)


def is_life_over(row: Execution, found: Execution | None) -> bool:
    """Whether the life for which a row was admitted is over, by what was found of it since."""
    if found is None:
        return True
    return found.replay_count == row.replay_count and found.lifecycle_phase is LifecyclePhase.TERMINAL


def is_blocked_by_quota(row: Execution, found: Execution | None) -> bool:
    """Whether it waits for a quota in that life, although it was admitted."""
    if found is None or found.replay_count != row.replay_count:
        return False
    return found.eligibility_state is EligibilityState.BLOCKED_BY_QUOTA


def release_slot(
    sheet: QuotaState, execution_id: str, *, life: int | None = None, admission: int | None = None
) -> QuotaDecision[limit_answers.AdmissionReleased]:
    """Give an execution's slot back.

    The end of a life names that life and leaves a later one's slot alone; a call that could not use its admission
    names it, and leaves the slot alone when another call relies on it meanwhile.
    """
    held = sheet.slots.get(execution_id)
    if held is None or (life is not None and held.life > life):
        return limit_answers.AdmissionReleased(), sheet
    if admission is not None and held.admission != admission:
        return limit_answers.AdmissionReleased(), sheet
    row = sheet.root_or_new()
    slots = {key: slot for key, slot in sheet.slots.items() if key != execution_id}
    return limit_answers.AdmissionReleased(), replace(
        sheet, slots=slots, root=replace(row, active=max(0, row.active - held.counted))
    )


def confirm(
    sheet: QuotaState, ask: AdmissionRequest, now: int, *, acquired: bool
) -> QuotaDecision[limit_answers.AdmissionResult]:
    """Make a provisional admission one to rely on, now that the other policies admit as well.

    `Admitted` says that the slot is this call's to give back: it `got` it, and has it still. One that another call had
    meanwhile is nobody's to give back, since either of them may be the one to claim. One that was taken back is asked
    for again.
    """
    held = sheet.slots.get(ask.execution_id)
    if held is None or held.life < ask.life or not is_slot_live(held, now):
        return admit(sheet, replace(ask, provisional=False), now)
    is_mine = acquired and abs(held.admission) == ask.call_id
    verdict = limit_answers.Admitted() if is_mine else limit_answers.AlreadyAdmitted()
    return verdict, _with_slot(sheet, replace(held, admission=ask.call_id))


def undo_admission(
    sheet: QuotaState,
    execution_id: str,
    admission: int,
    *,
    acquired: bool,
    previous_request: QuotaRequest | None = None,
) -> QuotaDecision[limit_answers.AdmissionReleased]:
    """Undo the admission of a call whose execution another policy refused: it made no request then, as after a refusal.

    `got` says that this call got it, and `before` which request stood in the window until then. What it took over is
    undone only while it is provisional: of several calls that are refused at once, the last one leaves nothing behind.
    Nothing is undone when another call has the slot by now.
    """
    held = sheet.slots.get(execution_id)
    if held is None or abs(held.admission) != admission or not (acquired or held.admission < 0):
        return limit_answers.AdmissionReleased(), sheet
    place = (DEFAULT_DIMENSION, execution_id)
    requests = {key: one for key, one in sheet.requests.items() if key != place}
    if previous_request is not None:
        requests[place] = previous_request
    return release_slot(replace(sheet, requests=requests), execution_id)


def release_messages(row: Execution) -> tuple[Upsert, ...]:
    """The messages by which the end of a life gives its slots back, in the commit that ends it."""
    policies = decode_terms(row.terms).quota_policy_ids
    if not policies:
        return ()
    origin = row.execution_id.partition("}")[0] + "}"
    return tuple(
        outbox.send(
            origin,
            f"{RELEASE_ADMISSION}:{policy}:{row.execution_id}:{row.replay_count}",
            RELEASE_ADMISSION,
            policy,
            ReleaseAdmission(row.execution_id, row.replay_count, row.namespace),
        )
        for policy in policies
    )


def reconcile(sheet: QuotaState, idle: frozenset[str], now: int) -> QuotaDecision[bool]:
    """Drop what the windows have passed over and dead slots, and make the counter equal a recount; True if it moved.

    `idle` are executions that were asked and are not active: only their slots are dead once they lapsed.
    """
    requests = {key: one for key, one in sheet.requests.items() if one.expires_at > now}
    slots = {key: slot for key, slot in sheet.slots.items() if is_slot_live(slot, now) or key not in idle}
    row = sheet.root_or_new()
    if row.active_concurrency_cap or not row.defined:
        row = replace(row, active=sum(slot.counted for slot in slots.values()))
    else:  # without a cap nothing is recounted; what callers had counted by numbers of their own goes with its slot
        gone = sum(slot.counted for key, slot in sheet.slots.items() if key not in slots)
        row = replace(row, active=max(0, row.active - gone))
    after = replace(sheet, requests=requests, slots=slots, root=row if sheet.root is not None else None)
    return change_between(sheet, after) is not None, after


def slot_holders(sheet: QuotaState, now: int) -> frozenset[tuple[str, int]]:
    """The executions, with their lives, that have a live slot: for them there is room whatever others do."""
    return frozenset((slot.execution_id, slot.life) for slot in sheet.slots.values() if is_slot_live(slot, now))


def free_capacity(sheet: QuotaState, now: int) -> int | None:
    """How many more could be admitted by the stored limits; None when there is no limit."""
    limits = limits_of(sheet.root)
    if not isinstance(limits, limit_answers.QuotaLimits) or limits.unlimited:
        return None
    rooms = []
    if limits.max_requests_per_window:
        window = _window(sheet, DEFAULT_DIMENSION, now - window_ms(limits))
        rooms.append(limits.max_requests_per_window - len(window))
    if limits.active_concurrency_cap:
        rooms.append(limits.active_concurrency_cap - sheet.root_or_new().active)
    return max(0, min(rooms))


def next_capacity_at(sheet: QuotaState, now: int) -> int | None:
    """When the window of the stored limits passes over its oldest request; None when it holds none."""
    limits = limits_of(sheet.root)
    if not isinstance(limits, limit_answers.QuotaLimits) or not limits.max_requests_per_window:
        return None
    length = window_ms(limits)
    return min((one.admitted_at + length for one in _window(sheet, DEFAULT_DIMENSION, now - length)), default=None)


def window_ms(limits: limit_answers.QuotaLimits) -> int:
    """The window that the scheduler admits by."""
    return limits.requests_per_window_seconds * 1000 or DEFAULT_WINDOW_MS


def is_slot_live(slot: QuotaSlot, now: int) -> bool:
    """Whether a slot still stands for its execution without asking it."""
    return slot.expires_at is None or slot.expires_at > now


def _window(sheet: QuotaState, dimension: str, passed: int) -> list[QuotaRequest]:
    return [one for key, one in sheet.requests.items() if key[0] == dimension and one.admitted_at > passed]


def _with_slot(sheet: QuotaState, slot: QuotaSlot) -> QuotaState:
    return replace(sheet, slots={**sheet.slots, slot.execution_id: slot})
