"""S-088 to S-095: sweeps. S-092 and the flow half of S-089 are in `flow`."""

from __future__ import annotations

from typing import Any

import pytest

from flowfabric import errors
from flowfabric.engine.engine import Engine
from flowfabric.ids import FlowId, SeededMinter, mint_for_flow, partition_of
from flowfabric.model.answers.execution import RetryScheduled
from flowfabric.model.answers.limits import AlreadyApplied
from flowfabric.model.change import Change, Guard, Patch
from flowfabric.model.execution import Execution
from flowfabric.model.limits.budget import Budget, BudgetDimension
from flowfabric.model.scheduling.worker import RegisteredWorker
from flowfabric.model.states import BlockingReason
from flowfabric.rules.feed import Filter
from flowfabric.settings import Settings
from flowfabric.stores.queries import Read, Scan
from tests.executions import create_request, new_execution
from tests.scenarios.env import ACTIVE, DEFAULT_PARTITION, EXPIRED_LEASE, WAITING, Env, terminal
from tests.scenarios.limits.test_budgets import B, budget, report
from tests.scenarios.limits.test_quotas import Q, policy
from tests.scenarios.scheduling.test_claims import BUDGET_BLOCKED, claim_admitted
from tests.scenarios.scheduling.test_grants import requires
from tests.scenarios.scheduling.test_workers import ROUTE_BLOCKED
from tests.scenarios.waits import Waits

RETRY = {"retry_policy": {"max_retries": 1, "backoff": {"type": "fixed", "delay_ms": 500}}}
LIMITED = {"quota_policy_ids": [Q]}
DAY_MS = 24 * 3_600_000


async def patch_execution(env: Env, e: str, **fields: Any) -> None:
    """Patch an execution directly."""
    row = await env.row(e)
    patch = Patch(Execution, (e,), fields)
    change = Change(guards=(Guard(Execution, (e,), row.revision),), writes=(patch,), id=row.revision + 1)
    assert await env.engine.store.commit([change]) != [None]


@pytest.mark.spec("S-088")
async def test_the_promoter_sweep_promotes_due_executions_only(env: Env) -> None:
    claim = await env.create_and_claim(policy=RETRY)
    cancelled = await env.create(delay_until=env.now + 500)
    assert isinstance(await env.engine.fail(claim.handle, reason="flaky"), RetryScheduled)
    await env.engine.cancel_execution(cancelled)

    env.clock.advance_ms(499)
    async with env.unchanged():
        assert await env.sweep("delayed_promoter") == 0
    assert await env.sweep("delayed_promoter", after_ms=1) == 1

    vector = await env.vector(claim.execution_id)
    assert vector == "runnable/unowned/eligible_now/waiting_for_worker/none/pending_retry_attempt/waiting"
    assert await env.vector(cancelled) == terminal("cancelled", "pending_first_attempt")


@pytest.mark.spec("S-089")
async def test_the_deadline_sweep_expires_executions_in_every_phase(env: Env) -> None:
    deadline = env.now + 1000
    queued = await env.create(execution_deadline_at=deadline)
    claim = await env.create_and_claim(execution_deadline_at=deadline)
    blocked = await env.create(execution_deadline_at=deadline, policy={"budget_ids": [B]})
    await env.engine.block_execution_for_admission(blocked, reason="waiting_for_budget")
    delayed = await env.create(execution_deadline_at=deadline, delay_until=deadline + 1)
    suspended = await env.create_and_claim(execution_deadline_at=deadline)
    await Waits(env).suspend(suspended)

    assert await env.sweep("execution_deadline", after_ms=999) == 0
    assert await env.sweep("execution_deadline", after_ms=1) == 5

    for e in (queued, claim.execution_id, blocked, delayed, suspended.execution_id):
        row = await env.row(e)
        assert (row.public_state, row.failure_reason, row.lease_expires_at) == ("expired", "execution_deadline", None)
        assert (row.blocked_on, row.blocked_at) == (None, None)
    assert await env.outcomes() == ["expired"] * 5


