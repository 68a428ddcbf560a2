"""Retention in every table: after much work, each table of each store is as small as after one round.

Finished rows are kept for a second, and rows whose retention is a constant for two. The sizes are printed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import apsw
import asyncpg
import msgspec
import pytest

from flowfabric import Budget, Context, Fabric, Limit, Quorum, Retry
from flowfabric.engine.limits import aggregates
from flowfabric.rules.execution import policy
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import quota
from flowfabric.rules.scheduling import workers
from flowfabric.sdk.worker.worker import Worker
from flowfabric.settings import Settings, Sweeps
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.queries import Scan
from tests.servers import postgres

pytestmark = [pytest.mark.soak, pytest.mark.serial, pytest.mark.timeout(900)]

SOAK_S = int(os.environ.get("FF_SOAK_TABLES_S", "40"))
KEPT_MS = 1000
LIFE_MS = 2000
OFTEN_MS = 500
REST_S = 20  # Within this time everything that finished is due and swept many times.
SWEEPS = msgspec.structs.replace(
    Sweeps(), **{name: OFTEN_MS for name in Sweeps.__struct_fields__ if name.endswith("_ms")}
)


def make_app(url: str) -> tuple[Fabric, Callable[[str], Awaitable[None]]]:
    """Return an app with steps, waits, messages, approvals, children, streams, budgets, limits and retries."""
    app = Fabric(url, settings=Settings(sweeps=SWEEPS, retention_ms=KEPT_MS, feed_retention_ms=KEPT_MS))
    purse = Budget("purse", limits={"calls": 10**9}, reset="2s")

    async def note(text: str) -> str:
        return text

    @app.task
    async def leaf(number: int) -> int:
        return number

    @app.task(retry=Retry(max=3, base="10ms"))
    async def shaky(ctx: Context, number: int) -> int:
        if ctx.attempt == 0:
            raise ValueError("the first attempt fails")
        return number

    @app.task
    async def forever(ctx: Context) -> None:
        await ctx.sleep("1h")

    @app.task(budgets=[purse], limits=[Limit(concurrency=20), Limit(rate="1000/1s")], fair="tenant")
    async def everything(ctx: Context, tenant: str) -> str:
        await ctx.step(note, "a step")
        await ctx.spend(purse, calls=1)
        async with ctx.reserve(purse, calls=2) as room:
            await room.spend(calls=1)
        out = ctx.stream("words")
        await out.write("some output")
        await ctx.progress({"pct": 50})
        await ctx.gather([leaf.s(one) for one in range(3)], join=Quorum(2, cancel_rest=True))
        await (await ctx.spawn(shaky.s(1))).result()
        await ctx.sleep("100ms")
        gate = await ctx.approval("yes", bool, expires="50ms")
        await gate
        wish = await ctx.receive("wish", str, timeout="2s")
        return wish or "none"

    graph = app.flow("graph")
    first = graph.add(leaf, 1)
    graph.add(leaf, graph.add(leaf, first))

    async def once(name: str) -> None:
        run = await everything.options(key=f"key-{name}").submit(name[-1])
        await run.signal("wish", "rain")
        await graph.submit(key=f"flow-{name}")
        given_up = await graph.submit(key=f"cancelled-{name}")
        await given_up.cancel("not needed")
        stopped = await forever.submit()
        await stopped.cancel("not needed")
        await run.result()

    return app, once


async def rows_of(app: Fabric, url: str) -> dict[str, int]:
    """Return the number of rows per table."""
    if url.startswith("memory:"):
        engine: Any = await app.engine()
        return {table.name: len(await engine.runtime.scan(Scan(row, limit=10_000))) for row, table in TABLE.items()}
    if url.startswith("sqlite:"):
        db = apsw.Connection(url.removeprefix("sqlite:///"), flags=apsw.SQLITE_OPEN_READONLY)
        try:
            names = [str(name) for (name,) in db.execute("select name from sqlite_master where type = 'table'")]
            return {one: int(next(iter(db.execute(f"select count(*) from {one}")))[0]) for one in names}
        finally:
            db.close()
    connection = await asyncpg.connect(url)
    try:
        names = [
            name for (name,) in await connection.fetch("select tablename from pg_tables where schemaname='public'")
        ]
        return {one: await connection.fetchval(f'select count(*) from "{one}"') for one in names}
    finally:
        await connection.close()


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def soak_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    match request.param:
        case "memory":
            yield "memory://"
        case "sqlite":
            yield f"sqlite:///{tmp_path / 'ff.db'}"
        case _:
            server, name = postgres(), f"soak_tables_{os.getpid()}"
            yield server.create_database(name)
            server.drop_database(name)


@pytest.fixture
def short_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce constant retention times of a minute, a day or a week to two seconds."""
    monkeypatch.setattr(budget_rules, "DEDUP_TTL_MS", LIFE_MS)
    monkeypatch.setattr(aggregates, "COMMIT_MARKER_TTL_MS", LIFE_MS)
    monkeypatch.setattr(workers, "EVENT_LIFE_MS", LIFE_MS)
    monkeypatch.setattr(quota, "DEFAULT_WINDOW_MS", LIFE_MS)
    terms = msgspec.structs.replace(policy.DEFAULT_TERMS, dedup_window_ms=LIFE_MS)
    monkeypatch.setattr(policy, "DEFAULT_TERMS", terms)


@pytest.mark.usefixtures("short_retention")
async def test_every_table_is_as_small_after_much_work_as_after_little(soak_url: str) -> None:
    app, once = make_app(soak_url)
    worker = Worker(app, slots=20)
    working = asyncio.create_task(worker.work())
    most: dict[str, int] = {}

    async def load(seconds: float, name: str) -> int:
        """Work for this long, at least once; return the number of rounds."""
        until, done = monotonic() + seconds, 0
        while not done or monotonic() < until:
            await asyncio.gather(*(once(f"{name}-{done}-{place}") for place in range(4)))
            done += 1
            for table, count in (await rows_of(app, soak_url)).items():
                most[table] = max(most.get(table, 0), count)
        return 4 * done

    async def rows_at_rest(at_most: dict[str, int]) -> dict[str, int]:
        """The rows of each table once there are no more than these, or after a time in which everything is due."""
        until = monotonic() + REST_S
        while True:
            found = await rows_of(app, soak_url)
            if all(count <= at_most.get(table, 0) for table, count in found.items()) or monotonic() > until:
                return found
            await asyncio.sleep(OFTEN_MS / 1000)

    try:
        await load(0, "first")
        little = await rows_at_rest({})
        rounds = await load(SOAK_S, "then")
        much = await rows_at_rest(little)
    finally:
        worker.stop()
        await working
        await app.close()

    print(f"\n{soak_url.partition(':')[0]}: {rounds} rounds in {SOAK_S} s; at rest before, most, at rest after")
    for table in sorted(much):
        print(f"{table:28}", *(f"{rows.get(table, 0):6}" for rows in (little, most, much)))
    grown = {table: (little.get(table, 0), count) for table, count in much.items() if count > little.get(table, 0)}
    assert grown == {}
    assert most["ff_exec_core"] > much["ff_exec_core"], "there was something to remove"
