"""Tables on terminals of different widths."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flowfabric.cli import output

ID = "{fp:86}:01a1e7bd-8f87-75d8-bbdb-180222233dd3"
COLUMNS = ("execution", "task", "state", "created", "why it waits")
ROW = (ID, "shop.purchase", "delayed", "2026-11-17 04:22:02.375Z", "because " * 12)


def printed(monkeypatch: pytest.MonkeyPatch, width: int, *rows: tuple[object, ...], terminal: bool = True) -> list[str]:
    out = io.StringIO()
    drawn = Console(file=out, width=width, force_terminal=terminal, color_system=None, highlight=False)
    monkeypatch.setattr(output, "console", lambda: drawn)
    output.print_table("Runs", COLUMNS, rows)
    return out.getvalue().splitlines()


def test_a_narrow_terminal_gets_a_list_without_truncation(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, 80, ROW, (ID, "shop.hello", "completed", None, ""))

    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "…" not in text
    for value in ROW:
        assert " ".join(str(value).split()) in text
    assert text.count("why it waits") == 1, "empty cells are left out"


def test_a_wide_terminal_gets_a_table_whose_last_column_is_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(monkeypatch, 150, ROW)

    [line] = [line for line in lines if ID in line]
    assert all(str(value) in line for value in ROW[:-1])
    assert sum("because" in line for line in lines) > 1


def test_a_pipe_gets_a_table_of_full_width(monkeypatch: pytest.MonkeyPatch) -> None:
    assert any(ID in line and "delayed" in line for line in printed(monkeypatch, 200, ROW, terminal=False))


def test_the_first_line_of_a_failure_is_its_message_without_the_traceback() -> None:
    failure = 'retry backoff until 1700000000000 (attempt 0 failed: ValueError: no\n  File "x.py", line 1\n)'
    assert (
        output.first_line(failure) == "retry backoff until 2023-11-14 22:13:20.000Z (attempt 0 failed: ValueError: no)"
    )
    assert output.first_line("ValueError: no (really)\n  File") == "ValueError: no (really)"
    assert output.first_line(None) == ""
