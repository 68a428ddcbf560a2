"""Partition counts are those of the first who came, for ever."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import PartitionCounts
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from tests.scenarios.play import Play


def counting(store: Store, **counts: int) -> Engine:
    return Engine(store, settings=Settings(partitions=PartitionCounts(**counts)))


async def test_the_first_counts_are_kept_and_the_same_ones_are_welcome(store: Store) -> None:
    await asyncio.gather(*(counting(store, flow=64, budget=8).ensure_partitions() for _ in range(4)))
    await counting(store, flow=64, budget=8).ensure_partitions()


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"flow": 64}, "num_flow_partitions: stored=256, config=64"),
        ({"budget": 31}, "num_budget_partitions: stored=32, config=31"),
        ({"quota": 33, "budget": 32}, "num_quota_partitions: stored=32, config=33"),
    ],
)
async def test_other_counts_are_refused_by_their_name(
    play: Play, store: Store, counts: dict[str, int], words: str
) -> None:
    await play.engine.ensure_partitions()

    async with play.refused(errors.PartitionMismatch, words):
        await counting(store, **counts).ensure_partitions()
    with pytest.raises(errors.PartitionMismatch, match=f"^partition_mismatch: {words}"):
        await counting(store, **counts).ensure_partitions()
