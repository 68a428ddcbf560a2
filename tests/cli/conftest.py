"""Terminals on a store, and on a server in front of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.terminal import Terminal
from tests.client.server_thread import run_server


@pytest.fixture
def ff(tmp_path: Path) -> Terminal:
    """A terminal on a migrated, empty store."""
    terminal = Terminal(f"sqlite:///{tmp_path}/ff.db")
    terminal.stdout("migrate")
    return terminal


@pytest.fixture(params=["store", "server", "valkey"])
def ff_or_server(ff: Terminal, request: pytest.FixtureRequest) -> Iterator[Terminal]:
    """The terminal of `ff`, one on a server in front of its store, or one on Valkey."""
    match request.param:
        case "store":
            yield ff
        case "server":
            with run_server(ff.store) as server:
                yield Terminal(server.url, ff.store)
        case _:
            terminal = Terminal(request.getfixturevalue("valkey_url"))
            terminal.stdout("migrate")
            yield terminal
