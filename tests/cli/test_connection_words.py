"""The error for an unreachable Postgres server: host and reason, without an errno."""

from __future__ import annotations

import pytest

from tests.cli.terminal import Terminal


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("127.0.0.1:1", "ff: transport: 127.0.0.1:1: connection refused"),
        ("no-such-host.invalid", "ff: transport: the name of the host could not be resolved: "),
    ],
)
def test_an_unreachable_server_is_reported_with_host_and_reason(address: str, text: str) -> None:
    error = Terminal(f"postgresql://nobody:secret@{address}/none").refuses("ls")

    assert error.startswith(text)
    assert "Errno" not in error
    assert "secret" not in error
    assert "Hint: is the address right and the server up?" in error
