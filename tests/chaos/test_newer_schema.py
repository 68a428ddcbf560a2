"""A newer release migrates the store of running processes: `ff serve` and `ff worker` report it once and stop."""

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

from tests.chaos.test_sweepers import wait_until
from tests.cli.servers.test_serve import FF, get_json
from tests.engine.operations.test_schema_versions import BREAKING, SILENT, Database, database
from tests.processes import free_port

__all__ = ["database"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

APP = """
from flowfabric import Fabric

app = Fabric()


@app.task
async def nothing() -> None: ...
"""
STOPS_S = 40  # The version is checked every 5 s.


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def read_output(process: subprocess.Popen[str]) -> str:
    """Return the output of the process after it has exited."""
    output, _ = await asyncio.to_thread(process.communicate, timeout=STOPS_S)
    return output


async def is_registered(database: Database) -> bool:
    """Return True if a worker has created the store and registered in it."""
    with suppress(apsw.Error, asyncpg.PostgresError):  # before the tables exist
        return bool(await database.fetch("select worker_instance_id from ff_worker_registry"))
    return False


@pytest.mark.parametrize("options", [[], ["--no-sweeps"]], ids=["sweeping", "idle"])
async def test_an_idle_server_reports_that_the_schema_is_newer_and_stops(
    database: Database, tmp_path: Path, options: list[str]
) -> None:
    port = free_port()
    with running([*FF, "--store", database.url, "--port", str(port), *options], tmp_path) as server:
        assert await asyncio.to_thread(get_json, port, "/healthz") == {"status": "ok"}
        version = await database.migrate(SILENT)
        output = await read_output(server)

    assert server.returncode == 1, output
    assert output.count("the server stops") == 1
    assert f"The store has schema version {version} and this release knows {version - 1}: update" in output, output
    assert "Hint: update this installation: pip install --upgrade flowfabric" in output
    assert output.count("stops its sweeps") <= 1
    assert "Traceback" not in output
    assert "is away" not in output


async def test_a_server_refuses_requests_on_a_newer_schema_and_stops(database: Database, tmp_path: Path) -> None:
    port = free_port()
    with running([*FF, "--store", database.url, "--port", str(port), "--no-sweeps"], tmp_path) as server:
        await asyncio.to_thread(get_json, port, "/healthz")
        await database.migrate(BREAKING)
        with pytest.raises(OSError, match="503|refused|reset"):  # Connections are refused once it has stopped.
            await asyncio.to_thread(get_json, port, "/v1/executions?partition=0", 0)
        output = await read_output(server)

    assert server.returncode == 1, output
    assert output.count("the server stops") == 1
    assert "Traceback" not in output


async def test_a_worker_reports_that_the_schema_is_newer_and_stops(database: Database, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP)
    command = [sys.executable, "-m", "flowfabric.cli", "worker", "shop:app", "--store", database.url]
    with running(command, tmp_path) as worker:
        await wait_until(lambda: is_registered(database))
        version = await database.migrate(SILENT)
        output = await read_output(worker)

    assert worker.returncode == 1, output
    assert output.count("this worker stops") == 1
    assert f"The store has schema version {version} and this release knows {version - 1}: update" in output, output
    assert output.count("stops its sweeps") <= 1
    assert "Traceback" not in output
    assert "is away" not in output
