"""Templates: the compact change of an ordinary completion expands to exactly the full change."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowfabric.model.change import Change, Insert, Patch, as_template, expand, live, seen
from flowfabric.model.execution import Execution, QueueKey, Result
from flowfabric.model.flow import Dependency, DependencyKind
from flowfabric.model.states import (
    AttemptRecordState,
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
)
from flowfabric.rules.execution import cancel, finish, transitions
from flowfabric.rules.execution.fences import OPERATOR_OVERRIDE, Fence
from flowfabric.rules.flow import downstreams, sibling_cancel, successors
from flowfabric.rules.flow.successors import encode_successors, successor
from tests.rules.execution.rows import NOW, running

HELD = Fence("lease-1", 3, "attempt-1")


def full_change(row: Execution, *also: Insert) -> Change:
    return transitions.terminate(
        row,
        TerminalOutcome.SUCCESS,
        attempt=AttemptRecordState.ENDED_SUCCESS,
        release_reason="completed",
        guard=seen(row, live(row)),
        extra_writes=also,
    )


@given(
    tags=st.none() | st.just('{"a.b":"c"}'),
    lineage=st.none() | st.just('{"retry_reason":"it\'s"}'),
    resumed_at=st.none() | st.just(NOW - 5),
    timeout_at=st.none() | st.just(NOW + 5),
    terms=st.none() | st.just('{"retention_ttl_ms":5000}') | st.just('{"retry":{"max_retries":1}}'),
    result=st.none() | st.just(b"R"),
    flow_id=st.none() | st.just("f"),
    successors=st.none() | st.just("many") | st.just('[["e","x",true,false],["g","y"]]'),
)
def test_the_template_of_an_ordinary_success_expands_to_the_full_change(
    tags: str | None,
    lineage: str | None,
    resumed_at: int | None,
    timeout_at: int | None,
    terms: str | None,
    result: bytes | None,
    flow_id: str | None,
    successors: str | None,
) -> None:
    row = running(
        tags=tags,
        lineage=lineage,
        attempt_resumed_at=resumed_at,
        attempt_timeout_at=timeout_at,
        terms=terms,
        flow_id=flow_id,
        successors=successors,
    )
    change = finish.complete(row, HELD, None, result, None, NOW).change
    assert change is not None
    assert change.template is not None
    kept = () if result is None else (Insert(Result(row.execution_id, result, None)),)
    assert expand(change, row) == full_change(row, *kept)


@pytest.mark.parametrize(
    "attached",
    [
        {"stream_index": 1},
        {"parent_id": "p"},
        {"deadline_at": NOW + 5},
        {"current_suspension_id": "s"},
        {"blocking_text": "why"},
        {"terms": '{"quota_policy_ids":["q"]}'},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_completion_that_affects_other_rows_is_a_full_change(attached: dict[str, Any]) -> None:
    row = running(**attached)
    change = finish.complete(row, HELD, None, None, None, NOW).change
    assert change is not None
    assert change.template is None
    assert change == full_change(row)


def test_a_change_without_a_template_expands_to_itself() -> None:
    change = full_change(running())
    assert expand(change, running()) is change


def test_only_a_patch_and_an_event_make_a_template() -> None:
    change = full_change(running())
    with pytest.raises(TypeError, match="a template patches its row and emits one event, nothing else"):
        as_template(msgspec.structs.replace(change, writes=change.writes * 2))
    with pytest.raises(TypeError, match="a template patches its row and emits one event, nothing else"):
        as_template(msgspec.structs.replace(change, events=()))


def unstarted(**fields: Any) -> Execution:
    """Return an execution that waits for its first worker."""
    untouched: dict[str, Any] = {
        "lifecycle_phase": LifecyclePhase.RUNNABLE,
        "ownership_state": OwnershipState.UNOWNED,
        "eligibility_state": EligibilityState.ELIGIBLE_NOW,
        "blocking_reason": BlockingReason.WAITING_FOR_WORKER,
        "attempt_state": AttemptState.PENDING_FIRST_ATTEMPT,
        "public_state": PublicState.WAITING,
        "total_attempt_count": 0,
        "lease_epoch": 0,
        "line": QueueKey("default"),
        **dict.fromkeys(("started_at", "attempt_index", "attempt_id", "attempt_type", "attempt_started_at")),
        **dict.fromkeys(("lease_id", "worker_id", "worker_instance_id", "lease_expires_at")),
    }
    return running(**untouched | fields)


def cancelled(row: Execution, reason: str = cancel.QUORUM_SATISFIED) -> Change:
    change = cancel.cancel(row, Fence(), OPERATOR_OVERRIDE, reason).change
    assert change is not None
    return change


def cancelled_in_full(row: Execution, reason: str = cancel.QUORUM_SATISFIED) -> Change:
    return transitions.terminate(
        row,
        TerminalOutcome.CANCELLED,
        attempt=AttemptRecordState.ENDED_CANCELLED,
        release_reason="cancelled",
        details='{"revoked_by":"operator"}',
        cancellation_reason=reason,
        cancelled_by=OPERATOR_OVERRIDE,
    )


@given(
    reason=st.sampled_from([cancel.QUORUM_SATISFIED, cancel.QUORUM_IMPOSSIBLE]),
    blocked=st.booleans(),
    terms=st.none() | st.just('{"retention_ttl_ms":5000}'),
    flow_id=st.none() | st.just("f"),
    successors=st.none() | st.just("many") | st.just('[["e","x",true,false],["g","y"]]'),
)
def test_the_cancel_of_an_unstarted_sibling_leaves_the_rows_of_the_full_rule(
    reason: str, blocked: bool, terms: str | None, flow_id: str | None, successors: str | None
) -> None:
    row = unstarted(
        terms=terms, flow_id=flow_id, successors=successors, **downstreams.waiting_fields("…") if blocked else {}
    )
    change = cancelled(row, reason)
    assert change.template is not None
    short, long = expand(change, row), cancelled_in_full(row, reason)
    assert (short.guards, short.writes[1:], short.events) == (long.guards, long.writes[1:], long.events)
    assert _patched(row, short) == _patched(row, long)


@given(
    reason=st.sampled_from([cancel.QUORUM_SATISFIED, cancel.QUORUM_IMPOSSIBLE]),
    kind=st.sampled_from(DependencyKind),
    ref=st.none() | st.just("r"),
    inbound=st.sampled_from([2, 1000]),
    blocked=st.booleans(),
    born=st.fixed_dictionaries(
        {
            "terms": st.none() | st.just('{"retention_ttl_ms":5000}') | st.just('{"retry":{"max_retries":1}}'),
            "lane_id": st.sampled_from(["default", "other"]),
            "created_at": st.sampled_from([NOW, NOW - 7]),
        }
    ),
)
def test_the_cancel_of_an_unloaded_sibling_equals_that_of_a_loaded_one(
    reason: str, kind: DependencyKind, ref: str | None, inbound: int, blocked: bool, born: dict[str, Any]
) -> None:
    edge = Dependency("child", "e", "f", "sibling", kind, data_passing_ref=ref)
    follows = successor("e", "child", kind, inbound=inbound, ref=ref, queue=QueueKey("default"))
    row = unstarted(
        execution_id="sibling",
        flow_id="f",
        successors=encode_successors([follows]),
        **born,
        **downstreams.waiting_fields("…") if blocked else {},
    )

    [(change, supposed)] = sibling_cancel.cancel_without_load([edge], inbound, running(flow_id="f", **born), reason)

    seen = cancelled(row, reason)
    assert (change.template, change.writes, change.events) == (seen.template, (), seen.events)
    assert seen.writes == (successors.record_outcome("child", "e", TerminalOutcome.CANCELLED),), "all that is left out"
    [guard] = change.guards
    assert guard.expected is not None
    asked = guard.expected.fields | dict(zip(guard.expected.per_row, guard.expected_values, strict=True))
    assert (guard.row, guard.key) == (Execution, ("sibling",))
    assert asked.items() <= msgspec.structs.asdict(row).items()
    assert asked.items() <= msgspec.structs.asdict(supposed).items()
    assert supposed.execution_id == "sibling"


@pytest.mark.parametrize(
    ("reason", "terms"), [("because", None), (cancel.QUORUM_SATISFIED, '{"quota_policy_ids":["q"]}')]
)
def test_other_siblings_have_to_be_loaded(reason: str, terms: str | None) -> None:
    edge = Dependency("child", "e", "f", "sibling", DependencyKind.SUCCESS_ONLY)
    assert sibling_cancel.cancel_without_load([edge], 2, running(flow_id="f", terms=terms), reason) == []


def _patched(row: Execution, change: Change) -> Execution:
    patch = change.writes[0]
    assert isinstance(patch, Patch)
    return msgspec.structs.replace(row, **patch.fields)


@pytest.mark.parametrize(
    "otherwise",
    [
        {"attempt_index": 0, "attempt_state": AttemptState.PENDING_RETRY_ATTEMPT},
        {"parent_id": "p"},
        {"deadline_at": NOW + 5},
        {"granted_until": NOW + 5},
        {"terms": '{"quota_policy_ids":["q"]}'},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_the_cancel_of_any_other_sibling_is_a_full_change(otherwise: dict[str, Any]) -> None:
    row = unstarted(**otherwise)
    assert cancelled(row) == cancelled_in_full(row)


def test_a_cancel_with_a_custom_reason_is_a_full_change() -> None:
    assert cancelled(unstarted(), "I say so") == cancelled_in_full(unstarted(), "I say so")


@pytest.mark.parametrize(
    ("fields", "concerns"),
    [
        ({}, False),
        ({"terms": '{"retention_ttl_ms":5}'}, False),
        ({"flow_id": "11111111-1111-4111-8111-111111111111"}, False),
        ({"successors": ""}, True),
        ({"parent_id": "{fp:86}:22222222-2222-4222-8222-222222222222"}, True),
        ({"terms": '{"quota_policy_ids":["q"]}'}, True),
    ],
)
def test_a_completion_affects_successors_parents_and_executions_behind_its_limits(
    fields: dict[str, Any], concerns: bool
) -> None:
    assert transitions.affects_others(running(**fields)) is concerns
