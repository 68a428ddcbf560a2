"""S-001 to S-015: building a flow, and the refused graphs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.model.answers import flow as flow_answers
from flowfabric.model.flow import Flow
from tests.scenarios.flow_env import WAITING, WAITS, FlowEnv, any_of, quorum


async def graph_counts(flow: FlowEnv) -> tuple[int, int, int]:
    described = await flow.describe()
    return described.graph_revision, described.node_count, described.edge_count


@pytest.mark.spec("S-001")
async def test_create_flow_is_idempotent(flow: FlowEnv) -> None:
    first = await flow.engine.create_flow(flow.id, flow_kind="dag", namespace="n1")
    second = await flow.engine.create_flow(flow.id, flow_kind="other", namespace="n1")

    assert (first, second) == (flow_answers.FlowCreated(flow.id), flow_answers.FlowExists(flow.id))
    described = await flow.describe()
    assert (described.flow_kind, described.namespace, described.public_flow_state) == ("dag", "n1", "open")
    assert (described.graph_revision, described.node_count, described.edge_count) == (0, 0, 0)
    assert (described.cancelled_at, described.cancel_reason, described.cancellation_policy) == (None, None, None)


@pytest.mark.spec("S-002")
async def test_adding_an_unknown_execution_writes_nothing(flow: FlowEnv) -> None:
    await flow.begin()
    stranger = flow.new_id()

    with pytest.raises(errors.NotFound) as caught:
        await flow.engine.add_execution_to_flow(flow.id, stranger)

    assert caught.value.entity == "execution"
    assert await graph_counts(flow) == (0, 0, 0)
    assert await flow.engine.describe_execution(stranger) is None


@pytest.mark.spec("S-003")
async def test_an_execution_belongs_to_one_flow(flow: FlowEnv) -> None:
    await flow.begin("a")
    other = FlowEnv(flow.engine, flow.clock)
    while other.partition != flow.partition:
        other = FlowEnv(flow.engine, flow.clock)
    await other.begin()

    with pytest.raises(errors.ExecutionAlreadyInFlow) as caught:
        await flow.engine.add_execution_to_flow(other.id, flow.names["a"])

    assert caught.value.detail == f"already_member_of_different_flow:{flow.id}"
    assert await flow.engine.resolve_execution_flow_id(flow.names["a"]) == flow.id
    assert await graph_counts(other) == (0, 0, 0)


@pytest.mark.spec("S-004")
async def test_a_member_must_be_on_the_partition_of_its_flow(flow: FlowEnv) -> None:
    other = FlowEnv(flow.engine, flow.clock)
    while other.partition == flow.partition:
        other = FlowEnv(flow.engine, flow.clock)

    with pytest.raises(errors.InvalidInput) as caught:  # the flow does not even exist
        await flow.engine.add_execution_to_flow(flow.id, other.new_id())

    assert str(flow.partition) in caught.value.detail
    assert str(other.partition) in caught.value.detail


@pytest.mark.spec("S-005")
async def test_a_cancelled_flow_rejects_new_members_and_edges(flow: FlowEnv) -> None:
    await flow.begin()
    await flow.create("a")
    await flow.create("b")
    await flow.engine.cancel_flow(flow.id, policy="cancel_all")

    with pytest.raises(errors.FlowAlreadyTerminal):
        await flow.engine.add_execution_to_flow(flow.id, flow.names["a"])
    with pytest.raises(errors.FlowAlreadyTerminal):
        await flow.stage("a", "b")

    assert await graph_counts(flow) == (0, 0, 0)


@pytest.mark.spec("S-006")
async def test_each_member_and_edge_increments_the_graph_revision(flow: FlowEnv) -> None:
    await flow.begin("abc")
    a, b, c = (flow.names[name] for name in "abc")
    e1, e2 = flow.engine.minter.uuid(), flow.engine.minter.uuid()

    first = await flow.engine.stage_dependency_edge(flow.id, e1, a, b, expected_graph_revision=3)
    second = await flow.engine.stage_dependency_edge(flow.id, e2, b, c, expected_graph_revision=4)

    assert (first, second) == (flow_answers.Staged(e1, 4), flow_answers.Staged(e2, 5))
    assert await graph_counts(flow) == (5, 3, 2)
    assert [await flow.vector(name) for name in "bc"] == [WAITING, WAITING]


@pytest.mark.spec("S-007")
async def test_a_self_edge_is_refused_before_any_other_check(flow: FlowEnv) -> None:
    loop = flow.new_id()

    with pytest.raises(errors.SelfReferencingEdge):
        await flow.engine.stage_dependency_edge(flow.id, flow.engine.minter.uuid(), loop, loop)


@pytest.mark.spec("S-008")
async def test_a_duplicate_edge_id_is_refused(flow: FlowEnv) -> None:
    await flow.begin("ab")
    edge = await flow.stage("a", "b", data_passing_ref="x")
    before = await graph_counts(flow)

    with pytest.raises(errors.DependencyAlreadyExists) as caught:
        await flow.engine.stage_dependency_edge(
            flow.id, edge, flow.names["a"], flow.names["b"], expected_graph_revision=before[0]
        )

    existing: Any = caught.value.existing
    assert (existing.edge_id, existing.data_passing_ref) == (edge, "x")
    assert await graph_counts(flow) == before


@pytest.mark.spec("S-009")
async def test_parallel_edges_count_separately(flow: FlowEnv) -> None:
    await flow.begin("ab")
    first, second = await flow.stage("a", "b"), await flow.stage("a", "b")

    assert [await flow.apply("a", "b", edge) for edge in (first, second)] == [1, 2]
    assert await flow.counts("b") == "0/0/0 of 2 pending"

    await flow.succeed("a")
    [cascade] = await flow.cascade("a")

    assert cascade.resolved == 2
    assert await flow.counts("b") == "2/0/0 of 2 satisfied"
    assert await flow.vector("b") == WAITING


@pytest.mark.spec("S-010")
async def test_applying_an_edge_does_not_interrupt_a_running_child(flow: FlowEnv) -> None:
    await flow.begin("ab")
    claim = await flow.claim("b")
    await flow.stage("a", "b")

    assert await flow.apply("a", "b") == 1

    row = await flow.row("b")
    assert (row.public_state, row.lease_id) == ("active", claim.lease_id)
    await flow.engine.complete(claim.handle)
    await flow.fail_and_cascade("a")
    assert await flow.state("b") == "completed"
    assert await flow.counts("b") == "0/1/0 of 1 impossible"


@pytest.mark.spec("S-011")
async def test_applying_an_edge_that_was_not_staged_is_refused(flow: FlowEnv) -> None:
    await flow.begin("ab")

    with pytest.raises(errors.InvalidDependency):
        await flow.apply("a", "b", flow.engine.minter.uuid())

    assert await flow.vector("b") == WAITING


@pytest.mark.spec("S-012")
async def test_an_edge_applied_after_its_upstream_completed_is_resolved_by_the_reconciler(flow: FlowEnv) -> None:
    await flow.begin("ab")
    await flow.succeed("a")

    await flow.edge("a", "b")

    assert await flow.vector("b") == WAITS
    await flow.sweep("dependency_reconciler")
    assert await flow.vector("b") == WAITING
    assert await flow.counts("b") == "1/0/0 of 1 satisfied"


@pytest.mark.spec("S-013")
async def test_a_late_edge_reopens_an_all_of_group_but_not_an_any_of_group(flow: FlowEnv) -> None:
    await flow.begin("abdv", edges=("ab",))
    await flow.join("a", "d", any_of("let_run"))
    await flow.succeed_and_cascade("a")
    assert await flow.state("b", "d") == "waiting waiting"

    await flow.edge("v", "b")
    await flow.edge("v", "d")

    assert await flow.state("b", "d") == "waiting_children waiting"
    assert (await flow.counts("b"), (await flow.group("b")).satisfied_at) == ("1/0/0 of 2 pending", None)
    assert await flow.counts("d") == "1/0/0 of 2 satisfied"
    await flow.succeed_and_cascade("v")
    assert await flow.vector("b") == WAITING
    assert await flow.counts("b") == "2/0/0 of 2 satisfied"


@pytest.mark.spec("S-014")
async def test_a_join_policy_must_precede_the_edges(flow: FlowEnv) -> None:
    await flow.begin("ab")
    await flow.stage("a", "b")

    with pytest.raises(errors.InvalidInput) as caught:
        await flow.set_policy("b", any_of("let_run"))

    assert caught.value.detail.startswith("edge_group_policy_already_fixed")


@pytest.mark.spec("S-015")
async def test_a_join_policy_can_be_repeated_and_replaced_before_the_edges(flow: FlowEnv) -> None:
    await flow.begin("12345b")

    answers = [await flow.set_policy("b", quorum(k, "cancel_remaining")) for k in (2, 2, 3)]

    assert answers == [
        flow_answers.SetJoinPolicyResult.SET,
        flow_answers.SetJoinPolicyResult.ALREADY_SET,
        flow_answers.SetJoinPolicyResult.SET,
    ]
    await flow.join("12345", "b")
    await flow.succeed_and_cascade("1", "2")
    assert await flow.counts("b") == "2/0/0 of 5 pending"
    await flow.succeed_and_cascade("3")
    assert await flow.counts("b") == "3/0/0 of 5 satisfied"


@pytest.mark.parametrize(
    "policy",
    [
        quorum(0, "let_run"),
        quorum(2**31, "let_run"),
        {"kind": "quorum", "k": True, "on_satisfied": "let_run"},
        {"kind": "any_of"},
        {"kind": "quorum", "k": 1, "on_satisfied": "sometimes"},
        {"kind": "most_of"},
        {},
    ],
)
async def test_an_invalid_join_policy_is_refused_before_the_flow_is_loaded(
    flow: FlowEnv, policy: dict[str, Any]
) -> None:
    with pytest.raises(errors.InvalidInput):
        await flow.engine.set_edge_group_policy(flow.id, flow.new_id(), policy)


async def test_a_join_policy_of_an_unknown_flow_is_refused_before_the_downstream_is_checked(
    flow: FlowEnv,
) -> None:
    elsewhere = f"{{fp:{(flow.partition + 1) % 256}}}:{flow.engine.minter.uuid()}"
    for downstream in (flow.new_id(), elsewhere):
        with pytest.raises(errors.NotFound):
            await flow.engine.set_edge_group_policy(flow.id, downstream, any_of("let_run"))

    await flow.begin()
    with pytest.raises(errors.InvalidInput, match="partition mismatch"):
        await flow.engine.set_edge_group_policy(flow.id, elsewhere, any_of("let_run"))


async def test_a_long_cycle_is_refused(flow: FlowEnv) -> None:
    await flow.begin("abcd")
    for upstream, downstream in ("ab", "bc", "cd"):
        await flow.stage(upstream, downstream)

    with pytest.raises(errors.CycleDetected):
        await flow.stage("d", "a")

    assert await graph_counts(flow) == (7, 4, 3)


async def test_the_cycle_search_stops_at_its_node_limit(flow: FlowEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowfabric.rules.flow.graph.MAX_SEARCHED_NODES", 4)
    await flow.begin("abcdeu")
    for upstream, downstream in ("ab", "bc", "cd", "de"):
        await flow.stage(upstream, downstream)

    await flow.stage("u", "b")  # the search visits b, c, d and e
    with pytest.raises(errors.CycleDetected):
        await flow.stage("u", "a")


async def test_an_edge_is_refused_for_the_first_reason_that_applies(flow: FlowEnv) -> None:
    await flow.begin("abc")
    known = await flow.stage("a", "b")
    a, b, c, stranger, nowhere = (*(flow.names[name] for name in "abc"), flow.new_id(), flow.engine.minter.uuid())

    async def refusal(flow_id: str, upstream: str, downstream: str, revision: int) -> str:
        with pytest.raises(errors.FabricError) as caught:
            await flow.engine.stage_dependency_edge(
                flow_id, known, upstream, downstream, expected_graph_revision=revision
            )
        return caught.value.kind

    assert await refusal(nowhere, a, a, 9) == "self_referencing_edge"
    assert await refusal(nowhere, stranger, b, 9) == "flow_not_found"
    assert await refusal(flow.id, stranger, b, 9) == "stale_graph_revision"
    assert await refusal(flow.id, stranger, b, 4) == "execution_not_in_flow"
    assert await refusal(flow.id, b, stranger, 4) == "execution_not_in_flow"
    assert await refusal(flow.id, b, a, 4) == "cycle_detected"
    assert await refusal(flow.id, b, c, 4) == "dependency_already_exists"
    await flow.engine.cancel_flow(flow.id, policy="flow_only")
    assert await refusal(flow.id, stranger, b, 9) == "flow_already_terminal"
    described = await flow.describe()
    assert (described.graph_revision, described.edge_count) == (4, 1)


async def test_an_edge_to_an_execution_outside_the_flow_is_refused(flow: FlowEnv) -> None:
    await flow.begin("a")
    await flow.create("x")

    for upstream, downstream in ("ax", "xa"):
        with pytest.raises(errors.ExecutionNotInFlow) as caught:
            await flow.stage(upstream, downstream)
        assert caught.value.execution_id == flow.names["x"]


async def test_a_stale_graph_revision_is_refused_with_the_current_one(flow: FlowEnv) -> None:
    await flow.begin("ab")

    with pytest.raises(errors.StaleGraphRevision) as caught:
        await flow.stage("a", "b", expected_graph_revision=1)

    assert (caught.value.expected, caught.value.actual) == (1, 2)
    assert await graph_counts(flow) == (2, 2, 0)


async def test_a_graph_revision_in_the_future_is_stale(flow: FlowEnv) -> None:
    await flow.begin("ab")

    with pytest.raises(errors.StaleGraphRevision):
        await flow.stage("a", "b", expected_graph_revision=2**64 - 1)

    edge_id = await flow.stage("a", "b")
    applied = await flow.engine.apply_dependency_to_child(
        flow.id, edge_id, flow.names["b"], flow.names["a"], graph_revision=2**64 - 1
    )
    assert applied == flow_answers.DependencyApplied(1)


async def test_one_of_two_edges_on_the_same_revision_is_staged(flow: FlowEnv) -> None:
    await flow.begin("ab")

    both = await asyncio.gather(
        flow.stage("a", "b", expected_graph_revision=2),
        flow.stage("b", "a", expected_graph_revision=2),
        return_exceptions=True,
    )

    assert sorted(type(one).__name__ for one in both) == ["StaleGraphRevision", "str"]
    assert await graph_counts(flow) == (3, 2, 1)


async def test_concurrent_adds_all_succeed(flow: FlowEnv) -> None:
    await flow.begin()
    names = [f"m{number}" for number in range(20)]
    for name in names:
        await flow.create(name)

    await asyncio.gather(*(flow.engine.add_execution_to_flow(flow.id, flow.names[name]) for name in names))

    assert await graph_counts(flow) == (20, 20, 0)


async def test_adding_a_member_again_only_registers_the_flow_with_the_projector(flow: FlowEnv) -> None:
    await flow.begin("a")
    await flow.succeed("a")
    await flow.sweep("flow_projector")
    before = await flow.load(Flow, flow.id)
    assert before.project_at is None
    flow.clock.advance_ms(1000)

    again = await flow.engine.add_execution_to_flow(flow.id, flow.names["a"])

    assert again == flow_answers.AlreadyMember(flow.names["a"], 1)
    assert await graph_counts(flow) == (1, 1, 0)
    after = await flow.load(Flow, flow.id)
    assert after.project_at is not None
    assert after.last_mutation_at == before.last_mutation_at


async def test_an_edge_is_applied_once(flow: FlowEnv) -> None:
    await flow.begin("ab")
    edge = await flow.edge("a", "b")

    again = await flow.engine.apply_dependency_to_child(flow.id, edge, flow.names["b"], flow.names["a"])

    assert again == flow_answers.DependencyAlreadyApplied()
    assert await flow.counts("b") == "0/0/0 of 1 pending"


async def test_an_edge_is_applied_only_between_its_own_endpoints(flow: FlowEnv) -> None:
    await flow.begin("abc")
    edge = await flow.stage("a", "b")

    for downstream, upstream in (("c", "a"), ("b", "c")):
        with pytest.raises(errors.InvalidDependency):
            await flow.engine.apply_dependency_to_child(flow.id, edge, flow.names[downstream], flow.names[upstream])
    with pytest.raises(errors.InvalidDependency):
        await flow.engine.apply_dependency_to_child(
            flow.id, edge, flow.names["b"], flow.names["a"], dependency_kind="failure_only"
        )

    assert [await flow.vector(name) for name in "bc"] == [WAITING, WAITING]


async def test_an_edge_into_an_execution_of_another_flow_is_refused(flow: FlowEnv) -> None:
    await flow.begin("a")
    await flow.create("x")

    with pytest.raises(errors.ExecutionNotInFlow):
        await flow.apply("a", "x", flow.engine.minter.uuid())
    with pytest.raises(errors.ExecutionAlreadyInFlow) as caught:
        await flow.engine.apply_dependency_to_child(
            flow.engine.minter.uuid(), flow.engine.minter.uuid(), flow.names["a"], flow.names["x"]
        )
    assert caught.value.execution_id == flow.names["a"]
    with pytest.raises(errors.NotFound):
        await flow.engine.apply_dependency_to_child(flow.id, flow.engine.minter.uuid(), flow.new_id(), flow.names["a"])


async def test_an_unknown_dependency_kind_is_refused(flow: FlowEnv) -> None:
    await flow.begin("ab")

    with pytest.raises(errors.InvalidInput) as caught:
        await flow.stage("a", "b", dependency_kind="on_tuesdays")

    assert "success_only, failure_only, any_outcome" in caught.value.detail
    assert await graph_counts(flow) == (2, 2, 0)
