"""Random calls of several namespaces on one budget id, compared with a small model of which budget a call refers to."""

from __future__ import annotations

import random
from typing import Any

import pytest

from flowfabric.engine.engine import Engine
from flowfabric.ids import SeededMinter
from flowfabric.model.answers.limits import BudgetCreated, HardBreach
from flowfabric.stores.port import Store
from flowfabric.testing.limit_invariants import check_limit_invariants

B = "0b000000-0000-4000-8000-000000000001"
NAMESPACES = ("default", "a", "b")
STEPS = 80


class Model:
    """The budgets defined and used in each namespace, by the specification."""

    def __init__(self) -> None:
        self.limits: dict[str, int] = {}
        self.used = dict.fromkeys(NAMESPACES, 0)

    def owner(self, namespace: str, *, shared: bool) -> str:
        """Return the namespace that usage of an execution of this namespace is charged to."""
        is_elsewhere = shared and namespace not in self.limits and "default" in self.limits
        return "default" if is_elsewhere else namespace

    def spend(self, owner: str, amount: int) -> bool:
        """Charge an amount; return True if it fitted."""
        limit = self.limits.get(owner, 0)
        if limit and self.used[owner] + amount > limit:
            return False
        self.used[owner] += amount
        return True


@pytest.mark.parametrize("seed", range(3))
async def test_every_call_refers_to_the_budget_of_the_model(store: Store, seed: int) -> None:
    chance, model = random.Random(seed), Model()
    engines = [Engine(store, minter=SeededMinter(10 * seed + n)) for n in range(2)]
    runs = {name: engines[0].new_execution_id() for name in NAMESPACES}
    for name, run in runs.items():
        await engines[0].create_execution(execution_id=run, namespace=name)

    numbers: dict[str, Any] = {"dimensions": ["tokens"], "soft_limits": [0]}
    for _ in range(STEPS):
        engine, name, amount = chance.choice(engines), chance.choice(NAMESPACES), chance.randrange(1, 9)
        match chance.choice(("spend",) * 8 + ("report",) * 4 + ("reset", "define")):
            case "define":
                limit = chance.randrange(10, 60)
                made = await engine.create_budget(B, **numbers, hard_limits=[limit], namespace=name)
                assert isinstance(made, BudgetCreated) == (name not in model.limits)
                model.limits.setdefault(name, limit)
            case "reset" if name in model.limits:
                await engine.reset_budget(B, namespace=name)
                model.used[name] = 0
            case "report":
                answer = await engine.report_usage_admin(B, dimensions=["tokens"], deltas=[amount], namespace=name)
                assert isinstance(answer, HardBreach) != model.spend(name, amount)
            case _:
                shared = chance.random() < 0.7
                whose: dict[str, Any] = {"shared": shared} | ({"namespace": name} if chance.random() < 0.5 else {})
                answer = await engine.record_spend(B, runs[name], {"tokens": amount}, **whose)
                assert isinstance(answer, HardBreach) != model.spend(model.owner(name, shared=shared), amount)

    for name in NAMESPACES:
        await engines[0].create_budget(B, **numbers, hard_limits=[0], namespace=name)
        status = await engines[0].get_budget_status(B, namespace=name)
        assert status.usage.get("tokens", 0) == model.used[name]
    await check_limit_invariants(engines[0])
