"""Which blocked executions take turns with claimable ones."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import pytest

from flowfabric.model.execution import Execution
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.model.states import BlockingReason, EligibilityState
from flowfabric.rules.execution.policy import Terms, encode_terms
from flowfabric.rules.limits import blocked_keys
from tests.stores.sample_rows import loaded, queued

LIMIT = (BlockingReason.WAITING_FOR_QUOTA, NamespacedId("default", "policy"))


def row(name: str, key: str, rank: int = 0, *, policies: tuple[str, ...] = ("policy",), **fields: Any) -> Execution:
    terms = encode_terms(Terms(fairness_key=key, quota_policy_ids=policies))
    return blocked_keys.with_queue(loaded(queued(name, rank, terms=terms, **fields)))


def competing(
    blocked: Execution,
    *claimable: Execution,
    offered: Set[str] = frozenset(),
    namespaces: Set[str] | None = None,
) -> bool:
    heads = {LIMIT: blocked_keys.heads_of([blocked])}
    found = blocked_keys.competitors(heads, claimable, "mail", offered=offered, namespaces=namespaces)
    return blocked.execution_id in found


def test_a_blocked_key_takes_turns_with_other_keys_that_need_its_limit() -> None:
    blocked = row("a0", "a")

    assert competing(blocked, row("b0", "b"))
    assert competing(blocked, row("a1", "a"), row("b0", "b"))
    assert not competing(blocked, row("a1", "a")), "a key does not take turns with itself"
    assert not competing(blocked, row("b0", "b", policies=("other",)))
    assert not competing(blocked)


@pytest.mark.parametrize(
    ("fields", "offered", "namespaces"),
    [
        ({"lane_id": "other"}, set(), None),
        ({"required_capabilities": "gpu"}, {"cpu"}, None),
        ({"namespace": "theirs"}, set(), {"default"}),
    ],
)
def test_a_blocked_execution_that_the_worker_may_not_claim_takes_no_turn(
    fields: dict[str, Any], offered: set[str], namespaces: set[str] | None
) -> None:
    assert not competing(row("a0", "a", **fields), row("b0", "b"), offered=offered, namespaces=namespaces)


def test_the_first_row_of_each_key_represents_it() -> None:
    rows = [row("a1", "a", 5), row("a0", "a", 3), row("b0", "b", 4)]

    heads = blocked_keys.heads_of(rows)

    assert {key: head.execution_id for (_, key), head in heads.items()} == {"a": "a0", "b": "b0"}
    assert blocked_keys.is_new_head(row("a2", "a", 2), heads, max_keys=2)
    assert not blocked_keys.is_new_head(row("a2", "a", 9), heads, max_keys=2)
    assert blocked_keys.is_new_head(row("c0", "c"), heads, max_keys=3)
    assert not blocked_keys.is_new_head(row("c0", "c"), heads, max_keys=2)


def test_a_competitor_competes_with_claimable_rows_only() -> None:
    blocked = blocked_keys.Competitor(*LIMIT, row("a0", "a"))

    assert blocked.competes_with(row("b0", "b"))
    assert not blocked.competes_with(row("b0", "b", policies=()))
    assert not blocked.competes_with(row("b0", "b", eligibility_state=EligibilityState.BLOCKED_BY_QUOTA))
