"""The verbs of a life but for its end (`finishing`): create, renew, note, delay, cancel, replay, expire, operate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.operations.bulk_create import BulkCreate, create_in_transaction, create_one
from flowfabric.engine.operations.creating import ExecutionCreator
from flowfabric.engine.operations.purging import PurgeOperations
from flowfabric.engine.operations.replay import ReplayOperations
from flowfabric.engine.runtime.after_commit import Rows, first
from flowfabric.engine.validation import execution as validate
from flowfabric.handles import Handle, HandleFields
from flowfabric.model.answers import execution as answers
from flowfabric.model.change import FromNow
from flowfabric.model.execution import Execution
from flowfabric.model.flow import EdgeGroup
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import cancel, delay, lease, operator
from flowfabric.rules.execution import expire as expire_rules
from flowfabric.rules.execution import progress as progress_rules
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution.create import CreateExecution
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.flow import dependencies
from flowfabric.rules.scheduling import queue
from flowfabric.stores.claims import LeaseRef
from flowfabric.stores.port import SupportsCallerTransaction
from flowfabric.stores.queries import Read

NO_FENCE = Fence()
MAX_CHILDREN_PER_CHANGE = 100  # children that are cancelled in one change


class ExecutionOperations(ReplayOperations, PurgeOperations, ExecutionCreator):
    """What can be done to an execution, by the names of the specification."""

    create_validator: validate.CreateValidator

    # -- create -------------------------------------------------------------------------------------------------

    async def create(self, ask: CreateExecution) -> answers.Created | answers.Duplicate:
        """Create an execution as a request says that stands ready."""
        return await create_one(self.runtime, self.create_validator(ask), assume_absent=True)

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

    # -- the holder's verbs -------------------------------------------------------------------------------------

    async def renew(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        attempt_index: int | None = None,
        fence: Fence = NO_FENCE,
        source: str | None = None,
        lease_ttl_ms: int | None = None,
    ) -> answers.Renewed:
        """Move the end of a live lease to now + ttl, which may also be earlier than it was.

        Without a handle the whole fence is needed: there is no `source` that may renew a lease it does not hold.
        """
        validate.validate_source(source)
        if handle is None:
            held = await self._named_lease(execution_id, attempt_index, fence, lease_ttl_ms)
        else:
            held = self._held(handle, lease_ttl_ms)
        [answer] = self._counted(await self._renew([held]))
        if isinstance(answer, errors.FabricError):
            raise answer
        return answer

    async def renew_many(
        self, handles: Sequence[Handle], *, lease_ttl_ms: int | None = None
    ) -> list[answers.Renewed | errors.FabricError]:
        """Renew many leases in one round trip; each answer stands for itself."""
        held: list[LeaseRef | errors.FabricError] = []
        for handle in validate.validate_iterable("handles", handles):
            try:
                held.append(self._held(handle, lease_ttl_ms))
            except errors.FabricError as refused:
                held.append(refused)
        return self._counted(await self._renew(held))

    async def _renew(self, held: Sequence[LeaseRef | errors.FabricError]) -> list[answers.Renewed | errors.FabricError]:
        # No store keeps an epoch beyond 63 bits, so a lease with one is not even asked for.
        leases = [one for one in held if isinstance(one, LeaseRef) and one.lease_epoch <= validation.MAX_INTEGER]
        renewed: list[int | None] = []
        if leases:
            store = self.runtime.store
            renewed = await self.runtime.retry_while_unavailable(lambda: store.renew(leases, lease.RENEWAL))
        ends = dict(zip(leases, renewed, strict=True))
        results: list[answers.Renewed | errors.FabricError] = []
        for asked in held:
            if isinstance(asked, errors.FabricError):
                results.append(asked)
            elif (end := ends.get(asked)) is not None:
                if (seen := self.runtime._lease_cache.get(asked.execution_id)) is not None:
                    self.runtime._lease_cache[asked.execution_id] = msgspec.structs.replace(seen, lease_expires_at=end)
                    self.runtime.track_lease_expiry(seen.lane_id, end)  # it may have become shorter
                results.append(answers.Renewed(end, asked.lease_epoch))
            else:
                results.append(await self._why_not_renewed(asked))
        return results

    def _counted(
        self, results: list[answers.Renewed | errors.FabricError]
    ) -> list[answers.Renewed | errors.FabricError]:
        lost = sum(isinstance(one, errors.FabricError) for one in results)
        self.runtime.metrics.count("ff_lease_renewal", len(results) - lost, outcome="ok")
        self.runtime.metrics.count("ff_lease_renewal", lost, outcome="error")
        return results

    async def _why_not_renewed(self, held: LeaseRef) -> answers.Renewed | errors.FabricError:
        fence = Fence(held.lease_id, held.lease_epoch, held.attempt_id)
        try:
            await self.runtime.decide_execution(
                held.execution_id, lambda row, now: lease.check_renewal(row, held.attempt_index, fence, now)
            )
        except errors.FabricError as refused:
            return refused
        return (await self._renew([held]))[0]  # it was live after all: the first try met a passing fault

    def _held(self, handle: Handle, lease_ttl_ms: int | None) -> LeaseRef:
        fields = self.runtime.handle_fields(handle)
        return LeaseRef(
            fields.execution_id,
            fields.attempt_index,
            fields.attempt_id,
            fields.lease_id,
            fields.lease_epoch,
            validation.duration_ms("lease_ttl_ms", fields.lease_ttl_ms if lease_ttl_ms is None else lease_ttl_ms),
        )

    async def _named_lease(
        self, execution_id: str | None, attempt_index: int | None, fence: Fence, lease_ttl_ms: int | None
    ) -> LeaseRef:
        ttl = validation.duration_ms("lease_ttl_ms", lease_ttl_ms)
        index = validation.integer("attempt_index", attempt_index, least=0, most=validate.MAX_ATTEMPT_INDEX)
        execution, shown = self.execution_and_fence(None, execution_id, fence)
        if shown.lease_id is None or shown.lease_epoch is None or shown.attempt_id is None:
            await self.runtime.decide_execution(execution, lambda row, now: lease.check_renewal(row, index, shown, now))
        return LeaseRef(execution, index, shown.attempt_id or "", shown.lease_id or "", shown.lease_epoch or 0, ttl)

    async def progress(
        self, handle: Handle, *, pct: int | None = None, message: str | None = None
    ) -> answers.ProgressNoted:
        """Note how far the work is; what is not given stays as it was."""
        fields = self.runtime.handle_fields(handle)
        return await self.update_progress(
            fields.execution_id, fence=_fence(fields), pct=pct, message=message, _trust=True
        )

    async def update_progress(
        self,
        execution_id: str,
        *,
        fence: Fence,
        pct: int | None = None,
        message: str | None = None,
        _trust: bool = False,
    ) -> answers.ProgressNoted:
        """Note progress for a caller that names its lease."""
        execution, shown = self.execution_and_fence(None, execution_id, fence)
        share = None if pct is None else validation.integer("progress_pct", pct, least=0, most=100)
        words = validation.optional_text("progress_message", message)
        return await self.runtime.decide_execution(
            execution, lambda row, now: progress_rules.update_progress(row, shown, share, words, now), use_cache=_trust
        )

    async def delay(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = NO_FENCE,
        source: str | None = None,
        delay_until: int,
    ) -> answers.Delayed:
        """Put the work away until an instant; the same attempt goes on afterwards."""
        execution, shown = self.execution_and_fence(handle, execution_id, fence)
        by = validate.validate_source(source)
        until = validation.instant_ms("delay_until", delay_until)
        return await self.runtime.decide_execution(
            execution,
            lambda row, now: delay.delay(row, shown, by, until, now),
            use_cache=handle is not None and self._untimed(execution),
        )

    async def delay_for(self, handle: Handle, length_ms: int, *, reason: str = "") -> answers.Delayed:
        """Put the work away for a while, reckoned by the store's clock; 0 hands it back at once."""
        fields = self.runtime.handle_fields(handle)
        until = FromNow(validation.duration_ms("length_ms", length_ms, least=0))
        why = validation.text("reason", reason)
        return await self.runtime.decide_execution(
            fields.execution_id,
            lambda row, now: delay.delay(row, _fence(fields), None, until, now, detail=why),
            use_cache=self._untimed(fields.execution_id),
        )

    async def wait_children(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = NO_FENCE,
        source: str | None = None,
    ) -> answers.Moved:
        """Put the work away until its dependencies are resolved."""
        execution, shown = self.execution_and_fence(handle, execution_id, fence)
        by = validate.validate_source(source)
        # Only for a holder: an operator means the lease of now, and the one that is remembered here may be long over.
        seen = self.runtime._lease_cache.get(execution) if handle is not None and self._untimed(execution) else None
        return await self.runtime.decide_and_commit(
            (Read(Execution, (execution,)),),
            lambda rows, now: dependencies.wait_children(first(rows[0]), first(rows[1]), shown, by, now),
            assumed_rows=[[seen], []] if seen is not None and seen.flow_id is None else None,
            load_more=self._join_group_of,
        )

    async def _join_group_of(self, rows: Rows) -> Rows:
        """The join of a loaded execution, to be decided together with it."""
        row = first(rows[0])
        if row is None or row.flow_id is None:
            return [[]]
        return (await self.runtime.load((Read(EdgeGroup, (row.flow_id, row.execution_id)),))).rows

    def _untimed(self, execution_id: str) -> bool:
        """Whether a remembered sheet will do: the time left of an attempt is reckoned from a fresh look only."""
        seen = self.runtime._lease_cache.get(execution_id)
        return seen is not None and seen.attempt_timeout_at is None

    def execution_and_fence(self, handle: Handle | None, execution_id: str | None, fence: Fence) -> tuple[str, Fence]:
        """Which execution is meant, and what is shown for it."""
        if handle is not None:
            fields = self.runtime.handle_fields(handle)
            return fields.execution_id, _fence(fields)
        return validate.validate_execution_id(execution_id), validate.validate_fence(fence)

    # -- cancel, expire, replay ---------------------------------------------------------------------------------

    async def cancel(self, handle: Handle, *, reason: str = "") -> answers.Cancelled:
        """Cancel as the holder; again is success."""
        fields = self.runtime.handle_fields(handle)
        why = validation.text("reason", reason)
        return await self.runtime.decide_execution(
            fields.execution_id, lambda row, _: cancel.cancel(row, _fence(fields), cancel.WORKER, why)
        )

    async def cancel_children(
        self, handle: Handle, execution_ids: Sequence[str], *, reason: str = ""
    ) -> answers.ChildrenCancelled:
        """Cancel children of the execution that is held; some at a time, each portion whole or not at all."""
        fields = self.runtime.handle_fields(handle)
        why = validation.text("reason", reason)
        names = [
            *dict.fromkeys(
                validate.validate_execution_id(one)
                for one in validate.validate_iterable("execution_ids", execution_ids)
            )
        ]
        portions = [
            names[start : start + MAX_CHILDREN_PER_CHANGE] for start in range(0, len(names), MAX_CHILDREN_PER_CHANGE)
        ]
        done = [await self._cancel_portion(fields, portion, why) for portion in portions]
        return answers.ChildrenCancelled(
            tuple(name for one in done for name in one.cancelled), tuple(name for one in done for name in one.ended)
        )

    async def _cancel_portion(self, fields: HandleFields, names: Sequence[str], why: str) -> answers.ChildrenCancelled:
        def decide(rows: Rows, now: int) -> Decision[answers.ChildrenCancelled]:
            children = {name: first(found) for name, found in zip(names, rows[1:], strict=True)}
            return cancel.cancel_children(first(rows[0]), _fence(fields), children, why, now)

        wants = [Read(Execution, (name,)) for name in (fields.execution_id, *names)]
        return await self.runtime.decide_and_commit(wants, decide)

    async def cancel_execution(
        self,
        execution_id: str,
        *,
        reason: str = "",
        source: str = lease.OPERATOR_OVERRIDE,
        fence: Fence = NO_FENCE,
    ) -> answers.Cancelled:
        """Cancel whatever it is doing; again is success."""
        execution, shown = self.execution_and_fence(None, execution_id, fence)
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

    async def restore_queue(self, execution_id: str) -> bool:
        """Put an execution whose ready queue was lost into the right one; False when it stands in none."""
        return await self.runtime.decide_execution(execution_id, lambda row, _: queue.restore_queue(row))

    async def mark_lease_expired_if_due(self, execution_id: str) -> answers.MarkedExpired | answers.NothingToDo:
        """Mark a lapsed lease, so that the work can be taken over."""
        execution = validate.validate_execution_id(execution_id)
        return await self.runtime.decide_execution(execution, expire_rules.mark_lease_expired_if_due)

    # -- operators and schedulers -------------------------------------------------------------------------------

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


def fence_of(handle: Handle) -> Fence:
    """What a handle shows to prove that it holds the lease."""
    return _fence(handle.fields)


def _fence(fields: HandleFields) -> Fence:
    return Fence(fields.lease_id, fields.lease_epoch, fields.attempt_id)
