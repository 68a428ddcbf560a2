"""What an installation without extras says when one is needed: its name, and how to get it."""

from __future__ import annotations

import sys

import pytest

import flowfabric.bench
import flowfabric.server
import flowfabric.stores  # noqa: F401 - parents of the pages that go missing
from tests.cli.terminal import Terminal


@pytest.mark.parametrize(
    ("command", "url", "page", "extra"),
    [
        ("ls", "postgresql://localhost/none", "flowfabric.stores.postgres", "flowfabric[postgres]"),
        ("ls", "http://localhost:9", "flowfabric.client", "flowfabric[client]"),
        ("bench sdk", "postgresql://localhost/none", "flowfabric.bench.postgres", "flowfabric[postgres]"),
        ("serve", "memory://", "flowfabric.server.lifecycle", "flowfabric[server]"),
    ],
)
def test_a_missing_extra_is_reported_with_its_name(
    monkeypatch: pytest.MonkeyPatch, command: str, url: str, page: str, extra: str
) -> None:
    parent, _, name = page.rpartition(".")
    monkeypatch.setitem(sys.modules, page, None)  # as if what it imports were not installed
    monkeypatch.delattr(sys.modules[parent], name, raising=False)

    assert f"pip install '{extra}'" in Terminal(url).refuses(*command.split())


@pytest.mark.parametrize("url", ["valkey://localhost", "valkey+cluster://localhost"])
def test_an_unsupported_store_is_refused(url: str) -> None:
    assert "there is no Valkey store in this release" in Terminal(url).refuses("ls")
