"""A server that is killed repeatedly under an app and its worker: every run ends once, with its result."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from flowfabric import Context, Fabric, connect
from flowfabric.model.states import PublicState
from flowfabric.sdk.run import OutputFrame
from tests.postgres_install import ROOT
from tests.processes import free_port
from tests.sdk.conftest import running_worker

RUNS = 40
KILLS = 3


class Process:
    """`ff serve` in a separate process, which can be killed and started again on the same port."""

    def __init__(self, store_url: str) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._arguments = ["serve", "--store", store_url, "--port", str(port)]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Start the server; return when it answers."""
        self._process = subprocess.Popen(  # noqa: ASYNC220 - it does not block
            [sys.executable, "-m", "flowfabric.cli", *self._arguments],
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        async with httpx2.AsyncClient() as client, asyncio.timeout(30):
            while True:
                try:
                    await client.get(f"{self.url}/readyz")
                    return
                except httpx2.TransportError:
                    await asyncio.sleep(0.05)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)


@contextmanager
def process(store_url: str) -> Iterator[Process]:
    server = Process(store_url)
    try:
        yield server
    finally:
        server.kill()


async def test_a_server_that_is_killed_repeatedly_neither_loses_nor_repeats_a_run(tmp_path: Path) -> None:
    store_url = f"sqlite:///{tmp_path / 'app.db'}"
    with process(store_url) as server:
        await server.start()
        app, done = Fabric(server.url), set[int]()

        @app.task(name="add")
        async def add(ctx: Context, n: int) -> int:
            first = await ctx.options(name="first").step(lambda: n * 10)
            await ctx.stream("out").write(f"{n};")
            await asyncio.sleep(0.05)
            second = await ctx.options(name="second").step(lambda: 1)
            done.add(n)
            return first + second

        async with app, running_worker(app, slots=8, lease_ttl="10s"):
            runs = [await add.options(key=f"run-{n}").submit(n) for n in range(RUNS)]
            waiting = [asyncio.create_task(run.result(60)) for run in runs]
            for kill in range(KILLS):
                async with asyncio.timeout(30):
                    while len(done) < (kill + 1) * RUNS // (KILLS + 2):  # noqa: ASYNC110
                        await asyncio.sleep(0.005)
                server.kill()
                await server.start()
            again = [await add.options(key=f"run-{n}").submit(n) for n in range(RUNS)]
            assert await asyncio.gather(*waiting) == [n * 10 + 1 for n in range(RUNS)]
            written = [piece.text async for piece in runs[0].stream("out") if isinstance(piece, OutputFrame)]
            assert set(written) == {"0;"}
        assert [run.id for run in again] == [run.id for run in runs]
        assert not any(run.created for run in again)
    async with await connect(store_url) as engine:
        page = await engine.search_executions(limit=RUNS + 1)
        assert [one.public_state for one in page.executions] == [PublicState.COMPLETED] * RUNS
