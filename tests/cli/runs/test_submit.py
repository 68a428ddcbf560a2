"""`ff submit`: tasks are submitted with their options, and executions without a task directly."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowfabric import Engine
from tests.cli.terminal import Terminal

CODE = """
from dataclasses import dataclass
from flowfabric import Fabric, Retry

app = Fabric("sqlite:///own.db")

@dataclass
class Mail:
    to: str

@app.task(lane="mail", retry=Retry(max=2), needs={"smtp"}, priority=5)
async def send(mail: Mail, copies: int = 1) -> str:
    return mail.to * copies
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A module with an app in the current folder, with another name for each test."""
    monkeypatch.chdir(tmp_path)
    name = f"shop_{abs(hash(request.node.nodeid))}"
    (tmp_path / f"{name}.py").write_text(CODE)
    return name


def test_a_task_is_submitted_with_its_own_options(ff: Terminal, module: str) -> None:
    created = ff.document("submit", f"{module}:send", "--payload", '{"mail": {"to": "ana"}}', "--tag", "app.order=7")

    found = ff.document("show", created["execution_id"])
    assert created["created"]
    assert found["execution_kind"] == f"{module}.send"
    assert (found["execution"]["lane_id"], found["execution"]["tags"]["app.order"]) == ("mail", "7")

    async def register_worker_without_smtp(engine: Engine) -> None:
        await engine.register_worker(
            worker_instance_id="w-1", worker_id="w", lanes={"mail"}, capabilities=(), liveness_ttl_ms=60_000
        )

    ff.engine(register_worker_without_smtp)
    assert "smtp" in ff.document("explain", created["execution_id"])["sentence"], (
        "the capabilities of the task are required"
    )
    assert module in ff.stdout("ls")
    assert ff.document("ls")["executions"][0]["execution_kind"] == f"{module}.send"


def test_options_override_those_of_the_task_and_a_key_returns_the_same_execution(ff: Terminal, module: str) -> None:
    arguments = ("submit", f"{module}:send", "--payload", '{"mail": {"to": "ana"}, "copies": 2}', "--key", "order-7")
    first = ff.document(*arguments, "--lane", "bulk", "--delay", "1h")
    again = ff.document(*arguments)

    assert again == {"execution_id": first["execution_id"], "created": False}
    found = ff.document("show", first["execution_id"])["execution"]
    assert (found["lane_id"], found["public_state"]) == ("bulk", "delayed")


def test_the_store_of_the_app_is_the_default(module: str, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flowfabric.cli import app

    answer = CliRunner().invoke(app, ["submit", f"{module}:send", "--payload", '{"mail": {"to": "ana"}}'])

    assert answer.exit_code == 0, answer.stderr
    assert answer.stdout.strip() in Terminal(f"sqlite:///{tmp_path}/own.db").stdout("ls")


@pytest.mark.parametrize(
    ("target", "payload", "text"),
    [
        ("send", '{"mail": {"to": 3}}', "mail: Expected `str`, got `int`"),
        ("send", "{}", "missing a required argument: 'mail'"),
        (
            "send",
            '{"mail": {"to": "ana"}, "copy": 2}',
            "copy: ",
        ),
        ("send", "[1]", "--payload: Expected `object`, got `array`; a task needs an object of its parameters"),
        ("send", "{", "--payload: "),
        ("app", "{}", "has no task named 'app'; it has send"),
        ("", "{}", "say which task of"),
    ],
)
def test_invalid_input_is_refused_and_nothing_is_created(
    ff: Terminal, module: str, target: str, payload: str, text: str
) -> None:
    assert text in ff.refuses("submit", f"{module}:{target}", "--payload", payload)
    assert ff.document("ls")["executions"] == []


def test_an_option_that_the_task_defines_is_refused(ff: Terminal, module: str) -> None:
    answer = ff.run("submit", f"{module}:send", "--policy", "{}")

    assert answer.exit_code == 2
    assert "leave --policy out" in answer.stderr


def test_a_missing_module_is_reported(ff: Terminal) -> None:
    assert "there is no module 'nowhere' here" in ff.refuses("submit", "nowhere:send")
