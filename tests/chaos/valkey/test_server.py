"""Faults of one Valkey server under the load of an engine: what was acknowledged, and what survived."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from flowfabric.connector import open_engine
from flowfabric.engine.engine import Engine
from flowfabric.settings import Deadlines, Settings
from tests.blackhole import black_hole
from tests.chaos.valkey.load import check_that_nothing_was_lost, under_load
from tests.valkey_cluster import own_server, until
from tests.valkey_servers import ValkeyNode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SETTINGS = Settings(deadlines=Deadlines(connect_s=1, command_s=3), poll_ms=200)


@pytest.fixture
def node() -> Iterator[ValkeyNode]:
    """A server that a test may kill."""
    yield from own_server("chaos")


@asynccontextmanager
async def engines(port: int, options: str = "") -> AsyncIterator[tuple[Engine, Engine]]:
    """Two engines with connections of their own, as in two processes."""
    url = f"valkey://127.0.0.1:{port}/0{options}"
    async with await open_engine(url, settings=SETTINGS) as one, await open_engine(url, settings=SETTINGS) as other:
        yield one, other


async def test_a_death_during_a_run_loses_nothing_that_was_acknowledged(node: ValkeyNode) -> None:
    async with engines(node.port) as (one, other):
        async with under_load(one, other) as load:
            for _ in range(2):
                await asyncio.to_thread(node.kill)
                await asyncio.to_thread(node.start)
                await load.wait_for_more(5)

        await check_that_nothing_was_lost(one, load)


async def test_a_death_during_and_after_a_rewrite_of_the_append_only_file_loses_nothing(node: ValkeyNode) -> None:
    async with engines(node.port) as (one, other):
        async with under_load(one, other) as load:
            node.execute("CONFIG", "SET", "rdb-key-save-delay", 5000)  # the rewrite takes a while
            node.execute("BGREWRITEAOF")
            await load.wait_for_more(3)
            assert node.info("persistence")["aof_rewrite_in_progress"] == "1"
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start)
            await load.wait_for_more(3)
            node.execute("BGREWRITEAOF")
            await until(lambda: node.info("persistence")["aof_rewrite_in_progress"] == "0", "the rewrite")
            await asyncio.to_thread(node.kill)
            await asyncio.to_thread(node.start)

        await check_that_nothing_was_lost(one, load)


async def test_a_paused_server_delays_work_and_loses_nothing(node: ValkeyNode) -> None:
    async with engines(node.port) as (one, other):
        async with under_load(one, other) as load:
            node.pause()
            outages = load.outages
            await until(lambda: load.outages > outages, "a caller to get an answer")
            node.resume()

        await check_that_nothing_was_lost(one, load)


async def test_connections_that_fall_into_a_black_hole_are_replaced_and_nothing_is_lost(node: ValkeyNode) -> None:
    async with black_hole("127.0.0.1", node.port) as hole, engines(hole.port) as (one, other):
        async with under_load(one, other) as load:
            for _ in range(2):
                hole.swallow()
                await load.wait_for_more(5)

        await check_that_nothing_was_lost(one, load)
