"""Measures the CPU of durable functions: `./dev py -m tests.sdk.durable.cost sqlite:////tmp/cost.db [--rounds 7]`.

CPU seconds of this process and of the Postgres server are counted. Other load only adds to them, as caches are shared:
programs take turns, and the first quartiles are printed, which are disturbed least.

It uses the public SDK only, so an older tree can be measured with it:
`PYTHONPATH=older/src python tests/sdk/durable/cost.py URL`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from statistics import quantiles

import asyncpg

from flowfabric import Context, Fabric
from flowfabric.sdk.worker.worker import Worker

BRANCHES = 100
FUNCTIONS = 60
LONG = (100, 1000)

FAN_OUTS = ("gather of 100", "100 branches")
SEQUENCES = tuple(f"a function of {count} steps" for count in LONG)

Program = Callable[[], Awaitable[object]]


def make_app(url: str) -> tuple[Fabric, dict[str, Program]]:
    """Return an app and the programs to measure by name; each checks its result."""
    app = Fabric(url)

    async def add_one(number: int) -> int:
        return number + 1

    @app.task
    async def child(number: int) -> int:
        return number

    @app.task
    async def gather(ctx: Context) -> int:
        return sum(await ctx.gather([child.s(number) for number in range(BRANCHES)]))

    @app.task
    async def branches(ctx: Context) -> int:
        async def member(number: int) -> int:
            return await (await ctx.spawn(child, number)).result()

        return sum(await ctx.gather(*(member(number) for number in range(BRANCHES))))

    @app.task
    async def steps(ctx: Context, count: int) -> int:
        number = 0
        for _ in range(count):
            number = await ctx.step(add_one, number)
        return number

    async def check(awaited: Awaitable[int], expected: int) -> None:
        assert await awaited == expected

    async def run_gather() -> None:
        await check((await gather.submit()).result(300), sum(range(BRANCHES)))

    async def run_branches() -> None:
        await check((await branches.submit()).result(300), sum(range(BRANCHES)))

    async def run_steps(count: int) -> None:
        await check((await steps.submit(count)).result(300), count)

    async def run_ten_steps() -> None:
        await asyncio.gather(*(run_steps(10) for _ in range(FUNCTIONS)))

    programs: dict[str, Program] = {
        "gather of 100": run_gather,
        "100 branches": run_branches,
        f"{FUNCTIONS} functions of ten steps": run_ten_steps,
        **{f"a function of {count} steps": partial(run_steps, count) for count in LONG},
    }
    return app, programs


async def postmaster(url: str) -> int | None:
    """Return the process id of the Postgres server, if the store is one."""
    if not url.startswith("postgres"):
        return None
    connection = await asyncpg.connect(url)
    try:
        folder = await connection.fetchval("show data_directory")
    finally:
        await connection.close()
    return int((Path(folder) / "postmaster.pid").read_text().split()[0])


def server_cpu_s(pid: int | None) -> float:
    """Return the CPU seconds of a server and its processes, those that have ended included."""
    if pid is None:
        return 0.0
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if stat.parent.name == str(pid):
            ticks += sum(map(int, fields[11:15]))
        elif fields[1] == str(pid):
            ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


async def measure(url: str, rounds: int, names: Collection[str] = ()) -> dict[str, float]:
    """Return the CPU milliseconds of these programs, or of all: the first quartiles over the rounds."""
    app, programs = make_app(url)
    programs = {name: program for name, program in programs.items() if name in names or not names}
    server = await postmaster(url)
    found: dict[str, list[float]] = {name: [] for name in programs}
    async with app:
        worker = Worker(app, slots=100, lease_ttl="300s")
        working = asyncio.create_task(worker.work())
        for number in range(rounds + 1):  # the first round warms up
            for name, program in programs.items():
                began, server_began = time.process_time(), server_cpu_s(server)
                await program()
                spent_s = time.process_time() - began + server_cpu_s(server) - server_began
                if number:
                    found[name].append(spent_s * 1000)
        worker.stop()
        await working
    return {name: quantiles(times, n=4)[0] for name, times in found.items()}


def main(arguments: list[str]) -> None:
    """Print the quartiles, and the ratios that are promised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(arguments)
    found = asyncio.run(measure(options.url, options.rounds))
    for name, ms in found.items():
        print(f"{name:34} {ms:8.0f} ms of CPU")
    print(f"branches : gather           {found['100 branches'] / found['gather of 100']:.2f}")
    few, many = (found[f"a function of {count} steps"] for count in LONG)
    print(f"1,000 steps : 100 steps     {many / few:.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
