"""Executions: create, cancel, expire, replay, reprioritize, block and tag them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from flowfabric import errors
from flowfabric.engine.operations.bulk_create import BulkCreate, create_in_transaction, create_one
from flowfabric.engine.operations.leases import NO_FENCE
from flowfabric.engine.runtime.after_commit import Rows, first
from flowfabric.engine.runtime.recent_creates import RecentCreates
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.validation import execution as validate
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution
from flowfabric.model.flow import CancelBacklog, Dependency, Edge, EdgeGroup, PendingMemberCancel
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import cancel, delay, lease, operator, replay
from flowfabric.rules.execution import expire as expire_rules
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.rules.flow import dependencies, successors
from flowfabric.stores.port import SupportsCallerTransaction
from flowfabric.stores.queries import Read, Scan, Where

MAX_EDGES_PER_STEP = 500  # edges of one step


class ExecutionOperations:
    """Operations on executions: create, cancel, expire, replay, reprioritize, tag."""

    runtime: Runtime
    create_validator: validate.CreateValidator
    recent_creates: RecentCreates

    async def create_execution(
        self,
        *,
        execution_id: str,
        namespace: str = "default",
        lane_id: str = "default",
        execution_kind: str = "task",
        input_payload: bytes = b"",
        payload_encoding: str | None = None,
        priority: int = 0,
        creator_identity: str = "",
        idempotency_key: str | None = None,
        tags: Mapping[str, str] | None = None,
        policy: str | Mapping[str, Any] | None = None,
        delay_until: int | None = None,
        execution_deadline_at: int | None = None,
        parent_id: str | None = None,
    ) -> answers.Created | answers.Duplicate:
        """Create an execution; return Duplicate if its id or its idempotency key exists.

        A child is created on the partition of its parent, which its completion is delivered to.
        """
        return await self.create(
            CreateExecution(
                execution_id=execution_id,
                partition=0,
                namespace=namespace,
                lane_id=lane_id,
                execution_kind=execution_kind,
                input_payload=input_payload,
                payload_encoding=payload_encoding,
                priority=priority,
                creator_identity=creator_identity,
                idempotency_key=idempotency_key,
                tags={} if tags is None else tags,  # type: ignore[arg-type]
                policy=validate.policy_text(policy),
                delay_until=delay_until,
                execution_deadline_at=execution_deadline_at,
                parent_id=parent_id,
            )
        )

    async def create(self, ask: CreateExecution) -> answers.Created | answers.Duplicate:
        """Create an execution from a request; return Duplicate if its id or its idempotency key exists."""
        completions = self.runtime.wakeups.completion_count
        answer = await create_one(self.runtime, self.create_validator(ask), assume_absent=True)
        if type(answer) is answers.Created:
            self.recent_creates.add(answer.execution_id, completions)
        return answer

    async def create_executions(
        self, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate | errors.FabricError]:
        """Create many in as few round trips as there are batches; each answer stands for itself, refusals included.

        Of those that share an id or an idempotency key the first wins.
        """
        return await BulkCreate(self.runtime).create(validate.validate_iterable("asks", asks))

    async def create_within(
        self, connection: Any, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate]:
        """Create executions as part of the caller's own transaction in the store's Postgres database.

        They exist for others, and workers are told, when that commits; if it does not, nothing has happened.
        """
        given = [validate.validate_create(ask) for ask in validate.validate_iterable("asks", asks)]
        if not isinstance(self.runtime.store, SupportsCallerTransaction):
            raise errors.InvalidInput("using: only a store in Postgres can join a transaction")
        inside = await self.runtime.store.join_transaction(connection)
        return [await create_in_transaction(self.runtime, inside, ask) for ask in given]

    async def cancel_execution(
        self,
        execution_id: str,
        *,
        reason: str = "",
        source: str = lease.OPERATOR_OVERRIDE,
        fence: Fence = NO_FENCE,
    ) -> answers.Cancelled:
        """Cancel whatever it is doing; again is success."""
        execution, shown = validate.validate_execution_id(execution_id), validate.validate_fence(fence)
        why = validation.text("reason", reason)
        by = validation.text("source", source, limit=validation.MAX_NAME_BYTES)
        return await self.runtime.decide_execution(execution, lambda row, _: cancel.cancel(row, shown, by, why))

    async def expire_execution(
        self, execution_id: str, reason: str = expire_rules.ATTEMPT_TIMEOUT
    ) -> answers.Expired | answers.AlreadyTerminal:
        """End the execution as expired, due or not."""
        execution = validate.validate_execution_id(execution_id)
        why = validate.validate_expiry_reason(reason)
        return await self.runtime.decide_execution(execution, lambda row, _: expire_rules.expire(row, execution, why))

    async def expire_if_due(
        self, execution_id: str, reason: str
    ) -> answers.Expired | answers.AlreadyTerminal | answers.NotDue:
        """The sweep's form: only when the timer is armed and its time has come."""
        execution = validate.validate_execution_id(execution_id)
        why = validate.validate_expiry_reason(reason)
        return await self.runtime.decide_execution(
            execution, lambda row, now: expire_rules.expire_if_due(row, execution, why, now)
        )

    async def promote_delayed(self, execution_id: str) -> answers.Promotion:
        """Make a delayed execution claimable, if its time has come."""
        execution = validate.validate_execution_id(execution_id)
        return await self.runtime.decide_execution(execution, delay.promote_delayed)

    async def mark_lease_expired_if_due(self, execution_id: str) -> answers.MarkedExpired | answers.NothingToDo:
        """Mark a lapsed lease, so that the work can be taken over."""
        execution = validate.validate_execution_id(execution_id)
        return await self.runtime.decide_execution(execution, expire_rules.mark_lease_expired_if_due)

    async def revoke_lease(
        self,
        execution_id: str,
        *,
        expected_lease_id: str = "",
        worker_instance_id: str = "",
        reason: str = "operator_revoke",
    ) -> answers.Revoked | answers.NothingToDo:
        """Take a lease away at once."""
        execution = validate.validate_execution_id(execution_id)
        expected = validate.uuid_unless_blank("expected_lease_id", expected_lease_id) or ""
        instance = validation.text("worker_instance_id", worker_instance_id)
        why = validation.text("reason", reason)
        return await self.runtime.decide_execution(
            execution, lambda row, _: operator.revoke_lease(row, expected, instance, why)
        )

    async def change_priority(self, execution_id: str, new_priority: int, *, lane_id: str = "") -> answers.Changed:
        """Re-order a claimable execution. The lane is a hint; its own lane decides."""
        execution = validate.validate_execution_id(execution_id)
        priority = validation.integer("new_priority", new_priority)
        validation.text("lane_id", lane_id)
        return await self.runtime.decide_execution(execution, lambda row, _: operator.change_priority(row, priority))

    async def block_execution_for_admission(
        self, execution_id: str, *, reason: str, detail: str = ""
    ) -> answers.Blocked | answers.Rejected:
        """Take a claimable execution out of reach; that its state forbids it is an answer, not an error."""
        execution = validate.validate_execution_id(execution_id)
        why, words = validation.text("reason", reason), validation.text("detail", detail)
        try:
            return await self.runtime.decide_execution(execution, lambda row, _: operator.block(row, why, words))
        except (errors.NotFound, errors.ContentionError) as refused:
            return answers.Rejected(str(refused))

    async def block_route(
        self, execution_id: str, *, detail: str = "no connected worker satisfies required_capabilities"
    ) -> answers.Blocked | answers.Rejected:
        """Note that no connected worker can run it; a worker that can still takes it at once."""
        return await self.block_execution_for_admission(
            execution_id, reason="waiting_for_capable_worker", detail=detail
        )

    async def unblock_execution(self, execution_id: str, *, expected_reason: str | None = None) -> answers.Unblocked:
        """Make a blocked execution claimable again."""
        execution = validate.validate_execution_id(execution_id)
        expected = validation.optional_text("expected_reason", expected_reason)
        return await self.runtime.decide_execution(execution, lambda row, _: operator.unblock(row, expected))

    async def set_execution_tag(self, execution_id: str, key: str, value: str) -> None:
        """Set one tag."""
        execution = validate.validate_execution_id(execution_id)
        name = validation.text("key", key)
        if refused := tag_rules.check_tag_key(name) or tag_rules.check_not_reserved(name):
            raise refused
        pair = {name: validation.text("value", value)}
        if bad := tag_rules.check_tags(pair):
            raise bad
        await self.runtime.decide_execution(execution, lambda row, _: tag_rules.set_tags(row, pair))

    async def set_execution_tags(self, execution_id: str, pairs: Mapping[str, str]) -> int:
        """Set several tags, all or none; how many were given."""
        execution = validate.validate_execution_id(execution_id)
        given = validate.validate_tags(pairs)
        if refused := tag_rules.check_not_empty(given):
            raise refused

        def decide(row: Execution | None, _: int) -> Decision[int]:
            if row is not None and (bad := tag_rules.check_tags(given)):
                return Decision(bad)
            return tag_rules.set_tags(row, given)

        return await self.runtime.decide_execution(execution, decide)

    async def replay_execution(self, execution_id: str) -> answers.Replayed:
        """Give a finished execution another life."""
        execution = validate.validate_execution_id(execution_id)
        while True:
            prepared = await self._prepared_for_replay(execution)
            answer = await self._replay(execution, prepared)
            if answer is not None:
                return answer

    async def _prepared_for_replay(self, execution_id: str) -> int | None:
        """Take back the end of an execution with many edges, some edges at a time; the revision that was prepared."""
        row = first((await self.runtime.load((Read(Execution, (execution_id,)),))).rows[0])
        if not successors.has_many(row) or isinstance(replay.replay(row).answer, errors.FabricError):
            return None
        revision: int | None = None
        where, order = (Where("upstream_execution_id", "=", execution_id),), ("upstream_execution_id", "edge_id")
        after: tuple[str, str] | None = None
        while True:
            edges: list[Edge] = await self.runtime.scan(Scan(Edge, where, order, after, MAX_EDGES_PER_STEP))
            seen = revision

            def decide(rows: Rows, _: int, edges: list[Edge] = edges, seen: int | None = seen) -> Decision[int | None]:
                return successors.retract_outcomes(first(rows[0]), edges, seen)

            revision = await self.runtime.decide_and_commit((Read(Execution, (execution_id,)),), decide)
            if revision is None or len(edges) < MAX_EDGES_PER_STEP:
                return revision
            after = (execution_id, edges[-1].edge_id)

    async def _replay(self, execution: str, prepared: int | None) -> answers.Replayed | None:
        """Replay an execution; None if it has many edges and is not of the revision that was prepared."""

        def decide(rows: Rows, _: int) -> Decision[answers.Replayed | None]:
            row = first(rows[0])
            if successors.has_many(row) and row.revision != prepared:
                refused = replay.replay(row)
                return refused if isinstance(refused.answer, errors.FabricError) else Decision(None)
            if row is None or len(rows) == 1:
                return replay.replay(row)
            if len(rows) == 3:
                decision = replay.replay(row)
            else:
                upstreams = {each[0].execution_id: each[0] for each in rows[5:] if each}
                decision = dependencies.replay_skipped_member(row, first(rows[3]), rows[4], upstreams)
            return flow_cancel.without_pending_cancel(decision, first(rows[1]), rows[2])

        return await self.runtime.decide_and_commit(
            (Read(Execution, (execution,)),), decide, load_more=self._around_a_replay
        )

    async def _around_a_replay(self, rows: Rows) -> Rows:
        """Of a member: whether its flow is about to cancel it; if it was skipped, its join and its upstreams, too."""
        row = first(rows[0])
        if row is None or row.flow_id is None:
            return []
        wants: tuple[Read, ...] = (
            Read(CancelBacklog, (row.flow_id,)),
            Read(PendingMemberCancel, (row.flow_id, row.execution_id)),
        )
        if not dependencies.is_skipped_member(row):
            return (await self.runtime.load(wants)).rows
        wants += (Read(EdgeGroup, (row.flow_id, row.execution_id)), Read(Dependency, (row.execution_id,)))
        found = (await self.runtime.load(wants)).rows
        names = sorted({one.upstream_execution_id for one in found[3]})
        return [*found, *(await self.runtime.load([Read(Execution, (name,)) for name in names])).rows]
