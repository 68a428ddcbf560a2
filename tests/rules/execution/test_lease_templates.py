"""The templates of a claim and of a renewal: a store that applies them does what the plain rules decide."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from flowfabric import errors
from flowfabric.model.change import (
    ColumnRef,
    IfSet,
    Parameter,
    Patch,
    Plus,
    evaluate,
    holds,
    template_event,
    template_fields,
)
from flowfabric.model.execution import Execution
from flowfabric.model.instant import FromNow
from flowfabric.model.states import AttemptState, EligibilityState, LifecyclePhase, OwnershipState
from flowfabric.rules.execution import claim, lease
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.execution.lease import LeaseHolder
from flowfabric.rules.execution.policy import Terms, encode_terms
from flowfabric.rules.scheduling.queue import NEXT_ATTEMPT_TYPE
from tests.rules.execution.rows import NOW, running

HOLDER = LeaseHolder("wa", "wa-1", "", "lease-2", "attempt-2", 3000)
EXPIRIES = st.sampled_from((NOW - 1, NOW, NOW + 1, NOW + 1000))


@st.composite
def leases(draw: st.DrawFn) -> Execution:
    """An execution whose lease is live, has expired with or without being marked, was revoked or released."""
    match draw(st.sampled_from((*OwnershipState, LifecyclePhase.SUSPENDED))):
        case OwnershipState.LEASED:
            return running(lease_expires_at=draw(EXPIRIES))
        case OwnershipState.LEASE_EXPIRED_RECLAIMABLE as state:
            return running(ownership_state=state, lease_expires_at=draw(EXPIRIES), lease_expired_at=NOW - 5)
        case OwnershipState.LEASE_REVOKED as state:
            return running(ownership_state=state, lease_expires_at=None, lease_revoked_at=NOW - 5)
        case _:
            phase = draw(st.sampled_from([phase for phase in LifecyclePhase if phase is not LifecyclePhase.ACTIVE]))
            return running(lifecycle_phase=phase, ownership_state=OwnershipState.UNOWNED, lease_expires_at=None)


@given(
    row=leases(),
    difference=st.sampled_from(
        ({}, {"attempt_index": 0}, {"attempt_id": "other"}, {"lease_id": "other"}, {"lease_epoch": 2})
    ),
)
def test_a_store_renews_a_lease_exactly_if_the_rule_accepts_it(row: Execution, difference: dict[str, Any]) -> None:
    shown = {name: getattr(row, name) for name in ("attempt_index", "attempt_id", "lease_id", "lease_epoch")}
    shown |= difference
    fence = Fence(shown["lease_id"], shown["lease_epoch"], shown["attempt_id"])

    answer = lease.check_renewal(row, shown["attempt_index"], fence, NOW).answer

    assert lease.RENEWAL.condition is not None
    assert holds(lease.RENEWAL.condition, row, shown, NOW) == (not isinstance(answer, errors.FabricError))


def test_a_renewal_writes_the_times_of_the_lease_and_nothing_else() -> None:
    fields = template_fields(lease.RENEWAL, running(), {"lease_ttl_ms": 500})

    assert fields == {"lease_expires_at": FromNow(500), "lease_renewed_at": FromNow(0)}


@st.composite
def ready(draw: st.DrawFn) -> Execution:
    """An execution that waits in a ready queue."""
    state = draw(
        st.sampled_from((AttemptState.PENDING_FIRST_ATTEMPT, *NEXT_ATTEMPT_TYPE, AttemptState.ATTEMPT_INTERRUPTED))
    )
    timeout_ms = draw(st.none() | st.just(700))
    return running(
        lifecycle_phase=LifecyclePhase.RUNNABLE,
        ownership_state=OwnershipState.UNOWNED,
        eligibility_state=EligibilityState.ELIGIBLE_NOW,
        attempt_state=state,
        terms=encode_terms(Terms(attempt_timeout_ms=timeout_ms)),
        next_type=NEXT_ATTEMPT_TYPE.get(state),
        next_timeout_ms=draw(st.none() | st.just(20)) if state is AttemptState.ATTEMPT_INTERRUPTED else timeout_ms,
        started_at=draw(st.none() | st.just(NOW - 500)),
        attempt_resumed_at=draw(st.none() | st.just(NOW - 50)),
        lineage=draw(st.none() | st.just('{"retry_reason":"flaky"}')),
        tags=draw(st.none() | st.just('{"a":"b"}')),
        flow_id=draw(st.none() | st.just("f")),
        lease_epoch=draw(st.integers(0, 3)),
    )


@given(row=ready())
def test_a_store_claims_a_row_as_the_rule_does(row: Execution) -> None:
    decision = claim.claim_ready(row, HOLDER, frozenset(), NOW)

    claimed = replace(row, **template_fields(lease.CLAIM, row, asdict(HOLDER)))
    assert decision.change is not None
    (patch,) = decision.change.writes
    assert isinstance(patch, Patch)
    assert replace(row, **patch.fields) == claimed
    assert decision.change.events == (template_event(lease.CLAIM, claimed),)


def test_values_of_a_template() -> None:
    row, given_values = running(tags=None), {"ttl": 5}
    values = {
        FromNow(3): FromNow(3),
        ColumnRef("lease_epoch"): 3,
        Parameter("ttl"): 5,
        Plus(ColumnRef("lease_epoch"), 1): 4,
        Plus(FromNow(2), Parameter("ttl")): FromNow(7),
        Plus(FromNow(2), ColumnRef("next_timeout_ms")): None,
        IfSet("tags", "set", Parameter("ttl")): 5,
        IfSet("lease_id", ColumnRef("attempt_id"), None): "attempt-1",
    }

    assert {value: evaluate(value, row, given_values) for value in values} == values
