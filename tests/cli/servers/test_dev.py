"""`ff dev` runs a server and a worker together, and both end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from flowfabric.cli.commands.dev import DevProcesses
from tests.processes import free_port

APP = """
from flowfabric import Context, Fabric
app = Fabric("sqlite:///{path}")

@app.task
async def double(n: int) -> int:
    return 2 * n

@app.task
async def link(ctx: Context) -> str:
    return str((await ctx.approval("go", bool)).links[0])
"""
FOREVER = [sys.executable, "-c", "import time; time.sleep(600)"]


def ff(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "flowfabric.cli", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_task_runs_and_the_server_answers_until_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(APP.format(path=tmp_path / "dev.db"))
    port = free_port()
    command = [sys.executable, "-m", "flowfabric.cli", "dev", "shop:app", "--port", str(port)]
    running = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        assert running.stderr is not None
        lines: list[str] = []
        while not any("console" in line for line in lines):
            lines.append(running.stderr.readline())
            assert lines[-1], "".join(lines)
        assert f"http://127.0.0.1:{port}/ui" in lines[-1]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            assert answer.status == 200
        run = ff(tmp_path, "submit", "shop:double", "--payload", '{"n": 21}').strip()
        server = f"http://127.0.0.1:{port}"
        assert "42" in ff(tmp_path, "result", run, "--wait", "--store", server)
        run = ff(tmp_path, "submit", "shop:link").strip()
        assert f"{server}/v1/waitpoints/" in ff(tmp_path, "result", run, "--wait", "--store", server)
        os.kill(running.pid, signal.SIGINT)
        assert running.wait(30) == 0
    finally:
        running.kill()
        running.communicate()
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1)


def test_both_end_when_one_of_them_ends() -> None:
    processes = DevProcesses(FOREVER, [sys.executable, "-c", "raise SystemExit(3)"], lambda: True)

    began = time.monotonic()
    assert processes.run("link") == 3
    assert time.monotonic() - began < 30
    assert all(process.poll() is not None for process in processes._running.values())


def test_a_server_that_does_not_start_is_reported() -> None:
    processes = DevProcesses([sys.executable, "-c", "raise SystemExit(1)"], FOREVER, lambda: False)

    assert processes.run("link") == 1
    assert "worker" not in processes._running
