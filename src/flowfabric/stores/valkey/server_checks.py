"""Checks of the servers when a store is opened: some settings are refused, others are warned of.

| what | becomes |
|---|---|
| older than Redis 7.0, without functions | refused |
| a replica, or a URL that says cluster of a single server or the reverse | refused |
| `maxmemory-policy` other than noeviction: the server deletes rows when memory is short | refused |
| slots that no node serves | refused |
| clocks of the primaries that differ by more than 2 s; by more than 200 ms | refused; warned |
| `durability=fsync` without WAITAOF or without an append-only file | refused |
| no append-only file: a restart loses everything | warned |
| `wait=N` with fewer replicas: every write is in doubt | warned |

INFO is enough for all of them: managed servers often forbid CONFIG.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from flowfabric.errors import InvalidInput, StoreFault, Unavailable
from flowfabric.stores.valkey.address import ValkeyAddress
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.errors import unavailable
from flowfabric.stores.valkey.node import Node

OLDEST_VERSION = (7, 0)  # version of Redis; every Valkey is newer
MAX_CLOCK_SKEW_MS = 2000
NOTABLE_CLOCK_SKEW_MS = 200


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a primary says about itself."""

    address: str
    name: str  # Valkey or Redis
    version: str
    is_replica: bool
    is_cluster: bool
    maxmemory_policy: str
    has_aof: bool
    has_waitaof: bool
    replicas: int  # replicas that are connected and follow
    clock_ms: tuple[float, float]  # its clock minus ours: at least, at most

    @property
    def redis_version(self) -> tuple[int, ...]:
        """The version of Redis that it is compatible with."""
        return tuple(int(part) for part in self.version.split(".")[:2] if part.isdigit())


async def check_servers(client: ValkeyClient) -> list[str]:
    """Refuse servers that a store cannot rely on; return warnings, one sentence each."""
    if missing := client.uncovered_slots():
        raise unavailable(f"no node of the cluster serves {missing} of 16384 slots", StoreFault.CLUSTER)
    facts = await inspect_servers(client)
    refuse_unfit(facts, client.address)
    return warnings(facts, client.address)


async def inspect_servers(client: ValkeyClient) -> list[ServerFacts]:
    """Ask every primary what it says about itself."""
    return await asyncio.gather(*[_inspect(node) for node in client.primaries()])


def refuse_unfit(facts: Sequence[ServerFacts], address: ValkeyAddress) -> None:
    """Raise if a server would lose or delete rows, or is not what the URL says."""
    for server in facts:
        if server.redis_version < OLDEST_VERSION:
            raise _unfit(server, f"{server.name} {server.version} has no functions; use Valkey, or Redis 7.0 or newer")
        if server.is_cluster != address.is_cluster:
            what, scheme = ("a node of a cluster", "valkey+cluster") if server.is_cluster else ("no cluster", "valkey")
            raise InvalidInput(f"url: {server.address} is {what}; write {scheme}://…")
        if server.is_replica:
            raise _unfit(server, "it is a replica; name the primary in the URL")
        if server.maxmemory_policy != "noeviction":
            raise _unfit(
                server,
                f"maxmemory-policy is {server.maxmemory_policy}: it would delete rows when memory is short; "
                "set it to noeviction",
            )
        if address.fsync and not server.has_waitaof:
            raise _unfit(
                server, f"{server.name} {server.version} has no WAITAOF; leave out durability=fsync and use wait=1"
            )
        if address.fsync and not server.has_aof:
            raise _unfit(server, "durability=fsync needs an append-only file; set appendonly to yes")
    if (skew_ms := clock_skew_ms(facts)) > MAX_CLOCK_SKEW_MS:
        raise Unavailable(
            "check_servers",
            f"the clocks of the Valkey servers differ by {skew_ms / 1000:.1f} s; synchronize them (NTP)",
        )


def warnings(facts: Sequence[ServerFacts], address: ValkeyAddress) -> list[str]:
    """Return what an operator should know, one sentence each."""
    found = []
    if (skew_ms := clock_skew_ms(facts)) > NOTABLE_CLOCK_SKEW_MS:
        found.append(f"The clocks of the Valkey servers differ by {skew_ms:.0f} ms; synchronize them (NTP).")
    for server in facts:
        if not server.has_aof:
            found.append(f"{server.address} has no append-only file, so a restart loses all; set appendonly to yes.")
        if server.replicas < address.wait:
            found.append(
                f"{server.address} has {server.replicas} replicas and wait={address.wait}: every write is in doubt."
            )
    return found


def clock_skew_ms(facts: Sequence[ServerFacts]) -> float:
    """Return by how much the clocks of two servers differ at least."""
    latest = max((server.clock_ms[0] for server in facts), default=0.0)
    earliest = min((server.clock_ms[1] for server in facts), default=0.0)
    return max(0.0, latest - earliest)


async def _inspect(node: Node) -> ServerFacts:
    loop = asyncio.get_running_loop()
    await node.read("PING")  # the connection exists, so that the time of the next reply is that of one round trip
    began = loop.time()
    seconds, micros = await node.read("TIME")
    ended = loop.time()
    server_ms = int(seconds) * 1000 + int(micros) / 1000
    info = parse_info(await node.read("INFO"))
    (waitaof,) = await node.read("COMMAND", "INFO", "WAITAOF")
    return ServerFacts(
        address=str(node),
        name="Valkey" if info.get("server_name") == "valkey" else "Redis",
        version=info.get("redis_version", "0.0"),
        is_replica=info.get("role") != "master",
        is_cluster=info.get("cluster_enabled") == "1",
        maxmemory_policy=info.get("maxmemory_policy", "noeviction"),
        has_aof=info.get("aof_enabled") == "1",
        has_waitaof=waitaof is not None,
        replicas=sum("state=online" in value for name, value in info.items() if name[:5] == "slave"),
        clock_ms=(server_ms - ended * 1000, server_ms - began * 1000),
    )


def parse_info(reply: bytes) -> dict[str, str]:
    """Return the fields of a reply to INFO."""
    lines = reply.decode(errors="replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _unfit(server: ServerFacts, reason: str) -> Unavailable:
    return Unavailable("check_servers", f"{server.address}: {reason}")
