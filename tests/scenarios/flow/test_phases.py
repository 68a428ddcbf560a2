"""Members in every phase: blocked by an edge, skipped, cancelled with their flow, cancelled as siblings."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.engine.operations.flows import WaitIndefinite
from flowfabric.model.answers.flow import FlowCancelled
from flowfabric.model.event import Topic
from tests.scenarios.flow_env import WAITING, WAITS, FlowEnv, any_of

RETRIES = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 60_000}}}

QUEUED = ("queued", "delayed", "granted", "limited", "paused")
BACKOFF, PARKED = "backoff", "parked"
LEASED = ("active", "lapsed", "revoked")
SUSPENDED = "suspended"
PENDING = (*QUEUED, BACKOFF, PARKED)  # in phase runnable
STARTED = (BACKOFF, PARKED, *LEASED, SUSPENDED)
OPEN = (PARKED, *LEASED, SUSPENDED)  # with an attempt that has not ended
ALL_PHASES = (*PENDING, *LEASED, SUSPENDED)


async def begin_with_every_phase(flow: FlowEnv, *more: str) -> None:
    """Begin a flow with one member in every non-terminal phase, named after it, and more members."""
    await flow.begin(more)
    engine = flow.engine
    for name in ALL_PHASES:
        options = {"delay_until": flow.clock.now + 60_000} if name == "delayed" else {}
        await flow.add(name, **(options | ({"policy": RETRIES} if name == BACKOFF else {})))
    claims = {name: await flow.claim(name) for name in (PARKED, *LEASED)}
    await flow.fail(BACKOFF)
    await flow.suspend(SUSPENDED)
    await engine.renew(claims["active"].handle, lease_ttl_ms=120_000)
    await engine.revoke_lease(flow.names["revoked"])
    await flow.add("never")
    await flow.edge("never", PARKED)
    await engine.wait_children(claims[PARKED].handle)
    await flow.sweep("lease_expiry", after_ms=30_000)
    await engine.block_execution_for_admission(flow.names["limited"], reason="waiting_for_budget", detail="b")
    await engine.block_execution_for_admission(flow.names["paused"], reason="paused_by_operator")
    await engine.issue_claim_grant(
        flow.names["granted"], lane_id="default", worker_id="w", worker_instance_id="w-1", grant_ttl_ms=5000
    )


async def vectors(flow: FlowEnv) -> dict[str, str]:
    return {name: await flow.vector(name) for name in ALL_PHASES}


async def completion_outcomes(flow: FlowEnv, name: str) -> list[str | None]:
    return [one.event.outcome for one in await flow.engine.store.history(flow.names[name], Topic.COMPLETION, 10)]


def attempt_of(name: str) -> str:
    """Return the attempt state of a blocked member by its previous phase."""
    return {BACKOFF: "pending_retry_attempt", PARKED: "attempt_interrupted"}.get(name, "pending_first_attempt")


async def test_an_edge_blocks_runnable_members_and_does_not_interrupt_others(flow: FlowEnv) -> None:
    await begin_with_every_phase(flow, "a")
    before = await vectors(flow)
    for name in ALL_PHASES:
        await flow.edge("a", name)

    for name in ALL_PHASES:
        waits = WAITS.replace("pending_first_attempt", attempt_of(name))
        assert await flow.vector(name) == (waits if name in PENDING else before[name]), name
    with pytest.raises(errors.ExecutionNotLeaseable):  # with its earlier grant
        await flow.engine.claim_execution(
            flow.names["granted"], worker_id="w", worker_instance_id="w-1", lease_ttl_ms=1000
        )
    assert await flow.sweep("delayed_promoter", after_ms=60_000) == [0]
    await flow.succeed_and_cascade("a", "never")

    for name in ALL_PHASES:
        unblocked = WAITING.replace("pending_first_attempt", attempt_of(name))
        assert await flow.vector(name) == (unblocked if name in PENDING else before[name]), name


async def test_members_in_every_phase_are_skipped_when_their_join_is_impossible(flow: FlowEnv) -> None:
    await begin_with_every_phase(flow, "a")
    for name in ALL_PHASES:
        await flow.edge("a", name)
    await flow.fail("a")

    await flow.cascade("a")

    for name in ALL_PHASES:
        attempt = "attempt_terminal" if name in OPEN else "none"
        assert await flow.vector(name) == f"terminal/unowned/not_applicable/none/skipped/{attempt}/skipped", name
        row = await flow.row(name)
        assert (row.completed_at, await completion_outcomes(flow, name)) == (flow.clock.now, ["skipped"]), name
        if name in OPEN:
            last = (await flow.engine.attempt_history(flow.names[name]))[-1]
            assert (last.attempt_state, last.failure_reason) == ("ended_cancelled", "dependency_impossible"), name
        with pytest.raises(errors.ExecutionNotActive):
            await flow.engine.cancel_execution(flow.names[name])


@pytest.mark.parametrize(
    ("policy", "selected"),
    [("cancel_all", (*ALL_PHASES, "never")), ("cancel_pending", (*PENDING, "never")), ("flow_only", ())],
)
async def test_cancel_flow_cancels_the_members_selected_by_its_policy(
    flow: FlowEnv, policy: str, selected: tuple[str, ...]
) -> None:
    await begin_with_every_phase(flow)
    before = await vectors(flow)

    answer = await flow.engine.cancel_flow(flow.id, policy=policy, reason="why", wait=WaitIndefinite())

    assert answer == FlowCancelled(policy, flow.ids(flow.names))  # type: ignore[arg-type]
    for name in ALL_PHASES:
        if name in selected:
            await assert_cancelled(flow, name, "why")
        else:
            assert (await flow.vector(name), await completion_outcomes(flow, name)) == (before[name], []), name
    assert await flow.backlog() == (None, [])


async def test_siblings_are_cancelled_in_every_phase(flow: FlowEnv) -> None:
    await begin_with_every_phase(flow, "a", "x")
    await flow.join(["a", *ALL_PHASES], "x", any_of("cancel_remaining"))
    await flow.succeed_and_cascade("a")

    await flow.sweep("edge_cancel_dispatcher")
    await flow.cascade(*ALL_PHASES)

    for name in ALL_PHASES:
        await assert_cancelled(flow, name, "sibling_quorum_satisfied")
    assert await flow.counts("x") == f"1/{len(ALL_PHASES)}/0 of {len(ALL_PHASES) + 1} satisfied"
    assert (await flow.vector("x"), await flow.pending_sibling_cancel("x")) == (WAITING, None)


async def assert_cancelled(flow: FlowEnv, name: str, reason: str) -> None:
    attempt = "attempt_terminal" if name in STARTED else "pending_first_attempt"
    assert await flow.vector(name) == f"terminal/unowned/not_applicable/none/cancelled/{attempt}/cancelled", name
    row = await flow.row(name)
    cancelled = (row.cancellation_reason, row.cancelled_by, row.completed_at)
    assert cancelled == (reason, "operator_override", flow.clock.now), name
    assert await completion_outcomes(flow, name) == ["cancelled"], name
    if name in OPEN:
        last = (await flow.engine.attempt_history(flow.names[name]))[-1]
        assert (last.attempt_state, last.failure_reason) == ("ended_cancelled", f"cancelled: {reason}"), name
