"""Budgets: define them, report to them, reserve in them, give back and reset.

Reports to one budget are chained: fifty concurrent ones cost one load and one commit. A verb that makes room wakes
what waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from flowfabric import errors, ids
from flowfabric.engine import budget_intake, intake
from flowfabric.engine.chains import Decide
from flowfabric.engine.waiting import PAGE, Waiting
from flowfabric.handles import Handle
from flowfabric.model import verdicts
from flowfabric.model.budget import Budget, BudgetSpend, Reservation, UsageKey
from flowfabric.rules import budgets, limits, reserving, spending
from flowfabric.rules.budgets import BudgetSheet
from flowfabric.stores.base import Scan, Want, Where

A = TypeVar("A")

MOST_LISTED = 1000
SUSPEND = "suspend"  # the hard action that puts the execution to sleep


class Budgets(Waiting):
    """What can be done with a budget, by the names of the specification."""

    # -- defining -------------------------------------------------------------------------------------------------

    async def create_budget(
        self,
        budget_id: str,
        *,
        dimensions: Sequence[str],
        hard_limits: Sequence[int],
        soft_limits: Sequence[int],
        scope_type: str = "",
        scope_id: str = "",
        enforcement_mode: str = "",
        on_hard_limit: str = "",
        on_soft_limit: str = "",
        reset_interval_ms: int = 0,
    ) -> verdicts.BudgetCreated | verdicts.BudgetExists:
        """Define a budget; a second definition changes nothing."""
        budget = budget_intake.budget(budget_id)
        texts = {
            "scope_type": scope_type,
            "scope_id": scope_id,
            "enforcement_mode": enforcement_mode,
            "on_hard_limit": on_hard_limit,
            "on_soft_limit": on_soft_limit,
        }
        for name, text in texts.items():
            limits.text(name, text, limit=limits.MAX_NAME_BYTES)
        definition = spending.Definition(
            **texts,
            reset_interval_ms=limits.duration("reset_interval_ms", reset_interval_ms, least=0),
            limits=budget_intake.limits_of(dimensions, hard_limits, soft_limits),
        )
        return await self.budget_chains.ask(budget, lambda sheet, now: spending.create(sheet, definition, now))

    async def change_budget_limits(
        self, budget_id: str, *, dimensions: Sequence[str], hard_limits: Sequence[int], soft_limits: Sequence[int]
    ) -> verdicts.LimitsChanged:
        """Raise or lower limits; what waits for room goes on when there is some."""
        budget = budget_intake.budget(budget_id)
        given = budget_intake.limits_of(dimensions, hard_limits, soft_limits)
        return await self._make_room(budget, lambda sheet, now: spending.change_limits(sheet, given, now))

    # -- reporting ------------------------------------------------------------------------------------------------

    async def report_usage(
        self, handle: Handle, budget_id: str, custom: Mapping[str, int], *, dedup_key: str | None = None
    ) -> verdicts.Usage:
        """Report as the worker that holds an execution; its lease is not asked for.

        When the budget's hard action is to suspend, a breach puts the execution to sleep until there is room.
        """
        self.opened(handle)
        budget, amounts = budget_intake.budget(budget_id), budget_intake.amounts_by_name("custom", custom)
        answer = await self._report(budget, amounts, dedup_key)
        return await self._met_limit(answer, budget, amounts, handle)

    async def report_usage_admin(
        self, budget_id: str, *, dimensions: Sequence[str], deltas: Sequence[int], dedup_key: str | None = None
    ) -> verdicts.Usage:
        """Report without an execution, in the order given."""
        budget, amounts = budget_intake.budget(budget_id), budget_intake.amounts_in_order(dimensions, deltas)
        return await self._report(budget, amounts, dedup_key)

    async def record_spend(
        self,
        budget_id: str,
        execution_id: str,
        deltas: Mapping[str, int],
        *,
        idempotency_key: str | None = None,
        handle: Handle | None = None,
    ) -> verdicts.Usage:
        """Report for an execution's ledger, so that it can be given back.

        A `handle` lets a breach put the execution to sleep, when that is the budget's hard action.
        """
        execution = intake.execution(execution_id)
        if handle is not None and self.opened(handle).execution_id != execution:
            raise errors.InvalidInput("handle: of another execution")
        budget, amounts = budget_intake.budget(budget_id), budget_intake.amounts_by_name("deltas", deltas)
        answer = await self._report(budget, amounts, idempotency_key, execution)
        return await self._met_limit(answer, budget, amounts, handle)

    async def _report(
        self, budget: str, amounts: budgets.Amounts, key: str | None, execution_id: str | None = None
    ) -> verdicts.Usage:
        digest = spending.digest_of(key) if limits.optional_text("dedup_key", key) and key else None
        ask = spending.Report(amounts, digest, execution_id)
        wants: tuple[Want, ...] = () if digest is None else (Want(UsageKey, (budget, digest)),)
        if execution_id is not None:
            wants += (Want(BudgetSpend, (budget, execution_id)),)
        return await self.budget_chains.ask(budget, lambda sheet, now: spending.report(sheet, ask, now), wants)

    async def release_budget(self, budget_id: str, execution_id: str) -> verdicts.BudgetReleased:
        """Give back everything that an execution spent since the last reset; again gives back nothing."""
        budget = budget_intake.budget(budget_id)
        execution = intake.execution(execution_id)
        return await self._make_room(
            budget,
            lambda sheet, now: spending.release(sheet, execution, now),
            (Want(BudgetSpend, (budget, execution)),),
        )

    # -- reserving ------------------------------------------------------------------------------------------------

    async def reserve_budget(
        self,
        budget_id: str,
        execution_id: str,
        amounts: Mapping[str, int],
        *,
        ttl_ms: int,
        reservation_id: str | None = None,
        handle: Handle | None = None,
    ) -> verdicts.Reserved | verdicts.HardBreach | verdicts.AlreadyApplied:
        """Keep room free for an execution, for `ttl_ms` at most; the same reservation again lasts that much longer."""
        budget = budget_intake.budget(budget_id)
        ask = reserving.Promise(
            intake.optional_uuid("reservation_id", reservation_id) or self.minter.uuid(),
            intake.execution(execution_id),
            budget_intake.amounts_by_name("amounts", amounts),
            limits.duration("ttl_ms", ttl_ms),
        )
        answer: verdicts.Reserved | verdicts.HardBreach | verdicts.AlreadyApplied = await self.budget_chains.ask(
            budget, lambda sheet, now: reserving.reserve(sheet, ask, now), (_settled(budget, ask.reservation_id),)
        )
        return await self._met_limit(answer, budget, ask.amounts, handle)

    async def settle_budget(
        self, budget_id: str, execution_id: str, reservation_id: str, amounts: Mapping[str, int]
    ) -> verdicts.Usage:
        """Turn a reservation into what the execution really spent; again is `AlreadyApplied`."""
        budget = budget_intake.budget(budget_id)
        execution = intake.execution(execution_id)
        reservation = ids.parse_uuid(limits.text("reservation_id", reservation_id), "reservation_id")
        spent = budget_intake.amounts_by_name("amounts", amounts)
        return await self._make_room(
            budget,
            lambda sheet, now: reserving.settle(sheet, reservation, execution, spent, now),
            (_settled(budget, reservation), Want(BudgetSpend, (budget, execution))),
        )

    async def reserved_for(self, budget_id: str, reservation_id: str) -> str | None:
        """The execution that a reservation was made for; None when there is no such reservation (any more)."""
        budget = budget_intake.budget(budget_id)
        reservation = ids.parse_uuid(limits.text("reservation_id", reservation_id), "reservation_id")
        rows = (await self.load((Want(Reservation, (budget, reservation)),))).rows[0]
        return rows[0].execution_id if rows else None

    async def refund_budget(
        self, budget_id: str, reservation_id: str, *, execution_id: str | None = None
    ) -> verdicts.Refunded:
        """Give a reservation's room back unused; again gives back nothing.

        With `execution_id` a reservation of another execution is refused.
        """
        budget = budget_intake.budget(budget_id)
        reservation = ids.parse_uuid(limits.text("reservation_id", reservation_id), "reservation_id")
        owner = None if execution_id is None else intake.execution(execution_id)
        return await self._make_room(budget, lambda sheet, now: reserving.refund(sheet, reservation, now, owner))

    # -- resetting ------------------------------------------------------------------------------------------------

    async def reset_budget(self, budget_id: str) -> verdicts.BudgetReset:
        """Begin a new period; what waits for the budget goes on."""
        return await self._make_room(budget_intake.budget(budget_id), spending.reset)

    async def reset_budget_if_due(self, budget_id: str) -> bool:
        """The sweep's form; False when it was not due (any more)."""
        return await self._make_room(budget_id, spending.reset_if_due) is not None

    async def lapse_reservations(self, budget_id: str) -> bool:
        """Let go of reservations whose time is over; True when there were some."""
        return await self._make_room(budget_id, reserving.lapse)

    async def reconcile_budget_counters(self, partition: int) -> verdicts.Reconciled:
        """Set or clear the note of breach on every budget of a partition that never resets."""
        place = limits.integer("partition", partition, least=0, most=self.partitions.budget - 1)
        processed = failed = 0
        after: tuple[str] | None = None
        while True:
            where = (Where("partition", "=", place), Where("defined", "=", True))
            rows: list[Budget] = await self.store.scan(Scan(Budget, where, ("budget_id",), after, PAGE))
            marks = await asyncio.gather(
                *(self.budget_chains.ask(row.budget_id, spending.mark_breach) for row in rows), return_exceptions=True
            )
            processed += sum(mark is True for mark in marks)
            failed += sum(isinstance(mark, errors.FabricError) for mark in marks)
            if len(rows) < PAGE:
                return verdicts.Reconciled(processed, failed)
            after = (rows[-1].budget_id,)

    # -- reading --------------------------------------------------------------------------------------------------

    async def get_budget_status(self, budget_id: str) -> verdicts.BudgetStatus:
        """A budget for people."""
        budget = budget_intake.budget(budget_id)
        _, sheets = await self.budget_chains.look([budget])
        status = budgets.status(sheets[budget])
        if isinstance(status, errors.FabricError):
            raise status
        return status

    async def read_budget_usage_and_limits(self, budget_id: str) -> tuple[dict[str, int], dict[str, int]]:
        """Usage by dimension, and limits as `hard:<dimension>` and `soft:<dimension>`; empty when undefined."""
        budget = budget_intake.budget(budget_id)
        _, sheets = await self.budget_chains.look([budget])
        sheet = sheets[budget]
        if sheet.root is None or not sheet.root.defined:
            return {}, {}
        rows = budgets.in_order(sheet.dimensions.values())
        declared = [row for row in rows if row.position is not None]
        bounds = {f"hard:{row.dimension}": row.hard_limit for row in declared}
        bounds |= {f"soft:{row.dimension}": row.soft_limit for row in declared}
        return {row.dimension: row.usage for row in rows if row.usage is not None}, bounds

    async def list_budgets(self, *, cursor: str | None = None, limit: int = 50) -> list[str]:
        """The ids of defined budgets, ascending, strictly after the cursor."""
        wanted = min(limits.integer("limit", limit, least=0), MOST_LISTED)
        after = None if cursor is None else (budget_intake.budget(cursor),)
        scan = Scan(Budget, (Where("defined", "=", True),), ("budget_id",), after, wanted)
        return [row.budget_id for row in await self.store.scan(scan)] if wanted else []

    # -- what a breach does ---------------------------------------------------------------------------------------

    async def sleep_for_budget(self, handle: Handle, need: budgets.Need) -> bool:
        """Put an execution to sleep until the budget has room for what it needs; True when it sleeps."""
        raise NotImplementedError

    async def _met_limit(self, answer: A, budget_id: str, amounts: budgets.Amounts, handle: Handle | None) -> A:
        if not isinstance(answer, verdicts.HardBreach) or answer.action != SUSPEND or handle is None:
            return answer
        need = budgets.Need(budget_id, answer.dimension, dict(amounts)[answer.dimension])
        parked = await self.sleep_for_budget(handle, need)
        if parked:  # room that was made between the breach and the sleep must not be slept through
            await self.wake_budget(budget_id)
        return msgspec.structs.replace(answer, parked=parked)

    async def _make_room(self, budget_id: str, decide: Decide[BudgetSheet, A], wants: tuple[Want, ...] = ()) -> A:
        answer = await self.budget_chains.ask(budget_id, decide, wants)
        await self.wake_budget(budget_id)
        return answer


def _settled(budget_id: str, reservation_id: str) -> Want:
    return Want(UsageKey, (budget_id, reserving.settled_digest(reservation_id)))
