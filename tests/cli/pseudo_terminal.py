"""A process on a pseudo terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.postgres_install import ROOT


class OnTerminal:
    """`ff …` with a terminal as stdin, stdout and stderr."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self._master = master
        self.text = ""

    def until(self, text: str, seconds: float = 60) -> str:
        """Wait until the output contains a text; return all output."""
        end = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < end, self.text
            assert self._read(0.1) or self.process.poll() is None, self.text
        return self.text

    def stop(self) -> str:
        """Send SIGTERM, wait for the exit, and return all output."""
        self.process.send_signal(signal.SIGTERM)
        end = time.monotonic() + 60
        while self._read(0.1) or self.process.poll() is None:
            assert time.monotonic() < end, self.text
        return self.text

    def _read(self, seconds: float) -> bool:
        if not select.select([self._master], [], [], seconds)[0]:
            return False
        try:
            piece = os.read(self._master, 65_536)
        except OSError:  # the other end is closed
            return False
        self.text += piece.decode("utf-8", "replace")
        return bool(piece)


@contextmanager
def on_terminal(*arguments: str, folder: Path, environ: Mapping[str, str] | None = None) -> Iterator[OnTerminal]:
    """Run `ff` on a terminal during the block."""
    master, slave = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "100", **(environ or {})}
    command = [sys.executable, "-m", "flowfabric.cli", *arguments]
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    try:
        yield OnTerminal(process, master)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait()
        os.close(master)
