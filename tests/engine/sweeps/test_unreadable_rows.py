"""Unreadable edges and joins are reported and skipped: a sweep continues with the others.

A memory store keeps no encoded values, so none of its rows can be unreadable.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from pathlib import Path

import apsw
import asyncpg
import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.flow import CompletionDispatch, FlowSummary
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from flowfabric.stores.postgres import PostgresStore
from flowfabric.stores.queries import Scan
from flowfabric.stores.sqlite import SQLiteStore
from tests.conftest import emptied
from tests.scenarios.flow_env import FlowEnv, any_of

Spoil = Callable[[str, str, str], Awaitable[None]]


@pytest.fixture(params=["sqlite", "postgres"])
async def encoding_store(
    request: pytest.FixtureRequest, clock: ManualClock, tmp_path: Path
) -> AsyncIterator[tuple[Store, Spoil]]:
    """A store that keeps encoded values, and a function that writes an unknown code into a column of some rows."""
    store: Store
    if request.param == "sqlite":
        store = SQLiteStore(tmp_path / "ff.db", clock)

        async def corrupt(table: str, column: str, where: str) -> None:
            with closing(apsw.Connection(str(tmp_path / "ff.db"))) as db:
                db.execute(f"update {table} set {column} = 99 where {where}")
                assert db.changes() > 0
    else:
        dsn = await emptied(request.getfixturevalue("own_database"))
        store = PostgresStore(dsn, clock)

        async def corrupt(table: str, column: str, where: str) -> None:
            db = await asyncpg.connect(dsn)
            assert await db.execute(f"update {table} set {column} = 99 where {where}") != "UPDATE 0"
            await db.close()

    await store.open(migrate=True)
    yield store, corrupt
    await store.close()


@pytest.fixture
async def flow(encoding_store: tuple[Store, Spoil], clock: ManualClock) -> FlowEnv:
    return FlowEnv(Engine(encoding_store[0], minter=SeededMinter(1), settings=Settings(dispatch=False)), clock)


@pytest.fixture
def corrupt(encoding_store: tuple[Store, Spoil]) -> Spoil:
    return encoding_store[1]


@pytest.mark.parametrize("sweep", ["completion_dispatch", "dependency_reconciler"])
async def test_a_sweep_continues_past_an_unreadable_applied_edge(
    flow: FlowEnv, corrupt: Spoil, sweep: str, caplog: pytest.LogCaptureFixture
) -> None:
    await flow.begin("abcd")
    for downstream in "bcd":
        await flow.edge("a", downstream)
    await flow.succeed("a")
    bad = flow.edges["a", "b"]
    await corrupt("ff_dependency", "dependency_kind", f"edge_id = '{bad}'")

    with caplog.at_level(logging.ERROR):
        done = await flow.engine.sweep_once(sweep)

    assert done.processed == 2
    assert done.errors >= 1
    assert bad in caplog.text
    assert await flow.state("b", "c", "d") == "waiting_children waiting waiting"


async def test_the_reconciler_continues_past_an_unreadable_join(
    flow: FlowEnv, corrupt: Spoil, caplog: pytest.LogCaptureFixture
) -> None:
    await flow.begin("abc")
    for downstream in "bc":
        await flow.edge("a", downstream)
    await flow.succeed("a")
    await corrupt("ff_edge_group", "policy_variant", f"downstream_execution_id = '{flow.names['b']}'")

    with caplog.at_level(logging.ERROR):
        done = await flow.engine.sweep_once("dependency_reconciler")

    assert done.errors >= 1
    assert flow.names["b"] in caplog.text
    assert await flow.state("b", "c") == "waiting_children waiting"


async def test_the_reconciler_counts_the_readable_edges_of_a_join(flow: FlowEnv, corrupt: Spoil) -> None:
    await flow.begin("abc")
    await flow.join("ab", "c", any_of("let_run"))
    await corrupt("ff_dependency", "dependency_kind", f"edge_id = '{flow.edges['a', 'c']}'")
    # The cancel records nothing on its edge.
    await flow.engine.cancel_execution(flow.names["b"], source="flow_cascade")
    await flow.engine.cancel_execution(flow.names["a"], source="flow_cascade")

    done = await flow.engine.sweep_once("dependency_reconciler")

    assert (done.processed, done.errors) == (1, 1)
    assert await flow.counts("c") == "0/1/0 of 2 pending"


@pytest.mark.parametrize("table", ["ff_edge", "ff_dependency", "ff_edge_group", "ff_exec_core"])
async def test_an_outcome_with_many_edges_reaches_the_readable_ones(
    flow: FlowEnv, corrupt: Spoil, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", 1)
    monkeypatch.setattr("flowfabric.engine.flows.completion_dispatcher.MAX_EDGES_PER_STEP", 2)
    children = "bcdefg"
    await flow.begin("a" + children)
    for downstream in children:
        await flow.edge("a", downstream)
    await flow.succeed("a")
    columns = {"ff_edge_group": "policy_variant", "ff_exec_core": "public_state"}
    for name in "bdf":
        edge, child = flow.edges["a", name], flow.names[name]
        where = {
            "ff_edge_group": f"downstream_execution_id = '{child}'",
            "ff_exec_core": f"execution_id = '{child}'",
        }
        await corrupt(table, columns.get(table, "dependency_kind"), where.get(table, f"edge_id = '{edge}'"))

    await flow.engine.sweep_once("completion_dispatch")

    assert await flow.state(*"ceg") == "waiting waiting waiting"
    assert await flow.engine.store.scan(Scan(CompletionDispatch)) == []


async def test_a_cascade_continues_past_an_unreadable_edge(flow: FlowEnv, corrupt: Spoil) -> None:
    await flow.begin("abc")
    for downstream in "bc":
        await flow.edge("a", downstream)
    await flow.succeed("a")
    await corrupt("ff_edge", "dependency_kind", f"edge_id = '{flow.edges['a', 'b']}'")

    assert (await flow.engine.cascade_completion(flow.names["a"])).resolved == 1

    assert await flow.state("c") == "waiting"


async def test_the_projector_continues_past_unreadable_flows(
    flow: FlowEnv, corrupt: Spoil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.sweeps.flows.FLOWS_PAGE_SIZE", 1)
    flows = [await FlowEnv(flow.engine, flow.clock).begin("a") for _ in range(4)]
    for bad in sorted(flows, key=lambda one: one.id)[:2]:
        await corrupt("ff_flow_core", "public_flow_state", f"flow_id = '{bad.id}'")

    done = await flow.engine.sweep_once("flow_projector")

    assert (done.processed, done.errors) == (2, 2)
    assert len(await flow.engine.store.scan(Scan(FlowSummary))) == 2


async def test_a_list_that_is_not_tolerant_reports_what_is_unreadable(flow: FlowEnv, corrupt: Spoil) -> None:
    await flow.begin("ab")
    await flow.edge("a", "b")
    await corrupt("ff_edge", "dependency_kind", "true")

    with pytest.raises(errors.Corruption, match="edge: dependency_kind: 99 is not a known code"):
        await flow.engine.list_outgoing_edges(flow.id, flow.names["a"])
