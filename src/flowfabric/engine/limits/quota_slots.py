"""Quota slots: acquire, confirm, release and reconcile them."""

from __future__ import annotations

import asyncio

import msgspec

from flowfabric import errors
from flowfabric.engine.limits.aggregates import LimitAggregates
from flowfabric.engine.limits.unblocker import Unblocker
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.execution import Execution
from flowfabric.model.outbox import OutboxMessage
from flowfabric.model.owned_id import DEFAULT_NAMESPACE, NamespacedId
from flowfabric.model.quota import QuotaRequest, QuotaSlot
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.quota import QuotaState


class QuotaSlots:
    """Acquires and releases the slots of quota policies."""

    def __init__(self, runtime: Runtime, aggregates: LimitAggregates, unblocker: Unblocker) -> None:
        self.runtime = runtime
        self.aggregates = aggregates
        self.unblocker = unblocker

    async def check(
        self, policy: NamespacedId, ask: quota.AdmissionRequest
    ) -> tuple[limit_answers.AdmissionResult, QuotaRequest | None]:
        """Return the verdict, and the window entry that the admission replaces."""

        def decide(
            state: QuotaState, now: int
        ) -> tuple[tuple[limit_answers.AdmissionResult, QuotaRequest | None] | errors.FabricError, QuotaState]:
            verdict, after = quota.admit(state, ask, now)
            if isinstance(verdict, errors.FabricError):
                return verdict, after
            return (verdict, state.requests.get((ask.dimension, ask.execution_id))), after

        return await self.aggregates.quotas.decide_and_commit(policy, decide)

    async def release_held(self, namespace: str, policy: str, execution_id: str, *, life: int | None = None) -> None:
        """Release the slot of an execution in the policy of its namespace or in the shared one of that id."""
        policies = owner_rules.candidates(namespace, (policy,))
        if len(policies) > 1:
            reads = ReadSet()
            slots = reads.each(QuotaSlot, ((*one, execution_id) for one in policies))
            loaded = await self.runtime.load(reads)
            policies = [one for one, slot in zip(policies, slots(loaded.rows), strict=True) if slot is not None]
        await asyncio.gather(*(self.release(one, execution_id, life=life) for one in policies))

    async def release(
        self, policy: NamespacedId, execution_id: str, *, life: int | None = None, admitted: int | None = None
    ) -> limit_answers.AdmissionReleased:
        """Release an execution's slot, and unblock what waits for it."""
        answer = await self.aggregates.quotas.decide_and_commit(
            policy,
            lambda state, _: quota.release_slot(state, execution_id, life=life, admission=admitted),
        )
        await self.unblocker.unblock_quota_waiters(policy.id, namespace=policy.namespace)
        return answer

    async def confirm(
        self, policy: NamespacedId, ask: quota.AdmissionRequest, *, acquired: bool
    ) -> limit_answers.AdmissionResult:
        """Make a provisional admission final."""
        return await self.aggregates.quotas.decide_and_commit(
            policy, lambda state, now: quota.confirm(state, ask, now, acquired=acquired)
        )

    async def undo_admission(
        self,
        policy: NamespacedId,
        execution_id: str,
        admitted: int,
        *,
        acquired: bool,
        previous_request: QuotaRequest | None,
    ) -> None:
        """Undo an admission of an execution that another policy refused."""
        await self.aggregates.quotas.decide_and_commit(
            policy,
            lambda state, _: quota.undo_admission(
                state, execution_id, admitted, acquired=acquired, previous_request=previous_request
            ),
        )
        await self.unblocker.unblock_quota_waiters(policy.id, namespace=policy.namespace)

    async def release_for_message(self, message: OutboxMessage) -> None:
        """Release the slot of an execution that has ended, as its outbox message asks."""
        body = msgspec.json.decode(message.body, type=quota.ReleaseAdmission)
        await self.release_held(body.namespace, message.target, body.execution_id, life=body.life)

    async def reconcile(self, quota_policy_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> bool:
        """Make the counter of a policy equal a recount; True if anything changed."""
        policy = NamespacedId(namespace, quota_policy_id)
        reads = ReadSet()
        slots = reads.many(QuotaSlot, *policy)
        loaded = await self.runtime.load(reads)
        expired = [slot.execution_id for slot in slots(loaded.rows) if not quota.is_slot_live(slot, loaded.now)]
        idle = await self._idle(expired) if expired else frozenset()
        changed = await self.aggregates.quotas.decide_and_commit(
            policy, lambda state, now: quota.reconcile(state, idle, now)
        )
        if changed:
            await self.unblocker.unblock_quota_waiters(quota_policy_id, namespace=namespace)
        return changed

    async def _idle(self, execution_ids: list[str]) -> frozenset[str]:
        reads = ReadSet()
        rows = reads.each(Execution, ((one,) for one in execution_ids))
        loaded = await self.runtime.load(reads)
        return quota.idle_executions(execution_ids, rows(loaded.rows))
