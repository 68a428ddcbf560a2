"""Errors: every code of the specification with its family and class, and the properties of errors."""

from __future__ import annotations

import copy
import pickle
import re

import pytest

from flowfabric import errors
from flowfabric.errors import Classification, FabricError, StoreFault
from tests.postgres_install import ROOT


def words(text: str) -> list[str]:
    return text.split()


VALIDATION = words("""
    invalid_input capability_mismatch invalid_capabilities invalid_policy_json payload_too_large signal_limit_exceeded
    invalid_waitpoint_key invalid_token waitpoint_not_token_bound retention_limit_exceeded invalid_lease_for_suspend
    invalid_dependency invalid_waitpoint_for_execution invalid_blocking_reason invalid_offset unauthorized
    invalid_budget_scope budget_override_not_allowed invalid_quota_spec invalid_kid invalid_secret_hex invalid_grace_ms
    invalid_tag_key invalid_frame_type corruption handle_from_other_backend
""")
CONTENTION = words("""
    use_claim_resumed_execution not_a_resumed_execution execution_not_leaseable lease_conflict invalid_claim_grant
    claim_grant_expired no_eligible_execution waitpoint_not_found waitpoint_pending_use_buffer_script
    stale_graph_revision execution_not_active execution_not_eligible execution_not_in_eligible_set
    execution_not_reclaimable no_active_lease rate_limit_exceeded concurrency_limit_exceeded retry_exhausted
""")
CONFLICT = words("""
    dependency_already_exists cycle_detected self_referencing_edge execution_already_in_flow waitpoint_already_exists
    budget_attach_conflict quota_attach_conflict rotation_conflict active_attempt_exists
""")
STATE = words("""
    stale_lease lease_expired lease_revoked execution_not_suspended already_suspended waitpoint_closed
    target_not_signalable duplicate_signal resume_condition_not_met waitpoint_not_pending pending_waitpoint_expired
    waitpoint_not_open execution_not_terminal max_replays_exhausted stream_closed stale_owner_cannot_append
    grant_already_exists execution_not_in_flow flow_already_terminal deps_not_satisfied not_blocked_by_deps
    not_runnable terminal budget_exceeded budget_soft_exceeded ok_already_applied attempt_not_started
    attempt_already_terminal execution_not_eligible_for_attempt replay_not_allowed max_retries_exhausted
    stream_already_closed already_satisfied
""")
NOT_FOUND = words("""
    execution_not_found flow_not_found attempt_not_found budget_not_found quota_policy_not_found stream_not_found
""")

INFORMATIONAL = words("""
    execution_not_suspended already_suspended already_satisfied waitpoint_closed duplicate_signal grant_already_exists
    ok_already_applied attempt_already_terminal stream_already_closed budget_soft_exceeded waitpoint_not_open
    waitpoint_not_pending pending_waitpoint_expired not_blocked_by_deps deps_not_satisfied stream_backpressure
""")

FAMILIES = [
    *((kind, "validation") for kind in VALIDATION),
    *((kind, "contention") for kind in CONTENTION),
    *((kind, "conflict") for kind in CONFLICT),
    *((kind, "state") for kind in STATE),
    *((kind, "not_found") for kind in NOT_FOUND),
    ("attempt_not_in_created_state", "bug"),
    ("transport", "transport"),
    ("unavailable", "unavailable"),
    ("resource_exhausted", "resource_exhausted"),
    ("timeout", "timeout"),
    ("stream_disconnected", "stream_disconnected"),
    ("stream_backpressure", "stream_backpressure"),
]

ONE_OF_EACH_SHAPE = [
    errors.InvalidInput("fence_required"),
    errors.StaleLease(execution_id="{fp:7}:x", lease_epoch=3),
    errors.NotFound("quota_policy", quota_policy_id="q"),
    errors.ExecutionNotActive(
        terminal_outcome="success", lease_epoch=4, lifecycle_phase="terminal", attempt_id="a", execution_id="e"
    ),
    errors.RotationConflict(kid="k2"),
    errors.DependencyAlreadyExists(existing={"edge_id": "e"}),
    errors.StoreUnavailable("gone", backend="postgres", source=StoreFault.CLUSTER),
    errors.Unavailable("subscribe_instance_tags"),
    errors.SchemaTooNew(found=9, known=4),
    errors.ForkedProcess("claim"),
    errors.ResourceExhausted("stream_ops", 64, 250),
    errors.WorkerAtCapacity("tasks", 1),
    errors.OperationTimeout("cancel_flow", 5000),
    errors.StreamDisconnected(b"\x02" + bytes(8)),
    errors.StreamBackpressure(),
]


