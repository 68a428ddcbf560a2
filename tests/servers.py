"""Real servers for tests and benches, from nothing: PostgreSQL out of a wheel, else the system's.

`postgres()` answers with a running server that every process of a test run shares; `postgres("chaos-1")` with one of
its own, to be stopped and killed at will. Nobody has to clean up, because locks say who still needs what and the
kernel lets go of a lock when its holder dies, however it dies:

* `users`: each process that uses the server holds it shared, until it ends;
* `server`: held by the supervisor, the parent of the server, as long as the server runs;
* `start`: held while someone looks whether it runs, and starts it if not.

The supervisor waits for `users` alone; once it gets it nobody is left, so it stops the server and removes the data.
A server whose supervisor was killed is found by its data folder at the next start, and ended.

Standard library only: `./dev` uses this page with the system's Python.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit, urlunsplit

from tests.postgres_install import (
    DSN_VARIABLE,
    FIX,
    ROOT,
    ServerMissing,
    as_server,
    base,
    environment,
    folder_for_all,
    lay_out,
    locked,
    password,
    programs,
)

__all__ = ["DSN_VARIABLE", "PostgresServer", "ServerMissing", "hold", "leave", "postgres", "release"]

SHARED = "shared"

# As careful as in production where durability is concerned; otherwise sized for many small databases.
SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "256MB",
    "min_wal_size": "512MB",
    "max_wal_size": "4GB",
    "timezone": "UTC",
    "log_min_messages": "warning",
}
SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class PostgresServer:
    """A running PostgreSQL; with a folder it is ours to stop and start, without one somebody else's."""

    def __init__(self, dsn: str, folder: Path | None = None) -> None:
        self._dsn = dsn
        self._folder = folder

    def dsn(self, dbname: str = "postgres") -> str:
        """The address of one of its databases."""
        return urlunsplit(urlsplit(self._dsn)._replace(path=f"/{dbname}"))

    def create_database(self, name: str, template: str | None = None) -> str:
        """Create a database, empty or as a copy of a template that nobody is connected to; its address."""
        copied = f' TEMPLATE "{template}"' if template else ""
        self.execute(f'CREATE DATABASE "{name}"{copied}')
        return self.dsn(name)

    def empty_database(self, name: str, keep: tuple[str, ...] = ()) -> None:
        """Delete every row of its public tables but those of the kept ones: a tenth of what a new copy costs."""
        tables = self.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'", name).split()
        deletes = [f'DELETE FROM "{table}"' for table in tables if table not in keep]
        self.execute(";".join(["SET session_replication_role = replica", *deletes]), name)

    def warm_up(self) -> None:
        """Have it write a gigabyte: a new server makes the files of its log as it goes, and stalls each time."""
        self.execute("CREATE TABLE warm AS SELECT repeat(md5(n::text), 32) FROM generate_series(1, 1000000) AS n")
        self.execute("CHECKPOINT")
        self.execute("DROP TABLE warm")

    def drop_database(self, name: str) -> None:
        """Remove a database and whoever is connected to it. Costs a checkpoint; data goes with the server anyway."""
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def template(self, name: str, prepare: Callable[[str], None]) -> str:
        """Make a database to copy from, once for all processes: `prepare` gets its address, connects, and lets go."""
        with locked(base() / f"template-{name}.lock"):
            if not self.execute(f"SELECT 1 FROM pg_database WHERE datname = '{name}'"):
                raw = f"{name}_raw"
                self.drop_database(raw)
                prepare(self.create_database(raw))
                self.execute(f'ALTER DATABASE "{raw}" RENAME TO "{name}"')
        return name

    def execute(self, statement: str, dbname: str = "postgres") -> str:
        """Run one statement as the superuser; what it answered, unaligned and without headings."""
        psql = [str(programs() / "psql"), "-XqAt", "-v", "ON_ERROR_STOP=1", "-d", self.dsn(dbname), "-c", statement]
        done = subprocess.run(psql, capture_output=True, text=True, env=environment())
        if done.returncode:
            raise RuntimeError(f"{statement}: {done.stderr.strip()}")
        return done.stdout.strip()

    def is_running(self) -> bool:
        return _is_held(self._own / "server")

    def stop(self, mode: str = "fast") -> None:
        """Stop it, `smart`, `fast` or `immediate` as PostgreSQL calls it; the data stay."""
        if self.is_running():
            os.kill(_state(self._own)["pid"], SIGNALS[mode])
            self._wait_until_ended()

    def kill(self) -> None:
        """End all its processes at once, as a power cut does; the data stay as they are."""
        if self.is_running():
            postmaster: int = _state(self._own)["pid"]
            os.kill(postmaster, signal.SIGSTOP)  # so that no child is born while we look for them
            family = [postmaster, *_children(postmaster)]
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._wait_until_ended()
            _wait(lambda: not any(_is_alive(pid) for pid in family[1:]), "killed processes to disappear")

    def start(self) -> None:
        """Start it again, on the same port and with the data it had; a running one goes on running."""
        with locked(self._own / "start"):
            if not self.is_running():
                _launch(self._own, _state(self._own)["port"])

    def restart(self, mode: str = "fast") -> None:
        """Stop and start; connections are lost, the address stays."""
        self.stop(mode)
        self.start()

    def back_up(self) -> None:
        """Take a base backup while it runs, from which `fail_over` makes an asynchronous standby."""
        copy = self._own / "standby"
        shutil.rmtree(copy, ignore_errors=True)
        into = folder_for_all(copy)
        if as_server():
            shutil.chown(into, "nobody")
        into.chmod(0o700)
        command = [str(programs() / "pg_basebackup"), "-d", self.dsn(), "-D", str(into), "-c", "fast", "-X", "stream"]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment(), **as_server())
        if done.returncode:
            raise RuntimeError(f"pg_basebackup: {done.stderr.strip()}")

    def fail_over(self) -> None:
        """Kill it, and promote the standby that knows what was committed up to the backup; the address stays."""
        self.kill()
        shutil.rmtree(self._own / "data")
        (self._own / "standby").rename(self._own / "data")
        (self._own / "data" / "standby.signal").touch()
        (self._own / "data" / "postmaster.pid").unlink(missing_ok=True)
        self.start()
        self.execute("SELECT pg_promote()")

    @property
    def _own(self) -> Path:
        if self._folder is None:
            raise RuntimeError(
                f"The server of {DSN_VARIABLE} is not ours to stop or start; use postgres(name) instead."
            )
        return self._folder

    def _wait_until_ended(self) -> None:
        _wait(lambda: not self.is_running(), "PostgreSQL to end")


