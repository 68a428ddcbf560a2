"""Notifications between processes that share a Postgres database."""

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
from tests.stores.sample_rows import change, execution, payload

MAIL = frozenset({"mail"})

LISTENER = """
select pid from pg_stat_activity
 where datname = current_database() and application_name = 'flowfabric' and query ilike 'listen %'
   and state = 'idle'  -- else it has not committed yet, and gets no message
"""


class ListeningStore:
    """A store that records the notifications that it receives."""

    def __init__(self, dsn: str) -> None:
        self.store = PostgresStore(dsn)
        self.heard: list[frozenset[str]] = []
        self._news = asyncio.Event()
        self.store.on_notify(self._receive)

    def _receive(self, topics: frozenset[str]) -> None:
        self.heard.append(topics)
        self._news.set()

    @property
    def topics(self) -> frozenset[str]:
        return frozenset().union(*self.heard)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._news.clear()
                await self._news.wait()


@pytest.fixture
async def listeners(database: str, rival: Rival) -> AsyncIterator[tuple[ListeningStore, ListeningStore]]:
    """Two stores that listen."""
    listeners = ListeningStore(database), ListeningStore(database)
    async with asyncio.timeout(20):
        while len(await rival.fetch(LISTENER)) < 2:
            await rival.fetch("select pg_sleep(0.005)")
    yield listeners
    for ear in listeners:
        await ear.store.close()


async def test_a_notification_reaches_the_others_and_not_its_sender(
    listeners: tuple[ListeningStore, ListeningStore],
) -> None:
    one, other = listeners

    one.store.notify(frozenset({"mail", "lane: größe\n"}))
    await other.wait_until(lambda: other.topics == {"mail", "lane: größe\n"})
    other.store.notify(frozenset({"back"}))
    await one.wait_until(lambda: bool(one.heard))

    assert one.topics == {"back"}


async def test_notifications_of_one_moment_are_sent_together(listeners: tuple[ListeningStore, ListeningStore]) -> None:
    one, other = listeners

    for number in range(200):
        one.store.notify(frozenset({f"lane-{number}", "all"}))
    await other.wait_until(lambda: len(other.topics) == 201)

    assert len(other.heard) <= 3


BUSY = [frozenset(f"end:{batch}-{number:03}" for number in range(notifier.MANY_TOPICS)) for batch in range(3)]


