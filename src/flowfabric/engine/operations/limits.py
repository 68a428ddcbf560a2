"""Budgets and quota policies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.limits.aggregates import LimitAggregates
from flowfabric.engine.limits.budget_suspension import BudgetSuspender
from flowfabric.engine.limits.quota_slots import QuotaSlots
from flowfabric.engine.limits.unblocker import PAGE_SIZE, Unblocker
from flowfabric.engine.runtime.root_queue import Decide
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import limits as validate_limits
from flowfabric.handles import Handle
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.budget import Budget, BudgetReservation, BudgetSpend, UsageKey
from flowfabric.model.execution import Execution
from flowfabric.model.owned_id import DEFAULT_NAMESPACE, NamespacedId
from flowfabric.model.quota import QuotaPolicy
from flowfabric.model.states import BlockingReason
from flowfabric.rules import validation
from flowfabric.rules.limits import budget as budget_rules
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.limits import quota, usage
from flowfabric.rules.limits import reservation as reservation_rules
from flowfabric.rules.limits.budget import BudgetState
from flowfabric.stores.queries import Read, Scan, Where

A = TypeVar("A")
MAX_LISTED = 1000
SUSPEND = "suspend"  # the hard action that puts the execution to sleep
MAX_WINDOW_SECONDS = validation.MAX_DURATION_MS // 1000


class LimitOperations:
    """Operations on budgets and quota policies."""

    runtime: Runtime
    unblocker: Unblocker
    aggregates: LimitAggregates
    budget_suspender: BudgetSuspender
    quota_slots: QuotaSlots

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
        answer: limit_answers.BudgetDefined = await self.aggregates.budgets.decide_and_commit(
            budget, lambda sheet, now: usage.define_budget(sheet, definition, now)
        )
        if isinstance(answer, limit_answers.LimitsChanged):
            await self.unblocker.unblock_budget_waiters(budget.id, namespace=budget.namespace)
        await self.unblocker.unblock_redefined(budget, BlockingReason.WAITING_FOR_BUDGET)
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
        return await self.unblocker.change_budget(budget, lambda sheet, now: usage.change_limits(sheet, given, now))

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
        return await self._change_owner_budget(
            own,
            lambda sheet, now: usage.release_spends(sheet, execution, now),
            lambda budget: (Read(BudgetSpend, (*budget, execution)),),
            shared=shared,
        )

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
            return await self.aggregates.budgets.decide_and_commit(own, decide, wants(own)), own

        def decide_here(sheet: BudgetState, now: int) -> tuple[A | NamespacedId | errors.FabricError, BudgetState]:
            owner = sheet.resolve_owner(own.namespace)
            return decide(sheet, now) if owner == own else (owner, sheet)

        answer: A | NamespacedId = await self.aggregates.budgets.decide_and_commit(
            own, decide_here, (*wants(own), Read(Budget, own.shared))
        )
        if not isinstance(answer, NamespacedId):
            return answer, own
        return await self.aggregates.budgets.decide_and_commit(answer, decide, wants(answer)), answer

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
        return await self._change_owner_budget(
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
        return await self._change_owner_budget(
            own, lambda sheet, now: reservation_rules.refund(sheet, reservation, now, owner), shared=shared
        )

    async def reset_budget(self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> limit_answers.BudgetReset:
        """Begin a new period; what waits for the budget goes on."""
        return await self.unblocker.change_budget(
            validate_limits.build_owned_id(namespace, budget_id), usage.reset_budget
        )

    async def unblock_budget_waiters(self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> bool:
        """Unblock what waits for a budget, as far as it has capacity; True when something still waits."""
        budget = validate_limits.build_owned_id(namespace, budget_id)
        return await self.unblocker.unblock_budget_waiters(budget.id, namespace=budget.namespace)

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
                *(self.aggregates.budgets.decide_and_commit(key, usage.mark_breach) for key in keys),
                return_exceptions=True,
            )
            processed += sum(mark is True for mark in marks)
            failed += sum(isinstance(mark, errors.FabricError) for mark in marks)
            if len(rows) < PAGE_SIZE:
                return limit_answers.Reconciled(processed, failed)
            after = keys[-1]

    async def get_budget_status(
        self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE
    ) -> limit_answers.BudgetStatus:
        """A budget of a namespace for people."""
        budget = validate_limits.build_owned_id(namespace, budget_id)
        _, sheets = await self.aggregates.budgets.load([budget])
        status = budget_rules.status(sheets[budget])
        if isinstance(status, errors.FabricError):
            raise status
        return status

    async def read_budget_usage_and_limits(
        self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Usage by dimension, and limits as `hard:<dimension>` and `soft:<dimension>`; empty when undefined."""
        budget = validate_limits.build_owned_id(namespace, budget_id)
        _, sheets = await self.aggregates.budgets.load([budget])
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

    async def _met_limit(
        self, answer: A, budget: NamespacedId, amounts: budget_rules.Amounts, handle: Handle | None
    ) -> A:
        if not isinstance(answer, limit_answers.HardBreach) or answer.action != SUSPEND or handle is None:
            return answer
        need = budget_rules.BudgetNeed(budget.id, answer.dimension, dict(amounts)[answer.dimension], budget.namespace)
        parked = await self.budget_suspender.suspend_for_budget(handle, need)
        if parked:  # room that was made between the breach and the sleep must not be slept through
            await self.unblocker.unblock_budget_waiters(budget.id, namespace=budget.namespace)
        return msgspec.structs.replace(answer, parked=parked)

    async def _change_owner_budget(
        self,
        own: NamespacedId,
        decide: Decide[BudgetState, A],
        wants: Callable[[NamespacedId], tuple[Read, ...]] = lambda _: (),
        *,
        shared: bool,
    ) -> A:
        answer, budget = await self._ask_owner(own, decide, wants, shared=shared)
        await self.unblocker.unblock_budget_waiters(budget.id, namespace=budget.namespace)
        return answer

    async def create_quota_policy(
        self,
        quota_policy_id: str,
        *,
        window_seconds: int,
        max_requests_per_window: int,
        max_concurrent: int,
        jitter_ms: int = 0,
        namespace: str = DEFAULT_NAMESPACE,
    ) -> limit_answers.QuotaPolicyCreated | limit_answers.QuotaPolicyExists:
        """Define a policy of a namespace; 0 is no limit. A second definition changes nothing."""
        policy = _owned(namespace, quota_policy_id)
        numbers = limit_answers.QuotaLimits(
            validation.integer("window_seconds", window_seconds, least=0, most=MAX_WINDOW_SECONDS),
            validation.integer("max_requests_per_window", max_requests_per_window, least=0),
            validation.integer("max_concurrent", max_concurrent, least=0),
            validation.duration_ms("jitter_ms", jitter_ms, least=0),
        )
        answer: (
            limit_answers.QuotaPolicyCreated | limit_answers.QuotaPolicyExists
        ) = await self.aggregates.quotas.decide_and_commit(
            policy, lambda sheet, now: quota.define_policy(sheet, numbers, now)
        )
        await self.unblocker.unblock_redefined(policy, BlockingReason.WAITING_FOR_QUOTA)
        return answer

    async def read_quota_policy_limits(
        self, quota_policy_id: str, *, namespace: str = DEFAULT_NAMESPACE
    ) -> limit_answers.QuotaLimits | None:
        """The four numbers of a policy of a namespace; None when undefined."""
        loaded = await self.runtime.load((Read(QuotaPolicy, _owned(namespace, quota_policy_id)),))
        numbers = quota.limits_of(loaded.rows[0][0] if loaded.rows[0] else None)
        if isinstance(numbers, errors.FabricError):
            raise numbers
        return numbers

    async def check_admission(
        self,
        quota_policy_id: str,
        execution_id: str,
        *,
        dimension: str = "",
        window_seconds: int,
        rate_limit: int,
        concurrency_cap: int,
        jitter_ms: int = 0,
    ) -> limit_answers.AdmissionResult:
        """Admit an execution by the numbers given, whatever the policy says and whether or not it exists.

        The policy is the one that the id stands for in the execution's namespace.
        """
        policy = _policy_id(quota_policy_id)
        execution = validate.validate_execution_id(execution_id)
        ask = quota.AdmissionRequest(
            execution_id=execution,
            window_ms=1000 * validation.integer("window_seconds", window_seconds, least=0, most=MAX_WINDOW_SECONDS),
            rate_limit=validation.integer("rate_limit", rate_limit, least=0),
            concurrency_cap=validation.integer("concurrency_cap", concurrency_cap, least=0),
            jitter_ms=validation.duration_ms("jitter_ms", jitter_ms, least=0),
            dimension=validation.text("dimension", dimension, limit=validation.MAX_NAME_BYTES)
            or quota.DEFAULT_DIMENSION,
            call_id=self.runtime.minter.change_id(),
            chance=self.runtime.random(),
        )
        row, owner = await self._policy_for(execution, policy)
        verdict, _ = await self.quota_slots.check(owner, msgspec.structs.replace(ask, life=quota.life_of(row)))
        return verdict

    async def _policy_for(self, execution_id: str, policy: str) -> tuple[Execution | None, NamespacedId]:
        """An execution, and the policy that an id stands for in its namespace."""
        shared = NamespacedId(DEFAULT_NAMESPACE, policy)
        loaded = await self.runtime.load((Read(Execution, (execution_id,)), Read(QuotaPolicy, shared)))
        row: Execution | None = loaded.rows[0][0] if loaded.rows[0] else None
        own = shared if row is None else NamespacedId(row.namespace, policy)
        roots = {shared: loaded.rows[1][0] if loaded.rows[1] else None}
        if not own.is_shared:
            found = (await self.runtime.load((Read(QuotaPolicy, own),))).rows[0]
            roots[own] = found[0] if found else None
        return row, owner_rules.resolve_owner(own.namespace, policy, roots)

    async def release_admission(self, quota_policy_id: str, execution_id: str) -> limit_answers.AdmissionReleased:
        """Give an execution's slot back, whoever got it; again is the same."""
        policy = _policy_id(quota_policy_id)
        execution = validate.validate_execution_id(execution_id)
        rows = (await self.runtime.load((Read(Execution, (execution,)),))).rows[0]
        await self.quota_slots.release_held(rows[0].namespace if rows else DEFAULT_NAMESPACE, policy, execution)
        return limit_answers.AdmissionReleased()

    async def reconcile_quota_counters(self, partition: int) -> limit_answers.Reconciled:
        """Trim windows, drop dead slots and recount, for every policy of a partition."""
        place = validation.integer("partition", partition, least=0, most=self.runtime.partitions.quota - 1)
        processed = failed = 0
        after: NamespacedId | None = None
        while True:
            scan = Scan(
                QuotaPolicy, (Where("partition", "=", place),), ("namespace", "quota_policy_id"), after, PAGE_SIZE
            )
            rows: list[QuotaPolicy] = await self.runtime.store.scan(scan)
            moves = await asyncio.gather(
                *(self.quota_slots.reconcile(row.quota_policy_id, namespace=row.namespace) for row in rows),
                return_exceptions=True,
            )
            processed += sum(moved is True for moved in moves)
            failed += sum(isinstance(moved, errors.FabricError) for moved in moves)
            if len(rows) < PAGE_SIZE:
                return limit_answers.Reconciled(processed, failed)
            after = NamespacedId(rows[-1].namespace, rows[-1].quota_policy_id)


def _settled(budget: NamespacedId, reservation_id: str) -> Read:
    return Read(UsageKey, (*budget, reservation_rules.settlement_digest(reservation_id)))


def _owned(namespace: str, text: str) -> NamespacedId:
    return NamespacedId(validation.text("namespace", namespace, limit=validation.MAX_NAME_BYTES), _policy_id(text))


def _policy_id(text: str) -> str:
    return ids.parse_uuid(validation.text("quota_policy_id", text), "quota_policy_id")