@pytest.mark.spec("S-090")
async def test_the_lease_expiry_sweep_marks_leases_and_does_not_requeue(env: Env) -> None:
    claim, renewed = await env.create_and_claim(), await env.create_and_claim()
    env.clock.advance_ms(29_000)
    await env.engine.renew(renewed.handle, lease_ttl_ms=9000)
    env.clock.advance_ms(1000)

    assert await env.sweep("lease_expiry") == 1

    assert await env.vector(claim.execution_id) == EXPIRED_LEASE
    assert await env.vector(renewed.execution_id) == ACTIVE
    assert await env.eligible() == []
    async with env.unchanged():
        assert await env.sweep("lease_expiry") == 0
    takeover = await env.claim_existing("wb")
    assert (takeover.execution_id, takeover.attempt_type, takeover.lease_epoch) == (claim.execution_id, "reclaim", 2)


@pytest.mark.spec("S-090")
async def test_a_lease_renewed_after_the_scan_is_not_marked_expired(env: Env) -> None:
    claim = await env.create_and_claim()
    other = Engine(env.store.store, minter=SeededMinter(9))
    env.clock.advance_ms(29_999)
    await other.renew(claim.handle, lease_ttl_ms=1)
    env.clock.advance_ms(1)

    async def too_late() -> None:
        env.clock.advance_ms(-1)
        await other.renew(claim.handle, lease_ttl_ms=30_000)
        env.clock.advance_ms(1)

    env.store.after_due = too_late
    assert await env.sweep("lease_expiry") == 0
    assert await env.vector(claim.execution_id) == ACTIVE


@pytest.mark.spec("S-091")
async def test_a_sweep_filters_by_namespace_and_tag(env: Env) -> None:
    due = env.now + 10
    tag = {"app.instance_id": "i1"}
    n1 = await env.create(namespace="n1", delay_until=due)
    tagged = await env.create(namespace="n1", delay_until=due, tags=tag)
    n2 = await env.create(namespace="n2", delay_until=due, tags=tag)
    env.clock.advance_ms(10)

    only_tagged = Filter("n1", ("app.instance_id", "i1"))
    assert (await env.engine.sweep_once("delayed_promoter", only_tagged)).processed == 1
    assert [(await env.row(e)).public_state for e in (n1, tagged, n2)] == ["delayed", "waiting", "delayed"]
    assert (await env.engine.sweep_once("delayed_promoter", Filter("n1"))).processed == 1
    assert [(await env.row(e)).public_state for e in (n1, tagged, n2)] == ["waiting", "waiting", "delayed"]


@pytest.mark.spec("S-091")
async def test_a_sweep_filter_from_the_settings_reaches_matches_behind_skipped_executions(env: Env) -> None:
    for _ in range(7):
        await env.create(namespace="n1", delay_until=env.now + 1)
    mine = await env.create(namespace="n1", delay_until=env.now + 2, tags={"app.instance_id": "i1"})
    env.clock.advance_ms(10)
    sweeps = Settings().sweeps
    settings = Settings(sweeps=type(sweeps)(batch=2, namespace="n1", instance_tag=("app.instance_id", "i1")))
    engine = Engine(env.engine.store, minter=SeededMinter(9), settings=settings)

    assert (await engine.sweep_once("delayed_promoter")).processed == 1

    assert await env.vector(mine) == WAITING


@pytest.mark.spec("S-091")
async def test_a_filtered_sweep_continues_behind_skipped_executions(env: Env) -> None:
    for _ in range(30):
        await env.create(delay_until=env.now + 1)
    mine = await env.create(delay_until=env.now + 2, tags={"app.instance_id": "i1"})
    env.clock.advance_ms(10)
    chosen = Filter(instance_tag=("app.instance_id", "i1"))

    passes = [(await env.engine.sweep_once("delayed_promoter", chosen, batch=1)).processed for _ in range(2)]

    assert passes == [0, 1]
    assert await env.vector(mine) == WAITING
    assert (await env.engine.sweep_once("delayed_promoter", batch=1)).processed == 1  # starts at the front


