"""Join arithmetic: the tables of the specification, and a naive model over every order of outcomes."""

from __future__ import annotations

from itertools import permutations, product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric import errors
from flowfabric.model.change import Change, Insert, Patch, Upsert
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.model.flow import (
    Dependency,
    DependencyKind,
    DependencyState,
    EdgeGroup,
    GroupState,
    JoinPolicyKind,
    OnSatisfied,
    PendingSiblingCancel,
)
from flowfabric.model.states import EligibilityState, TerminalOutcome
from flowfabric.rules.execution.create import CreateExecution, create
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.rules.flow import downstreams, inline_release, joins
from flowfabric.rules.flow.joins import JoinContext, UpstreamOutcome, Verdict
from flowfabric.rules.flow.successors import Successor, decode_queue, encode_successors, named_successors, successor
from flowfabric.rules.scheduling import queue

SUCCESS, FAILED, SKIPPED = TerminalOutcome.SUCCESS, TerminalOutcome.FAILED, TerminalOutcome.SKIPPED
ENDS = [TerminalOutcome.SUCCESS, TerminalOutcome.FAILED, TerminalOutcome.SKIPPED]
CHILD = "{fp:1}:00000000-0000-4000-8000-000000000000"


def group(variant: JoinPolicyKind, n: int, k: int = 0, then: OnSatisfied | None = None, **given: int) -> EdgeGroup:
    return EdgeGroup("f", CHILD, variant, then, k, n, n, **given)  # type: ignore[arg-type]


def edge(number: int, **given: object) -> Dependency:
    return Dependency(CHILD, f"e{number:03}", "f", f"u{number}", DependencyKind.SUCCESS_ONLY, **given)  # type: ignore[arg-type]


def settled(*outcomes: TerminalOutcome) -> list[UpstreamOutcome]:
    return [UpstreamOutcome(edge(number), outcome) for number, outcome in enumerate(outcomes)]


def child(**given: object) -> Execution:
    fields = {"execution_id": CHILD, "partition": 1, "namespace": "n", "lane_id": "default", "execution_kind": "task"}
    ask = CreateExecution(**fields | given)  # type: ignore[arg-type]
    decision = create(None, None, ask, 0)
    assert decision.change is not None
    born = decision.change.writes[0]
    assert isinstance(born, Insert)
    assert isinstance(born.row, Execution)
    return msgspec.structs.replace(born.row, **downstreams.waiting_fields("…"), created_at=0)


@pytest.mark.parametrize(
    ("policy", "outcomes", "verdicts"),
    [
        (group(JoinPolicyKind.ALL_OF, 3), [SUCCESS] * 3, "pending pending satisfied"),
        (group(JoinPolicyKind.ALL_OF, 3), [SUCCESS, FAILED, SUCCESS], "pending impossible already_fired"),
        (group(JoinPolicyKind.ANY_OF, 3, 1), [FAILED, SKIPPED, SUCCESS], "pending pending satisfied"),
        (group(JoinPolicyKind.ANY_OF, 2, 1), [FAILED, FAILED], "pending impossible"),
        (group(JoinPolicyKind.QUORUM, 5, 3), [SUCCESS, FAILED, SUCCESS, FAILED, SUCCESS], "pending " * 4 + "satisfied"),
        (group(JoinPolicyKind.QUORUM, 5, 3), [FAILED, FAILED, SKIPPED], "pending pending impossible"),
        (group(JoinPolicyKind.QUORUM, 2, 2), [SKIPPED], "impossible"),
        (group(JoinPolicyKind.QUORUM, 2, 3), [SUCCESS], "impossible"),
        (group(JoinPolicyKind.ANY_OF, 3, 1), [SUCCESS] * 3, "satisfied already_fired already_fired"),
    ],
)
def test_the_worked_examples_counted_in_one_batch(
    policy: EdgeGroup, outcomes: list[TerminalOutcome], verdicts: str
) -> None:
    assert [one.value for one in joins.count_outcomes(policy, settled(*outcomes)).verdicts] == verdicts.split()


