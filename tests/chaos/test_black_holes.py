"""Connections that go silent without an end: a worker gives them up within its lease and goes on over new ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from flowfabric import Context, Engine, Fabric, Run, errors
from flowfabric.connector import open_engine
from flowfabric.model.states import PublicState
from flowfabric.settings import Deadlines, Settings
from flowfabric.stores.postgres import PostgresStore
from tests.blackhole import BlackHole, black_hole
from tests.client.server_thread import run_server
from tests.conftest import emptied
from tests.sdk.conftest import until_so, working

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TTL_S = 9.0
SLACK_S = 1.0


class Place:
    """A store behind a proxy: workers use the one, and whoever watches goes past it."""

    def __init__(self, hole: BlackHole, through: str, direct: str) -> None:
        self.hole = hole
        self.through = through
        self.direct = direct


@pytest.fixture(params=["postgres", "http"])
async def place(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Place]:
    if request.param == "http":
        with run_server(f"sqlite:///{tmp_path / 'app.db'}") as server:
            async with _behind(server.url) as place:
                yield place
    else:
        async with _behind(await emptied(request.getfixturevalue("own_database"))) as place:
            yield place


@asynccontextmanager
async def _behind(direct: str) -> AsyncIterator[Place]:
    parts = urlsplit(direct)
    assert parts.hostname is not None
    assert parts.port is not None
    async with black_hole(parts.hostname, parts.port) as hole:
        user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        yield Place(hole, urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{hole.port}")), direct)


async def test_a_worker_whose_connections_go_silent_works_again_within_its_lease(place: Place) -> None:
    app = Fabric(place.through)
    begun, go_on = asyncio.Event(), asyncio.Event()
    attempts: list[int] = []

    @app.task(name="long")
    async def long(ctx: Context) -> str:
        attempts.append(ctx.attempt)
        begun.set()
        await go_on.wait()
        return "kept"

    @app.task(name="quick")
    async def quick(n: int) -> int:
        return n

    async with Fabric(place.direct) as watching, working(app, lease_ttl=TTL_S, slots=4):
        watching.tasks.update(app.tasks)
        held = await long.submit()
        await asyncio.gather(*[(await quick.submit(n)).result(20) for n in range(8)])  # so that many are open
        await asyncio.wait_for(begun.wait(), 20)

        place.hole.swallow()
        silent_at = monotonic()
        fresh = await _submitted(watching, 7)
        assert await fresh.result(60) == 7
        took = monotonic() - silent_at
        assert took <= TTL_S + SLACK_S, f"the first new completion came after {took:.1f} s"

        await asyncio.sleep(max(0.0, silent_at + TTL_S + SLACK_S - monotonic()))  # a lease that was lost is taken over
        go_on.set()
        assert await watching.find(held.id).result(20) == "kept"
        assert attempts == [0], "its lease was renewed in time"
        assert len(await watching.find(held.id).attempts()) == 1
    await app.close()


async def _submitted(app: Fabric, n: int) -> Run[Any]:
    """A run that is handed over past the proxy."""
    engine = await app.engine()
    task = app.tasks["quick"]
    ask = await task.build_create(engine, task.signature.bind((n,), {}), options=task.default_options)
    return app.find((await engine.create(ask)).execution_id)


async def test_a_completion_that_goes_silent_is_written_once(place: Place) -> None:
    app, runs = Fabric(place.through), 20
    ran: list[int] = []

    @app.task(name="quick")
    async def quick(n: int) -> int:
        ran.append(n)
        if len(ran) == runs // 2:
            place.hole.swallow()  # with completions and claims under way
        return n

    async with Fabric(place.direct) as watching:
        watching.tasks.update(app.tasks)
        handed = [await _submitted(watching, n) for n in range(runs)]
        async with working(app, lease_ttl=TTL_S, slots=3):
            assert await asyncio.gather(*(run.result(60) for run in handed)) == list(range(runs))
        assert [await run.state() for run in handed] == [PublicState.COMPLETED] * runs
    await app.close()


async def test_a_worker_outlives_a_network_that_is_gone_for_a_while(place: Place) -> None:
    app = Fabric(place.through)

    @app.task(name="quick")
    async def quick(n: int) -> int:
        return n

    async with Fabric(place.direct) as watching, working(app, lease_ttl=TTL_S):
        watching.tasks.update(app.tasks)
        assert await (await quick.submit(1)).result(20) == 1
        place.hole.swallow(new=True)
        run, accepted = await _submitted(watching, 2), place.hole.accepted
        await until_so(lambda: place.hole.accepted > accepted, 30)  # it tries to connect, in vain
        place.hole.heal()
        healed_at = monotonic()
        assert await run.result(60) == 2
        assert monotonic() - healed_at <= TTL_S + SLACK_S
    await app.close()


# -- one connection -------------------------------------------------------------------------------------------------


async def test_a_write_whose_deadline_has_passed_is_in_doubt_and_a_read_is_sent_again(database: str) -> None:
    async with _behind(database) as place:
        store = PostgresStore(place.through, deadlines=Deadlines(command_s=0.3))
        await store.open(migrate=True)
        place.hole.swallow()
        assert await store.ping() > 0, "over another connection"
        place.hole.swallow()
        with pytest.raises(errors.StoreUnavailable) as lost:
            await store._pool.write(lambda connection: connection.execute("select pg_sleep(0)"))
        assert (lost.value.in_doubt, lost.value.source) == (True, errors.StoreFault.TIMEOUT)
        await store.close()


async def test_a_statement_that_is_too_slow_on_a_server_that_answers_is_not_in_doubt(database: str) -> None:
    store = PostgresStore(database, deadlines=Deadlines(command_s=1.0))
    await store.open(migrate=True)
    with pytest.raises(errors.StoreUnavailable) as slow:
        await store._pool.write(lambda connection: connection.execute("select pg_sleep(20)"))
    assert (slow.value.in_doubt, slow.value.source) == (False, errors.StoreFault.TIMEOUT)
    await store.close()


async def test_idle_connections_of_the_same_age_are_not_tried_one_after_the_other(database: str) -> None:
    async with _behind(database) as place:
        store = PostgresStore(place.through, deadlines=Deadlines(command_s=1.0))
        await store.open(migrate=True)
        nap = lambda connection: connection.execute("select pg_sleep(0.2)")  # noqa: E731
        await asyncio.gather(*(store._pool.read(nap) for _ in range(5)))
        assert place.hole.accepted >= 5
        place.hole.swallow()
        began = monotonic()
        await store.ping()
        assert monotonic() - began < 2.0, "it gave up on one of them, not on five"
        await store.close()


async def test_a_listener_that_went_silent_is_replaced(database: str) -> None:
    async with _behind(database) as place, await open_engine(database) as teller:
        settings = Settings(poll_ms=60_000, deadlines=Deadlines(command_s=0.5))
        async with await open_engine(place.through, settings=settings) as hearer:
            heard = asyncio.Event()
            hearer.store.on_notify(lambda _: heard.set())
            await _until_heard(teller, heard)
            place.hole.swallow()
            heard.clear()
            await _until_heard(teller, heard)


async def _until_heard(teller: Engine, heard: asyncio.Event) -> None:
    async with asyncio.timeout(20):
        while not heard.is_set():  # a hint may be sent before anybody listens
            teller.store.notify(frozenset({"topic"}))
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("of_role", "expected"), [("0", "9s"), ("3s", "3s"), ("1min", "9s")])
async def test_the_server_gives_up_with_us_and_a_shorter_limit_of_the_role_stays(
    database: str, of_role: str, expected: str
) -> None:
    role = f"limited_{of_role}"
    admin = await asyncpg.connect(database)
    await admin.execute(f"create role {role} superuser login password 'x'")
    await admin.execute(f"alter role {role} set statement_timeout = '{of_role}'")
    parts = urlsplit(database)
    store = PostgresStore(urlunsplit(parts._replace(netloc=f"{role}:x@{parts.hostname}:{parts.port}")))
    try:
        await store.open(migrate=False)
        found = await store._pool.read(lambda connection: connection.fetchval("show statement_timeout"))
        assert found == expected
    finally:
        await store.close()
        await admin.execute(f"drop role {role}")
        await admin.close()
