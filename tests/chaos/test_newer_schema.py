"""A newer release migrates the store of running processes: `ff serve` and `ff worker` say so once, and stop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import apsw
import asyncpg
import pytest

from tests.chaos.test_sweepers import until
from tests.cli.test_serve import FF, get_json
from tests.client.server_thread import free_port
from tests.engine.operations.test_schema_versions import BREAKING, SILENT, Place, place

__all__ = ["place"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = """
from flowfabric import Fabric

app = Fabric()


@app.task
async def nothing() -> None: ...
"""
STOPS_S = 40  # the version is looked at every 5 s


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def last_words(process: subprocess.Popen[str]) -> str:
    """What it said before it ended by itself."""
    said, _ = await asyncio.to_thread(process.communicate, timeout=STOPS_S)
    return said


async def is_registered(place: Place) -> bool:
    """True if a worker has made the store and is at work on it."""
    with suppress(apsw.Error, asyncpg.PostgresError):  # before the tables are there
        return bool(await place.fetch("select worker_instance_id from ff_worker_registry"))
    return False


@pytest.mark.parametrize("options", [[], ["--no-sweeps"]], ids=["sweeping", "idle"])
async def test_a_server_that_nobody_asks_says_that_the_schema_is_newer_and_stops(
    place: Place, tmp_path: Path, options: list[str]
) -> None:
    port = free_port()
    with running([*FF, "--store", place.url, "--port", str(port), *options], tmp_path) as server:
        assert await asyncio.to_thread(get_json, port, "/healthz") == {"status": "ok"}
        version = await place.migrate(SILENT)
        said = await last_words(server)

    assert server.returncode == 1, said
    assert said.count("the server stops") == 1
    assert f"The store has schema version {version} and this release knows {version - 1}: update" in said, said
    assert "Hint: update this installation: pip install --upgrade flowfabric" in said
    assert said.count("sweeps no more") <= 1
    assert "Traceback" not in said
    assert "is away" not in said


async def test_a_server_that_is_asked_answers_that_it_cannot_and_stops(place: Place, tmp_path: Path) -> None:
    port = free_port()
    with running([*FF, "--store", place.url, "--port", str(port), "--no-sweeps"], tmp_path) as server:
        await asyncio.to_thread(get_json, port, "/healthz")
        await place.migrate(BREAKING)
        with pytest.raises(OSError, match="503|refused|reset"):  # refused once it has stopped
            await asyncio.to_thread(get_json, port, "/v1/executions?partition=0", 0)
        said = await last_words(server)

    assert server.returncode == 1, said
    assert said.count("the server stops") == 1
    assert "Traceback" not in said


async def test_a_worker_says_that_the_schema_is_newer_and_stops(place: Place, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    command = [sys.executable, "-m", "flowfabric.cli", "worker", "shop:app", "--store", place.url]
    with running(command, tmp_path) as worker:
        await until(lambda: is_registered(place))
        version = await place.migrate(SILENT)
        said = await last_words(worker)

    assert worker.returncode == 1, said
    assert said.count("this worker stops") == 1
    assert f"The store has schema version {version} and this release knows {version - 1}: update" in said, said
    assert said.count("sweeps no more") <= 1
    assert "Traceback" not in said
    assert "is away" not in said
