"""Quotas: whether an execution may run now, by the rate and concurrency of a quota policy.

A policy is decided on as one state in memory, like a budget. An admission is a slot and an entry in a sliding window.
The slot is released when the execution ends, or by the call that acquired it and could not use it. The window entry
stays, because the request was made. Only if another policy of the execution refuses it are both undone. An expired slot
still counts until it is released, replaced, or found dead by the reconciler, which checks the execution first: work
that runs longer than the window keeps its slot.

A negative `admission` marks a slot as provisional: other policies are still to be asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict, astuple, replace

from flowfabric import errors
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.change import Change, Delete, Guard, Upsert, Write
from flowfabric.model.execution import Execution
from flowfabric.model.limits.quota import QuotaPolicy, QuotaRequest, QuotaSlot
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE, NamespacedId
from flowfabric.model.states import EligibilityState, LifecyclePhase
from flowfabric.model.view import view_of
from flowfabric.rules import outbox
from flowfabric.rules.execution.policy import decode_terms

DEFAULT_DIMENSION = "default"
DEFAULT_WINDOW_MS = 60_000  # window that the scheduler uses for a policy with window 0

RELEASE_ADMISSION = "release_admission"  # outbox message from an ended execution to its quota policies

A = TypeVar("A")


class ReleaseAdmission(msgspec.Struct, frozen=True):
    """The body of that message: the execution and its replay count.

    The slot belongs to a policy of the execution's namespace or to a shared one; the sender does not know which.
    Messages of a release before namespaced ids name no namespace.
    """

    execution_id: str
    life: int
    namespace: str = DEFAULT_NAMESPACE


class QuotaState(msgspec.Struct, frozen=True):
    """A loaded quota policy. Slots and window entries are loaded only as far as they were requested."""

    quota_policy_id: str
    partition: int
    root: QuotaPolicy | None = None
    slots: dict[str, QuotaSlot] = {}
    requests: dict[tuple[str, str], QuotaRequest] = {}
    namespace: str = DEFAULT_NAMESPACE

    @property
    def key(self) -> NamespacedId:
        """The key prefix of all rows."""
        return NamespacedId(self.namespace, self.quota_policy_id)

    def root_or_new(self) -> QuotaPolicy:
        """Return the root, or a new one for admissions of an undefined policy."""
        return self.root or QuotaPolicy(self.quota_policy_id, self.partition, namespace=self.namespace)


QuotaDecision = tuple[A | errors.FabricError, QuotaState]


class AdmissionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The execution to admit and the limits to apply (0 is no limit)."""

    execution_id: str
    window_ms: int
    rate_limit: int
    concurrency_cap: int
    jitter_ms: int = 0
    dimension: str = DEFAULT_DIMENSION
    life: int = 0
    call_id: int  # identifies this call
    takes_over_slot: bool = False  # a slot that the execution already has becomes this call's
    provisional: bool = False  # other policies are asked after this one
    chance: float = 0.0


def quota_state(
    quota_policy_id: str, partition: int, rows: Iterable[Any], namespace: str = DEFAULT_NAMESPACE
) -> QuotaState:
    """Return the state built from the loaded rows."""
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
    """Return the change from one state to the other; None if they are equal."""
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
    state: QuotaState, limits: limit_answers.QuotaLimits, now: int
) -> QuotaDecision[limit_answers.QuotaPolicyCreated | limit_answers.QuotaPolicyExists]:
    """Define a policy once."""
    if state.root is not None and state.root.defined:
        return limit_answers.QuotaPolicyExists(state.quota_policy_id), state
    root = replace(state.root_or_new(), defined=True, created_at=now, **asdict(limits))
    return limit_answers.QuotaPolicyCreated(state.quota_policy_id), replace(state, root=root)


def limits_of(root: QuotaPolicy | None) -> limit_answers.QuotaLimits | errors.FabricError | None:
    """Return the stored limits; None for a policy that was not defined."""
    if root is None or not root.defined:
        return None
    limits = view_of(limit_answers.QuotaLimits, root)
    if min(astuple(limits)) < 0:
        return errors.Corruption(f"quota_policy {root.quota_policy_id}: a negative limit")
    return limits


