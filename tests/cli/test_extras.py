"""A missing extra is reported with the command that installs it."""

from __future__ import annotations

import sys

import pytest

import flowfabric.bench
import flowfabric.server
import flowfabric.stores
import flowfabric.stores.valkey  # noqa: F401 - parents of the missing modules
from tests.cli.terminal import Terminal


@pytest.mark.parametrize(
    ("command", "url", "module", "extra"),
    [
        ("ls", "postgresql://localhost/none", "flowfabric.stores.postgres", "flowfabric[postgres]"),
        ("ls", "valkey://localhost", "flowfabric.stores.valkey.store", "flowfabric[valkey]"),
        ("ls", "valkey+cluster://localhost", "flowfabric.stores.valkey.store", "flowfabric[valkey]"),
        ("ls", "http://localhost:9", "flowfabric.client", "flowfabric[client]"),
        ("bench sdk", "postgresql://localhost/none", "flowfabric.bench.postgres", "flowfabric[postgres]"),
        ("serve", "memory://", "flowfabric.server.lifecycle", "flowfabric[server]"),
    ],
)
def test_a_missing_extra_is_reported_with_its_name(
    monkeypatch: pytest.MonkeyPatch, command: str, url: str, module: str, extra: str
) -> None:
    parent, _, name = module.rpartition(".")
    monkeypatch.setitem(sys.modules, module, None)  # as if its dependencies were not installed
    monkeypatch.delattr(sys.modules[parent], name, raising=False)

    assert f"pip install '{extra}'" in Terminal(url).refuses(*command.split())
