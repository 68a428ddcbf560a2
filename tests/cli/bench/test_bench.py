"""`ff bench throughput` and `ff bench http` measure engine and control, and leave no files or databases."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path

import asyncpg
import pytest

from flowfabric.bench.throughput import ThroughputReport, throughput
from flowfabric.errors import InvalidInput
from flowfabric.stores.valkey.address import parse_url
from flowfabric.stores.valkey.cluster import ValkeyClient
from tests.cli.terminal import Terminal
from tests.valkey_servers import valkey

RATES = ("drain_per_s", "bulk_submit_per_s", "single_submit_per_s", "latency_p50_ms", "latency_p99_ms")
CONTROLLED = (
    "control_drain_per_s",
    "drain_ratio",
    "control_insert_per_s",
    "submit_ratio",
    "control_latency_p50_ms",
    "latency_ratio",
)


async def small_throughput(url: str, depth: int = 0) -> ThroughputReport:
    return await throughput(url, jobs=200, payload_bytes=64, rounds=1, samples=5, depth=depth)


def test_sqlite_is_compared_with_a_bare_table(tmp_path: Path) -> None:
    report = asyncio.run(small_throughput(f"sqlite:///{tmp_path}/named.db"))

    assert all(getattr(report, name) > 0 for name in (*RATES, *CONTROLLED))
    assert report.drain_ratio == pytest.approx(report.drain_per_s / (report.control_drain_per_s or 0), abs=0.01)
    assert report.submit_ratio == pytest.approx(report.bulk_submit_per_s / (report.control_insert_per_s or 0), abs=0.01)
    assert "synchronous=FULL" in report.durability
    assert {"flowfabric", "python", "sqlite", "apsw"} <= set(report.versions)
    assert list(tmp_path.iterdir()) == []


async def test_postgres_is_measured_in_a_scratch_database(database: str) -> None:
    report = await small_throughput(database)

    assert all(getattr(report, name) > 0 for name in (*RATES, *CONTROLLED))
    assert "fsync=on" in report.durability
    assert {"postgres", "asyncpg"} <= set(report.versions)
    connection = await asyncpg.connect(database)
    assert await connection.fetchval("select count(*) from ff_exec_core") == 0
    assert await connection.fetchval("select count(*) from pg_database where datname like 'ff_bench_%'") == 0
    await connection.close()


async def test_valkey_is_measured_in_an_empty_database() -> None:
    valkey_url = valkey("bench").url()  # a server of its own: every database of the shared one may be in use
    client = ValkeyClient(parse_url(valkey_url))
    await client.open()
    await client.call("x", "SET", "x", 1)

    report = await small_throughput(valkey_url)

    assert all(getattr(report, name) > 0 for name in (*RATES, *CONTROLLED))
    assert "appendfsync=" in report.durability
    assert "libvalkey" in report.versions
    own, bare = report.server_us_per_drained, report.control_server_us_per_drained
    assert own is not None
    assert bare is not None
    assert 0 < bare < own
    assert await client.read("x", "DBSIZE") == 1
    assert (await client.read("x", "INFO", "keyspace")).count(b"keys=") == 1, "the other database is empty again"
    await client.close()


async def test_a_cluster_with_rows_is_not_measured(valkey_cluster_url: str) -> None:
    client = ValkeyClient(parse_url(valkey_cluster_url))
    await client.open()
    await client.call("x", "SET", "x", 1)

    with pytest.raises(InvalidInput, match="empty"):
        await small_throughput(valkey_cluster_url)

    assert await client.read("x", "GET", "x") == b"1"
    await client.close()


async def test_memory_has_no_control() -> None:
    report = await small_throughput("memory://")

    assert all(getattr(report, name) > 0 for name in RATES)
    assert [getattr(report, name) for name in CONTROLLED] == [None] * 6
    assert "none" in report.durability


async def test_the_cost_of_a_claim_is_compared_with_an_empty_table(tmp_path: Path) -> None:
    report = await small_throughput(f"sqlite:///{tmp_path}/named.db", depth=300)

    assert report.depth == 300
    assert report.claim_cost_ratio == pytest.approx((report.claim_at_depth_ms or 0) / (report.claim_ms or 1), abs=0.02)


@pytest.mark.slow
def test_the_command_prints_one_document_or_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Latency is measured at a fixed rate: the 200 samples of the command take four seconds.
    monkeypatch.setattr("flowfabric.bench.throughput.throughput", partial(throughput, samples=5))
    ff = Terminal(f"sqlite:///{tmp_path}/named.db")
    arguments = ("bench", "throughput", "--jobs", "100", "--rounds", "1", "--payload", "16")

    document = json.loads(ff.stdout(*arguments, "--json"))
    table = ff.stdout(*arguments)

    assert {*RATES, *CONTROLLED, "durability", "versions", "cores", "jobs"} <= set(document)
    assert document["jobs"] == 100
    assert "bulk submit" in table
    assert "durability: WAL, synchronous=FULL" in table


@pytest.mark.serial
def test_requests_are_compared_with_a_bare_route(ff: Terminal) -> None:
    report = ff.document("bench", "http", "--requests", "200", "--rounds", "1", "--clients", "8")

    for name in ("create", "claim", "complete", "control"):
        assert report[name]["per_s"] > 0
        assert report[name]["p99_ms"] > 0
    assert report["create_ratio"] > 0
    assert report["clients"] == 8
