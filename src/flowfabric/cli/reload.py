"""`--reload`: a process that runs the worker, polls the code for changes, and restarts the worker after a change.

The worker is a separate process, so that the modules it imported are really gone. Its running work gets a moment to
end and is then released, which costs no attempt. A worker that exits by itself, because its code has a mistake, is
restarted after the next change.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

import typer

PARENT_PID_VARIABLE = "FF_RELOADED_BY"  # the worker stops when this process is gone
POLL_INTERVAL_S = 0.25
STOP_GRACE_S = 2.0
SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages"}


def run_with_reload() -> int:
    """Run the command without `--reload`, and restart it after every change; return the exit code."""
    command = [sys.executable, "-m", "flowfabric.cli", *(word for word in sys.argv[1:] if word != "--reload")]
    reloader = Reloader(command, Path.cwd())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, reloader.forward_signal)
    return reloader.run()


class Reloader:
    """Runs one worker process at a time."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._command = command
        self._folder = folder
        self._stopping = threading.Event()
        self._worker: subprocess.Popen[bytes] | None = None

    def forward_signal(self, number: int, _: FrameType | None) -> None:
        """Forward a signal: the first one drains the worker, a second one stops it at once."""
        self._stopping.set()
        if self._worker is not None and self._worker.poll() is None:
            self._worker.send_signal(signal.SIGTERM)

    def run(self) -> int:
        """Watch the code until a signal arrives; return the exit code of the last worker."""
        seen = modification_times(self._folder)
        self._start()
        while not self._stopping.wait(POLL_INTERVAL_S):
            now = modification_times(self._folder)
            if now != seen:
                changed = sorted({path for path, _ in seen ^ now})
                typer.echo(f"↻ {', '.join(changed[:3])} changed", err=True)
                seen = now
                self._stop()
                self._start()
        return self._worker.wait() if self._worker is not None else 0

    def _start(self) -> None:
        if not self._stopping.is_set():
            environ = {**os.environ, PARENT_PID_VARIABLE: str(os.getpid())}
            # In its own process group, Ctrl-C reaches the worker once, through `forward_signal`, and not twice.
            self._worker = subprocess.Popen(self._command, env=environ, process_group=0)

    def _stop(self) -> None:
        worker = self._worker
        if worker is None or worker.poll() is not None:
            return
        worker.send_signal(signal.SIGTERM)
        try:
            worker.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            worker.send_signal(signal.SIGTERM)
            worker.wait()


def modification_times(folder: Path) -> set[tuple[str, int]]:
    """Return the modification times of the Python files below a folder."""
    found = set()
    for here, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        for name in files:
            if name.endswith(".py"):
                path = Path(here, name)
                try:
                    found.add((str(path.relative_to(folder)), path.stat().st_mtime_ns))
                except FileNotFoundError:
                    continue  # removed meanwhile, which is a change as well
    return found
