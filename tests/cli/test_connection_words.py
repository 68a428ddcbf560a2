"""What people read when a Postgres server cannot be reached: the host and the reason, no numbers of the system."""

from __future__ import annotations

import pytest

from tests.cli.terminal import Terminal


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:1", "ff: transport: 127.0.0.1:1: connection refused"),
        ("no-such-host.invalid", "ff: transport: the name of the host could not be resolved: "),
    ],
)
def test_an_unreachable_server_is_reported_with_host_and_reason(address: str, words: str) -> None:
    said = Terminal(f"postgresql://nobody:secret@{address}/none").refuses("ls")

    assert said.startswith(words)
    assert "Errno" not in said
    assert "secret" not in said
    assert "Hint: is the address right and the server up?" in said
