"""The promises of the files at the top of the tree."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib.metadata import metadata
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flowfabric.cli import app

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_lock_names_no_address_and_hashes_everything() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"\n(?=\S)", lock.strip())

    assert "://" not in lock
    assert "--index" not in lock
    assert "--find-links" not in lock
    assert [entry for entry in entries if "==" not in entry or "--hash=sha256:" not in entry] == []


def test_the_lock_holds_every_direct_dependency(project: dict[str, Any]) -> None:
    locked = set(re.findall(r"^([\w.-]+)(?=\[|==)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    extras = chain.from_iterable(project["project"]["optional-dependencies"].values())
    wanted = [*project["project"]["dependencies"], *extras, *project["dependency-groups"]["dev"]]

    assert {re.split(r"[\[>=<~!; ]", name)[0] for name in wanted} - locked == set()


def test_every_dependency_says_what_it_is_for() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    named = [line for line in lines if re.match(r'    "[\w.\[\]-]+>=', line)]

    assert len(named) > 20
    assert [line for line in named if not re.search(r'",\s+# \w', line)] == []


EXTRAS = {"postgres", "valkey", "server", "client", "secrets", "otel"}


def test_the_extras_exist(project: dict[str, Any]) -> None:
    assert set(project["project"]["optional-dependencies"]) == EXTRAS
    assert set(metadata("flowfabric").get_all("Provides-Extra", [])) == EXTRAS


def test_ci_runs_what_developers_run() -> None:
    script = ROOT / ".ci" / "run"

    assert script.read_text().rstrip().endswith("exec ./dev test")
    assert os.access(script, os.X_OK)
    assert os.access(ROOT / "dev", os.X_OK)


def test_the_readme_names_the_two_commands_and_the_licence_is_whole() -> None:
    readme = (ROOT / "README.md").read_text()

    assert "./dev demo" in readme
    assert "./dev test" in readme
    assert "END OF TERMS AND CONDITIONS" in (ROOT / "LICENSE").read_text()


def test_dev_lists_its_commands_without_installing_anything(tmp_path: Path) -> None:
    script = tmp_path / "dev"
    script.write_text((ROOT / "dev").read_text())

    listed = subprocess.run(["python3", str(script)], capture_output=True, text=True, check=True).stdout

    assert re.findall(r"^  (\w+) ", listed, re.MULTILINE) == [
        "demo", "test", "check", "fix", "bench", "soak", "faults", "up", "down", "lock", "py",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == [script]


def test_files_made_by_tools_are_not_kept() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()

    assert {"/.dev/", "__pycache__/", "uv.lock", "pylock*.toml", "*.db", "*.db-*"} <= set(ignored)


def test_ff_tells_its_version(project: dict[str, Any]) -> None:
    answer = CliRunner().invoke(app, ["version"])

    assert answer.exit_code == 0
    assert answer.output == f"flowfabric {project['project']['version']}\n"


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()

    assert [page.name for page in sorted(folder.glob("[0-9]*.md")) if f"({page.name})" not in index] == []
