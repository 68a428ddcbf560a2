"""File locks and background processes of the test servers. Standard library only, like `tests/servers.py`."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tests.postgres_install import ROOT


def open_lock(path: Path) -> IO[str]:
    return path.open("a")


def is_held(path: Path) -> bool:
    """True if another process holds this lock exclusively."""
    if not path.exists():
        return False
    with open_lock(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def run_in_background(module: str, *arguments: str) -> str:
    """Run a module in a separate process; return its output up to the moment when it detaches."""
    command = [sys.executable, "-m", module, *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    output: str = subprocess.run(command, cwd=ROOT, start_new_session=True, **pipes).stdout
    return output.strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def close_output() -> None:
    """Redirect stdout and stderr to /dev/null, so that the parent, which reads to the end of both, continues."""
    with Path(os.devnull).open("w") as null:
        os.dup2(null.fileno(), 1)
        os.dup2(null.fileno(), 2)


def detach() -> None:
    """Continue in a forked process, for which the parent does not wait."""
    if os.fork():
        os._exit(0)


def children(parent: int) -> list[int]:
    return [pid for pid, above, _ in processes() if above == parent]


def is_alive(pid: int) -> bool:
    return any(number == pid and state != "Z" for number, _, state in processes())


def processes() -> Iterator[tuple[int, int, str]]:
    """Yield the pid, parent and state of every process, from /proc or else from ps."""
    if Path("/proc/self/stat").exists():
        for file in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, parent, *_ = file.read_text().rpartition(")")[2].split()
                yield int(file.parent.name), int(parent), state
    else:
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,state="], capture_output=True, text=True, check=True)
        for line in listing.stdout.splitlines():
            pid, parent, state = line.split()
            yield int(pid), int(parent), state[0]


def command_line(pid: int) -> str:
    if (file := Path(f"/proc/{pid}/cmdline")).exists():
        return file.read_text()
    return subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True).stdout


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"Waited {seconds:g} s for {what}.")
        time.sleep(0.01)
