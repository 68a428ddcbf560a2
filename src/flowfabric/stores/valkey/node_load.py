"""How busy the servers are: the share of a core that the thread which executes commands uses, by INFO."""

from __future__ import annotations

import asyncio

from flowfabric.model.deployment import NodeLoad
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.node import Node
from flowfabric.stores.valkey.server_checks import parse_info

SAMPLE_S = 0.5


async def measure_nodes(client: ValkeyClient, flow_partitions: int) -> list[NodeLoad]:
    """Return the load of each primary during a short while, and its partitions."""
    nodes, loop = client.primaries(), asyncio.get_running_loop()
    began, before = loop.time(), await asyncio.gather(*map(_cpu_s, nodes))
    await asyncio.sleep(SAMPLE_S)
    ended, after = loop.time(), await asyncio.gather(*map(_cpu_s, nodes))
    homes: dict[Node, list[int]] = {node: [] for node in nodes}
    for partition in range(flow_partitions):
        homes.setdefault(client.node_for(f"{{fp:{partition}}}"), []).append(partition)
    return [
        NodeLoad(str(node), (late - early) / (ended - began), tuple(homes[node]))
        for node, early, late in zip(nodes, before, after, strict=True)
    ]


async def _cpu_s(node: Node) -> float:
    info = parse_info(await node.read("INFO", "cpu"))
    of_process = {name: info.get(name, "0") for name in ("used_cpu_user", "used_cpu_sys")}
    return sum(float(info.get(f"{name}_main_thread", seconds)) for name, seconds in of_process.items())
