"""The README is what it says: short, and true."""

from __future__ import annotations

import re

from tests.docs.pages import blocks
from tests.postgres_install import ROOT

README = ROOT / "README.md"


def test_it_can_be_read_in_two_minutes() -> None:
    text = README.read_text()
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)

    assert len(prose.split()) <= 500
    assert len(text.splitlines()) <= 120


def test_all_of_its_python_runs_in_the_tests() -> None:
    """One block, between the marks that tests/sdk/test_readme.py plays it by."""
    [block] = blocks(README)

    assert f"<!-- durable:begin -->\n```python\n{block.code}```\n<!-- durable:end -->" in README.read_text()


def test_its_commands_exist() -> None:
    from typer.main import get_command

    from flowfabric.cli import app

    named = set(re.findall(r"\bff (\w+)", README.read_text()))

    assert named >= {"worker", "approvals", "explain", "signal"}
    assert named <= set(get_command(app).commands)  # type: ignore[attr-defined]
