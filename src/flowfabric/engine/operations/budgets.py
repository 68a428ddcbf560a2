"""Budgets: define them, report to them, reserve in them, give back and reset.

Reports to one budget are chained: fifty concurrent ones cost one load and one commit. A verb that makes room wakes
what waits for it.

A verb about a budget names its `namespace`. A verb of an execution finds the budget as its policy would: in the
execution's namespace (loaded, unless the caller says which it is), then in `default` unless `shared` is False.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.limits.unblocker import PAGE_SIZE, Unblocker
from flowfabric.engine.runtime.root_queue import Decide
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import limits as validate_limits
from flowfabric.handles import Handle
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.budget import Budget, BudgetReservation, BudgetSpend, UsageKey
from flowfabric.model.execution import Execution
from flowfabric.model.owned_id import DEFAULT_NAMESPACE, NamespacedId
from flowfabric.model.states import BlockingReason
from flowfabric.rules import validation
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import reservation as reservation_rules
from flowfabric.rules.limits import usage
from flowfabric.rules.limits.budget import BudgetState
from flowfabric.stores.queries import Read, Scan, Where

A = TypeVar("A")

MAX_LISTED = 1000
SUSPEND = "suspend"  # the hard action that puts the execution to sleep


class BudgetOperations(Unblocker):
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
        namespace: str = DEFAULT_NAMESPACE,
        declaration: str | None = None,
    ) -> limit_answers.BudgetDefined:
        """Define a budget of a namespace; a second definition changes nothing.

        `declaration` names the code that declares it, by a digest: another one than before changes the limits.
        """
        budget = validate_limits.build_owned_id(namespace, budget_id)
        texts = {
            "scope_type": scope_type,
            "scope_id": scope_id,
            "enforcement_mode": enforcement_mode,
            "on_hard_limit": on_hard_limit,
            "on_soft_limit": on_soft_limit,
        }
        for name, text in texts.items():
            validation.text(name, text, limit=validation.MAX_NAME_BYTES)
        definition = usage.BudgetDefinition(
            **texts,
            reset_interval_ms=validation.duration_ms("reset_interval_ms", reset_interval_ms, least=0),
            limits=validate_limits.build_limits(dimensions, hard_limits, soft_limits),
            declaration=validation.optional_text("declaration", declaration, limit=validation.MAX_NAME_BYTES),
        )
        answer: limit_answers.BudgetDefined = await self.budget_aggregates.decide_and_commit(
            budget, lambda sheet, now: usage.define_budget(sheet, definition, now)
        )
        if isinstance(answer, limit_answers.LimitsChanged):
            await self.unblock_budget_waiters(budget.id, namespace=budget.namespace)
        await self._unblock_redefined(budget, BlockingReason.WAITING_FOR_BUDGET)
        return answer

    async def change_budget_limits(
        self,
        budget_id: str,
        *,
        dimensions: Sequence[str],
        hard_limits: Sequence[int],
        soft_limits: Sequence[int],
        namespace: str = DEFAULT_NAMESPACE,
    ) -> limit_answers.LimitsChanged:
        """Raise or lower limits; what waits for room goes on when there is some."""
        budget = validate_limits.build_owned_id(namespace, budget_id)
        given = validate_limits.build_limits(dimensions, hard_limits, soft_limits)
        return await self._make_room(budget, lambda sheet, now: usage.change_limits(sheet, given, now))

    # -- reporting ------------------------------------------------------------------------------------------------

    async def report_usage(
        self,
        handle: Handle,
        budget_id: str,
        custom: Mapping[str, int],
        *,
        dedup_key: str | None = None,
        namespace: str | None = None,
        shared: bool = True,
    ) -> limit_answers.UsageResult:
        """Report as the worker that holds an execution; its lease is not asked for.

        When the budget's hard action is to suspend, a breach puts the execution to sleep until there is room.
        """
        holder = self.runtime.handle_fields(handle)
        amounts = validate_limits.amounts_by_name("custom", custom)
        own = await self._own(namespace, budget_id, holder.execution_id)
        answer, budget = await self._report(own, amounts, dedup_key, shared=shared)
        return await self._met_limit(answer, budget, amounts, handle)

    async def report_usage_admin(
        self,
        budget_id: str,
        *,
        dimensions: Sequence[str],
        deltas: Sequence[int],
        dedup_key: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
    ) -> limit_answers.UsageResult:
        """Report to a budget of a namespace without an execution, in the order given."""
        budget = validate_limits.build_owned_id(namespace, budget_id)
        amounts = validate_limits.amounts_in_order(dimensions, deltas)
        answer, _ = await self._report(budget, amounts, dedup_key, shared=False)
        return answer

    async def record_spend(
        self,
        budget_id: str,
        execution_id: str,
        deltas: Mapping[str, int],
        *,
        idempotency_key: str | None = None,
        handle: Handle | None = None,
        namespace: str | None = None,
        shared: bool = True,
    ) -> limit_answers.UsageResult:
        """Report for an execution's ledger, so that it can be given back.

        A `handle` lets a breach put the execution to sleep, when that is the budget's hard action.
        """
        execution = validate.validate_execution_id(execution_id)
        if handle is not None and self.runtime.handle_fields(handle).execution_id != execution:
            raise errors.InvalidInput("handle: of another execution")
        amounts = validate_limits.amounts_by_name("deltas", deltas)
        own = await self._own(namespace, budget_id, execution)
        answer, budget = await self._report(own, amounts, idempotency_key, execution, shared=shared)
        return await self._met_limit(answer, budget, amounts, handle)

    async def _report(
        self,
        own: NamespacedId,
        amounts: budget_rules.Amounts,
        key: str | None,
        execution_id: str | None = None,
        *,
        shared: bool,
    ) -> tuple[limit_answers.UsageResult, NamespacedId]:
        digest = usage.usage_key_digest(key) if validation.optional_text("dedup_key", key) and key else None
        ask = usage.UsageReport(amounts, digest, execution_id)

        def wants(budget: NamespacedId) -> tuple[Read, ...]:
            found: tuple[Read, ...] = () if digest is None else (Read(UsageKey, (*budget, digest)),)
            return found if execution_id is None else (*found, Read(BudgetSpend, (*budget, execution_id)))

        return await self._ask_owner(own, lambda sheet, now: usage.report_usage(sheet, ask, now), wants, shared=shared)

    async def release_budget(
        self, budget_id: str, execution_id: str, *, namespace: str | None = None, shared: bool = True
    ) -> limit_answers.BudgetReleased:
        """Give back everything that an execution spent since the last reset; again gives back nothing."""
        execution = validate.validate_execution_id(execution_id)
        own = await self._own(namespace, budget_id, execution)
        return await self._make_owner_room(
            own,
            lambda sheet, now: usage.release_spends(sheet, execution, now),
            lambda budget: (Read(BudgetSpend, (*budget, execution)),),
            shared=shared,
        )

    # -- whose budget ---------------------------------------------------------------------------------------------

    async def _own(self, namespace: str | None, budget_id: str, execution_id: str) -> NamespacedId:
        """The budget of the execution's own namespace; `default` for an execution that nobody knows."""
        if namespace is not None:
            return validate_limits.build_owned_id(namespace, budget_id)
        budget = validate_limits.validate_budget_id(budget_id)
        rows = (await self.runtime.load((Read(Execution, (execution_id,)),))).rows[0]
        return NamespacedId(rows[0].namespace if rows else DEFAULT_NAMESPACE, budget)

    async def _ask_owner(
        self,
        own: NamespacedId,
        decide: Decide[BudgetState, A],
        wants: Callable[[NamespacedId], tuple[Read, ...]] = lambda _: (),
        *,
        shared: bool,
    ) -> tuple[A, NamespacedId]:
        """Decide on the budget that an id stands for in a namespace; which one that was.

        It costs no further round trip, unless the budget is the shared one of another namespace: then one more load.
        """
        if own.is_shared or not shared:
            return await self.budget_aggregates.decide_and_commit(own, decide, wants(own)), own

        def decide_here(sheet: BudgetState, now: int) -> tuple[A | NamespacedId | errors.FabricError, BudgetState]:
            owner = sheet.resolve_owner(own.namespace)
            return decide(sheet, now) if owner == own else (owner, sheet)

        answer: A | NamespacedId = await self.budget_aggregates.decide_and_commit(
            own, decide_here, (*wants(own), Read(Budget, own.shared))
        )
        if not isinstance(answer, NamespacedId):
            return answer, own
        return await self.budget_aggregates.decide_and_commit(answer, decide, wants(answer)), answer

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
        namespace: str | None = None,
        shared: bool = True,
    ) -> limit_answers.Reserved | limit_answers.HardBreach | limit_answers.AlreadyApplied:
        """Keep room free for an execution, for `ttl_ms` at most; the same reservation again lasts that much longer."""
        execution = validate.validate_execution_id(execution_id)
        ask = reservation_rules.ReserveRequest(
            validate.optional_uuid("reservation_id", reservation_id) or self.runtime.minter.uuid(),
            execution,
            validate_limits.amounts_by_name("amounts", amounts),
            validation.duration_ms("ttl_ms", ttl_ms),
        )
        own = await self._own(namespace, budget_id, execution)
        answer: limit_answers.Reserved | limit_answers.HardBreach | limit_answers.AlreadyApplied
        answer, budget = await self._ask_owner(
            own,
            lambda sheet, now: reservation_rules.reserve(sheet, ask, now),
            lambda budget: (_settled(budget, ask.reservation_id),),
            shared=shared,
        )
        return await self._met_limit(answer, budget, ask.amounts, handle)

    async def settle_budget(
        self,
        budget_id: str,
        execution_id: str,
        reservation_id: str,
        amounts: Mapping[str, int],
        *,
        namespace: str | None = None,
        shared: bool = True,
    ) -> limit_answers.UsageResult:
        """Turn a reservation into what the execution really spent; again is `AlreadyApplied`."""
        execution = validate.validate_execution_id(execution_id)
        reservation = ids.parse_uuid(validation.text("reservation_id", reservation_id), "reservation_id")
        spent = validate_limits.amounts_by_name("amounts", amounts)
        own = await self._own(namespace, budget_id, execution)
        return await self._make_owner_room(
            own,
            lambda sheet, now: reservation_rules.settle(sheet, reservation, execution, spent, now),
            lambda budget: (_settled(budget, reservation), Read(BudgetSpend, (*budget, execution))),
            shared=shared,
        )

    async def reservation_owner(
        self, budget_id: str, reservation_id: str, *, namespace: str = DEFAULT_NAMESPACE
    ) -> str | None:
        """The execution that a reservation was made for; None when there is no such reservation (any more)."""
        budget = validate_limits.build_owned_id(namespace, budget_id)
        reservation = ids.parse_uuid(validation.text("reservation_id", reservation_id), "reservation_id")
        rows = (await self.runtime.load((Read(BudgetReservation, (*budget, reservation)),))).rows[0]
        return rows[0].execution_id if rows else None

    async def refund_budget(
        self,
        budget_id: str,
        reservation_id: str,
        *,
        execution_id: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        shared: bool = True,
    ) -> limit_answers.Refunded:
        """Give a reservation's room back unused; again gives back nothing.

        With `execution_id` a reservation of another execution is refused.
        """
        own = validate_limits.build_owned_id(namespace, budget_id)
        reservation = ids.parse_uuid(validation.text("reservation_id", reservation_id), "reservation_id")
        owner = None if execution_id is None else validate.validate_execution_id(execution_id)
        return await self._make_owner_room(
            own, lambda sheet, now: reservation_rules.refund(sheet, reservation, now, owner), shared=shared
        )

    # -- resetting ------------------------------------------------------------------------------------------------

    async def reset_budget(self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> limit_answers.BudgetReset:
        """Begin a new period; what waits for the budget goes on."""
        return await self._make_room(validate_limits.build_owned_id(namespace, budget_id), usage.reset_budget)

    async def reset_budget_if_due(self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> bool:
        """The sweep's form; False when it was not due (any more)."""
        return await self._make_room(NamespacedId(namespace, budget_id), usage.reset_if_due) is not None

    async def expire_reservations(self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> bool:
        """Let go of reservations whose time is over; True when there were some."""
        return await self._make_room(NamespacedId(namespace, budget_id), reservation_rules.expire_reservations)

    async def reconcile_budget_counters(self, partition: int) -> limit_answers.Reconciled:
        """Set or clear the note of breach on every budget of a partition that never resets."""
        place = validation.integer("partition", partition, least=0, most=self.runtime.partitions.budget - 1)
        processed = failed = 0
        after: NamespacedId | None = None
        while True:
            where = (Where("partition", "=", place), Where("defined", "=", True))
            rows: list[Budget] = await self.runtime.store.scan(
                Scan(Budget, where, ("namespace", "budget_id"), after, PAGE_SIZE)
            )
            keys = [NamespacedId(row.namespace, row.budget_id) for row in rows]
            marks = await asyncio.gather(
                *(self.budget_aggregates.decide_and_commit(key, usage.mark_breach) for key in keys),
                return_exceptions=True,
            )
            processed += sum(mark is True for mark in marks)
            failed += sum(isinstance(mark, errors.FabricError) for mark in marks)
            if len(rows) < PAGE_SIZE:
                return limit_answers.Reconciled(processed, failed)
            after = keys[-1]

    # -- reading --------------------------------------------------------------------------------------------------

    async def get_budget_status(
        self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE
    ) -> limit_answers.BudgetStatus:
        """A budget of a namespace for people."""
        budget = validate_limits.build_owned_id(namespace, budget_id)
        _, sheets = await self.budget_aggregates.load([budget])
        status = budget_rules.status(sheets[budget])
        if isinstance(status, errors.FabricError):
            raise status
        return status

    async def read_budget_usage_and_limits(
        self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Usage by dimension, and limits as `hard:<dimension>` and `soft:<dimension>`; empty when undefined."""
        budget = validate_limits.build_owned_id(namespace, budget_id)
        _, sheets = await self.budget_aggregates.load([budget])
        sheet = sheets[budget]
        if sheet.root is None or not sheet.root.defined:
            return {}, {}
        rows = budget_rules.in_definition_order(sheet.dimensions.values())
        declared = [row for row in rows if row.position is not None]
        bounds = {f"hard:{row.dimension}": row.hard_limit for row in declared}
        bounds |= {f"soft:{row.dimension}": row.soft_limit for row in declared}
        return {row.dimension: row.usage for row in rows if row.usage is not None}, bounds

    async def list_budgets(
        self, *, cursor: str | None = None, limit: int = 50, namespace: str = DEFAULT_NAMESPACE
    ) -> list[str]:
        """The ids of the defined budgets of a namespace, ascending, strictly after the cursor."""
        owner = validation.text("namespace", namespace, limit=validation.MAX_NAME_BYTES)
        wanted = min(validation.integer("limit", limit, least=0), MAX_LISTED)
        after = None if cursor is None else (validate_limits.validate_budget_id(cursor),)
        where = (Where("namespace", "=", owner), Where("defined", "=", True))
        scan = Scan(Budget, where, ("budget_id",), after, wanted)
        return [row.budget_id for row in await self.runtime.store.scan(scan)] if wanted else []

    # -- what a breach does ---------------------------------------------------------------------------------------

    async def suspend_for_budget(self, handle: Handle, need: budget_rules.BudgetNeed) -> bool:
        """Put an execution to sleep until the budget has room for what it needs; True when it sleeps."""
        raise NotImplementedError

    async def _met_limit(
        self, answer: A, budget: NamespacedId, amounts: budget_rules.Amounts, handle: Handle | None
    ) -> A:
        if not isinstance(answer, limit_answers.HardBreach) or answer.action != SUSPEND or handle is None:
            return answer
        need = budget_rules.BudgetNeed(budget.id, answer.dimension, dict(amounts)[answer.dimension], budget.namespace)
        parked = await self.suspend_for_budget(handle, need)
        if parked:  # room that was made between the breach and the sleep must not be slept through
            await self.unblock_budget_waiters(budget.id, namespace=budget.namespace)
        return msgspec.structs.replace(answer, parked=parked)

    async def _make_room(self, budget: NamespacedId, decide: Decide[BudgetState, A], wants: tuple[Read, ...] = ()) -> A:
        answer = await self.budget_aggregates.decide_and_commit(budget, decide, wants)
        await self.unblock_budget_waiters(budget.id, namespace=budget.namespace)
        return answer

    async def _make_owner_room(
        self,
        own: NamespacedId,
        decide: Decide[BudgetState, A],
        wants: Callable[[NamespacedId], tuple[Read, ...]] = lambda _: (),
        *,
        shared: bool,
    ) -> A:
        answer, budget = await self._ask_owner(own, decide, wants, shared=shared)
        await self.unblock_budget_waiters(budget.id, namespace=budget.namespace)
        return answer


def _settled(budget: NamespacedId, reservation_id: str) -> Read:
    return Read(UsageKey, (*budget, reservation_rules.settlement_digest(reservation_id)))
