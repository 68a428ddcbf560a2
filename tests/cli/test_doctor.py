"""`ff doctor` reports snapshots that keep dead rows."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from flowfabric.cli import maintenance
from flowfabric.model.deployment import SnapshotHolder
from tests.cli.terminal import Terminal


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
    assert f"{holder.transactions} transactions ago" in finding["says"]
    assert "pg_terminate_backend" in finding["hint"]


def test_short_transactions_are_not_reported() -> None:
    assert maintenance._snapshots([SnapshotHolder("transaction", "pid 7", "flowfabric", "shop", "active", 0, 3)])["ok"]
