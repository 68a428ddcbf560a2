"""Servers that one test process breaks: fixtures yield from here, and tests move slots and wait for failovers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator

from flowfabric.stores.valkey import ValkeyClient
from tests.processes import wait_for
from tests.valkey_servers import ValkeyNode, ValkeyServers, leave, valkey, valkey_cluster


def own_server(purpose: str) -> Iterator[ValkeyNode]:
    """Yield a server of this process only."""
    servers = valkey(_own_name(purpose))
    yield servers.nodes[0]
    leave(servers)


def own_cluster(purpose: str) -> Iterator[ValkeyServers]:
    """Yield a cluster of this process only."""
    servers = valkey_cluster(_own_name(purpose))
    yield servers
    leave(servers)


def _own_name(purpose: str) -> str:
    return f"{purpose}-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"


def healthy(cluster: ValkeyServers) -> Iterator[ValkeyServers]:
    """Yield a healthy cluster without keys; what a test kills, pauses or cuts off is repaired afterwards."""
    cluster.empty(0)
    yield cluster
    for node in cluster.nodes:
        if node.is_running():
            node.resume()
            node.reconnect(node)
        node.start()
    cluster.wait_until_healthy()


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition of the servers."""
    await asyncio.to_thread(wait_for, condition, what, 30)


def is_primary(node: ValkeyNode) -> bool:
    role: str = node.execute("ROLE")[0]
    return role == "master"


async def until_it_takes_over(replica: ValkeyNode) -> None:
    await until(lambda: is_primary(replica), "the replica to take over")


def primary_of(servers: ValkeyServers, client: ValkeyClient, tag: str) -> ValkeyNode:
    """Return the node to which a client sends the writes of a partition."""
    port = client.node_for(tag).location[1]
    return next(node for node in servers.nodes if node.port == port)


def replica_of(servers: ValkeyServers, primary: ValkeyNode) -> ValkeyNode:
    roles = [(node, node.execute("ROLE")) for node in servers.nodes if node is not primary]
    return next(node for node, role in roles if role[0] == "slave" and role[2] == primary.port)


async def move_slots(source: ValkeyNode, target: ValkeyNode, *slots: int) -> None:
    """Move whole slots to another node, and wait until it serves them."""
    ranges = [bound for slot in slots for bound in (slot, slot)]
    source.execute("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", *ranges, "NODE", target.execute("CLUSTER", "MYID"))
    await until(lambda: all(_serves(target, slot) for slot in slots), "the slots to be moved")


def _serves(node: ValkeyNode, slot: int) -> bool:
    rows = node.execute("CLUSTER", "SLOTS")
    return any(first <= slot <= last and primary[1] == node.port for first, last, primary, *_ in rows)


def begin_moving_keys(source: ValkeyNode, target: ValkeyNode, slot: int) -> None:
    """Let a slot be moved key by key from now on."""
    target.execute("CLUSTER", "SETSLOT", slot, "IMPORTING", source.execute("CLUSTER", "MYID"))
    source.execute("CLUSTER", "SETSLOT", slot, "MIGRATING", target.execute("CLUSTER", "MYID"))


def move_keys(source: ValkeyNode, target: ValkeyNode, *keys: str) -> None:
    source.execute("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)


def assign_slot(slot: int, owner: ValkeyNode, other: ValkeyNode) -> None:
    """Give a slot to one of two nodes, which both have to know."""
    name = owner.execute("CLUSTER", "MYID")
    for node in (owner, other):
        node.execute("CLUSTER", "SETSLOT", slot, "NODE", name)
