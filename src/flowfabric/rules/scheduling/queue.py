"""Where an execution stands when it becomes claimable: its line and its rank, written at the entrance.

Claiming is then "the first k of these lines": nothing about order or capabilities is worked out at the exit.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from flowfabric.model.change import Change, Patch, seen
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.owned_id import NamespacedId, parse_namespaced_id
from flowfabric.model.states import AttemptState, AttemptType, BlockingReason, EligibilityState, LifecyclePhase
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution.policy import Terms, decode_terms

PRIORITY_MAX = 9000
PRIORITY_STEP = 10**12  # one step of priority outweighs any difference of age

NEXT_ATTEMPT_TYPE = {
    AttemptState.PENDING_FIRST_ATTEMPT: AttemptType.INITIAL,
    AttemptState.PENDING_RETRY_ATTEMPT: AttemptType.RETRY,
    AttemptState.PENDING_REPLAY_ATTEMPT: AttemptType.REPLAY,
}


BLOCKED_ON_PREFIX = {
    BlockingReason.WAITING_FOR_BUDGET: "budget:",
    BlockingReason.WAITING_FOR_QUOTA: "quota:",
    BlockingReason.WAITING_FOR_CAPABLE_WORKER: "route:",
}
LIMITS = (BlockingReason.WAITING_FOR_BUDGET, BlockingReason.WAITING_FOR_QUOTA)
ASLEEP_ON_PREFIX = "asleep:"  # started work, which waits for room of its own size; what a budget blocks waits for any


def blocked_on_key(reason: BlockingReason, name: str) -> str | None:
    """What an execution waits for, as one name by which it can be found and set free; None for what nobody seeks."""
    return BLOCKED_ON_PREFIX[reason] + name if reason in BLOCKED_ON_PREFIX else None


def blocked_list_key(row: Execution, reason: BlockingReason, name: str) -> str | None:
    """The list of blocked executions in which this one waits for a limit: one for each fairness key of each lane.

    What has no key waits in the list that bears the name of the limit alone, as does what an earlier release blocked.
    """
    key = decode_terms(row.terms).fairness_key
    if not key or not name or reason not in LIMITS:
        return blocked_on_key(reason, name)
    limit = parse_namespaced_id(name)
    owner = "" if limit.is_shared else f"@{limit.namespace}"
    return f"{fair_list_prefix(reason, limit)}{_digest(row.lane_id, key)}{owner}"


def fair_list_prefix(reason: BlockingReason, limit: NamespacedId) -> str:
    """How the names of all lists begin in which executions with a fairness key wait for a limit.

    Digests keep the names short, and keep one namespace from choosing a name that begins like another's.
    """
    return f"{BLOCKED_ON_PREFIX[reason]}{limit.id}#{_digest(limit.namespace)}."


def _digest(*parts: str) -> str:
    return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def asleep_on_key(budget: NamespacedId) -> str:
    """What an execution that a budget put to sleep waits for."""
    return f"{ASLEEP_ON_PREFIX}{budget}"


def parse_blocking_limit(blocked_on: str) -> NamespacedId:
    """The budget or quota policy that an execution is blocked on."""
    limit = parse_namespaced_id(blocked_on.partition(":")[2])
    return NamespacedId(limit.namespace, limit.id.partition("#")[0])


def clamp_priority(priority: int) -> int:
    """Priorities outside 0..9000 are taken as the nearest end."""
    return max(0, min(PRIORITY_MAX, priority))


def position_offset(priority: int, terms: Terms) -> int:
    """What to add to the creation time: lower ranks come first.

    With ageing, each `ageing` milliseconds of waiting weigh as much as one step of priority. That is linear, so the
    order of two waiting executions never changes and the rank can be written once.
    """
    return -priority * (terms.ageing or PRIORITY_STEP)


def queue_for(lane_id: str, required: str | None, terms: Terms, *, guarded: bool = False) -> QueueKey:
    """The line of work of this kind. Where budgets or quotas have a say, it is claimed by decision."""
    return QueueKey(
        lane_id=lane_id,
        required=required or "",
        fairness_key=terms.fairness_key or "",
        fairness_weight=terms.fairness_weight,
        guarded=guarded or bool(terms.budget_ids or terms.quota_policy_ids),
    )


def queue_of(row: Execution) -> QueueKey:
    """The line where this execution waits for a worker."""
    return queue_for(row.lane_id, row.required_capabilities, decode_terms(row.terms))


def takeover_queue(row: Execution) -> QueueKey:
    """The line where this execution, its lease gone, waits to be taken over."""
    return queue_for(row.lane_id, row.required_capabilities, decode_terms(row.terms), guarded=True)


def restore_queue(row: Execution | None) -> Decision[bool]:
    """Put an execution whose ready queue was lost into the queue that its state asks for; otherwise change nothing."""
    if row is None or row.line is None:
        return Decision(False)
    line = takeover_queue(row) if row.lifecycle_phase is LifecyclePhase.ACTIVE else queue_of(row)
    return Decision(True, Change((seen(row),), (Patch(Execution, (row.execution_id,), {"line": line}),)))


def enqueue_fields(row: Execution, attempt_state: AttemptState) -> dict[str, Any]:
    """The fields of a row that becomes claimable, at its original rank."""
    fields: dict[str, Any] = {
        "eligibility_state": EligibilityState.ELIGIBLE_NOW,
        "blocking_reason": BlockingReason.WAITING_FOR_WORKER,
        "blocking_text": None,
        "delay_until": None,
        "blocked_on": None,
        "blocked_at": None,
        "line": queue_of(row),
        "next_type": NEXT_ATTEMPT_TYPE.get(attempt_state),
    }
    if attempt_state in NEXT_ATTEMPT_TYPE:  # a fresh attempt has the whole time; a continued one what it had left
        fields["next_timeout_ms"] = decode_terms(row.terms).attempt_timeout_ms
    return fields
