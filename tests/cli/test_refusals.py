"""Errors of `ff`: on stderr, with a hint, without a traceback, and nothing has changed."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest

from flowfabric import StoreUnavailable
from flowfabric.cli.output import hint_for
from tests.cli.terminal import Terminal

UNKNOWN = "{fp:1}:1a255fe9-f16a-4af0-8cb6-6085de2ea47d"


@pytest.mark.parametrize(
    ("arguments", "text", "hint"),
    [
        (("show", UNKNOWN), "execution_not_found", "`ff ls` shows which executions there are"),
        (("cancel", UNKNOWN), f"execution_id={UNKNOWN}", "`ff ls` shows which executions there are"),
        (("replay", UNKNOWN), f"execution_id={UNKNOWN}", "`ff ls` shows which executions there are"),
        (("explain", UNKNOWN), f"execution_id={UNKNOWN}", "`ff ls` shows which executions there are"),
        (("signal", UNKNOWN, "go"), f"execution_id={UNKNOWN}", "`ff ls` shows which executions there are"),
        (("show", "nonsense"), "'nonsense' is no id and no beginning of one", "an execution id looks like"),
        (("show", "{fp:x}:1a255fe9"), "'{fp:x}:1a255fe9' is no id and no beginning", "an execution id looks like"),
        (("show", "{fp:1}:zzz"), "'{fp:1}:zzz' is no id and no beginning", "an execution id looks like"),
        (("show", "1a255fe9"), "no id begins with '1a255fe9'", "`ff ls` shows which executions there are"),
        (("result", UNKNOWN), f"execution_id={UNKNOWN}", "`ff ls` shows which executions there are"),
        (("budgets", "nonsense"), "budget_id: not a UUID: 'nonsense'", "`ff budgets` shows which budgets there are"),
        (("ls", "--state", "sleepy"), "public_state: 'sleepy' is no state", "the states are waiting, delayed, "),
        (("ls", "--lane", "x" * 65), "lane_id: too long: 65 bytes", ""),
        (("ls", "--cursor", "nonsense"), "cursor: not one of a list of executions", ""),
        (("ls", "--since", "soon"), "since: 'soon' is no length of time", ""),
        (("cancel", "--where", "state=sleepy", "--yes"), "public_state: 'sleepy' is no state", "the states are"),
        (("submit", "--delay", "soon"), "delay: 'soon' is no length of time", ""),
        (("submit", "--tag", "Bad=1"), "invalid_tag_key: Bad", ""),
        (("submit", "--policy", "{"), "invalid_policy_json", ""),
        (("submit", "--lane", "x\ty"), "lane_id: non-printable byte at index 1", ""),
    ],
)
def test_a_refusal_is_printed_with_a_hint(ff: Terminal, arguments: tuple[str, ...], text: str, hint: str) -> None:
    error = ff.refuses(*arguments)

    assert error.startswith("ff: ")
    assert text in error
    assert (f"Hint: {hint}" in error) if hint else ("Hint" not in error)
    assert ff.document("ls")["executions"] == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("submit", "--payload", "a", "--payload-file", "b"), "give --payload or --payload-file, not both"),
        (("submit", "--payload-file", "/does/not/exist"), "No such file or directory"),
        (("submit", "--tag", "novalue"), "'novalue' is not KEY=VALUE"),
        (("submit", "--priority", "high"), "Invalid value for '--priority'"),
        (("ls", "--limit", "0"), "Invalid value for '--limit'"),
        (("ls", "--tag", "novalue"), "'novalue' is not KEY=VALUE"),
        (("show",), "Missing argument 'ID'"),
        (("bench", "throughput", "--jobs", "-1"), "Invalid value for '--jobs'"),
    ],
)
def test_a_wrong_option_is_a_usage_error(ff: Terminal, arguments: tuple[str, ...], text: str) -> None:
    answer = ff.run(*arguments)

    assert answer.exit_code == 2
    assert text in answer.stderr
    assert ff.document("ls")["executions"] == []


def test_a_completed_execution_cannot_be_cancelled(ff: Terminal) -> None:
    execution = ff.submit()

    ff.end_one()
    error = ff.refuses("cancel", execution)

    assert "execution_not_active" in error
    assert "Hint: it has ended already: `ff show` prints its outcome, `ff replay` runs it again" in error
    assert ff.document("show", execution)["execution"]["public_state"] == "completed"


def test_a_waiting_execution_cannot_be_replayed(ff: Terminal) -> None:
    execution = ff.submit()

    error = ff.refuses("replay", execution)

    assert "execution_not_terminal" in error
    assert "Hint: only an ended execution can be replayed" in error


@pytest.mark.parametrize("command", [("ls",), ("show", UNKNOWN), ("submit",), ("cancel", UNKNOWN), ("replay", UNKNOWN)])
def test_a_missing_store_is_not_created(tmp_path: Path, command: tuple[str, ...]) -> None:
    error = Terminal(f"sqlite:///{tmp_path}/missing.db").refuses(*command)

    assert f"there is no store at {tmp_path}/missing.db" in error
    assert "Hint: `ff migrate` makes or updates the store" in error
    assert list(tmp_path.iterdir()) == []


def test_a_store_with_a_newer_schema_is_refused(ff: Terminal, tmp_path: Path) -> None:
    db = apsw.Connection(str(tmp_path / "ff.db"))
    db.execute("insert into ff_schema_version (version, applied_at) values (999, 0)")
    db.close()

    for command in ("ls", "migrate", "submit"):
        error = ff.refuses(command)
        assert "schema_too_new" in error
        assert "Hint: update this installation" in error
    report = ff.run("doctor")
    assert report.exit_code == 1
    assert "✗ store" in report.stdout
    assert "pip install --upgrade flowfabric" in report.stdout


@pytest.mark.parametrize("command", [("ls",), ("migrate",), ("bench", "throughput")])
def test_an_unreachable_server_is_reported_with_a_hint(command: tuple[str, ...]) -> None:
    error = Terminal("postgresql://nobody:secret@127.0.0.1:1/none").refuses(*command)

    assert error.startswith("ff: transport: ")
    assert "Hint: is the address right and the server up? --store or FLOWFABRIC_URL names it" in error
    assert "secret" not in error


def test_doctor_reports_an_unreachable_server() -> None:
    answer = Terminal("postgresql://nobody:secret@127.0.0.1:1/none").run("doctor")

    assert answer.exit_code == 1
    assert "postgresql://nobody:…@127.0.0.1:1/none" in answer.stdout
    assert "✗ store" in answer.stdout
    assert "is the address right and the server up?" in answer.stdout
    assert "secret" not in answer.output


def test_a_wrong_password_has_a_hint() -> None:
    refused = StoreUnavailable("password authentication failed", backend="Postgres", source="auth")

    assert "are the user and the password in the address right" in (hint_for(refused) or "")


def test_a_file_that_is_no_database_is_reported_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "junk.db").write_bytes(b"this is something else" * 10)
    ff = Terminal(f"sqlite:///{tmp_path}/junk.db")
    for error in (ff.refuses("ls"), ff.run("doctor").stdout):
        assert "file is not a database" in error
        assert "is it the right file, and may you write to it" in error


def test_an_unknown_kind_of_store_is_refused() -> None:
    assert "'mysql' is no known store" in Terminal("mysql://example.org").refuses("ls")


def test_migrate_creates_a_store_once(tmp_path: Path) -> None:
    terminal = Terminal(f"sqlite:///{tmp_path}/new.db")

    assert ": created with schema version " in terminal.stdout("migrate")
    assert ": already at schema version " in terminal.stdout("migrate")


def test_an_invalid_budget_id_is_reported_once(ff: Terminal) -> None:
    error = ff.refuses("budgets", "xyz")

    assert error.count("UUID") == 1
    assert "`ff budgets` shows which budgets there are" in error


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("127.0.0.1:1", "ff: transport: 127.0.0.1:1: connection refused"),
        ("no-such-host.invalid", "ff: transport: the name of the host could not be resolved: "),
    ],
)
def test_an_unreachable_server_is_reported_with_host_and_reason_without_errno(address: str, text: str) -> None:
    error = Terminal(f"postgresql://nobody:secret@{address}/none").refuses("ls")

    assert error.startswith(text)
    assert "Errno" not in error
    assert "secret" not in error
    assert "Hint: is the address right and the server up?" in error
