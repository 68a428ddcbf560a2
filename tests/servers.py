"""Real PostgreSQL servers for tests and benchmarks, from a wheel or else from the system's packages.

`postgres()` returns a running server that all processes of a test run share; `postgres("chaos-1")` returns a separate
one, which a test may stop and kill. No cleanup is needed: file locks show which servers are in use, and the kernel
releases the locks of a process when it dies:

* `users`: held shared by each process that uses the server;
* `server`: held by the supervisor, the parent of the server, while the server runs;
* `start`: held while a process checks whether the server runs, and starts it if not.

The supervisor waits for the exclusive lock of `users`; then no user is left, so it stops the server and removes the
data. A server whose supervisor was killed is found by its data folder at the next start, and stopped.

Standard library only: `./dev` uses this module with the system's Python.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit, urlunsplit

from tests.postgres_install import (
    DSN_VARIABLE,
    FIX,
    ServerMissing,
    base,
    create_data_folder,
    environment,
    folder_for_all,
    locked,
    password,
    programs,
    server_user,
)
from tests.processes import (
    children,
    close_output,
    command_line,
    detach,
    free_port,
    is_alive,
    is_held,
    open_lock,
    run_in_background,
    wait_for,
)
from tests.valkey_servers import valkey, valkey_cluster

__all__ = ["DSN_VARIABLE", "PostgresServer", "ServerMissing", "hold", "leave", "postgres", "release"]

SHARED = "shared"

# Durable as in production; otherwise sized for many small databases.
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
    """A PostgreSQL server; without a folder it was configured by the user, and cannot be stopped or started."""

    def __init__(self, dsn: str, folder: Path | None = None) -> None:
        self._dsn = dsn
        self._folder = folder

    def dsn(self, dbname: str = "postgres") -> str:
        """Return the DSN of one of its databases."""
        return urlunsplit(urlsplit(self._dsn)._replace(path=f"/{dbname}"))

    def create_database(self, name: str, template: str | None = None) -> str:
        """Create a database, empty or as a copy of a template without connections; return its DSN."""
        copied = f' TEMPLATE "{template}"' if template else ""
        self.execute(f'CREATE DATABASE "{name}"{copied}')
        return self.dsn(name)

    def empty_database(self, name: str, keep: tuple[str, ...] = ()) -> None:
        """Delete all rows of the public tables, except those in `keep`; this costs a tenth of a new copy."""
        tables = self.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'", name).split()
        deletes = [f'DELETE FROM "{table}"' for table in tables if table not in keep]
        self.execute(";".join(["SET session_replication_role = replica", *deletes]), name)

    def warm_up(self) -> None:
        """Write a gigabyte: a new server creates its WAL files on demand, and stalls each time."""
        self.execute("CREATE TABLE warm AS SELECT repeat(md5(n::text), 32) FROM generate_series(1, 1000000) AS n")
        self.execute("CHECKPOINT")
        self.execute("DROP TABLE warm")

    def drop_database(self, name: str) -> None:
        """Drop a database and its connections; this costs a checkpoint."""
        self.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def template(self, name: str, prepare: Callable[[str], None]) -> str:
        """Create a template database, once for all processes: `prepare` gets its DSN, connects and disconnects."""
        with locked(base() / f"template-{name}.lock"):
            if not self.execute(f"SELECT 1 FROM pg_database WHERE datname = '{name}'"):
                raw = f"{name}_raw"
                self.drop_database(raw)
                prepare(self.create_database(raw))
                self.execute(f'ALTER DATABASE "{raw}" RENAME TO "{name}"')
        return name

    def execute(self, statement: str, dbname: str = "postgres") -> str:
        """Run one statement as the superuser; return the output of psql, unaligned and without headings."""
        psql = [str(programs() / "psql"), "-XqAt", "-v", "ON_ERROR_STOP=1", "-d", self.dsn(dbname), "-c", statement]
        done = subprocess.run(psql, capture_output=True, text=True, env=environment())
        if done.returncode:
            raise RuntimeError(f"{statement}: {done.stderr.strip()}")
        return done.stdout.strip()

    def is_running(self) -> bool:
        return is_held(self._own_folder / "server")

    def stop(self, mode: str = "fast") -> None:
        """Stop the server in PostgreSQL's mode `smart`, `fast` or `immediate`; the data is kept."""
        if self.is_running():
            os.kill(_state(self._own_folder)["pid"], SIGNALS[mode])
            self._wait_until_ended()

    def kill(self) -> None:
        """Kill all its processes at once, as a power failure does; the data is kept."""
        if self.is_running():
            postmaster: int = _state(self._own_folder)["pid"]
            os.kill(postmaster, signal.SIGSTOP)  # so that it starts no child meanwhile
            processes = [postmaster, *children(postmaster)]
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._wait_until_ended()
            wait_for(lambda: not any(is_alive(pid) for pid in processes[1:]), "killed processes to disappear")

    def start(self) -> None:
        """Start the server again, on the same port and with its data, unless it is running."""
        with locked(self._own_folder / "start"):
            if not self.is_running():
                _launch(self._own_folder, _state(self._own_folder)["port"])

    def restart(self, mode: str = "fast") -> None:
        """Stop and start; connections are lost, the DSN stays."""
        self.stop(mode)
        self.start()

    def back_up(self) -> None:
        """Take a base backup, which `fail_over` uses as an asynchronous standby."""
        copy = self._own_folder / "standby"
        shutil.rmtree(copy, ignore_errors=True)
        into = folder_for_all(copy)
        if server_user():
            shutil.chown(into, "nobody")
        into.chmod(0o700)
        command = [str(programs() / "pg_basebackup"), "-d", self.dsn(), "-D", str(into), "-c", "fast", "-X", "stream"]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=environment(), **server_user())
        if done.returncode:
            raise RuntimeError(f"pg_basebackup: {done.stderr.strip()}")

    def fail_over(self) -> None:
        """Kill the server and promote the standby, which has the commits up to the backup; the DSN stays."""
        self.kill()
        shutil.rmtree(self._own_folder / "data")
        (self._own_folder / "standby").rename(self._own_folder / "data")
        (self._own_folder / "data" / "standby.signal").touch()
        (self._own_folder / "data" / "postmaster.pid").unlink(missing_ok=True)
        self.start()
        self.execute("SELECT pg_promote()")

    @property
    def _own_folder(self) -> Path:
        if self._folder is None:
            raise RuntimeError(
                f"The server of {DSN_VARIABLE} cannot be stopped or started; use postgres(name) instead."
            )
        return self._folder

    def _wait_until_ended(self) -> None:
        wait_for(lambda: not self.is_running(), "PostgreSQL to end")


