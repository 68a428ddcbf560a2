"""EX-078 to EX-080, EX-082 to EX-084: reads, retention, the derived state, completion events, whose clock counts."""

from __future__ import annotations

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
from flowfabric.rules.execution.create import CreateExecution
from tests.scenarios.execution.test_finish import retries
from tests.scenarios.play import ACTIVE, LEASE_MS, Play, terminal
from tests.scenarios.scheduling.test_grants import MISSING
from tests.scenarios.waits import Waits

HOUR_MS = 60 * 60 * 1000


def numbered(partition: int, number: int) -> str:
    """An id whose place in the order is its number."""
    return f"{{fp:{partition}}}:{number:08d}-1111-4111-8111-111111111111"


@pytest.mark.spec("EX-078")
async def test_listing_executions(play: Play) -> None:
    engine = play.engine
    fifth = [numbered(5, number) for number in range(15)]
    for e in [*reversed(fifth), *(numbered(6, number) for number in range(3))]:
        await play.create(execution_id=e)
    await engine.cancel_execution(fifth[3])

    pages, cursor = [], None
    while True:
        page = await engine.list_executions(5, cursor=cursor, limit=5)
        pages.append(page.executions)
        cursor = page.next_cursor
        if cursor is None:
            break

    assert pages == [fifth[:5], fifth[5:10], fifth[10:]]
    assert (await engine.list_executions(6)).executions == [numbered(6, number) for number in range(3)]
    empty = await engine.list_executions(5, limit=0)
    assert (empty.executions, empty.next_cursor) == ([], None)
    between = f"{{fp:5}}:{7:08d}-2222-4222-8222-222222222222"
    assert (await engine.list_executions(5, cursor=between)).executions == fifth[8:]
    async with play.refused(MissingTag):
        await engine.list_executions(5, cursor="nonsense")


@pytest.mark.spec("EX-078")
async def test_a_page_never_exceeds_a_thousand(play: Play) -> None:
    created = [numbered(5, number) for number in range(1001)]
    asks = [
        CreateExecution(execution_id=e, partition=5, namespace="default", lane_id="default", execution_kind="task")
        for e in created
    ]
    assert await play.engine.create_executions(asks) == [Created(e, PublicState.WAITING) for e in created]

    page = await play.engine.list_executions(5, limit=5000)

    assert (page.executions, page.next_cursor) == (created[:1000], created[999])


@pytest.mark.spec("EX-079")
async def test_attempt_pointer_versus_counter(play: Play) -> None:
    engine = play.engine
    e = await play.create(policy=retries(1))
    seen: list[tuple[int, int]] = []

    async def look() -> None:
        seen.append((await engine.read_current_attempt_index(e), await engine.read_total_attempt_count(e)))

    await look()
    await play.grant(e)
    held = await play.claim(e)
    await look()
    assert isinstance(await engine.fail(held.handle, reason="flaky"), RetryScheduled)
    await look()
    await play.promoted(e)
    held = await play.claimed_again(e)
    await look()
    await play.delayed(held)
    await play.promoted(e)
    held = await play.resumed(e)
    await look()
    await play.expired(held)
    await play.reclaimed(e, "wc")
    await look()

    assert seen == [(0, 0), (0, 1), (0, 1), (1, 2), (1, 2), (2, 3)]
    for read in (engine.read_current_attempt_index, engine.read_total_attempt_count, engine.read_execution_context):
        async with play.refused(errors.InvalidInput):
            await read(MISSING)


