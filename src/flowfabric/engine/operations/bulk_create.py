"""Bulk create: commits executions in batches, and decides the next batch while one is in flight.

Most creates conflict with nothing, so a batch is decided on the assumption that its ids and keys are absent. Creates
that differ only in id and input form one change, which costs a fraction of single changes. If the store refuses that
change, each of its creates becomes a change of its own. A create that the store refuses then (a duplicate, a lost
reply, an unavailable store) is deferred, and decided alone on loaded rows.

Nothing is assumed about a lane that this process does not know: a store may list a lane as soon as a create is sent to
it, even if that create is refused. So the first create on such a lane loads its rows first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.operations.create import CreateAnswer, create_one, defaults_of
from flowfabric.engine.runtime.commit_queue import CommitResult
from flowfabric.engine.runtime.lane_spread_cache import LaneSpreads
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.unknown_outcomes import UnknownOutcome
from flowfabric.engine.validation import execution as validate
from flowfabric.model.change import Change
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision, refuse
from flowfabric.rules.execution.create import (
    CreateExecution,
    CreateTemplate,
    create,
    share_template,
    template_of,
)

MIN_TEMPLATE_BATCH = 100  # smaller batches are not worth it: each template makes the statement longer
SORTED_BATCHES = 32  # creates are sorted by partition, so that those of a spread lane fill whole batches


class BulkTemplate(msgspec.Struct, frozen=True, eq=False):
    """A create that was decided alone, and the part of its decision that similar creates share."""

    ask: CreateExecution
    partition: int
    shared: CreateTemplate


class DeferredCreate(NamedTuple):
    """A create to decide alone, and its earlier change if the outcome of that is unknown."""

    answer_index: int
    ask: CreateExecution
    unknown_outcomes: tuple[UnknownOutcome, ...] = ()


class PendingCreate(NamedTuple):
    """A create in flight as a change of its own."""

    answer_index: int
    ask: CreateExecution
    decision: Decision[CreateAnswer]
    change: Change
    template: BulkTemplate | None

    @property
    def lane_id(self) -> str:
        return self.ask.lane_id

    @property
    def change_id(self) -> int:
        return self.change.id

    def answers(self, written_at: int) -> Iterable[tuple[int, CreateAnswer]]:
        """Return the answer to the committed create, with its index."""
        return ((self.answer_index, self.decision.unwrap(written_at)),)

    def deferred(self, *, in_doubt: bool) -> list[DeferredCreate]:
        """Return the create to be decided alone."""
        unknown = (UnknownOutcome(self.change, self.decision, []),) if in_doubt else ()
        return [DeferredCreate(self.answer_index, validate.validate_create(self.ask), unknown)]


class TemplateBatch(msgspec.Struct, frozen=True, eq=False):
    """Creates of one template in flight as one change: the values that each has of its own."""

    template: BulkTemplate
    change_id: int
    answer_indexes: list[int]
    asks: list[CreateExecution]
    execution_ids: list[str]
    inputs: list[bytes]

    @property
    def lane_id(self) -> str:
        return self.template.ask.lane_id

    def add(self, answer_index: int, ask: CreateExecution, execution_id: str, input_payload: bytes) -> None:
        """Add a create."""
        self.answer_indexes.append(answer_index)
        self.asks.append(ask)
        self.execution_ids.append(execution_id)
        self.inputs.append(input_payload)

    @property
    def change(self) -> Change:
        """The change that writes all of them or none."""
        change = self.template.shared.create_many(self.execution_ids, self.inputs)
        return msgspec.structs.replace(change, id=self.change_id)

    def answers(self, _: int) -> Iterable[tuple[int, CreateAnswer]]:
        """Return the answers to the committed creates, with their indexes."""
        return zip(self.answer_indexes, self.template.shared.answers(self.execution_ids), strict=True)

    def as_single_creates(self, change_id: Callable[[], int]) -> list[PendingCreate]:
        """Return the creates as a change each."""
        creates = []
        for answer_index, ask, execution_id, input_payload in zip(
            self.answer_indexes, self.asks, self.execution_ids, self.inputs, strict=True
        ):
            decision = self.template.shared.create(execution_id, input_payload)
            assert decision.change is not None
            change = msgspec.structs.replace(decision.change, id=change_id())
            creates.append(PendingCreate(answer_index, ask, decision, change, self.template))
        return creates

    def deferred(self, *, in_doubt: bool) -> list[DeferredCreate]:
        """Return the creates to be decided alone; if the change was committed, every row has its id as revision."""
        return [
            deferred
            for pending in self.as_single_creates(lambda: self.change_id)
            for deferred in pending.deferred(in_doubt=in_doubt)
        ]


class BulkCreate:
    """One call that creates many executions."""

    def __init__(self, runtime: Runtime, lanes: LaneSpreads) -> None:
        self._runtime = runtime
        self._lanes = lanes
        self._answers: list[Any] = []
        self._identities: set[object] = set()  # ids and keys of this call; a create that repeats one is deferred
        self._in_flight: deque[tuple[Sequence[PendingCreate | TemplateBatch], asyncio.Task[list[CommitResult]]]] = (
            deque()
        )
        self._deferred: list[DeferredCreate] = []
        self._template: BulkTemplate | None = None  # the last create that was decided alone made it

    async def create(self, asks: Iterable[CreateExecution]) -> list[CreateAnswer | errors.FabricError]:
        """Create the executions; return an answer or an error for each, in their order."""
        remaining, limit = iter(asks), self._runtime.store.batch_limit
        while window := list(islice(remaining, SORTED_BATCHES * limit)):
            first = len(self._answers)
            self._answers += [None] * len(window)
            numbered = sorted(enumerate(window, first), key=_partition_text)
            for start in range(0, len(numbered), limit):
                some = numbered[start : start + limit]
                if any(getattr(ask, "idempotency_key", None) for _, ask in some):
                    await self._lanes.prepare()
                batch, on_unknown_lanes = self._decide_batch(some)
                await self._send(batch)
                await self._create_on_unknown_lanes(on_unknown_lanes)
        while self._in_flight:
            await self._finish_oldest()
        deferred = sorted(self._deferred, key=lambda pending: pending.answer_index)
        while deferred:
            deferred = await self._create_deferred(deferred)
        return self._answers

    async def _send(self, batch: Sequence[PendingCreate | TemplateBatch]) -> None:
        """Send a batch; keep one more in flight than the store commits concurrently, so that it never idles."""
        while len(self._in_flight) > self._runtime.store.concurrent_commits:
            await self._finish_oldest()
        self._in_flight.append((batch, self._runtime.commit_queue.send_batch([pending.change for pending in batch])))
        await asyncio.sleep(0)  # the batch is sent before the next one is decided

    async def _create_on_unknown_lanes(self, creates: list[PendingCreate]) -> None:
        """Load the queues of these lanes; if a lane is still unknown, decide its first create on loaded rows."""
        runtime = self._runtime
        firsts = {pending.ask.lane_id: pending for pending in reversed(creates)}
        await asyncio.gather(*map(runtime.load_lane_queues, firsts))
        alone = {
            first.answer_index: first.deferred(in_doubt=False)[0]
            for lane, first in firsts.items()
            if not runtime.knows_lane(lane)
        }
        await self._create_deferred(list(alone.values()))
        others = [pending for pending in creates if pending.answer_index not in alone]
        if known := [pending for pending in others if runtime.knows_lane(pending.ask.lane_id)]:
            await self._send(known)
        self._deferred += [
            deferred
            for pending in others
            if not runtime.knows_lane(pending.lane_id)
            for deferred in pending.deferred(in_doubt=False)
        ]

    def _decide_batch(
        self, asks: Iterable[tuple[int, CreateExecution]]
    ) -> tuple[list[PendingCreate | TemplateBatch], list[PendingCreate]]:
        """Decide these creates; return those on known lanes and those on unknown lanes."""
        now, new_change_id = self._runtime.estimate.now(), self._runtime.minter.change_id
        decided: list[PendingCreate | TemplateBatch] = []
        batch: TemplateBatch | None = None
        for answer_index, ask in asks:
            try:
                own_values = self._match_template(ask)
                decision = self._decide_alone(ask, now) if own_values is None else None
            except errors.FabricError as refused:
                self._answers[answer_index] = refused
                continue
            identities = _identities(ask) if own_values is None else own_values[:1]
            is_first = self._identities.isdisjoint(identities)
            self._identities.update(identities)  # also of a deferred create: later ones must not overtake it
            if not is_first or (decision is not None and decision.change is None):
                self._deferred.append(DeferredCreate(answer_index, validate.validate_create(ask)))
                continue
            if decision is not None and decision.change is not None:
                change = msgspec.structs.replace(decision.change, id=new_change_id())
                decided.append(PendingCreate(answer_index, ask, decision, change, self._template))
            elif own_values is not None and self._template is not None:
                if batch is None or batch.template is not self._template:
                    batch = TemplateBatch(self._template, new_change_id(), [], [], [], [])
                    decided.append(batch)
                batch.add(answer_index, ask, *own_values)
        return self._split_by_lane(decided)

    def _split_by_lane(
        self, decided: list[PendingCreate | TemplateBatch]
    ) -> tuple[list[PendingCreate | TemplateBatch], list[PendingCreate]]:
        """Separate creates on known and unknown lanes; break up template batches that are small or on unknown lanes."""
        batch: list[PendingCreate | TemplateBatch] = []
        on_unknown_lanes: list[PendingCreate] = []
        for pending in decided:
            known = self._runtime.knows_lane(pending.lane_id)
            if type(pending) is TemplateBatch and (not known or len(pending.answer_indexes) < MIN_TEMPLATE_BATCH):
                singles = pending.as_single_creates(self._runtime.minter.change_id)
                (batch if known else on_unknown_lanes).extend(singles)
            elif known:
                batch.append(pending)
            elif type(pending) is PendingCreate:
                on_unknown_lanes.append(pending)
        return batch, on_unknown_lanes

    def _decide_alone(self, ask: CreateExecution, now: int) -> Decision[CreateAnswer]:
        accepted = validate.validate_create(ask)
        place = self._lanes.place(accepted)
        if place is not None and place.lookups:  # decided alone, after the lookups
            return refuse(errors.KeyElsewhere(execution_id=accepted.execution_id))
        decision = create(None, None, accepted, now, defaults=defaults_of(self._runtime), place=place)
        shared = template_of(decision) if ask.execution_deadline_at is None else None
        self._template = None if shared is None else BulkTemplate(accepted, accepted.partition, shared)
        return decision

    def _match_template(self, ask: CreateExecution) -> tuple[str, bytes] | None:
        """Return the id and the input of a create if it shares everything else with the template."""
        template = self._template
        if template is None or type(ask) is not CreateExecution or not share_template(ask, template.ask):
            return None
        execution_id = validate.validate_execution_id(ask.execution_id)
        if ids.partition_of(execution_id) != template.partition:
            return None
        return execution_id, validation.payload("input_payload", ask.input_payload)

    async def _finish_oldest(self) -> None:
        """Wait for the oldest batch in flight; record its answers and defer the creates that were not committed."""
        batch, commit = self._in_flight.popleft()
        refused: list[PendingCreate] = []
        published = None
        for pending, verdict in zip(batch, await commit, strict=True):
            if isinstance(verdict, int):
                if published is None or pending.template is not published:  # one notification per template suffices
                    self._runtime.publish_commit(pending.change, [], verdict)
                    published = pending.template
                else:
                    self._runtime.commit_queue.notified_changes.discard(pending.change_id)
                for answer_index, answer in pending.answers(verdict):
                    self._answers[answer_index] = answer
            elif isinstance(verdict, errors.StoreUnavailable):
                self._deferred += pending.deferred(in_doubt=verdict.in_doubt)
            elif type(pending) is TemplateBatch:
                refused += pending.as_single_creates(self._runtime.minter.change_id)
            else:
                self._deferred += pending.deferred(in_doubt=False)
        if refused:
            await self._send(refused)

    async def _create_deferred(self, deferred: list[DeferredCreate]) -> list[DeferredCreate]:
        """Create concurrently those with distinct ids and keys; return the others, which must wait for them."""
        seen: set[object] = set()
        ready: list[DeferredCreate] = []
        later: list[DeferredCreate] = []
        for pending in deferred:
            identities = _identities(pending.ask)
            (ready if seen.isdisjoint(identities) else later).append(pending)
            seen.update(identities)
        creating = (
            create_one(self._runtime, self._lanes, one.ask, unknown_outcomes=one.unknown_outcomes) for one in ready
        )
        for pending, answer in zip(ready, await asyncio.gather(*creating, return_exceptions=True), strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, errors.FabricError):
                raise answer
            self._answers[pending.answer_index] = answer
        return later


def _partition_text(numbered: tuple[int, Any]) -> str:
    """Return the tag of a create's id; creates of one partition keep their order."""
    execution_id = getattr(numbered[1], "execution_id", None)
    return execution_id.partition("}")[0] if type(execution_id) is str else ""


def _identities(ask: CreateExecution) -> tuple[object, ...]:
    """Return the id and the key of a create; two creates that share one of them are duplicates."""
    return (ask.execution_id, ask.digest) if ask.idempotency_key else (ask.execution_id,)
