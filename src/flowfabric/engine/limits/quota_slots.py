"""Quota slots: acquire, confirm, release and reconcile them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from flowfabric import errors
from flowfabric.engine.limits.aggregates import LimitAggregates, window_scan
from flowfabric.engine.limits.unblocker import Unblocker
from flowfabric.engine.runtime.read_set import ReadSet, load_each
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.answers import limits as limit_answers
from flowfabric.model.execution import Execution
from flowfabric.model.limits.quota import QuotaRequest, QuotaSlot
from flowfabric.model.outbox import OutboxMessage
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.rules.limits import owner as owner_rules
from flowfabric.rules.limits import quota
from flowfabric.rules.limits.quota import QuotaState
from flowfabric.stores.catalog import key_of
from flowfabric.stores.queries import Read, Scan


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

        return await self.aggregates.quotas.decide_and_commit(policy, decide, *_needs(policy, ask))

    async def release_held(self, namespace: str, policy: str, execution_id: str, *, life: int | None = None) -> None:
        """Release the slot of an execution in the policy of its namespace or in the shared one of that id."""
        policies = owner_rules.candidates(namespace, (policy,))
        if len(policies) > 1:
            slots = await load_each(self.runtime, QuotaSlot, ((*one, execution_id) for one in policies))
            policies = [one for one, slot in zip(policies, slots, strict=True) if slot is not None]
        await asyncio.gather(*(self.release(one, execution_id, life=life) for one in policies))

    async def release(
        self, policy: NamespacedId, execution_id: str, *, life: int | None = None, admitted: int | None = None
    ) -> limit_answers.AdmissionReleased:
        """Release an execution's slot, and unblock what waits for it."""
        answer = await self.aggregates.quotas.decide_and_commit(
            policy,
            lambda state, _: quota.release_slot(state, execution_id, life=life, admission=admitted),
            (Read(QuotaSlot, (*policy, execution_id)),),
        )
        await self.unblocker.unblock_quota_waiters(policy)
        return answer

    async def confirm(
        self, policy: NamespacedId, ask: quota.AdmissionRequest, *, acquired: bool
    ) -> limit_answers.AdmissionResult:
        """Make a provisional admission final."""
        return await self.aggregates.quotas.decide_and_commit(
            policy, lambda state, now: quota.confirm(state, ask, now, acquired=acquired), *_needs(policy, ask)
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
            (
                Read(QuotaSlot, (*policy, execution_id)),
                Read(QuotaRequest, (*policy, quota.DEFAULT_DIMENSION, execution_id)),
            ),
        )
        await self.unblocker.unblock_quota_waiters(policy)

    async def release_for_message(self, message: OutboxMessage) -> None:
        """Release the slot of an execution that has ended, as its outbox message asks."""
        body = msgspec.json.decode(message.body, type=quota.ReleaseAdmission)
        await self.release_held(body.namespace, message.target, body.execution_id, life=body.life)

    async def reconcile(self, policy: NamespacedId) -> bool:
        """Make the counter of a policy equal a recount; True if anything changed."""
        reads = ReadSet()
        slots = reads.many(QuotaSlot, *policy)
        loaded = await self.runtime.load(reads)
        expired = [slot.execution_id for slot in slots(loaded.rows) if not quota.is_slot_live(slot, loaded.now)]
        rows = await load_each(self.runtime, Execution, ((one,) for one in expired))
        idle = quota.idle_executions(expired, rows)
        changed = await self.aggregates.quotas.decide_and_commit(
            policy,
            lambda state, now: quota.reconcile(state, idle, now),
            (Read(QuotaSlot, policy), Read(QuotaRequest, policy)),
        )
        if changed:
            await self.unblocker.unblock_quota_waiters(policy)
        return changed

    async def delete_expired_request(self, row: QuotaRequest) -> bool:
        """Delete a request that has left its window, unless the execution was admitted again meanwhile."""
        key = key_of(row)
        return await self.aggregates.quotas.decide_and_commit(
            NamespacedId(row.namespace, row.quota_policy_id),
            lambda state, now: quota.delete_expired_request(state, row.dimension, row.execution_id, now),
            (Read(QuotaRequest, key),),
        )


def _needs(policy: NamespacedId, ask: quota.AdmissionRequest) -> tuple[tuple[Read, ...], Callable[[int], Scan] | None]:
    """Return the rows that an admission is decided on: its slot, and the window if it has a rate.

    Without a rate its entry in the window is read only if the admission is provisional, so that it can be undone.
    """
    slot = Read(QuotaSlot, (*policy, ask.execution_id))
    if ask.rate_limit:
        return (slot,), lambda now: window_scan(policy, ask.dimension, now - ask.window_ms, ask.rate_limit)
    entry = Read(QuotaRequest, (*policy, ask.dimension, ask.execution_id))
    return ((slot, entry) if ask.provisional else (slot,)), None
