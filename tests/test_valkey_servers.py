"""The Valkey test servers: shared by processes, killable, and killed when no process uses them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import processes, valkey_servers
from tests.postgres_install import ROOT, ServerMissing
from tests.valkey_servers import ReplyFault, ValkeyServers, leave, valkey, valkey_cluster

pytestmark = pytest.mark.slow

JOIN = """
import sys
from tests.valkey_servers import valkey
print(valkey(sys.argv[1]).url(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name() -> str:
    return f"own-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"


@pytest.fixture
def own(name: str) -> Iterator[ValkeyServers]:
    servers = valkey(name)
    yield servers
    leave(servers)


def test_the_test_server_has_the_durability_settings_of_production(own: ValkeyServers) -> None:
    (node,) = own.nodes

    names = ("appendonly", "appendfsync", "maxmemory-policy")
    values = [node.execute("CONFIG", "GET", name) for name in names]
    assert values == [["appendonly", "yes"], ["appendfsync", "everysec"], ["maxmemory-policy", "noeviction"]]


def test_data_and_functions_survive_a_kill_and_a_new_start(own: ValkeyServers) -> None:
    (node,) = own.nodes
    node.execute("SET", "note", "hello")
    node.execute("FUNCTION", "LOAD", "#!lua name=kept\nredis.register_function('kept', function() return 1 end)")

    node.kill()
    with pytest.raises(ConnectionRefusedError):
        node.execute("PING")
    node.start()

    assert (node.execute("GET", "note"), node.execute("FCALL", "kept", 0)) == ("hello", 1)


def test_a_paused_node_is_silent_and_continues_afterwards(own: ValkeyServers) -> None:
    (node,) = own.nodes
    node.pause()
    with pytest.raises(TimeoutError):
        node.execute("PING", timeout_s=0.2)
    node.resume()

    assert node.execute("PING") == "PONG"


def test_emptying_deletes_the_keys_of_one_database_and_keeps_functions(own: ValkeyServers) -> None:
    (node,) = own.nodes
    node.execute("FUNCTION", "LOAD", "#!lua name=kept\nredis.register_function('kept', function() return 1 end)")
    node.execute("SET", "note", "hello")

    own.empty(1)
    assert node.execute("DBSIZE") == 1
    own.empty(0)
    assert (node.execute("DBSIZE"), node.execute("FCALL", "kept", 0)) == (0, 1)


def test_processes_share_a_server_with_a_database_each_and_the_last_one_to_leave_ends_it(
    name: str, own: ValkeyServers
) -> None:
    (node,) = own.nodes
    with _other_process(name) as other:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == own.url()
        leave(own)
        assert node.is_running()

        other.kill()

    processes.wait_for(lambda: not node.is_running(), "the supervisor to notice", seconds=20)
    processes.wait_for(lambda: not node.folder.exists(), "the data to be removed", seconds=20)


def test_a_server_whose_supervisor_was_killed_is_killed_and_replaced(name: str, own: ValkeyServers) -> None:
    (node,) = own.nodes
    node.execute("SET", "note", "hello")
    pid = node.pid()
    assert pid is not None
    os.kill(next(above for number, above, _ in processes.processes() if number == pid), signal.SIGKILL)
    processes.wait_for(lambda: not processes.is_held(own.folder / "server"), "the supervisor to be gone")
    assert node.is_running()

    with _other_process(name) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert not processes.is_alive(pid)
        assert ValkeyServers(own.folder).nodes[0].execute("DBSIZE") == 0
        other.kill()


def test_a_cluster_has_three_primaries_with_a_replica_each_that_serve_all_slots() -> None:
    servers = valkey_cluster()

    servers.wait_until_healthy()
    assert (len(servers.nodes), len(servers.primaries())) == (6, 3)
    for node in servers.primaries():
        assert node.info("replication")["connected_slaves"] == "1"


def test_an_error_reply_is_raised(own: ValkeyServers) -> None:
    with pytest.raises(ReplyFault, match="unknown command"):
        own.nodes[0].execute("NONSENSE")


def test_a_missing_program_fails_with_a_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(valkey_servers.BIN_VARIABLE, str(tmp_path / "missing"))
    with pytest.raises(ServerMissing, match="Fix: run ./dev test"):
        valkey("missing")


def _other_process(name: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", JOIN, name], cwd=ROOT, stdin=-1, stdout=subprocess.PIPE, text=True)
