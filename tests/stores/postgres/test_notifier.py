"""Hints between processes that share a Postgres database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import count
from time import monotonic

import pytest

from flowfabric.model.change import Delete, Guard, Insert, Patch
from flowfabric.model.execution import Execution, Payload
from flowfabric.stores.postgres import PostgresStore, notifier
from flowfabric.stores.queries import Read
from tests.conftest import Rival
from tests.stores.samples import change, execution, payload

MAIL = frozenset({"mail"})

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
        self.store.on_notify(self._hear)

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


BUSY = [frozenset(f"end:{batch}-{number:03}" for number in range(notifier.MANY_TOPICS)) for batch in range(3)]


async def test_who_has_much_to_tell_waits_for_more(ears: tuple[Ear, Ear], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "BATCH_DELAY_S", 3600)
    one, other = ears
    one.store.notify(frozenset({"ready"}))  # one that has just begun to listen would send whatever there is
    await other.until(lambda: bool(other.heard))
    other.heard.clear()

    for topics in BUSY:
        one.store.notify(topics)
        for _ in range(2 * notifier.LOOP_YIELDS):  # a hint of its own would have left by now
            await asyncio.sleep(0)
    one.store.notify(MAIL)
    await other.until(lambda: other.topics >= MAIL)

    assert other.heard == [MAIL.union(*BUSY)]


async def test_who_has_much_to_tell_does_not_wait_for_long(ears: tuple[Ear, Ear]) -> None:
    one, other = ears

    for topics in BUSY:
        one.store.notify(topics)

    await other.until(lambda: other.topics == frozenset().union(*BUSY))


async def test_who_ends_tells_the_rest_before(ears: tuple[Ear, Ear], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notifier, "BATCH_DELAY_S", 3600)
    one, other = ears

    one.store.notify(BUSY[0])
    await one.store.close()

    await other.until(lambda: other.topics == BUSY[0])


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


class TestAHintThatGoesWithACommit:
    """It is heard at the instant of the commit, and sent by nobody else."""

    @pytest.fixture(autouse=True)
    def sent(self, ears: tuple[Ear, Ear], monkeypatch: pytest.MonkeyPatch) -> list[frozenset[str]]:
        """What is handed over to be sent after a commit; it is kept back."""
        sent: list[frozenset[str]] = []
        for ear in ears:
            monkeypatch.setattr(ear.store._notifier, "notify", sent.append)
        return sent

    @pytest.fixture
    def at_rest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every commit comes after a rest."""
        monkeypatch.setattr(notifier, "MIN_IDLE_S", 0)
        monkeypatch.setattr(notifier, "MIN_IDLE_COMMITS", 0)

    async def test_is_heard_by_others_and_sent_by_nobody(
        self, ears: tuple[Ear, Ear], sent: list[frozenset[str]]
    ) -> None:
        one, other = ears

        assert await one.store.commit([change(Insert(execution()))], MAIL) != [None]

        await other.until(lambda: other.topics == MAIL)
        assert sent == []

    @pytest.mark.usefixtures("at_rest")
    async def test_is_not_heard_by_its_sender(self, ears: tuple[Ear, Ear]) -> None:
        one, other = ears

        await one.store.commit([change(Insert(execution("a")))], MAIL)
        await other.until(lambda: other.topics == MAIL)
        await other.store.commit([change(Insert(execution("b")))], frozenset({"back"}))
        await one.until(lambda: bool(one.heard))

        assert one.topics == {"back"}

    @pytest.mark.usefixtures("at_rest")
    async def test_is_not_heard_when_everything_was_refused(
        self, ears: tuple[Ear, Ear], sent: list[frozenset[str]]
    ) -> None:
        one, other = ears
        await one.store.commit([change(Insert(execution("a", priority=3)))])

        refused = change(Patch(Execution, ("a",), {"priority": 9}), guards=[Guard(Execution, ("a",), 0)])
        assert await one.store.commit([refused], frozenset({"refused"})) == [None]
        assert await one.store.commit([change(Insert(execution("b")))], MAIL) != [None]
        await other.until(lambda: bool(other.heard))

        assert other.topics == MAIL
        assert sent == []
        [[row]] = (await one.store.load([Read(Execution, ("a",))])).rows
        assert row.priority == 3

    @pytest.mark.usefixtures("at_rest")
    async def test_is_heard_when_the_commit_goes_in_steps(self, ears: tuple[Ear, Ear]) -> None:
        one, other = ears
        await one.store.commit([change(Insert(payload("a")))])

        again = change(Delete(Payload, ("a",)), Insert(payload("a")))
        assert await one.store.commit([again], MAIL) != [None]

        await other.until(lambda: other.topics == MAIL)

    async def test_goes_with_one_commit_between_two_rests(
        self, ears: tuple[Ear, Ear], sent: list[frozenset[str]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, other = ears
        monkeypatch.setattr(notifier, "MIN_IDLE_S", 60)

        for number in range(20):
            await one.store.commit([change(Insert(execution(f"{number}")))], frozenset({f"{number}"}))
        await other.until(lambda: bool(other.heard))

        assert other.topics == {"0"}
        assert sent == [{f"{number}"} for number in range(1, 20)]

    async def test_goes_with_a_commit_again_when_those_of_late_were_quick(self, ears: tuple[Ear, Ear]) -> None:
        one, other = ears
        one.store._notifier._commit_s = 1000  # as if somebody had held up a commit for hours
        one.store._notifier._attached_at = monotonic()

        async with asyncio.timeout(20):
            for number in count():
                await one.store.commit([change(Insert(execution(f"{number}")))], MAIL)
                if other.heard:
                    break

        assert other.topics == MAIL

    async def test_goes_with_one_of_the_commits_that_are_on_their_way(
        self, ears: tuple[Ear, Ear], sent: list[frozenset[str]]
    ) -> None:
        one, _ = ears
        rows = [change(Insert(execution(name))) for name in "ab"]

        await asyncio.gather(*(one.store.commit([row], MAIL) for row in rows))

        assert sent == [MAIL]

    async def test_is_sent_afterwards_while_many_are_heard(
        self, ears: tuple[Ear, Ear], sent: list[frozenset[str]], rival: Rival, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one, _ = ears
        monkeypatch.setattr(notifier, "MIN_IDLE_S", 60)
        for number in range(notifier.MAX_RECENT_MESSAGES):
            await rival.fetch(f"select pg_notify('ff_wake', '[\"{number}\"]')")
        await one.until(lambda: len(one.heard) == notifier.MAX_RECENT_MESSAGES)

        await one.store.commit([change(Insert(execution()))], MAIL)

        assert sent == [MAIL]

    @pytest.mark.parametrize("endless", [frozenset({"x" * 9000}), frozenset(f"{n:0100}" for n in range(300))])
    async def test_is_sent_afterwards_when_it_is_too_long_for_a_message(
        self, ears: tuple[Ear, Ear], sent: list[frozenset[str]], endless: frozenset[str]
    ) -> None:
        one, _ = ears

        assert await one.store.commit([change(Insert(execution()))], endless) != [None]

        assert sent == [endless]
