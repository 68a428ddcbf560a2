"""What others still need is kept: a node whose result is read later goes when those who read it need it no more."""

from __future__ import annotations

import pytest

from flowfabric.model.flow import CompletionDispatch
from flowfabric.rules.execution import cancel
from flowfabric.rules.flow import successors
from tests.scenarios.flowing import Flowing

DAY_MS = 86_400_000
READ = '{"kept_for_successors": true}'


async def test_a_result_that_is_read_later_is_kept_until_its_reader_has_succeeded(flow: Flowing) -> None:
    await flow.begin()
    await flow.add("a", policy=READ)
    await flow.add("b")
    await flow.edge("a", "b")
    await flow.succeed("a", result=b"7")
    await flow.cascade("a")

    for _ in range(3):
        flow.clock.advance_ms(DAY_MS)
        assert await flow.sweep("retention_trimmer") == [0]
    assert await flow.engine.get_execution_result(flow.names["a"]) == b"7"

    await flow.succeed("b")
    flow.clock.advance_ms(DAY_MS)
    assert await flow.sweep("retention_trimmer") == [2]


async def test_a_result_is_kept_for_the_replay_of_a_reader_that_failed(flow: Flowing) -> None:
    await flow.begin()
    await flow.add("a", policy=READ)
    await flow.add("b")
    await flow.edge("a", "b")
    await flow.succeed("a", result=b"7")
    await flow.cascade("a")
    flow.clock.advance_ms(DAY_MS // 2)
    await flow.fail("b")
    flow.clock.advance_ms(DAY_MS - 1)

    assert await flow.sweep("retention_trimmer") == [0]
    flow.clock.advance_ms(1)
    assert await flow.sweep("retention_trimmer") == [1], "the reader"
    flow.clock.advance_ms(1000)
    assert await flow.sweep("retention_trimmer") == [1]


async def test_others_go_when_their_own_time_is_over(flow: Flowing) -> None:
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
    assert await flow.engine.describe_execution(flow.names["a"]) is None, "nobody said that it is read"
    assert await flow.state("f") == "cancelled", "b may run without its result, and has to see that it left none"
    await flow.cancel("b")
    flow.clock.advance_ms(DAY_MS)
    assert await flow.sweep("retention_trimmer") == [2], "nobody goes on without it any more"


async def test_a_chain_that_was_skipped_goes_at_once(flow: Flowing) -> None:
    await flow.begin("abcdef", policy={"kept_for_successors": True, "retry_policy": {"max_retries": 0}})
    await flow.chain("abcdef")
    await flow.fail("a")
    await flow.cascade("a")
    flow.clock.advance_ms(DAY_MS)

    assert await flow.sweep("retention_trimmer") == [6]


async def test_very_many_readers_are_looked_up(flow: Flowing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(successors, "MAX_NAMED_SUCCESSORS", 2)
    monkeypatch.setattr("flowfabric.engine.retention.purger.EDGES_PAGE", 2)
    await flow.begin()
    await flow.add("a", policy=READ)
    for name in "vwxyz":
        await flow.add(name)
        await flow.edge("a", name)
    assert (await flow.row("a")).successors == successors.MANY
    await flow.succeed("a", result=b"7")
    await flow.cascade("a")
    await flow.succeed(*"vwxy")
    flow.clock.advance_ms(DAY_MS)

    assert await flow.sweep("retention_trimmer", 2) == [4, 0], "all but the one that z still needs"
    await flow.succeed("z")
    flow.clock.advance_ms(DAY_MS)
    assert await flow.sweep("retention_trimmer") == [2]


@pytest.mark.parametrize("few", [2, 128])
async def test_a_child_that_very_many_read_is_kept_for_its_parent_too(
    flow: Flowing, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(successors, "MAX_NAMED_SUCCESSORS", few)
    await flow.begin()
    parent = await flow.create("p")
    await flow.add("a", policy=READ, parent_id=parent)
    for name in "xyz":
        await flow.add(name)
        await flow.edge("a", name)
    await flow.succeed("a", result=b"7")
    await flow.cascade("a")
    await flow.succeed(*"xyz")
    flow.clock.advance_ms(DAY_MS)

    assert await flow.sweep("retention_trimmer") == [3], "all but the one that its parent will come to again"
    await flow.succeed("p")
    flow.clock.advance_ms(DAY_MS)
    assert await flow.sweep("retention_trimmer") == [2]


@pytest.mark.parametrize("few", [1, 128])
async def test_an_end_that_was_left_to_the_reconciler_is_not_forgotten_with_the_execution(
    flow: Flowing, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(successors, "MAX_NAMED_SUCCESSORS", few)
    await flow.begin("bc")
    await flow.add("a", policy={"stream_policy": {"retention_ttl_ms": 0}})
    await flow.edge("a", "b")
    await flow.edge("a", "c", dependency_kind="any_outcome")
    await flow.engine.cancel_execution(flow.names["a"], reason="r", source="flow_cascade")
    flow.clock.advance_ms(1)

    assert await flow.sweep("retention_trimmer") == [1]
    await flow.sweep("dependency_reconciler")

    assert await flow.state("b", "c") == "skipped waiting"


async def test_a_sibling_that_many_wait_for_does_not_tell_them_again_when_it_goes(
    flow: Flowing, monkeypatch: pytest.MonkeyPatch
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

    assert await flow.one(CompletionDispatch, flow.names["a"]) is None