@pytest.mark.parametrize(
    ("kind", "satisfied_by"),
    [
        (DependencyKind.SUCCESS_ONLY, {"success"}),
        (DependencyKind.FAILURE_ONLY, {"failed", "cancelled", "expired", "skipped"}),
        (DependencyKind.ANY_OUTCOME, {"success", "failed", "cancelled", "expired", "skipped"}),
    ],
)
def test_each_kind_of_edge_is_satisfied_by_its_outcomes(kind: DependencyKind, satisfied_by: set[str]) -> None:
    ends = [outcome for outcome in TerminalOutcome if outcome is not TerminalOutcome.NONE]

    assert {end.value for end in ends if joins.satisfies(kind, end)} == satisfied_by


def naive(variant: JoinPolicyKind, n: int, k: int, outcomes: tuple[TerminalOutcome, ...]) -> GroupState:
    """Return the final state of a group: enough successes, or too many others."""
    good = outcomes.count(SUCCESS)
    needed = n if variant is JoinPolicyKind.ALL_OF else k
    return GroupState.SATISFIED if good >= needed else GroupState.IMPOSSIBLE


@pytest.mark.parametrize(
    ("variant", "k"), [(JoinPolicyKind.ALL_OF, 0), *((JoinPolicyKind.QUORUM, k) for k in (1, 2, 3))]
)
def test_the_result_does_not_depend_on_order_or_batching(variant: JoinPolicyKind, k: int) -> None:
    for outcomes in product(ENDS, repeat=3):
        for order in permutations(settled(*outcomes)):
            for cut in range(4):
                now = group(variant, 3, k)
                fired = 0
                for portion in (order[:cut], order[cut:]):
                    # Each comes later than the one before, as the store's clock would have it.
                    timed = [
                        UpstreamOutcome(edge(int(one.dependency.edge_id[1:]), unfolded_at=place), one.outcome)
                        for place, one in enumerate(portion)
                    ]
                    counts = joins.count_outcomes(now, timed)
                    fired += counts.fired_by is not None
                    now = EdgeGroup(
                        "f",
                        CHILD,
                        variant,
                        None,
                        k,
                        3,
                        3,
                        counts.succeeded,
                        counts.failed,
                        counts.skipped,
                        counts.state,
                    )
                assert (now.group_state, fired) == (naive(variant, 3, k, outcomes), 1)
                assert now.succeeded + now.failed + now.skipped == 3


@given(st.lists(st.sampled_from(ENDS), min_size=1, max_size=40), st.integers(1, 45))
def test_outcomes_counted_in_a_batch_equal_those_counted_singly(outcomes: list[TerminalOutcome], k: int) -> None:
    policy = group(JoinPolicyKind.QUORUM, len(outcomes), k)
    together = joins.count_outcomes(policy, settled(*outcomes))
    state, fired = GroupState.PENDING, None
    for number, one in enumerate(settled(*outcomes)):
        counts = outcomes[: number + 1]
        if state is GroupState.PENDING:
            good = counts.count(SUCCESS)
            state = joins.evaluate(policy, good, len(counts) - good)
            fired = one.dependency if state is not GroupState.PENDING else None
    assert (together.state, together.fired_by) == (state, fired)


def test_outcomes_passed_in_any_order_are_counted_in_order_of_arrival() -> None:
    # The second and the third arrive at the same instant: then the edges' ids decide.
    came = [(2, 10), (0, 20), (1, 20)]
    ends = [UpstreamOutcome(edge(number, unfolded_at=at), SUCCESS) for number, at in came]

    for some in (ends[:2], ends):
        for order in permutations(some):
            for k in range(1, len(some) + 1):
                counted = joins.count_outcomes(group(JoinPolicyKind.QUORUM, 3, k), order)
                assert list(counted.counted) == some
                assert counted.fired_by == some[k - 1].dependency


