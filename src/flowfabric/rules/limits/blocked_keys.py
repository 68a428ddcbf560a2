"""Blocked keys: fairness keys whose work waits for a limit take turns with claimable work that needs the same limit.

So a key keeps its place in the rotation, whatever was refused or unblocked in between. Each key is represented by its
first blocked row, with the ready queue that the row enters when it is unblocked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import msgspec

from flowfabric.model.execution import Execution
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.model.states import BlockingReason
from flowfabric.rules.execution import operator
from flowfabric.rules.execution.policy import decode_terms
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.scheduling import capabilities, fairness, queue

BlockingLimit = tuple[BlockingReason, NamespacedId]
LaneKey = tuple[str, str]  # lane and fairness key
BlockedHeads = Mapping[BlockingLimit, Mapping[LaneKey, Execution]]  # the first blocked row of each key


class Competitor(msgspec.Struct, frozen=True):
    """A blocked execution that takes turns with claimable ones, because they need the limit that it waits for."""

    reason: BlockingReason
    limit: NamespacedId
    row: Execution

    def competes_with(self, row: Execution) -> bool:
        """True if the row is claimable and needs the same limit."""
        return operator.is_eligible(row) and (self.reason, self.limit) in _limits_of(row)


def with_queue(row: Execution) -> Execution:
    """Return the row with the ready queue that it enters when it is unblocked."""
    return msgspec.structs.replace(row, line=queue.queue_of(row))


def key_of(row: Execution) -> LaneKey:
    """Return the lane and fairness key of a row that has a queue."""
    return row.lane_id, fairness.fairness_key_of(row)


def is_new_head(row: Execution, heads: Mapping[LaneKey, Execution], *, max_keys: int) -> bool:
    """True if the row comes before the known first row of its key, or is the first of another key to remember."""
    head = heads.get(key_of(row))
    return len(heads) < max_keys if head is None else _position(row) < _position(head)


def heads_of(rows: Iterable[Execution]) -> dict[LaneKey, Execution]:
    """Return the first of these rows by key."""
    return {key_of(row): row for row in sorted(map(with_queue, rows), key=_position, reverse=True)}


def competitors(
    heads: BlockedHeads,
    rows: Iterable[Execution],
    lane_id: str,
    *,
    offered: Set[str],
    namespaces: Set[str] | None,
) -> dict[str, Competitor]:
    """Return the blocked rows, by id, that take turns with these claimable ones in a claim of a lane.

    A key takes turns with other keys only, so blocked work of the only claimable key is left out. A row that was
    unblocked meanwhile may be included: it represents the rows behind it, which are not known yet.
    """
    keys_by_limit: dict[BlockingLimit, set[str]] = {}
    for row in rows:
        for limit in _limits_of(row):
            keys_by_limit.setdefault(limit, set()).add(fairness.fairness_key_of(row))
    return {
        row.execution_id: Competitor(*limit, row)
        for limit, keys in keys_by_limit.items()
        for (lane, key), row in heads.get(limit, {}).items()
        if lane == lane_id
        and keys != {key}
        and (namespaces is None or row.namespace in namespaces)
        and not capabilities.missing(row.required_capabilities, offered)
    }


def _limits_of(row: Execution) -> set[BlockingLimit]:
    terms = decode_terms(row.terms)
    budgets = owner_rules.candidates(row.namespace, terms.budget_ids)
    policies = owner_rules.candidates(row.namespace, terms.quota_policy_ids)
    return {(BlockingReason.WAITING_FOR_BUDGET, one) for one in budgets} | {
        (BlockingReason.WAITING_FOR_QUOTA, one) for one in policies
    }


def _position(row: Execution) -> tuple[int, str]:
    return row.rank, row.execution_id