@pytest.mark.spec("EX-080")
async def test_retention(play: Play) -> None:
    engine = play.engine
    held = await play.claimed(tags={"a.b": "c"}, input_payload=b"in")
    e, waiting = held.execution_id, await play.create()
    await engine.complete(held.handle, result=b"R")
    done = play.now

    for early in (done + 23 * HOUR_MS, done + 24 * HOUR_MS - 1):
        play.clock.now = early
        async with play.untouched():
            assert (await engine.sweep_once("retention_trimmer")).processed == 0
    play.clock.now = done + 24 * HOUR_MS
    assert (await engine.sweep_once("retention_trimmer")).processed == 1

    assert await engine.describe_execution(e) is None
    assert await engine.read_execution_info(e) is None
    assert await engine.get_execution_result(e) is None
    assert await engine.get_execution_tag(e, "a.b") is None
    assert await engine.attempt_history(e) == []
    assert await engine.lease_history(e) == []
    assert await play.core(e) == {}
    assert (await engine.list_executions(86)).executions == [waiting]
    kept = await play.everything()
    for table in ("ff_exec_core", "ff_payload", "ff_result", "ff_attempt"):
        assert e not in {row.execution_id for row in kept[table]}
    assert await engine.create_execution(execution_id=e) == Created(e, PublicState.WAITING)
    assert await engine.lease_history(e) == [], "a new life under an old name begins without history"
    play.clock.advance_ms(1000 * HOUR_MS)
    assert (await engine.sweep_once("retention_trimmer")).processed == 0, "what has not ended is never purged"


@pytest.mark.spec("EX-080")
@pytest.mark.parametrize("goes_back_ms", [0, 5000])
async def test_the_history_is_that_of_one_execution_whatever_the_clock_says(play: Play, goes_back_ms: int) -> None:
    policy = {"stream_policy": {"retention_ttl_ms": 0}}
    earlier = await play.claimed(policy=policy)
    e = earlier.execution_id
    await play.engine.complete(earlier.handle)
    await play.engine.replay_execution(e)
    await play.engine.cancel_execution(e)
    assert await play.engine.purge_execution(e)

    await play.create(execution_id=e, policy=policy)

    assert await play.told(e) == []
    play.clock.now -= goes_back_ms
    await play.engine.cancel_execution(e)
    await play.engine.replay_execution(e)
    assert await play.told(e) == ["replay_initiated"]
    held = await play.claimed_again(e)
    await play.engine.complete(held.handle)
    await play.engine.replay_execution(e)
    await play.claimed_again(e)
    told = ["replay_initiated", "acquired", "released completed", "replay_initiated", "acquired"]
    assert await play.told(e) == told


@pytest.mark.spec("EX-080")
async def test_the_policy_s_own_retention(play: Play) -> None:
    e = await play.create(policy={"stream_policy": {"retention_ttl_ms": 1000}})
    await play.engine.cancel_execution(e)
    play.clock.advance_ms(999)
    assert (await play.engine.sweep_once("retention_trimmer")).processed == 0
    play.clock.advance_ms(1)
    assert (await play.engine.sweep_once("retention_trimmer")).processed == 1
    assert await play.engine.describe_execution(e) is None


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
def test_public_state_derivation(phase: LifecyclePhase) -> None:
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
async def test_completion_events_are_once_and_complete(play: Play, waits: Waits) -> None:
    engine = play.engine
    given: dict[str, Any] = {"namespace": "n1", "tags": {"cairn.instance_id": "i1"}}
    success, failed, cancelled, expired, capped = [await play.claimed(**given) for _ in range(5)]
    quiet = await play.claimed(policy=retries(1), **given)
    parked, revoked, asleep = [await play.claimed(**given) for _ in range(3)]
    await engine.complete(success.handle)
    await engine.fail(failed.handle, reason="boom")
    await engine.cancel_execution(cancelled.execution_id)
    await engine.expire_execution(expired.execution_id)
    await engine.fail(quiet.handle, reason="flaky")
    await play.delayed(parked)
    await play.revoked(revoked)
    await waits.suspend(asleep)
    await play.expired(capped)
    await play.reclaim(capped.execution_id, max_reclaim_count=0)

    told = await play.completions()

    ended = [held.execution_id for held in (success, failed, cancelled, expired, capped)]
    assert [one.execution_id for one in told] == ended
    assert [one.outcome for one in told] == ["success", "failed", "cancelled", "expired", "failed"]
    assert {(one.namespace, one.instance_tag, one.flow_id) for one in told} == {("n1", "i1", None)}
    await engine.replay_execution(success.execution_id)
    again = await play.claimed_again(success.execution_id)
    await engine.complete(again.handle)
    assert await play.outcomes(success.execution_id) == ["success", "success"]


