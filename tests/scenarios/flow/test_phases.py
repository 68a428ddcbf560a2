"""Whatever a member is doing: it is made to wait, skipped, cancelled with its flow, cancelled as a sibling."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.engine.operations.flows import WaitIndefinite
from flowfabric.model.answers.flow import FlowCancelled
from flowfabric.model.event import Topic
from tests.scenarios.flowing import WAITING, WAITS, Flowing, any_of

RETRIES = {"retry_policy": {"max_retries": 3, "backoff": {"type": "fixed", "delay_ms": 60_000}}}

QUEUED = ("queued", "delayed", "granted", "limited", "paused")
BACKOFF, PARKED = "backoff", "parked"
HELD = ("active", "lapsed", "revoked")
SUSPENDED = "suspended"
PENDING = (*QUEUED, BACKOFF, PARKED)  # in phase runnable
STARTED = (BACKOFF, PARKED, *HELD, SUSPENDED)
OPEN = (PARKED, *HELD, SUSPENDED)  # with an attempt that has not ended
EVERYBODY = (*PENDING, *HELD, SUSPENDED)


async def crowd(flow: Flowing, *more: str) -> None:
    """A flow with a member in every phase that is not an end, by the name of what it does, and some more."""
    await flow.begin(more)
    engine = flow.engine
    for name in EVERYBODY:
        given = {"delay_until": flow.clock.now + 60_000} if name == "delayed" else {}
        await flow.add(name, **(given | ({"policy": RETRIES} if name == BACKOFF else {})))
    held = {name: await flow.run(name) for name in (PARKED, *HELD)}
    await flow.fail(BACKOFF)
    await flow.suspend(SUSPENDED)
    await engine.renew(held["active"].handle, lease_ttl_ms=120_000)
    await engine.revoke_lease(flow.names["revoked"])
    await flow.add("never")
    await flow.edge("never", PARKED)
    await engine.wait_children(held[PARKED].handle)
    flow.clock.advance_ms(30_000)
    await flow.sweep("lease_expiry")
    await engine.block_execution_for_admission(flow.names["limited"], reason="waiting_for_budget", detail="b")
    await engine.block_execution_for_admission(flow.names["paused"], reason="paused_by_operator")
    await engine.issue_claim_grant(
        flow.names["granted"], lane_id="default", worker_id="w", worker_instance_id="w-1", grant_ttl_ms=5000
    )


async def vectors(flow: Flowing, names: tuple[str, ...] = EVERYBODY) -> dict[str, str]:
    return {name: await flow.vector(name) for name in names}


async def ends(flow: Flowing, name: str) -> list[str | None]:
    return [one.event.outcome for one in await flow.engine.store.history(flow.names[name], Topic.COMPLETION, 10)]


def attempt_of(name: str) -> str:
    """What is said of the attempt of a member that waits, by what it did before."""
    return {BACKOFF: "pending_retry_attempt", PARKED: "attempt_interrupted"}.get(name, "pending_first_attempt")


async def test_an_edge_makes_whoever_is_runnable_wait_and_leaves_the_others_at_it(flow: Flowing) -> None:
    await crowd(flow, "a")
    before = await vectors(flow)
    for name in EVERYBODY:
        await flow.edge("a", name)

    for name in EVERYBODY:
        waits = WAITS.replace("pending_first_attempt", attempt_of(name))
        assert await flow.vector(name) == (waits if name in PENDING else before[name]), name
    with pytest.raises(errors.ExecutionNotLeaseable):  # by the grant that it had been given
        await flow.engine.claim_execution(
            flow.names["granted"], worker_id="w", worker_instance_id="w-1", lease_ttl_ms=1000
        )
    flow.clock.advance_ms(60_000)
    assert await flow.sweep("delayed_promoter") == [0]
    await flow.succeed("a", "never")
    await flow.cascade("a", "never")

    for name in EVERYBODY:
        free = WAITING.replace("pending_first_attempt", attempt_of(name))
        assert await flow.vector(name) == (free if name in PENDING else before[name]), name


async def test_whoever_cannot_run_any_more_is_skipped_at_once(flow: Flowing) -> None:
    await crowd(flow, "a")
    for name in EVERYBODY:
        await flow.edge("a", name)
    await flow.fail("a")

    await flow.cascade("a")

    for name in EVERYBODY:
        attempt = "attempt_terminal" if name in OPEN else "none"
        assert await flow.vector(name) == f"terminal/unowned/not_applicable/none/skipped/{attempt}/skipped", name
        row = await flow.row(name)
        assert (row.completed_at, await ends(flow, name)) == (flow.clock.now, ["skipped"]), name
        if name in OPEN:
            last = (await flow.engine.attempt_history(flow.names[name]))[-1]
            assert (last.attempt_state, last.failure_reason) == ("ended_cancelled", "dependency_impossible"), name
        with pytest.raises(errors.ExecutionNotActive):
            await flow.engine.cancel_execution(flow.names[name])


@pytest.mark.parametrize(
    ("policy", "selected"),
    [("cancel_all", (*EVERYBODY, "never")), ("cancel_pending", (*PENDING, "never")), ("flow_only", ())],
)
async def test_the_cancel_of_a_flow_ends_those_whom_its_policy_selects(
    flow: Flowing, policy: str, selected: tuple[str, ...]
) -> None:
    await crowd(flow)
    before = await vectors(flow)

    answer = await flow.engine.cancel_flow(flow.id, policy=policy, reason="why", wait=WaitIndefinite())

    assert answer == FlowCancelled(policy, flow.ids(flow.names))  # type: ignore[arg-type]
    for name in EVERYBODY:
        if name in selected:
            await assert_cancelled(flow, name, "why")
        else:
            assert (await flow.vector(name), await ends(flow, name)) == (before[name], []), name
    assert await flow.backlog() == (None, [])


async def test_siblings_are_cancelled_whatever_they_do(flow: Flowing) -> None:
    await crowd(flow, "a", "x")
    await flow.join(["a", *EVERYBODY], "x", any_of("cancel_remaining"))
    await flow.succeed("a")
    await flow.cascade("a")

    await flow.sweep("edge_cancel_dispatcher")
    await flow.cascade(*EVERYBODY)

    for name in EVERYBODY:
        await assert_cancelled(flow, name, "sibling_quorum_satisfied")
    assert await flow.counts("x") == f"1/{len(EVERYBODY)}/0 of {len(EVERYBODY) + 1} satisfied"
    assert (await flow.vector("x"), await flow.entry("x")) == (WAITING, None)


async def assert_cancelled(flow: Flowing, name: str, reason: str) -> None:
    attempt = "attempt_terminal" if name in STARTED else "pending_first_attempt"
    assert await flow.vector(name) == f"terminal/unowned/not_applicable/none/cancelled/{attempt}/cancelled", name
    row = await flow.row(name)
    told = (row.cancellation_reason, row.cancelled_by, row.completed_at)
    assert told == (reason, "operator_override", flow.clock.now), name
    assert await ends(flow, name) == ["cancelled"], name
    if name in OPEN:
        last = (await flow.engine.attempt_history(flow.names[name]))[-1]
        assert (last.attempt_state, last.failure_reason) == ("ended_cancelled", f"cancelled: {reason}"), name
