"""Worker processes of the service, started and stopped by tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.postgres_install import ROOT


class Process:
    """One worker process and its output."""

    def __init__(self, *arguments: object, module: str = "tests.sdk.service") -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.said: list[str] = []
        self._ear = threading.Thread(target=self._listen, daemon=True)
        self._ear.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        self.said += self.process.stdout

    def printed(self, words: str) -> bool:
        """Return True if a line of the output begins with these words."""
        return any(line.startswith(words) for line in tuple(self.said))

    def terminate(self) -> None:
        """SIGTERM."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.join()

    def join(self, seconds: float = 30) -> int:
        """Wait until the process has exited and its output was read."""
        code = self.process.wait(seconds)
        self._ear.join(10)
        return code


@contextmanager
def process(*arguments: object, module: str = "tests.sdk.service") -> Iterator[Process]:
    """Start a process and kill it at the end."""
    started = Process(*arguments, module=module)
    try:
        yield started
    finally:
        with suppress(ProcessLookupError):
            started.process.kill()
        started.join()
        assert started.process.stdout is not None
        started.process.stdout.close()
