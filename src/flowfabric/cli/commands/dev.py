"""`ff dev`: a server, its console and a worker with reload for one app, in one command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Annotated

import typer

from flowfabric.cli.locate import AppArgument, load_app
from flowfabric.cli.output import exit_on_error
from flowfabric.cli.stores import StoreOption, check_is_store, redact_url, run_on_store

STOP_GRACE_S = 10.0
POLL_INTERVAL_S = 0.2


def dev(
    target: AppArgument,
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port of the server.")] = 9090,
    slots: Annotated[int, typer.Option(min=1, help="Executions that run at the same time.")] = 10,
    store: StoreOption = None,
) -> None:
    """Develop an app. Runs a server with the console and a worker that restarts when the code changes."""
    from flowfabric.errors import InvalidInput

    with exit_on_error():
        url = store or load_app(target).url
        check_is_store(url, "`ff dev` runs a server of its own")
        if url.startswith("memory:"):
            raise InvalidInput("--store: server and worker are two processes; name a file: --store sqlite:///dev.db")

    async def migrated(_: object) -> None:
        """Do nothing: opening the store has created or updated it."""

    run_on_store(url, migrated, migrate=True)
    ff = [sys.executable, "-m", "flowfabric.cli"]
    server = [*ff, "serve", "--store", url, "--host", "127.0.0.1", "--port", str(port), "--no-sweeps"]
    worker = [*ff, "worker", target, "--reload", "--slots", str(slots), "--store", url]
    os.environ.setdefault("FF_PUBLIC_URL", f"http://127.0.0.1:{port}")  # where links of approvals lead
    typer.echo(f"store    {redact_url(url)}", err=True)
    processes = DevProcesses(server, worker, lambda: is_ready(port))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, processes.on_signal)
    raise typer.Exit(processes.run(f"http://127.0.0.1:{port}/ui"))


def is_ready(port: int) -> bool:
    """Return whether the server on this port accepts requests."""
    from http.client import HTTPConnection, HTTPException

    connection = HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()


class DevProcesses:
    """A server and a worker that end together."""

    def __init__(self, server: list[str], worker: list[str], is_server_ready: Callable[[], bool]) -> None:
        self._commands = {"server": server, "worker": worker}
        self._is_server_ready = is_server_ready
        self._stopping = threading.Event()
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """Stop both processes."""
        self._stopping.set()

    def run(self, link: str) -> int:
        """Run both until a signal arrives or one of them ends; return the exit code."""
        try:
            self._start("server")
            if not self._wait_for_server():
                return 1
            self._start("worker")
            typer.echo(f"console  {link}", err=True)
            while not self._stopping.wait(POLL_INTERVAL_S):
                for name, process in self._running.items():
                    if process.poll() is not None:
                        typer.echo(f"ff: the {name} has ended with exit code {process.returncode}", err=True)
                        return process.returncode or 1
            return 0
        finally:
            self._stop()

    def _start(self, name: str) -> None:
        # In its own process group, Ctrl-C reaches this process only, which stops both in order.
        self._running[name] = subprocess.Popen(self._commands[name], env={**os.environ}, process_group=0)

    def _wait_for_server(self) -> bool:
        while not self._is_server_ready():
            if self._running["server"].poll() is not None or self._stopping.wait(POLL_INTERVAL_S):
                return False
        return True

    def _stop(self) -> None:
        for process in reversed(self._running.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