def expected_class(kind: str, family: str) -> Classification:
    if kind in INFORMATIONAL:
        return Classification.INFORMATIONAL
    if kind == "budget_exceeded":
        return Classification.COOPERATIVE
    if family in ("contention", "resource_exhausted"):
        return Classification.RETRYABLE
    return Classification.BUG if family == "bug" else Classification.TERMINAL


@pytest.mark.parametrize(("kind", "family"), FAMILIES)
def test_every_kind_has_one_class_in_its_family_as_the_table_says(kind: str, family: str) -> None:
    cls = errors.by_kind[kind]

    assert cls.family == family
    assert cls.classification is expected_class(kind, family)


@pytest.mark.parametrize("kind", VALIDATION + CONTENTION + CONFLICT + STATE)
def test_a_class_is_named_after_its_kind(kind: str) -> None:
    cls = errors.by_kind[kind]

    assert cls.kind == kind
    assert cls.__name__ == "".join(word.title() for word in kind.split("_"))


def test_no_kind_exists_outside_the_specification() -> None:
    ours = {
        "schema_too_new",
        "partition_mismatch",
        "forked_process",
        "idempotency_conflict",
        "worker_at_capacity",
        "id_in_other_namespace",
        "suspension_not_found",
        "operation_not_found",
        "not_found",
        "key_elsewhere",
        "key_taken",
        "spread_change_pending",
        "too_many_spreads",
        "schedule_not_found",
        "schedule_exists",
        "schedule_paused",
        "schedule_busy",
        "inbox_closed",
        "fact_too_large",
        "reply_not_found",
    }
    fallbacks = {"validation_error", "contention", "conflict", "state_conflict", "bug"}

    assert set(errors.by_kind) == {kind for kind, _ in FAMILIES} | ours | fallbacks


def test_every_error_has_a_readable_message() -> None:
    for cls in errors.by_kind.values():
        sentence = (cls.__doc__ or "").splitlines()[0]
        assert sentence.endswith("."), cls
        assert sentence[0].isupper(), cls


def test_a_missing_waitpoint_shares_the_message_but_not_the_family_of_the_contention_kind() -> None:
    assert errors.NotFound("waitpoint").kind == errors.WaitpointNotFound.kind
    assert errors.NotFound("waitpoint").family == "not_found"
    assert not errors.NotFound("waitpoint").retryable
    assert errors.by_kind["waitpoint_not_found"] is errors.WaitpointNotFound


@pytest.mark.parametrize("fault", StoreFault)
def test_only_a_temporary_store_fault_is_retryable(fault: StoreFault) -> None:
    passing = fault.value in {"transport", "timeout", "cluster", "busy_loading"}

    assert errors.StoreUnavailable(backend="valkey", source=fault.value).retryable is passing


def test_execution_not_active_is_retryable_by_class_and_carries_four_facts() -> None:
    error = errors.ExecutionNotActive(
        terminal_outcome="none", lease_epoch=2, lifecycle_phase="runnable", attempt_id=None
    )

    assert error.retryable
    assert (error.terminal_outcome, error.lease_epoch, error.lifecycle_phase, error.attempt_id) == (
        "none",
        2,
        "runnable",
        None,
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.InvalidInput("lane_id: empty"), "invalid_input: lane_id: empty"),
        (
            errors.InvalidInput("fence_required"),
            (
                "invalid_input: fence_required — Only the holder of the lease may do this: pass its lease id, epoch "
                "and attempt id."
            ),
        ),
        (
            errors.LeaseExpired(execution_id="e", lease_epoch=3),
            "lease_expired — The lease ran out before this arrived; the work will be taken over. (execution_id=e)",
        ),
        (errors.NotFound("quota_policy"), "quota_policy_not_found — There is no such quota policy."),
        (errors.NotFound("execution", "no id begins with 'a'"), "execution_not_found: no id begins with 'a'"),
        (
            errors.InvalidToken("invalid_token"),
            "invalid_token — The waitpoint token is missing, wrong or no longer valid.",
        ),
        (
            errors.StoreUnavailable("refused", backend="Postgres", source="transport"),
            "transport: refused — The store could not be reached or did not answer properly.",
        ),
        (
            errors.StoreUnavailable("reset", backend="Postgres", source="transport", in_doubt=True),
            (
                "transport: reset — The store could not be reached or did not answer properly; the operation may have "
                "been committed nevertheless."
            ),
        ),
        (errors.Unavailable("open", "there is no file"), "unavailable: there is no file"),
        (errors.Unavailable("claim"), "unavailable — `claim` cannot be served now."),
        (
            errors.SchemaTooNew(found=9, known=4),
            (
                "schema_too_new — The store has schema version 9 and this release knows 4: update this one before it "
                "touches anything."
            ),
        ),
        (
            errors.ResourceExhausted("stream_ops", 64, 250),
            "resource_exhausted — Too many stream_ops calls are under way (at most 64); try again in 250 ms.",
        ),
        (errors.OperationTimeout("cancel_flow", 5000), "timeout — `cancel_flow` did not finish within 5000 ms."),
        (
            errors.ExecutionNotActive(
                terminal_outcome="success", lease_epoch=4, lifecycle_phase="terminal", attempt_id="a", execution_id="e"
            ),
            "execution_not_active — The execution is not running: it has ended (success). (execution_id=e)",
        ),
        (
            errors.ExecutionNotActive(
                terminal_outcome="none", lease_epoch=4, lifecycle_phase="suspended", attempt_id="a"
            ),
            "execution_not_active — The execution is not running: it is suspended.",
        ),
        (
            errors.DependencyAlreadyExists(existing={"edge_id": "e"}),
            "dependency_already_exists — These two executions are already connected.",
        ),
    ],
)
def test_a_message_states_the_problem_its_subject_and_the_remedy(error: FabricError, message: str) -> None:
    assert str(error) == message


