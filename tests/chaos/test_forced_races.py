"""Races between two processes with a forced interleaving.

On Postgres a referee locks the row of an execution. Calls that want to write that row wait in the server's lock queue;
on Valkey it pauses all writes of the server, and reads go on. The server shows who waits. When all calls are in
position, the referee lets them go on, in the order in which they came, so the first is known.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Awaitable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import asyncpg
import pytest

from flowfabric import errors
from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.model.answers.execution import Claimed
from flowfabric.model.event import Topic
from flowfabric.model.states import AttemptType
from flowfabric.testing.invariants import check_invariants
from tests.executions import claim_one, new_execution
from tests.valkey_servers import ValkeyNode, ValkeyServers, leave, valkey

A: dict[str, Any] = {"worker_id": "wa", "worker_instance_id": "wa-1"}
B: dict[str, Any] = {"worker_id": "wb", "worker_instance_id": "wb-1"}

# Backends that wait for a row. A backend that notifies may wait as well, for the notifications of other databases.
_WAITING = """
select count(*) from pg_stat_activity
 where datname = current_database() and wait_event_type = 'Lock' and wait_event in ('tuple', 'transactionid')
"""


class Referee:
    """Holds writes of an execution back, and lets them go on."""

    def holding(self, execution_id: str) -> AbstractAsyncContextManager[None]:
        """Hold writes back during a block; waiting calls continue afterwards."""
        raise NotImplementedError

    async def waiting(self) -> int:
        """Return how many calls wait."""
        raise NotImplementedError

    async def time(self) -> int:
        """Return the server's time."""
        raise NotImplementedError

    async def start_in_order(self, *calls: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
        """Start the calls one after the other, each when the previous one waits."""
        tasks = []
        for number, call in enumerate(calls, 1):
            tasks.append(asyncio.create_task(call))
            await self._until(self.waiting, number, tasks)
        return tasks

    async def wait_past(self, instant: int) -> None:
        """Wait until the server's clock has passed an instant."""
        await self._until(self.time, instant, [])

    async def _until(self, look: Any, wanted: int, tasks: list[asyncio.Task[Any]]) -> None:
        pause = 0.002
        async with asyncio.timeout(20):
            while await look() < wanted:
                assert not any(task.done() for task in tasks), "nobody was to get through yet"
                await asyncio.sleep(pause)
                pause = min(0.02, pause * 1.2)


class RowLock(Referee):
    """Two connections beside the engines: one locks, the other inspects, since a transaction has one snapshot."""

    def __init__(self, holder: Any, inspector: Any) -> None:
        self._hands = holder
        self._eyes = inspector

    @asynccontextmanager
    async def holding(self, execution_id: str) -> AsyncIterator[None]:
        async with self._hands.transaction():
            query = "select 1 from ff_exec_core where execution_id = $1 for update"
            assert await self._hands.fetchval(query, execution_id) == 1
            yield

    async def waiting(self) -> int:
        found: int = await self._eyes.fetchval(_WAITING)
        return found

    async def time(self) -> int:
        now: int = await self._eyes.fetchval("select (extract(epoch from clock_timestamp()) * 1000)::bigint")
        return now


class WritePause(Referee):
    """Pauses the writes of all executions on a Valkey server."""

    def __init__(self, node: ValkeyNode) -> None:
        self._node = node

    @asynccontextmanager
    async def holding(self, execution_id: str) -> AsyncIterator[None]:
        self._node.execute("CLIENT", "PAUSE", 60_000, "WRITE")
        try:
            yield
        finally:
            self._node.execute("CLIENT", "UNPAUSE")

    async def waiting(self) -> int:
        flags = re.findall(r" flags=(\w+)", self._node.execute("CLIENT", "LIST"))
        return sum("b" in one for one in flags)

    async def time(self) -> int:
        seconds, micros = self._node.execute("TIME")
        return int(seconds) * 1000 + int(micros) // 1000


@pytest.fixture(scope="module")
def own_server() -> Iterator[ValkeyServers]:
    """A Valkey server whose writes may be paused."""
    servers = valkey(f"races-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}")
    yield servers
    leave(servers)


@pytest.fixture(params=["postgres", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store."""
    if request.param == "postgres":
        dsn: str = request.getfixturevalue("database")
        return dsn
    servers: ValkeyServers = request.getfixturevalue("own_server")
    servers.empty(0)
    return servers.url()


@pytest.fixture
async def referee(url: str, request: pytest.FixtureRequest) -> AsyncIterator[Referee]:
    if url.startswith("valkey"):
        servers: ValkeyServers = request.getfixturevalue("own_server")
        yield WritePause(servers.nodes[0])
        return
    holder, inspector = await asyncpg.connect(url), await asyncpg.connect(url)
    yield RowLock(holder, inspector)
    await holder.close()
    await inspector.close()


@pytest.fixture
async def engines(url: str) -> AsyncIterator[tuple[Engine, Engine]]:
    """Two engines with connections of their own."""
    found = [await open_engine(url) for _ in range(2)]
    await found[0].seed_waitpoint_hmac_secret("k1", "0123456789abcdef" * 4)
    yield found[0], found[1]
    await check_invariants(found[0])
    for engine in found:
        await engine.close()


async def claimed(engine: Engine, ttl: int = 30_000) -> Claimed:
    await new_execution(engine)
    return await claim_one(engine, **A, lease_ttl_ms=ttl)


async def outcome(task: Awaitable[Any]) -> Any:
    """Return the answer of a call, or the kind of its refusal."""
    try:
        return type(await task).__name__
    except errors.FabricError as refused:
        return refused.kind


async def events_of(engine: Engine, execution_id: str) -> list[str | None]:
    return [one.event.outcome for one in await engine.store.history(execution_id, Topic.COMPLETION, 10)]


Pair = tuple[Engine, Engine]
on_postgres = pytest.mark.parametrize("url", ["postgres"], indirect=True)  # where a claim passes over locked rows


async def test_the_first_of_two_claims_with_one_grant_wins(engines: Pair, referee: Referee) -> None:
    one, other = engines
    execution_id = await new_execution(one)
    await one.issue_claim_grant(execution_id, lane_id="default", **A)
    async with referee.holding(execution_id):
        tasks = await referee.start_in_order(
            one.claim_execution(execution_id, **A),
            other.claim_execution(execution_id, worker_id="wa", worker_instance_id="wa-2"),
        )
    assert [await outcome(task) for task in tasks] == ["Claimed", "execution_not_leaseable"]
    snapshot = await one.describe_execution(execution_id)
    assert snapshot is not None
    assert snapshot.current_lease is not None
    assert (snapshot.current_lease.worker_instance_id, snapshot.current_lease.lease_epoch) == ("wa-1", 1)


@on_postgres
async def test_claims_skip_an_execution_that_another_process_is_claiming(engines: Pair, referee: Referee) -> None:
    one, other = engines
    first, second = one.new_execution_id(), one.new_execution_id()
    await one.create_execution(execution_id=first, priority=5)
    await one.create_execution(execution_id=second)
    async with referee.holding(first):
        got = await asyncio.gather(one.claim("default", **A), other.claim("default", **B))
        assert sorted(held.execution_id if held else "" for held in got) == ["", second]
    got = await asyncio.gather(one.claim("default", **A), other.claim("default", **B))
    assert sorted(held.execution_id if held else "" for held in got) == ["", first]


@on_postgres
async def test_a_claim_by_grant_that_waits_wins_over_a_claim_that_skips(engines: Pair, referee: Referee) -> None:
    one, other = engines
    execution_id = await new_execution(one)
    await one.issue_claim_grant(execution_id, lane_id="default", **A)
    async with referee.holding(execution_id):
        [task] = await referee.start_in_order(one.claim_execution(execution_id, **A))
        assert await other.claim("default", **B) is None
    assert await outcome(task) == "Claimed"
    assert await other.claim("default", **B) is None


@pytest.mark.parametrize("completes_first", [True, False])
async def test_complete_against_cancel(engines: Pair, referee: Referee, completes_first: bool) -> None:
    one, other = engines
    held = await claimed(one)
    calls = [one.complete(held.handle, result=b"r"), other.cancel_execution(held.execution_id, reason="stop")]
    async with referee.holding(held.execution_id):
        tasks = await referee.start_in_order(*(calls if completes_first else calls[::-1]))
    winner, loser = [await outcome(task) for task in tasks]
    assert (winner, loser) == ("Completed" if completes_first else "Cancelled", "execution_not_active")
    assert await events_of(one, held.execution_id) == ["success" if completes_first else "cancelled"]
    assert await one.get_execution_result(held.execution_id) == (b"r" if completes_first else None)


async def test_the_same_completion_from_two_processes_is_one_completion(engines: Pair, referee: Referee) -> None:
    one, other = engines
    held = await claimed(one)
    async with referee.holding(held.execution_id):
        tasks = await referee.start_in_order(
            one.complete(held.handle, result=b"first"), other.complete(held.handle, result=b"second")
        )
    assert [await outcome(task) for task in tasks] == ["Completed", "Completed"]
    assert await one.get_execution_result(held.execution_id) == b"first"
    assert await events_of(one, held.execution_id) == ["success"]


@pytest.mark.parametrize("fails_first", [True, False])
async def test_fail_against_revoke(engines: Pair, referee: Referee, fails_first: bool) -> None:
    one, other = engines
    held = await claimed(one)
    calls = [one.fail(held.handle, reason="boom"), other.revoke_lease(held.execution_id)]
    async with referee.holding(held.execution_id):
        tasks = await referee.start_in_order(*(calls if fails_first else calls[::-1]))
    expected = ["TerminalFailed", "NothingToDo"] if fails_first else ["Revoked", "lease_revoked"]
    assert [await outcome(task) for task in tasks] == expected


async def test_a_completion_that_waits_beyond_its_lease_is_refused(engines: Pair, referee: Referee) -> None:
    one, other = engines
    held = await claimed(one, ttl=1500)
    async with referee.holding(held.execution_id):
        # It is decided while the lease is valid.
        [task] = await referee.start_in_order(one.complete(held.handle, result=b"late"))
        await referee.wait_past(held.lease_expires_at)
    assert await outcome(task) == "lease_expired"
    taken = await claim_one(other, **B)
    assert (taken.attempt_type, taken.lease_epoch) == (AttemptType.RECLAIM, 2)
    assert await outcome(one.complete(held.handle)) == "stale_lease"
    assert await one.get_execution_result(held.execution_id) is None
    assert await outcome(other.complete(taken.handle)) == "Completed"


@pytest.mark.parametrize("reclaims_first", [True, False])
async def test_reclaim_against_cancel_and_a_late_completion(
    engines: Pair, referee: Referee, reclaims_first: bool
) -> None:
    one, other = engines
    held = await claimed(one, ttl=50)
    await referee.wait_past(held.lease_expires_at)
    assert await outcome(other.issue_reclaim_grant(held.execution_id, lane_id="default", **B)) == "ReclaimGrant"
    calls = [other.reclaim_execution(held.execution_id, **B), one.cancel_execution(held.execution_id)]
    async with referee.holding(held.execution_id):
        tasks = await referee.start_in_order(*(calls if reclaims_first else calls[::-1]))
    winner, loser = [await outcome(task) for task in tasks]
    assert (winner, loser) == (("Claimed", "Cancelled") if reclaims_first else ("Cancelled", "NotReclaimable"))
    assert await outcome(one.complete(held.handle, result=b"late")) == "execution_not_active"
    assert await one.get_execution_result(held.execution_id) is None
    assert await events_of(one, held.execution_id) == ["cancelled"]


async def test_a_late_completion_of_the_former_owner_never_reaches_the_new_attempt(
    engines: Pair, referee: Referee, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = engines
    held = await claimed(one, ttl=50)
    await referee.wait_past(held.lease_expires_at)
    # Its clock estimate says that there is time left.
    monkeypatch.setattr(one.estimate, "now", lambda: held.lease_expires_at - 1)
    assert await outcome(other.mark_lease_expired_if_due(held.execution_id)) == "MarkedExpired"
    async with referee.holding(held.execution_id):
        takeover, late = await referee.start_in_order(
            other.claim("default", **B), one.complete(held.handle, result=b"late")
        )
    taken = await takeover
    assert taken is not None
    assert await outcome(late) == "stale_lease"  # It was decided on the cached lease and then loaded again.
    assert await one.get_execution_result(held.execution_id) is None
    assert await outcome(other.complete(taken.handle, result=b"new")) == "Completed"
    assert await one.get_execution_result(held.execution_id) == b"new"


async def test_two_sweepers_mark_one_expired_lease_once(engines: Pair, referee: Referee) -> None:
    one, other = engines
    held = await claimed(one, ttl=50)
    await referee.wait_past(held.lease_expires_at)
    async with referee.holding(held.execution_id):
        tasks = await referee.start_in_order(one.sweep_once("lease_expiry"), other.sweep_once("lease_expiry"))
    assert [(await task).processed for task in tasks] == [1, 0]
    history = [entry.event for entry in await one.lease_history(held.execution_id)]
    assert history == ["acquired", "expired"]


async def test_two_sweepers_enforce_one_deadline_once(engines: Pair, referee: Referee) -> None:
    one, other = engines
    execution_id = one.new_execution_id()
    deadline = await one.ping() + 100
    await one.create_execution(execution_id=execution_id, execution_deadline_at=deadline)
    await referee.wait_past(deadline)
    async with referee.holding(execution_id):
        tasks = await referee.start_in_order(
            one.sweep_once("execution_deadline"), other.sweep_once("execution_deadline")
        )
    assert [(await task).processed for task in tasks] == [1, 0]
    assert await events_of(one, execution_id) == ["expired"]


async def test_a_renewal_that_waits_beyond_the_lease_does_not_revive_it(engines: Pair, referee: Referee) -> None:
    one, other = engines
    held = await claimed(one, ttl=1500)
    async with referee.holding(held.execution_id):
        [task] = await referee.start_in_order(one.renew(held.handle))
        await referee.wait_past(held.lease_expires_at)
    assert await outcome(task) == "lease_expired"
    assert [entry.execution_id for entry in (await other.list_expired_leases(as_of=await other.ping())).entries]


async def test_a_renewal_that_comes_first_prevents_the_expiry(engines: Pair, referee: Referee) -> None:
    one, other = engines
    held = await claimed(one, ttl=1000)
    async with referee.holding(held.execution_id):
        [renewal] = await referee.start_in_order(one.renew(held.handle, lease_ttl_ms=60_000))
    assert await outcome(renewal) == "Renewed"
    await referee.wait_past(held.lease_expires_at)
    assert (await other.sweep_once("lease_expiry")).processed == 0
    assert await outcome(one.complete(held.handle)) == "Completed"
