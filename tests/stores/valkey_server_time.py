"""Measure what executions cost the servers on one server, on a cluster, and on a cluster in a spread lane.

`./dev py -m tests.stores.valkey_server_time --rounds 5` starts servers of its own: one, and two clusters of three
primaries without replicas (`--replicas 1` gives each primary one). Every round submits and drains the same jobs on each
of the three in turn, so that a slow moment of the machine affects all. Printed are microseconds of CPU of the servers
for each execution, as the servers report them, and those of each primary; then the medians of the ratios within a
round.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median

from flowfabric import Engine
from flowfabric.bench.workload import bulk_submit, drain
from flowfabric.connector import open_engine
from flowfabric.rules.scheduling.lane_spread import GRACE_MS
from tests.valkey_servers import ValkeyServers, leave, valkey, valkey_cluster

LANE = "measured"
SETTLE_S = 1.2  # for the fsync of what was written before


class Subject:
    """A lane on some servers, with what its executions have cost them."""

    def __init__(self, name: str, servers: ValkeyServers, engine: Engine) -> None:
        self.name = name
        self.rounds: list[list[float]] = []  # microseconds for each execution, by primary
        self._servers = servers
        self._engine = engine

    async def run_round(self, payloads: Sequence[bytes]) -> None:
        """Submit and drain executions, and note what that cost."""
        await asyncio.sleep(SETTLE_S)
        before = self._cpu_s()
        await bulk_submit(self._engine, LANE, payloads)
        await drain(self._engine, LANE, len(payloads))
        self.rounds.append([(b - a) / len(payloads) * 1e6 for a, b in zip(before, self._cpu_s(), strict=True)])
        nodes = " + ".join(f"{cost:.1f}" for cost in self.rounds[-1])
        print(f"{self.name}: {sum(self.rounds[-1]):.1f} µs ({nodes})", flush=True)

    def _cpu_s(self) -> list[float]:
        infos = [node.info("cpu") for node in self._servers.primaries()]
        return [float(info["used_cpu_user"]) + float(info["used_cpu_sys"]) for info in infos]


async def measure(rounds: int, jobs: int, spread: int, replicas: int) -> None:
    """Measure all three in turns, and print the results."""
    clusters = [valkey_cluster(f"time-{name}-{replicas}", replicas=replicas) for name in ("plain", "spread")]
    groups = [valkey("time"), *clusters]
    names = ("one server", "cluster", f"cluster, spread {spread}")
    try:
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(await open_engine(servers.url())) for servers in groups]
            await engines[-1].set_lane_spread(LANE, spread)
            await asyncio.sleep(GRACE_MS / 1000)
            await engines[-1].refresh_lanes()
            subjects = [Subject(*one) for one in zip(names, groups, engines, strict=True)]
            rng = random.Random(0)
            payloads = [rng.randbytes(1024) for _ in range(jobs)]
            for _ in range(rounds):
                for subject in subjects:
                    await subject.run_round(payloads)
            print_ratios(*subjects)
    finally:
        for servers in groups:
            leave(servers)


def print_ratios(alone: Subject, cluster: Subject, spread: Subject) -> None:
    """Print the medians of all rounds."""
    for base, other in ((alone, cluster), (cluster, spread)):
        ratios = [sum(b) / sum(a) for a, b in zip(base.rounds, other.rounds, strict=True)]
        print(f"{other.name} to {base.name}: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    uneven = [max(nodes) / min(nodes) - 1 for nodes in spread.rounds]
    print(f"{spread.name}: the busiest node uses {median(uneven):.0%} more than the idlest ({max(uneven):.0%} at most)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=5000)
    parser.add_argument("--spread", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=0)
    given = parser.parse_args()
    asyncio.run(measure(given.rounds, given.jobs, given.spread, given.replicas))
