"""Other task queues, measured in the same run: each in its own virtual environment, controlled by its command line.

The scripts `with_*.py` run there, without FlowFabric: they import the standard library, their peer, and `starts`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec

HERE = Path(__file__).parent
HOME_VARIABLE = "FF_BENCH_PEERS"  # the folder of their environments
INSTALL_S = 300


class PeerMissing(Exception):
    """The peer could not be installed; the message says what to do."""


class Peer(msgspec.Struct, frozen=True):
    """A task queue to compare with."""

    name: str
    packages: tuple[str, ...]
    durability: str
    share: float = 1.0  # share of the jobs; a slow peer needs fewer for a stable rate

    @property
    def version(self) -> str:
        """The version that is measured."""
        return self.packages[0].partition("==")[2]

    def python(self) -> Path:
        """Return the interpreter of its environment, which is created on first use."""
        home = Path(os.environ.get(HOME_VARIABLE) or ".dev/peers").absolute() / f"{self.name}-{self.version}"
        python = home / "bin" / "python"
        if not (home / "complete").exists():
            shutil.rmtree(home, ignore_errors=True)
            self._install(home, python)
            (home / "complete").touch()
        return python

    def _install(self, home: Path, python: Path) -> None:
        uv = shutil.which("uv", path=os.pathsep.join((str(Path(".dev/tools/bin").absolute()), os.environ["PATH"])))
        if uv:
            create = [uv, "venv", "--quiet", "--no-project", "--python", sys.executable, str(home)]
            install = [uv, "pip", "install", "--quiet", "--python", str(python), *self.packages]
        else:
            create = [sys.executable, "-m", "venv", str(home)]
            install = [str(python), "-m", "pip", "install", "--quiet", *self.packages]
        for command in (create, install):
            environ = {"UV_SYSTEM_CERTS": "1", **os.environ, "VIRTUAL_ENV": ""}
            try:
                done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=INSTALL_S)
                message, is_good = done.stderr.strip(), done.returncode == 0
            except (OSError, subprocess.TimeoutExpired) as fault:
                message, is_good = str(fault), False
            if not is_good:
                shutil.rmtree(home, ignore_errors=True)
                last = message.splitlines()[-1:] or ["no reason given"]
                raise PeerMissing(
                    f"{self.name} {self.version} could not be installed ({last[0]}); is the package index reachable? "
                    f"{HOME_VARIABLE} names the folder that is used"
                )

    def command(self, *arguments: object) -> list[str]:
        """Return the command line that runs its script with these arguments."""
        return [str(self.python()), str(HERE / f"with_{self.name}.py"), *map(str, arguments)]


PGQUEUER = Peer(
    "pgqueuer",
    ("pgqueuer[asyncpg]==1.6.0", "uvloop==0.23.0"),
    "Postgres commit; finished jobs are buffered and flushed late; no result kept, no fence",
)
DRAMATIQ = Peer(
    "dramatiq",
    ("dramatiq[redis]==2.2.1", "hiredis==3.5.0"),
    "an append-only file written every second; acknowledged after the job; results kept, no fence",
    share=0.5,
)
HUEY = Peer("huey", ("huey==3.5.4",), "SQLite with fsync; taking a job deletes it, so a crash loses it", share=0.25)
