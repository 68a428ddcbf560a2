"""A node whose result is read later is purged only when its readers no longer need it."""

from __future__ import annotations

import pytest

from flowfabric.model.flow import CompletionDispatch
from flowfabric.rules.execution import cancel
from flowfabric.rules.flow import successors
from tests.scenarios.flow_env import FlowEnv

DAY_MS = 86_400_000
READ = '{"kept_for_successors": true}'


async def test_a_node_is_not_purged_before_its_reader_succeeded(flow: FlowEnv) -> None:
    await flow.begin()
    await flow.add("a", policy=READ)
    await flow.add("b")
    await flow.edge("a", "b")
    await flow.succeed_and_cascade("a", result=b"7")

    for _ in range(3):
        assert await flow.sweep("retention_trimmer", after_ms=DAY_MS) == [0]
    assert await flow.engine.get_execution_result(flow.names["a"]) == b"7"

    await flow.succeed("b")
    assert await flow.sweep("retention_trimmer", after_ms=DAY_MS) == [2]


async def test_a_node_is_kept_for_the_replay_of_a_failed_reader(flow: FlowEnv) -> None:
    await flow.begin()
    await flow.add("a", policy=READ)
    await flow.add("b")
    await flow.edge("a", "b")
    await flow.succeed_and_cascade("a", result=b"7")
    flow.clock.advance_ms(DAY_MS // 2)
    await flow.fail("b")
    flow.clock.advance_ms(DAY_MS - 1)

    assert await flow.sweep("retention_trimmer") == [0]
    assert await flow.sweep("retention_trimmer", after_ms=1) == [1], "the reader"
    assert await flow.sweep("retention_trimmer", after_ms=1000) == [1]


async def test_a_node_without_readers_is_purged_after_its_own_retention(flow: FlowEnv) -> None:
    await flow.begin()
    await flow.add("a")
    await flow.add("f", policy=READ)
    await flow.add("b")
    await flow.edge("a", "b")
    await flow.edge("f", "b")
    await flow.succeed("a", result=b"7")
    await flow.cancel("f")
    flow.clock.advance_ms(DAY_MS)

    assert await flow.sweep("retention_trimmer") == [1]
    assert await flow.engine.describe_execution(flow.names["a"]) is None, "it is not marked as read"
    assert await flow.state("f") == "cancelled", "b still has to see that it has no result"
    await flow.cancel("b")
    assert await flow.sweep("retention_trimmer", after_ms=DAY_MS) == [2], "no reader is left"


async def test_a_skipped_chain_is_purged_in_one_sweep(flow: FlowEnv) -> None:
    await flow.begin("abcdef", policy={"kept_for_successors": True, "retry_policy": {"max_retries": 0}})
    await flow.chain("abcdef")
    await flow.fail_and_cascade("a")
    flow.clock.advance_ms(DAY_MS)

    assert await flow.sweep("retention_trimmer") == [6]


async def test_a_node_with_many_readers_is_kept_for_the_last(flow: FlowEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(successors, "MAX_NAMED_SUCCESSORS", 2)
    monkeypatch.setattr("flowfabric.engine.retention.purger.EDGES_PAGE", 2)
    await flow.begin()
    await flow.add("a", policy=READ)
    for name in "vwxyz":
        await flow.add(name)
        await flow.edge("a", name)
    assert (await flow.row("a")).successors == successors.MANY
    await flow.succeed_and_cascade("a", result=b"7")
    await flow.succeed(*"vwxy")
    flow.clock.advance_ms(DAY_MS)

    assert await flow.sweep("retention_trimmer", 2) == [4, 0], "all but the one that z reads"
    await flow.succeed("z")
    assert await flow.sweep("retention_trimmer", after_ms=DAY_MS) == [2]


@pytest.mark.parametrize("max_named", [2, 128])
async def test_a_child_with_many_readers_is_kept_for_its_parent(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch, max_named: int
) -> None:
    monkeypatch.setattr(successors, "MAX_NAMED_SUCCESSORS", max_named)
    await flow.begin()
    parent = await flow.create("p")
    await flow.add("a", policy=READ, parent_id=parent)
    for name in "xyz":
        await flow.add(name)
        await flow.edge("a", name)
    await flow.succeed_and_cascade("a", result=b"7")
    await flow.succeed(*"xyz")
    flow.clock.advance_ms(DAY_MS)

    assert await flow.sweep("retention_trimmer") == [3], "all but the child of the unfinished parent"
    await flow.succeed("p")
    assert await flow.sweep("retention_trimmer", after_ms=DAY_MS) == [2]


@pytest.mark.parametrize("max_named", [1, 128])
async def test_a_purge_keeps_a_completion_left_to_the_reconciler(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch, max_named: int
) -> None:
    monkeypatch.setattr(successors, "MAX_NAMED_SUCCESSORS", max_named)
    await flow.begin("bc")
    await flow.add("a", policy={"stream_policy": {"retention_ttl_ms": 0}})
    await flow.edge("a", "b")
    await flow.edge("a", "c", dependency_kind="any_outcome")
    await flow.engine.cancel_execution(flow.names["a"], reason="r", source="flow_cascade")
    flow.clock.advance_ms(1)

    assert await flow.sweep("retention_trimmer") == [1]
    await flow.sweep("dependency_reconciler")

    assert await flow.state("b", "c") == "skipped waiting"


async def test_the_purge_of_a_cancelled_sibling_does_not_dispatch_its_completion_again(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(successors, "MAX_NAMED_SUCCESSORS", 1)
    await flow.begin("bc")
    await flow.add("a", policy={"stream_policy": {"retention_ttl_ms": 0}})
    await flow.edge("a", "b")
    await flow.edge("a", "c")
    await flow.engine.cancel_execution(flow.names["a"], reason=cancel.QUORUM_SATISFIED)
    await flow.sweep("completion_dispatch")
    assert await flow.state("b", "c") == "skipped skipped"
    flow.clock.advance_ms(1)

    assert await flow.sweep("retention_trimmer") == [1]

    assert await flow.load(CompletionDispatch, flow.names["a"]) is None
