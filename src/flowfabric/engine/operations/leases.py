"""Complete and fail: how attempts end, one at a time or many in one trip.

What was claimed together may end together, without a task for each. Each end is decided by the same rule as a single
one, on the sheet that its claim left here. Whatever that does not settle (a sheet that is not known, a refusal, an
answer that got lost) is settled on its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from flowfabric import errors
from flowfabric.engine.operations.executions import NO_FENCE, ExecutionOperations, fence_of
from flowfabric.engine.runtime.after_commit import Rows
from flowfabric.engine.runtime.runtime import UnknownOutcome
from flowfabric.engine.validation import execution as validate
from flowfabric.handles import Handle
from flowfabric.model.answers import execution as answers
from flowfabric.model.change import Change
from flowfabric.model.execution import Execution
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution import finish
from flowfabric.rules.execution.lease import Fence
from flowfabric.stores.queries import Read

YIELD_TURNS = 5  # of the loop, within which a worker has handed over what it did with work that was handed to it


class LeaseOperations(ExecutionOperations):
    """How the holder of a lease ends its attempt."""

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
        execution, shown = self.execution_and_fence(handle, execution_id, fence)
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
        execution, shown = self.execution_and_fence(handle, execution_id, fence)
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
            shown = Fence(fields.lease_id, fields.lease_epoch, fields.attempt_id)
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
        shown = fence_of(handle)
        return await self.runtime.decide_and_commit(
            (Read(Execution, (handle.fields.execution_id,)),),
            lambda rows, now: finish.complete(rows[0][0] if rows[0] else None, shown, None, payload, label, now),
            assumed_rows=trusting,
            unknown_outcomes=doubts,
        )
