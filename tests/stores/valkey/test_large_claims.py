"""Large claims of a lane on many partitions: few calls, every partition in turn, every row once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from flowfabric.model.change import BulkInsert
from flowfabric.model.execution import Execution
from flowfabric.stores.valkey.claims import SHARE
from flowfabric.stores.valkey.store import ValkeyStore
from tests.stores.sample_rows import change, claim_request, payload, queued
from tests.stores.valkey.test_functions import monitored


async def fill(store: ValkeyStore, partitions: int, rows: int) -> None:
    """Insert so many rows on each of these partitions."""
    for partition in range(partitions):
        names = [f"{{fp:{partition}}}:n{number:03}" for number in range(rows)]
        columns: dict[str, Sequence[Any]] = {"execution_id": names, "input_payload": [b"x"] * rows}
        inserts = (BulkInsert(queued("model"), {"execution_id": names}), BulkInsert(payload("model"), columns))
        assert await store.commit([change(*inserts)]) != [None]


async def claim(store: ValkeyStore, number: int) -> list[Execution]:
    return [row for row, _ in (await store.claim_rows(claim_request(number))).rows]


def partition(row: Execution) -> str:
    return row.execution_id.partition(":n")[0]


async def test_large_claims_take_whole_shares_of_every_partition_in_turn(vk: ValkeyStore) -> None:
    await fill(vk, partitions=6, rows=150)

    claims = [await claim(vk, SHARE) for _ in range(6)]

    assert [len({partition(row) for row in rows}) for rows in claims] == [1] * 6
    assert len({partition(rows[0]) for rows in claims}) == 6
    for rows in claims:
        assert [row.execution_id for row in rows] == [f"{partition(rows[0])}:n{number:03}" for number in range(SHARE)]
    rest = [row for _ in range(3) for row in await claim(vk, 150)]
    counted = Counter(row.execution_id for rows in (*claims, rest) for row in rows)
    assert len(counted) == 900
    assert set(counted.values()) == {1}
    assert await claim(vk, SHARE) == []


async def test_a_large_claim_of_partitions_with_few_rows_is_filled_from_many(vk: ValkeyStore) -> None:
    await fill(vk, partitions=40, rows=3)
    async with monitored(vk) as monitor:
        rows = await claim(vk, 110)

    assert len({row.execution_id for row in rows}) == 110
    called = Counter(words[1].rpartition("_")[2] for words, _ in monitor.calls if words[0].startswith("FCALL"))
    assert called["claim"] <= 40, "one call for each partition"
    assert called["heads"] <= 44, "the first ones twice"
    assert len(await claim(vk, SHARE)) == 10
