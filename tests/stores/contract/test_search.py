"""Searches: scans that no index serves read a bounded number of rows and say where to continue."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from flowfabric.model.change import Delete, Insert
from flowfabric.model.execution import Execution
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Scan, SearchPage, Where
from tests.stores.sample_rows import execution, write

RED = Scan(Execution, (Where("tags", "=", "red"),), ("execution_id",), limit=100)


async def fill(store: Store, count: int, *red: int) -> None:
    rows = [execution(f"n{number:02}", tags="red" if number in red else "blue") for number in range(count)]
    await write(store, *map(Insert, rows))


def names(page: SearchPage) -> list[str]:
    return [row.execution_id for row in page.rows]


async def read_all(store: Store, scan: Scan, budget: int) -> tuple[list[str], int]:
    """Return everything that a search finds, and the number of calls."""
    found, calls, after = list[str](), 0, scan.after
    while True:
        page = await store.search(replace(scan, after=after), budget)
        calls += 1
        assert len(page.rows) <= scan.limit
        found += names(page)
        if page.after is None:
            return found, calls
        assert after is None or page.after > after, "each call goes on"
        after = page.after


async def test_a_search_stops_when_its_budget_is_spent(store: Store) -> None:
    await fill(store, 10, 0, 7)

    page = await store.search(RED, 4)

    assert (names(page), page.after) == (["n00"], ("n03",))
    page = await store.search(replace(RED, after=page.after), 4)
    assert (names(page), page.after) == (["n07"], ("n07",))
    page = await store.search(replace(RED, after=page.after), 4)
    assert (names(page), page.after) == ([], None)


async def test_a_search_stops_when_it_has_found_enough(store: Store) -> None:
    await fill(store, 10, 1, 2, 5)

    page = await store.search(replace(RED, limit=2), 1000)

    assert (names(page), page.after) == (["n01", "n02"], ("n02",))


@pytest.mark.parametrize("budget", [1, 2, 3, 9, 10, 11, 1000])
@pytest.mark.parametrize("limit", [1, 2, 100])
async def test_the_pages_of_a_search_hold_what_a_scan_holds(store: Store, budget: int, limit: int) -> None:
    await fill(store, 10, 0, 3, 4, 9)

    found, calls = await read_all(store, replace(RED, limit=limit), budget)

    assert found == [row.execution_id for row in await store.scan(RED)]
    assert calls <= 10 // budget + 4 // limit + 2


@pytest.mark.parametrize("after", [None, ("n03",), ("n03x",), ("z",)])
async def test_a_search_of_nothing_ends(store: Store, after: tuple[Any, ...] | None) -> None:
    assert await store.search(replace(RED, after=after), 5) == SearchPage([], None)
    await fill(store, 8)

    assert await read_all(store, replace(RED, after=after), 3) == (
        [],
        {None: 3, ("n03",): 2, ("n03x",): 2}.get(after, 1),
    )


async def test_a_search_goes_on_after_a_row_that_was_deleted(store: Store) -> None:
    await fill(store, 6, 1, 4)
    page = await store.search(RED, 3)
    await write(store, Delete(Execution, ("n02",)))

    assert names(await store.search(replace(RED, after=page.after), 10)) == ["n04"]
