"""The commands, with tables and with JSON."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flowfabric.cli import app
from flowfabric.cli.output import STATES
from flowfabric.cli.stores import redact_url, resolve_store_url
from flowfabric.errors import InvalidInput
from flowfabric.model.states import PublicState
from tests.cli.terminal import Terminal


def test_migrate_reports_the_schema_versions_before_and_after(tmp_path: Path) -> None:
    ff = Terminal(f"sqlite:///{tmp_path}/new.db")

    first, again = ff.document("migrate"), ff.document("migrate")

    assert first["from"] == 0 < first["to"]
    assert (again["from"], again["to"]) == (first["to"], first["to"])
    assert f"already at schema version {first['to']}" in ff.stdout("migrate")


def test_backup_copies_the_store_to_a_new_file(tmp_path: Path) -> None:
    store, copy = f"sqlite:///{tmp_path}/ff.db", tmp_path / "copy.db"
    CliRunner().invoke(app, ["migrate", "--store", store])

    done = CliRunner().invoke(app, ["backup", str(copy), "--store", store])
    assert done.output == f"✓ {copy}: {copy.stat().st_size} bytes, integrity ok\n"
    assert CliRunner().invoke(app, ["doctor", "--store", f"sqlite:///{copy}"]).exit_code == 0

    again = CliRunner().invoke(app, ["backup", str(copy), "--store", store])
    assert again.exit_code == 1
    assert "exists already; name a new file" in again.output


def test_submit_prints_the_id_and_show_prints_the_execution(ff: Terminal) -> None:
    execution = ff.submit("--lane", "mail", "--kind", "welcome", "--payload", "hällo", "--tag", "tenant.name=acme")

    found = ff.document("show", execution)
    read = ff.engine(lambda engine: engine.read_execution_context(execution))

    assert found["execution"]["public_state"] == "waiting"
    assert found["execution"]["lane_id"] == "mail"
    assert found["execution"]["tags"] == {"tenant.name": "acme"}
    assert (found["attempts"], found["lease_history"], found["result"]) == ([], [], None)
    assert (read.execution_kind, read.input_payload) == ("welcome", "hällo".encode())


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_submit_reads_a_payload_as_bytes_from_a_file_or_stdin(ff: Terminal, tmp_path: Path, source: str) -> None:
    blob = bytes(range(256))
    (tmp_path / "blob").write_bytes(blob)

    name = str(tmp_path / "blob") if source == "file" else "-"
    execution = ff.stdout("submit", "--payload-file", name, stdin=blob if source == "stdin" else None).strip()

    assert ff.engine(lambda engine: engine.read_execution_context(execution)).input_payload == blob


def test_a_second_submit_with_the_same_key_returns_the_first_execution(ff: Terminal) -> None:
    policy = ("--policy", '{"dedup_window_ms": 60000}')
    first = ff.document("submit", "--key", "invoice-7", *policy)
    again = ff.document("submit", "--key", "invoice-7", *policy)

    assert first["created"]
    assert again == {"execution_id": first["execution_id"], "created": False}
    assert len(ff.document("ls")["executions"]) == 1


def test_a_submit_with_a_delay_creates_a_delayed_execution(ff: Terminal) -> None:
    execution = ff.submit("--delay", "1h30m")

    found = ff.document("show", execution)["execution"]

    assert found["public_state"] == "delayed"
    until = int(re.fullmatch(r"delayed until (\d+)", found["blocking_detail"])[1])  # type: ignore[index]
    assert until - found["created_at"] == pytest.approx(90 * 60 * 1000, abs=5000)


def test_ls_filters_and_paginates(ff: Terminal) -> None:
    mail = {ff.submit("--lane", "mail", "--tag", "tenant.name=acme") for _ in range(3)}
    other = ff.submit("--namespace", "tests", "--delay", "1h")

    def ids(*filters: str) -> set[str]:
        return {one["execution_id"] for one in ff.document("ls", *filters)["executions"]}

    assert ids() == mail | {other}
    assert ids("--lane", "mail") == mail
    assert ids("--namespace", "tests") == {other}
    assert ids("--state", "delayed") == {other}
    assert ids("--tag", "tenant.name=acme") == mail
    assert ids("--tag", "tenant.name=nobody") == set()

    seen: list[str] = []
    page = ff.document("ls", "--limit", "1")
    while page["next_cursor"]:
        seen += [one["execution_id"] for one in page["executions"]]
        page = ff.document("ls", "--limit", "1", "--cursor", page["next_cursor"])
    seen += [one["execution_id"] for one in page["executions"]]
    assert seen[0] == other
    assert set(seen[1:]) == mail
    assert ids("--task", "task") == mail | {other}
    assert ids("--where", "lane=mail tag=tenant.name=acme", "--where", "state=waiting,failed since=1h") == mail
    assert ids("--since", "2026-01-01", "--where", "before=1h") == set()


def test_ls_and_show_print_tables(ff: Terminal) -> None:
    assert ff.stdout("ls") == "No executions.\n"
    execution = ff.submit("--policy", '{"retry_policy": {"max_retries": 1}}')

    ff.end_one(reason="flaky", category="transient")
    listed, shown = ff.stdout("ls"), ff.stdout("show", execution)

    assert re.search(rf"{re.escape(execution)} +task +delayed +default +1 ", listed)
    assert "retry backoff until" in listed
    assert re.search(r"0 +initial +ended_failure +w-1 +1 .* flaky", shown)
    assert re.search(r"acquired +1 +w-1", shown)
    assert re.search(r"released +1 +w-1 +failed_retry_scheduled", shown)
    assert f"ff ls --cursor '{execution}'" not in listed


def test_ls_shows_the_first_line_of_a_failure(ff: Terminal) -> None:
    execution = ff.submit("--policy", '{"retry_policy": {"max_retries": 0}}', "--payload", "what it was given")

    ff.end_one(reason="ValueError: no stock\nTraceback (most recent call last)")
    listed, shown = ff.stdout("ls", "--state", "failed"), ff.stdout("show", execution)

    assert "ValueError: no stock" in listed
    assert "Traceback" not in listed
    assert "what it was given" in shown


def test_a_filter_is_cancelled_after_a_preview(ff: Terminal) -> None:
    mail = [ff.submit("--lane", "mail") for _ in range(3)]
    other = ff.submit("--lane", "print")

    preview = ff.document("cancel", "--where", "lane=mail", "--dry-run")
    refused = ff.refuses("cancel", "--where", "lane=mail")
    done = ff.document("cancel", "--where", "lane=mail", "--yes", "--reason", "wrong price")
    again = ff.document("replay", "--where", "lane=mail", "--yes", "--most", "2")

    assert (preview["count"], {one["execution_id"] for one in preview["sample"]}) == (3, set(mail))
    assert "pass --yes" in refused
    assert (done["changed"], done["state"], done["reason"]) == (3, "completed", "wrong price")
    assert again["changed"] == 2
    assert ff.document("show", other)["execution"]["public_state"] == "waiting"


def test_show_prints_a_result_as_text_or_its_size(ff: Terminal) -> None:
    texts = {ff.submit("--lane", lane): result for lane, result in (("a", b'{"ok":true}'), ("b", b"\xff\x00"))}

    for lane, result in zip("ab", texts.values(), strict=True):
        ff.end_one(lane, result=result)
    first, second = texts

    assert ff.document("show", first)["result"] == {"bytes": 11, "text": '{"ok":true}'}
    assert ff.document("show", second)["result"] == {"bytes": 2, "base64": "/wA="}
    assert '{"ok":true}' in ff.stdout("show", first)
    assert "2 bytes" in ff.stdout("show", second)


def test_a_cancelled_execution_can_be_replayed(ff: Terminal) -> None:
    execution = ff.submit()

    assert ff.document("cancel", execution, "--reason", "not needed") == {
        "execution_id": execution,
        "public_state": "cancelled",
    }
    assert ff.stdout("cancel", execution) == f"✓ {execution} is cancelled\n"
    assert ff.document("replay", execution)["public_state"] == "waiting"
    assert ff.document("show", execution)["execution"]["public_state"] == "waiting"


def test_doctor_reports_a_healthy_store(ff: Terminal) -> None:
    report = ff.document("doctor")

    assert report["healthy"]
    assert [check["check"] for check in report["checks"]] == [
        *("store", "schema", "latency", "clock", "queues", "held", "keystore")
    ]
    assert "no signing key yet" in report["checks"][-1]["says"]
    assert ff.stdout("doctor").count("✓") == 7


def test_doctor_names_the_signing_key(ff: Terminal) -> None:
    ff.engine(lambda engine: engine.seed_waitpoint_hmac_secret("k1", "ab" * 32))

    assert "k1 signs" in ff.document("doctor")["checks"][-1]["says"]


@pytest.mark.parametrize(
    ("named", "environ", "chosen"),
    [
        ("sqlite:///a.db", {"FLOWFABRIC_URL": "sqlite:///b.db"}, "sqlite:///a.db"),
        (None, {"FLOWFABRIC_URL": "sqlite:///b.db", "FF_BACKEND": "postgres"}, "sqlite:///b.db"),
        (None, {"FF_BACKEND": "Postgres", "FF_POSTGRES_URL": "postgresql://h/d"}, "postgresql://h/d"),
        (None, {"FF_BACKEND": "sqlite", "FF_SQLITE_PATH": "/var/ff.db"}, "sqlite:////var/ff.db"),
        (None, {"FF_BACKEND": "sqlite"}, "memory://"),
        (None, {"FF_BACKEND": "sqlite", "FF_SQLITE_PATH": "file:x?mode=memory&cache=shared"}, "memory://"),
        (None, {"FF_BACKEND": ""}, "sqlite:///flowfabric.db"),
        (None, {}, "sqlite:///flowfabric.db"),
    ],
)
def test_the_store_comes_from_the_option_else_from_the_environment(
    named: str | None, environ: dict[str, str], chosen: str
) -> None:
    assert resolve_store_url(named, environ) == chosen


def test_a_postgres_backend_without_a_url_is_refused() -> None:
    with pytest.raises(InvalidInput, match="FF_POSTGRES_URL: must be set when FF_BACKEND is postgres"):
        resolve_store_url(None, {"FF_BACKEND": "postgres"})


def test_an_unknown_backend_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_BACKEND", "oracle")
    monkeypatch.delenv("FLOWFABRIC_URL", raising=False)

    answer = CliRunner().invoke(app, ["serve"])

    assert answer.exit_code == 2
    assert "FF_BACKEND: 'oracle' is no known store" in " ".join(answer.stderr.replace("│", " ").split())


def test_passwords_are_redacted_from_urls() -> None:
    assert redact_url("postgresql://ann:s3cret@host/db") == "postgresql://ann:…@host/db"
    assert redact_url("postgresql://ann@host/db") == "postgresql://ann@host/db"
    assert redact_url("sqlite:///a@b.db") == "sqlite:///a@b.db"


@pytest.mark.parametrize("page", [(), ("admin",), ("bench",)])
def test_the_list_of_commands_truncates_no_sentence(page: tuple[str, ...]) -> None:
    output = CliRunner().invoke(app, [*page, "--help"]).stdout

    assert output.partition("Commands:")[2]
    assert "..." not in output.partition("Commands:")[2]


def test_help_lists_the_commands_and_imports_neither_engine_nor_rich() -> None:
    script = (
        "import sys; from flowfabric.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print({'rich', 'asyncio', 'msgspec', 'apsw', 'asyncpg', 'fastapi', 'flowfabric.engine'} & set(sys.modules))"
    )

    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    assert output.splitlines()[-1] == "set()"
    commands = re.findall(r"^  (\w+)  ", output.partition("Commands:")[2], re.MULTILINE)
    assert commands == [
        *("version", "migrate", "doctor", "backup", "ls", "show", "find", "cancel", "replay"),
        *("release", "unpin", "patches", "priority", "submit", "result", "explain", "tail", "signal", "approvals"),
        *("send", "facts", "workers", "lanes", "budgets", "worker", "serve", "dev", "ui", "demo", "admin", "bench"),
        "schedules",
    ]


def test_the_offered_states_are_the_public_states() -> None:
    assert set(STATES) == {state.value for state in PublicState if state is not PublicState.RESUMABLE}


def test_the_shell_completes_states() -> None:
    environ = {"_FF_COMPLETE": "complete_bash", "COMP_WORDS": "ff ls --state ca", "COMP_CWORD": "3"}

    answer = CliRunner().invoke(app, env=environ, prog_name="ff")

    assert answer.stdout.split() == ["cancelled"]
