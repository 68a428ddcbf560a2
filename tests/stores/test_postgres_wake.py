"""Hints between processes that share a Postgres database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from flowfabric.stores.postgres import PostgresStore
from tests.conftest import Rival

LISTENER = """
select pid from pg_stat_activity
 where datname = current_database() and application_name = 'flowfabric' and query ilike 'listen %'
"""


class Ear:
    """A store that remembers what it was told."""

    def __init__(self, dsn: str) -> None:
        self.store = PostgresStore(dsn)
        self.heard: list[frozenset[str]] = []
        self._news = asyncio.Event()
        self.store.on_wake(self._hear)

    def _hear(self, topics: frozenset[str]) -> None:
        self.heard.append(topics)
        self._news.set()

    @property
    def topics(self) -> frozenset[str]:
        return frozenset().union(*self.heard)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._news.clear()
                await self._news.wait()


@pytest.fixture
async def ears(database: str, rival: Rival) -> AsyncIterator[tuple[Ear, Ear]]:
    """Two stores that listen."""
    ears = Ear(database), Ear(database)
    async with asyncio.timeout(20):
        while len(await rival.fetch(LISTENER)) < 2:
            await rival.fetch("select pg_sleep(0.005)")
    yield ears
    for ear in ears:
        await ear.store.close()


async def test_a_hint_reaches_the_others_and_not_its_sender(ears: tuple[Ear, Ear]) -> None:
    one, other = ears

    one.store.notify(frozenset({"mail", "lane: größe\n"}))
    await other.until(lambda: other.topics == {"mail", "lane: größe\n"})
    other.store.notify(frozenset({"back"}))
    await one.until(lambda: bool(one.heard))

    assert one.topics == {"back"}


async def test_hints_of_one_moment_travel_together(ears: tuple[Ear, Ear]) -> None:
    one, other = ears

    for number in range(200):
        one.store.notify(frozenset({f"lane-{number}", "all"}))
    await other.until(lambda: len(other.topics) == 201)

    assert len(other.heard) <= 3


async def test_many_topics_become_several_messages_and_an_endless_one_is_left_out(ears: tuple[Ear, Ear]) -> None:
    one, other = ears
    many = frozenset(f"{number:0100}" for number in range(300))

    one.store.notify(many | {"x" * 9000})
    await other.until(lambda: other.topics >= many)

    assert other.topics == many
    assert len(other.heard) > 1


async def test_a_listener_that_lost_its_connection_listens_again(ears: tuple[Ear, Ear], rival: Rival) -> None:
    one, other = ears

    lost = await rival.fetch(f"select pid, pg_terminate_backend(pid) from ({LISTENER}) listening")
    async with asyncio.timeout(20):
        while len({row["pid"] for row in await rival.fetch(LISTENER)} - {row["pid"] for row in lost}) < 2:
            await rival.fetch("select pg_sleep(0.005)")
    one.store.notify(frozenset({"mail"}))

    await other.until(lambda: other.topics == {"mail"})


async def test_a_hint_waits_for_nobody(ears: tuple[Ear, Ear], rival: Rival) -> None:
    """Not even for someone who holds all tables: hints are sent beside everything else."""
    one, other = ears
    await rival.begin("lock table ff_exec_core, ff_batch, ff_feed, ff_line")

    one.store.notify(frozenset({"mail"}))

    await other.until(lambda: other.topics == {"mail"})


async def test_what_is_no_hint_is_passed_over(ears: tuple[Ear, Ear], rival: Rival) -> None:
    one, other = ears

    await rival.fetch("select pg_notify('ff_wake', 'no list')")
    one.store.notify(frozenset({"mail"}))

    await other.until(lambda: bool(other.heard))
    assert other.topics == {"mail"}


async def test_a_hint_that_meets_a_closing_store_is_dropped(database: str, rival: Rival) -> None:
    wrong: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))

    for _ in range(20):
        ear = Ear(database)
        async with asyncio.timeout(20):
            while not ear.heard:
                await rival.fetch("select pg_notify('ff_wake', '[\"mail\"]')")
            closing = asyncio.create_task(ear.store.close())
            while not closing.done():
                await rival.fetch("select pg_notify('ff_wake', '[\"mail\"]') from generate_series(1, 9)")
        await closing

    assert wrong == []