async def test_a_busy_sender_waits_for_more_notifications(
    listeners: tuple[ListeningStore, ListeningStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "BATCH_DELAY_S", 3600)
    one, other = listeners
    one.store.notify(frozenset({"ready"}))  # A process that has just begun to listen would send at once.
    await other.wait_until(lambda: bool(other.heard))
    other.heard.clear()

    for topics in BUSY:
        one.store.notify(topics)
        for _ in range(2 * notifier.LOOP_YIELDS):  # A separate notification would have been sent by now.
            await asyncio.sleep(0)
    one.store.notify(MAIL)
    await other.wait_until(lambda: other.topics >= MAIL)

    assert other.heard == [MAIL.union(*BUSY)]


async def test_a_busy_sender_does_not_wait_for_long(listeners: tuple[ListeningStore, ListeningStore]) -> None:
    one, other = listeners

    for topics in BUSY:
        one.store.notify(topics)

    await other.wait_until(lambda: other.topics == frozenset().union(*BUSY))


async def test_a_closing_store_sends_the_rest_before(
    listeners: tuple[ListeningStore, ListeningStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifier, "BATCH_DELAY_S", 3600)
    one, other = listeners

    one.store.notify(BUSY[0])
    await one.store.close()

    await other.wait_until(lambda: other.topics == BUSY[0])


async def test_many_topics_become_several_messages_and_an_overlong_one_is_omitted(
    listeners: tuple[ListeningStore, ListeningStore],
) -> None:
    one, other = listeners
    many = frozenset(f"{number:0100}" for number in range(300))

    one.store.notify(many | {"x" * 9000})
    await other.wait_until(lambda: other.topics >= many)

    assert other.topics == many
    assert len(other.heard) > 1


async def test_a_listener_that_lost_its_connection_listens_again(
    listeners: tuple[ListeningStore, ListeningStore], rival: Rival
) -> None:
    one, other = listeners

    lost = await rival.fetch(f"select pid, pg_terminate_backend(pid) from ({LISTENER}) listening")
    async with asyncio.timeout(20):
        while len({row["pid"] for row in await rival.fetch(LISTENER)} - {row["pid"] for row in lost}) < 2:
            await rival.fetch("select pg_sleep(0.005)")
    one.store.notify(frozenset({"mail"}))

    await other.wait_until(lambda: other.topics == {"mail"})


async def test_a_notification_waits_for_no_lock(listeners: tuple[ListeningStore, ListeningStore], rival: Rival) -> None:
    """This holds even if all tables are locked: notifications are sent on another connection."""
    one, other = listeners
    await rival.begin("lock table ff_exec_core, ff_batch, ff_feed, ff_line")

    one.store.notify(frozenset({"mail"}))

    await other.wait_until(lambda: other.topics == {"mail"})


async def test_a_payload_of_another_format_is_ignored(
    listeners: tuple[ListeningStore, ListeningStore], rival: Rival
) -> None:
    one, other = listeners

    await rival.fetch("select pg_notify('ff_wake', 'no list')")
    one.store.notify(frozenset({"mail"}))

    await other.wait_until(lambda: bool(other.heard))
    assert other.topics == {"mail"}


async def test_a_notification_to_a_closing_store_is_dropped(database: str, rival: Rival) -> None:
    wrong: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))

    for _ in range(20):
        ear = ListeningStore(database)
        async with asyncio.timeout(20):
            while not ear.heard:
                await rival.fetch("select pg_notify('ff_wake', '[\"mail\"]')")
            closing = asyncio.create_task(ear.store.close())
            while not closing.done():
                await rival.fetch("select pg_notify('ff_wake', '[\"mail\"]') from generate_series(1, 9)")
        await closing

    assert wrong == []


