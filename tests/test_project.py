"""The files at the top of the tree."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib.machinery import SourceFileLoader
from importlib.metadata import metadata
from importlib.util import module_from_spec, spec_from_loader
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from flowfabric.cli import app

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_lock_contains_no_url_and_hashes_every_package() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"\n(?=\S)", lock.strip())

    assert "://" not in lock
    assert "--index" not in lock
    assert "--find-links" not in lock
    assert [entry for entry in entries if "==" not in entry or "--hash=sha256:" not in entry] == []


def test_the_lock_contains_every_direct_dependency(project: dict[str, Any]) -> None:
    locked = set(re.findall(r"^([\w.-]+)(?=\[|==)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    extras = chain.from_iterable(project["project"]["optional-dependencies"].values())
    wanted = [*project["project"]["dependencies"], *extras, *project["dependency-groups"]["dev"]]

    assert {re.split(r"[\[>=<~!; ]", name)[0] for name in wanted} - locked == set()


def test_every_dependency_has_a_comment_about_its_purpose() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    named = [line for line in lines if re.match(r'    "[\w.\[\]-]+>=', line)]

    assert len(named) > 20
    assert [line for line in named if not re.search(r'",\s+# \w', line)] == []


EXTRAS = {"postgres", "valkey", "server", "client", "secrets", "otel"}


def test_the_extras_exist(project: dict[str, Any]) -> None:
    assert set(project["project"]["optional-dependencies"]) == EXTRAS
    assert set(metadata("flowfabric").get_all("Provides-Extra", [])) == EXTRAS


def test_ci_runs_dev_test() -> None:
    script = ROOT / ".ci" / "run"

    assert script.read_text().rstrip().endswith("exec ./dev test")
    assert os.access(script, os.X_OK)
    assert os.access(ROOT / "dev", os.X_OK)


def test_the_readme_names_demo_and_test_and_the_licence_is_complete() -> None:
    readme = (ROOT / "README.md").read_text()

    assert "./dev demo" in readme
    assert "./dev test" in readme
    assert "END OF TERMS AND CONDITIONS" in (ROOT / "LICENSE").read_text()


def test_dev_lists_its_commands_without_installing_anything(tmp_path: Path) -> None:
    script = tmp_path / "dev"
    script.write_text((ROOT / "dev").read_text())

    listed = subprocess.run(["python3", str(script)], capture_output=True, text=True, check=True).stdout

    assert re.findall(r"^  (\w+) ", listed, re.MULTILINE) == [
        "demo", "test", "check", "pythons", "fix", "bench", "soak", "faults", "up", "down", "lock", "py",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == [script]


def dev_script() -> ModuleType:
    """Load the script `dev` as a module."""
    loader = SourceFileLoader("dev_script", str(ROOT / "dev"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def write_fake_python(path: Path, answer: str) -> None:
    """Write a fake interpreter, which prints this description whatever it runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{answer}\n")
    path.chmod(0o755)


def test_every_other_python_is_found_once_and_unusable_ones_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dev = dev_script()
    own = " ".join(map(str, sys.version_info[:3]))
    write_fake_python(tmp_path / "bin" / "python3.11", "echo 3 11 200 final CPython")
    write_fake_python(tmp_path / "bin" / "python3.14", "echo 3 14 0 beta CPython")
    write_fake_python(tmp_path / "bin" / "python3.9", "echo 3 9 1 final CPython")
    write_fake_python(tmp_path / "bin" / "python3.12", "exit 127")
    write_fake_python(tmp_path / "pyenv" / "versions" / "again" / "bin" / "python3.11", "echo 3 11 200 final CPython")
    write_fake_python(tmp_path / "pyenv" / "versions" / "own" / "bin" / "python3.11", f"echo {own} final CPython")
    write_fake_python(
        tmp_path / "pyenv" / "versions" / "bare" / "bin" / "python3.13", "echo 3 13 200 final CPython ssl zlib"
    )
    write_fake_python(tmp_path / "pyenv" / "versions" / "pypy" / "bin" / "python3.11", "echo 3 11 201 final PyPy")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))

    others, unusable = dev.other_pythons()

    assert others[3, 11, 200] == tmp_path / "bin" / "python3.11"
    assert {sys.version_info[:3], (3, 14, 0), (3, 9, 1), (3, 13, 200), (3, 11, 201)}.isdisjoint(others)
    named = sorted(line.replace(f"{tmp_path}/", "") for line in unusable)
    assert named == [
        "bin/python3.14 is a beta of 3.14.0",
        "pyenv/versions/bare/bin/python3.13 was built without ssl, zlib",
        "pyenv/versions/pypy/bin/python3.11 is PyPy",
    ]


def test_a_python_without_an_environment_is_reported_and_the_others_are_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dev = dev_script()
    monkeypatch.setattr(dev, "HOME", tmp_path)
    pythons = {
        (3, 11, 200): Path("/a/python3.11"),
        (3, 12, 200): Path("/b/python3.12"),
        (3, 13, 200): Path("/c/python"),
    }
    ran: list[Path] = []

    def environment(venv: Path, interpreter: Path) -> Path:
        if interpreter == Path("/b/python3.12"):
            raise dev.Stop("Fix: install the headers.")
        return interpreter

    def tests(*_: object, python: Path, **options: object) -> bool:
        ran.append(python)
        return python == Path("/a/python3.11")

    monkeypatch.setattr(dev, "other_pythons", lambda: (pythons, ["/d/python3.14 is PyPy"]))
    monkeypatch.setattr(dev, "environment", environment)
    monkeypatch.setattr(dev, "tests", tests)

    assert dev.test_other_pythons([]) == ["python 3.13.200"]
    assert ran == [Path("/a/python3.11"), Path("/c/python")]
    output = capsys.readouterr().err
    assert "not tested on /d/python3.14 is PyPy" in output
    assert "not tested on /b/python3.12: no environment could be created" in output


