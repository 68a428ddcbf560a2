"""The README is short and correct."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.docs.pages import blocks
from tests.postgres_install import ROOT

README = ROOT / "README.md"


def test_the_readme_is_short() -> None:
    text = README.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)

    assert len(prose.split()) <= 500
    assert len(text.splitlines()) <= 120


def test_the_python_of_the_readme_runs_in_the_tests() -> None:
    """It is one block, between the marks that tests/sdk/test_readme.py uses."""
    [block] = blocks(README)

    assert f"<!-- durable:begin -->\n```python\n{block.code}```\n<!-- durable:end -->" in README.read_text()


@pytest.mark.parametrize("store", ["sqlite", "valkey"])
def test_the_commands_of_the_readme_work_as_written(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The app and `ff` use the same store by default, and that of `FLOWFABRIC_URL` if it is set."""
    [block] = blocks(README)
    (tmp_path / "shop.py").write_text(block.code)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("FF_", "FLOWFABRIC_"))}
    environ |= {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    if store == "valkey":
        environ["FLOWFABRIC_URL"] = request.getfixturevalue("valkey_url")

    def ff(*arguments: str) -> str:
        command = [sys.executable, "-m", "flowfabric.cli", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True).stdout

    commands = re.findall(r"^ff (.*?)(?:  +#.*)?$", README.read_text(), re.MULTILINE)
    assert [arguments.split()[0] for arguments in commands] == [
        "worker",
        "submit",
        "approvals",
        "signal",
        "explain",
        "result",
    ]
    work, submit, approvals, signal, explain, result = (shlex.split(arguments) for arguments in commands)
    run = ff(*submit).strip()
    worker = subprocess.Popen([sys.executable, "-m", "flowfabric.cli", *work], cwd=tmp_path, env=environ)
    try:
        until = time.monotonic() + 60
        while not (links := re.findall(r"http\S+", ff(*approvals))):
            assert time.monotonic() < until
        assert "for an answer to approve" in ff(*(run if word == "ID" else word for word in explain))
        for link in links:
            assert ff(*(link if word == "LINK" else word for word in signal)).startswith("✓ voted")
        assert ff(*(run if word == "ID" else word for word in result)) == '"paid for 3 apples"'
    finally:
        worker.terminate()
        worker.wait(60)
    assert [path.name for path in tmp_path.glob("*.db")] == (["flowfabric.db"] if store == "sqlite" else [])


def test_the_commands_named_in_the_readme_exist() -> None:
    from typer.main import get_command

    from flowfabric.cli import app

    named = set(re.findall(r"\bff (\w+)", README.read_text()))

    assert named >= {"worker", "approvals", "explain", "signal", "result"}
    assert named <= set(get_command(app).commands)  # type: ignore[attr-defined]