def test_an_edge_that_was_counted_before_is_skipped() -> None:
    known = UpstreamOutcome(edge(0, state=DependencyState.SATISFIED), SUCCESS)

    counts = joins.count_outcomes(group(JoinPolicyKind.ALL_OF, 2, succeeded=1), [known])

    assert counts.verdicts == (Verdict.ALREADY_RESOLVED,)
    assert joins.resolve_join(group(JoinPolicyKind.ALL_OF, 2), child(), counts, JoinContext()).change is None


@pytest.mark.parametrize("bucket", ["succeeded", "failed", "skipped"])
def test_more_outcomes_than_edges_are_a_bug_and_change_nothing(bucket: str) -> None:
    full = group(JoinPolicyKind.ALL_OF, 1, 0, None, **{bucket: 1})

    decision = joins.resolve_join(full, child(), joins.count_outcomes(full, settled(SUCCESS)), JoinContext())

    assert isinstance(decision.answer, errors.BugError)
    assert decision.change is None


def resolved(policy: EdgeGroup, *outcomes: TerminalOutcome, row: Execution | None = None) -> Change:
    decision = joins.resolve_join(policy, row, joins.count_outcomes(policy, settled(*outcomes)), JoinContext())
    assert decision.change is not None
    return decision.change


def test_a_group_that_stays_pending_leaves_the_child_unchanged() -> None:
    change = resolved(group(JoinPolicyKind.ALL_OF, 2), SUCCESS, row=child())

    assert {guard.row for guard in change.guards} == {EdgeGroup}
    assert {write.row for write in change.writes if isinstance(write, Patch)} == {EdgeGroup, Dependency}


def test_a_group_that_fires_guards_its_child_even_if_the_child_is_unchanged() -> None:
    active = msgspec.structs.replace(child(), eligibility_state=EligibilityState.NOT_APPLICABLE)

    change = resolved(group(JoinPolicyKind.ALL_OF, 1), SUCCESS, row=active)

    assert {guard.row for guard in change.guards} == {EdgeGroup, Execution}
    assert Execution not in {write.row for write in change.writes if isinstance(write, Patch)}


@pytest.mark.parametrize(
    ("variant", "then", "outcome", "flags"),
    [
        (JoinPolicyKind.ANY_OF, OnSatisfied.CANCEL_REMAINING, SUCCESS, "sibling_quorum_satisfied"),
        (JoinPolicyKind.ANY_OF, OnSatisfied.CANCEL_REMAINING, FAILED, "sibling_quorum_impossible"),
        (JoinPolicyKind.ANY_OF, OnSatisfied.LET_RUN, SUCCESS, None),
        (JoinPolicyKind.ALL_OF, None, SUCCESS, None),
    ],
)
def test_siblings_are_flagged_only_if_the_policy_requires_it(
    variant: JoinPolicyKind, then: OnSatisfied | None, outcome: TerminalOutcome, flags: str | None
) -> None:
    change = resolved(group(variant, 1, 1, then), outcome)

    listed = [
        write for write in change.writes if isinstance(write, Upsert) and isinstance(write.row, PendingSiblingCancel)
    ]
    fields = next(write.fields for write in change.writes if isinstance(write, Patch) and write.row is EdgeGroup)
    assert (bool(listed), fields.get("cancel_siblings_reason")) == (flags is not None, flags)
    fired = msgspec.structs.replace(group(variant, 1, 1, then), **fields)
    key = (fired.flow_id, fired.downstream_execution_id)
    entry = PendingSiblingCancel(*key, 0, revision=change.id)  # as a store keeps it
    known = flow_cancel.sibling_cancels_in(change, key, (child(),)) or flow_cancel.SiblingCancels([], "", change.id)
    assert known == flow_cancel.sibling_cancels_of(entry, fired)
    again = msgspec.structs.replace(child(), replay_count=1)
    assert flow_cancel.sibling_cancels_in(change, key, (again,)) is None
    assert flow_cancel.sibling_cancels_in(change, ("another", "group"), (child(),)) is None