_servers: dict[str, PostgresServer] = {}
_uses: dict[str, tuple[int, IO[str]]] = {}


def postgres(name: str = SHARED) -> PostgresServer:
    """The running server of that name, started if need be and stopped when the last process using it has ended."""
    if name not in _servers:
        given = os.environ.get(DSN_VARIABLE) if name == SHARED else None
        _servers[name] = _foreign(given) if given and not _is_ours(given) else _start_or_join(name)
    return _servers[name]


def leave(name: str = SHARED) -> None:
    """Use the server no longer; if nobody else does, it has stopped when this returns."""
    _servers.pop(name, None)
    owner, use = _uses.pop(name, (None, None))
    if use is None or owner != os.getpid():  # a forked child shares the lock of its parent: not its to let go
        return
    folder = _folder(name)
    with use, suppress(BlockingIOError):
        fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)  # only the last one gets here
        if not _is_held(folder / "server"):
            shutil.rmtree(folder / "data", ignore_errors=True)
        use.close()
        with suppress(TimeoutError):
            _wait(lambda: not _is_held(folder / "server"), "PostgreSQL to end", seconds=15)


@atexit.register
def _leave_all() -> None:
    for name in list(_servers):
        leave(name)


def _start_or_join(name: str) -> PostgresServer:
    folder = _folder(name)
    use = _open_lock(folder / "users")
    try:
        fcntl.flock(use, fcntl.LOCK_SH)
        with locked(folder / "start"):
            if not _is_held(folder / "server"):
                _end_forgotten(folder / "data")
                lay_out(folder / "data")
                _launch(folder, port=None)
    except BaseException:
        use.close()
        raise
    _uses[name] = (os.getpid(), use)
    return PostgresServer(_state(folder)["dsn"], folder)


def _foreign(dsn: str) -> PostgresServer:
    server = PostgresServer(dsn)
    try:
        server.execute("SELECT 1")
    except RuntimeError as error:
        raise ServerMissing(f"{error}\nThe server that {DSN_VARIABLE} names does not answer.\n{FIX}") from None
    return server


def _is_ours(dsn: str) -> bool:
    folder = _folder(SHARED)
    return _is_held(folder / "server") and urlsplit(_state(folder)["dsn"]).netloc == urlsplit(dsn).netloc


# --- locks and state


def _open_lock(path: Path) -> IO[str]:
    return path.open("a")


