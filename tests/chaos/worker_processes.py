"""Starts worker processes, reads their output and kills them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from tests.postgres_install import ROOT


class WorkerProcess:
    """One worker process and its output."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "tests.chaos.worker", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.output: list[list[str]] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # A killed process may stop in the middle of a line.
                self.output.append(line.split())

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors += self.process.stderr

    def lines(self, word: str) -> list[list[str]]:
        """Return the arguments of the output lines that begin with this word."""
        return [words[1:] for words in tuple(self.output) if words[0] == word]

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Wait for a condition that this worker brings about."""
        limit = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() in (None, 0), f"the worker ended: {''.join(self.errors)}"
            assert time.monotonic() < limit, f"waited {seconds} s; the output is {self.output[-5:]}"
            time.sleep(0.005)

    def kill(self) -> None:
        """Kill the process."""
        self.process.send_signal(signal.SIGKILL)
        self.join()

    def join(self, seconds: float = 120) -> int:
        """Wait until the process has exited and its output was read."""
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(10)
        return code


@contextmanager
def worker_processes() -> Iterator[Callable[..., WorkerProcess]]:
    """Yield a function that starts worker processes; kill them at the end."""
    workers: list[WorkerProcess] = []

    def start(*arguments: object) -> WorkerProcess:
        workers.append(WorkerProcess(*arguments))
        return workers[-1]

    try:
        yield start
    finally:
        for worker in workers:
            with suppress(ProcessLookupError):
                worker.process.kill()
            worker.join()
            for pipe in (worker.process.stdout, worker.process.stderr):
                if pipe is not None:
                    pipe.close()
