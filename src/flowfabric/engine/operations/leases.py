"""The verbs of a life but for its end (`finishing`): create, renew, note, delay, cancel, replay, expire, operate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.flows.join_resolver import JoinResolver
from flowfabric.engine.runtime.after_commit import Rows, first
from flowfabric.engine.runtime.runtime import Runtime, UnknownOutcome
from flowfabric.engine.validation import execution as validate
from flowfabric.handles import Handle, HandleFields
from flowfabric.model.answers import execution as answers
from flowfabric.model.change import Change
from flowfabric.model.execution import Execution
from flowfabric.model.instant import FromNow
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import cancel, delay, finish, holder, lease
from flowfabric.rules.execution import progress as progress_rules
from flowfabric.rules.execution import tags as tag_rules
from flowfabric.rules.execution.lease import Fence
from flowfabric.rules.flow import dependencies
from flowfabric.stores.claims import LeaseRef
from flowfabric.stores.queries import Read

NO_FENCE = Fence()
MAX_CHILDREN_PER_CHANGE = 100  # children that are cancelled in one change
YIELD_TURNS = 5  # of the loop, within which a worker has handed over what it did with work that was handed to it


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
        execution, shown = self._execution_and_fence(None, execution_id, fence)
        if shown.lease_id is None or shown.lease_epoch is None or shown.attempt_id is None:
            await self.runtime.decide_execution(execution, lambda row, now: lease.check_renewal(row, index, shown, now))
        return LeaseRef(execution, index, shown.attempt_id or "", shown.lease_id or "", shown.lease_epoch or 0, ttl)

    async def progress(
        self, handle: Handle, *, pct: int | None = None, message: str | None = None
    ) -> answers.ProgressNoted:
        """Note how far the work is; what is not given stays as it was."""
        fields = self.runtime.handle_fields(handle)
        return await self.update_progress(
            fields.execution_id, fence=Fence.of(fields), pct=pct, message=message, _trust=True
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
        execution, shown = self._execution_and_fence(None, execution_id, fence)
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
        execution, shown = self._execution_and_fence(handle, execution_id, fence)
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
            lambda row, now: delay.delay(row, Fence.of(fields), None, until, now, detail=why),
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
        execution, shown = self._execution_and_fence(handle, execution_id, fence)
        by = validate.validate_source(source)
        # Only for a holder: an operator means the lease of now, and the one that is remembered here may be long over.
        seen = self.runtime._lease_cache.get(execution) if handle is not None and self._untimed(execution) else None
        return await self.runtime.decide_and_commit(
            (Read(Execution, (execution,)),),
            lambda rows, now: dependencies.wait_children(first(rows[0]), first(rows[1]), shown, by, now),
            assumed_rows=[[seen], []] if seen is not None and seen.flow_id is None else None,
            load_more=self.join_resolver.load_join_group,
        )

    def _untimed(self, execution_id: str) -> bool:
        """Whether a remembered sheet will do: the time left of an attempt is reckoned from a fresh look only."""
        seen = self.runtime._lease_cache.get(execution_id)
        return seen is not None and seen.attempt_timeout_at is None

    def _execution_and_fence(self, handle: Handle | None, execution_id: str | None, fence: Fence) -> tuple[str, Fence]:
        """Which execution is meant, and what is shown for it."""
        if handle is not None:
            fields = self.runtime.handle_fields(handle)
            return fields.execution_id, Fence.of(fields)
        return validate.validate_execution_id(execution_id), validate.validate_fence(fence)

    async def cancel(self, handle: Handle, *, reason: str = "") -> answers.Cancelled:
        """Cancel as the holder; again is success."""
        fields = self.runtime.handle_fields(handle)
        why = validation.text("reason", reason)
        return await self.runtime.decide_execution(
            fields.execution_id, lambda row, _: cancel.cancel(row, Fence.of(fields), cancel.WORKER, why)
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
            return cancel.cancel_children(first(rows[0]), Fence.of(fields), children, why, now)

        wants = [Read(Execution, (name,)) for name in (fields.execution_id, *names)]
        return await self.runtime.decide_and_commit(wants, decide)

    async def set_tags(self, handle: Handle, pairs: Mapping[str, str]) -> int:
        """Set several tags of the held execution, all or none; how many were given.

        Only the holder of the lease may set tags that begin with `ff.`: people who decide by them trust them.
        """
        execution_id, fence = self.runtime.handle_fields(handle).execution_id, Fence.of(handle.fields)
        given = validate.validate_tags(pairs)
        if refused := tag_rules.check_not_empty(given):
            raise refused
        return await self.runtime.decide_execution(
            execution_id, lambda row, now: holder.set_tags_as_holder(row, fence, given, now), use_cache=True
        )

    async def cancel_as_holder(self, handle: Handle, *, reason: str = "") -> answers.Cancelled:
        """Cancel with the current lease, or with the last one while its attempt is open."""
        execution_id, fence = self.runtime.handle_fields(handle).execution_id, Fence.of(handle.fields)
        why = validation.text("reason", reason)
        return await self.runtime.decide_execution(
            execution_id, lambda row, _: holder.cancel_as_holder(row, fence, why)
        )

    async def require_lease(self, handle: Handle) -> None:
        """Refuse a handle whose lease is not the current one, or is over.

        For verbs on other partitions, which cannot be fenced in the same change: the lease may end right after it.
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
        """End the execution successfully, as the holder of a handle, of a fence, or as an operator."""
        execution, shown = self._execution_and_fence(handle, execution_id, fence)
        by = validate.validate_source(source)
        payload = None if result is None else validation.payload("result_payload", result)
        label = validation.optional_text("result_encoding", encoding, limit=validation.MAX_NAME_BYTES)
        return await self.runtime.decide_execution(
            execution,
            lambda row, now: finish.complete(row, shown, by, payload, label, now),
            use_cache=handle is not None,
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
        retry_policy: str | None = None,
    ) -> answers.RetryScheduled | answers.TerminalFailed:
        """End the attempt as failed; the retry policy decides whether another one follows."""
        execution, shown = self._execution_and_fence(handle, execution_id, fence)
        by = validate.validate_source(source)
        why = validation.text("failure_reason", reason)
        kind = validation.text("failure_category", category, limit=validation.MAX_NAME_BYTES)
        own_retry = validation.optional_text("retry_policy_json", retry_policy) or None
        chance = self.runtime.random()
        return await self.runtime.decide_execution(
            execution,
            lambda row, now: finish.fail(
                row, shown, by, reason=why, category=kind, retry_policy=own_retry, chance=chance, now=now
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
        """Complete each of these with its result; one answer for each, in their order, refusals included.

        Handles of one execution are answered as if they came one after the other, in this order.

        `answered` is called once the store has answered for those that go together; the others have a long way. Where
        the store is a server, whoever goes on with what was set free goes first then, and the answer is made something
        of while the server is at work again.
        """
        label = validation.optional_text("result_encoding", encoding, limit=validation.MAX_NAME_BYTES)
        pairs = validate.validate_pairs("results", results)
        found: list[Any] = [None] * len(pairs)
        sent: dict[str, tuple[int, Change, Decision[answers.Completed], Execution]] = {}
        alone: dict[int, tuple[UnknownOutcome, ...]] = {}
        trusted: dict[int, Rows] = {}  # of those: sheets to decide on without a look
        waiting: dict[str, list[int]] = {}  # and those by execution, in the order in which they are settled
        now, seen, sets_free = self.runtime.estimate.now(), self.runtime._lease_cache, False
        for place, (handle, result) in enumerate(pairs):
            try:
                fields = self.runtime.handle_fields(handle)
                payload = None if result is None else validation.payload("result_payload", result)
            except errors.FabricError as refused:
                found[place] = refused
                continue
            execution_id = fields.execution_id
            row = seen.get(execution_id)
            if row is None or execution_id in sent or execution_id in waiting:
                alone[place] = ()
                waiting.setdefault(execution_id, []).append(place)
                continue
            shown = Fence.of(fields)
            decision = finish.complete(row, shown, None, payload, label, now)
            if decision.change is None or isinstance(decision.answer, errors.FabricError):
                alone[place] = ()
                waiting.setdefault(execution_id, []).append(place)
                continue
            change = msgspec.structs.replace(decision.change, id=self.runtime.minter.change_id())
            if row.successors is not None and self.runtime.release_inliner is not None:
                carrying = self.runtime.release_inliner.try_inline_release(change, row)
                if carrying is None:
                    alone[place], trusted[place] = (), [[row]]
                    waiting.setdefault(execution_id, []).append(place)
                    continue
                change, sets_free = carrying, True
            sent[execution_id] = (place, change, decision, row)
        verdicts = await self.runtime.commit_queue.add_all([change for _, change, _, _ in sent.values()])
        if answered is not None:
            answered()
            for _ in range(YIELD_TURNS if sets_free and not self.runtime.store.executes_in_order else 0):
                await asyncio.sleep(0)
        alike: list[tuple[Change, Execution]] = []
        others: list[tuple[Change, Rows]] = []
        for (place, change, decision, row), verdict in zip(sent.values(), verdicts, strict=True):
            if type(verdict) is int:
                now = verdict
                if change.template is None or row.successors is not None:
                    others.append((change, [[row]]))
                else:
                    alike.append((change, row))
                found[place] = decision.unwrap(verdict)
            else:
                in_doubt = isinstance(verdict, errors.StoreUnavailable) and verdict.in_doubt
                alone[place] = (UnknownOutcome(change, decision, [[row]]),) if in_doubt else ()
                waiting.setdefault(row.execution_id, []).insert(0, place)  # before the others of its execution
        if alike:
            self.runtime.publish_completions(alike, now)
        if others:
            self.runtime.publish_commits(others, now)
        if not alone:
            return found

        async def in_order(places: Sequence[int]) -> None:
            for place in places:
                try:
                    found[place] = await self._complete_alone(*pairs[place], label, alone[place], trusted.get(place))
                except errors.FabricError as refused:
                    found[place] = refused

        await asyncio.gather(*map(in_order, waiting.values()))
        return found

    async def _complete_alone(
        self,
        handle: Handle,
        payload: bytes | None,
        label: str | None,
        doubts: tuple[UnknownOutcome, ...],
        trusting: Rows | None,
    ) -> answers.Completed:
        shown = Fence.of(handle.fields)
        return await self.runtime.decide_and_commit(
            (Read(Execution, (handle.fields.execution_id,)),),
            lambda rows, now: finish.complete(rows[0][0] if rows[0] else None, shown, None, payload, label, now),
            assumed_rows=trusting,
            unknown_outcomes=doubts,
        )