class TestANotificationWithACommit:
    """It is delivered at the instant of the commit and not sent a second time."""

    @pytest.fixture(autouse=True)
    def sent(
        self, listeners: tuple[ListeningStore, ListeningStore], monkeypatch: pytest.MonkeyPatch
    ) -> list[frozenset[str]]:
        """The notifications that would be sent after a commit; none is sent."""
        sent: list[frozenset[str]] = []
        for ear in listeners:
            monkeypatch.setattr(ear.store._notifier, "notify", sent.append)
        return sent

    @pytest.fixture
    def idle_before_commit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let every commit follow an idle period."""
        monkeypatch.setattr(notifier, "MIN_IDLE_S", 0)
        monkeypatch.setattr(notifier, "MIN_IDLE_COMMITS", 0)

    async def test_is_received_by_others_and_not_sent_separately(
        self, listeners: tuple[ListeningStore, ListeningStore], sent: list[frozenset[str]]
    ) -> None:
        one, other = listeners

        assert await one.store.commit([change(Insert(execution()))], MAIL) != [None]

        await other.wait_until(lambda: other.topics == MAIL)
        assert sent == []

    @pytest.mark.usefixtures("idle_before_commit")
    async def test_is_not_received_by_its_sender(self, listeners: tuple[ListeningStore, ListeningStore]) -> None:
        one, other = listeners

        await one.store.commit([change(Insert(execution("a")))], MAIL)
        await other.wait_until(lambda: other.topics == MAIL)
        await other.store.commit([change(Insert(execution("b")))], frozenset({"back"}))
        await one.wait_until(lambda: bool(one.heard))

        assert one.topics == {"back"}

    @pytest.mark.usefixtures("idle_before_commit")
    async def test_is_not_received_if_every_change_was_refused(
        self, listeners: tuple[ListeningStore, ListeningStore], sent: list[frozenset[str]]
    ) -> None:
        one, other = listeners
        await one.store.commit([change(Insert(execution("a", priority=3)))])

        refused = change(Patch(Execution, ("a",), {"priority": 9}), guards=[Guard(Execution, ("a",), 0)])
        assert await one.store.commit([refused], frozenset({"refused"})) == [None]
        assert await one.store.commit([change(Insert(execution("b")))], MAIL) != [None]
        await other.wait_until(lambda: bool(other.heard))

        assert other.topics == MAIL
        assert sent == []
        [[row]] = (await one.store.load([Read(Execution, ("a",))])).rows
        assert row.priority == 3

    @pytest.mark.usefixtures("idle_before_commit")
    async def test_is_received_if_the_commit_has_several_statements(
        self, listeners: tuple[ListeningStore, ListeningStore]
    ) -> None:
        one, other = listeners
        await one.store.commit([change(Insert(payload("a")))])

        again = change(Delete(Payload, ("a",)), Insert(payload("a")))
        assert await one.store.commit([again], MAIL) != [None]

        await other.wait_until(lambda: other.topics == MAIL)

    async def test_is_sent_with_one_commit_between_two_idle_periods(
        self,
        listeners: tuple[ListeningStore, ListeningStore],
        sent: list[frozenset[str]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        one, other = listeners
        monkeypatch.setattr(notifier, "MIN_IDLE_S", 60)

        for number in range(20):
            await one.store.commit([change(Insert(execution(f"{number}")))], frozenset({f"{number}"}))
        await other.wait_until(lambda: bool(other.heard))

        assert other.topics == {"0"}
        assert sent == [{f"{number}"} for number in range(1, 20)]

    async def test_is_sent_with_a_commit_again_once_recent_commits_were_quick(
        self, listeners: tuple[ListeningStore, ListeningStore]
    ) -> None:
        one, other = listeners
        one.store._notifier._commit_s = 1000  # as if a commit had been delayed for hours
        one.store._notifier._attached_at = monotonic()

        async with asyncio.timeout(20):
            for number in count():
                await one.store.commit([change(Insert(execution(f"{number}")))], MAIL)
                if other.heard:
                    break

        assert other.topics == MAIL

    async def test_is_sent_with_one_of_the_commits_in_flight(
        self, listeners: tuple[ListeningStore, ListeningStore], sent: list[frozenset[str]]
    ) -> None:
        one, _ = listeners
        rows = [change(Insert(execution(name))) for name in "ab"]

        await asyncio.gather(*(one.store.commit([row], MAIL) for row in rows))

        assert sent == [MAIL]

    async def test_is_sent_afterwards_while_many_are_received(
        self,
        listeners: tuple[ListeningStore, ListeningStore],
        sent: list[frozenset[str]],
        rival: Rival,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        one, _ = listeners
        monkeypatch.setattr(notifier, "MIN_IDLE_S", 60)
        for number in range(notifier.MAX_RECENT_MESSAGES):
            await rival.fetch(f"select pg_notify('ff_wake', '[\"{number}\"]')")
        await one.wait_until(lambda: len(one.heard) == notifier.MAX_RECENT_MESSAGES)

        await one.store.commit([change(Insert(execution()))], MAIL)

        assert sent == [MAIL]

    @pytest.mark.parametrize("endless", [frozenset({"x" * 9000}), frozenset(f"{n:0100}" for n in range(300))])
    async def test_is_sent_afterwards_if_it_is_too_long_for_a_message(
        self, listeners: tuple[ListeningStore, ListeningStore], sent: list[frozenset[str]], endless: frozenset[str]
    ) -> None:
        one, _ = listeners

        assert await one.store.commit([change(Insert(execution()))], endless) != [None]

        assert sent == [endless]
