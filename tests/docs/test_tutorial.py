"""The commands of the tutorial print the output that it shows."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.docs.pages import MARK, blocks, commands, matches, script
from tests.postgres_install import ROOT


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", ["sqlite", "valkey"])
def test_the_commands_of_the_tutorial_print_what_it_shows(
    store: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    session = commands(blocks(ROOT / "docs" / "tutorial.md"))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("FF_", "FLOWFABRIC"))}
    path = os.pathsep.join((str(Path(sys.executable).parent), environ["PATH"]))
    environ |= {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    if store == "valkey":
        environ["FLOWFABRIC_URL"] = request.getfixturevalue("valkey_url")

    with (tmp_path / "stdout").open("w+") as stdout, (tmp_path / "stderr").open("w+") as stderr:
        shell = subprocess.Popen(
            ["bash", "-c", script(session)],
            cwd=tmp_path,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            shell.wait(280)
        finally:
            with suppress(ProcessLookupError):  # processes that it has left running
                os.killpg(shell.pid, signal.SIGKILL)

    printed = (tmp_path / "stdout").read_text().split(f"{MARK}\n")
    errors = (tmp_path / "stderr").read_text()
    for command, output in zip(session, printed, strict=False):
        if command.prints is not None:
            assert matches(command.prints, output), (
                f"$ {command.words}\nshould print\n{command.prints}\nand prints\n{output}\n{errors}"
            )
    assert len(printed) == len(session) + 1, errors
    assert len([command for command in session if command.prints]) > 10


def test_an_ellipsis_matches_anything() -> None:
    assert matches("a … c\n", "a   b\n c\n")
    assert matches("✓ voted …\n", "✓ voted (resume_condition_satisfied)\n")
    assert matches("", "")
    assert not matches("a … c\n", "a b d\n")
    assert not matches("", "oh\n")
    assert not matches("2 passed\n", "12 passed\n")
