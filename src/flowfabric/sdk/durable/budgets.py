"""Spending of a context: count amounts against a budget, or reserve capacity first and settle afterwards."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from flowfabric.engine.types import BudgetNeed, GateArgs
from flowfabric.errors import InvalidInput
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.gate import GateKind
from flowfabric.model.owned_id import DEFAULT_NAMESPACE
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.exceptions import BudgetExceeded
from flowfabric.sdk.limits import Budget

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowfabric.engine_api import EngineAPI
    from flowfabric.sdk.durable.attempt import DurableAttempt
    from flowfabric.sdk.fabric import Fabric


class Reservation:
    """Capacity of a budget reserved for a block of code; `spend` notes what the block used."""

    def __init__(self) -> None:
        self.used: dict[str, int | float] = {}

    def spend(self, **amounts: int | float) -> None:
        """Note what was used; it is counted when the reservation ends."""
        for dimension, amount in amounts.items():
            self.used[dimension] = self.used.get(dimension, 0) + amount


class ContextBudgets(ABC):
    """The part of a context that spends budgets."""

    app: Fabric
    engine: EngineAPI
    run_id: str
    attempt: int
    _budgets: Mapping[str, str]

    @property
    @abstractmethod
    def durable(self) -> DurableAttempt:
        """The replay state of this attempt."""

    @abstractmethod
    async def run_once(self, label: str, operation: Callable[[str], Awaitable[Any]]) -> Any:
        """Run an operation once and record its answer; it gets a key that is the same on every attempt."""

    async def spend(self, budget: Budget, **amounts: int | float) -> None:
        """Count amounts against a budget, exactly once however often the run is retried.

        Beyond a hard limit nothing is counted: `BudgetExceeded` is raised, or with `on_hard="suspend"` the run is
        suspended until the budget has capacity.
        """
        budget_id = await self._id_of(budget)
        counted = budget.amounts(amounts)

        async def report(key: str) -> str:
            while True:
                answer = await self.engine.record_spend(
                    budget_id, self.run_id, counted, idempotency_key=key, namespace=self.app.namespace
                )
                if not isinstance(answer, limit_answers.HardBreach):
                    return type(answer).__name__
                await self._handle_breach(budget, budget_id, answer, counted)

        await self.run_once(f"spend:{budget.name}", report)

    @asynccontextmanager
    async def reserve(
        self, budget: Budget, *, lasts: Duration = "1h", **amounts: int | float
    ) -> AsyncIterator[Reservation]:
        """Reserve capacity while the block runs. At its end what it spent is counted, and the rest is released.

        Without capacity `BudgetExceeded` is raised, or with `on_hard="suspend"` the run is suspended until there is
        some. If the process dies, the reservation is reused by the next attempt, or expires after `lasts`.
        """
        budget_id = await self._id_of(budget)
        counted = budget.amounts(amounts)
        name, occurrence = self.durable.next_occurrence(f"reserve:{budget.name}")
        reservation_id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.run_id}|{name}|{occurrence}"))
        while True:
            answer = await self.engine.reserve_budget(
                budget_id,
                self.run_id,
                counted,
                ttl_ms=to_ms(lasts, "lasts"),
                reservation_id=reservation_id,
                namespace=self.app.namespace,
            )
            if not isinstance(answer, limit_answers.HardBreach):
                break
            await self._handle_breach(budget, budget_id, answer, counted)
        reservation = Reservation()
        try:
            yield reservation
        except BaseException:
            if not self.durable.parked:  # a parked run keeps its reservation until it expires
                await self.engine.refund_budget(budget_id, reservation_id, namespace=self.app.namespace)
                if reservation.used:
                    key, used = f"{reservation_id}|{self.attempt}", budget.amounts(reservation.used)
                    await self.engine.record_spend(
                        budget_id, self.run_id, used, idempotency_key=key, namespace=self.app.namespace
                    )
            raise
        used = budget.amounts(reservation.used)
        await self.engine.settle_budget(budget_id, self.run_id, reservation_id, used, namespace=self.app.namespace)

    async def _handle_breach(
        self, budget: Budget, budget_id: str, breach: limit_answers.HardBreach, amounts: Mapping[str, int]
    ) -> None:
        """Raise, or suspend the run until the budget has capacity."""
        numbers = (breach.current_usage + breach.reserved, breach.hard_limit, amounts[breach.dimension])
        dimension, (used, limit, asked) = budget.display_amounts(breach.dimension, *numbers)
        if budget.on_hard != "suspend":
            raise BudgetExceeded(budget.name, dimension, used=used, limit=limit, asked=asked)
        if asked > limit:
            raise InvalidInput(f"budget {budget.name}: {dimension}={asked} is more than it ever has room for")
        owner = DEFAULT_NAMESPACE if breach.namespace is UNSET else breach.namespace
        need = BudgetNeed(budget_id, breach.dimension, amounts[breach.dimension], owner)
        await self.durable.open_and_wait(
            GateArgs(name=self.durable.next_gate_name("budget"), kind=GateKind.MAILBOX, mailbox=need.key),
            on_parked=lambda: self.engine.unblock_budget_waiters(budget_id, namespace=owner),
        )

    async def _id_of(self, budget: Budget) -> str:
        if not isinstance(budget, Budget):
            raise InvalidInput(f"budget: {budget!r} is no Budget; pass the one that was declared")
        if (budget_id := self._budgets.get(budget.name)) is not None:
            return budget_id
        if budget.per is not None:
            raise InvalidInput(f"budget {budget.name}: it is per {budget.per}; name it in budgets=[…] of the task")
        return await self.app.declare_budget(self.engine, budget)
