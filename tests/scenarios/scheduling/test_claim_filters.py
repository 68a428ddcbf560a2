"""Filtered sweeps: each of those that can be filtered leaves the executions alone that are not chosen."""

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
from tests.scenarios.flowing import Flowing
from tests.scenarios.play import LEASE_MS, Play
from tests.scenarios.waits import Waits

DAY_MS = 24 * 3_600_000
TAG = ("app.instance_id", "i1")
Given = dict[str, Any]
Prepare = Callable[[Play, Given], Awaitable[str]]


async def lease_expiry(play: Play, given: Given) -> str:
    return (await play.claimed(ttl=100, **given)).execution_id


async def delayed_promoter(play: Play, given: Given) -> str:
    return await play.create(delay_until=play.now + 100, **given)


async def attempt_timeout(play: Play, given: Given) -> str:
    policy = {"timeout_policy": {"attempt_timeout_ms": 100}}
    return (await play.claimed(policy=policy, ttl=10 * DAY_MS, **given)).execution_id


async def execution_deadline(play: Play, given: Given) -> str:
    return await play.create(execution_deadline_at=play.now + 100, **given)


async def suspension_timeout(play: Play, given: Given) -> str:
    held = await play.claimed(**given)
    await Waits(play).suspend(held, timeout_at=play.now + 100)
    return held.execution_id


async def pending_wp_expiry(play: Play, given: Given) -> str:
    held = await play.claimed(ttl=10 * DAY_MS, **given)
    await play.engine.create_waitpoint(held.handle, "k", 100)
    return held.execution_id


async def retention_trimmer(play: Play, given: Given) -> str:
    e = await play.create(**given)
    await play.engine.cancel_execution(e)
    return e


async def unblock(play: Play, given: Given) -> str:
    e = await play.create(**given)
    await play.engine.block_execution_for_admission(e, reason="waiting_for_quota")
    return e


async def dependency_reconciler(play: Play, given: Given) -> str:
    flow = await Flowing(play.engine, play.clock).begin("ab", **given)
    await flow.stage("a", "b")
    await flow.apply("a", "b")
    await flow.succeed("a")
    return flow.names["b"]


async def cancel_reconciler(play: Play, given: Given) -> str:
    flow = await Flowing(play.engine, play.clock).begin("a", **given)
    await flow.engine.cancel_flow_header(flow.id, reason="r")
    return flow.names["a"]


FILTERED: tuple[Prepare, ...] = (
    *(lease_expiry, delayed_promoter, attempt_timeout, execution_deadline, suspension_timeout, pending_wp_expiry),
    *(retention_trimmer, unblock, dependency_reconciler, cancel_reconciler),
)


async def trace(play: Play, e: str) -> Any:
    """An execution and its waitpoints as they are kept."""
    loaded = await play.engine.runtime.load((Read(Execution, (e,)),))
    return loaded.rows[0], await play.engine.runtime.scan(Scan(Waitpoint, (Where("execution_id", "=", e),)))


async def asked(play: Play, name: str) -> None:
    """One pass with a filter of its own."""
    await play.engine.sweep_once(name, Filter("n1", TAG))


async def set_once(play: Play, name: str) -> None:
    """One pass of an engine whose settings have the filter."""
    settings = Settings(sweeps=Sweeps(namespace="n1", instance_tag=TAG), dispatch=False)
    await Engine(play.engine.store, minter=SeededMinter(9), settings=settings).sweep_once(name)


@pytest.mark.spec("S-091")
@pytest.mark.parametrize("road", [asked, set_once])
@pytest.mark.parametrize("prepare", FILTERED, ids=lambda prepare: prepare.__name__)
async def test_a_filtered_sweep_leaves_the_others_alone(flow: Flowing, prepare: Prepare, road: Any) -> None:
    play = Play(flow.engine, flow.clock)  # nothing is dispatched but by the sweeps
    chosen = await prepare(play, {"namespace": "n1", "tags": dict([TAG])})
    others = [await prepare(play, given) for given in ({"namespace": "n2", "tags": dict([TAG])}, {"namespace": "n1"})]
    play.clock.advance_ms(DAY_MS if prepare is retention_trimmer else LEASE_MS)
    before = {e: await trace(play, e) for e in (chosen, *others)}

    await road(play, prepare.__name__)

    assert await trace(play, chosen) != before[chosen]
    assert [await trace(play, e) for e in others] == [before[e] for e in others]
    await play.engine.sweep_once(prepare.__name__)
    for e in others:
        assert await trace(play, e) != before[e], "without a filter they have their turn"
