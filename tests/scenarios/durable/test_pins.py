"""A pinned execution is continued by workers of the version it began with, and by no others, until it is unpinned."""

from __future__ import annotations

import pytest

from flowfabric import errors
from flowfabric.model.states import PublicState
from flowfabric.stores.port import Store
from flowfabric.testing.flaky_store import Loss
from tests.scenarios.durable_function import HOUR, DurableFunction
from tests.scenarios.env import LEASE_MS, Env
from tests.scenarios.lossy_engine import lossy_engine
from tests.scenarios.scheduling.test_workers import register

ONE, TWO = "ff.version=1", "ff.version=2"


async def park_and_wake(function: DurableFunction, env: Env) -> None:
    """Park the function on a timer, and let the timer pass."""
    await function.timer("nap", HOUR)
    await function.park("nap")
    await env.sweep("suspension_timeout", after_ms=HOUR)


async def required(env: Env, e: str) -> str | None:
    return (await env.row(e)).required_capabilities


async def test_a_pinned_execution_resumes_only_on_its_version(function: DurableFunction, env: Env) -> None:
    memo = await function.engine.pin_version(function.claim.handle, "1", number=1)
    assert (memo.name, memo.result, memo.number) == ("pin:", b'"1"', 1)
    assert await required(env, function.e) == ONE
    await park_and_wake(function, env)

    assert await env.claim_next("old") is None
    assert await env.claim_next("two", capabilities=[TWO]) is None
    claim = await env.claim_existing("one", capabilities=["gpu", ONE])
    assert claim.execution_id == function.e


async def test_a_pinned_execution_that_lost_its_lease_is_taken_over_only_by_its_version(
    function: DurableFunction, env: Env
) -> None:
    await function.engine.pin_version(function.claim.handle, "1")
    await env.expire_lease(function.claim)

    assert await env.claim_next("two", capabilities=[TWO]) is None
    assert (await env.claim_existing("one", capabilities=[ONE])).execution_id == function.e


async def test_no_grant_of_a_pinned_execution_is_given_to_another_version(function: DurableFunction, env: Env) -> None:
    await function.engine.pin_version(function.claim.handle, "1")
    await park_and_wake(function, env)

    with pytest.raises(errors.CapabilityMismatch):
        await env.grant(function.e, "two", capabilities=[TWO])
    assert await env.grant_next("two", capabilities=[TWO]) is None
    assert (await env.claim_existing("one", capabilities=[ONE])).execution_id == function.e


async def test_an_execution_is_pinned_once(function: DurableFunction, env: Env) -> None:
    first = await function.engine.pin_version(function.claim.handle, "1")
    assert await function.engine.unpin(function.e)
    assert await function.engine.pin_version(function.claim.handle, "2") == first
    assert await required(env, function.e) is None, "it was unpinned"


@pytest.mark.parametrize("loss", list(Loss))
async def test_a_pin_with_a_lost_message_is_written_once(
    function: DurableFunction, env: Env, store: Store, loss: Loss
) -> None:
    memo = await lossy_engine(store, loss).pin_version(function.claim.handle, "1")

    assert await env.engine.read_steps(function.e) == [memo]
    assert await required(env, function.e) == ONE


async def test_a_worker_that_lost_its_lease_pins_nothing(function: DurableFunction, env: Env) -> None:
    env.clock.advance_ms(LEASE_MS)
    with pytest.raises(errors.LeaseExpired):
        await function.engine.pin_version(function.claim.handle, "1")
    assert await required(env, function.e) is None


@pytest.mark.parametrize("version", ["", "a b", "a,b", "a\x00", "x" * 2000])
async def test_a_version_that_is_no_capability_is_refused_and_changes_nothing(
    function: DurableFunction, env: Env, version: str
) -> None:
    with pytest.raises(errors.InvalidInput):
        await function.engine.pin_version(function.claim.handle, version)
    await function.engine.pin_version(function.claim.handle, "1")
    with pytest.raises(errors.InvalidInput):
        await function.engine.unpin(function.e, version=version)
    assert await required(env, function.e) == ONE


async def test_an_unpinned_execution_is_continued_by_any_version(function: DurableFunction, env: Env) -> None:
    await function.engine.pin_version(function.claim.handle, "1")
    await park_and_wake(function, env)
    assert await env.claim_next("old") is None

    assert await env.engine.unpin(function.e)
    assert not await env.engine.unpin(function.e), "a repeated call changes nothing"
    assert (await env.claim_existing("old")).execution_id == function.e


