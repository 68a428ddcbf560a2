"""`ff doctor` reports snapshots that keep dead rows, and what a Valkey server keeps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest

from flowfabric.cli.commands import maintenance
from flowfabric.model.deployment import SnapshotHolder
from flowfabric.stores.valkey import durability
from tests.cli.terminal import Terminal
from tests.valkey_cluster import own_server
from tests.valkey_servers import ValkeyNode


async def test_doctor_names_an_idle_transaction(database: str) -> None:
    name = database.rpartition("/")[2]
    holder: Any = await asyncpg.connect(database, server_settings={"application_name": "report"})
    await holder.execute("begin isolation level repeatable read")
    await holder.fetch("select count(*) from ff_exec_core")
    await holder.fetch("select pg_sleep(1.1)")  # younger transactions are not reported

    finding = {one["check"]: one for one in (await asyncio.to_thread(Terminal(database).document, "doctor"))["checks"]}
    pid = holder.get_server_pid()
    await holder.close()

    assert finding["snapshot"]["ok"]
    assert f"transaction pid {pid}, report, database {name}, idle in transaction for " in finding["snapshot"]["says"]


@pytest.mark.parametrize(
    ("holder", "says"),
    [
        (SnapshotHolder("transaction", "pid 7", "psql", "shop", "idle in transaction", 61, 9), "pid 7, psql"),
        (SnapshotHolder("prepared transaction", "order-1", None, "shop", "prepared", 90, 12), "order-1"),
        (SnapshotHolder("replication slot", "standby", None, None, "inactive", None, 20_000), "standby, inactive"),
    ],
    ids=["transaction", "prepared", "slot"],
)
def test_an_old_snapshot_is_reported_as_a_problem(holder: SnapshotHolder, says: str) -> None:
    finding = maintenance._snapshots([holder])

    assert not finding["ok"]
    assert says in finding["says"]
    assert f"{holder.transactions:,} transactions ago" in finding["says"]
    assert "pg_terminate_backend" in finding["hint"]


@pytest.fixture
def node() -> Iterator[ValkeyNode]:
    """A Valkey server whose settings a test may change."""
    yield from own_server("doctor")


@pytest.mark.parametrize(
    ("settings", "durable", "warned"),
    [
        ({}, durability.EVERY_SECOND, []),
        ({"appendfsync": "always"}, durability.ON_DISK, []),
        ({"appendonly": "no"}, durability.NO_AOF, ["has no append-only file, so a restart loses all"]),
    ],
    ids=["everysec", "always", "without"],
)
def test_doctor_says_what_acknowledged_writes_survive_on_valkey(
    node: ValkeyNode, settings: dict[str, str], durable: str, warned: list[str]
) -> None:
    terminal = Terminal(f"valkey://127.0.0.1:{node.port}/0")
    terminal.stdout("migrate")
    for name, value in settings.items():
        node.execute("CONFIG", "SET", name, value)

    checks = json.loads(terminal.run("doctor", "--json").stdout)["checks"]

    assert [one["says"] for one in checks if one["check"] == "durable"] == [durable]
    servers = [one for one in checks if one["check"] == "servers"]
    assert [words in one["says"] for one, words in zip(servers, warned, strict=True)] == [True] * len(warned)
    assert not any(one["ok"] for one in servers)


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_no_command_works_on_a_server_that_may_delete_rows(node: ValkeyNode, policy: str) -> None:
    node.execute("CONFIG", "SET", "maxmemory-policy", policy)

    for command in ("doctor", "migrate", "ls"):
        result = Terminal(f"valkey://127.0.0.1:{node.port}/0").run(command)
        assert result.exit_code == 1
        assert f"maxmemory-policy is {policy}" in " ".join((result.stdout + result.stderr).split())
        assert "set it to noeviction" in " ".join((result.stdout + result.stderr).split())


def test_short_transactions_are_not_reported() -> None:
    assert maintenance._snapshots([SnapshotHolder("transaction", "pid 7", "flowfabric", "shop", "active", 0, 3)])["ok"]


@pytest.mark.parametrize(("transactions", "text"), [(1, "1 transaction ago"), (12_000, "12,000 transactions ago")])
def test_transactions_are_counted_with_their_plural(transactions: int, text: str) -> None:
    holder = SnapshotHolder("transaction", "pid 7", "psql", "shop", "idle in transaction", 61, transactions)

    assert maintenance._snapshots([holder])["says"].endswith(text)
