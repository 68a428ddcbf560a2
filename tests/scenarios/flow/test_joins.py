"""S-016 to S-021 and S-027 to S-029: when a join fires, and which result it passes on."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.ids import FlowId, flow_partition
from flowfabric.model.answers.flow import Resolution
from flowfabric.model.execution import Payload
from tests.scenarios.flow_env import ALL_OF, WAITING, WAITS, FlowEnv, any_of, quorum

SATISFIED, IMPOSSIBLE = Resolution.SATISFIED, Resolution.IMPOSSIBLE
PENDING, ALREADY = Resolution.PENDING, Resolution.ALREADY_RESOLVED


@pytest.mark.spec("S-016")
async def test_any_of_cancel_remaining_fires_on_the_first_success(flow: FlowEnv) -> None:
    await flow.begin_join("123", "b", any_of("cancel_remaining"))
    claim = await flow.claim("1")
    for other in "23":
        await flow.claim(other)
    await flow.engine.complete(claim.handle)

    await flow.cascade("1")

    group = await flow.group("b")
    assert await flow.vector("b") == WAITING
    assert await flow.counts("b") == "1/0/0 of 3 satisfied"
    assert group.satisfied_at == flow.clock.now
    assert group.cancel_siblings_pending_flag
    assert (group.cancel_siblings_pending_members or "").split("|") == flow.ids("23")
    assert group.cancel_siblings_reason == "sibling_quorum_satisfied"
    assert await flow.pending_sibling_cancel("b") is not None
    assert await flow.state("2", "3") == "active active"


@pytest.mark.spec("S-017")
async def test_any_of_let_run_never_flags_siblings(flow: FlowEnv) -> None:
    await flow.begin_join("123", "b", any_of("let_run"))
    await flow.succeed_and_cascade("1")

    assert await flow.vector("b") == WAITING
    group = await flow.group("b")
    assert (group.cancel_siblings_pending_flag, group.cancel_siblings_pending_members) == (False, None)
    assert await flow.pending_sibling_cancel("b") is None
    assert await flow.sweep("edge_cancel_dispatcher", 10) == [0] * 10
    assert await flow.state("2", "3") == "waiting waiting"


@pytest.mark.spec("S-018")
async def test_a_quorum_fires_exactly_at_k(flow: FlowEnv) -> None:
    await flow.begin_join("12345", "b", quorum(3, "let_run"))

    await flow.succeed_and_cascade("1", "2")
    assert (await flow.vector("b"), await flow.counts("b")) == (WAITS, "2/0/0 of 5 pending")
    await flow.succeed_and_cascade("3")
    assert (await flow.vector("b"), await flow.counts("b")) == (WAITING, "3/0/0 of 5 satisfied")
    await flow.fail_and_cascade("4", "5")
    assert (await flow.vector("b"), await flow.counts("b")) == (WAITING, "3/2/0 of 5 satisfied")


@pytest.mark.spec("S-019")
async def test_a_quorum_larger_than_its_edges_is_impossible(flow: FlowEnv) -> None:
    await flow.begin_join("12", "b", quorum(3, "let_run"))

    await flow.succeed_and_cascade("1")

    assert await flow.counts("b") == "1/0/0 of 2 impossible"
    assert await flow.state("b") == "skipped"


@pytest.mark.spec("S-020")
async def test_all_of_short_circuits_and_stays_impossible(flow: FlowEnv) -> None:
    await flow.begin_join("123", "b")
    await flow.succeed("1")
    await flow.cancel("2")
    await flow.cascade("1", "2")
    assert await flow.state("b") == "skipped"

    await flow.succeed_and_cascade("3")

    assert await flow.counts("b") == "2/1/0 of 3 impossible"
    assert await flow.state("b") == "skipped"


@pytest.mark.spec("S-021")
async def test_a_redelivered_completion_is_not_counted_twice(flow: FlowEnv) -> None:
    await flow.begin_join("12", "b", any_of("cancel_remaining"))
    await flow.succeed_and_cascade("1")
    fired = await flow.group("b")
    flow.clock.advance_ms(5000)

    again = [await flow.resolve("1", "b", "success") for _ in range(2)]

    assert again == [ALREADY, ALREADY]
    assert [one.resolved for one in await flow.cascade("1", "1")] == [0, 0]
    assert await flow.group("b") == fired
    assert await flow.vector("b") == WAITING


@pytest.mark.parametrize("first", ["success", "failed", "skipped"])
async def test_a_resolved_edge_keeps_its_first_outcome(flow: FlowEnv, first: str) -> None:
    await flow.begin_join("12", "b", quorum(2, "let_run"))
    claim = await flow.claim("1")
    counted = await flow.resolve("1", "b", first)
    before = await flow.dependency("1", "b")
    flow.clock.advance_ms(5000)

    again = [await flow.resolve("1", "b", outcome) for outcome in (first, "expired")]
    await flow.engine.complete(claim.handle)
    swept = [(await flow.sweep(name))[0] for name in ("completion_dispatch", "dependency_reconciler")]

    assert (counted, again, swept) == (PENDING if first == "success" else IMPOSSIBLE, [ALREADY, ALREADY], [0, 0])
    assert (before.outcome, before.last_resolved_at, before.unfolded_at) == (first, flow.clock.now - 5000, None)
    assert await flow.dependency("1", "b") == before
    assert sum(map(int, (await flow.counts("b")).split()[0].split("/"))) == 1


@pytest.mark.parametrize(
    ("policy", "outcomes", "steps", "counts", "child"),
    [
        (None, "success success success", [PENDING, PENDING, SATISFIED], "3/0/0 of 3 satisfied", "waiting"),
        (None, "success expired success", [PENDING, IMPOSSIBLE, ALREADY], "2/1/0 of 3 impossible", "skipped"),
        (any_of("let_run"), "failed skipped success", [PENDING, PENDING, SATISFIED], "1/1/1 of 3 satisfied", "waiting"),
        (any_of("let_run"), "cancelled failed", [PENDING, IMPOSSIBLE], "0/2/0 of 2 impossible", "skipped"),
        (
            quorum(3, "let_run"),
            "success failed success failed success",
            [PENDING] * 4 + [SATISFIED],
            "3/2/0 of 5 satisfied",
            "waiting",
        ),
        (quorum(2, "let_run"), "skipped -", [IMPOSSIBLE], "0/0/1 of 2 impossible", "skipped"),
        (quorum(3, "let_run"), "success -", [IMPOSSIBLE], "1/0/0 of 2 impossible", "skipped"),
        (
            any_of("let_run"),
            "success success success",
            [SATISFIED, ALREADY, ALREADY],
            "3/0/0 of 3 satisfied",
            "waiting",
        ),
    ],
)
async def test_joins_follow_the_worked_examples_of_the_specification(
    flow: FlowEnv, policy: object, outcomes: str, steps: list[Resolution], counts: str, child: str
) -> None:
    outcomes_by_name = outcomes.split()
    names = "12345"[: len(outcomes_by_name)]
    await flow.begin(f"b{names}")
    await flow.join(names, "b", policy)

    resolutions = [
        await flow.resolve(name, "b", outcome)
        for name, outcome in zip(names, outcomes_by_name, strict=True)
        if outcome != "-"
    ]

    assert resolutions == steps
    assert await flow.counts("b") == counts
    assert await flow.state("b") == child


async def test_an_edge_that_was_not_applied_cannot_be_resolved(flow: FlowEnv) -> None:
    await flow.begin("ab")
    await flow.stage("a", "b")

    with pytest.raises(errors.InvalidDependency):
        await flow.resolve("a", "b", "success")
    with pytest.raises(errors.InvalidInput):
        await flow.resolve("a", "b", "none")


async def test_an_edge_cannot_be_resolved_in_another_flow(flow: FlowEnv) -> None:
    await flow.begin("ab")
    edge = await flow.edge("a", "b")
    elsewhere = (FlowId(flow.engine.minter.uuid()) for _ in count())
    other = next(one for one in elsewhere if flow_partition(one, flow.engine.partitions) == flow.partition)
    await flow.engine.create_flow(other)
    await flow.engine.set_edge_group_policy(other, flow.names["b"], ALL_OF)  # a policy does not require membership

    with pytest.raises(errors.InvalidDependency):
        await flow.engine.resolve_dependency(other, edge, flow.names["b"], "success")
    assert (await flow.state("b"), await flow.counts("b")) == ("waiting_children", "0/0/0 of 1 pending")


@pytest.mark.parametrize(
    ("kind", "ends_well", "child"),
    [
        ("success_only", True, "waiting"),
        ("success_only", False, "skipped"),
        ("failure_only", True, "skipped"),
        ("failure_only", False, "waiting"),
        ("any_outcome", True, "waiting"),
        ("any_outcome", False, "waiting"),
    ],
)
async def test_an_edge_is_satisfied_by_outcomes_of_its_kind(
    flow: FlowEnv, kind: str, ends_well: bool, child: str
) -> None:
    await flow.begin("ab")
    await flow.edge("a", "b", dependency_kind=kind)

    await (flow.succeed("a") if ends_well else flow.fail("a"))
    await flow.cascade("a")

    assert await flow.state("b") == child


async def test_a_skipped_upstream_satisfies_a_failure_branch(flow: FlowEnv) -> None:
    await flow.begin("abc", edges=("ab",))
    await flow.edge("b", "c", dependency_kind="failure_only")
    await flow.fail("a")

    await flow.cascade("a")

    assert await flow.state("b", "c") == "skipped waiting"
    assert await flow.counts("c") == "1/0/0 of 1 satisfied"


@pytest.mark.spec("S-027")
@pytest.mark.parametrize(
    ("ref", "result", "payload"),
    [
        ("anything", b'{"status":"ok"}', b'{"status":"ok"}'),
        (None, b"r", b"orig"),
        ("", b"r", b"orig"),
        ("x", None, b"orig"),
    ],
)
async def test_a_result_becomes_the_input_of_the_child(
    flow: FlowEnv, ref: str | None, result: bytes | None, payload: bytes
) -> None:
    await flow.begin("ab", input_payload=b"orig")
    await flow.edge("a", "b", data_passing_ref=ref)

    await flow.succeed_and_cascade("a", result=result)

    assert await flow.vector("b") == WAITING
    assert await flow.payload("b") == payload


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize(("encoding", "found"), [("json", "json"), (None, "refs")])
async def test_a_result_that_becomes_an_input_keeps_its_encoding(
    flow: FlowEnv, dispatch: bool, encoding: str | None, found: str
) -> None:
    flow.engine.dispatcher._enabled = dispatch
    await flow.begin("a")
    await flow.add("b", input_payload=b"orig", payload_encoding="refs")
    await flow.edge("a", "b", data_passing_ref="r")

    await flow.engine.complete((await flow.claim("a")).handle, result=b"1", encoding=encoding)
    await (flow.engine.dispatcher.wait_idle() if dispatch else flow.cascade("a"))

    payload = await flow.load(Payload, flow.names["b"])
    assert (await flow.state("b"), payload.input_payload, payload.payload_encoding) == ("waiting", b"1", found)


@pytest.mark.parametrize("max_named", [128, 1])
@pytest.mark.parametrize("dispatch", [False, True])
async def test_a_data_reference_may_be_given_when_the_edge_is_applied(
    flow: FlowEnv, monkeypatch: pytest.MonkeyPatch, dispatch: bool, max_named: int
) -> None:
    monkeypatch.setattr("flowfabric.rules.flow.successors.MAX_NAMED_SUCCESSORS", max_named)
    flow.engine.dispatcher._enabled = dispatch
    await flow.begin("abcde", input_payload=b"orig")
    for name in "bcde":
        edge = await flow.stage("a", name)
        ref = "r" if name in "bc" else None
        await flow.engine.apply_dependency_to_child(
            flow.id, edge, flow.names[name], flow.names["a"], data_passing_ref=ref
        )

    await flow.succeed("a", result=b"A")
    await (flow.engine.dispatcher.wait_idle() if dispatch else flow.sweep("completion_dispatch"))

    assert await flow.state(*"bcde") == "waiting waiting waiting waiting"
    assert [await flow.payload(name) for name in "bcde"] == [b"A", b"A", b"orig", b"orig"]


@pytest.mark.spec("S-028")
async def test_the_last_of_several_data_references_under_all_of_wins(flow: FlowEnv) -> None:
    await flow.begin("abc", input_payload=b"orig")
    await flow.join("ab", "c", data_passing_ref="r")

    await flow.succeed_and_cascade("a", result=b"A")
    assert (await flow.vector("c"), await flow.payload("c")) == (WAITS, b"A")
    await flow.succeed_and_cascade("b", result=b"B")

    assert (await flow.vector("c"), await flow.payload("c")) == (WAITING, b"B")


async def test_the_last_completion_wins_when_several_data_references_are_resolved_in_one_batch(flow: FlowEnv) -> None:
    await flow.begin("zyc", input_payload=b"orig")
    await flow.join("zy", "c", data_passing_ref="r")
    late, soon = sorted("zy", key=lambda one: flow.edges[one, "c"])  # against the order of the edges
    for name in (soon, late):
        await flow.succeed(name, result=name.encode())
        flow.clock.advance_ms(1)

    await flow.sweep("completion_dispatch")

    assert (await flow.vector("c"), await flow.payload("c")) == (WAITING, late.encode())


@pytest.mark.spec("S-029")
async def test_a_quorum_copies_the_result_of_the_firing_edge_only(flow: FlowEnv) -> None:
    await flow.begin("c123", input_payload=b"orig")
    await flow.join("123", "c", quorum(2, "let_run"), data_passing_ref="r")

    seen = []
    for name in "123":
        await flow.succeed_and_cascade(name, result=f"R{name}".encode())
        seen.append((await flow.state("c"), await flow.payload("c")))

    assert seen == [("waiting_children", b"orig"), ("waiting", b"R2"), ("waiting", b"R2")]


async def test_the_input_of_a_terminal_child_is_never_replaced(flow: FlowEnv) -> None:
    await flow.begin("ab", input_payload=b"orig")
    await flow.edge("a", "b", data_passing_ref="r")
    await flow.cancel("b")

    await flow.succeed_and_cascade("a", result=b"late")

    assert (await flow.state("b"), await flow.payload("b")) == ("cancelled", b"orig")
    assert await flow.counts("b") == "1/0/0 of 1 satisfied"


@pytest.mark.parametrize("policy", [ALL_OF, any_of("let_run")], ids=["all_of", "any_of"])
async def test_a_result_that_makes_the_join_impossible_is_not_copied(flow: FlowEnv, policy: Any) -> None:
    await flow.begin("ab", input_payload=b"orig")
    await flow.join("a", "b", policy, dependency_kind="failure_only", data_passing_ref="r")

    await flow.succeed_and_cascade("a", result=b"A")

    assert (await flow.state("b"), await flow.payload("b")) == ("skipped", b"orig")


@pytest.mark.parametrize("together", [False, True])
async def test_a_result_from_before_the_join_became_impossible_is_the_input_of_the_replayed_child(
    flow: FlowEnv, together: bool
) -> None:
    await flow.begin("abcd", input_payload=b"orig")
    await flow.edge("a", "d", data_passing_ref="r")
    await flow.edge("b", "d")
    await flow.edge("c", "d", data_passing_ref="r")
    ends = [("a", b"A"), ("b", None), ("c", b"C")]
    for name, result in ends:
        await (flow.fail(name) if result is None else flow.succeed(name, result=result))
        if not together:
            await flow.cascade(name)
        flow.clock.advance_ms(1)
    if together:
        await flow.sweep("completion_dispatch")
    assert (await flow.state("d"), await flow.counts("d")) == ("skipped", "2/1/0 of 3 impossible")

    for name in "bd":
        await flow.engine.replay_execution(flow.names[name])
    await flow.succeed_and_cascade("b")

    assert (await flow.state("d"), await flow.payload("d")) == ("waiting", b"A")  # c completed after d was terminal