async def test_an_execution_is_moved_to_another_version_in_any_state(function: DurableFunction, env: Env) -> None:
    await function.engine.pin_version(function.claim.handle, "1")
    assert await env.engine.unpin(function.e, version="2"), "while it runs"
    await park_and_wake(function, env)
    assert await env.claim_next("one", capabilities=[ONE]) is None
    assert await env.engine.unpin(function.e, version="1"), "while it is ready"
    function.claim = await env.claim_existing("one", capabilities=[ONE])
    await function.timer("other nap", HOUR)
    await function.park("other nap")
    assert await env.engine.unpin(function.e, version="3"), "while it is suspended"
    assert not await env.engine.unpin(function.e, version="3")
    await env.sweep("suspension_timeout", after_ms=HOUR)
    assert (await env.claim_existing("three", capabilities=["ff.version=3"])).execution_id == function.e


async def test_an_execution_whose_lease_was_lost_is_moved_to_another_version(
    function: DurableFunction, env: Env
) -> None:
    await function.engine.pin_version(function.claim.handle, "1")
    await env.expire_lease(function.claim)
    assert await env.engine.unpin(function.e, version="2")
    assert await env.claim_next("one", capabilities=[ONE]) is None
    assert (await env.claim_existing("two", capabilities=[TWO])).execution_id == function.e


async def test_an_execution_that_no_worker_could_continue_is_ready_once_it_is_unpinned(
    function: DurableFunction, env: Env
) -> None:
    await function.engine.pin_version(function.claim.handle, "1")
    await park_and_wake(function, env)
    await register(env, "two", capabilities=[TWO], liveness_ttl_ms=10**9)
    await env.engine.block_route(function.e)

    assert await env.engine.unpin(function.e)
    row = await env.row(function.e)
    assert (row.public_state, row.blocked_on, row.blocking_text) == (PublicState.WAITING, None, None)
    assert (await env.claim_existing("two", capabilities=[TWO])).execution_id == function.e


async def test_other_requirements_of_a_pinned_execution_stay(env: Env, function: DurableFunction) -> None:
    policy = {"routing_requirements": {"required_capabilities": ["gpu"]}}
    e = await env.create(policy=policy)
    await env.grant(e, capabilities=["gpu"])
    claim = await env.claim(e)
    await env.engine.pin_version(claim.handle, "1")
    assert await required(env, e) == "ff.version=1,gpu"
    assert await env.engine.unpin(e, version="2")
    assert await required(env, e) == "ff.version=2,gpu"
    assert await env.engine.unpin(e)
    assert await required(env, e) == "gpu"


async def test_the_replay_of_a_success_is_not_pinned_and_that_of_a_failure_is(
    function: DurableFunction, env: Env
) -> None:
    await function.engine.pin_version(function.claim.handle, "1")
    await function.engine.fail(function.claim.handle, reason="no", category="permanent")
    await env.engine.replay_execution(function.e)
    assert await env.claim_next("two", capabilities=[TWO]) is None
    claim = await env.claim_existing("one", capabilities=[ONE])
    await env.engine.complete(claim.handle)

    await env.engine.replay_execution(function.e)
    assert await required(env, function.e) is None
    assert (await env.claim_existing("two", capabilities=[TWO])).execution_id == function.e


async def test_runs_that_go_the_old_way_and_pinned_runs_are_counted_until_they_end(
    function: DurableFunction, env: Env
) -> None:
    await function.engine.record_patch(function.claim.handle, "fraud-check", is_new=False)
    await function.engine.record_patch(function.claim.handle, "other", is_new=True)
    await function.engine.pin_version(function.claim.handle, "1")
    await env.create()

    found = await env.engine.count_old_ways()
    assert (found.patches, found.pinned, found.next_cursor) == ({"fraud-check": 1}, {"1": 1}, None)
    elsewhere = await env.engine.count_old_ways(namespaces=["n2"])
    assert (elsewhere.patches, elsewhere.pinned) == ({}, {})
    await env.engine.complete(function.claim.handle)
    found = await env.engine.count_old_ways()
    assert (found.patches, found.pinned) == ({}, {})
