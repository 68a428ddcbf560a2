"""S-030 to S-035, S-089, S-092 and EX-051: completions cascade through a flow."""

from __future__ import annotations

from itertools import pairwise

import pytest

from flowfabric import errors
from flowfabric.cursors import FROM_THE_START
from flowfabric.model.answers.execution import Moved, Promotion, RetryScheduled
from flowfabric.model.answers.flow import CascadeOutcome, Eligibility
from flowfabric.model.change import Patch
from flowfabric.model.event import Topic
from flowfabric.model.flow import Dependency
from flowfabric.rules.feed import Filter
from tests.scenarios.flow_env import WAITING, WAITS, FlowEnv, any_of

SKIPPED = "terminal/unowned/not_applicable/none/skipped/none/skipped"


async def outcomes(flow: FlowEnv, name: str) -> list[str | None]:
    events = await flow.engine.store.history(flow.names[name], Topic.COMPLETION, 10)
    return [one.event.outcome for one in events]


@pytest.mark.spec("S-030")
async def test_a_failure_skips_all_dependents_synchronously(flow: FlowEnv) -> None:
    await flow.begin("abcd", edges=("ab", "bc", "cd"))
    await flow.fail("a")

    assert await flow.cascade("a") == [CascadeOutcome(resolved=3, cascaded_children=3, synchronous=True)]

    assert [await flow.vector(name) for name in "bcd"] == [SKIPPED] * 3
    assert [await outcomes(flow, name) for name in "bcd"] == [["skipped"]] * 3


@pytest.mark.spec("EX-083")
async def test_the_completion_event_of_a_member_names_its_flow(flow: FlowEnv) -> None:
    await flow.begin("abc", namespace="n1", tags={"cairn.instance_id": "i1"})
    await flow.chain("bc")
    await flow.succeed("a")
    await flow.fail_and_cascade("b")

    events = await flow.engine.subscribe_completion(FROM_THE_START)
    found = [await events.next(timeout_s=0) for _ in range(4)]

    ends = [(one.execution_id, one.outcome, one.flow_id, one.namespace, one.instance_tag) for one in found if one]
    outcomes = {"a": "success", "b": "failed", "c": "skipped"}
    assert ends == [(flow.names[name], outcome, flow.id, "n1", "i1") for name, outcome in outcomes.items()]


async def test_a_cascade_stops_at_its_depth_limit_and_the_reconciler_continues(flow: FlowEnv) -> None:
    names = [f"m{number:02}" for number in range(60)]
    await flow.begin(names)
    for upstream, downstream in pairwise(names):
        await flow.edge(upstream, downstream)
    await flow.fail("m00")

    assert await flow.cascade("m00") == [CascadeOutcome(resolved=51, cascaded_children=50)]
    assert await flow.state("m51", "m52") == "skipped waiting_children"

    await flow.sweep("dependency_reconciler")
    assert {await flow.state(name) for name in names[1:]} == {"skipped"}


@pytest.mark.spec("S-031")
async def test_a_retryable_failure_does_not_cascade(flow: FlowEnv) -> None:
    await flow.begin("b")
    policy = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 10}}}
    await flow.add("a", policy=policy)
    await flow.edge("a", "b")

    first = await flow.engine.fail((await flow.claim("a")).handle, reason="flaky")
    assert isinstance(first, RetryScheduled)
    assert await flow.cascade("a") == [CascadeOutcome(0, 0)]
    assert (await outcomes(flow, "a"), await flow.vector("b")) == ([], WAITS)

    flow.clock.advance_ms(10)
    assert await flow.engine.promote_delayed(flow.names["a"]) is Promotion.PROMOTED
    await flow.fail_and_cascade("a")
    assert await flow.state("a", "b") == "failed skipped"


