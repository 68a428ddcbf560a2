"""S-088 to S-095: what the system does on its own. S-092 and the flow-bound half of S-089 belong to flows."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import FlowId, SeededMinter, mint_for_flow, partition_of
from flowfabric.model.answers.execution import RetryScheduled
from flowfabric.model.answers.limits import AlreadyApplied
from flowfabric.model.budget import Budget, BudgetDimension
from flowfabric.model.change import Change, Guard, Patch
from flowfabric.model.execution import Execution
from flowfabric.model.states import BlockingReason
from flowfabric.model.worker import RegisteredWorker
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.feed import Filter
from flowfabric.settings import Settings
from flowfabric.stores.queries import Read, Scan
from tests.scenarios.limits.test_budgets import B, budget, report
from tests.scenarios.limits.test_quotas import Q, policy
from tests.scenarios.play import ACTIVE, DEFAULT_PARTITION, EXPIRED_LEASE, WAITING, Play, terminal
from tests.scenarios.scheduling.test_claims import BUDGET_BLOCKED, pull
from tests.scenarios.scheduling.test_grants import requires
from tests.scenarios.scheduling.test_workers import ROUTE_BLOCKED
from tests.scenarios.waits import Waits

RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 500}}}
LIMITED = {"quota_policy_ids": [Q]}
DAY_MS = 24 * 3_600_000


async def write(play: Play, e: str, **fields: Any) -> None:
    """Write into an execution what no rule would."""
    row = await play.sheet(e)
    patch = Patch(Execution, (e,), fields)
    change = Change(guards=(Guard(Execution, (e,), row.revision),), writes=(patch,), id=row.revision + 1)
    assert await play.engine.store.commit([change]) != [None]


@pytest.mark.spec("S-088")
async def test_delayed_promotion(play: Play) -> None:
    held = await play.claimed(policy=RETRY)
    cancelled = await play.create(delay_until=play.now + 500)
    assert isinstance(await play.engine.fail(held.handle, reason="flaky"), RetryScheduled)
    await play.engine.cancel_execution(cancelled)

    play.clock.advance_ms(499)
    async with play.untouched():
        assert (await play.engine.sweep_once("delayed_promoter")).processed == 0
    play.clock.advance_ms(1)
    assert (await play.engine.sweep_once("delayed_promoter")).processed == 1

    vector = await play.vector(held.execution_id)
    assert vector == "runnable/unowned/eligible_now/waiting_for_worker/none/pending_retry_attempt/waiting"
    assert await play.vector(cancelled) == terminal("cancelled", "pending_first_attempt")


@pytest.mark.spec("S-089")
async def test_the_deadline_fires_in_every_phase(play: Play) -> None:
    deadline = play.now + 1000
    queued = await play.create(execution_deadline_at=deadline)
    held = await play.claimed(execution_deadline_at=deadline)
    blocked = await play.create(execution_deadline_at=deadline, policy={"budget_ids": [B]})
    await play.engine.block_execution_for_admission(blocked, reason="waiting_for_budget")
    delayed = await play.create(execution_deadline_at=deadline, delay_until=deadline + 1)
    asleep = await play.claimed(execution_deadline_at=deadline)
    await Waits(play).suspend(asleep)

    play.clock.advance_ms(999)
    assert (await play.engine.sweep_once("execution_deadline")).processed == 0
    play.clock.advance_ms(1)
    assert (await play.engine.sweep_once("execution_deadline")).processed == 5

    for e in (queued, held.execution_id, blocked, delayed, asleep.execution_id):
        row = await play.sheet(e)
        assert (row.public_state, row.failure_reason, row.lease_expires_at) == ("expired", "execution_deadline", None)
        assert (row.blocked_on, row.blocked_at) == (None, None)
    assert await play.outcomes() == ["expired"] * 5


@pytest.mark.spec("S-090")
async def test_lease_expiry_marks_and_does_not_requeue(play: Play) -> None:
    held, renewed = await play.claimed(), await play.claimed()
    play.clock.advance_ms(29_000)
    await play.engine.renew(renewed.handle, lease_ttl_ms=9000)
    play.clock.advance_ms(1000)

    assert (await play.engine.sweep_once("lease_expiry")).processed == 1

    assert await play.vector(held.execution_id) == EXPIRED_LEASE
    assert await play.vector(renewed.execution_id) == ACTIVE
    assert await play.eligible() == []
    async with play.untouched():
        assert (await play.engine.sweep_once("lease_expiry")).processed == 0
    taken = await play.pull("wb")
    assert taken is not None
    assert (taken.execution_id, taken.attempt_type, taken.lease_epoch) == (held.execution_id, "reclaim", 2)


@pytest.mark.spec("S-090")
async def test_a_lease_renewed_between_selection_and_action_is_left_alone(play: Play) -> None:
    held = await play.claimed()
    other = Engine(play.store.store, minter=SeededMinter(9))
    play.clock.advance_ms(29_999)
    await other.renew(held.handle, lease_ttl_ms=1)
    play.clock.advance_ms(1)

    async def too_late() -> None:
        play.clock.advance_ms(-1)
        await other.renew(held.handle, lease_ttl_ms=30_000)
        play.clock.advance_ms(1)

    play.store.after_due = too_late
    assert (await play.engine.sweep_once("lease_expiry")).processed == 0
    assert await play.vector(held.execution_id) == ACTIVE


@pytest.mark.spec("S-091")
async def test_namespace_and_tag_filters(play: Play) -> None:
    due = play.now + 10
    tag = {"app.instance_id": "i1"}
    n1 = await play.create(namespace="n1", delay_until=due)
    tagged = await play.create(namespace="n1", delay_until=due, tags=tag)
    n2 = await play.create(namespace="n2", delay_until=due, tags=tag)
    play.clock.advance_ms(10)

    only_tagged = Filter("n1", ("app.instance_id", "i1"))
    assert (await play.engine.sweep_once("delayed_promoter", only_tagged)).processed == 1
    assert [(await play.sheet(e)).public_state for e in (n1, tagged, n2)] == ["delayed", "waiting", "delayed"]
    assert (await play.engine.sweep_once("delayed_promoter", Filter("n1"))).processed == 1
    assert [(await play.sheet(e)).public_state for e in (n1, tagged, n2)] == ["waiting", "waiting", "delayed"]


@pytest.mark.spec("S-091")
async def test_the_settings_filter_too_and_what_is_passed_over_hides_nothing(play: Play) -> None:
    for _ in range(7):
        await play.create(namespace="n1", delay_until=play.now + 1)
    mine = await play.create(namespace="n1", delay_until=play.now + 2, tags={"app.instance_id": "i1"})
    play.clock.advance_ms(10)
    sweeps = Settings().sweeps
    settings = Settings(sweeps=type(sweeps)(batch=2, namespace="n1", instance_tag=("app.instance_id", "i1")))
    engine = Engine(play.engine.store, minter=SeededMinter(9), settings=settings)

    assert (await engine.sweep_once("delayed_promoter")).processed == 1

    assert await play.vector(mine) == WAITING


@pytest.mark.spec("S-091")
async def test_however_many_are_passed_over_the_passes_come_to_those_behind_them(play: Play) -> None:
    for _ in range(30):
        await play.create(delay_until=play.now + 1)
    mine = await play.create(delay_until=play.now + 2, tags={"app.instance_id": "i1"})
    play.clock.advance_ms(10)
    chosen = Filter(instance_tag=("app.instance_id", "i1"))

    passes = [(await play.engine.sweep_once("delayed_promoter", chosen, batch=1)).processed for _ in range(2)]

    assert passes == [0, 1]
    assert await play.vector(mine) == WAITING
    assert (await play.engine.sweep_once("delayed_promoter", batch=1)).processed == 1  # another one begins in front


@pytest.mark.spec("S-091")
@pytest.mark.parametrize("sweep", ["delayed_promoter", "unblock"])
async def test_an_execution_whose_tags_cannot_be_read_is_passed_over_until_they_can(play: Play, sweep: str) -> None:
    tag = {"app.instance_id": "i1"}
    if sweep == "unblock":
        unreadable, other = [await play.create(tags=tag) for _ in range(2)]
        for e in (unreadable, other):
            await play.engine.block_execution_for_admission(e, reason="waiting_for_quota")
    else:
        unreadable, other = [await play.create(delay_until=play.now + 10, tags=tag) for _ in range(2)]
    play.clock.advance_ms(10)
    tags = (await play.sheet(unreadable)).tags
    await write(play, unreadable, tags="{torn")
    chosen = Filter(instance_tag=("app.instance_id", "i1"))

    done = await play.engine.sweep_once(sweep, chosen)

    assert (done.processed, await play.vector(other)) == (1, WAITING)
    assert await play.vector(unreadable) != WAITING
    await write(play, unreadable, tags=tags)
    assert (await play.engine.sweep_once(sweep, chosen)).processed == 1
    assert await play.vector(unreadable) == WAITING


@pytest.mark.spec("S-091")
async def test_a_filter_holds_for_the_unblock_sweep_too(play: Play) -> None:
    n1, n2 = [await play.create(namespace=name) for name in ("n1", "n2")]
    for e in (n1, n2):
        await play.engine.block_execution_for_admission(e, reason="waiting_for_quota")

    assert (await play.engine.sweep_once("unblock", Filter("n2"))).processed == 1

    assert await play.vector(n2) == WAITING
    assert (await play.sheet(n1)).public_state == "rate_limited"


@pytest.mark.spec("S-093")
async def test_unblock_skips_foreign_reasons_and_fails_closed(play: Play) -> None:
    await budget(play, tokens=10)
    await report(play, tokens=10)
    foreign, unreadable = [await play.create(policy={"budget_ids": [B]}) for _ in range(2)]
    assert await pull(play, 5) == []
    await write(play, foreign, blocking_reason=BlockingReason.PAUSED_BY_FLOW_CANCEL)
    await forget_usage(play, limit=-1)

    done = await play.engine.sweep_once("unblock")

    assert (done.processed, done.errors) == (0, 1)
    assert await play.vector(unreadable) == BUDGET_BLOCKED
    assert (await play.sheet(foreign)).eligibility_state == "blocked_by_budget"
    await forget_usage(play, limit=10)
    assert (await play.engine.sweep_once("unblock")).processed == 1
    assert await play.vector(unreadable) == WAITING
    assert (await play.sheet(foreign)).eligibility_state == "blocked_by_budget"


async def test_unblock_only_peeks_so_everything_that_could_be_admitted_is_set_free(play: Play) -> None:
    await policy(play, window=60, rate=1)
    await play.create(policy=LIMITED)
    assert len(await pull(play, lease_ttl_ms=90_000)) == 1
    blocked = [await play.create(policy=LIMITED | needs) for needs in (requires("gpu"), {}, {})]
    assert await pull(play, 5, capabilities=["gpu"]) == []
    play.clock.advance_ms(59_999)
    assert (await play.engine.sweep_once("unblock")).processed == 0

    play.clock.advance_ms(1)
    assert (await play.engine.sweep_once("unblock")).processed == 3

    assert [await play.vector(e) for e in blocked] == [WAITING] * 3
    [got] = await pull(play, 5)
    assert got in blocked[1:], "the one that nobody here can run takes nothing from the others"


async def test_work_that_has_its_slot_needs_no_other_room(play: Play) -> None:
    await policy(play, cap=1)
    e = await play.create(policy=LIMITED)
    await play.engine.check_admission(Q, e, window_seconds=60, rate_limit=0, concurrency_cap=1)
    await play.engine.block_execution_for_admission(e, reason="waiting_for_quota")

    assert (await play.engine.sweep_once("unblock")).processed == 1

    assert await pull(play) == [e]


async def forget_usage(play: Play, *, limit: int) -> None:
    """Write into a budget what no rule would."""
    [row] = (await play.engine.runtime.load((Read(Budget, ("default", B)),))).rows[0]
    patch = Patch(BudgetDimension, ("default", B, "tokens"), {"hard_limit": limit, "usage": 0})
    change = Change(guards=(Guard(Budget, ("default", B), row.revision),), writes=(patch,), id=row.revision + 1)
    assert await play.engine.store.commit([change]) != [None]


@pytest.mark.spec("S-093")
async def test_a_route_is_opened_when_the_registry_cannot_be_read(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    e = await play.create(policy=requires("gpu"))
    await play.engine.block_route(e)
    assert (await play.engine.sweep_once("unblock")).processed == 0
    assert await play.vector(e) == ROUTE_BLOCKED

    async def away(namespace: str) -> list[RegisteredWorker]:
        raise errors.StoreUnavailable("registry", backend="test", in_doubt=False)

    monkeypatch.setattr(play.engine.routes, "list_live_workers", away)
    assert (await play.engine.sweep_once("unblock")).processed == 1
    assert await play.vector(e) == WAITING


@pytest.mark.spec("S-094")
async def test_every_lane_is_covered(play: Play) -> None:
    due = play.now + 10
    delayed = [await play.create(lane=lane, delay_until=due) for lane in ("default", "nobody-named-this", "mail")]
    play.clock.advance_ms(10)
    engine = Engine(play.engine.store, minter=SeededMinter(9))  # knows no lane

    assert (await engine.sweep_once("delayed_promoter")).processed == 3

    assert [await play.vector(e) for e in delayed] == [WAITING] * 3


async def ended(play: Play, count: int, **given: Any) -> list[str]:
    executions: list[str] = [await play.create(**given) for _ in range(count)]
    for e in executions:
        await play.engine.cancel_execution(e)
    return executions


@pytest.mark.spec("S-095")
async def test_batch_bound(play: Play) -> None:
    await ended(play, 45)
    play.clock.advance_ms(DAY_MS)

    passes = [(await play.engine.sweep_once("retention_trimmer", batch=20)).processed for _ in range(4)]

    assert passes == [20, 20, 5, 0]
    assert await play.engine.runtime.scan(Scan(Execution)) == []


@pytest.mark.spec("S-095")
async def test_one_that_cannot_be_purged_does_not_keep_the_others(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    executions = await ended(play, 5)
    play.clock.advance_ms(DAY_MS)
    purge = play.engine.purge_execution

    async def faulty(e: str) -> bool:
        if e == executions[1]:
            raise errors.StoreUnavailable("a fault", backend="test", in_doubt=False)
        return await purge(e)

    monkeypatch.setattr(play.engine, "purge_execution", faulty)
    done = await play.engine.sweep_once("retention_trimmer", batch=20)

    assert (done.processed, done.errors) == (4, 1)
    monkeypatch.undo()
    assert (await play.engine.sweep_once("retention_trimmer", batch=20)).processed == 1


@pytest.mark.spec("S-095")
async def test_the_operation_trims_one_lane_of_one_partition(play: Play) -> None:
    mine = await ended(play, 45)
    other = await ended(play, 1, lane="mail")
    long = await ended(play, 1, policy={"stream_policy": {"retention_ttl_ms": 2 * DAY_MS}})
    short = await ended(play, 1, policy={"stream_policy": {"retention_ttl_ms": 5}})
    assert len(mine) == 45
    play.clock.advance_ms(10)
    trim = play.engine.trim_retention

    assert await trim(DEFAULT_PARTITION, "default") == 1, "only the one with a shorter life of its own"
    assert await play.engine.describe_execution(short[0]) is None
    assert await trim(DEFAULT_PARTITION, "default", default_retention_ms=10, batch=20) == 20
    assert [await trim(DEFAULT_PARTITION, "default", default_retention_ms=0, batch=20) for _ in range(3)] == [20, 5, 0]
    left = {row.execution_id for row in await play.engine.runtime.scan(Scan(Execution))}
    assert left == {*other, *long}


# -- beyond the scenarios ------------------------------------------------------------------------------------------


async def test_the_default_retention_can_be_set(play: Play) -> None:
    engine = Engine(play.engine.store, minter=SeededMinter(9), settings=Settings(retention_ms=1000))
    e, own = engine.new_execution_id(), engine.new_execution_id()
    await engine.create_execution(execution_id=e)
    await engine.create_execution(execution_id=own, policy={"stream_policy": {"retention_ttl_ms": 3000}})
    for one in (e, own):
        await engine.cancel_execution(one)

    play.clock.advance_ms(999)
    assert await engine.trim_retention(partition_of(e), "default") == 0
    play.clock.advance_ms(1)
    assert (await engine.sweep_once("retention_trimmer")).processed == 1
    assert await engine.describe_execution(own) is not None
    play.clock.advance_ms(2000)
    assert await engine.trim_retention(partition_of(own), "default", default_retention_ms=DAY_MS) == 1


async def test_a_default_that_is_longer_than_a_day_holds_for_an_operator_who_names_none(play: Play) -> None:
    engine = Engine(play.engine.store, minter=SeededMinter(9), settings=Settings(retention_ms=3 * DAY_MS))
    e = engine.new_execution_id()
    await engine.create_execution(execution_id=e)
    await engine.cancel_execution(e)

    play.clock.advance_ms(2 * DAY_MS)
    assert await engine.trim_retention(partition_of(e), "default") == 0
    play.clock.advance_ms(DAY_MS)
    assert await engine.trim_retention(partition_of(e), "default") == 1


async def test_a_trim_tries_only_what_is_over_and_goes_on_behind_what_fails(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = await ended(play, 1)
    over = await ended(play, 6, policy={"stream_policy": {"retention_ttl_ms": 0}})
    purge, tried = play.engine.purge_execution, list[str]()

    async def purging(execution_id: str, **given: Any) -> bool:
        tried.append(execution_id)
        if len(tried) <= 3:
            raise errors.StoreUnavailable("away") if len(tried) < 3 else RuntimeError("a bug")
        return await purge(execution_id, **given)

    monkeypatch.setattr(play.engine, "purge_execution", purging)

    assert await play.engine.trim_retention(DEFAULT_PARTITION, "default", batch=2) == 2
    assert set(tried) < {*over}
    assert await play.engine.describe_execution(kept[0]) is not None


async def test_the_default_retention_holds_for_members_of_a_graph_too(play: Play) -> None:
    engine = Engine(play.engine.store, minter=SeededMinter(9), settings=Settings(retention_ms=1000))
    flow_id = FlowId(engine.minter.uuid())
    member = mint_for_flow(flow_id, engine.partitions, engine.minter)
    node = CreateExecution(
        execution_id=member, partition=0, namespace="default", lane_id="default", execution_kind="task"
    )
    await engine.create_flow_graph(flow_id, [node])
    await engine.cancel_execution(member)

    play.clock.advance_ms(1000)
    assert (await engine.sweep_once("retention_trimmer")).processed == 1


async def test_keys_that_are_over_are_swept_and_live_ones_stay(play: Play) -> None:
    await budget(play, tokens=100)
    await play.create(idempotency_key="a")
    await report(play, key="a", tokens=1)
    play.clock.advance_ms(DAY_MS - 1)
    for sweep in ("idempotency_keys", "usage_keys"):
        await play.engine.sweep_once(sweep)
    kept = await play.everything()
    assert (len(kept["ff_idempotency"]), len(kept["ff_budget_usage_dedup"])) == (1, 1)

    play.clock.advance_ms(1)
    await report(play, key="a", tokens=1)  # the same key, in use again when the sweep comes by
    for sweep in ("idempotency_keys", "usage_keys"):
        await play.engine.sweep_once(sweep)

    kept = await play.everything()
    assert kept["ff_idempotency"] == []
    assert await report(play, key="a", tokens=1) == AlreadyApplied()
    assert (await play.engine.get_budget_status(B)).usage == {"tokens": 2}


async def test_an_idempotency_key_in_use_again_is_not_swept(play: Play) -> None:
    await play.create(idempotency_key="a")
    play.clock.advance_ms(DAY_MS)

    async def used_again() -> None:
        await Engine(play.store.store, minter=SeededMinter(9)).create_execution(
            execution_id=play.engine.new_execution_id(), idempotency_key="a"
        )

    play.store.after_due = used_again
    await play.engine.sweep_once("idempotency_keys")

    assert len((await play.everything())["ff_idempotency"]) == 1


async def test_an_unknown_sweep_is_refused(play: Play) -> None:
    async with play.refused(errors.InvalidInput):
        await play.engine.sweep_once("tidy_up")
