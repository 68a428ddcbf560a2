"""Rows of a release without owners of ids belong to the namespace `default` after the migration, on both SQL stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apsw

from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.limits import AlreadyApplied, HardBreach, QuotaLimits
from flowfabric.rules.limits import usage
from flowfabric.stores.port import Store
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.postgres import migrator as postgres_schema
from flowfabric.stores.sqlite import SQLiteStore
from flowfabric.stores.sqlite import migrator as sqlite_schema
from flowfabric.testing.limit_invariants import check_limit_invariants
from tests.stores.postgres.old_database import old_database

B = "0b000000-0000-4000-8000-000000000001"
Q = "0c000000-0000-4000-8000-000000000001"
E = "{fp:7}:0e000000-0000-4000-8000-000000000001"
R = "0d000000-0000-4000-8000-000000000001"
BEFORE = 7  # the version of that release
FOREVER = 4_000_000_000_000

ROWS: dict[str, dict[str, Any]] = {
    "ff_budget_policy": {
        "budget_id": B,
        "partition": 3,
        "defined": True,
        **dict.fromkeys(("scope_type", "scope_id", "enforcement_mode", "on_hard_limit", "on_soft_limit"), ""),
        **dict.fromkeys(("reset_interval_ms", "breach_count", "soft_breach_count", "reset_count"), 0),
        "last_updated_at": 1,
        "created_at": 1,
        "lapse_at": FOREVER,
        "revision": 5,
    },
    "ff_budget_usage": {
        "budget_id": B,
        "dimension": "tokens",
        "hard_limit": 10,
        "soft_limit": 0,
        "usage": 6,
        "reserved": 2,
        "position": 0,
    },
    "ff_budget_usage_by_exec": {"budget_id": B, "execution_id": E, "dimension": "tokens", "amount": 6},
    "ff_budget_reservation": {
        "budget_id": B,
        "reservation_id": R,
        "dimension": "tokens",
        "execution_id": E,
        "amount": 2,
        "expires_at": FOREVER,
    },
    "ff_budget_usage_dedup": {"budget_id": B, "digest": "", "expires_at": FOREVER},
    "ff_quota_policy": {
        "quota_policy_id": Q,
        "partition": 3,
        "defined": True,
        "requests_per_window_seconds": 60,
        "max_requests_per_window": 5,
        "active_concurrency_cap": 1,
        "jitter_ms": 0,
        "active": 1,
        "created_at": 1,
        "revision": 6,
    },
    "ff_quota_admitted": {
        "quota_policy_id": Q,
        "execution_id": E,
        "life": 0,
        "admission": 9,
        "counted": True,
        "expires_at": FOREVER,
    },
    "ff_quota_window": {
        "quota_policy_id": Q,
        "dimension": "default",
        "execution_id": E,
        "admitted_at": 1,
        "expires_at": FOREVER,
    },
}


def inserts(digest: str) -> list[tuple[str, list[Any]]]:
    """Return the rows as statements with `?` and their values; `digest` is that of the stored report."""
    found = []
    for table, row in ROWS.items():
        values = [digest if name == "digest" else value for name, value in row.items()]
        marks = ", ".join("?" for _ in row)
        found.append((f"insert into {table} ({', '.join(row)}) values ({marks})", values))
    return found


async def interpreted_rows(store: Store) -> None:
    """Return the rows as this release interprets them."""
    engine = Engine(store, minter=SeededMinter(1))
    status = await engine.get_budget_status(B)
    assert (status.usage, status.reserved, status.hard_limits) == ({"tokens": 6}, {"tokens": 2}, {"tokens": 10})
    assert await engine.list_budgets() == [B]
    assert await engine.list_budgets(namespace="other") == []
    again = await engine.report_usage_admin(B, dimensions=["tokens"], deltas=[1], dedup_key="k")
    assert again == AlreadyApplied()
    assert isinstance(await engine.record_spend(B, E, {"tokens": 3}), HardBreach)
    assert await engine.reservation_owner(B, R) == E
    assert await engine.read_quota_policy_limits(Q) == QuotaLimits(60, 5, 1, 0)
    await check_limit_invariants(engine)
    await engine.release_admission(Q, E)
    assert (await engine.release_budget(B, E)).amounts == {"tokens": 6}
    await check_limit_invariants(engine)
    await store.close()


async def test_the_rows_of_an_older_file_belong_to_default(tmp_path: Path) -> None:
    db = apsw.Connection(str(tmp_path / "ff.db"))
    for number, text in sqlite_schema.migrations().items():
        if number <= BEFORE:
            for _ in db.execute(text):
                pass
            db.execute("INSERT INTO ff_schema_version (version, applied_at) VALUES (?, 0)", (number,))
    for words, values in inserts(usage.usage_key_digest("k")):
        db.execute(words, values)
    db.close()

    store = SQLiteStore(tmp_path / "ff.db")
    await store.open(migrate=True)
    await interpreted_rows(store)


async def test_the_rows_of_an_older_database_belong_to_default() -> None:
    steps = [step for step in postgres_schema.migrations() if step.version <= BEFORE]
    async with old_database("ff_owners", steps) as (dsn, connection):
        for words, values in inserts(usage.usage_key_digest("k")):
            for place in range(1, len(values) + 1):
                words = words.replace("?", f"${place}", 1)
            await connection.execute(words, *values)

        store = PostgresStore(dsn)
        await store.open(migrate=True)
        await interpreted_rows(store)
