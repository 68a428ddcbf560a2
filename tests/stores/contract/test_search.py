"""Searches: executions newest first; a call reads a bounded number of rows and says where to continue."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from flowfabric.model.change import Delete, Insert
from flowfabric.model.execution import Execution, Payload
from flowfabric.model.states import PublicState
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Search, SearchPage, SearchPosition, Where
from tests.stores.sample_rows import change, execution, write

RED = Search((Where("tags", "=", "red"),), limit=100)


def at(number: int) -> int:
    return 1000 - number


async def fill(store: Store, count: int, *red: int) -> None:
    """Insert executions of which `n00` is the newest."""
    rows = [
        execution(f"n{number:02}", tags="red" if number in red else "blue", created_at=at(number))
        for number in range(count)
    ]
    await write(store, *map(Insert, rows))


def names(page: SearchPage) -> list[str]:
    return [found.row.execution_id for found in page.found]


async def read_all(store: Store, search: Search) -> tuple[list[str], int]:
    """Return everything that a search finds, and the number of calls."""
    found, calls, after = list[str](), 0, search.after
    while True:
        page = await store.search(replace(search, after=after))
        calls += 1
        assert len(page.found) <= search.limit
        found += names(page)
        if page.after is None:
            return found, calls
        assert after is None or page.after < after, "each call goes on"
        after = page.after


async def test_a_search_stops_when_its_budget_is_spent(store: Store) -> None:
    await fill(store, 10, 0, 7)
    search = replace(RED, budget=4)

    page = await store.search(search)

    assert (names(page), page.after) == (["n00"], (at(3), "n03"))
    page = await store.search(replace(search, after=page.after))
    assert (names(page), page.after) == (["n07"], (at(7), "n07"))
    page = await store.search(replace(search, after=page.after))
    assert (names(page), page.after) == ([], None)


async def test_a_search_stops_when_it_has_found_enough(store: Store) -> None:
    await fill(store, 10, 1, 2, 5)

    page = await store.search(replace(RED, limit=2))

    assert (names(page), page.after) == (["n01", "n02"], (at(2), "n02"))


@pytest.mark.parametrize("budget", [1, 2, 3, 9, 10, 11, 1000])
@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_the_pages_of_a_search_hold_every_match_once(store: Store, budget: int, limit: int) -> None:
    await fill(store, 10, 0, 3, 4, 9)

    found, calls = await read_all(store, replace(RED, limit=limit, budget=budget))

    assert found == ["n00", "n03", "n04", "n09"]
    assert calls <= 10 // budget + 4 // limit + 2


@pytest.mark.parametrize("after", [None, (at(3), "n03"), (at(3), "n03x"), (0, "")])
async def test_a_search_of_nothing_ends(store: Store, after: SearchPosition | None) -> None:
    search = replace(RED, after=after, budget=3)
    assert await store.search(search) == SearchPage([], None)
    await fill(store, 8)

    assert await read_all(store, search) == ([], {None: 3, (at(3), "n03"): 2, (at(3), "n03x"): 2}.get(after, 1))


async def test_a_search_continues_after_a_row_that_was_deleted(store: Store) -> None:
    await fill(store, 6, 1, 4)
    page = await store.search(replace(RED, budget=3))
    await write(store, Delete(Execution, ("n02",)))

    assert names(await store.search(replace(RED, after=page.after))) == ["n04"]


@pytest.mark.parametrize("seed", range(5))
async def test_newest_first_equals_a_sort_by_creation_whatever_the_ids_are(store: Store, seed: int) -> None:
    rng = random.Random(seed)
    rows = [
        execution(f"{{fp:{rng.randrange(9)}}}:{rng.getrandbits(64):016x}", created_at=rng.randrange(12))
        for _ in range(40)
    ]
    await store.commit([change(Insert(row)) for row in rows])

    found, _ = await read_all(store, Search(limit=7))

    newest = sorted(rows, key=lambda row: (row.created_at, row.execution_id), reverse=True)
    assert found == [row.execution_id for row in newest]


async def test_bounds_of_the_creation_cost_no_budget(store: Store) -> None:
    await fill(store, 10, 4, 5)
    bounds = (Where("created_at", ">=", at(6)), Where("created_at", "<", at(3)))

    page = await store.search(replace(RED, where=(*RED.where, *bounds), budget=3))

    assert (names(page), page.after) == (["n04", "n05"], (at(6), "n06"))


async def test_a_search_finds_kinds_texts_and_lists_of_values(store: Store) -> None:
    rows = [
        execution("a", created_at=3, failure_reason="Error: 50% of a_b", public_state=PublicState.FAILED),
        execution("b", created_at=2, failure_reason="error: 50 of axb", public_state=PublicState.WAITING),
        execution("c", created_at=1, public_state=PublicState.ACTIVE),
    ]
    payloads = [Payload("a", "mail", ""), Payload("b", "print", "")]
    await write(store, *map(Insert, rows), *map(Insert, payloads))

    async def found(*where: Where, kind: str | None = None) -> list[tuple[str, str]]:
        page = await store.search(Search(where, kind))
        return [(one.row.execution_id, one.kind) for one in page.found]

    assert await found() == [("a", "mail"), ("b", "print"), ("c", "")]
    assert await found(kind="print") == [("b", "print")]
    assert await found(kind="pri") == []
    assert await found(Where("failure_reason", "contains", "50% of a_b")) == [("a", "mail")]
    assert await found(Where("failure_reason", "contains", "rror: 5")) == [("a", "mail"), ("b", "print")]
    assert await found(Where("failure_reason", "contains", "Error")) == [("a", "mail")]
    states = Where("public_state", "in", (PublicState.ACTIVE, PublicState.FAILED))
    assert await found(states) == [("a", "mail"), ("c", "")]
    assert await found(states, Where("namespace", "in", ())) == []