def admit(state: QuotaState, request: AdmissionRequest, now: int) -> QuotaDecision[limit_answers.AdmissionResult]:
    """Admit an execution, or answer what blocks it. A refusal changes nothing."""
    held = state.slots.get(request.execution_id)
    # A slot of an earlier run was released by its end, even if the message has not arrived yet.
    if held is not None and held.life >= request.life and is_slot_live(held, now):
        if abs(held.admission) == request.call_id:
            return limit_answers.Admitted(), state  # this call, whose first reply was lost
        if not request.takes_over_slot:
            return limit_answers.AlreadyAdmitted(), state
        stays_provisional = request.provisional and held.admission < 0
        mine = replace(held, admission=-request.call_id if stays_provisional else request.call_id)
        return limit_answers.AlreadyAdmitted(), _with_slot(state, mine)
    window_start = now - request.window_ms
    window = _window(state, request.dimension, window_start)
    if request.rate_limit and len(window) >= request.rate_limit:
        oldest = min(entry.admitted_at for entry in window)
        jitter = min(int(request.chance * (request.jitter_ms + 1)), request.jitter_ms)
        return limit_answers.RateExceeded(max(0, oldest + request.window_ms - now) + jitter), state
    row = state.root_or_new()
    others = row.active - (held is not None and held.counted)
    if request.concurrency_cap and others >= request.concurrency_cap:
        return limit_answers.ConcurrencyExceeded(), state
    counts = request.concurrency_cap > 0
    expires_at = now + request.window_ms if request.window_ms else None
    call_id = -request.call_id if request.provisional else request.call_id
    namespace, policy = state.namespace, state.quota_policy_id
    slot = QuotaSlot(policy, request.execution_id, request.life, call_id, counts, expires_at, namespace)
    entry = QuotaRequest(policy, request.dimension, request.execution_id, now, now + request.window_ms, namespace)
    requests = {
        key: old for key, old in state.requests.items() if key[0] != request.dimension or old.admitted_at > window_start
    }
    requests[request.dimension, request.execution_id] = entry
    admitted = replace(_with_slot(state, slot), root=replace(row, active=max(0, others) + counts), requests=requests)
    return limit_answers.Admitted(), admitted


def life_of(row: Execution | None) -> int:
    """Return the replay count that an admission made now is for; for an ended execution, the next one."""
    if row is None:
        return 0
    return row.replay_count + (row.lifecycle_phase is LifecyclePhase.TERMINAL)


def is_life_over(row: Execution, found: Execution | None) -> bool:
    """True if the run for which a row was admitted has ended, by the row as loaded since."""
    if found is None:
        return True
    return found.replay_count == row.replay_count and found.lifecycle_phase is LifecyclePhase.TERMINAL


def is_blocked_by_quota(row: Execution, found: Execution | None) -> bool:
    """True if the execution is blocked by quota in that run although it was admitted."""
    if found is None or found.replay_count != row.replay_count:
        return False
    return found.eligibility_state is EligibilityState.BLOCKED_BY_QUOTA


def keeps_admission(row: Execution, found: Execution) -> bool:
    """True if the execution still waits in that run for a worker or for quota, so that its admission can be used."""
    if found.replay_count != row.replay_count or found.lifecycle_phase is not LifecyclePhase.RUNNABLE:
        return False
    return found.eligibility_state in (EligibilityState.ELIGIBLE_NOW, EligibilityState.BLOCKED_BY_QUOTA)


def release_slot(
    state: QuotaState, execution_id: str, *, life: int | None = None, admission: int | None = None
) -> QuotaDecision[limit_answers.AdmissionReleased]:
    """Release an execution's slot.

    With `life`, the slot of a later run is left alone. With `admission`, a slot that another call relies on by now is
    left alone.
    """
    held = state.slots.get(execution_id)
    if held is None or (life is not None and held.life > life):
        return limit_answers.AdmissionReleased(), state
    if admission is not None and held.admission != admission:
        return limit_answers.AdmissionReleased(), state
    row = state.root_or_new()
    slots = {key: slot for key, slot in state.slots.items() if key != execution_id}
    return limit_answers.AdmissionReleased(), replace(
        state, slots=slots, root=replace(row, active=max(0, row.active - held.counted))
    )


def confirm(
    state: QuotaState, request: AdmissionRequest, now: int, *, acquired: bool
) -> QuotaDecision[limit_answers.AdmissionResult]:
    """Make a provisional admission final, after the other policies admitted as well.

    `Admitted` means that this call must release the slot if it cannot use it: it `acquired` the slot and still has it.
    If another call took the slot over, neither releases it, because either may claim. If the slot was undone, it is
    requested again.
    """
    held = state.slots.get(request.execution_id)
    if held is None or held.life < request.life or not is_slot_live(held, now):
        return admit(state, replace(request, provisional=False), now)
    is_mine = acquired and abs(held.admission) == request.call_id
    verdict = limit_answers.Admitted() if is_mine else limit_answers.AlreadyAdmitted()
    return verdict, _with_slot(state, replace(held, admission=request.call_id))


def undo_admission(
    state: QuotaState,
    execution_id: str,
    admission: int,
    *,
    acquired: bool,
    previous_request: QuotaRequest | None = None,
) -> QuotaDecision[limit_answers.AdmissionReleased]:
    """Undo the admission of a call whose execution another policy refused, including its window entry.

    `acquired` says that this call got the slot; `previous_request` is the window entry it replaced. A slot that the
    call took over is undone only while it is provisional: of several calls refused at once, the last one leaves nothing
    behind. Nothing is undone if another call has the slot by now.
    """
    held = state.slots.get(execution_id)
    if held is None or abs(held.admission) != admission or not (acquired or held.admission < 0):
        return limit_answers.AdmissionReleased(), state
    window_key = (DEFAULT_DIMENSION, execution_id)
    requests = {key: entry for key, entry in state.requests.items() if key != window_key}
    if previous_request is not None:
        requests[window_key] = previous_request
    return release_slot(replace(state, requests=requests), execution_id)