@pytest.mark.spec("S-032")
@pytest.mark.parametrize("max_named", [128, 0])
async def test_the_reconciler_resolves_an_undelivered_completion(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch, max_named: int
) -> None:
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", max_named)
    await flow.begin("ab", edges=("ab",))
    await flow.succeed("a")

    assert await flow.sweep("dependency_reconciler") == [1]

    assert await flow.vector("b") == WAITING
    before = await flow.row("b")
    assert await flow.sweep("dependency_reconciler") == [0]
    assert await flow.row("b") == before


async def test_the_reconciler_resolves_a_completion_that_was_not_recorded_on_its_edge(flow: FlowEnv) -> None:
    await flow.begin("ab", edges=("ab",))
    await flow.succeed("a")
    dependency_key = (flow.names["b"], flow.edges["a", "b"])
    await flow.write(Patch(Dependency, dependency_key, {"outcome": None, "unfolded_at": None}))

    await flow.sweep("dependency_reconciler")

    assert await flow.vector("b") == WAITING
    assert await flow.counts("b") == "1/0/0 of 1 satisfied"


async def test_an_unrecorded_completion_is_counted_with_a_recorded_one(flow: FlowEnv) -> None:
    await flow.begin_join("ab", "c", any_of("let_run"))
    await flow.engine.cancel_execution(flow.names["a"], reason="r", source="flow_cascade")
    await flow.succeed("b")

    assert await flow.sweep("dependency_reconciler") == [2]

    assert (await flow.vector("c"), await flow.counts("c")) == (WAITING, "1/1/0 of 2 satisfied")


async def test_an_unrecorded_completion_is_found_in_a_partly_resolved_join(flow: FlowEnv) -> None:
    await flow.begin_join("ab", "c")
    await flow.succeed_and_cascade("a")
    await flow.engine.cancel_execution(flow.names["b"], reason="r", source="flow_cascade")

    assert await flow.sweep("dependency_reconciler") == [1]

    assert (await flow.state("c"), await flow.counts("c")) == ("skipped", "1/1/0 of 2 impossible")
    group = await flow.group("c")
    assert (group.waiting_since, group.satisfied_at) == (None, None), "it no longer waits and was never satisfied"


