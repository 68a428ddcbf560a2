"""Two processes create the same row concurrently: one creates it, the other gets the existing one or an error."""

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
from tests.scenarios.flow_env import FlowEnv, any_of, quorum

ROUNDS = 20  # the race is not forced


@pytest.fixture
async def engines(store: Store) -> tuple[Engine, Engine]:
    """Two engines on one store."""
    undispatched = Settings(dispatch=False)
    return Engine(store, minter=SeededMinter(1), settings=undispatched), Engine(
        store, minter=SeededMinter(2), settings=undispatched
    )


async def outcome(call: Awaitable[Any]) -> str:
    try:
        answer = await call
    except errors.FabricError as refused:
        return type(refused).__name__
    return str(getattr(answer, "value", type(answer).__name__))


async def outcomes(one: Awaitable[Any], other: Awaitable[Any]) -> Counter[str]:
    return Counter(await asyncio.gather(outcome(one), outcome(other)))


async def test_a_join_policy_set_concurrently_with_the_first_edge_is_set_before_it_or_refused(
    engines: tuple[Engine, Engine], clock: ManualClock
) -> None:
    one, other = engines
    for _ in range(ROUNDS):
        flow = await FlowEnv(one, clock).begin("ab")
        staged = one.stage_dependency_edge(flow.id, one.minter.uuid(), flow.names["a"], flow.names["b"])
        fixed = other.set_edge_group_policy(flow.id, flow.names["b"], any_of("let_run"))
        answers = await outcomes(staged, fixed)

        group = await flow.group("b")
        assert group.staged == 1
        assert answers == Counter(["Staged", "set" if group.policy_variant == "any_of" else "InvalidInput"])


async def test_one_of_two_concurrent_equal_join_policies_is_set_and_the_other_reported_as_already_set(
    engines: tuple[Engine, Engine], clock: ManualClock
) -> None:
    for _ in range(ROUNDS):
        flow = await FlowEnv(engines[0], clock).begin("a")
        same = [engine.set_edge_group_policy(flow.id, flow.names["a"], quorum(2, "let_run")) for engine in engines]
        assert await outcomes(*same) == Counter(["set", "already_set"])


async def test_one_of_two_concurrent_creates_of_a_budget_wins(engines: tuple[Engine, Engine]) -> None:
    one, other = engines
    for _ in range(ROUNDS):
        name = one.minter.uuid()
        answers = await outcomes(
            one.create_budget(name, dimensions=["tokens"], hard_limits=[1], soft_limits=[0]),
            other.create_budget(name, dimensions=["tokens"], hard_limits=[2], soft_limits=[0]),
        )
        assert answers == Counter(["BudgetCreated", "BudgetExists"])


async def test_one_of_two_concurrent_creates_of_a_quota_policy_wins(engines: tuple[Engine, Engine]) -> None:
    one, other = engines
    for _ in range(ROUNDS):
        name = one.minter.uuid()
        answers = await outcomes(
            one.create_quota_policy(name, window_seconds=60, max_requests_per_window=1, max_concurrent=0),
            other.create_quota_policy(name, window_seconds=60, max_requests_per_window=2, max_concurrent=0),
        )
        assert answers == Counter(["QuotaPolicyCreated", "QuotaPolicyExists"])


async def test_one_of_two_concurrent_registrations_of_an_instance_id_wins(engines: tuple[Engine, Engine]) -> None:
    one, other = engines
    for number in range(ROUNDS):
        instance: dict[str, Any] = {"worker_instance_id": f"i-{number}", "lanes": ["default"], "liveness_ttl_ms": 1000}
        answers = await outcomes(
            one.register_worker(worker_id="w", **instance), other.register_worker(worker_id="v", **instance)
        )
        assert answers == Counter(["WorkerRegistered", "InvalidInput"])


async def test_one_of_two_concurrently_seeded_signing_keys_is_stored(engines: tuple[Engine, Engine]) -> None:
    one, other = engines
    answers = await outcomes(
        one.seed_waitpoint_hmac_secret("k1", "00" * 32), other.seed_waitpoint_hmac_secret("k1", "11" * 32)
    )
    assert len(answers) == 2
