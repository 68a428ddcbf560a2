"""A terminal with a store."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.terminal import Terminal


@pytest.fixture
def ff(tmp_path: Path) -> Terminal:
    """A terminal on a migrated, empty store."""
    terminal = Terminal(f"sqlite:///{tmp_path}/ff.db")
    terminal.says("migrate")
    return terminal
