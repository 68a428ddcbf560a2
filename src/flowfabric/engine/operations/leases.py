"""Operations of the holder of a lease: renew it, report progress, delay, wait, cancel, complete and fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.flows.join_resolver import JoinResolver
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.unknown_outcomes import UnknownOutcome
from flowfabric.engine.validation import execution as validate
from flowfabric.handles import Handle, HandleFields
from flowfabric.model.answers import execution as answers
from flowfabric.model.change import Change
from flowfabric.model.execution import Execution
from flowfabric.model.flow import EdgeGroup
from flowfabric.model.instant import FromNow
from flowfabric.model.suspension import Suspension
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import cancel, delay, finish, lease
from flowfabric.rules.execution import progress as progress_rules
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution.fences import Fence
from flowfabric.rules.flow import dependencies
from flowfabric.stores.claims import LeaseRef

NO_FENCE = Fence()
MAX_CHILDREN_PER_CHANGE = 100  # children that one change cancels
YIELD_TURNS = 5  # turns of the event loop in which a worker sends its next claims and completions


class LeaseOperations:
    """Operations of the holder of a lease."""

    runtime: Runtime
    join_resolver: JoinResolver

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
        """Set the expiry of a live lease to now + ttl, which may be earlier than before.

        Without a handle the whole fence is required: no `source` may renew a lease that it does not hold.
        """
        validate.validate_source(source)
        if handle is None:
            ref = await self._lease_of_fence(execution_id, attempt_index, fence, lease_ttl_ms)
        else:
            ref = self._lease_of_handle(handle, lease_ttl_ms)
        [answer] = self._count_renewals(await self._renew([ref]))
        if isinstance(answer, errors.FabricError):
            raise answer
        return answer

    async def renew_many(
        self, handles: Sequence[Handle], *, lease_ttl_ms: int | None = None
    ) -> list[answers.Renewed | errors.FabricError]:
        """Renew many leases in one round trip; return a result or an error for each."""
        refs: list[LeaseRef | errors.FabricError] = []
        for handle in validate.validate_iterable("handles", handles):
            try:
                refs.append(self._lease_of_handle(handle, lease_ttl_ms))
            except errors.FabricError as refused:
                refs.append(refused)
        return self._count_renewals(await self._renew(refs))

    async def _renew(self, refs: Sequence[LeaseRef | errors.FabricError]) -> list[answers.Renewed | errors.FabricError]:
        # An epoch beyond 63 bits cannot be stored, so no lease has it, and the store would refuse the parameter.
        leases = [ref for ref in refs if isinstance(ref, LeaseRef) and ref.lease_epoch <= validation.MAX_INTEGER]
        renewed: list[int | None] = []
        if leases:
            store = self.runtime.store
            renewed = await self.runtime.retry_while_unavailable(lambda: store.renew(leases, lease.RENEWAL))
        expiries = dict(zip(leases, renewed, strict=True))
        results: list[answers.Renewed | errors.FabricError] = []
        for ref in refs:
            if isinstance(ref, errors.FabricError):
                results.append(ref)
            elif (expires_at := expiries.get(ref)) is not None:
                if (row := self.runtime._lease_cache.get(ref.execution_id)) is not None:
                    self.runtime._lease_cache[ref.execution_id] = msgspec.structs.replace(
                        row, lease_expires_at=expires_at
                    )
                    self.runtime.track_lease_expiry(row.lane_id, expires_at)  # it may be earlier than before
                results.append(answers.Renewed(expires_at, ref.lease_epoch))
            else:
                results.append(await self._explain_or_retry_renewal(ref))
        return results

    def _count_renewals(
        self, results: list[answers.Renewed | errors.FabricError]
    ) -> list[answers.Renewed | errors.FabricError]:
        failed = sum(isinstance(result, errors.FabricError) for result in results)
        self.runtime.metrics.count("ff_lease_renewal", len(results) - failed, outcome="ok")
        self.runtime.metrics.count("ff_lease_renewal", failed, outcome="error")
        return results

    async def _explain_or_retry_renewal(self, ref: LeaseRef) -> answers.Renewed | errors.FabricError:
        fence = Fence(ref.lease_id, ref.lease_epoch, ref.attempt_id)
        try:
            await self.runtime.decide_execution(
                ref.execution_id, lambda row, now: lease.check_renewal(row, ref.attempt_index, fence, now)
            )
        except errors.FabricError as refused:
            return refused
        return (await self._renew([ref]))[0]  # the lease is live: the first try met a transient fault

    def _lease_of_handle(self, handle: Handle, lease_ttl_ms: int | None) -> LeaseRef:
        fields = self.runtime.handle_fields(handle)
        return LeaseRef(
            fields.execution_id,
            fields.attempt_index,
            fields.attempt_id,
            fields.lease_id,
            fields.lease_epoch,
            validation.duration_ms("lease_ttl_ms", fields.lease_ttl_ms if lease_ttl_ms is None else lease_ttl_ms),
        )

    async def _lease_of_fence(
        self, execution_id: str | None, attempt_index: int | None, fence: Fence, lease_ttl_ms: int | None
    ) -> LeaseRef:
        ttl = validation.duration_ms("lease_ttl_ms", lease_ttl_ms)
        index = validation.integer("attempt_index", attempt_index, least=0, most=validate.MAX_ATTEMPT_INDEX)
        execution, fence = self._execution_and_fence(None, execution_id, fence)
        if fence.lease_id is None or fence.lease_epoch is None or fence.attempt_id is None:
            await self.runtime.decide_execution(execution, lambda row, now: lease.check_renewal(row, index, fence, now))
        return LeaseRef(execution, index, fence.attempt_id or "", fence.lease_id or "", fence.lease_epoch or 0, ttl)

    async def progress(
        self,
        handle: Handle,
        *,
        pct: int | None = None,
        message: str | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> answers.ProgressNoted:
        """Record the progress of the attempt; an argument that is None leaves its value unchanged.

        `counts` says how often each branch of a durable function has reported, so that a replay does not report again.
        """
        fields = self.runtime.handle_fields(handle)
        return await self.update_progress(
            fields.execution_id, fence=Fence.of(fields), pct=pct, message=message, counts=counts, _use_cache=True
        )

    async def update_progress(
        self,
        execution_id: str,
        *,
        fence: Fence,
        pct: int | None = None,
        message: str | None = None,
        counts: Mapping[str, int] | None = None,
        _use_cache: bool = False,
    ) -> answers.ProgressNoted:
        """Record progress for a caller that names its lease."""
        execution, fence = self._execution_and_fence(None, execution_id, fence)
        percent = None if pct is None else validation.integer("progress_pct", pct, least=0, most=100)
        text = validation.optional_text("progress_message", message)
        counted = None if counts is None else validate.validate_counts("counts", counts)
        return await self.runtime.decide_execution(
            execution,
            lambda row, now: progress_rules.update_progress(row, fence, percent, text, now, counted),
            use_cache=_use_cache,
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
        """Release the execution until an instant; the same attempt continues afterwards."""
        execution, fence = self._execution_and_fence(handle, execution_id, fence)
        by = validate.validate_source(source)
        until = validation.instant_ms("delay_until", delay_until)
        return await self.runtime.decide_execution(
            execution,
            lambda row, now: delay.delay(row, fence, by, until, now),
            use_cache=handle is not None and self._has_no_attempt_timeout(execution),
        )

    async def delay_for(self, handle: Handle, length_ms: int, *, reason: str = "") -> answers.Delayed:
        """Release the execution for this long by the store's clock; 0 means that it is due at once.

        The same attempt continues afterwards.
        """
        fields = self.runtime.handle_fields(handle)
        until = FromNow(validation.duration_ms("length_ms", length_ms, least=0))
        why = validation.text("reason", reason)
        return await self.runtime.decide_execution(
            fields.execution_id,
            lambda row, now: delay.delay(row, Fence.of(fields), None, until, now, detail=why),
            use_cache=self._has_no_attempt_timeout(fields.execution_id),
        )

    async def wait_children(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = NO_FENCE,
        source: str | None = None,
    ) -> answers.Moved:
        """Release the execution until its dependencies are resolved."""
        execution, fence = self._execution_and_fence(handle, execution_id, fence)
        by = validate.validate_source(source)
        reads = ReadSet()
        row, group = reads.one(Execution, execution), reads.more_one(EdgeGroup)
        # Only a holder may use the cache: an operator means the current lease, and the cached one may have expired.
        use_cache = handle is not None and self._has_no_attempt_timeout(execution)
        cached = self.runtime._lease_cache.get(execution) if use_cache else None
        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, now: dependencies.wait_children(row(rows), group(rows), fence, by, now),
            assumed_rows=reads.assume(row, cached) if cached is not None and cached.flow_id is None else None,
            load_more=self.join_resolver.load_join_group,
        )

    def _has_no_attempt_timeout(self, execution_id: str) -> bool:
        """True if the cached row has no attempt timeout; the remaining time is computed from a loaded row only."""
        row = self.runtime._lease_cache.get(execution_id)
        return row is not None and row.attempt_timeout_at is None

    def _execution_and_fence(self, handle: Handle | None, execution_id: str | None, fence: Fence) -> tuple[str, Fence]:
        """Return the execution and the fence of a handle, or the validated arguments."""
        if handle is not None:
            fields = self.runtime.handle_fields(handle)
            return fields.execution_id, Fence.of(fields)
        return validate.validate_execution_id(execution_id), validate.validate_fence(fence)

    async def cancel(self, handle: Handle, *, reason: str = "") -> answers.Cancelled:
        """Cancel the execution as its holder. Idempotent."""
        fields = self.runtime.handle_fields(handle)
        why = validation.text("reason", reason)
        return await self.runtime.decide_execution(
            fields.execution_id, lambda row, _: cancel.cancel(row, Fence.of(fields), cancel.WORKER, why)
        )

    async def cancel_children(
        self, handle: Handle, execution_ids: Sequence[str], *, reason: str = ""
    ) -> answers.ChildrenCancelled:
        """Cancel children of the held execution in batches; each batch is atomic."""
        fields = self.runtime.handle_fields(handle)
        why = validation.text("reason", reason)
        unchecked = validate.validate_iterable("execution_ids", execution_ids)
        children = list(dict.fromkeys(map(validate.validate_execution_id, unchecked)))
        results = [
            await self._cancel_batch(fields, children[start : start + MAX_CHILDREN_PER_CHANGE], why)
            for start in range(0, len(children), MAX_CHILDREN_PER_CHANGE)
        ]
        return answers.ChildrenCancelled(
            tuple(child for result in results for child in result.cancelled),
            tuple(child for result in results for child in result.ended),
        )

    async def _cancel_batch(self, fields: HandleFields, batch: Sequence[str], why: str) -> answers.ChildrenCancelled:
        reads = ReadSet()
        parent = reads.one(Execution, fields.execution_id)
        child_rows = reads.each(Execution, ((child,) for child in batch))

        def decide(rows: Rows, now: int) -> Decision[answers.ChildrenCancelled]:
            children = dict(zip(batch, child_rows(rows), strict=True))
            return cancel.cancel_children(parent(rows), Fence.of(fields), children, why, now)

        return await self.runtime.decide_and_commit(reads, decide)

    async def set_tags(self, handle: Handle, pairs: Mapping[str, str]) -> int:
        """Set several tags of the held execution, all or none; return how many were given.

        Only the holder of the lease may set tags that begin with `ff.`, because people rely on them for decisions.
        """
        execution_id, fence = self.runtime.handle_fields(handle).execution_id, Fence.of(handle.fields)
        tags = validate.validate_tags(pairs)
        if refused := tag_rules.check_not_empty(tags):
            raise refused
        return await self.runtime.decide_execution(
            execution_id, lambda row, now: tag_rules.set_tags_as_holder(row, fence, tags, now), use_cache=True
        )

    async def cancel_as_holder(self, handle: Handle, *, reason: str = "") -> answers.Cancelled:
        """Cancel with the current lease, or with the last one while its attempt is open."""
        execution_id, fence = self.runtime.handle_fields(handle).execution_id, Fence.of(handle.fields)
        why = validation.text("reason", reason)
        return await self.runtime.decide_execution(
            execution_id, lambda row, _: cancel.cancel_as_holder(row, fence, why)
        )

    async def require_lease(self, handle: Handle) -> None:
        """Raise unless the handle's lease is current and live.

        Meant for operations on other partitions, which one change cannot fence: the lease may expire right afterwards.
        """
        fields, fence = self.runtime.handle_fields(handle), Fence.of(handle.fields)
        await self.runtime.decide_execution(
            fields.execution_id, lambda row, now: lease.check_renewal(row, fields.attempt_index, fence, now)
        )

    async def complete(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = NO_FENCE,
        source: str | None = None,
        result: bytes | None = None,
        encoding: str | None = None,
    ) -> answers.Completed:
        """Complete the execution, as the holder of a handle or a fence, or as an operator."""
        execution, fence = self._execution_and_fence(handle, execution_id, fence)
        by = validate.validate_source(source)
        payload = None if result is None else validation.payload("result_payload", result)
        label = validate.validate_encoding(encoding)
        reads = ReadSet()
        row, root = reads.one(Execution, execution), reads.one(Suspension, execution)
        cached = None if handle is None else self.runtime._lease_cache.get(execution)
        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, now: finish.complete(row(rows), fence, by, payload, label, now, root(rows)),
            assumed_rows=None if cached is None or cached.has_mail else reads.assume(row, cached),
        )

    async def fail(
        self,
        handle: Handle | None = None,
        *,
        execution_id: str | None = None,
        fence: Fence = NO_FENCE,
        source: str | None = None,
        reason: str,
        category: str = "transient",
        failure: bytes | None = None,
        retry_policy: str | None = None,
    ) -> answers.RetryScheduled | answers.TerminalFailed:
        """Fail the attempt; the retry policy decides whether another one follows.

        `failure` is the exception as JSON (`model.failure.StoredFailure`), which readers of the outcome get.
        """
        execution, fence = self._execution_and_fence(handle, execution_id, fence)
        by = validate.validate_source(source)
        why = validation.text("failure_reason", reason)
        kind = validation.name("failure_category", category)
        document = None if failure is None else validate.validate_failure(failure)
        own_retry = validation.optional_text("retry_policy_json", retry_policy) or None
        chance = self.runtime.random()
        return await self.runtime.decide_execution(
            execution,
            lambda row, now: finish.fail(
                row,
                fence,
                by,
                reason=why,
                category=kind,
                failure=document,
                retry_policy=own_retry,
                chance=chance,
                now=now,
            ),
            use_cache=handle is not None,
        )

    async def complete_many(
        self,
        results: Sequence[tuple[Handle, bytes | None]],
        *,
        encoding: str | None = None,
        answered: Callable[[], None] | None = None,
    ) -> list[answers.Completed | errors.FabricError]:
        """Complete each of these with its result; return an answer or an error for each, in their order.

        Handles of one execution are completed one after the other, in this order. Completions that can be decided on
        cached rows are committed together; the others are completed one by one afterwards.

        `answered` is called when the store has acknowledged the batch; items that are retried alone take longer. On a
        client/server store this then yields to the event loop, so that claims unblocked by the batch are sent first and
        overlap with the bookkeeping here.
        """
        label = validate.validate_encoding(encoding)
        pairs = validate.validate_pairs("results", results)
        replies: list[Any] = [None] * len(pairs)
        batch: dict[str, tuple[int, Change, Decision[answers.Completed], Execution]] = {}
        singles: dict[str, list[int]] = {}  # indexes of completions that are committed one by one, by execution
        assumed: dict[int, Rows] = {}  # rows to decide some of those on without a load
        unknown: dict[int, tuple[UnknownOutcome, ...]] = {}  # commits of those whose reply was lost
        now, cache, unblocks = self.runtime.estimate.now(), self.runtime._lease_cache, False
        for index, (handle, result) in enumerate(pairs):
            try:
                fields = self.runtime.handle_fields(handle)
                payload = None if result is None else validation.payload("result_payload", result)
            except errors.FabricError as refused:
                replies[index] = refused
                continue
            execution_id = fields.execution_id
            row = cache.get(execution_id)
            if row is None or row.has_mail or execution_id in batch or execution_id in singles:
                singles.setdefault(execution_id, []).append(index)
                continue
            decision = finish.complete(row, Fence.of(fields), None, payload, label, now)
            if decision.change is None or isinstance(decision.answer, errors.FabricError):
                singles.setdefault(execution_id, []).append(index)
                continue
            change = msgspec.structs.replace(decision.change, id=self.runtime.minter.change_id())
            if row.successors is not None and self.runtime.release_inliner is not None:
                inlined = self.runtime.release_inliner.try_inline_release(change, row)
                if inlined is None:
                    assumed[index] = [[row], []]
                    singles.setdefault(execution_id, []).append(index)
                    continue
                change, unblocks = inlined, True
            batch[execution_id] = (index, change, decision, row)
        verdicts = await self.runtime.commit_queue.add_all([change for _, change, _, _ in batch.values()])
        if answered is not None:
            answered()
            for _ in range(YIELD_TURNS if unblocks and not self.runtime.store.executes_in_order else 0):
                await asyncio.sleep(0)
        plain: list[tuple[Change, Execution]] = []
        others: list[tuple[Change, Rows]] = []
        for (index, change, decision, row), verdict in zip(batch.values(), verdicts, strict=True):
            if type(verdict) is int:
                now = verdict
                if change.template is None or row.successors is not None:
                    others.append((change, [[row]]))
                else:
                    plain.append((change, row))
                replies[index] = decision.unwrap(verdict)
            else:
                if isinstance(verdict, errors.StoreUnavailable) and verdict.in_doubt:
                    unknown[index] = (UnknownOutcome(change, decision, [[row]]),)
                singles.setdefault(row.execution_id, []).insert(0, index)  # before the others of its execution
        if plain:
            self.runtime.publish_completions(plain, now)
        if others:
            self.runtime.publish_commits(others, now)

        async def complete_in_order(indexes: Sequence[int]) -> None:
            for index in indexes:
                try:
                    replies[index] = await self._complete_alone(
                        *pairs[index], label, assumed.get(index), unknown.get(index, ())
                    )
                except errors.FabricError as refused:
                    replies[index] = refused

        if singles:
            await asyncio.gather(*map(complete_in_order, singles.values()))
        return replies

    async def _complete_alone(
        self,
        handle: Handle,
        payload: bytes | None,
        label: str | None,
        assumed_rows: Rows | None,
        unknown_outcomes: tuple[UnknownOutcome, ...],
    ) -> answers.Completed:
        reads, fence = ReadSet(), Fence.of(handle.fields)
        execution = handle.fields.execution_id
        row, root = reads.one(Execution, execution), reads.one(Suspension, execution)
        return await self.runtime.decide_and_commit(
            reads,
            lambda rows, now: finish.complete(row(rows), fence, None, payload, label, now, root(rows)),
            assumed_rows=assumed_rows,
            unknown_outcomes=unknown_outcomes,
        )
