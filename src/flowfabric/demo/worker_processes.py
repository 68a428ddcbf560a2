"""The worker processes of the demo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

STOP_TIMEOUT_S = 10.0


class WorkerProcesses:
    """The worker processes, by name. Their logs are kept beside the store; all of them are ended at the end."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._workers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> int:
        """Start a worker; return its process id."""
        command = [sys.executable, "-m", "flowfabric.demo.worker", self._url, name]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._workers[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self._workers[name].pid

    def kill(self, name: str) -> int:
        """Kill a worker with SIGKILL; return its process id."""
        worker = self._workers.pop(name)
        worker.kill()
        worker.wait()
        return worker.pid

    def exited_workers(self) -> list[str]:
        """Return the workers that have ended by themselves, which none should."""
        return [name for name, worker in self._workers.items() if worker.poll() is not None]

    def read_logs(self) -> str:
        """Return what the workers have logged."""
        return "".join(
            f"{log.stem}: {log.read_text()}" for log in sorted(self._folder.glob("*.log")) if log.stat().st_size
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            worker.terminate()
        for worker in self._workers.values():
            try:
                worker.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
