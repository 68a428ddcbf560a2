"""S-052 to S-055 and EX-076: replaying members; a skipped one waits again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest

from flowfabric import errors
from flowfabric.cursors import FROM_THE_START
from flowfabric.engine.flows.bulk_cancel import Dispositions
from flowfabric.engine.operations.flows import WaitTimeout
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.answers.execution import Replayed
from flowfabric.model.event import Topic
from flowfabric.model.states import PublicState
from flowfabric.testing.flow_invariants import check_flow_invariants
from tests.scenarios.flow_env import WAITING, WAITS, FlowEnv, quorum

REPLAYED = WAITING.replace("pending_first_attempt", "pending_replay_attempt")
WAITS_AGAIN = WAITS.replace("pending_first_attempt", "pending_replay_attempt")


async def replay(flow: FlowEnv, *names: str) -> list[str]:
    return [(await flow.engine.replay_execution(flow.names[name])).public_state.value for name in names]


async def replay_events(flow: FlowEnv, name: str) -> list[dict[str, Any]]:
    events = await flow.engine.store.history(flow.names[name], Topic.OPERATOR, 10)
    return [msgspec.json.decode(one.event.details or "{}") for one in events if one.event.operator == "replayed"]


@pytest.mark.spec("S-052")
async def test_a_replayed_skipped_member_waits_for_its_upstream_again(flow: FlowEnv) -> None:
    await flow.begin("ab", edges=("ab",))
    await flow.fail_and_cascade("a")
    assert await flow.state("b") == "skipped"

    assert await replay(flow, "a", "b") == ["waiting", "waiting_children"]

    assert (await flow.vector("a"), await flow.vector("b")) == (REPLAYED, WAITS_AGAIN)
    dependency = await flow.dependency("a", "b")
    assert (dependency.state, dependency.last_resolved_at, dependency.outcome) == ("unsatisfied", None, None)
    assert await flow.counts("b") == "0/0/0 of 1 pending"
    assert (await replay_events(flow, "b"))[0]["branch"] == "skipped_flow_member"
    assert (await replay_events(flow, "b"))[0]["groups_reset"] == 1
    feed = await flow.engine.subscribe_operator_event(FROM_THE_START)
    events = [await feed.next(timeout_s=0), await feed.next(timeout_s=0)]
    assert [event and event.details for event in events] == [
        {"branch": "normal"},
        {"branch": "skipped_flow_member", "groups_reset": 1},
    ]
    await flow.succeed_and_cascade("a")
    assert await flow.vector("b") == REPLAYED
    assert (await flow.claim("b")).attempt_type == "replay"


@pytest.mark.spec("S-053")
async def test_replaying_only_the_child_skips_it_again(flow: FlowEnv) -> None:
    await flow.begin("ab", edges=("ab",))
    await flow.fail_and_cascade("a")

    await replay(flow, "b")
    assert await flow.vector("b") == WAITS_AGAIN
    await flow.sweep("dependency_reconciler")

    row = await flow.row("b")
    assert (row.public_state, row.replay_count) == ("skipped", 1)


@pytest.mark.spec("S-054")
async def test_a_replay_resets_a_quorum_group(flow: FlowEnv) -> None:
    await flow.begin_join("123", "b", quorum(2, "let_run"))
    await flow.succeed("1")
    await flow.fail("2", "3")
    await flow.cascade("1", "2", "3")
    assert (await flow.state("b"), await flow.counts("b")) == ("skipped", "1/2/0 of 3 impossible")

    await replay(flow, "2", "b")
    assert await flow.counts("b") == "1/0/0 of 3 pending"
    await flow.sweep("dependency_reconciler")  # the third one failed as before
    assert (await flow.state("b"), await flow.counts("b")) == ("waiting_children", "1/1/0 of 3 pending")
    await flow.succeed_and_cascade("2")

    assert (await flow.vector("b"), await flow.counts("b")) == (REPLAYED, "2/1/0 of 3 satisfied")


@pytest.mark.spec("S-055")
async def test_a_member_replay_is_refused_before_the_end_and_beyond_its_limit(flow: FlowEnv) -> None:
    await flow.begin()
    await flow.add("a", policy={"max_replay_count": 1, "retry_policy": {"max_retries": 0}})
    claim = await flow.claim("a")

    with pytest.raises(errors.ExecutionNotTerminal):
        await replay(flow, "a")
    await flow.engine.fail(claim.handle, reason="broken")
    assert await replay(flow, "a") == ["waiting"]
    await flow.fail("a")
    with pytest.raises(errors.MaxReplaysExhausted):
        await replay(flow, "a")
    with pytest.raises(errors.NotFound):
        await flow.engine.replay_execution(flow.new_id())
    assert [event["branch"] for event in await replay_events(flow, "a")] == ["normal"]


async def test_the_replay_limit_applies_to_skipped_members(flow: FlowEnv) -> None:
    await flow.begin("a")
    await flow.add("b", policy={"max_replay_count": 1})
    await flow.edge("a", "b")
    await flow.fail_and_cascade("a")
    await replay(flow, "b")
    await flow.sweep("dependency_reconciler")

    with pytest.raises(errors.MaxReplaysExhausted):
        await replay(flow, "b")

    assert await flow.counts("b") == "0/1/0 of 1 impossible"


@pytest.mark.spec("EX-076")
async def test_replaying_a_skipped_member_keeps_satisfied_edges(flow: FlowEnv) -> None:
    await flow.begin_join("ab", "c")
    await flow.succeed("a")
    await flow.fail("b")
    await flow.cascade("a", "b")
    assert await flow.state("c") == "skipped"

    assert await flow.engine.replay_execution(flow.names["c"]) == Replayed(PublicState.WAITING_CHILDREN)

    assert (await flow.dependency("a", "c")).state == "satisfied"
    assert (await flow.dependency("b", "c")).state == "unsatisfied"
    assert await flow.vector("c") == WAITS_AGAIN
    snapshot = await flow.engine.describe_execution(flow.names["c"])
    assert snapshot is not None
    assert snapshot.blocking_detail == "1 dep(s) unsatisfied after replay"
    [entry] = await flow.engine.lease_history(flow.names["c"])
    assert (entry.event, entry.fields["replay_type"]) == ("replay_initiated", "skipped_flow_member")
    with pytest.raises(errors.ExecutionNotEligible):
        await flow.claim("c")
    await replay(flow, "b")
    await flow.succeed_and_cascade("b")
    assert await flow.vector("c") == REPLAYED


async def test_replaying_an_upstream_does_not_reopen_its_dependents(flow: FlowEnv) -> None:
    await flow.begin("abc", edges=("ab",))
    await flow.edge("a", "c", dependency_kind="any_outcome")
    await flow.fail_and_cascade("a")

    await replay(flow, "a")
    await flow.succeed("a")
    [second] = await flow.cascade("a")

    assert second.resolved == 0
    assert await flow.state("b", "c") == "skipped waiting"
    assert (await flow.counts("b"), await flow.counts("c")) == ("0/1/0 of 1 impossible", "1/0/0 of 1 satisfied")


async def test_a_replayed_member_whose_join_is_satisfied_becomes_claimable(flow: FlowEnv) -> None:
    await flow.begin_join("12", "b", quorum(2, "let_run"))
    await flow.fail_and_cascade("1")
    assert await flow.state("b") == "skipped"
    await replay(flow, "1")
    await flow.succeed("1", "2")
    await flow.cascade("2")  # counted on the impossible group; the replayed first one is not

    await replay(flow, "b")
    await flow.sweep("dependency_reconciler")

    assert (await flow.vector("b"), await flow.counts("b")) == (REPLAYED, "2/0/0 of 2 satisfied")


async def test_an_uncounted_completion_is_counted_after_the_replay(flow: FlowEnv) -> None:
    await flow.begin_join("123", "b", quorum(2, "let_run"))
    await flow.fail_and_cascade("1", "2")
    await flow.succeed("3")
    assert await flow.counts("b") == "0/2/0 of 3 impossible"

    await replay(flow, "b")

    assert await flow.counts("b") == "0/0/0 of 3 pending"
    assert (await flow.dependency("3", "b")).state == "unsatisfied"
    await flow.sweep("dependency_reconciler")
    assert (await flow.state("b"), await flow.counts("b")) == ("skipped", "1/2/0 of 3 impossible")


async def test_an_uncounted_result_is_the_input_of_the_replayed_child(flow: FlowEnv) -> None:
    await flow.begin("abc", input_payload=b"orig")
    await flow.edge("a", "c", data_passing_ref="r")
    await flow.edge("b", "c")
    await flow.fail_and_cascade("b")
    await flow.succeed("a", result=b"A")

    await replay(flow, "b", "c")
    await flow.succeed("b")
    await flow.sweep("dependency_reconciler")

    assert (await flow.vector("c"), await flow.payload("c")) == (REPLAYED, b"A")


async def undelivered_completion(flow: FlowEnv) -> None:
    await flow.edge("a", "b")
    await flow.fail("a")


async def completion_before_the_edge(flow: FlowEnv) -> None:
    await flow.fail("a")
    await flow.edge("a", "b")


async def replayed_downstream(flow: FlowEnv) -> None:
    await flow.edge("a", "b")
    await flow.fail_and_cascade("a")
    await replay(flow, "b")


@pytest.mark.parametrize("max_named", [128, 0])
@pytest.mark.parametrize("sweep", ["dependency_reconciler", "completion_dispatch"])
@pytest.mark.parametrize("happened", [undelivered_completion, completion_before_the_edge, replayed_downstream])
async def test_a_replayed_upstream_withdraws_a_completion_that_was_not_delivered(
    flow: FlowEnv,
    monkeypatch: pytest.MonkeyPatch,
    happened: Callable[[FlowEnv], Awaitable[None]],
    sweep: str,
    max_named: int,
) -> None:
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", max_named)
    await flow.begin("abc", edges=("cb",))
    await happened(flow)

    await replay(flow, "a")
    await flow.sweep(sweep, 2)

    assert (await flow.state("a", "b"), await flow.counts("b")) == ("waiting waiting_children", "0/0/0 of 2 pending")
    await flow.succeed("a", "c")
    await flow.sweep(sweep)
    assert (await flow.state("b"), await flow.counts("b")) == ("waiting", "2/0/0 of 2 satisfied")


async def test_a_replay_withdraws_uncounted_outcomes_and_keeps_counted_ones(flow: FlowEnv) -> None:
    await flow.begin("abc", edges=("ab", "ac"))
    await flow.fail("a")
    assert await flow.resolve("a", "b", "failed") == "impossible"
    counted = await flow.dependency("a", "b")

    await replay(flow, "a")

    assert await flow.dependency("a", "b") == counted
    taken_back = await flow.dependency("a", "c")
    assert (taken_back.outcome, taken_back.unfolded_at) == (None, None)


async def test_a_replay_withdraws_only_its_own_completion(flow: FlowEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", 0)
    await flow.begin("abcd", edges=("ab", "cd"))
    await flow.fail("a")
    await flow.succeed("c")

    await replay(flow, "a")
    await flow.sweep("completion_dispatch")

    assert await flow.state("a", "b", "c", "d") == "waiting waiting_children completed waiting"


async def test_a_replay_withdraws_flagged_siblings(flow: FlowEnv) -> None:
    await flow.begin_join("123", "b", quorum(2, "cancel_remaining"))
    await flow.fail_and_cascade("1", "2")
    assert (await flow.group("b")).cancel_siblings_pending_members == flow.names["3"]

    await replay(flow, "1", "2", "b")

    group = await flow.group("b")
    assert (group.cancel_siblings_pending_flag, group.cancel_siblings_pending_members) == (False, None)
    assert await flow.pending_sibling_cancel("b") is None
    await flow.sweep("edge_cancel_dispatcher")
    assert await flow.state("3") == "waiting"


async def test_an_edge_does_not_block_a_replayed_member_with_an_impossible_join(flow: FlowEnv) -> None:
    await flow.begin("abc", edges=("ab",))
    await flow.cancel("b")
    await flow.fail_and_cascade("a")
    await replay(flow, "b")

    await flow.edge("c", "b")

    assert (await flow.vector("b"), await flow.counts("b")) == (REPLAYED, "0/1/0 of 2 impossible")
    await flow.succeed("b")


async def test_a_late_completion_neither_skips_a_replayed_member_nor_replaces_its_input(flow: FlowEnv) -> None:
    await flow.begin("acd")
    await flow.add("b", input_payload=b"own")
    await flow.join("acd", "b", data_passing_ref="r")
    await flow.cancel("b")
    await flow.fail_and_cascade("a")
    await replay(flow, "b")

    await flow.succeed("c", result=b"late")
    await flow.fail("d")
    await flow.cascade("c", "d")

    assert (await flow.vector("b"), await flow.counts("b")) == (REPLAYED, "1/2/0 of 3 impossible")
    assert await flow.payload("b") == b"own"


@pytest.mark.parametrize("first", ["succeed", "fail"])
async def test_a_replayed_member_whose_quorum_exceeds_its_edges_is_skipped_again(flow: FlowEnv, first: str) -> None:
    await flow.begin("b12cd")
    await flow.join("12", "b", quorum(3, "let_run"))
    await flow.chain("bcd")
    await getattr(flow, first)("1")
    await flow.cascade("1")
    before = await flow.counts("b")
    assert await flow.state("b") == "skipped"
    flow.clock.advance_ms(10)

    assert await replay(flow, "b") == ["skipped"]

    row = await flow.row("b")
    assert (row.public_state, row.replay_count, row.completed_at) == ("skipped", 1, flow.clock.now)
    assert await flow.counts("b") == before
    assert [event["branch"] for event in await replay_events(flow, "b")] == ["skipped_flow_member"]
    ends = await flow.engine.store.history(row.execution_id, Topic.COMPLETION, 10)
    assert [events.event.outcome for events in ends] == ["skipped", "skipped"]
    await check_flow_invariants(flow.engine)
    await flow.sweep("dependency_reconciler")
    assert await flow.state(*"bcd") == "skipped skipped skipped"


async def test_a_member_skipped_again_runs_after_another_edge_and_a_further_replay(flow: FlowEnv) -> None:
    await flow.begin("b123")
    await flow.join("12", "b", quorum(3, "let_run"))
    await flow.succeed_and_cascade("1", "2")
    assert await replay(flow, "b") == ["skipped"]

    await flow.edge("3", "b")
    assert await replay(flow, "b") == ["waiting_children"]
    assert await flow.counts("b") == "2/0/0 of 3 pending"
    await flow.succeed_and_cascade("3")

    assert (await flow.vector("b"), await flow.counts("b")) == (REPLAYED, "3/0/0 of 3 satisfied")


async def test_a_repeated_skip_counts_against_the_replay_limit(flow: FlowEnv) -> None:
    await flow.begin("1")
    await flow.add("b", policy={"max_replay_count": 1})
    await flow.join("1", "b", quorum(2, "let_run"))
    await flow.succeed_and_cascade("1")
    assert await replay(flow, "b") == ["skipped"]

    with pytest.raises(errors.MaxReplaysExhausted):
        await replay(flow, "b")


async def test_a_member_of_a_cancelled_flow_may_be_replayed(flow: FlowEnv) -> None:
    await flow.begin("a")
    await flow.fail("a")
    await flow.engine.cancel_flow(flow.id)

    assert await replay(flow, "a") == ["waiting"]
    await flow.succeed("a")
    assert await flow.state("a") == "completed"


@pytest.mark.parametrize("others", [0, 1])
async def test_a_member_replayed_after_the_reconciler_listed_it_is_not_cancelled(flow: FlowEnv, others: int) -> None:
    await flow.begin("ab"[: 1 + others])
    await flow.engine.cancel_flow_header(flow.id, reason="enough")
    await flow.engine.cancel_execution(flow.names["a"], reason="enough")
    flow.clock.advance_ms(30_000)
    cancelling = flow.engine.bulk_canceller
    cancel_many = cancelling.cancel_many

    async def after_a_replay(
        execution_ids: Sequence[str], reason: str, *, backlog_flow_id: str | None = None
    ) -> Dispositions:
        assert execution_ids == flow.ids("ab"[: 1 + others])
        assert await replay(flow, "a") == ["waiting"]
        return await cancel_many(execution_ids, reason, backlog_flow_id=backlog_flow_id)

    cancelling.cancel_many = after_a_replay  # type: ignore[method-assign]
    await flow.sweep("cancel_reconciler")

    assert await flow.state("a", *"b" * others) == " ".join(["waiting", *["cancelled"] * others])
    assert await flow.backlog() == (None, [])


async def test_a_member_replayed_during_the_cancel_of_its_flow_runs(flow: FlowEnv) -> None:
    await flow.begin("ab")
    claim = await flow.claim("a")
    cancelling = flow.engine.bulk_canceller
    cancel_many = cancelling.cancel_many

    async def after_a_replay(
        execution_ids: Sequence[str], reason: str, *, backlog_flow_id: str | None = None
    ) -> Dispositions:
        await flow.engine.complete(claim.handle)
        assert await replay(flow, "a") == ["waiting"]
        return await cancel_many(execution_ids, reason, backlog_flow_id=backlog_flow_id)

    cancelling.cancel_many = after_a_replay  # type: ignore[method-assign]
    answer = await flow.engine.cancel_flow(flow.id, wait=WaitTimeout(20_000))

    assert isinstance(answer, flow_answers.FlowCancelled)
    assert await flow.state("a", "b") == "waiting cancelled"
    assert await flow.backlog() == (None, [])


@pytest.mark.parametrize("others", [0, 1])
async def test_a_replayed_member_is_not_cancelled_from_a_stale_backlog(flow: FlowEnv, others: int) -> None:
    await flow.begin("ab"[: 1 + others])
    await flow.engine.cancel_flow_header(flow.id, reason="enough")
    await flow.engine.cancel_execution(flow.names["a"], reason="enough")  # it was not acknowledged

    assert await replay(flow, "a") == ["waiting"]
    backlog, listed = await flow.backlog()
    assert (backlog is not None, listed) == (bool(others), ["b"] * others)
    await flow.sweep("cancel_reconciler", after_ms=30_000)

    assert await flow.state("a", *"b" * others) == " ".join(["waiting", *["cancelled"] * others])
    assert await flow.backlog() == (None, [])
    await check_flow_invariants(flow.engine)
    await flow.succeed("a")