@pytest.mark.spec("S-091")
@pytest.mark.parametrize("sweep", ["delayed_promoter", "unblock"])
async def test_a_filtered_sweep_skips_an_execution_with_unreadable_tags(env: Env, sweep: str) -> None:
    tag = {"app.instance_id": "i1"}
    if sweep == "unblock":
        unreadable, other = [await env.create(tags=tag) for _ in range(2)]
        for e in (unreadable, other):
            await env.engine.block_execution_for_admission(e, reason="waiting_for_quota")
    else:
        unreadable, other = [await env.create(delay_until=env.now + 10, tags=tag) for _ in range(2)]
    env.clock.advance_ms(10)
    tags = (await env.row(unreadable)).tags
    await patch_execution(env, unreadable, tags="{torn")
    chosen = Filter(instance_tag=("app.instance_id", "i1"))

    done = await env.engine.sweep_once(sweep, chosen)

    assert (done.processed, await env.vector(other)) == (1, WAITING)
    assert await env.vector(unreadable) != WAITING
    await patch_execution(env, unreadable, tags=tags)
    assert (await env.engine.sweep_once(sweep, chosen)).processed == 1
    assert await env.vector(unreadable) == WAITING


@pytest.mark.spec("S-091")
async def test_the_unblock_sweep_filters_by_namespace(env: Env) -> None:
    n1, n2 = [await env.create(namespace=name) for name in ("n1", "n2")]
    for e in (n1, n2):
        await env.engine.block_execution_for_admission(e, reason="waiting_for_quota")

    assert (await env.engine.sweep_once("unblock", Filter("n2"))).processed == 1

    assert await env.vector(n2) == WAITING
    assert (await env.row(n1)).public_state == "rate_limited"


@pytest.mark.spec("S-093")
async def test_the_unblock_sweep_skips_other_reasons_and_fails_closed(env: Env) -> None:
    await budget(env, tokens=10)
    await report(env, tokens=10)
    foreign, unreadable = [await env.create(policy={"budget_ids": [B]}) for _ in range(2)]
    assert await claim_admitted(env, 5) == []
    await patch_execution(env, foreign, blocking_reason=BlockingReason.PAUSED_BY_FLOW_CANCEL)
    await patch_budget(env, limit=-1)

    done = await env.engine.sweep_once("unblock")

    assert (done.processed, done.errors) == (0, 1)
    assert await env.vector(unreadable) == BUDGET_BLOCKED
    assert (await env.row(foreign)).eligibility_state == "blocked_by_budget"
    await patch_budget(env, limit=10)
    assert await env.sweep("unblock") == 1
    assert await env.vector(unreadable) == WAITING
    assert (await env.row(foreign)).eligibility_state == "blocked_by_budget"


async def test_the_unblock_sweep_unblocks_every_execution_that_could_be_admitted(env: Env) -> None:
    await policy(env, window=60, rate=1)
    await env.create(policy=LIMITED)
    assert len(await claim_admitted(env, lease_ttl_ms=90_000)) == 1
    blocked = [await env.create(policy=LIMITED | needs) for needs in (requires("gpu"), {}, {})]
    assert await claim_admitted(env, 5, capabilities=["gpu"]) == []
    assert await env.sweep("unblock", after_ms=59_999) == 0

    assert await env.sweep("unblock", after_ms=1) == 3

    assert [await env.vector(e) for e in blocked] == [WAITING] * 3
    [got] = await claim_admitted(env, 5)
    assert got in blocked[1:], "the unroutable one takes no slot"


async def test_an_execution_with_a_slot_is_unblocked_at_full_capacity(env: Env) -> None:
    await policy(env, cap=1)
    e = await env.create(policy=LIMITED)
    await env.engine.check_admission(Q, e, window_seconds=60, rate_limit=0, concurrency_cap=1)
    await env.engine.block_execution_for_admission(e, reason="waiting_for_quota")

    assert await env.sweep("unblock") == 1

    assert await claim_admitted(env) == [e]


async def patch_budget(env: Env, *, limit: int) -> None:
    """Patch a budget directly."""
    [row] = (await env.engine.runtime.load((Read(Budget, ("default", B)),))).rows[0]
    patch = Patch(BudgetDimension, ("default", B, "tokens"), {"hard_limit": limit, "usage": 0})
    change = Change(guards=(Guard(Budget, ("default", B), row.revision),), writes=(patch,), id=row.revision + 1)
    assert await env.engine.store.commit([change]) != [None]


