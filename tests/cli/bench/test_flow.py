"""`ff bench flow` measures chains, fan-outs, cancels and graphs on every store."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowfabric.bench.flow import flow
from tests.valkey_servers import valkey


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres", "valkey"])
async def test_chains_fans_cancels_and_graphs_are_measured(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    match kind:
        case "memory":
            url = "memory://"
        case "sqlite":
            url = f"sqlite:////{tmp_path}/ff.db"
        case "valkey":
            url = valkey("bench").url()
        case _:
            url = request.getfixturevalue("own_database")

    report = await flow(url, chains=16, steps=3, fan=10, siblings=20, samples=2, graph=300, rounds=1)

    assert report.chains_per_s > 0
    assert 0 < report.fan_out_and_join.p50_ms <= report.fan_out_and_join.p99_ms
    assert 0 < report.quorum_cancel.p50_ms <= report.quorum_cancel.p99_ms
    assert (report.fan_out_and_join.samples, report.graph_nodes, report.steps) == (2, 300, 3)
    has_control = kind != "memory"
    assert (report.chains_ratio is not None, report.control_cancel is not None) == (has_control, has_control)
    if report.control_cancel is not None:
        assert 0 < report.control_cancel.p50_ms <= report.control_cancel.p99_ms
