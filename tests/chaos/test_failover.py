"""An asynchronous standby takes over without the last commits: what is acknowledged afterwards is not lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.engine.streams.subscription import Subscription
from flowfabric.rules.feed import CompletionFeedEntry
from flowfabric.testing.invariants import check_invariants
from tests.servers import PostgresServer, leave, postgres

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SERVER = "failover"
WHO: dict[str, Any] = {"worker_id": "w", "worker_instance_id": "w-1", "lease_ttl_ms": 30_000}
COUNT = 20


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    """A server of its own that can be killed and replaced."""
    yield postgres(SERVER)
    leave(SERVER)


@pytest.fixture
async def engine(server: PostgresServer, request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """An engine on a fresh database that survives the failover."""
    name = f"work_{abs(hash(request.node.name))}"
    async with await open_engine(server.create_database(name)) as engine:
        yield engine


async def submit(engine: Engine, lane: str, count: int = COUNT) -> set[str]:
    """Create executions on a lane, if need be through an outage; return the acknowledged ids."""
    found = set[str]()
    for _ in range(count):
        execution_id = engine.new_execution_id()
        while execution_id not in found:
            try:
                await engine.create_execution(execution_id=execution_id, lane_id=lane)
                found.add(execution_id)
            except errors.StoreUnavailable:
                await asyncio.sleep(0.05)
    return found


async def work(engine: Engine, lane: str) -> set[str]:
    """Claim and complete what there is on a lane; return the ids."""
    done = set[str]()
    while claimed := await engine.claim_many(lane, 10, **WHO):
        for one in claimed:
            await engine.complete(one.handle)
            done.add(one.execution_id)
    return done


async def read_feed(feed: Subscription[CompletionFeedEntry]) -> tuple[set[str], int]:
    """Return the executions whose outcomes are reported up to the end of the feed, and the number of reported gaps."""
    found, gaps = set[str](), 0
    while True:
        try:
            news = await feed.next(timeout_s=0)
        except errors.StreamBackpressure:
            gaps += 1
            continue
        if news is None:
            return found, gaps
        found.add(news.execution_id)


async def test_work_acknowledged_after_a_failover_is_claimed_on_its_own_lane(
    server: PostgresServer, engine: Engine
) -> None:
    await asyncio.to_thread(server.back_up)
    await submit(engine, "late")  # The queue of this lane is lost with the primary.
    await asyncio.to_thread(server.fail_over)

    async with await open_engine(engine.store._pool.dsn) as other:  # type: ignore[attr-defined]
        others = await submit(other, "foreign")  # the first queue that the new primary registers
        accepted = await submit(engine, "late")

        assert await other.store.executions_in_missing_queues(10) == []
        assert await work(other, "foreign") == others
        assert await work(other, "late") == accepted
        await check_invariants(other)


@pytest.mark.parametrize("grown", [False, True], ids=["at once", "after the feed has grown"])
async def test_a_subscriber_to_lost_events_is_notified_of_a_gap_and_misses_nothing_that_follows(
    server: PostgresServer, engine: Engine, grown: bool
) -> None:
    feed = await engine.subscribe_completion()
    early = await submit(engine, "kept")
    await work(engine, "kept")
    assert await read_feed(feed) == (early, 0)
    kept = feed.cursor
    await asyncio.to_thread(server.back_up)
    lost = await submit(engine, "kept")
    await work(engine, "kept")
    assert await read_feed(feed) == (lost, 0)
    ahead = feed.cursor
    await asyncio.to_thread(server.fail_over)

    async with await open_engine(engine.store._pool.dsn) as after:  # type: ignore[attr-defined]
        if not grown:
            again = await after.subscribe_completion(ahead)
            assert await read_feed(again) == (set(), 1)
            ahead = again.cursor
        new = await submit(after, "kept", 2 * COUNT)
        await work(after, "kept")

        assert await read_feed(await after.subscribe_completion(ahead)) == (new, int(grown))
        assert await read_feed(await after.subscribe_completion(kept)) == (new, 0)
        assert (await read_feed(feed))[0] == new  # the engine that survived the failover


async def test_a_crash_that_loses_commits_loses_no_position_that_was_delivered(server: PostgresServer) -> None:
    server.execute("ALTER SYSTEM SET synchronous_commit = off")
    server.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
    server.execute("ALTER SYSTEM SET wal_writer_flush_after = '1GB'")
    server.execute("SELECT pg_reload_conf()")
    dsn = server.create_database("careless")
    async with await open_engine(dsn) as engine:
        feed = await engine.subscribe_completion()
        seen = await submit(engine, "lane")
        await work(engine, "lane")
        assert await read_feed(feed) == (seen, 0)
        await submit(engine, "unseen")
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)

        accepted = await submit(engine, "unseen")
        async with await open_engine(dsn) as other:
            assert await work(other, "unseen") >= accepted
            found, gaps = await read_feed(await other.subscribe_completion(feed.cursor))
    assert found >= accepted
    assert gaps == 0
