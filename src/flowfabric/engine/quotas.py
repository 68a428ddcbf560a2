"""Quota policies: define them, admit by them, release, reconcile."""

from __future__ import annotations

import asyncio

import msgspec

from flowfabric import errors, ids
from flowfabric.engine import intake
from flowfabric.engine.relay import Relay
from flowfabric.engine.waiting import PAGE, Waiting
from flowfabric.model import verdicts
from flowfabric.model.execution import Execution
from flowfabric.model.outbox import Message
from flowfabric.model.quota import QuotaPolicy, QuotaRequest, QuotaSlot
from flowfabric.model.states import LifecyclePhase
from flowfabric.rules import admission, limits
from flowfabric.rules.admission import QuotaSheet
from flowfabric.stores.base import Scan, Want, Where

MOST_SECONDS = limits.MAX_DURATION_MS // 1000


class Quotas(Waiting, Relay):
    """What can be done with a quota policy, by the names of the specification."""

    async def create_quota_policy(
        self,
        quota_policy_id: str,
        *,
        window_seconds: int,
        max_requests_per_window: int,
        max_concurrent: int,
        jitter_ms: int = 0,
    ) -> verdicts.QuotaPolicyCreated | verdicts.QuotaPolicyExists:
        """Define a policy; 0 is no limit. A second definition changes nothing."""
        policy = _policy_id(quota_policy_id)
        numbers = verdicts.QuotaLimits(
            limits.integer("window_seconds", window_seconds, least=0, most=MOST_SECONDS),
            limits.integer("max_requests_per_window", max_requests_per_window, least=0),
            limits.integer("max_concurrent", max_concurrent, least=0),
            limits.duration("jitter_ms", jitter_ms, least=0),
        )
        return await self.quota_chains.ask(policy, lambda sheet, now: admission.create(sheet, numbers, now))

    async def read_quota_policy_limits(self, quota_policy_id: str) -> verdicts.QuotaLimits | None:
        """The four numbers; None when undefined."""
        loaded = await self.load((Want(QuotaPolicy, (_policy_id(quota_policy_id),)),))
        numbers = admission.limits_of(loaded.rows[0][0] if loaded.rows[0] else None)
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
    ) -> verdicts.Admission:
        """Admit an execution by the numbers given, whatever the policy says and whether or not it exists."""
        policy = _policy_id(quota_policy_id)
        execution = intake.execution(execution_id)
        ask = admission.Asking(
            execution_id=execution,
            window_ms=1000 * limits.integer("window_seconds", window_seconds, least=0, most=MOST_SECONDS),
            rate_limit=limits.integer("rate_limit", rate_limit, least=0),
            concurrency_cap=limits.integer("concurrency_cap", concurrency_cap, least=0),
            jitter_ms=limits.duration("jitter_ms", jitter_ms, least=0),
            dimension=limits.text("dimension", dimension, limit=limits.MAX_NAME_BYTES) or admission.DEFAULT_DIMENSION,
            admission=self.minter.change_id(),
            chance=self.chance(),
        )
        rows = (await self.load((Want(Execution, (execution,)),))).rows[0]
        life = admission.life_of(rows[0] if rows else None)
        verdict, _ = await self._check(policy, msgspec.structs.replace(ask, life=life))
        return verdict

    async def _check(
        self, quota_policy_id: str, ask: admission.Asking
    ) -> tuple[verdicts.Admission, QuotaRequest | None]:
        """The verdict, and the execution's request that stood in the window until then."""

        def decide(
            sheet: QuotaSheet, now: int
        ) -> tuple[tuple[verdicts.Admission, QuotaRequest | None] | errors.FabricError, QuotaSheet]:
            verdict, after = admission.check(sheet, ask, now)
            if isinstance(verdict, errors.FabricError):
                return verdict, after
            return (verdict, sheet.requests.get((ask.dimension, ask.execution_id))), after

        return await self.quota_chains.ask(quota_policy_id, decide)

    async def release_admission(self, quota_policy_id: str, execution_id: str) -> verdicts.Released:
        """Give an execution's slot back, whoever got it; again is the same."""
        policy = _policy_id(quota_policy_id)
        execution = intake.execution(execution_id)
        return await self._release(policy, execution)

    async def _release(
        self, quota_policy_id: str, execution_id: str, *, life: int | None = None, admitted: int | None = None
    ) -> verdicts.Released:
        answer = await self.quota_chains.ask(
            quota_policy_id,
            lambda sheet, _: admission.release(sheet, execution_id, life=life, admission=admitted),
        )
        await self.wake_quota(quota_policy_id)
        return answer

    async def _confirm(self, quota_policy_id: str, ask: admission.Asking, *, got: bool) -> verdicts.Admission:
        return await self.quota_chains.ask(
            quota_policy_id, lambda sheet, now: admission.confirm(sheet, ask, now, got=got)
        )

    async def _take_back(
        self, quota_policy_id: str, execution_id: str, admitted: int, *, got: bool, before: QuotaRequest | None
    ) -> None:
        await self.quota_chains.ask(
            quota_policy_id,
            lambda sheet, _: admission.take_back(sheet, execution_id, admitted, got=got, before=before),
        )
        await self.wake_quota(quota_policy_id)

    async def _receive_release_admission(self, message: Message) -> None:
        """A life has ended, and with it its claim to a slot."""
        body = msgspec.json.decode(message.body, type=admission.Release)
        await self._release(message.target, body.execution_id, life=body.life)

    async def reconcile_quota_counters(self, partition: int) -> verdicts.Reconciled:
        """Trim windows, drop dead slots and recount, for every policy of a partition."""
        place = limits.integer("partition", partition, least=0, most=self.partitions.quota - 1)
        processed = failed = 0
        after: tuple[str] | None = None
        while True:
            scan = Scan(QuotaPolicy, (Where("partition", "=", place),), ("quota_policy_id",), after, PAGE)
            rows: list[QuotaPolicy] = await self.store.scan(scan)
            moves = await asyncio.gather(
                *(self.reconcile_quota_policy(row.quota_policy_id) for row in rows), return_exceptions=True
            )
            processed += sum(moved is True for moved in moves)
            failed += sum(isinstance(moved, errors.FabricError) for moved in moves)
            if len(rows) < PAGE:
                return verdicts.Reconciled(processed, failed)
            after = (rows[-1].quota_policy_id,)

    async def reconcile_quota_policy(self, quota_policy_id: str) -> bool:
        """Make one policy's counter equal a recount; True when something moved."""
        loaded = await self.load((Want(QuotaSlot, (quota_policy_id,)),))
        lapsed = [slot.execution_id for slot in loaded.rows[0] if not admission.is_live(slot, loaded.now)]
        dead = frozenset(lapsed) - await self._running(lapsed)
        moved = await self.quota_chains.ask(quota_policy_id, lambda sheet, now: admission.reconcile(sheet, dead, now))
        if moved:
            await self.wake_quota(quota_policy_id)
        return moved

    async def _running(self, execution_ids: list[str]) -> frozenset[str]:
        """Those of the executions that are active."""
        if not execution_ids:
            return frozenset()
        loaded = await self.load([Want(Execution, (execution,)) for execution in execution_ids])
        rows = [row for found in loaded.rows for row in found]
        return frozenset(row.execution_id for row in rows if row.lifecycle_phase is LifecyclePhase.ACTIVE)


def _policy_id(text: str) -> str:
    return ids.parse_uuid(limits.text("quota_policy_id", text), "quota_policy_id")
