"""The first engine fixes the partition counts of a store."""

from __future__ import annotations

import asyncio

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import PartitionCounts
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from tests.scenarios.env import Env


def engine_with_counts(store: Store, **counts: int) -> Engine:
    return Engine(store, settings=Settings(partitions=PartitionCounts(**counts)))


async def test_partition_counts_are_stored_once_and_equal_counts_are_accepted(store: Store) -> None:
    await asyncio.gather(*(engine_with_counts(store, flow=64, budget=8).ensure_partitions() for _ in range(4)))
    await engine_with_counts(store, flow=64, budget=8).ensure_partitions()


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"flow": 64}, "num_flow_partitions: stored=256, config=64"),
        ({"budget": 31}, "num_budget_partitions: stored=32, config=31"),
        ({"quota": 33, "budget": 32}, "num_quota_partitions: stored=32, config=33"),
    ],
)
async def test_a_different_partition_count_is_refused_and_named(
    env: Env, store: Store, counts: dict[str, int], message: str
) -> None:
    await env.engine.ensure_partitions()

    async with env.refused(errors.PartitionMismatch, message):
        await engine_with_counts(store, **counts).ensure_partitions()
    with pytest.raises(errors.PartitionMismatch, match=f"^partition_mismatch: {message}"):
        await engine_with_counts(store, **counts).ensure_partitions()
