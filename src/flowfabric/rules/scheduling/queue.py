"""Ready queues: the queue and position of an execution that becomes claimable.

Both are computed and stored when the execution is enqueued. A claim then reads the first rows of the queues it may
serve, and neither sorts nor matches capabilities. The order across the queues of a lane is that of `fairness`.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from flowfabric.model.change import Change, Patch, seen
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.instant import Draft
from flowfabric.model.security.owned_id import NamespacedId, parse_namespaced_id
from flowfabric.model.states import AttemptState, AttemptType, BlockingReason, EligibilityState, LifecyclePhase
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution.policy import Terms, decode_terms

PRIORITY_MAX = 9000
PRIORITY_STEP = 10**12  # one priority step outweighs any difference in age

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
HELD_PREFIX = "code:"  # suspended work whose function no longer fits what it remembers
ASLEEP_ON_PREFIX = "asleep:"  # suspended work that needs a given amount; blocked work needs any capacity


def blocked_on_key(reason: BlockingReason, name: str) -> str | None:
    """Return the key by which a blocked execution is found when it is unblocked; None if it is not searched for."""
    return BLOCKED_ON_PREFIX[reason] + name if reason in BLOCKED_ON_PREFIX else None


def blocked_list_key(row: Execution, reason: BlockingReason, name: str) -> str | None:
    """Return the list in which an execution waits for a limit: one per lane and fairness key.

    Executions without a fairness key, and those blocked by an earlier release, wait in the list of the limit itself.
    """
    key = decode_terms(row.terms).fairness_key
    if not key or not name or reason not in LIMITS:
        return blocked_on_key(reason, name)
    limit = parse_namespaced_id(name)
    owner = "" if limit.is_shared else f"@{limit.namespace}"
    return f"{fair_list_prefix(reason, limit)}{_digest(row.lane_id, key)}{owner}"


def fair_list_prefix(reason: BlockingReason, limit: NamespacedId) -> str:
    """Return the common prefix of all lists in which executions with a fairness key wait for a limit.

    Digests keep the names short and keep one namespace from choosing a name with another's prefix.
    """
    return f"{BLOCKED_ON_PREFIX[reason]}{limit.id}#{_digest(limit.namespace)}."


def _digest(*parts: str) -> str:
    return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def asleep_on_key(budget: NamespacedId) -> str:
    """Return the key under which an execution suspended for a budget can be found."""
    return f"{ASLEEP_ON_PREFIX}{budget}"


def held_by_key(task: str) -> str:
    """Return the key under which executions that wait for other code of a task can be found."""
    return f"{HELD_PREFIX}{task}"


def parse_blocking_limit(blocked_on: str) -> NamespacedId:
    """Return the budget or quota policy that an execution is blocked on."""
    limit = parse_namespaced_id(blocked_on.partition(":")[2])
    return NamespacedId(limit.namespace, limit.id.partition("#")[0])


def clamp_priority(priority: int) -> int:
    """Clamp a priority to 0..9000."""
    return max(0, min(PRIORITY_MAX, priority))


def position_offset(priority: int, terms: Terms) -> int:
    """Return what to add to the creation time to get the queue position; lower positions come first.

    With ageing, each `ageing` milliseconds of waiting count as much as one priority step. That is linear, so the order
    of two waiting executions never changes and the position can be stored once.
    """
    return -priority * (terms.ageing or PRIORITY_STEP)


def queued_at(row: Execution, terms: Terms) -> int:
    """Return the instant from which its age counts in the queue: its creation, or the beginning of its present life."""
    return row.rank - position_offset(row.priority, terms)


def queue_for(lane_id: str, required: str | None, terms: Terms, *, guarded: bool = False) -> QueueKey:
    """Return the ready queue for work of this kind. With budgets or quotas it is guarded: claimed by load, rule,
    commit."""
    return QueueKey(
        lane_id=lane_id,
        required=required or "",
        fairness_key=terms.fairness_key or "",
        fairness_weight=terms.fairness_weight,
        guarded=guarded or bool(terms.budget_ids or terms.quota_policy_ids),
    )


def queue_of(row: Execution[Draft]) -> QueueKey:
    """Return the ready queue of this execution."""
    return queue_for(row.lane_id, row.required_capabilities, decode_terms(row.terms))


def takeover_queue(row: Execution) -> QueueKey:
    """Return the guarded queue in which an execution that lost its lease waits to be taken over."""
    return queue_for(row.lane_id, row.required_capabilities, decode_terms(row.terms), guarded=True)


def restore_queue(row: Execution | None) -> Decision[bool]:
    """Put an execution whose queue was lost back into the queue that its state requires; else change nothing."""
    if row is None or row.line is None:
        return Decision(False)
    line = takeover_queue(row) if row.lifecycle_phase is LifecyclePhase.ACTIVE else queue_of(row)
    return Decision(True, Change((seen(row),), (Patch(Execution, (row.execution_id,), {"line": line}),)))


def enqueue_fields(row: Execution, attempt_state: AttemptState) -> dict[str, Any]:
    """Return the columns of a row that becomes claimable at its original position."""
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
    if attempt_state in NEXT_ATTEMPT_TYPE:  # a new attempt gets the full timeout; a continued one keeps its rest
        fields["next_timeout_ms"] = decode_terms(row.terms).attempt_timeout_ms
    return fields
