"""Limit operations: budgets and quota policies."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.engine.limits.aggregates import LimitAggregates
from flowfabric.engine.limits.budget_suspension import BudgetSuspender
from flowfabric.engine.limits.quota_slots import QuotaSlots
from flowfabric.engine.limits.unblocker import PAGE_SIZE, Unblocker
from flowfabric.engine.runtime.aggregate_repository import Decide
from flowfabric.engine.runtime.read_set import ReadSet, load_one
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import limits as validate_limits
from flowfabric.handles import Handle
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.execution import Execution
from flowfabric.model.limits.budget import Budget, BudgetReservation, BudgetSpend, UsageKey
from flowfabric.model.limits.quota import QuotaPolicy
from flowfabric.model.security.owned_id import DEFAULT_NAMESPACE, NamespacedId
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
SUSPEND = "suspend"  # the hard action that suspends the execution
MAX_WINDOW_SECONDS = validation.MAX_DURATION_MS // 1000


class BudgetReader(Protocol):
    """The part of an engine that reads budgets, in the store or on a server."""

    async def get_budget_status(
        self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE
    ) -> limit_answers.BudgetStatus: ...

    async def read_budget_usage_and_limits(
        self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return usage by dimension, and limits as `hard:<dimension>` and `soft:<dimension>`; empty if undefined."""
        try:
            status = await self.get_budget_status(budget_id, namespace=namespace)
        except errors.NotFound:
            return {}, {}
        bounds = {f"hard:{dimension}": limit for dimension, limit in status.hard_limits.items()}
        return status.usage, bounds | {f"soft:{dimension}": limit for dimension, limit in status.soft_limits.items()}


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

        `declaration` is a digest of the code that declares it: if it differs from the stored one, the limits change.
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
            validation.name(name, text)
        definition = usage.BudgetDefinition(
            **texts,
            reset_interval_ms=validation.duration_ms("reset_interval_ms", reset_interval_ms, least=0),
            limits=validate_limits.build_limits(dimensions, hard_limits, soft_limits),
            declaration=validation.optional_name("declaration", declaration),
        )
        answer: limit_answers.BudgetDefined = await self.aggregates.budgets.decide_and_commit(
            budget, lambda state, now: usage.define_budget(state, definition, now)
        )
        if isinstance(answer, limit_answers.LimitsChanged):
            await self.unblocker.unblock_budget_waiters(budget)
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
        """Raise or lower limits, and unblock executions that now have capacity."""
        budget = validate_limits.build_owned_id(namespace, budget_id)
        limits = validate_limits.build_limits(dimensions, hard_limits, soft_limits)
        return await self.unblocker.change_budget(budget, lambda state, now: usage.change_limits(state, limits, now))

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
        """Report usage for the execution of a handle; the lease is not checked.

        If the budget's hard action is to suspend, a breach suspends the execution until there is capacity.
        """
        holder = self.runtime.handle_fields(handle)
        amounts = validate_limits.amounts_by_name("custom", custom)
        own = await self._own_budget(namespace, budget_id, holder.execution_id)
        answer, budget = await self._report(own, amounts, dedup_key, shared=shared)
        return await self._suspend_on_breach(answer, budget, amounts, handle)

    async def report_usage_admin(
        self,
        budget_id: str,
        *,
        dimensions: Sequence[str],
        deltas: Sequence[int],
        dedup_key: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
    ) -> limit_answers.UsageResult:
        """Report usage to a budget of a namespace without an execution, in the order given."""
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
        reservation_id: str | None = None,
        acknowledged: Sequence[str] | None = None,
    ) -> limit_answers.UsageResult:
        """Report usage and record it for the execution, so that it can be released.

        With a `handle`, a breach suspends the execution if that is the budget's hard action. With `reservation_id` the
        usage is taken from that reservation first. `acknowledged` are keys of earlier reports that the caller has
        recorded; a caller that acknowledges its reports has its key kept until then, for 30 days at most.
        """
        execution = validate.validate_execution_id(execution_id)
        if handle is not None and self.runtime.handle_fields(handle).execution_id != execution:
            raise errors.InvalidInput("handle: of another execution")
        amounts = validate_limits.amounts_by_name("deltas", deltas)
        reservation = validate.optional_uuid("reservation_id", reservation_id)
        recorded = None if acknowledged is None else validate_limits.key_digests(acknowledged)
        own = await self._own_budget(namespace, budget_id, execution)
        answer, budget = await self._report(
            own, amounts, idempotency_key, execution, reservation_id=reservation, acknowledged=recorded, shared=shared
        )
        return await self._suspend_on_breach(answer, budget, amounts, handle)

    async def _report(
        self,
        own: NamespacedId,
        amounts: budget_rules.Amounts,
        key: str | None,
        execution_id: str | None = None,
        *,
        shared: bool,
        reservation_id: str | None = None,
        acknowledged: tuple[str, ...] | None = None,
    ) -> tuple[limit_answers.UsageResult, NamespacedId]:
        digest = usage.usage_key_digest(key) if validation.optional_text("dedup_key", key) and key else None
        report = usage.UsageReport(amounts, digest, execution_id, reservation_id, acknowledged)

        def reads(budget: NamespacedId) -> tuple[Read, ...]:
            digests = (acknowledged or ()) if digest is None else (digest, *(acknowledged or ()))
            wanted = [Read(UsageKey, (*budget, one)) for one in digests]
            if execution_id is not None:
                wanted.append(Read(BudgetSpend, (*budget, execution_id)))
            if reservation_id is not None:
                wanted.append(Read(BudgetReservation, (*budget, reservation_id)))
            return tuple(wanted)

        return await self._decide_on_owner(
            own, lambda state, now: usage.report_usage(state, report, now), reads, shared=shared
        )

    async def release_budget(
        self, budget_id: str, execution_id: str, *, namespace: str | None = None, shared: bool = True
    ) -> limit_answers.BudgetReleased:
        """Release everything that an execution has spent since the last reset; a repeated call releases nothing."""
        execution = validate.validate_execution_id(execution_id)
        own = await self._own_budget(namespace, budget_id, execution)
        return await self._change_owner_budget(
            own,
            lambda state, now: usage.release_spends(state, execution, now),
            lambda budget: (Read(BudgetSpend, (*budget, execution)),),
            shared=shared,
        )

    async def _own_budget(self, namespace: str | None, budget_id: str, execution_id: str) -> NamespacedId:
        """Return the budget in the execution's namespace; in `default` if there is no such execution."""
        if namespace is not None:
            return validate_limits.build_owned_id(namespace, budget_id)
        budget = validate.parse_uuid("budget_id", budget_id)
        return NamespacedId(await self._namespace_of(execution_id), budget)

    async def _namespace_of(self, execution_id: str) -> str:
        row = await load_one(self.runtime, Execution, execution_id)
        return DEFAULT_NAMESPACE if row is None else row.namespace

    async def _decide_on_owner(
        self,
        own: NamespacedId,
        decide: Decide[BudgetState, A],
        reads: Callable[[NamespacedId], tuple[Read, ...]] = lambda _: (),
        *,
        shared: bool,
    ) -> tuple[A, NamespacedId]:
        """Decide on the budget that an id resolves to in a namespace, and return which one that was.

        Only a budget that is shared by another namespace costs a further load.
        """
        if own.is_shared or not shared:
            return await self.aggregates.budgets.decide_and_commit(own, decide, reads(own)), own

        def decide_if_own(state: BudgetState, now: int) -> tuple[A | NamespacedId | errors.FabricError, BudgetState]:
            owner = state.resolve_owner(own.namespace)
            return decide(state, now) if owner == own else (owner, state)

        answer: A | NamespacedId = await self.aggregates.budgets.decide_and_commit(
            own, decide_if_own, (*reads(own), Read(Budget, own.shared))
        )
        if not isinstance(answer, NamespacedId):
            return answer, own
        return await self.aggregates.budgets.decide_and_commit(answer, decide, reads(answer)), answer

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
        drawn: Mapping[str, int] | None = None,
        epoch: int = 0,
    ) -> limit_answers.Reserved | limit_answers.HardBreach | limit_answers.AlreadyApplied:
        """Reserve capacity for an execution for `ttl_ms`; repeating the reservation extends it.

        `drawn` is what the execution has spent from it before: if the reservation has ended meanwhile, only the rest is
        reserved again. `epoch` is that of the caller's lease.
        """
        execution = validate.validate_execution_id(execution_id)
        request = reservation_rules.ReserveRequest(
            validate.optional_uuid("reservation_id", reservation_id) or self.runtime.minter.uuid(),
            execution,
            validate_limits.amounts_by_name("amounts", amounts),
            validation.duration_ms("ttl_ms", ttl_ms),
            validate_limits.amounts_by_name("drawn", {} if drawn is None else drawn),
            validation.integer("epoch", epoch, least=0),
        )
        own = await self._own_budget(namespace, budget_id, execution)
        answer: limit_answers.Reserved | limit_answers.HardBreach | limit_answers.AlreadyApplied
        answer, budget = await self._decide_on_owner(
            own,
            lambda state, now: reservation_rules.reserve(state, request, now),
            lambda budget: _reservation_reads(budget, request.reservation_id),
            shared=shared,
        )
        return await self._suspend_on_breach(answer, budget, request.amounts, handle)

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
        """Replace a reservation by the actual usage; a repeated call is `AlreadyApplied`."""
        execution = validate.validate_execution_id(execution_id)
        reservation = validate.parse_uuid("reservation_id", reservation_id)
        spent = validate_limits.amounts_by_name("amounts", amounts)
        own = await self._own_budget(namespace, budget_id, execution)
        return await self._change_owner_budget(
            own,
            lambda state, now: reservation_rules.settle(state, reservation, execution, spent, now),
            lambda budget: (*_reservation_reads(budget, reservation), Read(BudgetSpend, (*budget, execution))),
            shared=shared,
        )

    async def reservation_owner(
        self, budget_id: str, reservation_id: str, *, namespace: str = DEFAULT_NAMESPACE
    ) -> str | None:
        """Return the execution that a reservation belongs to; None if there is no such reservation."""
        budget = validate_limits.build_owned_id(namespace, budget_id)
        reservation = validate.parse_uuid("reservation_id", reservation_id)
        row = await load_one(self.runtime, BudgetReservation, *budget, reservation)
        return None if row is None else row.execution_id

    async def refund_budget(
        self,
        budget_id: str,
        reservation_id: str,
        *,
        execution_id: str | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        shared: bool = True,
        epoch: int | None = None,
        acknowledged: Sequence[str] = (),
    ) -> limit_answers.Refunded:
        """Release what is left of a reservation; a repeated call releases nothing.

        With `execution_id`, a reservation of another execution is refused. With `epoch`, the caller's lease, one that a
        later lease has taken up stays. `acknowledged` are keys of reports that the caller has recorded.
        """
        own = validate_limits.build_owned_id(namespace, budget_id)
        reservation = validate.parse_uuid("reservation_id", reservation_id)
        owner = None if execution_id is None else validate.validate_execution_id(execution_id)
        lease_epoch = None if epoch is None else validation.integer("epoch", epoch, least=0)
        recorded = validate_limits.key_digests(acknowledged)
        return await self._change_owner_budget(
            own,
            lambda state, now: reservation_rules.refund(
                state, reservation, now, owner, epoch=lease_epoch, acknowledged=recorded
            ),
            lambda budget: (
                *_reservation_reads(budget, reservation),
                *(Read(UsageKey, (*budget, digest)) for digest in recorded),
            ),
            shared=shared,
        )

    async def reset_budget(self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> limit_answers.BudgetReset:
        """Begin a new period and unblock the executions that wait for the budget."""
        return await self.unblocker.change_budget(
            validate_limits.build_owned_id(namespace, budget_id), usage.reset_budget
        )

    async def unblock_budget_waiters(self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> bool:
        """Unblock executions that wait for a budget, as far as it has capacity; True if some still wait."""
        budget = validate_limits.build_owned_id(namespace, budget_id)
        return await self.unblocker.unblock_budget_waiters(budget)

    async def reconcile_budget_counters(self, partition: int) -> limit_answers.Reconciled:
        """Set or clear the breach mark of every budget of a partition that never resets."""
        index = validation.integer("partition", partition, least=0, most=self.runtime.partitions.budget - 1)
        where = (Where("partition", "=", index), Where("defined", "=", True))
        return await self._reconcile(
            Scan(Budget, where, ("namespace", "budget_id"), limit=PAGE_SIZE),
            lambda key: self.aggregates.budgets.decide_and_commit(key, usage.mark_breach),
        )

    async def _reconcile(
        self, scan: Scan, reconcile: Callable[[NamespacedId], Awaitable[bool]]
    ) -> limit_answers.Reconciled:
        """Reconcile the limits of a scan by namespace and id, page by page; a failure does not stop the others."""
        processed = failed = 0
        while True:
            rows = await self.runtime.store.scan(scan)
            keys = [NamespacedId(*(getattr(row, name) for name in scan.order)) for row in rows]
            results = await asyncio.gather(*map(reconcile, keys), return_exceptions=True)
            processed += sum(result is True for result in results)
            failed += sum(isinstance(result, errors.FabricError) for result in results)
            if len(rows) < scan.limit:
                return limit_answers.Reconciled(processed, failed)
            scan = msgspec.structs.replace(scan, after=keys[-1])

    async def get_budget_status(
        self, budget_id: str, *, namespace: str = DEFAULT_NAMESPACE
    ) -> limit_answers.BudgetStatus:
        """Return a budget of a namespace for display."""
        budget = validate_limits.build_owned_id(namespace, budget_id)
        _, states = await self.aggregates.budgets.load([budget])
        return validate.value_or_raise(budget_rules.status(states[budget]))

    read_budget_usage_and_limits = BudgetReader.read_budget_usage_and_limits

    async def list_budgets(
        self, *, cursor: str | None = None, limit: int = 50, namespace: str = DEFAULT_NAMESPACE
    ) -> list[str]:
        """List the ids of the defined budgets of a namespace, ascending, after the cursor."""
        owner = validation.name("namespace", namespace)
        size = min(validation.integer("limit", limit, least=0), MAX_LISTED)
        after = None if cursor is None else (validate.parse_uuid("budget_id", cursor),)
        where = (Where("namespace", "=", owner), Where("defined", "=", True))
        scan = Scan(Budget, where, ("budget_id",), after, size)
        return [row.budget_id for row in await self.runtime.store.scan(scan)] if size else []

    async def _suspend_on_breach(
        self, answer: A, budget: NamespacedId, amounts: budget_rules.Amounts, handle: Handle | None
    ) -> A:
        if not isinstance(answer, limit_answers.HardBreach) or answer.action != SUSPEND or handle is None:
            return answer
        need = budget_rules.BudgetNeed(budget.id, answer.dimension, dict(amounts)[answer.dimension], budget.namespace)
        parked = await self.budget_suspender.suspend_for_budget(handle, need)
        if parked:  # capacity that was released between the breach and the suspension must not be missed
            await self.unblocker.unblock_budget_waiters(budget)
        return msgspec.structs.replace(answer, parked=parked)

    async def _change_owner_budget(
        self,
        own: NamespacedId,
        decide: Decide[BudgetState, A],
        reads: Callable[[NamespacedId], tuple[Read, ...]] = lambda _: (),
        *,
        shared: bool,
    ) -> A:
        answer, budget = await self._decide_on_owner(own, decide, reads, shared=shared)
        await self.unblocker.unblock_budget_waiters(budget)
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
        """Define a policy of a namespace; 0 means no limit. A second definition changes nothing."""
        policy = _validate_policy_id(namespace, quota_policy_id)
        limits = limit_answers.QuotaLimits(
            validation.integer("window_seconds", window_seconds, least=0, most=MAX_WINDOW_SECONDS),
            validation.integer("max_requests_per_window", max_requests_per_window, least=0),
            validation.integer("max_concurrent", max_concurrent, least=0),
            validation.duration_ms("jitter_ms", jitter_ms, least=0),
        )
        answer: (
            limit_answers.QuotaPolicyCreated | limit_answers.QuotaPolicyExists
        ) = await self.aggregates.quotas.decide_and_commit(
            policy, lambda state, now: quota.define_policy(state, limits, now)
        )
        await self.unblocker.unblock_redefined(policy, BlockingReason.WAITING_FOR_QUOTA)
        return answer

    async def read_quota_policy_limits(
        self, quota_policy_id: str, *, namespace: str = DEFAULT_NAMESPACE
    ) -> limit_answers.QuotaLimits | None:
        """Return the limits of a policy of a namespace; None if it is undefined."""
        policy = await load_one(self.runtime, QuotaPolicy, *_validate_policy_id(namespace, quota_policy_id))
        return validate.value_or_raise(quota.limits_of(policy))

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
        """Admit an execution by the given limits, whether or not the policy exists and whatever its own limits are.

        The policy is the one that the id resolves to in the execution's namespace.
        """
        policy = validate.parse_uuid("quota_policy_id", quota_policy_id)
        execution = validate.validate_execution_id(execution_id)
        request = quota.AdmissionRequest(
            execution_id=execution,
            window_ms=1000 * validation.integer("window_seconds", window_seconds, least=0, most=MAX_WINDOW_SECONDS),
            rate_limit=validation.integer("rate_limit", rate_limit, least=0),
            concurrency_cap=validation.integer("concurrency_cap", concurrency_cap, least=0),
            jitter_ms=validation.duration_ms("jitter_ms", jitter_ms, least=0),
            dimension=validation.name("dimension", dimension) or quota.DEFAULT_DIMENSION,
            call_id=self.runtime.minter.change_id(),
            chance=self.runtime.random(),
        )
        row, owner = await self._load_policy_owner(execution, policy)
        verdict, _ = await self.quota_slots.check(owner, msgspec.structs.replace(request, life=quota.life_of(row)))
        return verdict

    async def _load_policy_owner(self, execution_id: str, policy: str) -> tuple[Execution | None, NamespacedId]:
        """Return an execution, and the policy that an id resolves to in its namespace."""
        shared = NamespacedId(DEFAULT_NAMESPACE, policy)
        reads = ReadSet()
        execution, shared_policy = reads.one(Execution, execution_id), reads.one(QuotaPolicy, *shared)
        rows = (await self.runtime.load(reads)).rows
        row = execution(rows)
        own = shared if row is None else NamespacedId(row.namespace, policy)
        policies = {shared: shared_policy(rows)}
        if not own.is_shared:
            policies[own] = await load_one(self.runtime, QuotaPolicy, *own)
        return row, owner_rules.resolve_owner(own.namespace, policy, policies)

    async def release_admission(self, quota_policy_id: str, execution_id: str) -> limit_answers.AdmissionReleased:
        """Release an execution's slot, whichever call acquired it; a repeated call changes nothing."""
        policy = validate.parse_uuid("quota_policy_id", quota_policy_id)
        execution = validate.validate_execution_id(execution_id)
        await self.quota_slots.release_held(await self._namespace_of(execution), policy, execution)
        return limit_answers.AdmissionReleased()

    async def reconcile_quota_counters(self, partition: int) -> limit_answers.Reconciled:
        """Trim windows, delete dead slots and recount, for every policy of a partition."""
        index = validation.integer("partition", partition, least=0, most=self.runtime.partitions.quota - 1)
        where = (Where("partition", "=", index),)
        return await self._reconcile(
            Scan(QuotaPolicy, where, ("namespace", "quota_policy_id"), limit=PAGE_SIZE), self.quota_slots.reconcile
        )


def _reservation_reads(budget: NamespacedId, reservation_id: str) -> tuple[Read, ...]:
    digest = reservation_rules.settlement_digest(reservation_id)
    return Read(BudgetReservation, (*budget, reservation_id)), Read(UsageKey, (*budget, digest))


def _validate_policy_id(namespace: str, policy_id: str) -> NamespacedId:
    owner = validation.name("namespace", namespace)
    return NamespacedId(owner, validate.parse_uuid("quota_policy_id", policy_id))
