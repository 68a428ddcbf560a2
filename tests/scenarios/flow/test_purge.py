"""Decision 37: a flow is purged with everything it owns after its last member was purged."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.engine.operations.flows import GraphEdge, NoWait
from flowfabric.ids import SeededMinter
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.flow import Flow
from flowfabric.rules import retention
from flowfabric.stores.catalog import TABLES
from flowfabric.stores.queries import Scan
from flowfabric.testing.flaky_store import FlakyStore, Loss
from flowfabric.testing.flow_invariants import check_flow_invariants
from tests.executions import create_request
from tests.scenarios.flow_env import FlowEnv, any_of

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
FLOW_TABLES: tuple[type[msgspec.Struct], ...] = (Flow, *retention.FLOW_OWNED)


async def flow_row_counts(engine: Engine) -> dict[str, int]:
    """Count the rows of each table keyed by flow."""
    counts = {row.__name__: len(await engine.store.scan(Scan(row, limit=10_000))) for row in FLOW_TABLES}
    return {name: count for name, count in counts.items() if count}


async def purges_no_flow(flow_id: str) -> None:
    """Simulate a crash after a member was purged."""


async def row_counts(engine: Engine) -> dict[str, int]:
    """Count the rows of each table owned by executions or flows."""
    names = ("ff_exec", "ff_payload", "ff_result", "ff_attempt", "ff_flow", "ff_edge", "ff_dep", "ff_disp", "ff_pend")
    tables = [table for table in TABLES if table.name.startswith((*names, "ff_cancel"))]
    counts = {table.name: len(await engine.store.scan(Scan(table.row, limit=10_000))) for table in tables}
    return {name: count for name, count in counts.items() if count}


def test_every_table_keyed_by_flow_is_purged_with_the_flow() -> None:
    keyed = {table.row for table in TABLES if table.key[0] == "flow_id"}

    assert keyed == set(FLOW_TABLES)


async def test_a_flow_is_purged_with_its_last_member(flow: FlowEnv) -> None:
    await flow.begin("abcd")
    await flow.join("ab", "c", any_of("cancel_remaining"))
    await flow.edge("c", "d")
    await flow.succeed_and_cascade("a")
    await flow.sweep("edge_cancel_dispatcher")
    await flow.cancel("c")
    await flow.sweep("flow_projector")
    assert await flow.sweep("retention_trimmer", after_ms=DAY_MS) == [3]
    assert await flow_row_counts(flow.engine) == {
        "Flow": 1,
        "FlowMember": 4,
        "Edge": 3,
        "EdgeGroup": 2,
        "FlowSummary": 1,
    }
    assert await flow.engine.list_flow_members(flow.id) == flow.ids("abcd")

    await flow.cancel("d")
    assert await flow.sweep("retention_trimmer", after_ms=DAY_MS) == [1]

    assert await row_counts(flow.engine) == {}
    assert await flow.engine.describe_flow(flow.id) is None
    assert await flow.engine.get_flow_summary(flow.id) is None
    assert await flow.engine.list_flow_members(flow.id) == []


@pytest.mark.parametrize("by", ["purge_execution", "trim_retention"])
async def test_a_flow_is_purged_by_every_operation_that_purges_its_members(flow: FlowEnv, by: str) -> None:
    await flow.begin("abc", edges=("ab", "bc"))
    await flow.cancel("a", "b", "c")
    flow.clock.advance_ms(DAY_MS)

    if by == "purge_execution":
        assert await asyncio.gather(*map(flow.engine.purge_execution, flow.ids("abc"))) == [True] * 3
    else:
        assert await flow.engine.trim_retention(flow.partition, "default") == 3

    assert await row_counts(flow.engine) == {}


async def test_a_flow_whose_last_member_was_purged_before_a_crash_is_purged_later(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    await flow.begin("ab", edges=("ab",))
    await flow.cancel("a", "b")
    flow.clock.advance_ms(DAY_MS)

    monkeypatch.setattr(flow.engine.purger, "_check_flow", purges_no_flow)
    assert await flow.sweep("retention_trimmer") == [2]
    assert (await flow_row_counts(flow.engine))["Flow"] == 1

    assert await flow.sweep("flow_retention") == [1]
    assert await row_counts(flow.engine) == {}


async def test_a_flow_is_checked_again_when_its_members_are_due(flow: FlowEnv) -> None:
    await flow.begin("ab")
    await flow.succeed("a")
    assert await flow.sweep("flow_retention", 2, after_ms=HOUR_MS) == [0, 0]
    assert (await flow.load(Flow, flow.id)).purge_check_at > flow.clock.now

    await flow.succeed("b")
    assert await flow.sweep("flow_retention", after_ms=2 * HOUR_MS) == [0]
    due = max([(await flow.row(name)).purge_at or 0 for name in "ab"])
    assert due - DAY_MS <= (await flow.load(Flow, flow.id)).purge_check_at - retention.FLOW_RECHECK_DELAY_MS <= due
    await check_flow_invariants(flow.engine)


async def test_a_replayed_member_prevents_the_purge_of_its_flow(flow: FlowEnv) -> None:
    await flow.begin("ab")
    await flow.fail("a", "b")
    await flow.engine.replay_execution(flow.names["a"])
    flow.clock.advance_ms(DAY_MS)

    assert await flow.sweep("retention_trimmer") == [1]
    assert not await flow.engine.purge_flow(flow.id)
    with pytest.raises(errors.NotFound):
        await flow.engine.replay_execution(flow.names["b"])
    assert (await flow_row_counts(flow.engine))["FlowMember"] == 2


async def test_operations_on_a_purged_flow_are_refused(flow: FlowEnv) -> None:
    await flow.begin("ab")
    edge = await flow.edge("a", "b")
    await flow.cancel("a", "b")
    await flow.sweep("retention_trimmer", after_ms=DAY_MS)
    late = await flow.create("late")

    a, b = flow.names["a"], flow.names["b"]
    for verb in (
        flow.engine.add_execution_to_flow(flow.id, late),
        flow.engine.stage_dependency_edge(flow.id, flow.engine.minter.uuid(), a, b),
        flow.engine.set_edge_group_policy(flow.id, late, any_of("let_run")),
        flow.engine.set_flow_tag(flow.id, "a.b", "c"),
        flow.engine.cancel_flow(flow.id),
        flow.engine.apply_dependency_to_child(flow.id, edge, b, a),
        flow.engine.replay_execution(a),
    ):
        with pytest.raises(errors.NotFound):
            await verb
    with pytest.raises(errors.InvalidDependency):
        await flow.engine.resolve_dependency(flow.id, edge, b, "success")
    assert (await flow.engine.cascade_completion(a)).resolved == 0
    assert not await flow.engine.purge_flow(flow.id)
    assert await flow_row_counts(flow.engine) == {}


async def test_the_id_of_a_purged_flow_can_be_reused(flow: FlowEnv) -> None:
    a, b = flow.new_id(), flow.new_id()
    nodes = [create_request(name) for name in (a, b)]
    edges = [GraphEdge(a, b, edge_id=flow.engine.minter.uuid())]
    flow.names.update(a=a, b=b)
    for _ in range(2):
        made = await flow.engine.create_flow_graph(flow.id, nodes, edges)
        assert isinstance(made, flow_answers.GraphCreated)
        again = await flow.engine.create_flow_graph(flow.id, nodes, edges)
        assert isinstance(again, flow_answers.FlowExists)
        await flow.succeed_and_cascade("a")
        await flow.succeed("b")
        assert await flow.state("a", "b") == "completed completed"
        assert await flow.sweep("retention_trimmer", after_ms=DAY_MS) == [2]
        assert await row_counts(flow.engine) == {}


async def test_a_purge_deletes_a_cancel_in_progress(flow: FlowEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    await flow.begin("ab", policy={"stream_policy": {"retention_ttl_ms": 1000}})
    await flow.engine.cancel_flow_header(flow.id)
    for name in "ab":  # the process that should acknowledge it has died
        await flow.cancel(name)
    assert (await flow.backlog())[1] == ["a", "b"]
    flow.clock.advance_ms(1000)

    assert await flow.sweep("retention_trimmer") == [2]

    assert await row_counts(flow.engine) == {}
    assert await flow.sweep("cancel_reconciler") == [0]


async def test_a_purge_deletes_pending_sibling_cancels(flow: FlowEnv) -> None:
    await flow.begin("abc", policy={"stream_policy": {"retention_ttl_ms": 1000}})
    await flow.join("ab", "c", any_of("cancel_remaining"))
    await flow.succeed_and_cascade("a")
    assert await flow.pending_sibling_cancel("c") is not None
    await flow.cancel("b", "c")
    flow.clock.advance_ms(1000)

    assert await flow.sweep("retention_trimmer") == [3]

    assert await row_counts(flow.engine) == {}
    for sweep in ("edge_cancel_dispatcher", "edge_cancel_reconciler", "dependency_reconciler", "completion_dispatch"):
        assert await flow.sweep(sweep) == [0]


async def test_an_empty_flow_is_purged_only_when_it_is_cancelled(flow: FlowEnv) -> None:
    await flow.begin()
    other = await FlowEnv(flow.engine, flow.clock).begin()
    await other.engine.cancel_flow(other.id, wait=NoWait())
    assert await flow.sweep("flow_retention", after_ms=DAY_MS - 1) == [0]
    flow.clock.advance_ms(1)

    assert await flow.sweep("flow_retention") == [1]

    assert await flow.engine.describe_flow(other.id) is None
    assert await flow.engine.describe_flow(flow.id) is not None


async def test_a_member_added_during_the_check_prevents_the_purge(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    await flow.begin("a")
    await flow.cancel("a")
    flow.clock.advance_ms(DAY_MS)
    late = await flow.create("late")
    left_of = flow.engine.purger._find_remaining

    async def joins_meanwhile(flow_id: str) -> Any:
        found = await left_of(flow_id)
        monkeypatch.undo()
        await flow.engine.add_execution_to_flow(flow.id, late)
        return found

    monkeypatch.setattr(flow.engine.purger, "_find_remaining", joins_meanwhile)
    assert await flow.sweep("retention_trimmer") == [1]

    assert await flow.engine.list_flow_members(flow.id) == flow.ids(["a", "late"])
    assert await flow.engine.resolve_execution_flow_id(late) == flow.id


async def test_a_member_recreated_during_the_check_prevents_the_purge(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    await flow.begin("a")
    await flow.cancel("a")
    flow.clock.advance_ms(DAY_MS)
    left_of = flow.engine.purger._find_remaining

    async def comes_again(flow_id: str) -> Any:
        found = await left_of(flow_id)
        monkeypatch.undo()
        await flow.engine.create_execution(execution_id=flow.names["a"])
        await flow.engine.add_execution_to_flow(flow.id, flow.names["a"])
        return found

    monkeypatch.setattr(flow.engine.purger, "_find_remaining", comes_again)
    assert await flow.sweep("retention_trimmer") == [1]

    assert await flow.engine.resolve_execution_flow_id(flow.names["a"]) == flow.id
    assert await flow.engine.describe_flow(flow.id) is not None


async def test_a_flow_is_purged_despite_lost_messages(flow: FlowEnv) -> None:
    await flow.begin("ab", edges=("ab",))
    await flow.cancel("a", "b")
    flow.clock.advance_ms(DAY_MS)
    for loss in (Loss.REQUEST, Loss.UNSURE, Loss.REPLY):
        store = FlakyStore(flow.engine.store)
        engine = Engine(store, minter=SeededMinter(7))
        store.lose("commit", loss, after=1)
        for name in flow.ids("ab"):
            await engine.purge_execution(name)
        assert await row_counts(engine) == {}
        flow = await FlowEnv(flow.engine, flow.clock).begin("ab")
        await flow.cancel("a", "b")
        flow.clock.advance_ms(DAY_MS)


async def test_the_purge_check_of_a_large_flow_loads_one_member(flow: FlowEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"m{number:02}" for number in range(40)]
    await flow.begin(names)
    await flow.cancel(*names)
    scans = 0
    scan = flow.engine.runtime.scan

    async def counted(request: Scan) -> list[Any]:
        nonlocal scans
        scans += request.row.__name__ == "FlowMember"
        return await scan(request)

    monkeypatch.setattr(flow.engine.runtime, "scan", counted)
    flow.clock.advance_ms(DAY_MS)
    for name in names:
        assert await flow.engine.purge_execution(flow.names[name])

    assert await row_counts(flow.engine) == {}
    assert scans <= 41, "one scan per purge"


async def test_a_large_flow_is_purged_in_parts_and_its_members_are_checked_once(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow.engine.store, "deletes_in_pages", True, raising=False)
    monkeypatch.setattr(retention, "MAX_PURGED_ROWS", 3)
    names = "abcdefgh"
    await flow.begin(names, edges=[f"{name}h" for name in names[:-1]])
    await flow.cancel(*names)
    flow.clock.advance_ms(DAY_MS)
    monkeypatch.setattr(flow.engine.purger, "_check_flow", purges_no_flow)
    assert await flow.sweep("retention_trimmer") == [len(names)]
    checks = 0
    find_remaining = flow.engine.purger._find_remaining

    async def counted(flow_id: str) -> Any:
        nonlocal checks
        found = await find_remaining(flow_id)
        checks += 1
        return found

    monkeypatch.setattr(flow.engine.purger, "_find_remaining", counted)
    assert await flow.sweep("flow_retention") == [1]

    assert await row_counts(flow.engine) == {}
    assert checks == 1


async def test_a_member_added_between_two_parts_of_a_purge_keeps_the_flow(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow.engine.store, "deletes_in_pages", True, raising=False)
    monkeypatch.setattr(retention, "MAX_PURGED_ROWS", 3)
    await flow.begin("abcdefgh")
    await flow.cancel(*"abcdefgh")
    flow.clock.advance_ms(DAY_MS)
    late = await flow.create("late")
    name_rows = flow.engine.purger._name_rows
    parts = 0

    async def joined_meanwhile(tables: Any, owner_id: str) -> Any:
        nonlocal parts
        named = await name_rows(tables, owner_id)
        parts += owner_id == flow.id
        if parts == 2 and owner_id == flow.id:
            await flow.engine.add_execution_to_flow(flow.id, late)
        return named

    monkeypatch.setattr(flow.engine.purger, "_name_rows", joined_meanwhile)
    await flow.sweep("retention_trimmer")

    assert late in await flow.engine.list_flow_members(flow.id)
    assert await flow.engine.resolve_execution_flow_id(late) == flow.id