@pytest.mark.parametrize("error", ONE_OF_EACH_SHAPE, ids=lambda error: type(error).__name__)
def test_no_message_carries_an_internal_field(error: FabricError) -> None:
    for name in ("backend", "source", "in_doubt", "entity", "op", "lease_epoch", "attempt_id", "lifecycle_phase"):
        assert f"{name}=" not in str(error)
        if name in error.facts:
            assert getattr(error, name) == error.facts[name]


def test_every_coded_detail_of_invalid_input_is_explained() -> None:
    """A detail of one word is a code of the specification; a reader needs a sentence as well."""
    codes = {
        code
        for page in (ROOT / "src").rglob("*.py")
        for code in re.findall(r'InvalidInput\("([a-z_]+)"\)', page.read_text())
    }

    assert len(codes) > 5
    assert {code for code in codes if str(errors.InvalidInput(code)) == f"invalid_input: {code}"} == set()


def test_facts_become_attributes() -> None:
    error = errors.StaleLease(execution_id="e", lease_epoch=3)

    assert (error.execution_id, error.lease_epoch, error.detail) == ("e", 3, "")
    assert errors.StaleLease().execution_id is None


@pytest.mark.parametrize("name", ["kind", "family", "classification", "facts", "args"])
def test_a_fact_cannot_override_an_attribute_of_an_error(name: str) -> None:
    with pytest.raises(TypeError):
        errors.InvalidInput(**{name: "other"})


def test_errors_are_equal_when_type_detail_and_facts_are() -> None:
    assert errors.StaleLease(lease_epoch=3) == errors.StaleLease(lease_epoch=3)
    assert errors.StaleLease(lease_epoch=3) != errors.StaleLease(lease_epoch=4)
    assert errors.StaleLease(lease_epoch=3) != errors.LeaseExpired(lease_epoch=3)
    assert errors.InvalidInput("a") != errors.InvalidInput("b")
    assert errors.NotFound("flow") != errors.NotFound("execution")
    assert errors.InvalidInput() != "invalid_input"
    assert len({errors.StaleLease(lease_epoch=3), errors.StaleLease(lease_epoch=3)}) == 1


@pytest.mark.parametrize("error", ONE_OF_EACH_SHAPE, ids=lambda error: type(error).__name__)
def test_every_shape_of_error_survives_pickling_and_copying(error: FabricError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
        assert again == error
        assert (again.kind, again.classification, str(again)) == (error.kind, error.classification, str(error))


def test_context_is_a_note_and_changes_nothing_else() -> None:
    error = errors.StoreUnavailable(backend="sqlite", source="timeout")
    error.add_note("while renewing 12 leases")

    assert error == errors.StoreUnavailable(backend="sqlite", source="timeout")
    assert error.retryable


@pytest.mark.parametrize("error", [errors.by_kind[kind] for kind in sorted(errors.by_kind)])
def test_the_module_of_an_error_is_the_one_it_is_imported_from(error: type[FabricError]) -> None:
    assert (error.__module__, getattr(errors, error.__name__)) == ("flowfabric.errors", error)


def test_a_repr_shows_how_the_error_was_constructed() -> None:
    assert repr(errors.InvalidToken("missing_token")) == "InvalidToken('missing_token')"
    assert repr(errors.RotationConflict(kid="k1")) == "RotationConflict(kid='k1')"
