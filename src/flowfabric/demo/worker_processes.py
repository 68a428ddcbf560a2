"""The worker processes of the demo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

STOP_TIMEOUT_S = 10.0


class WorkerProcesses:
    """Started by name, killed at will, sent home in the end; what they had to say is kept beside the store."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url = url
        self._folder = folder
        self._workers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> int:
        """Start a worker; its process id."""
        command = [sys.executable, "-m", "flowfabric.demo.worker", self._url, name]
        with (self._folder / f"{name}.log").open("wb") as log:
            self._workers[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        return self._workers[name].pid

    def kill(self, name: str) -> int:
        """End a worker with SIGKILL; its process id."""
        worker = self._workers.pop(name)
        worker.kill()
        worker.wait()
        return worker.pid

    def exited_workers(self) -> list[str]:
        """Workers that ended by themselves, which none should."""
        return [name for name, worker in self._workers.items() if worker.poll() is not None]

    def read_logs(self) -> str:
        """What the workers wrote."""
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
