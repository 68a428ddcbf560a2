"""The store as seen from inside a caller's own transaction."""

from __future__ import annotations

import asyncpg

from flowfabric.clock import ManualClock
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.queries import Read
from tests.stores.sample_rows import insert_queued, queued


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
