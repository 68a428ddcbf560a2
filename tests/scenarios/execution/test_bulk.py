"""Two processes bring the same thing into being at the same time: one of them does, the other is told of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest

from flowfabric import errors
from flowfabric.clock import ManualClock
from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from tests.scenarios.flowing import Flowing, any_of, quorum

ROUNDS = 20  # whether two calls meet in the store is up to it


@pytest.fixture
async def both(store: Store) -> tuple[Engine, Engine]:
    """Two processes on one store."""
    still = Settings(dispatch=False)
    return Engine(store, minter=SeededMinter(1), settings=still), Engine(store, minter=SeededMinter(2), settings=still)


async def told(call: Awaitable[Any]) -> str:
    try:
        answer = await call
    except errors.FabricError as refused:
        return type(refused).__name__
    return str(getattr(answer, "value", type(answer).__name__))


async def told_both(one: Awaitable[Any], other: Awaitable[Any]) -> Counter[str]:
    return Counter(await asyncio.gather(told(one), told(other)))


async def test_a_policy_comes_before_the_first_edge_or_is_refused(
    both: tuple[Engine, Engine], clock: ManualClock
) -> None:
    one, other = both
    for _ in range(ROUNDS):
        flow = await Flowing(one, clock).begin("ab")
        staged = one.stage_dependency_edge(flow.id, one.minter.uuid(), flow.names["a"], flow.names["b"])
        fixed = other.set_edge_group_policy(flow.id, flow.names["b"], any_of("let_run"))
        answers = await told_both(staged, fixed)

        group = await flow.group("b")
        assert group.staged == 1
        assert answers == Counter(["Staged", "set" if group.policy_variant == "any_of" else "InvalidInput"])


async def test_of_two_policies_one_is_set_first(both: tuple[Engine, Engine], clock: ManualClock) -> None:
    for _ in range(ROUNDS):
        flow = await Flowing(both[0], clock).begin("a")
        same = [engine.set_edge_group_policy(flow.id, flow.names["a"], quorum(2, "let_run")) for engine in both]
        assert await told_both(*same) == Counter(["set", "already_set"])


async def test_of_two_budgets_of_one_name_one_is_created(both: tuple[Engine, Engine]) -> None:
    one, other = both
    for _ in range(ROUNDS):
        name = one.minter.uuid()
        answers = await told_both(
            one.create_budget(name, dimensions=["tokens"], hard_limits=[1], soft_limits=[0]),
            other.create_budget(name, dimensions=["tokens"], hard_limits=[2], soft_limits=[0]),
        )
        assert answers == Counter(["BudgetCreated", "BudgetExists"])


async def test_of_two_quota_policies_of_one_name_one_is_created(both: tuple[Engine, Engine]) -> None:
    one, other = both
    for _ in range(ROUNDS):
        name = one.minter.uuid()
        answers = await told_both(
            one.create_quota_policy(name, window_seconds=60, max_requests_per_window=1, max_concurrent=0),
            other.create_quota_policy(name, window_seconds=60, max_requests_per_window=2, max_concurrent=0),
        )
        assert answers == Counter(["QuotaPolicyCreated", "QuotaPolicyExists"])


async def test_of_two_workers_with_one_instance_id_one_is_registered(both: tuple[Engine, Engine]) -> None:
    one, other = both
    for number in range(ROUNDS):
        instance: dict[str, Any] = {"worker_instance_id": f"i-{number}", "lanes": ["default"], "liveness_ttl_ms": 1000}
        answers = await told_both(
            one.register_worker(worker_id="w", **instance), other.register_worker(worker_id="v", **instance)
        )
        assert answers == Counter(["WorkerRegistered", "InvalidInput"])


async def test_of_two_signing_keys_that_are_seeded_one_is_kept(both: tuple[Engine, Engine]) -> None:
    one, other = both
    answers = await told_both(
        one.seed_waitpoint_hmac_secret("k1", "00" * 32), other.seed_waitpoint_hmac_secret("k1", "11" * 32)
    )
    assert len(answers) == 2