@pytest.mark.parametrize(
    ("failed", "fails_again", "is_good", "runs"),
    [
        ([], False, True, 1),
        (["t.py::a", "t.py::b[x]"], False, True, 2),
        (["t.py::a"], True, False, 2),
        ([f"t.py::test_{number}" for number in range(6)], False, False, 1),
    ],
)
def test_a_few_tests_that_fail_are_run_once_more_and_named_when_they_pass_then(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    failed: list[str],
    fails_again: bool,
    is_good: bool,
    runs: int,
) -> None:
    dev = dev_script()
    monkeypatch.setattr(dev, "HOME", tmp_path)
    ran: list[tuple[str, ...]] = []

    def tests(*arguments: str, name: str) -> bool:
        ran.append(arguments)
        if len(ran) > 1:
            return not fails_again
        found = tmp_path / "pytest" / "v" / "cache" / "lastfailed"
        found.parent.mkdir(parents=True)
        found.write_text(json.dumps(dict.fromkeys(failed, True)))
        return not failed

    monkeypatch.setattr(dev, "tests", tests)
    unstable: list[str] = []

    assert dev.tests_with_retry("-n4", unstable=unstable) == is_good
    assert len(ran) == runs
    if runs == 2:
        assert ran[1] == ("-m", "not soak", *failed)
    assert unstable == (failed if is_good else [])
    assert dev.summarize([], unstable) == 0
    output = capsys.readouterr().err
    assert all(name in output for name in unstable)


def test_generated_files_are_ignored_by_git() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()

    assert {"/.dev/", "__pycache__/", "uv.lock", "pylock*.toml", "*.db", "*.db-*"} <= set(ignored)


def test_ff_version_prints_the_version_of_the_project(project: dict[str, Any]) -> None:
    answer = CliRunner().invoke(app, ["version"])

    assert answer.exit_code == 0
    assert answer.output == f"flowfabric {project['project']['version']}\n"


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text()

    assert [page.name for page in sorted(folder.glob("[0-9]*.md")) if f"({page.name})" not in index] == []


def test_tasks_of_the_library_are_never_eager() -> None:
    """A task that ends before its caller notes it would be noted for ever; see `start_task`."""
    folders = [ROOT / "src" / "flowfabric" / name for name in ("engine", "sdk", "client", "stores", "testing")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    assert len(files) > 200
    assert not [
        file.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "create_task"
    ]


def test_no_module_uses_the_shared_random_generator() -> None:
    own = {"Random", "SystemRandom"}
    shared = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "random"
        and node.attr not in own
    ]

    assert shared == []


MODULES_IN_A_FOLDER = 20


def test_no_folder_has_more_modules_than_a_reader_can_survey() -> None:
    modules = [path for top in ("src", "tests", "examples") for path in (ROOT / top).rglob("*.py")]
    in_folder = Counter(str(path.parent.relative_to(ROOT)) for path in modules if path.name != "__init__.py")

    assert sum(in_folder.values()) > 500
    assert {folder: count for folder, count in in_folder.items() if count > MODULES_IN_A_FOLDER} == {}


def test_hardly_a_class_name_is_used_twice() -> None:
    """A record and its counterpart at an edge may share a name."""
    names = Counter(
        node.name
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )

    assert len([name for name, count in names.items() if count > 1]) <= 10


# Nouns of the field, and a decoding of responses.
NOUNS = {"content_encoding", "decoding", "encoding", "logging", "routing", "tracing"}


def test_no_module_is_named_by_a_gerund() -> None:
    stems = {path.stem for path in (ROOT / "src").rglob("*.py")}

    assert {stem for stem in stems if stem.endswith("ing")} - NOUNS == set()


def test_the_import_contracts_name_only_what_exists(project: dict[str, Any]) -> None:
    named = set(re.findall(r"flowfabric[\w.]*", repr(project["tool"]["importlinter"])))
    paths = {name: ROOT / "src" / Path(*name.split(".")) for name in named}

    assert len(named) > 15
    assert [name for name, path in paths.items() if not path.is_dir() and not path.with_suffix(".py").exists()] == []


def test_every_package_has_a_place_in_the_import_contracts(project: dict[str, Any]) -> None:
    contracts = repr(project["tool"]["importlinter"])
    packages = [path.parent.name for path in (ROOT / "src" / "flowfabric").glob("*/__init__.py")]

    assert [name for name in packages if f"flowfabric.{name}" not in contracts] == []


def test_the_engine_finds_loaded_rows_by_typed_accessors() -> None:
    """`rows[3][0]`, or `rows[len(reads):]` of what was loaded further, has any type: a wrong number stays unnoticed."""
    by_number = re.compile(r"\brows\[\d+\]\[|(?<!\.)\brows\[len\(reads\)")
    engine = ROOT / "src" / "flowfabric" / "engine"
    found = [path.name for path in engine.rglob("*.py") if by_number.search(path.read_text())]

    assert found == ["after_commit.py"], "only `first_row` does"
