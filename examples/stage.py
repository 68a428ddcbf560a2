"""Shared by the examples, so that each runs with one command: a store in a temporary folder, and a worker.

An application has neither in its code: it names its store (or sets FLOWFABRIC_URL), and its workers are separate
processes, started with `ff worker package.module:app` on any number of machines.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from flowfabric import Fabric, Run
from flowfabric.sdk.worker.worker import Worker

_began = time.monotonic()
logging.getLogger("flowfabric").setLevel(logging.ERROR)  # the examples print their own progress


def store() -> str:
    """Return FLOWFABRIC_URL, else SQLite in a temporary folder."""
    if url := os.environ.get("FLOWFABRIC_URL"):
        return url
    folder = tempfile.TemporaryDirectory(prefix="ff-example-")
    atexit.register(folder.cleanup)
    return f"sqlite:///{folder.name}/example.db"


@asynccontextmanager
async def working(app: Fabric, *, slots: int = 10) -> AsyncIterator[None]:
    """Run a worker in this process while the example runs."""
    async with app:
        worker = Worker(app, slots=slots, lease_ttl="5s", grace="5s")
        work = asyncio.create_task(worker.work())
        try:
            yield
        finally:
            worker.stop()
            await work


async def reached(run: Run[Any], state: str) -> None:
    """Wait until a run is in this state."""
    while (await run.state()).value != state:  # noqa: ASYNC110 - an example polls; applications await results
        await asyncio.sleep(0.02)


def say(*words: object) -> None:
    """Print a line with the time."""
    print(f"{time.monotonic() - _began:5.1f} s ", *words, flush=True)