async def test_a_cascade_reads_the_edges_of_each_level_to_the_last_page(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.flows.completion_dispatcher.PAGE_SIZE", 2)
    await flow.begin("abcuvwxyz")
    for pair in ("ab", "ac", "bu", "bv", "bw", "cx", "cy", "cz"):
        await flow.edge(*pair)
    await flow.fail("a")

    assert await flow.cascade("a") == [CascadeOutcome(resolved=8, cascaded_children=8)]

    assert set((await flow.state(*"bcuvwxyz")).split()) == {"skipped"}


@pytest.mark.parametrize("sweep", ["completion_dispatch", "dependency_reconciler"])
async def test_a_sweep_reports_how_many_edges_it_resolved(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch, sweep: str
) -> None:
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", 1)
    await flow.begin("abcde")
    for name in "bcd":
        await flow.edge("a", name)
    await flow.edge("d", "e")
    await flow.fail("a")

    assert await flow.sweep(sweep, 2) == [4, 0]

    assert await flow.state(*"bcde") == "skipped skipped skipped skipped"


async def test_a_cascade_resolves_all_parallel_edges_in_small_batches(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.engine.flows.join_resolver.MAX_EDGES_PER_BATCH", 2)
    await flow.begin("ab")
    for _ in range(5):
        await flow.edge("a", "b")
    await flow.succeed("a")

    assert await flow.cascade("a") == [CascadeOutcome(resolved=5, cascaded_children=0)]

    assert (await flow.vector("b"), await flow.counts("b")) == (WAITING, "5/0/0 of 5 satisfied")


@pytest.mark.spec("S-033")
async def test_a_staged_edge_that_was_not_applied_is_ignored(flow: FlowEnv) -> None:
    await flow.begin("abc")
    await flow.stage("a", "b")
    await flow.edge("a", "c")
    await flow.succeed("a")

    assert await flow.cascade("a") == [CascadeOutcome(resolved=1, cascaded_children=0)]

    assert [await flow.vector(name) for name in "bc"] == [WAITING, WAITING]
    assert await flow.counts("c") == "1/0/0 of 1 satisfied"


@pytest.mark.spec("S-034")
async def test_skipping_an_active_child_releases_its_lease(flow: FlowEnv) -> None:
    await flow.begin("ab")
    claim = await flow.claim("b")
    await flow.engine.append_frame(claim.handle, b"half of it")
    await flow.edge("a", "b")
    await flow.fail("a")

    await flow.cascade("a")

    row = await flow.row("b")
    stream = await flow.engine.read_stream(flow.names["b"], 0)
    assert (stream.closed_at, stream.closed_reason) == (flow.clock.now, "dependency_impossible")
    assert await flow.vector("b") == SKIPPED.replace("/none/skipped/none/", "/none/skipped/attempt_terminal/")
    assert (row.lease_expires_at, row.completed_at) == (None, flow.clock.now)
    [attempt] = await flow.engine.attempt_history(flow.names["b"])
    assert (attempt.attempt_state, attempt.failure_reason) == ("ended_cancelled", "dependency_impossible")
    last = (await flow.engine.lease_history(flow.names["b"]))[-1]
    assert (last.event, last.fields["reason"]) == ("released", "dependency_impossible")
    with pytest.raises(errors.ExecutionNotActive):
        await flow.engine.complete(claim.handle)


async def test_skipping_a_suspended_child_closes_its_suspension(flow: FlowEnv) -> None:
    await flow.begin("ab")
    await flow.suspend("b")
    await flow.edge("a", "b")
    await flow.fail("a")

    await flow.cascade("a")

    assert await flow.vector("b") == SKIPPED.replace("/none/skipped/none/", "/none/skipped/attempt_terminal/")
    suspension = await flow.engine.describe_suspension(flow.names["b"])
    assert suspension is not None
    assert (suspension.closed_at, suspension.close_reason) == (flow.clock.now, "cancelled")
    [attempt] = await flow.engine.attempt_history(flow.names["b"])
    assert (attempt.attempt_state, attempt.failure_reason) == ("ended_cancelled", "dependency_impossible")


@pytest.mark.spec("S-035")
async def test_wait_children_without_edges_does_not_wait(flow: FlowEnv) -> None:
    await flow.begin("a")
    claim = await flow.claim("a")

    moved = await flow.engine.wait_children(claim.handle)

    assert moved == Moved(flow.names["a"], "waiting")  # type: ignore[arg-type]
    assert await flow.vector("a") == WAITING.replace("pending_first_attempt", "attempt_interrupted")
    assert (await flow.row("a")).lease_expires_at is None
    again = await flow.claim("a")
    assert (again.attempt_index, again.attempt_id) == (claim.attempt_index, claim.attempt_id)


async def test_wait_children_after_the_join_was_satisfied_does_not_wait(flow: FlowEnv) -> None:
    await flow.begin("ab")
    claim = await flow.claim("b")
    await flow.edge("a", "b")
    await flow.succeed_and_cascade("a")
    assert await flow.state("b") == "active"

    await flow.engine.wait_children(claim.handle)

    assert await flow.state("b") == "waiting"


async def test_wait_children_of_a_replayed_execution_ignores_an_impossible_join(flow: FlowEnv) -> None:
    await flow.begin("ab", edges=("ab",))
    await flow.cancel("b")
    await flow.fail_and_cascade("a")
    await flow.engine.replay_execution(flow.names["b"])
    assert await flow.counts("b") == "0/1/0 of 1 impossible"

    moved = await flow.engine.wait_children((await flow.claim("b")).handle)

    assert moved == Moved(flow.names["b"], "waiting")  # type: ignore[arg-type]
    assert await flow.vector("b") == WAITING.replace("pending_first_attempt", "attempt_interrupted")


@pytest.mark.spec("EX-051")
async def test_wait_children_blocks_until_the_join_and_can_be_cancelled(flow: FlowEnv) -> None:
    await flow.begin("ab")
    claim = await flow.claim("b")
    await flow.edge("a", "b")
    b = flow.names["b"]

    moved = await flow.engine.wait_children(claim.handle)

    assert moved == Moved(b, "waiting_children")  # type: ignore[arg-type]
    assert await flow.vector("b") == WAITS.replace("pending_first_attempt", "attempt_interrupted")
    [attempt] = await flow.engine.attempt_history(b)
    assert (attempt.attempt_state, attempt.suspension_id) == ("suspended", "waiting_children")
    last = (await flow.engine.lease_history(b))[-1]
    assert (last.event, last.fields["reason"]) == ("released", "waiting_children")
    for refused in (
        flow.engine.change_priority(b, 5),
        flow.engine.issue_claim_grant(b, lane_id="default", worker_id="w", worker_instance_id="w-1"),
        flow.engine.unblock_execution(b),
    ):
        with pytest.raises(errors.ExecutionNotEligible):
            await refused
    assert await flow.engine.promote_delayed(b) is Promotion.NOT_DELAYED

    await flow.cancel("b")

    assert await flow.vector("b") == "terminal/unowned/not_applicable/none/cancelled/attempt_terminal/cancelled"
    [attempt] = await flow.engine.attempt_history(b)
    assert attempt.attempt_state == "ended_cancelled"


async def test_an_execution_resumes_its_attempt_when_its_join_is_satisfied(flow: FlowEnv) -> None:
    await flow.begin("ab")
    claim = await flow.claim("b")
    await flow.edge("a", "b")
    await flow.engine.wait_children(claim.handle)

    await flow.succeed_and_cascade("a")

    again = await flow.claim("b")
    assert (again.attempt_index, again.attempt_id, again.lease_epoch) == (0, claim.attempt_id, claim.lease_epoch + 1)


async def test_a_manual_promotion_is_refused_until_the_join_is_satisfied(flow: FlowEnv) -> None:
    await flow.begin("ab", edges=("ab",))
    promote = flow.engine.promote_blocked_to_eligible

    with pytest.raises(errors.DepsNotSatisfied):
        await promote(flow.names["b"])
    with pytest.raises(errors.NotBlockedByDeps):
        await promote(flow.names["a"])
    await flow.succeed("a")
    with pytest.raises(errors.NotRunnable):
        await promote(flow.names["a"])
    with pytest.raises(errors.NotFound):
        await promote(flow.new_id())


async def test_evaluate_flow_eligibility_reports_the_first_reason_that_applies(flow: FlowEnv) -> None:
    await flow.begin("abcd", edges=("ab", "cd"))
    evaluate = flow.engine.evaluate_flow_eligibility

    assert await evaluate(flow.new_id()) is Eligibility.NOT_FOUND
    assert await evaluate(flow.names["a"]) is Eligibility.ELIGIBLE
    assert await evaluate(flow.names["b"]) is Eligibility.BLOCKED_BY_DEPENDENCIES
    await flow.succeed_and_cascade("a")
    assert await evaluate(flow.names["a"]) is Eligibility.NOT_RUNNABLE
    assert await evaluate(flow.names["b"]) is Eligibility.ELIGIBLE
    await flow.engine.cancel_flow_header(flow.id)
    await flow.fail_and_cascade("c")
    assert await evaluate(flow.names["d"]) is Eligibility.IMPOSSIBLE  # left to the cancel of its flow


@pytest.mark.spec("S-089")
async def test_an_expired_member_skips_its_dependents(flow: FlowEnv) -> None:
    deadline = flow.clock.now + 1000
    await flow.begin()
    for name in "qwrs":
        await flow.add(name, execution_deadline_at=deadline)
    for name in "uxyzt":
        await flow.add(name)
    await flow.edge("u", "w")
    for upstream, downstream in ("qx", "wy", "rz", "st"):
        await flow.edge(upstream, downstream)
    await flow.claim("r")
    await flow.suspend("s")
    flow.clock.advance_ms(1000)

    await flow.sweep("execution_deadline")
    await flow.cascade(*"qwrs")

    assert await flow.state(*"qwrs") == "expired expired expired expired"
    assert {(await flow.row(name)).failure_reason for name in "qwrs"} == {"execution_deadline"}
    assert (await flow.row("r")).lease_expires_at is None
    assert [await outcomes(flow, name) for name in "qwrs"] == [["expired"]] * 4
    assert await flow.state(*"xyzt") == "skipped skipped skipped skipped"


@pytest.mark.spec("S-092")
@pytest.mark.parametrize("apart_ms", [1, 0], ids=["one after the other", "all at once"])
async def test_blocked_members_behind_a_full_batch_are_not_starved(flow: FlowEnv, apart_ms: int) -> None:
    names = [f"m{number:02}" for number in range(60)]
    await flow.begin(["running", "done", *names])
    names.sort(key=lambda name: flow.names[name])  # equal instants are ordered by id
    for name in names[:-1]:
        await flow.edge("running", name)
        flow.clock.advance_ms(apart_ms)
    await flow.edge("done", names[-1])
    await flow.claim("running")
    await flow.succeed("done")
    dependency_key = (flow.names[names[-1]], flow.edges["done", names[-1]])
    # The outcome looks as if it was not recorded.
    await flow.write(Patch(Dependency, dependency_key, {"outcome": None, "unfolded_at": None}))

    await flow.sweep("dependency_reconciler", 2)

    assert await flow.vector(names[-1]) == WAITING


async def test_a_filtered_reconciler_resolves_only_matching_members(flow: FlowEnv) -> None:
    await flow.create_mixed({"a": "default", "b": "n1", "c": "n2"}, "ab", "ac")
    await flow.succeed("a")

    await flow.engine.sweep_once("dependency_reconciler", Filter(namespace="n1"))

    assert await flow.state("b", "c") == "waiting waiting_children"


async def test_a_filtered_reconciler_keeps_other_dependents_of_the_same_completion(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", 2)
    whose = {name: "n1" if name in "bc" else "n2" for name in "bcde"}
    await flow.create_mixed({"a": "default"} | whose, *(f"a{name}" for name in "bcde"))
    await flow.succeed("a")

    await flow.engine.sweep_once("dependency_reconciler", Filter(namespace="n1"))
    assert await flow.state("b", "c", "d", "e") == "waiting waiting waiting_children waiting_children"
    await flow.sweep("dependency_reconciler")

    assert await flow.state("d", "e") == "waiting waiting"
    assert [await flow.counts(name) for name in "bcde"] == ["1/0/0 of 1 satisfied"] * 4


async def test_a_completion_by_a_cascading_cancel_is_left_to_the_reconciler(flow: FlowEnv) -> None:
    await flow.begin("ab", edges=("ab",))
    await flow.engine.cancel_execution(flow.names["a"], reason="r", source="flow_cascade")

    assert await outcomes(flow, "a") == ["cancelled"]
    assert (await flow.dependency("a", "b")).outcome is None
    await flow.sweep("completion_dispatch")
    assert await flow.state("b") == "waiting_children"
    await flow.sweep("dependency_reconciler")
    assert await flow.state("b") == "skipped"


@pytest.mark.parametrize(("max_scanned", "passes"), [(500, 1), (10, 3)])
async def test_an_unrecorded_completion_is_found_behind_many_unresolved_edges(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch, max_scanned: int, passes: int
) -> None:
    monkeypatch.setattr("flowfabric.engine.sweeps.flows.MAX_SCANNED_EDGES", max_scanned)
    names = [f"u{number:02}" for number in range(25)]
    await flow.begin([*names, "b"])
    await flow.join(names, "b")
    last = max(names, key=lambda name: flow.edges[name, "b"])
    await flow.engine.cancel_execution(flow.names[last], reason="r", source="flow_cascade")

    await flow.sweep("dependency_reconciler", passes)

    assert (await flow.state("b"), await flow.counts("b")) == ("skipped", "0/1/0 of 25 impossible")
