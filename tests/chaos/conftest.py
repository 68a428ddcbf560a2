"""Stores that several processes can share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(params=["sqlite", "postgres", "valkey", pytest.param("valkey-cluster", marks=pytest.mark.soak)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store, one kind after the other."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'ff.db'}"
    fixture = "database" if request.param == "postgres" else f"{request.param.replace('-', '_')}_url"
    address: str = request.getfixturevalue(fixture)
    return address
