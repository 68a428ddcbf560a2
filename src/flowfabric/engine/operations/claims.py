"""Claims, claim grants and the registry of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

from flowfabric import errors
from flowfabric.engine.claiming.admission import AdmissionContext, AdmissionControl
from flowfabric.engine.claiming.claim_on_commit import ClaimOnCommit
from flowfabric.engine.claiming.claimer import Claimer
from flowfabric.engine.claiming.grant_scheduler import GrantScheduler
from flowfabric.engine.claiming.grants import sign_reclaim_grant
from flowfabric.engine.claiming.guarded_claims import GuardedClaims
from flowfabric.engine.claiming.poller import LanePoller
from flowfabric.engine.claiming.ready_queues import ReadyQueues, in_namespaces
from flowfabric.engine.claiming.redeemer import GrantRedeemer
from flowfabric.engine.claiming.worker_routes import WorkerRoutes
from flowfabric.engine.runtime.read_set import ReadSet, decide_row, load_many, load_one
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.signing_keys import SigningKeys
from flowfabric.engine.runtime.wakeups import lane_topic
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation.execution_filter import validate_namespaces
from flowfabric.engine.validation.tasks import validate_tasks
from flowfabric.handles import Handle, HandleKind
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution
from flowfabric.model.scheduling.worker import (
    MarkedDead,
    NotRegistered,
    RegisteredWorker,
    ServedTask,
    TaskList,
    WorkerEvent,
    WorkerPage,
    WorkerRefreshed,
    WorkerRegistered,
)
from flowfabric.model.security.signing_key import SigningKey
from flowfabric.model.states import BlockingReason, LifecyclePhase
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution import claim, expire, reclaim
from flowfabric.rules.execution import grant as grant_rules
from flowfabric.rules.execution.lease import AcquiredLease
from flowfabric.rules.scheduling import workers
from flowfabric.rules.scheduling.workers import Registration
from flowfabric.rules.security import grant_key as grant_keys
from flowfabric.stores.queries import Scan, Where

A = TypeVar("A")
OPERATOR = "operator"
DEFAULT_PAGE_SIZE = 1000
MAX_PAGE_SIZE = 10_000
MAX_TASK_WORKERS = 1000  # workers whose tasks one call reads


class ClaimOperations:
    """Operations that claim work, grant it, and register workers."""

    runtime: Runtime
    claimer: Claimer
    claim_on_commit: ClaimOnCommit
    signing_keys: SigningKeys
    queues: ReadyQueues
    grant_scheduler: GrantScheduler
    admission: AdmissionControl
    guarded_claims: GuardedClaims
    routes: WorkerRoutes

    async def claim(
        self,
        lane_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        max_wait_ms: int = 0,
    ) -> answers.Claimed | None:
        """Claim the first execution of the lane's queues, new, resumed or reclaimed; None if there is none in time."""
        order = validate.build_claim_order(lane_id, worker_id, worker_instance_id, capabilities, lease_ttl_ms)
        claimed = await self.claimer.poll_lane(order, 1, max_wait_ms)
        return claimed[0] if claimed else None

    async def claim_many(
        self,
        lane_id: str,
        limit: int,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        max_wait_ms: int = 0,
    ) -> list[answers.Claimed]:
        """Claim up to `limit` executions in queue order, as soon as there is one; limits are not checked."""
        order = validate.build_claim_order(lane_id, worker_id, worker_instance_id, capabilities, lease_ttl_ms)
        return await self.claimer.poll_lane(order, limit, max_wait_ms)

    async def claim_admitted(
        self,
        lane_id: str,
        limit: int = 1,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        max_wait_ms: int = 0,
        namespaces: Collection[str] | None = None,
    ) -> list[answers.Claimed]:
        """Claim up to `limit` executions that their budgets and quotas admit, as soon as there is one.

        `namespaces` restricts the claim to executions of these namespaces; None means all.
        """
        order = validate.build_claim_order(
            lane_id, worker_id, worker_instance_id, capabilities, lease_ttl_ms, admission=True, namespaces=namespaces
        )
        return await self.claimer.poll_lane(order, limit, max_wait_ms)

    def pulling(
        self,
        lanes: Sequence[str],
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        namespaces: Collection[str] | None = None,
    ) -> LanePoller:
        """Return a poller of these lanes for one worker; `namespaces` restricts it to executions of these."""
        wanted = validate.validate_iterable("lanes", lanes)
        if not wanted:
            raise errors.InvalidInput("lanes: empty")
        offered = validate.validate_iterable("capabilities", capabilities)
        orders = [
            validate.build_claim_order(
                lane, worker_id, worker_instance_id, offered, lease_ttl_ms, admission=True, namespaces=namespaces
            )
            for lane in wanted
        ]
        return LanePoller(self.claimer, self.claim_on_commit, orders)

    async def claim_from_lanes(
        self,
        lanes: Sequence[str],
        limit: int,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        lease_ttl_ms: int = 15_000,
        max_wait_ms: int = 0,
        go_on: Callable[[], bool] = lambda: True,
        namespaces: Collection[str] | None = None,
    ) -> list[answers.Claimed]:
        """Claim up to `limit` admitted executions from these lanes; stop waiting once `go_on` returns False."""
        poller = self.pulling(
            lanes,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            capabilities=capabilities,
            lease_ttl_ms=lease_ttl_ms,
            namespaces=namespaces,
        )
        try:
            return await poller.claim(limit, max_wait_ms=max_wait_ms, go_on=go_on)
        finally:
            poller.close()

    def wake_claims(self, lanes: Sequence[str]) -> None:
        """Wake the claims of this process that wait for these lanes."""
        names = [validate.validate_lane_id(lane) for lane in validate.validate_iterable("lanes", lanes)]
        self.runtime.wakeups.notify(lane_topic(lane) for lane in names)

    async def scan_eligible_executions(self, lane_id: str, partition: int, limit: int) -> list[str]:
        """Return the ids of claimable executions of a lane and partition in claim order; change nothing."""
        lane = validate.validate_lane_id(lane_id)
        place = validate.validate_flow_partition(partition, self.runtime.partitions)
        max_rows = validation.integer("limit", limit, least=0, most=10_000)
        rows: list[Execution] = []
        for queue in await self.runtime.retry_while_unavailable(lambda: self.runtime.store.queues(lane)):
            if max_rows:
                where = (
                    Where("line", "=", queue),
                    Where("partition", "=", place),
                    Where("lifecycle_phase", "=", LifecyclePhase.RUNNABLE),
                    Where("blocking_reason", "=", BlockingReason.WAITING_FOR_WORKER),
                )
                rows += await self.runtime.scan(Scan(Execution, where, ("rank", "execution_id"), limit=max_rows))
        rows.sort(key=lambda row: (row.rank, row.execution_id))
        return [row.execution_id for row in rows[:max_rows]]

    async def claim_for_worker(
        self,
        lane_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        capabilities: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
        namespaces: Collection[str] | None = None,
    ) -> answers.ClaimGrant | answers.ReclaimGrant | None:
        """Issue a signed grant for the first execution of the lane that this worker may run; None if there is none."""
        is_wanted = in_namespaces(validate.validate_namespaces(namespaces))
        offered = validate.validate_capabilities(capabilities)
        order = validate.build_grant_request(lane_id, worker_id, worker_instance_id, offered, grant_ttl_ms)
        clock = asyncio.get_running_loop().time
        started_at = clock()
        try:
            key = await self.signing_keys.require_signing_key("claim_for_worker")
            await self.queues.refresh_lane(order.lane_id)
            return await self.grant_scheduler.best(order, key, is_wanted)
        finally:
            self.runtime.metrics.observe(
                "ff_claim_from_grant_duration",
                clock() - started_at,
                lane=self.runtime.metrics.lane_label(order.lane_id),
            )

    async def issue_claim_grant(
        self,
        execution_id: str,
        *,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
        capability_hash: str | None = None,
        route_snapshot_json: str | None = None,
        admission_summary: str | None = None,
    ) -> answers.Granted:
        """Grant one claimable execution to one worker."""
        execution = validate.validate_execution_id(execution_id)
        order = validate.build_grant_request(
            lane_id,
            worker_id,
            worker_instance_id,
            worker_capabilities,
            grant_ttl_ms,
            capability_hash,
            route_snapshot_json,
            admission_summary,
        )
        return await self.runtime.decide_execution(
            execution, lambda row, now: grant_rules.issue_claim_grant(row, order, now)
        )

    async def issue_reclaim_grant(
        self,
        execution_id: str,
        *,
        lane_id: str,
        worker_id: str,
        worker_instance_id: str,
        worker_capabilities: Iterable[str] = (),
        grant_ttl_ms: int = 5000,
        capability_hash: str | None = None,
        route_snapshot_json: str | None = None,
        admission_summary: str | None = None,
    ) -> answers.ReclaimGrant | answers.NotReclaimable | answers.ReclaimCapExceeded:
        """Grant an execution whose lease has expired or was revoked to one worker.

        An expired lease is marked as such first. Without a key to sign the grant, this raises `Unavailable`.
        """
        execution = validate.validate_execution_id(execution_id)
        order = validate.build_grant_request(
            lane_id,
            worker_id,
            worker_instance_id,
            worker_capabilities,
            grant_ttl_ms,
            capability_hash,
            route_snapshot_json,
            admission_summary,
        )
        key = await self.signing_keys.find_signing_key("issue_reclaim_grant")
        await self.runtime.decide_execution(execution, expire.mark_lease_expired_if_due)

        def decide(
            row: Execution | None, now: int
        ) -> Decision[answers.ReclaimGrant | answers.NotReclaimable | answers.ReclaimCapExceeded]:
            if not isinstance(key, errors.FabricError):
                return sign_reclaim_grant(row, order, key, now)
            unsigned: Decision[Any] = reclaim.issue_reclaim_grant(row, order, now)
            return refuse(key) if isinstance(unsigned.answer, answers.Granted) else unsigned

        return await self.runtime.decide_execution(execution, decide)

    async def verify_grant(self, execution_id: str, grant_key: str) -> grant_keys.GrantFault | None:
        """Return what is wrong with a key for the stored grant of this execution; None if the key is valid."""
        execution = validate.validate_execution_id(execution_id)
        key = validation.text("grant_key", grant_key)
        reads = ReadSet()
        execution_row, key_rows = reads.one(Execution, execution), reads.many(SigningKey, 0)
        loaded = await self.runtime.load(reads)
        row, keys = execution_row(loaded.rows), self.signing_keys.unseal_loaded_keys(key_rows(loaded.rows))
        return grant_keys.verify_grant(key, None if row is None else grant_rules.stored_grant(row), keys, loaded.now)

    async def claim_execution(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str = "",
        lease_id: str | None = None,
        attempt_id: str | None = None,
        lease_ttl_ms: int = 15_000,
        attempt_timeout_ms: int | None = None,
        execution_deadline_at: int | None = None,
        grant_key: str | None = None,
    ) -> answers.Claimed:
        """Redeem a claim grant and start a new attempt; a `grant_key` must be the one issued with the grant."""
        execution = validate.validate_execution_id(execution_id)
        holder = validate.build_holder(
            worker_id, worker_instance_id, lane_id, lease_id, attempt_id, lease_ttl_ms, self.runtime.minter
        )
        timeout = validate.optional_duration("attempt_timeout_ms", attempt_timeout_ms)
        deadline = validate.optional_instant("execution_deadline_at", execution_deadline_at)
        proof = await self._proof(grant_key)
        return await self._redeem(
            execution,
            HandleKind.FRESH,
            lambda row, now: claim.claim_execution(
                row, holder, now, attempt_timeout_ms=timeout, execution_deadline_at=deadline, proof=proof
            ),
        )

    async def claim_resumed_execution(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str = "",
        lease_id: str | None = None,
        lease_ttl_ms: int = 15_000,
        remaining_attempt_timeout_ms: int | None = None,
        grant_key: str | None = None,
    ) -> answers.Claimed:
        """Redeem a grant and resume the interrupted attempt; the key is checked as by `claim_execution`."""
        execution = validate.validate_execution_id(execution_id)
        holder = validate.build_holder(
            worker_id, worker_instance_id, lane_id, lease_id, None, lease_ttl_ms, self.runtime.minter
        )
        remaining = validate.optional_duration("remaining_attempt_timeout_ms", remaining_attempt_timeout_ms)
        proof = await self._proof(grant_key)
        return await self._redeem(
            execution,
            HandleKind.RESUMED,
            lambda row, now: claim.claim_resumed_execution(
                row, holder, now, remaining_attempt_timeout_ms=remaining, proof=proof
            ),
        )

    async def claim_from_resume_grant(
        self,
        grant: answers.ClaimGrant,
        *,
        worker_id: str,
        worker_instance_id: str,
        lease_ttl_ms: int = 15_000,
    ) -> Handle:
        """Redeem a grant as `claim_resumed_execution` does, and return the handle."""
        if not isinstance(grant, answers.ClaimGrant):
            raise errors.InvalidInput("grant: not a claim grant")
        claimed = await self.claim_resumed_execution(
            grant.execution_id,
            worker_id=worker_id,
            worker_instance_id=worker_instance_id,
            lane_id=grant.lane_id,
            lease_ttl_ms=lease_ttl_ms,
            grant_key=grant.grant_key,
        )
        return claimed.handle

    async def issue_grant_and_claim(
        self, execution_id: str, *, lane_id: str, lease_duration_ms: int
    ) -> answers.OperatorClaim:
        """Claim one execution as the operator; capabilities, budgets and quotas are not checked."""
        execution = validate.validate_execution_id(execution_id)
        holder = validate.build_holder(OPERATOR, OPERATOR, lane_id, None, None, lease_duration_ms, self.runtime.minter)
        answer = await self.runtime.decide_execution(
            execution, lambda row, now: claim.issue_grant_and_claim(row, holder, now)
        )
        self.runtime.track_lease_expiry(holder.lane_id, answer.lease_expires_at)
        return answers.OperatorClaim(answer.lease_id, answer.lease_epoch, answer.attempt_index)

    async def reclaim_execution(
        self,
        execution_id: str,
        *,
        worker_id: str,
        worker_instance_id: str,
        lane_id: str = "",
        lease_id: str | None = None,
        attempt_id: str | None = None,
        lease_ttl_ms: int = 15_000,
        max_reclaim_count: int | None = None,
        grant_key: str | None = None,
    ) -> answers.Claimed | answers.NotReclaimable | answers.ReclaimCapExceeded | answers.GrantNotFound:
        """Redeem a reclaim grant; at the cap the execution fails. The key is checked as by `claim_execution`."""
        execution = validate.validate_execution_id(execution_id)
        holder = validate.build_holder(
            worker_id, worker_instance_id, lane_id, lease_id, attempt_id, lease_ttl_ms, self.runtime.minter
        )
        cap = None if max_reclaim_count is None else validation.integer("max_reclaim_count", max_reclaim_count, least=0)
        proof = await self._proof(grant_key)
        answer = await self.runtime.decide_execution(
            execution, lambda row, now: reclaim.reclaim_execution(row, holder, cap, now, proof)
        )
        if not isinstance(answer, AcquiredLease):
            return answer
        return self.guarded_claims.claimed_by_rule(answer, HandleKind.RECLAIMED)

    def redeemer(
        self, *, worker_id: str, worker_instance_id: str, lease_ttl_ms: int = 15_000, max_concurrent_tasks: int = 1
    ) -> GrantRedeemer:
        """Return a redeemer of grants; above its capacity it raises `WorkerAtCapacity`, and the grant stays valid."""
        return GrantRedeemer(self, worker_id, worker_instance_id, lease_ttl_ms, max_concurrent_tasks)

    async def _proof(self, grant_key: str | None) -> grant_keys.GrantProof | None:
        """Return a grant key with the keys that verify it, loaded apart: the keystore is on another partition."""
        key = validation.optional_text("grant_key", grant_key)
        if key is None:
            return None
        rows = await load_many(self.runtime, SigningKey, 0)
        return grant_keys.GrantProof(key, self.signing_keys.unseal_loaded_keys(rows))

    async def _redeem(
        self, execution_id: str, kind: HandleKind, decide: Callable[[Execution | None, int], Decision[AcquiredLease]]
    ) -> answers.Claimed:
        """Redeem a grant; an execution that was admitted is admitted again, because its quota slots may have expired.

        If a limit refuses it, the execution is blocked on that limit, and the claim is refused as not eligible.
        """
        row = await load_one(self.runtime, Execution, execution_id)
        admitted = []
        if row is not None and grant_rules.holds_admitted_grant(row):
            admitted = await self.admission.admit([row], AdmissionContext())
        try:
            acquired = await self.runtime.decide_execution(execution_id, decide)
        except errors.StoreUnavailable:
            raise  # the claim may have been committed, and then it needs its slots
        except errors.FabricError:
            for refused in admitted:
                await self.admission.release_slots(refused)
            raise
        return self.guarded_claims.claimed_by_rule(acquired, kind)

    async def register_worker(
        self,
        *,
        namespace: str = "default",
        worker_instance_id: str,
        worker_id: str,
        lanes: Collection[str],
        capabilities: Iterable[str] = (),
        liveness_ttl_ms: int,
        tasks: Sequence[ServedTask] = (),
    ) -> WorkerRegistered | WorkerRefreshed:
        """Register a worker with the tasks that it runs.

        Executions that are blocked for want of its capabilities are unblocked before this returns.
        """
        offered = validate.validate_capabilities(capabilities)
        served = frozenset(validate.validate_lane_id(lane) for lane in validate.validate_iterable("lanes", lanes))
        if not served:
            raise errors.InvalidInput("lanes: empty")
        ask = Registration(
            validation.name("namespace", namespace),
            validate.validate_instance_id(worker_instance_id),
            validate.validate_worker_id(worker_id),
            served,
            offered,
            validation.duration_ms("liveness_ttl_ms", liveness_ttl_ms),
            validate_tasks(tasks),
        )
        answer = await self._decide_worker(
            ask.namespace, ask.worker_instance_id, lambda row, now: workers.register(row, ask, now)
        )
        for lane in sorted(ask.lanes):
            await self.routes.open_route(ask.namespace, lane, offered)
        return answer

    async def heartbeat_worker(
        self, *, namespace: str = "default", worker_instance_id: str
    ) -> WorkerRefreshed | NotRegistered:
        """Extend a registration by its liveness TTL; an expired one is not revived."""
        instance = validate.validate_instance_id(worker_instance_id)
        return await self._decide_worker(
            validation.name("namespace", namespace), instance, lambda row, now: workers.heartbeat(row, instance, now)
        )

    async def mark_worker_dead(
        self, *, namespace: str = "default", worker_instance_id: str, reason: str = ""
    ) -> MarkedDead | NotRegistered:
        """Remove a worker from the registry; its leases expire on their own."""
        instance = validate.validate_instance_id(worker_instance_id)
        if refused := workers.check_reason(validation.text("reason", reason)):
            raise refused
        return await self._decide_worker(
            validation.name("namespace", namespace),
            instance,
            lambda row, now: workers.mark_dead(row, instance, reason, now),
        )

    async def _decide_worker(
        self, namespace: str, instance_id: str, decide: Callable[[RegisteredWorker | None, int], Decision[A]]
    ) -> A:
        return await decide_row(self.runtime, RegisteredWorker, (namespace, instance_id), decide)

    async def list_workers(
        self,
        namespace: str | None = None,
        *,
        after: str | None = None,
        limit: int = DEFAULT_PAGE_SIZE,
        all_namespaces: bool = False,
    ) -> WorkerPage:
        """Return the live workers of a namespace in the order of their instance ids, strictly after `after`.

        Without a namespace, `all_namespaces` lists those of all, by namespace and instance id; the cursor has both.
        """
        if namespace is None and not all_namespaces:
            raise errors.Unavailable("list_workers", "of all namespaces")
        size = min(validation.integer("limit", limit, least=0), MAX_PAGE_SIZE)
        if not size:
            return WorkerPage([])
        cursor = None if after is None else (validation.text("after", after),)
        if namespace is None:
            return await self._list_all_workers(after, size)
        rows = await self.routes.live_workers(validation.name("namespace", namespace), cursor, size + 1)
        entries = [workers.worker_view(row) for row in rows[:size]]
        return WorkerPage(entries, entries[-1].worker_instance_id if len(rows) > size else None)

    async def _list_all_workers(self, after: str | None, size: int) -> WorkerPage:
        cursor: tuple[str, str] | None = None
        if after is not None:
            owner, blank, instance = after.rpartition(" ")  # no instance id contains a blank
            if not blank:
                raise errors.InvalidInput("after: not a cursor of the workers of all namespaces")
            cursor = owner, validate.validate_instance_id(instance)
        now = await self.runtime.store.ping()
        scan = Scan(
            RegisteredWorker,
            (Where("lapses_at", ">", now),),
            ("namespace", "worker_instance_id"),
            cursor,
            size + 1,
        )
        rows: list[RegisteredWorker] = await self.runtime.scan(scan)
        entries = [workers.worker_view(row) for row in rows[:size]]
        last = entries[-1] if len(rows) > size else None
        return WorkerPage(entries, None if last is None else f"{last.namespace} {last.worker_instance_id}")

    async def list_tasks(self, *, namespace: str | None = None, namespaces: Sequence[str] | None = None) -> TaskList:
        """Return the tasks that live workers run, with the schemas of their input and result."""
        wanted = validate_namespaces(namespace, namespaces)
        live = (Where("lapses_at", ">", await self.runtime.store.ping()),)
        key = ("namespace", "worker_instance_id")
        rows: list[RegisteredWorker] = await self.runtime.scan(
            Scan(RegisteredWorker, live, key, None, MAX_TASK_WORKERS + 1)
        )
        seen = [row for row in rows[:MAX_TASK_WORKERS] if wanted is None or row.namespace in wanted]
        return TaskList(workers.task_entries(seen), len(rows) <= MAX_TASK_WORKERS)

    async def list_worker_events(self, namespace: str, worker_instance_id: str) -> list[WorkerEvent]:
        """Return the events of one worker instance, oldest first."""
        instance = validate.validate_instance_id(worker_instance_id)
        return await load_many(self.runtime, WorkerEvent, validation.name("namespace", namespace), instance)
