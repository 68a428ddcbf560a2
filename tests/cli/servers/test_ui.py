"""`ff ui`: a link that opens the console of a running server."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from typer.testing import CliRunner

from flowfabric.cli import app
from flowfabric.server import ServerSettings
from flowfabric.settings import Secret
from tests.client.server_thread import run_server


def test_the_link_leads_to_the_console_of_an_open_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FF_API_TOKEN", raising=False)
    with run_server(f"sqlite:///{tmp_path / 'a.db'}") as server:
        printed = CliRunner().invoke(app, ["ui", server.url])
        assert printed.exit_code == 0, printed.output
        assert httpx2.get(printed.output.strip()).status_code == 200


def test_without_a_token_it_says_what_to_set_and_with_one_the_link_logs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FF_API_TOKEN", raising=False)
    monkeypatch.delenv("FLOWFABRIC_TOKEN", raising=False)
    with run_server(f"sqlite:///{tmp_path / 'a.db'}", ServerSettings(api_token=Secret("s3cret"))) as server:
        refused = CliRunner().invoke(app, ["ui", server.url])
        assert (refused.exit_code, "set FF_API_TOKEN" in refused.output) == (1, True), refused.output
        assert "FLOWFABRIC_TOKEN" not in refused.output
        printed = CliRunner().invoke(app, ["ui", server.url], env={"FF_API_TOKEN": "s3cret"})
        assert "/ui/login?link=" in printed.output
        assert "Open the console" in httpx2.get(printed.output.strip()).text


def test_without_a_server_it_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = CliRunner().invoke(app, ["ui", "http://127.0.0.1:9"])
    assert printed.exit_code == 1
    assert "ff serve" in printed.output
