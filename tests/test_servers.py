"""The test servers: shared by processes, stoppable, and stopped when no process uses them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import postgres_install, processes, servers
from tests.servers import PostgresServer, ServerMissing, leave, postgres

pytestmark = pytest.mark.slow

JOIN = (
    "import sys; from tests.servers import postgres; print(postgres(sys.argv[1]).dsn(), flush=True); sys.stdin.read()"
)


@pytest.fixture
def name() -> Iterator[str]:
    name = f"own-{os.environ.get('PYTEST_XDIST_WORKER', 'main')}"
    yield name
    leave(name)


@pytest.fixture
def own(name: str) -> PostgresServer:
    return postgres(name)


def test_the_test_server_has_the_durability_settings_of_production(own: PostgresServer) -> None:
    shown = {setting: own.execute(f"SHOW {setting}") for setting in ("fsync", "synchronous_commit", "max_connections")}

    assert shown == {"fsync": "on", "synchronous_commit": "on", "max_connections": "200"}
    assert own.execute("SELECT inet_server_addr()") == "127.0.0.1"


def test_a_database_is_copied_from_a_template_that_is_prepared_once(own: PostgresServer) -> None:
    prepared: list[str] = []

    def prepare(dsn: str) -> None:
        prepared.append(dsn)
        own.execute("CREATE TABLE note (text text)", "ready_raw")

    for name in ("first", "second"):
        assert own.create_database(name, own.template("ready", prepare)) == own.dsn(name)
        own.execute("INSERT INTO note VALUES ('hello')", name)

    assert prepared == [own.dsn("ready_raw")]
    own.empty_database("first")
    assert own.execute("SELECT count(*) FROM note", "first") == "0"
    assert own.execute("SELECT count(*) FROM note", "second") == "1"
    own.empty_database("second", keep=("note",))
    assert own.execute("SELECT count(*) FROM note", "second") == "1"


@pytest.mark.parametrize("end", [PostgresServer.stop, PostgresServer.kill])
def test_committed_rows_survive_a_stop_or_kill_and_a_new_start(own: PostgresServer, end: object) -> None:
    own.execute("CREATE TABLE note AS SELECT 'hello' AS text")

    assert callable(end)
    end(own)
    with pytest.raises(RuntimeError, match="[Cc]onnection refused"):
        own.execute("SELECT 1")
    own.start()

    assert own.execute("SELECT text FROM note") == "hello"


def test_a_restart_keeps_the_address(own: PostgresServer) -> None:
    before = own.dsn()

    own.restart("immediate")

    assert (own.dsn(), own.execute("SELECT 1")) == (before, "1")


def test_processes_share_a_server_and_the_last_one_to_leave_stops_it(name: str, own: PostgresServer) -> None:
    with _other_process(name) as other:
        assert other.stdout is not None
        assert other.stdout.readline().strip() == own.dsn()
        leave(name)
        assert own.is_running()

        other.kill()

    processes.wait_for(lambda: not own.is_running(), "the supervisor to notice", seconds=20)
    processes.wait_for(lambda: not _data(name).exists(), "the data to be removed", seconds=20)


def test_a_server_whose_supervisor_was_killed_is_stopped_and_replaced(name: str, own: PostgresServer) -> None:
    own.execute("CREATE TABLE note (text text)")
    postmaster = servers._state(_data(name).parent)["pid"]
    os.kill(_parent(postmaster), signal.SIGKILL)
    processes.wait_for(lambda: not own.is_running(), "the supervisor to be gone")
    assert processes.is_alive(postmaster)

    with _other_process(name) as other:
        assert other.stdout is not None
        dsn = other.stdout.readline().strip()
        assert not processes.is_alive(postmaster)
        assert PostgresServer(dsn).execute("SELECT count(*) FROM pg_tables WHERE tablename = 'note'") == "0"
        other.kill()


def test_a_missing_installation_fails_with_a_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(postgres_install.BIN_VARIABLE, str(tmp_path))
    with pytest.raises(ServerMissing, match="Fix: run ./dev test"):
        postgres("missing")


def test_a_configured_server_that_does_not_answer_fails_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_servers", {})
    monkeypatch.setenv(postgres_install.DSN_VARIABLE, "postgresql://postgres@127.0.0.1:1/postgres")
    with pytest.raises(ServerMissing, match="FF_TEST_PG_DSN names does not answer"):
        postgres()


def test_a_configured_server_cannot_be_stopped(monkeypatch: pytest.MonkeyPatch, own: PostgresServer) -> None:
    monkeypatch.setattr(servers, "_servers", {})
    monkeypatch.setenv(postgres_install.DSN_VARIABLE, own.dsn())

    server = postgres()

    assert server.execute("SELECT 1") == "1"
    with pytest.raises(RuntimeError, match="cannot be stopped"):
        server.stop()


def _other_process(name: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", JOIN, name], cwd=postgres_install.ROOT, stdin=-1, stdout=subprocess.PIPE, text=True
    )


def _data(name: str) -> Path:
    return servers._folder(name) / "data"


def _parent(pid: int) -> int:
    return next(above for number, above, _ in processes.processes() if number == pid)
