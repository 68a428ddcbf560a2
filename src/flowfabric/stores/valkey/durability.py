"""What acknowledged writes survive, in one sentence for operators (docs/valkey.md has the table)."""

from __future__ import annotations

import asyncio

from flowfabric.errors import FabricError
from flowfabric.model.deployment import ServerReport
from flowfabric.stores.valkey.address import ValkeyAddress
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.node import Node
from flowfabric.stores.valkey.node_load import measure_nodes
from flowfabric.stores.valkey.server_checks import inspect_servers, warnings

NO_AOF = "a restart of a server loses everything: it has no append-only file"
ON_DISK = "an acknowledged write is on the server's disk and survives power loss"
EVERY_SECOND = "an acknowledged write survives the death of the server's process; power loss loses up to about 2 s"
UNKNOWN = "an acknowledged write survives the death of the server's process; power loss may lose the last ones"
FAILOVER_LOSES = "a failover loses acknowledged writes that the replica did not have yet; wait=1 in the URL prevents it"
FAILOVER_SAFE = "an acknowledged write survives a failover, unless primary and replica die together"


async def report(client: ValkeyClient, flow_partitions: int) -> ServerReport:
    """Ask the servers for their settings and their load."""
    facts = await inspect_servers(client)
    policies = set(await asyncio.gather(*map(_fsync_policy, client.primaries())))
    has_aof = all(server.has_aof for server in facts)
    return ServerReport(
        durability=describe(client.address, has_aof=has_aof, policies=policies),
        warnings=warnings(facts, client.address),
        nodes=await measure_nodes(client, flow_partitions),
    )


def describe(address: ValkeyAddress, *, has_aof: bool, policies: set[str]) -> str:
    """Return what survives with these settings; `policies` are the values of appendfsync, empty if unknown."""
    if address.fsync or (has_aof and policies == {"always"}):
        disk = ON_DISK
    elif not has_aof:
        disk = NO_AOF
    else:
        disk = EVERY_SECOND if policies == {"everysec"} else UNKNOWN
    if not address.is_cluster:
        return disk
    return f"{disk}; {FAILOVER_SAFE if address.wait else FAILOVER_LOSES}"


async def _fsync_policy(node: Node) -> str:
    try:
        found = await node.read("CONFIG", "GET", "appendfsync")
    except FabricError:  # managed servers often forbid CONFIG
        return ""
    return found[1].decode() if found else ""
