"""Measure how long moving a partition of many rows to another node takes.

`./dev py -m tests.stores.valkey.move_partition --rows 1000000` starts a cluster of its own.

Atomic is `CLUSTER MIGRATESLOTS` of Valkey 9; legacy is MIGRATE key by key, which copies a whole table in one command.
During each move a client writes to the partition; the longest time without an acknowledged write is printed, too.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable

from flowfabric.model.change import Insert
from flowfabric.settings import Deadlines
from flowfabric.stores.valkey.address import parse_url
from flowfabric.stores.valkey.slots import slot_of
from flowfabric.stores.valkey.store import ValkeyStore
from tests.stores.sample_rows import change, execution
from tests.valkey_servers import ValkeyNode, leave, valkey_cluster

TAG = "{fp:7}"
MIGRATE_TIMEOUT_MS = 600_000


async def fill(store: ValkeyStore, rows: int) -> None:
    """Insert executions in the partition."""
    for start in range(0, rows, 2000):
        names = [f"{TAG}:{number:08}" for number in range(start, min(rows, start + 2000))]
        assert None not in await store.commit([change(Insert(execution(name))) for name in names])


async def longest_pause(store: ValkeyStore, stop: asyncio.Event) -> float:
    """Write until the event is set; return the longest time between two acknowledged writes."""
    longest, last = 0.0, time.monotonic()
    while not stop.is_set():
        await store.client.call(TAG, "SET", f"{TAG}:note", 1)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        await asyncio.sleep(0.002)
    return longest


def serves(node: ValkeyNode, slot: int) -> bool:
    rows = node.execute("CLUSTER", "SLOTS", timeout_s=600)
    return any(first <= slot <= last and primary[1] == node.port for first, last, primary, *_ in rows)


def move_atomically(source: ValkeyNode, target: ValkeyNode, slot: int) -> None:
    source.execute("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", target.execute("CLUSTER", "MYID"))
    while not serves(target, slot):
        time.sleep(0.02)


def move_key_by_key(source: ValkeyNode, target: ValkeyNode, slot: int) -> None:
    source_id, target_id = source.execute("CLUSTER", "MYID"), target.execute("CLUSTER", "MYID")
    target.execute("CLUSTER", "SETSLOT", slot, "IMPORTING", source_id)
    source.execute("CLUSTER", "SETSLOT", slot, "MIGRATING", target_id)
    while keys := source.execute("CLUSTER", "GETKEYSINSLOT", slot, 1):
        source.execute("MIGRATE", "127.0.0.1", target.port, "", 0, MIGRATE_TIMEOUT_MS, "KEYS", *keys, timeout_s=600)
    for node in (target, source):
        node.execute("CLUSTER", "SETSLOT", slot, "NODE", target_id)


async def measure(rows: int) -> None:
    """Fill a partition, move it away atomically and back key by key, and print the times."""
    servers = valkey_cluster("move")
    try:
        for node in servers.nodes:  # a blocked node is not dead
            node.execute("CONFIG", "SET", "cluster-node-timeout", MIGRATE_TIMEOUT_MS)
        store = ValkeyStore(parse_url(servers.url()), deadlines=Deadlines(connect_s=10, command_s=600))
        await store.open(migrate=True)
        await fill(store, rows)
        slot = slot_of(TAG)
        source = next(node for node in servers.primaries() if serves(node, slot))
        target = next(node for node in servers.primaries() if node is not source)
        moves: list[tuple[str, Callable[[ValkeyNode, ValkeyNode, int], None], ValkeyNode, ValkeyNode]] = [
            ("atomic", move_atomically, source, target),
            ("legacy", move_key_by_key, target, source),
        ]
        for name, move, giver, taker in moves:
            stop = asyncio.Event()
            writer = asyncio.create_task(longest_pause(store, stop))
            began = time.monotonic()
            await asyncio.to_thread(move, giver, taker, slot)
            seconds = time.monotonic() - began
            stop.set()
            print(f"{name}: {rows} rows in {seconds:.1f} s, writes paused for at most {await writer:.2f} s", flush=True)
        await store.close()
    finally:
        leave(servers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    asyncio.run(measure(parser.parse_args().rows))
