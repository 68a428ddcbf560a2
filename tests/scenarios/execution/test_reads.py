"""EX-078 to EX-080, EX-082 to EX-084: reads, retention, the derived state, completion events, the store clock."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.clock import StoreClockEstimate
from flowfabric.ids import MissingTag
from flowfabric.model.answers.execution import Created, RetryScheduled
from flowfabric.model.states import (
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    TerminalOutcome,
    public_state,
)
from tests.executions import create_request
from tests.scenarios.env import ACTIVE, LEASE_MS, Env, terminal
from tests.scenarios.execution.test_finish import retries
from tests.scenarios.pages import all_pages
from tests.scenarios.scheduling.test_grants import MISSING
from tests.scenarios.waits import Waits

HOUR_MS = 60 * 60 * 1000


def numbered(partition: int, number: int) -> str:
    """Return an id that sorts by its number."""
    return f"{{fp:{partition}}}:{number:08d}-1111-4111-8111-111111111111"


@pytest.mark.spec("EX-078")
async def test_list_executions_pages_through_a_partition(env: Env) -> None:
    engine = env.engine
    fifth = [numbered(5, number) for number in range(15)]
    for e in [*reversed(fifth), *(numbered(6, number) for number in range(3))]:
        await env.create(execution_id=e)
    await engine.cancel_execution(fifth[3])

    pages = await all_pages(partial(engine.list_executions, 5), limit=5)

    assert [page.executions for page in pages] == [fifth[:5], fifth[5:10], fifth[10:]]
    assert (await engine.list_executions(6)).executions == [numbered(6, number) for number in range(3)]
    empty = await engine.list_executions(5, limit=0)
    assert (empty.executions, empty.next_cursor) == ([], None)
    between = f"{{fp:5}}:{7:08d}-2222-4222-8222-222222222222"
    assert (await engine.list_executions(5, cursor=between)).executions == fifth[8:]
    async with env.refused(MissingTag):
        await engine.list_executions(5, cursor="nonsense")


@pytest.mark.spec("EX-078")
async def test_a_page_of_executions_has_at_most_1000_entries(env: Env) -> None:
    created = [numbered(5, number) for number in range(1001)]
    requests = [create_request(e, partition=5) for e in created]
    assert await env.engine.create_executions(requests) == [Created(e, PublicState.WAITING) for e in created]

    page = await env.engine.list_executions(5, limit=5000)

    assert (page.executions, page.next_cursor) == (created[:1000], created[999])


@pytest.mark.spec("EX-079")
async def test_the_attempt_index_and_the_attempt_count_advance_with_each_new_attempt(env: Env) -> None:
    engine = env.engine
    e = await env.create(policy=retries(1))
    seen: list[tuple[int, int]] = []

    async def observe() -> None:
        seen.append((await engine.read_current_attempt_index(e), await engine.read_total_attempt_count(e)))

    await observe()
    claim = await env.grant_and_claim(e, "wa")
    await observe()
    assert isinstance(await engine.fail(claim.handle, reason="flaky"), RetryScheduled)
    await observe()
    await env.promote(e)
    claim = await env.grant_and_claim(e)
    await observe()
    await env.delay(claim)
    await env.promote(e)
    claim = await env.grant_and_resume(e)
    await observe()
    await env.expire_lease(claim)
    await env.grant_and_reclaim(e, "wc")
    await observe()

    assert seen == [(0, 0), (0, 1), (0, 1), (1, 2), (1, 2), (2, 3)]
    for read in (engine.read_current_attempt_index, engine.read_total_attempt_count, engine.read_execution_context):
        async with env.refused(errors.InvalidInput):
            await read(MISSING)


@pytest.mark.spec("EX-080")
async def test_an_execution_is_purged_when_its_retention_ends(env: Env) -> None:
    engine = env.engine
    claim, e = await env.create_claimed(tags={"a.b": "c"}, input_payload=b"in")
    waiting = await env.create()
    await engine.complete(claim.handle, result=b"R")
    done = env.now

    for early in (done + 23 * HOUR_MS, done + 24 * HOUR_MS - 1):
        env.clock.now = early
        async with env.unchanged():
            assert (await engine.sweep_once("retention_trimmer")).processed == 0
    env.clock.now = done + 24 * HOUR_MS
    assert (await engine.sweep_once("retention_trimmer")).processed == 1

    assert await engine.describe_execution(e) is None
    assert await engine.read_execution_info(e) is None
    assert await engine.get_execution_result(e) is None
    assert await engine.get_execution_tag(e, "a.b") is None
    assert await engine.attempt_history(e) == []
    assert await engine.lease_history(e) == []
    assert await env.core(e) == {}
    assert (await engine.list_executions(86)).executions == [waiting]
    kept = await env.dump()
    for table in ("ff_exec_core", "ff_payload", "ff_result", "ff_attempt"):
        assert e not in {row.execution_id for row in kept[table]}
    assert await engine.create_execution(execution_id=e) == Created(e, PublicState.WAITING)
    assert await engine.lease_history(e) == [], "a new execution with an old id has no history"
    env.clock.advance_ms(1000 * HOUR_MS)
    assert (await engine.sweep_once("retention_trimmer")).processed == 0, "an unfinished execution is never purged"


@pytest.mark.spec("EX-080")
@pytest.mark.parametrize("goes_back_ms", [0, 5000])
async def test_the_lease_history_excludes_an_earlier_execution_with_the_same_id(env: Env, goes_back_ms: int) -> None:
    policy = {"stream_policy": {"retention_ttl_ms": 0}}
    earlier, e = await env.create_claimed(policy=policy)
    await env.engine.complete(earlier.handle)
    await env.engine.replay_execution(e)
    await env.engine.cancel_execution(e)
    assert await env.engine.purge_execution(e)

    await env.create(execution_id=e, policy=policy)

    assert await env.lease_events(e) == []
    env.clock.now -= goes_back_ms
    await env.engine.cancel_execution(e)
    await env.engine.replay_execution(e)
    assert await env.lease_events(e) == ["replay_initiated"]
    claim = await env.grant_and_claim(e)
    await env.engine.complete(claim.handle)
    await env.engine.replay_execution(e)
    await env.grant_and_claim(e)
    events = ["replay_initiated", "acquired", "released completed", "replay_initiated", "acquired"]
    assert await env.lease_events(e) == events


@pytest.mark.spec("EX-080")
async def test_the_policy_sets_the_retention(env: Env) -> None:
    e = await env.create(policy={"stream_policy": {"retention_ttl_ms": 1000}})
    await env.engine.cancel_execution(e)
    assert await env.sweep("retention_trimmer", after_ms=999) == 0
    assert await env.sweep("retention_trimmer", after_ms=1) == 1
    assert await env.engine.describe_execution(e) is None


RUNNABLE = {
    EligibilityState.ELIGIBLE_NOW: "waiting",
    EligibilityState.NOT_ELIGIBLE_UNTIL_TIME: "delayed",
    EligibilityState.BLOCKED_BY_DEPENDENCIES: "waiting_children",
    EligibilityState.BLOCKED_BY_BUDGET: "rate_limited",
    EligibilityState.BLOCKED_BY_QUOTA: "rate_limited",
    EligibilityState.BLOCKED_BY_ROUTE: "waiting",
    EligibilityState.BLOCKED_BY_LANE_STATE: "waiting",
    EligibilityState.BLOCKED_BY_OPERATOR: "waiting",
    EligibilityState.NOT_APPLICABLE: "waiting",
}
ENDED = {"none": "failed", "success": "completed"}


@pytest.mark.spec("EX-082")
@pytest.mark.parametrize("phase", LifecyclePhase)
def test_the_public_state_is_derived_from_the_state_vector(phase: LifecyclePhase) -> None:
    for eligibility, outcome, _ in product(EligibilityState, TerminalOutcome, OwnershipState):
        expected = {
            LifecyclePhase.SUBMITTED: "waiting",
            LifecyclePhase.RUNNABLE: RUNNABLE[eligibility],
            LifecyclePhase.ACTIVE: "active",
            LifecyclePhase.SUSPENDED: "suspended",
            LifecyclePhase.TERMINAL: ENDED.get(outcome.value, outcome.value),
        }[phase]
        assert public_state(phase, eligibility, outcome).value == expected


@pytest.mark.spec("EX-083")
async def test_every_terminal_outcome_emits_one_completion_event(env: Env, waits: Waits) -> None:
    engine = env.engine
    options: dict[str, Any] = {"namespace": "n1", "tags": {"cairn.instance_id": "i1"}}
    success, failed, cancelled, expired, capped = [await env.create_and_claim(**options) for _ in range(5)]
    quiet = await env.create_and_claim(policy=retries(1), **options)
    parked, revoked, suspended = [await env.create_and_claim(**options) for _ in range(3)]
    await engine.complete(success.handle)
    await engine.fail(failed.handle, reason="boom")
    await engine.cancel_execution(cancelled.execution_id)
    await engine.expire_execution(expired.execution_id)
    await engine.fail(quiet.handle, reason="flaky")
    await env.delay(parked)
    await env.revoke_lease(revoked)
    await waits.suspend(suspended)
    await env.expire_lease(capped)
    await env.reclaim(capped.execution_id, max_reclaim_count=0)

    events = await env.completions()

    ended = [claim.execution_id for claim in (success, failed, cancelled, expired, capped)]
    assert [one.execution_id for one in events] == ended
    assert [one.outcome for one in events] == ["success", "failed", "cancelled", "expired", "failed"]
    assert {(one.namespace, one.instance_tag, one.flow_id) for one in events} == {("n1", "i1", None)}
    await engine.replay_execution(success.execution_id)
    again = await env.grant_and_claim(success.execution_id)
    await engine.complete(again.handle)
    assert await env.outcomes(success.execution_id) == ["success", "success"]


@pytest.mark.spec("EX-084")
@pytest.mark.parametrize("ahead", [HOUR_MS, -HOUR_MS], ids=["an hour ahead", "an hour behind"])
async def test_the_clock_of_the_store_decides_not_the_local_estimate(env: Env, ahead: int) -> None:
    engine, t = env.engine, env.now
    engine.runtime.estimate = StoreClockEstimate()  # as with a remote store, whose clock is estimated

    def mislead() -> None:
        engine.estimate.update(env.now + ahead)

    mislead()
    e = await env.create(policy=retries(1))
    assert (await env.core(e))["created_at"] == t
    await env.grant(e)
    mislead()
    claim = await env.claim(e)
    assert claim.lease_expires_at == t + LEASE_MS
    env.clock.advance_ms(LEASE_MS - 1)
    mislead()
    assert (await engine.renew(claim.handle)).expires_at == env.now + LEASE_MS
    mislead()
    await engine.progress(claim.handle, pct=1)
    assert await env.vector(e) == ACTIVE
    mislead()
    assert await engine.fail(claim.handle, reason="flaky") == RetryScheduled(e, env.now + 500, 1)
    mislead()
    late = await env.create(delay_until=env.now + 1000)
    assert await engine.read_execution_state(late) == "delayed"
    mislead()
    pulled = await env.create_and_claim()
    env.clock.advance_ms(LEASE_MS)
    mislead()
    with pytest.raises(errors.LeaseExpired):
        await engine.complete(pulled.handle)
    assert await env.outcomes() == []


async def test_execution_info_shows_a_completed_execution(env: Env) -> None:
    claim = await env.create_and_claim(namespace="n1", priority=4, execution_kind="mail")
    await env.engine.complete(claim.handle)

    info = await env.engine.read_execution_info(claim.execution_id)

    assert info is not None
    assert "/".join(getattr(info.state_vector, name) for name in info.state_vector.__struct_fields__) == terminal(
        "success"
    )
    assert (info.namespace, info.priority, info.execution_kind, info.lane_id) == ("n1", 4, "mail", "default")
    assert (info.created_at, info.started_at, info.completed_at) == (env.now, env.now, env.now)
    assert (info.current_attempt_index, info.flow_id, info.blocking_detail) == (0, None, "")
    assert await env.engine.get_execution_namespace(claim.execution_id) == "n1"