_servers: dict[str, PostgresServer] = {}
_uses: dict[str, tuple[int, IO[str]]] = {}


def postgres(name: str = SHARED) -> PostgresServer:
    """Return the running server of that name. It is stopped when the last process that uses it has ended."""
    if name not in _servers:
        dsn = os.environ.get(DSN_VARIABLE) if name == SHARED else None
        _servers[name] = _configured(dsn) if dsn and not _is_started_here(dsn) else _start_or_join(name)
    return _servers[name]


def leave(name: str = SHARED) -> None:
    """Stop using the server; if this was the last user, it has stopped when this returns."""
    _servers.pop(name, None)
    owner, use = _uses.pop(name, (None, None))
    if use is None or owner != os.getpid():  # a forked child shares the lock of its parent, and must not release it
        return
    folder = _folder(name)
    with use, suppress(BlockingIOError):
        fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)  # only the last user gets the lock
        if not is_held(folder / "server"):
            shutil.rmtree(folder / "data", ignore_errors=True)
        use.close()
        with suppress(TimeoutError):
            wait_for(lambda: not is_held(folder / "server"), "PostgreSQL to end", seconds=15)


@atexit.register
def _leave_all() -> None:
    for name in list(_servers):
        leave(name)


def _start_or_join(name: str) -> PostgresServer:
    folder = _folder(name)
    use = open_lock(folder / "users")
    try:
        fcntl.flock(use, fcntl.LOCK_SH)
        with locked(folder / "start"):
            if not is_held(folder / "server"):
                _stop_orphan(folder / "data")
                create_data_folder(folder / "data")
                _launch(folder, port=None)
    except BaseException:
        use.close()
        raise
    _uses[name] = (os.getpid(), use)
    return PostgresServer(_state(folder)["dsn"], folder)


def _configured(dsn: str) -> PostgresServer:
    server = PostgresServer(dsn)
    try:
        server.execute("SELECT 1")
    except RuntimeError as error:
        raise ServerMissing(f"{error}\nThe server that {DSN_VARIABLE} names does not answer.\n{FIX}") from None
    return server


def _is_started_here(dsn: str) -> bool:
    folder = _folder(SHARED)
    return is_held(folder / "server") and urlsplit(_state(folder)["dsn"]).netloc == urlsplit(dsn).netloc


