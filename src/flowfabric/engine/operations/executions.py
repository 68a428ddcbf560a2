"""Executions: create, cancel, expire, replay, reprioritize, block and tag them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.durable.keyed_runs import KeyedRuns
from flowfabric.engine.operations.bulk_create import BulkCreate
from flowfabric.engine.operations.create import ExecutionCreator, create_in_transaction, create_one
from flowfabric.engine.operations.leases import NO_FENCE
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.lane_spread_cache import LaneSpreads
from flowfabric.engine.runtime.read_set import ReadSet, load_each
from flowfabric.engine.runtime.recent_creates import RecentCreates
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.schedules.operator import ScheduleOperator, SchedulePage
from flowfabric.engine.validation import execution as validate
from flowfabric.engine.validation import keys as validate_keys
from flowfabric.engine.validation import suspension as validate_suspension
from flowfabric.model.answers import execution as answers
from flowfabric.model.execution import Execution
from flowfabric.model.flow import CancelBacklog, Dependency, Edge, EdgeGroup, PendingMemberCancel
from flowfabric.model.gate import GateMemo, Reply, StepMemo
from flowfabric.model.scheduling.schedule import Overlap, ScheduleSpec
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.durable import asks
from flowfabric.rules.durable.keys import BATCH_MAILBOX, KeyMode, KeyPolicy
from flowfabric.rules.durable.mailbox import MessageArgs
from flowfabric.rules.execution import cancel, delay, fences, operator, replay
from flowfabric.rules.execution import expire as expire_rules
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.flow import cancel as flow_cancel
from flowfabric.rules.flow import dependencies, successors
from flowfabric.rules.schedules.define import Backfilled, PutOutcome
from flowfabric.rules.schedules.views import ScheduleDescription
from flowfabric.stores.port import SupportsCallerTransaction
from flowfabric.stores.queries import Read, Scan, Where

MAX_EDGES_PER_STEP = 500  # edges whose outcome one change retracts


class ExecutionOperations:
    """Operations on executions that need no lease."""

    runtime: Runtime
    create_validator: validate.CreateValidator
    recent_creates: RecentCreates
    keyed_runs: KeyedRuns
    lane_spreads: LaneSpreads
    schedule_operator: ScheduleOperator

    create_execution = ExecutionCreator.create_execution

    async def create(self, ask: CreateExecution) -> answers.Created | answers.Duplicate:
        """Create an execution from a request; return Duplicate if its id or its idempotency key exists."""
        completions = self.runtime.wakeups.completion_count
        self.lane_spreads.refresh_if_old()
        answer = await create_one(self.runtime, self.lane_spreads, self.create_validator(ask), assume_absent=True)
        if type(answer) is answers.Created:
            self.recent_creates.add(answer.execution_id, completions)
        return answer

    async def start_by_key(
        self, ask: CreateExecution, policy: KeyPolicy, *, message: MessageArgs | None = None
    ) -> answers.Submitted:
        """Create an execution under its key, or handle the one that has the key as the policy says.

        The message goes to the created or existing execution, in the same change; in a batch it is one input.
        """
        accepted, checked = self.create_validator(ask), validate_keys.validate_key_policy(policy)
        if not accepted.idempotency_key:
            raise errors.InvalidInput("idempotency_key: empty")
        told = None
        if message is not None:
            addressed = msgspec.structs.replace(
                validate.check_type("message", message, MessageArgs), execution_id=accepted.execution_id
            )
            internal = BATCH_MAILBOX if checked.mode is KeyMode.BATCH else None
            told = validate_suspension.validate_mail(addressed, internal=internal)
        if checked.mode is KeyMode.BATCH and told is None:
            raise errors.InvalidInput("message: a batch has none; it is the input of this submit")
        return await self.keyed_runs.submit(accepted, checked, told)

    async def find_by_key(
        self, idempotency_key: str, *, namespace: str = "default", lane_id: str = "default"
    ) -> str | None:
        """Return the execution that has a key of this lane: one that has not ended, or else the last one."""
        return await self.keyed_runs.find(
            validation.text("idempotency_key", idempotency_key),
            validation.name("namespace", namespace),
            validate.validate_lane_id(lane_id),
        )

    async def create_executions(
        self, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate | errors.FabricError]:
        """Create many executions in one round trip per batch; return an answer or an error for each, in their order.

        If several share an id or an idempotency key, the first one is created.
        """
        self.lane_spreads.refresh_if_old()
        return await BulkCreate(self.runtime, self.lane_spreads).create(validate.validate_iterable("asks", asks))

    async def create_within(
        self, connection: Any, asks: Iterable[CreateExecution]
    ) -> list[answers.Created | answers.Duplicate]:
        """Create executions as part of the caller's own transaction in the store's Postgres database.

        They become visible and workers are notified when it commits; if it rolls back, nothing is created.
        """
        accepted = [validate.validate_create(ask) for ask in validate.validate_iterable("asks", asks)]
        if not isinstance(self.runtime.store, SupportsCallerTransaction):
            raise errors.InvalidInput("using: only a store in Postgres can join a transaction")
        view = await self.runtime.store.join_transaction(connection)
        return [await create_in_transaction(self.runtime, self.lane_spreads, view, ask) for ask in accepted]

    async def cancel_execution(
        self,
        execution_id: str,
        *,
        reason: str = "",
        source: str = fences.OPERATOR_OVERRIDE,
        fence: Fence = NO_FENCE,
    ) -> answers.Cancelled:
        """Cancel an execution in any state. Idempotent."""
        execution, fence = validate.validate_execution_id(execution_id), validate.validate_fence(fence)
        why = validation.text("reason", reason)
        by = validation.name("source", source)
        return await self.runtime.decide_execution(execution, lambda row, _: cancel.cancel(row, fence, by, why))

    async def expire_execution(
        self, execution_id: str, reason: str = expire_rules.ATTEMPT_TIMEOUT
    ) -> answers.Expired | answers.AlreadyTerminal:
        """Expire an execution, whether its timer is due or not."""
        execution = validate.validate_execution_id(execution_id)
        why = validate.validate_expiry_reason(reason)
        return await self.runtime.decide_execution(execution, lambda row, _: expire_rules.expire(row, execution, why))

    async def expire_if_due(
        self, execution_id: str, reason: str
    ) -> answers.Expired | answers.AlreadyTerminal | answers.NotDue:
        """Expire an execution if this timer of it is set and due."""
        execution = validate.validate_execution_id(execution_id)
        why = validate.validate_expiry_reason(reason)
        return await self.runtime.decide_execution(
            execution, lambda row, now: expire_rules.expire_if_due(row, execution, why, now)
        )

    async def promote_delayed(self, execution_id: str) -> answers.Promotion:
        """Make a delayed execution claimable if its delay is over."""
        execution = validate.validate_execution_id(execution_id)
        return await self.runtime.decide_execution(execution, delay.promote_delayed)

    async def mark_lease_expired_if_due(self, execution_id: str) -> answers.MarkedExpired | answers.NothingToDo:
        """Mark an expired lease, so that another worker can reclaim the execution."""
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
        """Revoke a lease at once; the next claim on the lane takes the work over."""
        execution = validate.validate_execution_id(execution_id)
        expected = validate.uuid_unless_blank("expected_lease_id", expected_lease_id) or ""
        instance = validation.text("worker_instance_id", worker_instance_id)
        why = validation.text("reason", reason)
        return await self.runtime.decide_execution(
            execution, lambda row, _: operator.revoke_lease(row, expected, instance, why)
        )

    async def change_priority(self, execution_id: str, new_priority: int, *, lane_id: str = "") -> answers.Changed:
        """Change the priority of a claimable execution. `lane_id` is only validated."""
        execution = validate.validate_execution_id(execution_id)
        priority = validation.integer("new_priority", new_priority)
        validation.text("lane_id", lane_id)
        return await self.runtime.decide_execution(execution, lambda row, _: operator.change_priority(row, priority))

    async def block_execution_for_admission(
        self, execution_id: str, *, reason: str, detail: str = ""
    ) -> answers.Blocked | answers.Rejected:
        """Block a claimable execution; a state that forbids it is reported as `Rejected`, not raised."""
        execution = validate.validate_execution_id(execution_id)
        reason, detail = validation.text("reason", reason), validation.text("detail", detail)
        try:
            return await self.runtime.decide_execution(execution, lambda row, _: operator.block(row, reason, detail))
        except (errors.NotFound, errors.ContentionError) as refused:
            return answers.Rejected(str(refused))

    async def block_route(
        self, execution_id: str, *, detail: str = "no connected worker satisfies required_capabilities"
    ) -> answers.Blocked | answers.Rejected:
        """Record that no connected worker can run the execution; a worker that can may still claim it at once."""
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
        """Set several tags, all or none; return how many were given."""
        execution = validate.validate_execution_id(execution_id)
        tags = validate.validate_tags(pairs)
        if refused := tag_rules.check_not_empty(tags):
            raise refused

        def decide(row: Execution | None, _: int) -> Decision[int]:
            if row is not None and (bad := tag_rules.check_tags(tags)):
                return Decision(bad)
            return tag_rules.set_tags(row, tags)

        return await self.runtime.decide_execution(execution, decide)

    async def replay_execution(self, execution_id: str) -> answers.Replayed:
        """Start a new life of a finished execution."""
        return await self.replay_life(execution_id, None)

    async def replay_life(self, execution_id: str, life: int | None) -> answers.Replayed:
        """Start a new life of a finished execution; if it has been replayed since this `life`, change nothing."""
        execution = validate.validate_execution_id(execution_id)
        expected = None if life is None else validation.integer("life", life, least=0)
        while True:
            prepared = await self._retract_many_outcomes(execution, expected)
            answer = await self._replay(execution, prepared, expected)
            if answer is not None:
                return answer

    async def _retract_many_outcomes(self, execution_id: str, life: int | None = None) -> int | None:
        """Retract the outcome of an execution with many edges, in batches; return the revision that is prepared."""
        reads = ReadSet()
        row = reads.one(Execution, execution_id)
        execution = row((await self.runtime.load(reads)).rows)
        is_refused = isinstance(replay.replay(execution).answer, errors.FabricError)
        if not successors.has_many(execution) or is_refused or replay.is_life_over(execution, life):
            return None
        revision: int | None = None
        where, order = (Where("upstream_execution_id", "=", execution_id),), ("upstream_execution_id", "edge_id")
        after: tuple[str, str] | None = None
        while True:
            edges: list[Edge] = await self.runtime.scan(Scan(Edge, where, order, after, MAX_EDGES_PER_STEP))

            def decide(
                rows: Rows, _: int, edges: list[Edge] = edges, expected: int | None = revision
            ) -> Decision[int | None]:
                return successors.retract_outcomes(row(rows), edges, expected)

            revision = await self.runtime.decide_and_commit(reads, decide)
            if revision is None or len(edges) < MAX_EDGES_PER_STEP:
                return revision
            after = (execution_id, edges[-1].edge_id)

    async def _replay(
        self, execution_id: str, prepared: int | None, life: int | None = None
    ) -> answers.Replayed | None:
        """Replay an execution; None if it has many edges and its revision is not the prepared one."""
        reads = ReadSet()
        row, steps = reads.one(Execution, execution_id), reads.many(StepMemo, execution_id)
        memos = reads.many(GateMemo, execution_id)
        replies: list[Reply | None] = []
        backlog, pending = reads.more_one(CancelBacklog), reads.more_many(PendingMemberCancel)
        group, edges = reads.more_one(EdgeGroup), reads.more_many(Dependency)
        upstreams = reads.more_each(Execution)

        def decide(rows: Rows, _: int) -> Decision[answers.Replayed | None]:
            execution = row(rows)
            if execution is not None and replay.is_life_over(execution, life):
                return Decision(answers.Replayed(execution.public_state))
            decision = replay.replay(execution, steps=steps(rows), replies=replies)
            if execution is None:
                return decision
            if successors.has_many(execution) and execution.revision != prepared:
                return decision if isinstance(decision.answer, errors.FabricError) else Decision(None)
            if execution.flow_id is None:
                return decision
            if dependencies.is_skipped_member(execution):
                by_id = {upstream.execution_id: upstream for upstream in upstreams(rows) if upstream is not None}
                decision = dependencies.replay_skipped_member(execution, group(rows), edges(rows), by_id)
            return flow_cancel.without_pending_cancel(decision, backlog(rows), pending(rows))

        async def load_more(rows: Rows) -> Rows:
            execution = row(rows)
            asked = ((execution_id, message) for message in asks.received_asks(memos(rows)))
            replies[:] = await load_each(self.runtime, Reply, asked)
            return [] if execution is None or execution.flow_id is None else await self._load_member(execution)

        return await self.runtime.decide_and_commit(reads, decide, load_more=load_more)

    async def put_schedule(
        self,
        name: str,
        spec: ScheduleSpec,
        run: CreateExecution,
        *,
        owner: str | None = None,
        only_new: bool = False,
    ) -> PutOutcome:
        """Put a schedule in place, whose runs are like `run`; the same definition again changes nothing.

        An id, a key, a delay and a deadline of `run` have no meaning here. `owner` is the application that declares the
        schedule in its code. `only_new` refuses to change one that exists with another definition.
        """
        return await self.schedule_operator.put_schedule(name, spec, run, owner=owner, only_new=only_new)

    async def list_schedules(
        self,
        *,
        namespace: str | None = None,
        namespaces: Sequence[str] | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> SchedulePage:
        """List schedules by name, after the cursor."""
        return await self.schedule_operator.list_schedules(
            namespace=namespace, namespaces=namespaces, cursor=cursor, limit=limit
        )

    async def describe_schedule(self, name: str, *, namespace: str = "default") -> ScheduleDescription:
        """Return a schedule with its last ten runs and its next ten instants."""
        return await self.schedule_operator.describe_schedule(name, namespace)

    async def pause_schedule(self, name: str, *, note: str = "", namespace: str = "default") -> bool:
        """Pause a schedule until it is resumed, also through deploys; False if nothing changes."""
        return await self.schedule_operator.pause_schedule(name, note, namespace)

    async def resume_schedule(self, name: str, *, namespace: str = "default") -> bool:
        """Resume a schedule with its next instant; False if it is not paused."""
        return await self.schedule_operator.resume_schedule(name, namespace)

    async def trigger_schedule(
        self, name: str, *, trigger_id: str | None = None, namespace: str = "default"
    ) -> answers.Created | answers.Duplicate:
        """Create a run of a schedule now; the same `trigger_id` again changes nothing."""
        return await self.schedule_operator.trigger_schedule(name, trigger_id, namespace)

    async def backfill_schedule(
        self, name: str, start: int, end: int, *, overlap: Overlap | str = Overlap.QUEUE, namespace: str = "default"
    ) -> Backfilled:
        """Create the runs of instants from `start` to before `end`; an instant that has its run is skipped."""
        return await self.schedule_operator.backfill_schedule(name, start, end, overlap, namespace)

    async def delete_schedule(self, name: str, *, namespace: str = "default") -> bool:
        """Delete a schedule; its runs continue. False if there is none."""
        return await self.schedule_operator.delete_schedule(name, namespace)

    async def retire_schedules(
        self,
        owner: str,
        *,
        keep: Sequence[str],
        note: str = "",
        remove: bool = False,
        namespace: str = "default",
    ) -> list[str]:
        """Pause the schedules that an application no longer declares, or remove them; return their names."""
        return await self.schedule_operator.retire_schedules(owner, keep, note, remove, namespace)

    async def _load_member(self, row: Execution) -> Rows:
        """Load the pending cancel of a flow member; of a skipped one also the join group, the edges and upstreams."""
        reads = ReadSet()
        reads.one(CancelBacklog, row.flow_id)
        reads.many(PendingMemberCancel, row.flow_id, row.execution_id)
        if not dependencies.is_skipped_member(row):
            return (await self.runtime.load(reads)).rows
        reads.one(EdgeGroup, row.flow_id, row.execution_id)
        edges = reads.many(Dependency, row.execution_id)
        rows = (await self.runtime.load(reads)).rows
        upstreams = [Read(Execution, (one,)) for one in sorted({edge.upstream_execution_id for edge in edges(rows)})]
        return [*rows, *(await self.runtime.load(upstreams)).rows]
