"""The order in which blocked executions are unblocked when a limit has capacity again."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from flowfabric.model.execution import Execution
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.model.states import BlockingReason
from flowfabric.rules.limits.unblock_order import credits_after, unblock_order
from flowfabric.rules.scheduling import queue
from tests.stores.sample_rows import loaded, queued

QUOTA = BlockingReason.WAITING_FOR_QUOTA
LIMIT = NamespacedId("default", "0c000000-0000-4000-8000-000000000001")


def row(
    name: str, key: str | None, position: int, *, limit: NamespacedId = LIMIT, weight: int = 1, **more: Any
) -> Execution:
    policy = {"fairness_key": key, "fairness_weight": weight} if key else {}
    one = msgspec.structs.replace(
        loaded(queued(name, position)),
        line=None,
        terms=msgspec.json.encode(policy).decode(),
        created_at=position,
        rank=position,
        **more,
    )
    return msgspec.structs.replace(one, blocked_on=queue.blocked_list_key(one, QUOTA, str(limit)))


def names(rows: list[Execution]) -> str:
    return "".join(one.execution_id[0] for one in rows)


def test_fairness_keys_alternate_and_each_is_ordered_by_age() -> None:
    rows = [row(f"a{n}", "a", n) for n in range(4)] + [row(f"b{n}", "b", 10 + n) for n in range(2)]

    order = unblock_order(rows, {}, 100)

    assert [one.execution_id for one in order] == ["a0", "b0", "a1", "b1", "a2", "a3"]


def test_the_alternation_continues_where_it_stopped() -> None:
    rows = [row("a0", "a", 0), row("b0", "b", 10)]
    after = credits_after(rows, {}, 100, rows[:1])

    assert names(unblock_order(rows, after, 100)) == "ba"


def test_a_single_key_uses_up_no_turn() -> None:
    rows = [row("a0", "a", 0)]
    assert credits_after(rows, {}, 100, rows) == {}


def test_the_order_stops_where_an_unloaded_row_might_be_next() -> None:
    rows = [row("a0", "a", 0), row("b0", "b", 10), row("b1", "b", 11)]

    assert names(unblock_order(rows, {}, 100, truncated={rows[0].blocked_on or ""})) == "ab"


def test_weights_and_priority_are_considered() -> None:
    rows = [row(f"g{n}", "gold", n, weight=3) for n in range(6)] + [row(f"s{n}", "silver", n) for n in range(2)]
    rows.append(row("urgent", "silver", -5, priority=9))

    assert names(unblock_order(rows, {}, 100)) == "u" + names(unblock_order(rows[:-1], {}, 100))
    assert names(unblock_order(rows[:-1], {}, 100))[:4].count("g") == 3


def test_lanes_are_ordered_by_age_and_alternate_separately() -> None:
    rows = [
        row("a0", "a", 0),
        row("b0", "b", 9),
        row("x0", "a", 5, lane_id="other"),
        row("y0", "b", 6, lane_id="other"),
    ]

    assert names(unblock_order(rows, {}, 100)) == "axyb"
    assert set(credits_after(rows, {}, 100, rows[:1])) == {rows[0].lane_id}


@pytest.mark.parametrize("namespace", ["default", "acme", "a@b", "a#b", "a.b"])
def test_the_name_of_a_list_contains_the_limit(namespace: str) -> None:
    limit = NamespacedId(namespace, LIMIT.id)
    for key in (None, "a", "a@b", "#"):
        name = row("e", key, 0, limit=limit).blocked_on or ""
        assert queue.parse_blocking_limit(name) == limit
        assert name.startswith(queue.fair_list_prefix(QUOTA, limit)) is bool(key)


def test_no_list_name_of_one_limit_is_a_prefix_of_another_limits() -> None:
    others = [NamespacedId(namespace, LIMIT.id) for namespace in ("a", "a#", "a.", "a@", "")]
    begins = {queue.fair_list_prefix(QUOTA, one) for one in (LIMIT, *others)}
    assert len(begins) == len(others) + 1
    assert not any(one != other and one.startswith(other) for one in begins for other in begins)


def test_each_key_of_each_lane_has_its_own_list() -> None:
    rows = [row("e", key, 0, lane_id=lane) for key in ("a", "b") for lane in ("x", "y")]
    assert len({one.blocked_on for one in rows}) == 4