@pytest.mark.spec("S-093")
async def test_the_unblock_sweep_opens_routes_when_the_registry_is_unavailable(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = await env.create(policy=requires("gpu"))
    await env.engine.block_route(e)
    assert await env.sweep("unblock") == 0
    assert await env.vector(e) == ROUTE_BLOCKED

    async def away(namespace: str) -> list[RegisteredWorker]:
        raise errors.StoreUnavailable("registry", backend="test", in_doubt=False)

    monkeypatch.setattr(env.engine.routes, "list_live_workers", away)
    assert await env.sweep("unblock") == 1
    assert await env.vector(e) == WAITING


@pytest.mark.spec("S-094")
async def test_a_sweep_covers_every_lane(env: Env) -> None:
    due = env.now + 10
    delayed = [await env.create(lane=lane, delay_until=due) for lane in ("default", "nobody-named-this", "mail")]
    env.clock.advance_ms(10)
    engine = Engine(env.engine.store, minter=SeededMinter(9))  # it has seen no lane

    assert (await engine.sweep_once("delayed_promoter")).processed == 3

    assert [await env.vector(e) for e in delayed] == [WAITING] * 3


async def create_cancelled(env: Env, count: int, **options: Any) -> list[str]:
    executions: list[str] = [await env.create(**options) for _ in range(count)]
    for e in executions:
        await env.engine.cancel_execution(e)
    return executions


@pytest.mark.spec("S-095")
async def test_a_sweep_processes_at_most_one_batch(env: Env) -> None:
    await create_cancelled(env, 45)
    env.clock.advance_ms(DAY_MS)

    passes = [(await env.engine.sweep_once("retention_trimmer", batch=20)).processed for _ in range(4)]

    assert passes == [20, 20, 5, 0]
    assert await env.engine.runtime.scan(Scan(Execution)) == []


@pytest.mark.spec("S-095")
async def test_a_failed_purge_does_not_stop_the_others(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    executions = await create_cancelled(env, 5)
    env.clock.advance_ms(DAY_MS)
    purge = env.engine.purge_execution

    async def faulty(e: str) -> bool:
        if e == executions[1]:
            raise errors.StoreUnavailable("a fault", backend="test", in_doubt=False)
        return await purge(e)

    monkeypatch.setattr(env.engine, "purge_execution", faulty)
    done = await env.engine.sweep_once("retention_trimmer", batch=20)

    assert (done.processed, done.errors) == (4, 1)
    monkeypatch.undo()
    assert (await env.engine.sweep_once("retention_trimmer", batch=20)).processed == 1


@pytest.mark.spec("S-095")
async def test_trim_retention_trims_one_lane_of_one_partition(env: Env) -> None:
    mine = await create_cancelled(env, 45)
    other = await create_cancelled(env, 1, lane="mail")
    long = await create_cancelled(env, 1, policy={"stream_policy": {"retention_ttl_ms": 2 * DAY_MS}})
    short = await create_cancelled(env, 1, policy={"stream_policy": {"retention_ttl_ms": 5}})
    assert len(mine) == 45
    env.clock.advance_ms(10)
    trim = env.engine.trim_retention

    assert await trim(DEFAULT_PARTITION, "default") == 1, "only the one with a shorter retention"
    assert await env.engine.describe_execution(short[0]) is None
    assert await trim(DEFAULT_PARTITION, "default", default_retention_ms=10, batch=20) == 20
    assert [await trim(DEFAULT_PARTITION, "default", default_retention_ms=0, batch=20) for _ in range(3)] == [20, 5, 0]
    left = {row.execution_id for row in await env.engine.runtime.scan(Scan(Execution))}
    assert left == {*other, *long}


# -- beyond the scenarios ------------------------------------------------------------------------------------------


async def test_the_default_retention_can_be_set(env: Env) -> None:
    engine = Engine(env.engine.store, minter=SeededMinter(9), settings=Settings(retention_ms=1000))
    e, own = engine.new_execution_id(), engine.new_execution_id()
    await engine.create_execution(execution_id=e)
    await engine.create_execution(execution_id=own, policy={"stream_policy": {"retention_ttl_ms": 3000}})
    for one in (e, own):
        await engine.cancel_execution(one)

    env.clock.advance_ms(999)
    assert await engine.trim_retention(partition_of(e), "default") == 0
    env.clock.advance_ms(1)
    assert (await engine.sweep_once("retention_trimmer")).processed == 1
    assert await engine.describe_execution(own) is not None
    env.clock.advance_ms(2000)
    assert await engine.trim_retention(partition_of(own), "default", default_retention_ms=DAY_MS) == 1


async def test_trim_retention_uses_a_configured_default_longer_than_a_day(env: Env) -> None:
    engine = Engine(env.engine.store, minter=SeededMinter(9), settings=Settings(retention_ms=3 * DAY_MS))
    e = await new_execution(engine)
    await engine.cancel_execution(e)

    env.clock.advance_ms(2 * DAY_MS)
    assert await engine.trim_retention(partition_of(e), "default") == 0
    env.clock.advance_ms(DAY_MS)
    assert await engine.trim_retention(partition_of(e), "default") == 1


async def test_trim_retention_continues_behind_failed_purges(env: Env, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = await create_cancelled(env, 1)
    over = await create_cancelled(env, 6, policy={"stream_policy": {"retention_ttl_ms": 0}})
    purge, tried = env.engine.purge_execution, list[str]()

    async def purging(execution_id: str, **options: Any) -> bool:
        tried.append(execution_id)
        if len(tried) <= 3:
            raise errors.StoreUnavailable("away") if len(tried) < 3 else RuntimeError("a bug")
        return await purge(execution_id, **options)

    monkeypatch.setattr(env.engine, "purge_execution", purging)

    assert await env.engine.trim_retention(DEFAULT_PARTITION, "default", batch=2) == 2
    assert set(tried) < {*over}
    assert await env.engine.describe_execution(kept[0]) is not None


async def test_the_default_retention_applies_to_graph_members(env: Env) -> None:
    engine = Engine(env.engine.store, minter=SeededMinter(9), settings=Settings(retention_ms=1000))
    flow_id = FlowId(engine.minter.uuid())
    member = mint_for_flow(flow_id, engine.partitions, engine.minter)
    node = create_request(member)
    await engine.create_flow_graph(flow_id, [node])
    await engine.cancel_execution(member)

    env.clock.advance_ms(1000)
    assert (await engine.sweep_once("retention_trimmer")).processed == 1


async def test_expired_keys_are_swept_and_live_keys_are_kept(env: Env) -> None:
    await budget(env, tokens=100)
    await env.create(idempotency_key="a")
    await report(env, key="a", tokens=1)
    env.clock.advance_ms(DAY_MS - 1)
    for sweep in ("idempotency_keys", "usage_keys"):
        await env.engine.sweep_once(sweep)
    kept = await env.dump()
    assert (len(kept["ff_idempotency"]), len(kept["ff_budget_usage_dedup"])) == (1, 1)

    env.clock.advance_ms(1)
    await report(env, key="a", tokens=1)  # the key is in use again when the sweep runs
    for sweep in ("idempotency_keys", "usage_keys"):
        await env.engine.sweep_once(sweep)

    kept = await env.dump()
    assert kept["ff_idempotency"] == []
    assert await report(env, key="a", tokens=1) == AlreadyApplied()
    assert (await env.engine.get_budget_status(B)).usage == {"tokens": 2}


async def test_an_idempotency_key_reused_after_the_scan_is_not_swept(env: Env) -> None:
    await env.create(idempotency_key="a")
    env.clock.advance_ms(DAY_MS)

    async def used_again() -> None:
        await Engine(env.store.store, minter=SeededMinter(9)).create_execution(
            execution_id=env.engine.new_execution_id(), idempotency_key="a"
        )

    env.store.after_due = used_again
    await env.engine.sweep_once("idempotency_keys")

    assert len((await env.dump())["ff_idempotency"]) == 1


async def test_an_unknown_sweep_is_refused(env: Env) -> None:
    async with env.refused(errors.InvalidInput):
        await env.engine.sweep_once("tidy_up")
