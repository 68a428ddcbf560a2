"""No call occupies a server for long: with 100,000 rows in a partition, each takes less than 10 ms of the server.

The server measures by the wall clock, so a call may seem long because the machine was busy. An operation fails only if
a call of it was long each time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from typing import Any

import pytest

from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import GraphEdge, WaitIndefinite
from flowfabric.engine.types import CreateExecution, MessageArgs
from flowfabric.ids import FlowId, mint_for_flow
from flowfabric.model.change import Delete, Insert
from flowfabric.model.event import Topic
from flowfabric.model.execution import Execution
from flowfabric.model.instant import FromNow
from flowfabric.model.stream import Frame, FrameMode
from flowfabric.rules.retention import MAX_PURGED_PAGES
from flowfabric.rules.stream.append import PAGE
from flowfabric.stores.queries import GroupedCount, Read, Scan, Search, Where
from flowfabric.stores.valkey.address import parse_url
from flowfabric.stores.valkey.store import ValkeyStore
from tests.executions import claim_one, create_request, new_execution
from tests.stores.sample_rows import MAIL, change, claim_request, event, execution, payload, queued
from tests.valkey_servers import ValkeyNode, leave, valkey

pytestmark = [pytest.mark.soak, pytest.mark.serial]

ROWS = 100_000
MAX_MICROSECONDS = 10_000
REPETITIONS = 3
_numbers = count()


@pytest.fixture(scope="module")
def node() -> Iterator[ValkeyNode]:
    servers = valkey(f"times-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}")
    (node,) = servers.nodes
    node.execute("CONFIG", "SET", "slowlog-log-slower-than", MAX_MICROSECONDS)
    yield node
    leave(servers)


@pytest.fixture
async def full(node: ValkeyNode, clock: ManualClock) -> AsyncIterator[ValkeyStore]:
    """A store with 100,000 executions in one partition, in one queue, all with an instant and an event."""
    store = ValkeyStore(parse_url(f"valkey://127.0.0.1:{node.port}"), clock)
    await store.open(migrate=True)
    if not node.execute("EXISTS", "{fp:0}:exec_core"):
        for start in range(0, ROWS, 1000):
            names = [f"n{number:06}" for number in range(start, start + 1000)]
            changes = [
                change(Insert(queued(name, delay_until=FromNow(1))), Insert(payload(name)), events=[event(name)])
                for name in names
            ]
            assert None not in await store.commit(changes)
    clock.advance_ms(10)
    yield store
    await store.close()


async def _commit(store: ValkeyStore) -> Any:
    rows = [execution(f"x{next(_numbers)}") for _ in range(200)]
    return await store.commit([change(Insert(row)) for row in rows])


async def _purge_frames(store: ValkeyStore) -> Any:
    """Delete some pages of 100,000 frames, as the purge of an execution does."""
    stream, pages = f"s{next(_numbers)}", range(-(-ROWS // PAGE))
    for page in pages:
        frames = [
            Frame(stream, 0, page, 1, number, page * PAGE + number, 1, FrameMode.DURABLE, "log", b"x" * 100)
            for number in range(PAGE)
        ]
        for start in range(0, PAGE, 64):
            assert None not in await store.commit([change(*map(Insert, frames[start : start + 64]))])
    for first in range(0, 5 * MAX_PURGED_PAGES, MAX_PURGED_PAGES):
        dropped = pages[first : first + MAX_PURGED_PAGES]
        await store.commit([change(*(Delete(Frame, (stream, 0, page)) for page in dropped))])


Operation = Callable[[ValkeyStore], Awaitable[Any]]
OPERATIONS: dict[str, Operation] = {
    "commit": _commit,
    "claim": lambda store: store.claim_rows(claim_request(100)),
    "purge of frames": _purge_frames,
    "load": lambda store: store.load([Read(Execution, (f"n{number:06}",)) for number in range(200)]),
    "due": lambda store: store.due(Execution, "delay_until", limit=5000),
    "search without a match": lambda store: store.search(Search((Where("tags", "=", "no"),), budget=5000)),
    "scan without an index": lambda store: store.scan(Scan(Execution, (Where("tags", "=", "no"),))),
    "scan of a queue": lambda store: store.scan(
        Scan(Execution, (Where("line", "=", MAIL),), ("rank", "execution_id"), limit=5000)
    ),
    "count": lambda store: store.count_grouped(GroupedCount(Execution, "delay_until", ("lane_id",), ROWS)),
    "queues": lambda store: store.nonempty_queues("mail"),
    "feed": lambda store: store.feed(Topic.LEASE, 0, 500),
    "trim": lambda store: store.trim_feed(2**60, 5000),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OPERATIONS)
async def test_no_call_occupies_the_server_for_long(full: ValkeyStore, node: ValkeyNode, name: str) -> None:
    slowest: list[tuple[int, str]] = []
    for _ in range(REPETITIONS):
        node.execute("SLOWLOG", "RESET")
        await OPERATIONS[name](full)
        slow = node.execute("SLOWLOG", "GET", -1)
        if not slow:
            return
        slowest.append(max((entry[2], " ".join(map(str, entry[3][:3]))) for entry in slow))
    pytest.fail(f"each time a call took more than 10 ms; the slowest in microseconds: {slowest}")


@pytest.mark.timeout(600)
async def test_a_run_with_a_long_past_and_a_full_mailbox_continues_in_short_calls(
    node: ValkeyNode, clock: ManualClock
) -> None:
    long_calls: list[list[tuple[int, str]]] = []
    for _ in range(REPETITIONS):
        store = ValkeyStore(parse_url(f"valkey://127.0.0.1:{node.port}"), clock)
        await store.open(migrate=True)
        async with Engine(store) as engine:
            run = await new_execution(engine, "lives")
            claimed = await claim_one(engine, "lives", lease_ttl_ms=600_000)
            for start in range(0, 2_000, 100):
                names = [f"step{number}" for number in range(start, start + 100)]
                await asyncio.gather(
                    *(engine.record_step(claimed.handle, name, 0, b'"a result"' * 20) for name in names)
                )
            ids = [engine.minter.uuid() for _ in range(10_000)]
            for start in range(0, len(ids), 500):
                part = ids[start : start + 500]
                messages = [MessageArgs(execution_id=run, mailbox="m", message_id=one) for one in part]
                await asyncio.gather(*map(engine.send_message, messages))
            node.execute("SLOWLOG", "RESET")

            await engine.continue_as_new(claimed.handle, b"[]")

            slow = node.execute("SLOWLOG", "GET", -1)
            again = await claim_one(engine, "lives")
            assert again.life == 1
            assert await engine.read_steps(run) == []
            await engine.cancel_execution(run)
        long_calls.append([(entry[2], " ".join(entry[3][:3])) for entry in slow])
        if not long_calls[-1]:
            return
    pytest.fail(f"each time a call took more than 10 ms: {long_calls}")


async def _own_many_steps(engine: Engine, run: str) -> None:
    await engine.create_execution(execution_id=run, lane_id="lives")
    claimed = await claim_one(engine, "lives", lease_ttl_ms=600_000)
    for start in range(0, 10_000, 100):
        names = [f"step{number}" for number in range(start, start + 100)]
        await asyncio.gather(*(engine.record_step(claimed.handle, name, 0, b'"a result"' * 20) for name in names))
    await engine.cancel_execution(run)


def _wide_graph(engine: Engine, flow: FlowId) -> tuple[list[CreateExecution], list[GraphEdge]]:
    """Return 5,000 members and an edge from the first one to each other."""
    names = [mint_for_flow(flow, engine.partitions, engine.minter) for _ in range(5_000)]
    nodes = [create_request(name, "lives") for name in names]
    return nodes, [GraphEdge(names[0], name) for name in names[1:]]


@pytest.mark.timeout(600)
async def test_a_large_flow_and_an_execution_with_many_steps_are_purged_in_short_calls(
    node: ValkeyNode, clock: ManualClock
) -> None:
    long_calls: list[list[tuple[int, str]]] = []
    for _ in range(REPETITIONS):
        store = ValkeyStore(parse_url(f"valkey://127.0.0.1:{node.port}"), clock)
        await store.open(migrate=True)
        async with Engine(store) as engine:
            run = engine.new_execution_id("lives")
            await _own_many_steps(engine, run)
            flow = FlowId(engine.minter.uuid())
            await engine.create_flow_graph(flow, *_wide_graph(engine, flow))
            await engine.cancel_flow(flow, wait=WaitIndefinite())
            await engine.outbox.wait_for_deliveries()
            clock.advance_ms(30 * 86_400_000)
            node.execute("SLOWLOG", "RESET")

            assert await engine.purge_execution(run)
            while (await engine.sweep_once("retention_trimmer")).processed:
                pass

            slow = node.execute("SLOWLOG", "GET", -1)
            assert await engine.describe_flow(flow) is None
        long_calls.append([(entry[2], " ".join(entry[3][:3])) for entry in slow])
        if not long_calls[-1]:
            return
    pytest.fail(f"each time a call took more than 10 ms: {long_calls}")
