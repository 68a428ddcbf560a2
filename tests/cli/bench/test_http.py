"""`ff bench http` measures requests and a bare route."""

from __future__ import annotations

import pytest

from tests.cli.terminal import Terminal


@pytest.mark.serial
def test_requests_are_compared_with_a_bare_route(ff: Terminal) -> None:
    report = ff.document("bench", "http", "--requests", "200", "--rounds", "1", "--clients", "8")

    for name in ("create", "claim", "complete", "control"):
        assert report[name]["per_s"] > 0
        assert report[name]["p99_ms"] > 0
    assert report["create_ratio"] > 0
    assert report["clients"] == 8
