"""Spending of a context: count amounts against a budget, or reserve capacity first and spend from it.

A spend is counted in the budget under a key, and then recorded by the run. The budget keeps the key until the run
acknowledges the record, with its next spend or refund there or at its end, so that an attempt that finds no record is
not counted a second time. Inside a step nothing is recorded: each run of the step spends.
"""

from __future__ import annotations

import asyncio
import uuid
import warnings
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from flowfabric.engine.types import BudgetNeed, GateArgs
from flowfabric.errors import FabricError, InvalidInput
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.gate import GateKind
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE
from flowfabric.sdk.durable.attempt import HandlerUnwound, is_in_step
from flowfabric.sdk.durable.context_part import ContextPart
from flowfabric.sdk.durations import Duration, to_ms
from flowfabric.sdk.exceptions import BudgetExceeded
from flowfabric.sdk.limits import Budget
from flowfabric.sdk.serialization.values import json_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from flowfabric.sdk.durable.branches import Branch
    from flowfabric.sdk.durable.ledger import Ledger, Place

MAX_ACKNOWLEDGED = 100  # keys in one call; later calls acknowledge the others
SPENT = "spent:"

Spent = Mapping[str, int | float]  # amounts by dimension, as in the declaration
Stored = dict[str, int]  # amounts by dimension, as in the store


class Spend:
    """A spend from a reservation: `await` counts it. One that is not awaited is counted at the end of the block."""

    def __init__(self, reservation: Reservation, amounts: Spent) -> None:
        self._reservation = reservation
        self.amounts = amounts

    def __await__(self) -> Generator[Any, None, None]:
        self._reservation.unawaited.remove(self)
        return self._reservation.count(self.amounts).__await__()


class Reservation:
    """Capacity of a budget reserved for a block of code; `await reservation.spend(…)` spends from it."""

    def __init__(self, count: Callable[[Spent], Awaitable[None]]) -> None:
        self._count = count
        self.unawaited: list[Spend] = []

    def spend(self, **amounts: int | float) -> Spend:
        """Count amounts against the budget, exactly once however often the run is retried.

        Inside a step they are counted in each run of the step. Amounts beyond the reservation are counted as far as
        the budget has capacity.
        """
        spend = Spend(self, amounts)
        self.unawaited.append(spend)
        return spend

    async def count(self, amounts: Spent) -> None:
        """Count amounts now."""
        await self._count(amounts)


class SpendKeys:
    """The spends that one attempt knows: keys to acknowledge, and amounts that were drawn from reservations before."""

    def __init__(self) -> None:
        self._recorded: dict[str, list[str]] = {}  # keys by budget
        self._drawn: dict[str, Stored] | None = None  # by reservation, in earlier attempts

    def note_recorded(self, budget_id: str, key: str) -> None:
        """Note that the run has recorded a spend."""
        self._recorded.setdefault(budget_id, []).append(key)

    def take(self, budget_id: str) -> list[str]:
        """Return recorded keys of a budget for its next call, each once. A lost one expires after 30 days."""
        keys = self._recorded.get(budget_id, [])
        taken, keys[:] = keys[:MAX_ACKNOWLEDGED], keys[MAX_ACKNOWLEDGED:]
        return taken

    def budgets(self) -> list[str]:
        """Return the budgets that have recorded keys."""
        return [budget_id for budget_id, keys in self._recorded.items() if keys]

    def drawn(self, ledger: Ledger, reservation_id: str) -> Stored:
        """Return what earlier attempts have spent from a reservation."""
        if self._drawn is None:
            self._drawn = {}
            for (name, _), memo in ledger.ends.items():
                if name.startswith(SPENT):
                    reservation, amounts = msgspec.json.decode(memo.result, type=tuple[str, Stored])
                    _add(self._drawn.setdefault(reservation, {}), amounts)
        return dict(self._drawn.get(reservation_id, {}))


class _Room:
    """A reservation in this attempt: its id, and what is left of it."""

    def __init__(self, budget: Budget, budget_id: str, reservation_id: str, left: Stored) -> None:
        self.budget = budget
        self.budget_id = budget_id
        self.reservation_id = reservation_id
        self.left = left

    def uncovered(self, amounts: Stored) -> Stored:
        """Return what the reservation does not cover of these amounts."""
        return {name: max(0, amount - self.left.get(name, 0)) for name, amount in amounts.items()}

    def draw(self, amounts: Stored) -> None:
        """Take amounts off what is left."""
        self.left = {name: max(0, left - amounts.get(name, 0)) for name, left in self.left.items()}


