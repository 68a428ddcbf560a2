"""The store as seen from inside a caller's own transaction."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from flowfabric.clock import ManualClock
from flowfabric.model.change import Insert
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.queries import Read
from flowfabric.stores.verdicts import Unstorable
from tests.stores.sample_rows import change, execution, insert_queued, one, queued


async def test_a_row_in_a_queue_that_another_process_registered_can_be_read(
    pg: PostgresStore, database: str, clock: ManualClock
) -> None:
    await insert_queued(pg, queued("a", line=QueueKey("made by another")))
    fresh = PostgresStore(database, clock)
    connection = await asyncpg.connect(database)
    try:
        async with connection.transaction():
            loaded = await (await fresh.join_transaction(connection)).load([Read(Execution, ("a",))])
    finally:
        await connection.close()
        await fresh.close()

    assert [row.line for row in loaded.rows[0]] == [QueueKey("made by another")]


@pytest.mark.parametrize("poison", [{"tags": "a\0b"}, {"tags": 5}, {"priority": 2**63}, {"namespace": None}])
async def test_an_unstorable_change_leaves_the_transaction_usable(
    pg: PostgresStore, database: str, clock: ManualClock, poison: dict[str, Any]
) -> None:
    connection = await asyncpg.connect(database)
    try:
        async with connection.transaction():
            view = await pg.join_transaction(connection)
            refused = await view.commit(change(Insert(execution("bad", **poison))))
            written = await view.commit(change(Insert(execution("good"))))
    finally:
        await connection.close()

    assert isinstance(refused, Unstorable)
    assert written == clock.now
    assert await one(pg, Execution, "good") is not None
