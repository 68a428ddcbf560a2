"""Searches: every filter, newest first over all partitions, in pages that are bounded."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.operations import search
from flowfabric.engine.validation.execution_filter import validate_filter
from tests.scenarios.env import Env
from tests.scenarios.execution.test_finish import retries
from tests.scenarios.pages import all_pages

SEARCH: Any = search


async def found(env: Env, **filters: Any) -> list[str]:
    page = await env.engine.search_executions(**filters)
    assert not page.incomplete
    return [one.execution_id for one in page.executions]


async def test_a_mixture_of_ids_is_listed_newest_first(env: Env) -> None:
    """Ids of children, flow members and callers do not sort by time; lists do."""
    made: list[str] = []
    for number in range(18):
        env.clock.advance_ms(number % 3)  # some are created in the same millisecond
        match number % 3:
            case 0:
                made.append(await env.create(lane=f"lane-{number}"))
            case 1:
                made.append(await env.create(execution_id=numbered(number % 5, 99 - number)))
            case _:
                child = numbered(5, 50 - number)
                made.append(await env.create(execution_id=child, parent_id=numbered(5, 1)))
    created = {name: (await env.core(name))["created_at"] for name in made}

    pages = await all_pages(env.engine.search_executions, limit=5)
    listed = [one.execution_id for page in pages for one in page.executions]

    assert listed == sorted(made, key=lambda name: (created[name], name), reverse=True)


async def test_search_pages_through_executions_that_match_every_filter(env: Env) -> None:
    wanted = []
    for number in range(12):
        env.clock.advance_ms(1)
        tags = {"app.kind": "a" if number % 3 else "b"}
        e = await env.create(execution_id=numbered(5 + number % 2, number), namespace="n1", tags=tags)
        if number % 3:
            wanted.append(e)
    await env.create(namespace="n2", tags={"app.kind": "a"})

    pages = await all_pages(env.engine.search_executions, namespace="n1", tag=("app.kind", "a"), limit=3)
    listed = [one.execution_id for page in pages for one in page.executions]

    assert listed == wanted[::-1]


async def test_each_filter_finds_what_it_names(env: Env) -> None:
    engine = env.engine
    mail = await env.create(execution_kind="mail", tags={"app.q": 'say "hi", \\ ü'})
    env.clock.advance_ms(10)
    failed = await env.create_and_claim(execution_kind="mail", policy=retries(0))
    await engine.fail(failed.handle, reason="ValueError: 50% lost\nTraceback …")
    env.clock.advance_ms(10)
    child = await env.create(execution_kind="sub", parent_id=mail, priority=7)
    env.clock.advance_ms(10)
    held = await env.create_and_claim(execution_kind="sub", namespace="n2", lane="other")

    ids = [held.execution_id, child, failed.execution_id, mail]
    assert await found(env) == ids
    assert await found(env, kind="mail") == ids[2:]
    assert await found(env, public_state="failed") == [failed.execution_id]
    assert await found(env, public_state=("failed", "active")) == [held.execution_id, failed.execution_id]
    assert await found(env, lane_id="other") == [held.execution_id]
    assert await found(env, namespace="n2") == [held.execution_id]
    assert await found(env, namespaces=["n2", "n3"]) == [held.execution_id]
    assert await found(env, namespaces=["n3"]) == []
    assert await found(env, namespaces=["n3"], namespace="n2") == []
    assert await found(env, namespaces=[]) == []
    assert await found(env, tag=("app.q", 'say "hi", \\ ü')) == [mail]
    assert await found(env, tag=("app.q", 'say "hi')) == []
    assert await found(env, parent_id=mail) == [child]
    assert await found(env, worker_instance_id="wa-1") == [held.execution_id, failed.execution_id]
    assert await found(env, error="50% lost") == [failed.execution_id]
    assert await found(env, error="valueerror") == []
    t = env.now
    assert await found(env, created_from=t - 10) == ids[:2]
    assert await found(env, created_before=t - 10) == ids[2:]
    assert await found(env, created_from=t - 20, created_before=t) == ids[1:3]

    rows = {one.execution_id: one for one in (await engine.search_executions()).executions}
    assert [rows[name].execution_kind for name in ids] == ["sub", "sub", "mail", "mail"]
    assert rows[failed.execution_id].reason == "ValueError: 50% lost"
    assert (rows[failed.execution_id].ended_at, rows[mail].ended_at) == (t - 20, None)
    assert (rows[child].priority, rows[child].parent_id) == (7, mail)
    assert rows[held.execution_id].worker_instance_id == "wa-1"


async def test_a_search_that_finds_too_little_says_that_it_is_incomplete_and_continues(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SEARCH, "SEARCH_BUDGET", 3)
    rare = [await env.create(execution_id=numbered(5, 1), namespace="n1")]
    for number in range(7):
        env.clock.advance_ms(1)
        await env.create(execution_id=numbered(5, 9 + number), namespace="other")
    searches = env.store.calls["search"]

    pages = await all_pages(env.engine.search_executions, namespace="n1", limit=2)

    assert [one.execution_id for page in pages for one in page.executions] == rare
    assert [page.incomplete for page in pages] == [True, True, False]
    assert env.store.calls["search"] - searches == 3, "one call of the store for each page, whatever it finds"


async def test_an_unfiltered_page_reads_no_more_than_it_shows(env: Env) -> None:
    asked = search.search_of(validate_filter(created_from=5), None, 51)

    assert (asked.limit, asked.budget) == (51, 51)
    assert search.search_of(validate_filter(kind="x"), None, 51).budget == search.SEARCH_BUDGET


async def test_children_are_listed_oldest_first_in_pages(env: Env) -> None:
    parent = await env.create(execution_id=numbered(5, 1))
    other = await env.create(execution_id=numbered(5, 2))
    children = []
    for number in (7, 3, 9, 4):
        env.clock.advance_ms(1)
        children.append(
            await env.create(execution_id=numbered(5, number), parent_id=parent, execution_kind=f"k{number}")
        )
    await env.create(execution_id=numbered(5, 11), parent_id=other)

    first = await env.engine.list_children(parent, limit=3)
    rest = await env.engine.list_children(parent, limit=3, cursor=first.next_cursor)

    assert [one.execution_id for one in (*first.executions, *rest.executions)] == children
    assert [one.execution_kind for one in first.executions] == ["k7", "k3", "k9"]
    assert rest.next_cursor is None
    assert (await env.engine.list_children(children[0])).executions == []


@pytest.mark.parametrize(
    "cursor", ["", "x", "5", "/{fp:1}:x", "-1/{fp:1}:" + "1" * 32, "9" * 16 + "/{fp:1}:" + "1" * 32]
)
async def test_a_cursor_of_something_else_is_refused(env: Env, cursor: str) -> None:
    with pytest.raises(errors.InvalidInput):
        await env.engine.search_executions(cursor=cursor)


def numbered(partition: int, number: int) -> str:
    return f"{{fp:{partition}}}:00000000-0000-4000-8000-{number:012}"