class ContextBudgets(ContextPart):
    """The part of a context that spends budgets."""

    attempt: int
    open_reservations: int
    continues_elsewhere: bool
    _budgets: Mapping[str, str]
    _spends: SpendKeys

    @abstractmethod
    def key(self, name: str) -> str:
        """Return an idempotency key: the same on every attempt of this run."""

    @abstractmethod
    async def reach_fault_point(self, point: str, moment: str) -> None:
        """Mark a point at which a test can inject a crash."""

    async def spend(self, budget: Budget, **amounts: int | float) -> None:
        """Count amounts against a budget, exactly once however often the run is retried.

        Inside a step they are counted in each run of the step. Beyond a hard limit nothing is counted:
        `BudgetExceeded` is raised, or with `on_hard="suspend"` the run is suspended until the budget has capacity.
        """
        budget_id = await self._id_of(budget)
        counted = budget.amounts(amounts)
        if self._counts_each_run():
            await self._report(budget, budget_id, counted, uuid.uuid4().hex)
            return
        label = f"spend:{budget.name}"
        branch = await self.durable.begin_operation()
        place = self.durable.next_place(label)
        await self._count_once(branch, place, label, budget, budget_id, counted)

    @asynccontextmanager
    async def reserve(
        self, budget: Budget, *, lasts: Duration = "1h", **amounts: int | float
    ) -> AsyncIterator[Reservation]:
        """Reserve capacity while the block runs, and spend from it. At its end what was not spent is released.

        Without capacity `BudgetExceeded` is raised, or with `on_hard="suspend"` the run is suspended until there is
        some. If the run is parked or its worker stops or dies, the next attempt takes the reservation up; it expires
        after `lasts`, and is then made again for what was not spent.
        """
        budget_id = await self._id_of(budget)
        counted = budget.amounts(amounts)
        durable = self.durable
        branch = await durable.begin_operation()
        name, occurrence = durable.next_occurrence(f"reserve:{budget.name}")
        place = (f"reserved:{branch.name}{budget.name}", occurrence)
        reservation_id = str(uuid.uuid5(uuid.NAMESPACE_OID, f"{self.origin}|{name}|{occurrence}"))
        is_recorded = not is_in_step()
        durable.ledger.reach(place)
        has_ended = is_recorded and place in durable.ledger.ends
        drawn = self._spends.drawn(durable.ledger, reservation_id)
        room = _Room(budget, budget_id, reservation_id, counted)
        room.draw(drawn)
        if not has_ended:
            has_ended = await self._reserve(room, counted, drawn, to_ms(lasts, "lasts"))
        reservation = Reservation(lambda spent: self._spend_from(room, spent))
        self.open_reservations += 1
        try:
            yield reservation
        except BaseException as failure:
            if self._gives_back(failure) and not has_ended:
                if is_recorded:
                    durable.note_ended(branch, place)
                # A task that the failure left waiting must not let the run park here: the failure would count as past.
                with suppress(FabricError):
                    async with durable.parker.without_parking():
                        await self._count_unawaited(room, reservation)
                        with durable.releasing():
                            await self._refund(room)
            raise
        finally:
            self.open_reservations -= 1
        if has_ended:
            return
        unawaited = await self._count_unawaited(room, reservation)
        if is_recorded:
            # The record comes first: it is refused to a former holder of the lease, who then refunds nothing.
            await durable.begin_operation()
            async with durable.parker.without_parking():
                await durable.record_step(place, b"null")
        for key in unawaited:
            self._spends.note_recorded(budget_id, key)
        await self._refund(room)
        if unawaited:
            warnings.warn(
                f"budget {budget.name}: write `await room.spend(…)`; without await it will not be counted in the next "
                "release",
                DeprecationWarning,
                stacklevel=3,
            )

    async def acknowledge_spends(self) -> None:
        """Acknowledge the recorded spends at the end; a key that is not acknowledged lives for 30 days."""
        for budget_id in self._spends.budgets():
            while keys := self._spends.take(budget_id):
                with suppress(FabricError):
                    await self.engine.record_spend(
                        budget_id, self.run_id, {}, acknowledged=keys, namespace=self.app.namespace
                    )

    async def _reserve(self, room: _Room, amounts: Stored, drawn: Stored, lasts_ms: int) -> bool:
        """Make a reservation, or take it up; True if an earlier release has settled it."""
        while True:
            answer = await self.engine.reserve_budget(
                room.budget_id,
                self.run_id,
                amounts,
                ttl_ms=lasts_ms,
                reservation_id=room.reservation_id,
                namespace=self.app.namespace,
                drawn=drawn,
                epoch=self.handle.fields.lease_epoch,
            )
            if not isinstance(answer, limit_answers.HardBreach):
                return isinstance(answer, limit_answers.AlreadyApplied)
            await self._handle_breach(room.budget, room.budget_id, answer, room.left)

    async def _spend_from(self, room: _Room, spent: Spent) -> None:
        """Spend from a reservation: count the amounts, and record that."""
        amounts = room.budget.amounts(spent)
        if self._counts_each_run():
            await self._report(room.budget, room.budget_id, amounts, uuid.uuid4().hex, room=room)
            room.draw(amounts)
            return
        label = f"{SPENT}{room.budget.name}"
        branch = await self.durable.begin_operation()
        _, occurrence = self.durable.next_occurrence(label)
        place = (f"{SPENT}{branch.name}{room.budget.name}", occurrence)
        await self._count_once(branch, place, label, room.budget, room.budget_id, amounts, room)

    async def _count_once(
        self,
        branch: Branch,
        place: Place,
        label: str,
        budget: Budget,
        budget_id: str,
        amounts: Stored,
        room: _Room | None = None,
    ) -> None:
        """Count amounts and record that, unless it is recorded. A spend that the function leaves may be counted."""
        durable, key = self.durable, self.key(f"{place[0]}#{place[1]}")
        if durable.ledger.find_left(place):
            await durable.wait_until_left(branch)
        if await durable.ledger.find_step(branch, place, None) is None:
            try:
                async with durable.parker.without_parking():
                    await self.reach_fault_point(label, "before_effect")
                    answer = await self._report(budget, budget_id, amounts, key, room=room, is_recorded=True)
                    await self.reach_fault_point(label, "after_effect")
                    result: Any = answer if room is None else (room.reservation_id, amounts)
                    await durable.record_step(place, json_bytes(result))
                    await self.reach_fault_point(label, "after_commit")
            except (asyncio.CancelledError, HandlerUnwound):
                durable.note_left(branch, place, is_gate=False)
                raise
            if room is not None:
                room.draw(amounts)
        self._spends.note_recorded(budget_id, key)

    async def _count_unawaited(self, room: _Room, reservation: Reservation) -> list[str]:
        """Count spends that were not awaited, once per place; return their keys."""
        keys: list[str] = []
        for number, spend in enumerate(reservation.unawaited):
            key = self.key(f"{room.reservation_id}|{number}")
            amounts = room.budget.amounts(spend.amounts)
            await self._report(room.budget, room.budget_id, amounts, key, room=room, is_recorded=True)
            room.draw(amounts)
            keys.append(key)
        return keys

    async def _refund(self, room: _Room) -> None:
        await self.engine.refund_budget(
            room.budget_id,
            room.reservation_id,
            execution_id=self.run_id,
            namespace=self.app.namespace,
            epoch=self.handle.fields.lease_epoch,
            acknowledged=self._spends.take(room.budget_id),
        )

    async def _report(
        self,
        budget: Budget,
        budget_id: str,
        amounts: Stored,
        key: str,
        *,
        room: _Room | None = None,
        is_recorded: bool = False,
    ) -> str:
        """Count amounts once for the key; one that the run records is kept until it is acknowledged."""
        while True:
            answer = await self.engine.record_spend(
                budget_id,
                self.run_id,
                amounts,
                idempotency_key=key,
                namespace=self.app.namespace,
                reservation_id=None if room is None else room.reservation_id,
                acknowledged=self._spends.take(budget_id) if is_recorded else None,
            )
            if not isinstance(answer, limit_answers.HardBreach):
                return type(answer).__name__
            await self._handle_breach(budget, budget_id, answer, amounts if room is None else room.uncovered(amounts))

    def _counts_each_run(self) -> bool:
        """True inside a step: each run of it spends. A run of an earlier release continues as it began."""
        return is_in_step() and not self.durable.branches.by_arrival

    def _gives_back(self, failure: BaseException) -> bool:
        """True if the block was left by the function, or the run is over; False if another attempt continues in it."""
        if self.durable.is_released or self.continues_elsewhere:
            return False
        return isinstance(failure, Exception | asyncio.CancelledError)  # not a simulated crash

    async def _handle_breach(
        self, budget: Budget, budget_id: str, breach: limit_answers.HardBreach, amounts: Mapping[str, int]
    ) -> None:
        """Raise, or suspend the run until the budget has capacity."""
        numbers = (breach.current_usage + breach.reserved, breach.hard_limit, amounts[breach.dimension])
        dimension, (used, limit, asked) = budget.display_amounts(breach.dimension, *numbers)
        if budget.on_hard != "suspend":
            raise BudgetExceeded(budget.name, dimension, used=used, limit=limit, asked=asked)
        if asked > limit:
            raise InvalidInput(f"budget {budget.name}: {dimension}={asked} is more than its limit of {limit}")
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


def _add(total: Stored, amounts: Stored) -> None:
    for name, amount in amounts.items():
        total[name] = total.get(name, 0) + amount