def test_only_the_data_passing_edges_of_the_firing_moment_pass_their_result_on() -> None:
    def with_refs(outcomes: list[TerminalOutcome]) -> list[UpstreamOutcome]:
        return [
            UpstreamOutcome(edge(number, data_passing_ref="r" if number != 1 else None), outcome)
            for number, outcome in enumerate(outcomes)
        ]

    every = group(JoinPolicyKind.ALL_OF, 3)
    first_two = group(JoinPolicyKind.QUORUM, 3, 2)

    def carriers(policy: EdgeGroup, outcomes: list[TerminalOutcome]) -> list[str]:
        counts = joins.count_outcomes(policy, with_refs(outcomes))
        return [one.edge_id for one in counts.result_edges(policy, child())]

    assert carriers(every, [SUCCESS, SUCCESS]) == ["e000"]
    assert carriers(every, [SUCCESS, SUCCESS, SUCCESS]) == ["e002", "e000"]
    assert carriers(every, [SUCCESS, FAILED, SUCCESS]) == ["e000"]  # as if each had arrived alone
    assert carriers(every, [FAILED, SUCCESS, SUCCESS]) == []
    assert carriers(first_two, [SUCCESS]) == []
    assert carriers(first_two, [SUCCESS, SUCCESS]) == []  # The firing edge has no reference.
    assert carriers(first_two, [SUCCESS, FAILED, SUCCESS]) == ["e002"]


@given(
    policy=st.sampled_from(
        [
            None,
            '{"attempt_timeout_ms":50}',
            '{"fairness_key":"k","fairness_weight":3}',
            '{"quota_policy_ids":["11111111-1111-4111-8111-111111111111"]}',
            '{"routing_requirements":{"required_capabilities":["gpu"]}}',
        ]
    ),
    priority=st.sampled_from([0, 7]),
)
def test_an_unloaded_child_gets_the_same_change_as_a_loaded_one(policy: str | None, priority: int) -> None:
    row = child(policy=policy, priority=priority)
    alone = group(JoinPolicyKind.ALL_OF, 1)
    (one,) = settled(SUCCESS)
    follows = successor(
        one.dependency.edge_id, CHILD, DependencyKind.SUCCESS_ONLY, inbound=1, ref=None, queue=queue.queue_of(row)
    )

    looked = inline_release.inline_release(alone, row, one, JoinContext())
    unseen = inline_release.inline_release_without_load(
        "f", follows.edge_id, CHILD, decode_queue(named_successors(waited_for_by(follows))[0].queue)
    )

    assert looked is not None
    assert _after(looked, row, alone, one.dependency) == _after(unseen, row, alone, one.dependency)
    for guard, supposed in zip(unseen.guards, (alone, row), strict=True):
        assert guard.expected is not None
        assert guard.expected.fields.items() <= msgspec.structs.asdict(supposed).items()


@pytest.mark.parametrize(
    ("kind", "inbound"), [(DependencyKind.FAILURE_ONLY, 1), (DependencyKind.SUCCESS_ONLY, 2)], ids=["failure", "join"]
)
def test_a_child_that_waits_for_something_else_has_to_be_loaded(kind: DependencyKind, inbound: int) -> None:
    assert successor("e", CHILD, kind, inbound=inbound, ref=None, queue=QueueKey("default")).queue == ()


def test_every_verdict_has_a_public_form_and_an_edge_without_one_is_no_dependency() -> None:
    assert [joins.resolution_of(verdict, "e", CHILD) for verdict in Verdict] == [
        "satisfied",
        "impossible",
        "pending",
        "already_resolved",
        "already_resolved",
    ]
    assert isinstance(joins.resolution_of(None, "e", CHILD), errors.InvalidDependency)


def waited_for_by(follows: Successor) -> Execution:
    return msgspec.structs.replace(child(), successors=encode_successors([follows]))


def _after(change: Change, *rows: msgspec.Struct) -> list[msgspec.Struct]:
    """Return the rows that a change leaves."""
    fields = {write.row: write.fields for write in change.writes if isinstance(write, Patch)}
    assert fields.keys() == {type(row) for row in rows}
    return [msgspec.structs.replace(row, **fields[type(row)]) for row in rows]
