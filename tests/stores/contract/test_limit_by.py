"""A list of the first rows for each of many values, in one round trip."""

from __future__ import annotations

import pytest

from flowfabric.model.change import Change, Guard, Insert, Patch
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Scan, Where
from tests.stores.sample_rows import payload, queued

A, B, UNKNOWN = QueueKey("mail", "a"), QueueKey("mail", "b"), QueueKey("mail", "nobody stands here")
BY_RANK = ("rank", "execution_id")


@pytest.fixture
async def filled(store: Store) -> Store:
    """Insert ten rows in one queue, three in another, one in a third."""
    rows = [queued(f"a{n}", n, line=A) for n in range(10)] + [queued(f"b{n}", n, line=B) for n in range(3)]
    rows.append(queued("c0", 0))
    changes = [
        Change(guards=(), writes=(Insert(row), Insert(payload(row.execution_id))), id=n + 1)
        for n, row in enumerate(rows)
    ]
    assert None not in await store.commit(changes)
    return store


async def names(store: Store, *lines: QueueKey, limit: int, where: tuple[Where, ...] = ()) -> list[str]:
    scan = Scan(Execution, (Where("line", "in", lines), *where), BY_RANK, limit=limit, limit_by="line")
    return [row.execution_id for row in await store.scan(scan)]


async def test_the_limit_holds_for_each_value_and_all_rows_are_in_order(filled: Store) -> None:
    assert await names(filled, A, B, limit=2) == ["a0", "b0", "a1", "b1"]
    assert await names(filled, B, A, limit=4) == ["a0", "b0", "a1", "b1", "a2", "b2", "a3"]


async def test_a_repeated_or_unknown_value_adds_nothing(filled: Store) -> None:
    assert await names(filled, A, A, UNKNOWN, limit=1) == ["a0"]
    assert await names(filled, UNKNOWN, limit=1) == []
    assert await names(filled, limit=1) == []


async def test_other_conditions_are_applied(filled: Store) -> None:
    assert await names(filled, A, B, limit=1, where=(Where("rank", ">", 1),)) == ["a2", "b2"]


async def test_the_limit_holds_for_each_prefix(filled: Store) -> None:
    async def begin(*prefixes: str, limit: int) -> list[str]:
        where = (Where("execution_id", "starts", prefixes),)
        rows = await filled.scan(Scan(Execution, where, ("execution_id",), limit=limit, limit_by="execution_id"))
        return [row.execution_id for row in rows]

    assert await begin("b", "a", limit=2) == ["a0", "a1", "b0", "b1"]
    assert await begin("c0", "a9", "a", "nobody", limit=1) == ["a0", "a9", "c0"]
    assert await begin("c00", limit=9) == []


async def test_the_limit_holds_for_each_value_that_begins_with_a_prefix(filled: Store) -> None:
    async def begin(prefix: str, *, limit: int, values: int = 9, after: str | None = None) -> list[str]:
        where: tuple[Where, ...] = (Where("blocked_on", "starts", prefix), Where("namespace", "=", "default"))
        where += () if after is None else (Where("blocked_on", ">", after),)
        scan = Scan(Execution, where, BY_RANK, limit=limit, limit_by="blocked_on", max_values=values)
        return [row.execution_id for row in await filled.scan(scan)]

    lists = {"a": "q:1#x", "b": "q:1#y", "c": "q:2#x"}
    rows = await filled.scan(Scan(Execution, limit=20))
    patches = [
        Change((Guard(Execution, (one.execution_id,), one.revision),), (_blocked(one, lists),), id=100 + number)
        for number, one in enumerate(rows)
    ]
    assert None not in await filled.commit(patches)

    assert await begin("q:1#", limit=2) == ["a0", "b0", "a1", "b1"]
    assert await begin("q:1#", limit=1, values=1) == ["a0"]
    assert await begin("q:1#", limit=1, after="q:1#x") == ["b0"]
    assert await begin("q:1#", limit=1, after="q:1#y") == []
    assert await begin("q:1#", limit=1, after="a") == ["a0", "b0"], "a place before all of them"
    assert await begin("q:", limit=1) == ["a0", "b0", "c0"]
    assert await begin("q:3", limit=1) == []


def _blocked(row: Execution, lists: dict[str, str]) -> Patch:
    return Patch(Execution, (row.execution_id,), {"blocked_on": lists[row.execution_id[0]]})
