"""Filtered sweeps change only the executions that match the filter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.execution import Execution
from flowfabric.model.suspension import Waitpoint
from flowfabric.rules.feed import Filter
from flowfabric.settings import Settings, Sweeps
from flowfabric.stores.queries import Read, Scan, Where
from tests.scenarios.env import LEASE_MS, Env
from tests.scenarios.flow_env import FlowEnv
from tests.scenarios.waits import Waits

DAY_MS = 24 * 3_600_000
TAG = ("app.instance_id", "i1")
Options = dict[str, Any]
Prepare = Callable[[Env, Options], Awaitable[str]]


async def lease_expiry(env: Env, options: Options) -> str:
    return (await env.create_and_claim(ttl=100, **options)).execution_id


async def delayed_promoter(env: Env, options: Options) -> str:
    return await env.create(delay_until=env.now + 100, **options)


async def attempt_timeout(env: Env, options: Options) -> str:
    policy = {"timeout_policy": {"attempt_timeout_ms": 100}}
    return (await env.create_and_claim(policy=policy, ttl=10 * DAY_MS, **options)).execution_id


async def execution_deadline(env: Env, options: Options) -> str:
    return await env.create(execution_deadline_at=env.now + 100, **options)


async def suspension_timeout(env: Env, options: Options) -> str:
    claim = await env.create_and_claim(**options)
    await Waits(env).suspend(claim, timeout_at=env.now + 100)
    return claim.execution_id


async def pending_wp_expiry(env: Env, options: Options) -> str:
    claim = await env.create_and_claim(ttl=10 * DAY_MS, **options)
    await env.engine.create_waitpoint(claim.handle, "k", 100)
    return claim.execution_id


async def retention_trimmer(env: Env, options: Options) -> str:
    e = await env.create(**options)
    await env.engine.cancel_execution(e)
    return e


async def unblock(env: Env, options: Options) -> str:
    e = await env.create(**options)
    await env.engine.block_execution_for_admission(e, reason="waiting_for_quota")
    return e


async def dependency_reconciler(env: Env, options: Options) -> str:
    flow = await FlowEnv(env.engine, env.clock).begin("ab", **options)
    await flow.stage("a", "b")
    await flow.apply("a", "b")
    await flow.succeed("a")
    return flow.names["b"]


async def cancel_reconciler(env: Env, options: Options) -> str:
    flow = await FlowEnv(env.engine, env.clock).begin("a", **options)
    await flow.engine.cancel_flow_header(flow.id, reason="r")
    return flow.names["a"]


FILTERED: tuple[Prepare, ...] = (
    *(lease_expiry, delayed_promoter, attempt_timeout, execution_deadline, suspension_timeout, pending_wp_expiry),
    *(retention_trimmer, unblock, dependency_reconciler, cancel_reconciler),
)


async def stored_rows(env: Env, e: str) -> Any:
    """Load an execution and its waitpoints."""
    loaded = await env.engine.runtime.load((Read(Execution, (e,)),))
    return loaded.rows[0], await env.engine.runtime.scan(Scan(Waitpoint, (Where("execution_id", "=", e),)))


async def sweep_with_filter(env: Env, name: str) -> None:
    """Sweep once with a filter argument."""
    await env.engine.sweep_once(name, Filter("n1", TAG))


async def sweep_with_settings(env: Env, name: str) -> None:
    """Sweep once with the filter in the settings."""
    settings = Settings(sweeps=Sweeps(namespace="n1", instance_tag=TAG), dispatch=False)
    await Engine(env.engine.store, minter=SeededMinter(9), settings=settings).sweep_once(name)


@pytest.mark.spec("S-091")
@pytest.mark.parametrize("sweep", [sweep_with_filter, sweep_with_settings])
@pytest.mark.parametrize("prepare", FILTERED, ids=lambda prepare: prepare.__name__)
async def test_a_filtered_sweep_changes_only_matching_executions(flow: FlowEnv, prepare: Prepare, sweep: Any) -> None:
    env = Env(flow.engine, flow.clock)  # only sweeps dispatch
    chosen = await prepare(env, {"namespace": "n1", "tags": dict([TAG])})
    others = [
        await prepare(env, options) for options in ({"namespace": "n2", "tags": dict([TAG])}, {"namespace": "n1"})
    ]
    env.clock.advance_ms(DAY_MS if prepare is retention_trimmer else LEASE_MS)
    before = {e: await stored_rows(env, e) for e in (chosen, *others)}

    await sweep(env, prepare.__name__)

    assert await stored_rows(env, chosen) != before[chosen]
    assert [await stored_rows(env, e) for e in others] == [before[e] for e in others]
    await env.engine.sweep_once(prepare.__name__)
    for e in others:
        assert await stored_rows(env, e) != before[e], "a sweep without a filter changes them"