def release_messages(row: Execution) -> tuple[Upsert, ...]:
    """Return the outbox messages that release an execution's slots, for the commit that ends it."""
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


def idle_executions(execution_ids: Iterable[str], rows: Iterable[Execution | None]) -> frozenset[str]:
    """Return those of the executions that are not active or do not exist, given their loaded rows."""
    active = {row.execution_id for row in rows if row is not None and row.lifecycle_phase is LifecyclePhase.ACTIVE}
    return frozenset(execution_ids) - active


def reconcile(state: QuotaState, idle: frozenset[str], now: int) -> QuotaDecision[bool]:
    """Drop expired window entries and dead slots and recount the active slots; True if anything changed.

    All slots and window entries are loaded.
    `idle` are executions that were checked and are not active. Only their expired slots are dead.
    """
    requests = {key: entry for key, entry in state.requests.items() if entry.expires_at > now}
    slots = {key: slot for key, slot in state.slots.items() if is_slot_live(slot, now) or key not in idle}
    row = state.root_or_new()
    if row.active_concurrency_cap or not row.defined:
        row = replace(row, active=sum(slot.counted for slot in slots.values()))
    else:  # without a stored cap, subtract only the slots that callers counted by caps of their own
        released = sum(slot.counted for key, slot in state.slots.items() if key not in slots)
        row = replace(row, active=max(0, row.active - released))
    after = replace(state, requests=requests, slots=slots, root=row if state.root is not None else None)
    return change_between(state, after) is not None, after


def delete_expired_request(state: QuotaState, dimension: str, execution_id: str, now: int) -> QuotaDecision[bool]:
    """Delete a window entry if it has expired, for the sweep; True if it has."""
    entry = state.requests.get((dimension, execution_id))
    if entry is None or entry.expires_at > now:
        return False, state
    requests = {key: other for key, other in state.requests.items() if other is not entry}
    return True, replace(state, requests=requests)


def slot_holders(slots: Iterable[QuotaSlot], now: int) -> frozenset[tuple[str, int]]:
    """Return the executions, with replay counts, that have one of these slots and therefore always have capacity."""
    return frozenset((slot.execution_id, slot.life) for slot in slots if is_slot_live(slot, now))


def free_capacity(state: QuotaState, now: int) -> int | None:
    """Return how many more executions the stored limits admit; None if there is no limit."""
    limits = limits_of(state.root)
    if not isinstance(limits, limit_answers.QuotaLimits) or limits.unlimited:
        return None
    capacities = []
    if limits.max_requests_per_window:
        window = _window(state, DEFAULT_DIMENSION, now - window_ms(limits))
        capacities.append(limits.max_requests_per_window - len(window))
    if limits.active_concurrency_cap:
        capacities.append(limits.active_concurrency_cap - state.root_or_new().active)
    return max(0, min(capacities))


def next_capacity_at(state: QuotaState, now: int) -> int | None:
    """Return when the oldest request leaves the window; None if the window is empty."""
    limits = limits_of(state.root)
    if not isinstance(limits, limit_answers.QuotaLimits) or not limits.max_requests_per_window:
        return None
    length = window_ms(limits)
    return min((entry.admitted_at + length for entry in _window(state, DEFAULT_DIMENSION, now - length)), default=None)


def window_ms(limits: limit_answers.QuotaLimits) -> int:
    """Return the window by which the scheduler admits."""
    return limits.requests_per_window_seconds * 1000 or DEFAULT_WINDOW_MS


class QuotaStatus(msgspec.Struct, frozen=True):
    """A quota policy as shown to readers; 0 is no limit."""

    namespace: str
    quota_policy_id: str
    requests_per_window_seconds: int
    max_requests_per_window: int
    active_concurrency_cap: int
    jitter_ms: int
    defined: bool
    window_used: int  # requests in the window; 0 if the policy has no rate
    window_frees_at: int | None  # when the oldest request leaves the window
    active: int  # counted slots
    holders: list[str]  # executions with a live slot, at most MAX_HOLDERS


MAX_HOLDERS = 100


def quota_status(state: QuotaState, now: int) -> QuotaStatus:
    """Return the policy as shown to readers."""
    root = state.root_or_new()
    length = root.requests_per_window_seconds * 1000 or DEFAULT_WINDOW_MS
    holders = sorted(slot.execution_id for slot in state.slots.values() if is_slot_live(slot, now))
    return view_of(
        QuotaStatus,
        root,
        window_used=len(_window(state, DEFAULT_DIMENSION, now - length)),
        window_frees_at=next_capacity_at(state, now),
        holders=holders[:MAX_HOLDERS],
    )


def is_slot_live(slot: QuotaSlot, now: int) -> bool:
    """True if the slot has not expired."""
    return slot.expires_at is None or slot.expires_at > now


def _window(state: QuotaState, dimension: str, start: int) -> list[QuotaRequest]:
    return [entry for key, entry in state.requests.items() if key[0] == dimension and entry.admitted_at > start]


def _with_slot(state: QuotaState, slot: QuotaSlot) -> QuotaState:
    return replace(state, slots={**state.slots, slot.execution_id: slot})