def _is_held(path: Path) -> bool:
    """Whether another process holds this lock for itself."""
    if not path.exists():
        return False
    with _open_lock(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def _folder(name: str) -> Path:
    return folder_for_all(folder_for_all(base() / "servers") / name)


# --- processes


def _launch(folder: Path, port: int | None) -> None:
    """Start a supervisor, and through it the server; the server answers when this returns."""
    for _ in range(5):
        failure = _speak("serve", str(folder), str(port or _free_port())).removesuffix("ready")
        if not failure:
            return
        failure += (folder / "log").read_text(errors="replace")[-2000:]
        if port or "Address already in use" not in failure:
            raise ServerMissing(f"PostgreSQL did not start: {failure}\n{FIX}")
    raise ServerMissing("PostgreSQL found no free port five times in a row.")


def _speak(*arguments: str) -> str:
    """Start this page as a process of its own; what it says until it goes to the background."""
    command = [sys.executable, "-m", "tests.servers", *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    said: str = subprocess.run(command, cwd=ROOT, start_new_session=True, **pipes).stdout
    return said.strip()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _serve(folder: Path, port: int) -> None:
    """Be the supervisor: start the server, say so, and stop it when nobody uses it any more."""
    running = _open_lock(folder / "server")
    fcntl.flock(running, fcntl.LOCK_EX)
    settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
    command = [str(programs() / "postgres"), "-D", str(folder / "data"), "-p", str(port), *settings]
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=environment(), **as_server()
        )
    dsn = f"postgresql://postgres:{password()}@127.0.0.1:{port}/postgres"
    state = folder / "state.json"
    state.touch(mode=0o600)
    state.write_text(json.dumps({"pid": child.pid, "port": port, "dsn": dsn}))
    _wait(lambda: child.poll() is not None or _is_ready(folder / "data", child.pid), "PostgreSQL to be ready")
    if child.poll() is not None:
        print(f"it ended with code {child.returncode}", flush=True)
        return
    print("ready", flush=True)
    _let_go_of_output()
    users = _open_lock(folder / "users")
    unused = threading.Event()

    def stop_when_unused() -> None:
        fcntl.flock(users, fcntl.LOCK_EX)
        unused.set()
        child.send_signal(signal.SIGINT)
        time.sleep(10)
        child.send_signal(signal.SIGQUIT)

    threading.Thread(target=stop_when_unused, daemon=True).start()
    child.wait()
    if unused.is_set():
        shutil.rmtree(folder / "data", ignore_errors=True)


def _let_go_of_output() -> None:
    """Whoever started this process reads what it says until the end of both streams: let that be now."""
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)


def _detach() -> None:
    """Go on in a process of our own, which nobody has to wait for."""
    if os.fork():
        os._exit(0)


def _hold() -> None:
    """Say where the shared server is, and use it until someone ends this process."""
    server = postgres()
    kept = _open_lock(_folder(SHARED) / "kept")
    with suppress(BlockingIOError):
        fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept.truncate(0)
        print(os.getpid(), file=kept, flush=True)
        print(server.dsn(), flush=True)
        _let_go_of_output()
        while True:
            signal.pause()
    print(server.dsn(), flush=True)


def hold() -> str:
    """Keep the shared server running until `release`; its address."""
    if not (dsn := _speak("hold")):
        raise ServerMissing(f"PostgreSQL did not start.\n{FIX}")
    return dsn


def release() -> bool:
    """Undo `hold`; whether there was anything to undo. The server stops once nobody else uses it."""
    folder = _folder(SHARED)
    if not _is_held(folder / "kept"):
        return False
    os.kill(int((folder / "kept").read_text()), signal.SIGTERM)
    with suppress(TimeoutError):
        _wait(lambda: not _is_held(folder / "server"), "PostgreSQL to end", seconds=10)
    return True


def _is_ready(data: Path, pid: int) -> bool:
    """Whether the postmaster has written into its pid file that it takes connections, as pg_ctl waits for as well."""
    with suppress(OSError):
        lines = (data / "postmaster.pid").read_text().splitlines()
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() in ("ready", "standby")
    return False


def _end_forgotten(data: Path) -> None:
    """End a server whose supervisor was killed."""
    with suppress(OSError, ValueError, IndexError):
        pid = int((data / "postmaster.pid").read_text().splitlines()[0])
        if str(data) in _command_line(pid):
            for kind in (signal.SIGQUIT, signal.SIGKILL):
                os.kill(pid, kind)
                with suppress(TimeoutError):
                    _wait(lambda: not _is_alive(pid), "a forgotten PostgreSQL to end", seconds=5)
                    return


def _children(parent: int) -> list[int]:
    return [pid for pid, above, _ in _processes() if above == parent]


def _is_alive(pid: int) -> bool:
    return any(number == pid and state != "Z" for number, _, state in _processes())


def _processes() -> Iterator[tuple[int, int, str]]:
    """Number, parent and state of every process: from /proc where there is one, else from ps."""
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


def _command_line(pid: int) -> str:
    if (file := Path(f"/proc/{pid}/cmdline")).exists():
        return file.read_text()
    return subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True).stdout


def _wait(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"Waited {seconds:g} s for {what}.")
        time.sleep(0.01)


def main(command: str, *arguments: str) -> None:
    """`up` and `down` are for people; `serve` and `hold` are this page's own background processes."""
    match command:
        case "up":
            print(hold())
        case "down":
            print("stopped" if release() else "nothing was up")
        case "serve":
            _detach()
            _serve(Path(arguments[0]), int(arguments[1]))
        case "hold":
            _detach()
            _hold()
        case _:
            sys.exit(f"no such command: {command}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ServerMissing as missing:
        sys.exit(str(missing))
