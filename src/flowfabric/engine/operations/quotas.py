"""Quota policies: define them, admit by them, release, reconcile."""

from __future__ import annotations

import asyncio

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.limits.unblocker import PAGE_SIZE, Unblocker
from flowfabric.engine.runtime.outbox_relay import OutboxRelay
from flowfabric.engine.validation import execution as validate
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.execution import Execution
from flowfabric.model.outbox import OutboxMessage
from flowfabric.model.owned_id import DEFAULT_NAMESPACE, NamespacedId
from flowfabric.model.quota import QuotaPolicy, QuotaRequest, QuotaSlot
from flowfabric.model.states import BlockingReason, LifecyclePhase
from flowfabric.rules import validation
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.quota import QuotaState
from flowfabric.stores.queries import Read, Scan, Where

MAX_WINDOW_SECONDS = validation.MAX_DURATION_MS // 1000


class QuotaOperations(Unblocker, OutboxRelay):
    """What can be done with a quota policy, by the names of the specification."""

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
        ) = await self.quota_aggregates.decide_and_commit(
            policy, lambda sheet, now: quota.define_policy(sheet, numbers, now)
        )
        await self._unblock_redefined(policy, BlockingReason.WAITING_FOR_QUOTA)
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
        verdict, _ = await self._check(owner, msgspec.structs.replace(ask, life=quota.life_of(row)))
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

    async def _check(
        self, policy: NamespacedId, ask: quota.AdmissionRequest
    ) -> tuple[limit_answers.AdmissionResult, QuotaRequest | None]:
        """The verdict, and the execution's request that stood in the window until then."""

        def decide(
            sheet: QuotaState, now: int
        ) -> tuple[tuple[limit_answers.AdmissionResult, QuotaRequest | None] | errors.FabricError, QuotaState]:
            verdict, after = quota.admit(sheet, ask, now)
            if isinstance(verdict, errors.FabricError):
                return verdict, after
            return (verdict, sheet.requests.get((ask.dimension, ask.execution_id))), after

        return await self.quota_aggregates.decide_and_commit(policy, decide)

    async def release_admission(self, quota_policy_id: str, execution_id: str) -> limit_answers.AdmissionReleased:
        """Give an execution's slot back, whoever got it; again is the same."""
        policy = _policy_id(quota_policy_id)
        execution = validate.validate_execution_id(execution_id)
        rows = (await self.runtime.load((Read(Execution, (execution,)),))).rows[0]
        await self._release_held(rows[0].namespace if rows else DEFAULT_NAMESPACE, policy, execution)
        return limit_answers.AdmissionReleased()

    async def _release_held(self, namespace: str, policy: str, execution_id: str, *, life: int | None = None) -> None:
        """Give back what an execution of a namespace holds, in its own policy or in the shared one of that id."""
        held = owner_rules.candidates(namespace, (policy,))
        if len(held) > 1:
            loaded = await self.runtime.load([Read(QuotaSlot, (*one, execution_id)) for one in held])
            held = [one for one, found in zip(held, loaded.rows, strict=True) if found]
        await asyncio.gather(*(self._release(one, execution_id, life=life) for one in held))

    async def _release(
        self, policy: NamespacedId, execution_id: str, *, life: int | None = None, admitted: int | None = None
    ) -> limit_answers.AdmissionReleased:
        answer = await self.quota_aggregates.decide_and_commit(
            policy,
            lambda sheet, _: quota.release_slot(sheet, execution_id, life=life, admission=admitted),
        )
        await self.unblock_quota_waiters(policy.id, namespace=policy.namespace)
        return answer

    async def _confirm(
        self, policy: NamespacedId, ask: quota.AdmissionRequest, *, acquired: bool
    ) -> limit_answers.AdmissionResult:
        return await self.quota_aggregates.decide_and_commit(
            policy, lambda sheet, now: quota.confirm(sheet, ask, now, acquired=acquired)
        )

    async def _undo_admission(
        self,
        policy: NamespacedId,
        execution_id: str,
        admitted: int,
        *,
        acquired: bool,
        previous_request: QuotaRequest | None,
    ) -> None:
        await self.quota_aggregates.decide_and_commit(
            policy,
            lambda sheet, _: quota.undo_admission(
                sheet, execution_id, admitted, acquired=acquired, previous_request=previous_request
            ),
        )
        await self.unblock_quota_waiters(policy.id, namespace=policy.namespace)

    async def _receive_release_admission(self, message: OutboxMessage) -> None:
        """A life has ended, and with it its claim to a slot."""
        body = msgspec.json.decode(message.body, type=quota.ReleaseAdmission)
        await self._release_held(body.namespace, message.target, body.execution_id, life=body.life)

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
                *(self.reconcile_quota_policy(row.quota_policy_id, namespace=row.namespace) for row in rows),
                return_exceptions=True,
            )
            processed += sum(moved is True for moved in moves)
            failed += sum(isinstance(moved, errors.FabricError) for moved in moves)
            if len(rows) < PAGE_SIZE:
                return limit_answers.Reconciled(processed, failed)
            after = NamespacedId(rows[-1].namespace, rows[-1].quota_policy_id)

    async def reconcile_quota_policy(self, quota_policy_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> bool:
        """Make one policy's counter equal a recount; True when something moved."""
        policy = NamespacedId(namespace, quota_policy_id)
        loaded = await self.runtime.load((Read(QuotaSlot, policy),))
        lapsed = [slot.execution_id for slot in loaded.rows[0] if not quota.is_slot_live(slot, loaded.now)]
        dead = frozenset(lapsed) - await self._running(lapsed)
        moved = await self.quota_aggregates.decide_and_commit(
            policy, lambda sheet, now: quota.reconcile(sheet, dead, now)
        )
        if moved:
            await self.unblock_quota_waiters(quota_policy_id, namespace=namespace)
        return moved

    async def _running(self, execution_ids: list[str]) -> frozenset[str]:
        """Those of the executions that are active."""
        if not execution_ids:
            return frozenset()
        loaded = await self.runtime.load([Read(Execution, (execution,)) for execution in execution_ids])
        rows = [row for found in loaded.rows for row in found]
        return frozenset(row.execution_id for row in rows if row.lifecycle_phase is LifecyclePhase.ACTIVE)


def _owned(namespace: str, text: str) -> NamespacedId:
    return NamespacedId(validation.text("namespace", namespace, limit=validation.MAX_NAME_BYTES), _policy_id(text))


def _policy_id(text: str) -> str:
    return ids.parse_uuid(validation.text("quota_policy_id", text), "quota_policy_id")