@pytest.mark.spec("EX-084")
@pytest.mark.parametrize("ahead", [HOUR_MS, -HOUR_MS], ids=["an hour ahead", "an hour behind"])
async def test_server_clock_rules(play: Play, ahead: int) -> None:
    engine, t = play.engine, play.now
    engine.runtime.estimate = StoreClockEstimate()  # as on a server, whose clock nobody else can read

    def mislead() -> None:
        engine.estimate.update(play.now + ahead)

    mislead()
    e = await play.create(policy=retries(1))
    assert (await play.core(e))["created_at"] == t
    await play.grant(e)
    mislead()
    held = await play.claim(e)
    assert held.lease_expires_at == t + LEASE_MS
    play.clock.advance_ms(LEASE_MS - 1)
    mislead()
    assert (await engine.renew(held.handle)).expires_at == play.now + LEASE_MS
    mislead()
    await engine.progress(held.handle, pct=1)
    assert await play.vector(e) == ACTIVE
    mislead()
    assert await engine.fail(held.handle, reason="flaky") == RetryScheduled(e, play.now + 500, 1)
    mislead()
    late = await play.create(delay_until=play.now + 1000)
    assert await engine.read_execution_state(late) == "delayed"
    mislead()
    pulled = await play.claimed()
    play.clock.advance_ms(LEASE_MS)
    mislead()
    with pytest.raises(errors.LeaseExpired):
        await engine.complete(pulled.handle)
    assert await play.outcomes() == []


async def test_a_finished_execution_reads_the_same_everywhere(play: Play) -> None:
    held = await play.claimed(namespace="n1", priority=4, execution_kind="mail")
    e = held.execution_id
    await play.engine.complete(held.handle)

    info = await play.engine.read_execution_info(e)

    assert info is not None
    assert "/".join(getattr(info.state_vector, name) for name in info.state_vector.__struct_fields__) == terminal(
        "success"
    )
    assert (info.namespace, info.priority, info.execution_kind, info.lane_id) == ("n1", 4, "mail", "default")
    assert (info.created_at, info.started_at, info.completed_at) == (play.now, play.now, play.now)
    assert (info.current_attempt_index, info.flow_id, info.blocking_detail) == (0, None, "")
    assert await play.engine.get_execution_namespace(e) == "n1"


async def test_searching_pages_through_every_filter(play: Play) -> None:
    engine = play.engine
    wanted = []
    for number in range(12):
        tags = {"app.kind": "a" if number % 3 else "b"}
        e = await play.create(execution_id=numbered(5 + number % 2, number), namespace="n1", tags=tags)
        if number % 3:
            wanted.append(e)
    await play.create(namespace="n2", tags={"app.kind": "a"})

    found: list[str] = []
    cursor = None
    while True:
        page = await engine.search_executions(namespace="n1", tag=("app.kind", "a"), cursor=cursor, limit=3)
        found += [one.execution_id for one in page.executions]
        cursor = page.next_cursor
        if cursor is None:
            break

    assert found == sorted(wanted)
    await engine.cancel_execution(wanted[0])
    ended = await engine.search_executions(public_state="cancelled")
    assert [one.execution_id for one in ended.executions] == [wanted[0]]


async def test_a_tag_that_few_have_is_found_in_one_look(play: Play) -> None:
    for _ in range(20):
        await play.create(tags={"app.kind": "often"})
    rare = [await play.create(tags={"app.kind": "seldom"}) for _ in range(2)]
    looks = play.store.calls["scan"]

    page = await play.engine.search_executions(tag=("app.kind", "seldom"), limit=1)

    assert play.store.calls["scan"] - looks == 1
    assert ([one.execution_id for one in page.executions], page.next_cursor) == ([min(rare)], min(rare))
    rest = await play.engine.search_executions(tag=("app.kind", "seldom"), limit=1, cursor=page.next_cursor)
    assert ([one.execution_id for one in rest.executions], rest.next_cursor) == ([max(rare)], None)
