"""Connections that go silent without being closed: a worker abandons them within its lease and opens new ones."""

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
from tests.sdk.conftest import running_worker, wait_until_true
from tests.stores.unavailable import unavailable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

TTL_S = 9.0
SLACK_S = 1.0


class ProxiedStore:
    """A store behind a proxy: workers connect through it, and the test connects directly."""

    def __init__(self, hole: BlackHole, through: str, direct: str) -> None:
        self.hole = hole
        self.through = through
        self.direct = direct


@pytest.fixture(params=["postgres", "http"])
async def proxied(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ProxiedStore]:
    if request.param == "http":
        with run_server(f"sqlite:///{tmp_path / 'app.db'}") as server:
            async with _behind(server.url) as proxied:
                yield proxied
    else:
        async with _behind(await emptied(request.getfixturevalue("own_database"))) as proxied:
            yield proxied


@asynccontextmanager
async def _behind(direct: str) -> AsyncIterator[ProxiedStore]:
    parts = urlsplit(direct)
    assert parts.hostname is not None
    assert parts.port is not None
    async with black_hole(parts.hostname, parts.port) as hole:
        user = f"{parts.netloc.rpartition('@')[0]}@" if "@" in parts.netloc else ""
        yield ProxiedStore(hole, urlunsplit(parts._replace(netloc=f"{user}127.0.0.1:{hole.port}")), direct)


async def test_a_worker_whose_connections_go_silent_works_again_within_its_lease(proxied: ProxiedStore) -> None:
    app = Fabric(proxied.through)
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

    async with Fabric(proxied.direct) as watching, running_worker(app, lease_ttl=TTL_S, slots=4):
        watching.tasks.update(app.tasks)
        held = await long.submit()
        # so that many connections are open
        await asyncio.gather(*[(await quick.submit(n)).result(20) for n in range(8)])
        await asyncio.wait_for(begun.wait(), 20)

        proxied.hole.swallow()
        silent_at = monotonic()
        fresh = await _submit_direct(watching, 7)
        assert await fresh.result(60) == 7
        took = monotonic() - silent_at
        assert took <= TTL_S + SLACK_S, f"the first new completion came after {took:.1f} s"

        await asyncio.sleep(max(0.0, silent_at + TTL_S + SLACK_S - monotonic()))  # A lease that was lost is reclaimed.
        go_on.set()
        assert await watching.find(held.id).result(20) == "kept"
        assert attempts == [0], "its lease was renewed in time"
        assert len(await watching.find(held.id).attempts()) == 1
    await app.close()


async def _submit_direct(app: Fabric, n: int) -> Run[Any]:
    """Submit a run without the proxy."""
    engine = await app.engine()
    task = app.tasks["quick"]
    ask = await task.build_create(engine, task.signature.bind((n,), {}), options=task.default_options)
    return app.find((await engine.create(ask)).execution_id)


async def test_a_completion_whose_connection_goes_silent_is_written_once(proxied: ProxiedStore) -> None:
    app, runs = Fabric(proxied.through), 20
    ran: list[int] = []

    @app.task(name="quick")
    async def quick(n: int) -> int:
        ran.append(n)
        if len(ran) == runs // 2:
            proxied.hole.swallow()  # with completions and claims in flight
        return n

    async with Fabric(proxied.direct) as watching:
        watching.tasks.update(app.tasks)
        handed = [await _submit_direct(watching, n) for n in range(runs)]
        async with running_worker(app, lease_ttl=TTL_S, slots=3):
            assert await asyncio.gather(*(run.result(60) for run in handed)) == list(range(runs))
        assert [await run.state() for run in handed] == [PublicState.COMPLETED] * runs
    await app.close()


async def test_a_worker_survives_a_network_outage(proxied: ProxiedStore) -> None:
    app = Fabric(proxied.through)

    @app.task(name="quick")
    async def quick(n: int) -> int:
        return n

    async with Fabric(proxied.direct) as watching, running_worker(app, lease_ttl=TTL_S):
        watching.tasks.update(app.tasks)
        assert await (await quick.submit(1)).result(20) == 1
        proxied.hole.swallow(new=True)
        run, accepted = await _submit_direct(watching, 2), proxied.hole.accepted
        await wait_until_true(lambda: proxied.hole.accepted > accepted, 30)  # It tries to connect without success.
        proxied.hole.heal()
        healed_at = monotonic()
        assert await run.result(60) == 2
        assert monotonic() - healed_at <= TTL_S + SLACK_S
    await app.close()


# -- one connection -------------------------------------------------------------------------------------------------


async def test_a_write_whose_deadline_has_passed_has_an_unknown_outcome_and_a_read_is_retried(database: str) -> None:
    async with _behind(database) as proxied:
        store = PostgresStore(proxied.through, deadlines=Deadlines(command_s=0.3))
        await store.open(migrate=True)
        proxied.hole.swallow()
        assert await store.ping() > 0, "over another connection"
        proxied.hole.swallow()
        with unavailable(in_doubt=True, source=errors.StoreFault.TIMEOUT):
            await store._pool.write(lambda connection: connection.execute("select pg_sleep(0)"))
        await store.close()


async def test_a_slow_statement_on_a_responsive_server_has_a_known_outcome(database: str) -> None:
    store = PostgresStore(database, deadlines=Deadlines(command_s=1.0))
    await store.open(migrate=True)
    with unavailable(in_doubt=False, source=errors.StoreFault.TIMEOUT):
        await store._pool.write(lambda connection: connection.execute("select pg_sleep(20)"))
    await store.close()


async def test_idle_connections_of_the_same_age_are_not_tried_one_after_the_other(database: str) -> None:
    async with _behind(database) as proxied:
        store = PostgresStore(proxied.through, deadlines=Deadlines(command_s=1.0))
        await store.open(migrate=True)
        nap = lambda connection: connection.execute("select pg_sleep(0.2)")  # noqa: E731
        await asyncio.gather(*(store._pool.read(nap) for _ in range(5)))
        assert proxied.hole.accepted >= 5
        proxied.hole.swallow()
        began = monotonic()
        await store.ping()
        assert monotonic() - began < 2.0, "it gave up on one of them, not on five"
        await store.close()


async def test_a_listener_that_went_silent_is_replaced(database: str) -> None:
    async with _behind(database) as proxied, await open_engine(database) as teller:
        settings = Settings(poll_ms=60_000, deadlines=Deadlines(command_s=0.5))
        async with await open_engine(proxied.through, settings=settings) as hearer:
            heard = asyncio.Event()
            hearer.store.on_notify(lambda _: heard.set())
            await _until_heard(teller, heard)
            proxied.hole.swallow()
            heard.clear()
            await _until_heard(teller, heard)


async def _until_heard(teller: Engine, heard: asyncio.Event) -> None:
    async with asyncio.timeout(20):
        while not heard.is_set():  # A notification may be sent before the listener is there.
            teller.store.notify(frozenset({"topic"}))
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("of_role", "expected"), [("0", "9s"), ("3s", "3s"), ("1min", "9s")])
async def test_the_server_uses_our_statement_timeout_unless_the_role_has_a_shorter_one(
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
