"""Quota slots: acquire, confirm, release and reconcile them."""

from __future__ import annotations

import asyncio

import msgspec

from flowfabric import errors
from flowfabric.engine.limits.aggregates import LimitAggregates
from flowfabric.engine.limits.unblocker import Unblocker
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.execution import Execution
from flowfabric.model.outbox import OutboxMessage
from flowfabric.model.owned_id import DEFAULT_NAMESPACE, NamespacedId
from flowfabric.model.quota import QuotaRequest, QuotaSlot
from flowfabric.model.states import LifecyclePhase
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.quota import QuotaState
from flowfabric.stores.queries import Read


class QuotaSlots:
    """Acquires and releases the slots of quota policies."""

    def __init__(self, runtime: Runtime, aggregates: LimitAggregates, unblocker: Unblocker) -> None:
        self.runtime = runtime
        self.aggregates = aggregates
        self.unblocker = unblocker

    async def check(
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

        return await self.aggregates.quotas.decide_and_commit(policy, decide)

    async def release_held(self, namespace: str, policy: str, execution_id: str, *, life: int | None = None) -> None:
        """Give back what an execution of a namespace holds, in its own policy or in the shared one of that id."""
        held = owner_rules.candidates(namespace, (policy,))
        if len(held) > 1:
            loaded = await self.runtime.load([Read(QuotaSlot, (*one, execution_id)) for one in held])
            held = [one for one, found in zip(held, loaded.rows, strict=True) if found]
        await asyncio.gather(*(self.release(one, execution_id, life=life) for one in held))

    async def release(
        self, policy: NamespacedId, execution_id: str, *, life: int | None = None, admitted: int | None = None
    ) -> limit_answers.AdmissionReleased:
        answer = await self.aggregates.quotas.decide_and_commit(
            policy,
            lambda sheet, _: quota.release_slot(sheet, execution_id, life=life, admission=admitted),
        )
        await self.unblocker.unblock_quota_waiters(policy.id, namespace=policy.namespace)
        return answer

    async def confirm(
        self, policy: NamespacedId, ask: quota.AdmissionRequest, *, acquired: bool
    ) -> limit_answers.AdmissionResult:
        return await self.aggregates.quotas.decide_and_commit(
            policy, lambda sheet, now: quota.confirm(sheet, ask, now, acquired=acquired)
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
        await self.aggregates.quotas.decide_and_commit(
            policy,
            lambda sheet, _: quota.undo_admission(
                sheet, execution_id, admitted, acquired=acquired, previous_request=previous_request
            ),
        )
        await self.unblocker.unblock_quota_waiters(policy.id, namespace=policy.namespace)

    async def release_for_message(self, message: OutboxMessage) -> None:
        """A life has ended, and with it its claim to a slot."""
        body = msgspec.json.decode(message.body, type=quota.ReleaseAdmission)
        await self.release_held(body.namespace, message.target, body.execution_id, life=body.life)

    async def reconcile(self, quota_policy_id: str, *, namespace: str = DEFAULT_NAMESPACE) -> bool:
        """Make one policy's counter equal a recount; True when something moved."""
        policy = NamespacedId(namespace, quota_policy_id)
        loaded = await self.runtime.load((Read(QuotaSlot, policy),))
        lapsed = [slot.execution_id for slot in loaded.rows[0] if not quota.is_slot_live(slot, loaded.now)]
        dead = frozenset(lapsed) - await self._running(lapsed)
        moved = await self.aggregates.quotas.decide_and_commit(
            policy, lambda sheet, now: quota.reconcile(sheet, dead, now)
        )
        if moved:
            await self.unblocker.unblock_quota_waiters(quota_policy_id, namespace=namespace)
        return moved

    async def _running(self, execution_ids: list[str]) -> frozenset[str]:
        """Those of the executions that are active."""
        if not execution_ids:
            return frozenset()
        loaded = await self.runtime.load([Read(Execution, (execution,)) for execution in execution_ids])
        rows = [row for found in loaded.rows for row in found]
        return frozenset(row.execution_id for row in rows if row.lifecycle_phase is LifecyclePhase.ACTIVE)