# --- locks and state


def _state(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / "state.json").read_text())
    return state


def _folder(name: str) -> Path:
    return folder_for_all(folder_for_all(base() / "servers") / name)


# --- processes


def _launch(folder: Path, port: int | None) -> None:
    """Start a supervisor, which starts the server; return when the server is ready."""
    for _ in range(5):
        failure = run_in_background("tests.servers", "serve", str(folder), str(port or free_port())).removesuffix(
            "ready"
        )
        if not failure:
            return
        failure += (folder / "log").read_text(errors="replace")[-2000:]
        if port or "Address already in use" not in failure:
            raise ServerMissing(f"PostgreSQL did not start: {failure}\n{FIX}")
    raise ServerMissing("PostgreSQL found no free port five times in a row.")


def _serve(folder: Path, port: int) -> None:
    """Run the supervisor: start the server, print "ready", and stop the server when no process uses it."""
    running = open_lock(folder / "server")
    fcntl.flock(running, fcntl.LOCK_EX)
    settings = [part for name, value in SETTINGS.items() for part in ("-c", f"{name}={value}")]
    command = [str(programs() / "postgres"), "-D", str(folder / "data"), "-p", str(port), *settings]
    with (folder / "log").open("w") as log:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=environment(), **server_user()
        )
    dsn = f"postgresql://postgres:{password()}@127.0.0.1:{port}/postgres"
    state = folder / "state.json"
    state.touch(mode=0o600)
    state.write_text(json.dumps({"pid": child.pid, "port": port, "dsn": dsn}))
    wait_for(lambda: child.poll() is not None or _is_ready(folder / "data", child.pid), "PostgreSQL to be ready")
    if child.poll() is not None:
        print(f"it exited with code {child.returncode}", flush=True)
        return
    print("ready", flush=True)
    close_output()
    users = open_lock(folder / "users")
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


def _hold() -> None:
    """Print the addresses of the shared servers, and use them until this process is terminated."""
    addresses = [postgres().dsn(), valkey().url(), valkey_cluster().url()]
    kept = open_lock(_folder(SHARED) / "kept")
    with suppress(BlockingIOError):
        fcntl.flock(kept, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept.truncate(0)
        print(os.getpid(), file=kept, flush=True)
        print(*addresses, sep="\n", flush=True)
        close_output()
        while True:
            signal.pause()
    print(*addresses, sep="\n", flush=True)


def hold() -> str:
    """Keep the shared servers running until `release`; return their addresses, one a line."""
    if not (addresses := run_in_background("tests.servers", "hold")):
        raise ServerMissing(f"The servers did not start.\n{FIX}")
    return addresses


def release() -> bool:
    """Undo `hold`; return False if it was not called. The servers stop once no other process uses them."""
    folder = _folder(SHARED)
    if not is_held(folder / "kept"):
        return False
    os.kill(int((folder / "kept").read_text()), signal.SIGTERM)
    with suppress(TimeoutError):
        wait_for(lambda: not is_held(folder / "server"), "PostgreSQL to end", seconds=10)
    return True


def _is_ready(data: Path, pid: int) -> bool:
    """True if the pid file says that the postmaster accepts connections, as pg_ctl checks it."""
    with suppress(OSError):
        lines = (data / "postmaster.pid").read_text().splitlines()
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() in ("ready", "standby")
    return False


def _stop_orphan(data: Path) -> None:
    """Stop a server whose supervisor was killed."""
    with suppress(OSError, ValueError, IndexError):
        pid = int((data / "postmaster.pid").read_text().splitlines()[0])
        if str(data) in command_line(pid):
            for kind in (signal.SIGQUIT, signal.SIGKILL):
                os.kill(pid, kind)
                with suppress(TimeoutError):
                    wait_for(lambda: not is_alive(pid), "an orphaned PostgreSQL to end", seconds=5)
                    return


def main(command: str, *arguments: str) -> None:
    """Run a command: `up` and `down` for developers, `serve` and `hold` as background processes of this module."""
    match command:
        case "up":
            print(hold())
        case "down":
            print("stopped" if release() else "no server was up")
        case "serve":
            detach()
            _serve(Path(arguments[0]), int(arguments[1]))
        case "hold":
            detach()
            _hold()
        case _:
            sys.exit(f"no such command: {command}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ServerMissing as missing:
        sys.exit(str(missing))
