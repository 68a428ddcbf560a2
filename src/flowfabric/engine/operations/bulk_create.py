"""Creating many: while one batch is on its way, the next one is decided.

Most of a bulk create meets nothing in its way, so it is decided on the belief that nothing is there, a batch at a time.
Those that are alike but for their ids and inputs are one change, which costs a fraction of one each. When the store
refuses that, each is a change of its own. Whatever it then refuses (a duplicate, a lost answer, a store that was away)
is looked at again on its own.

Nothing is believed of a lane that nobody has heard of: a store may list it as soon as something is sent there, even if
that is then refused. The first create on it looks before.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from flowfabric import errors, ids
from flowfabric.engine.runtime.commit_queue import CommitResult, result_of
from flowfabric.engine.runtime.runtime import Runtime, UnknownOutcome
from flowfabric.engine.runtime.wakeups import lane_topic
from flowfabric.engine.validation import execution as validate
from flowfabric.model.answers import execution as answers
from flowfabric.model.change import Change, Insert, Upsert
from flowfabric.model.execution import Execution, IdempotencyKey
from flowfabric.rules import validation
from flowfabric.rules.decision import Decision
from flowfabric.rules.execution.create import (
    CreateExecution,
    CreateTemplate,
    PolicyDefaults,
    create,
    share_template,
    template_of,
)
from flowfabric.stores.port import TransactionView
from flowfabric.stores.queries import Read

CreateAnswer = answers.Created | answers.Duplicate
MIN_TEMPLATE_BATCH = 100  # as many have to be alike to be one change: each kind of them makes the statement longer


class BulkTemplate(msgspec.Struct, frozen=True, eq=False):
    """An ask that was decided by itself, and what others that are like it share of that."""

    ask: CreateExecution
    partition: int
    shared: CreateTemplate


class DeferredCreate(NamedTuple):
    """One to be looked at again, and the change for it whose answer got lost, if there is one."""

    answer_index: int
    ask: CreateExecution
    unknown_outcomes: tuple[UnknownOutcome, ...] = ()


class PendingCreate(NamedTuple):
    """An execution on its way: its place among the answers, and what to write for it."""

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
        """What to say once it is written."""
        return ((self.answer_index, self.decision.unwrap(written_at)),)

    def deferred(self, *, in_doubt: bool) -> list[DeferredCreate]:
        """The same to be looked at by itself."""
        doubts = (UnknownOutcome(self.change, self.decision, []),) if in_doubt else ()
        return [DeferredCreate(self.answer_index, validate.validate_create(self.ask), doubts)]


class TemplateBatch(msgspec.Struct, frozen=True, eq=False):
    """Executions of one model on their way, as one change: what each has to itself."""

    template: BulkTemplate
    change_id: int
    answer_indexes: list[int]
    asks: list[CreateExecution]
    execution_ids: list[str]
    inputs: list[bytes]

    @property
    def lane_id(self) -> str:
        return self.template.ask.lane_id

    def add(self, place: int, ask: CreateExecution, execution_id: str, given: bytes) -> None:
        """One more."""
        self.answer_indexes.append(place)
        self.asks.append(ask)
        self.execution_ids.append(execution_id)
        self.inputs.append(given)

    @property
    def change(self) -> Change:
        """What writes all of them, or none."""
        change = self.template.shared.create_many(self.execution_ids, self.inputs)
        return msgspec.structs.replace(change, id=self.change_id)

    def answers(self, _: int) -> Iterable[tuple[int, CreateAnswer]]:
        """What to say once they are written."""
        return zip(self.answer_indexes, self.template.shared.answers(self.execution_ids), strict=True)

    def as_single_creates(self, change_id: Callable[[], int]) -> list[PendingCreate]:
        """The same as a change each."""
        found = []
        for place, ask, name, given in zip(
            self.answer_indexes, self.asks, self.execution_ids, self.inputs, strict=True
        ):
            decision = self.template.shared.create(name, given)
            assert decision.change is not None
            change = msgspec.structs.replace(decision.change, id=change_id())
            found.append(PendingCreate(place, ask, decision, change, self.template))
        return found

    def deferred(self, *, in_doubt: bool) -> list[DeferredCreate]:
        """The same to be looked at one by one: all of them show the id of the change, if it was written."""
        return [
            one
            for single in self.as_single_creates(lambda: self.change_id)
            for one in single.deferred(in_doubt=in_doubt)
        ]


class BulkCreate:
    """One call that creates many."""

    def __init__(self, core: Runtime) -> None:
        self._core = core
        self._answers: list[Any] = []
        self._named: set[object] = set()  # ids and keys of this call: a second one is looked at after the first
        self._sent: deque[tuple[Sequence[PendingCreate | TemplateBatch], asyncio.Task[list[CommitResult]]]] = deque()
        self._again: list[DeferredCreate] = []
        self._model: BulkTemplate | None = None  # of the last that was decided by itself

    async def create(self, asks: Iterable[CreateExecution]) -> list[CreateAnswer | errors.FabricError]:
        """One answer for each, in their order, refusals included."""
        waiting = iter(asks)
        while some := list(islice(waiting, self._core.store.batch_limit)):
            batch, strange = self._decided(some)
            await self._send(batch)
            await self._begin_lanes(strange)
        while self._sent:
            await self._arrived()
        left = sorted(self._again, key=lambda one: one.answer_index)
        while left:
            left = await self._look_again(left)
        return self._answers

    async def _send(self, batch: Sequence[PendingCreate | TemplateBatch]) -> None:
        """Send it behind those that the store is at work on, so that it has always one to go on with."""
        while len(self._sent) > self._core.store.concurrent_commits:
            await self._arrived()
        self._sent.append((batch, self._core.commit_queue.send_batch([one.change for one in batch])))
        await asyncio.sleep(0)  # it leaves before the next batch is decided

    async def _begin_lanes(self, strange: list[PendingCreate]) -> None:
        """Hear of these lanes; where nobody has created anything, the first looks before, the others go together."""
        core = self._core
        firsts = {creation.ask.lane_id: creation for creation in reversed(strange)}
        await asyncio.gather(*map(core.load_lane_queues, firsts))
        looking = {
            first.answer_index: first.deferred(in_doubt=False)[0]
            for lane, first in firsts.items()
            if not core.knows_lane(lane)
        }
        await self._look_again(list(looking.values()))
        others = [creation for creation in strange if creation.answer_index not in looking]
        if known := [creation for creation in others if core.knows_lane(creation.ask.lane_id)]:
            await self._send(known)
        self._again += [
            one for other in others if not core.knows_lane(other.lane_id) for one in other.deferred(in_doubt=False)
        ]

    def _decided(
        self, asks: Iterable[CreateExecution]
    ) -> tuple[list[PendingCreate | TemplateBatch], list[PendingCreate]]:
        """What to write for these; apart from it, what is for lanes that nobody has heard of."""
        now, mint = self._core.estimate.now(), self._core.minter.change_id
        decided: list[PendingCreate | TemplateBatch] = []
        copying: TemplateBatch | None = None
        for ask in asks:
            place = len(self._answers)
            self._answers.append(None)
            try:
                own = self._as_before(ask)
                decision = self._by_itself(ask, now) if own is None else None
            except errors.FabricError as refused:
                self._answers[place] = refused
                continue
            names = _names(ask) if own is None else own[:1]
            is_first = self._named.isdisjoint(names)
            self._named.update(names)  # also of one that has to wait: those behind it must not overtake it
            if not is_first or (decision is not None and decision.change is None):
                self._again.append(DeferredCreate(place, validate.validate_create(ask)))
                continue
            if decision is not None and decision.change is not None:
                change = msgspec.structs.replace(decision.change, id=mint())
                decided.append(PendingCreate(place, ask, decision, change, self._model))
            elif own is not None and self._model is not None:
                if copying is None or copying.template is not self._model:
                    copying = TemplateBatch(self._model, mint(), [], [], [], [])
                    decided.append(copying)
                copying.add(place, ask, *own)
        return self._sorted_out(decided)

    def _sorted_out(
        self, decided: list[PendingCreate | TemplateBatch]
    ) -> tuple[list[PendingCreate | TemplateBatch], list[PendingCreate]]:
        """Tell singly what is too little to be told together, and what is for lanes that nobody has heard of."""
        batch: list[PendingCreate | TemplateBatch] = []
        strange: list[PendingCreate] = []
        for one in decided:
            known = self._core.knows_lane(one.lane_id)
            if type(one) is TemplateBatch and (not known or len(one.answer_indexes) < MIN_TEMPLATE_BATCH):
                (batch if known else strange).extend(one.as_single_creates(self._core.minter.change_id))
            elif known:
                batch.append(one)
            elif type(one) is PendingCreate:
                strange.append(one)
        return batch, strange

    def _by_itself(self, ask: CreateExecution, now: int) -> Decision[CreateAnswer]:
        accepted = validate.validate_create(ask)
        decision = create(None, None, accepted, now, defaults=defaults_of(self._core))
        shared = template_of(decision) if ask.execution_deadline_at is None else None
        self._model = None if shared is None else BulkTemplate(accepted, accepted.partition, shared)
        return decision

    def _as_before(self, ask: CreateExecution) -> tuple[str, bytes] | None:
        """Id and input of one that is like the last that was decided by itself: most have nothing else of their own."""
        model = self._model
        if model is None or type(ask) is not CreateExecution or not share_template(ask, model.ask):
            return None
        execution_id = validate.validate_execution_id(ask.execution_id)
        if ids.partition_of(execution_id) != model.partition:
            return None
        return execution_id, validation.payload("input_payload", ask.input_payload)

    async def _arrived(self) -> None:
        """Wait for the oldest batch; what became of it."""
        batch, writing = self._sent.popleft()
        refused: list[PendingCreate] = []
        noted = None
        for one, verdict in zip(batch, await writing, strict=True):
            if isinstance(verdict, int):
                if noted is None or one.template is not noted:  # those of one model are news together
                    self._core.publish_commit(one.change, [], verdict)
                    noted = one.template
                else:
                    self._core.commit_queue.notified_changes.discard(one.change_id)
                for place, answer in one.answers(verdict):
                    self._answers[place] = answer
            elif isinstance(verdict, errors.StoreUnavailable):
                self._again += one.deferred(in_doubt=verdict.in_doubt)
            elif type(one) is TemplateBatch:
                refused += one.as_single_creates(self._core.minter.change_id)
            else:
                self._again += one.deferred(in_doubt=False)
        if refused:
            await self._send(refused)

    async def _look_again(self, left: list[DeferredCreate]) -> list[DeferredCreate]:
        """Settle side by side what has nothing in common; the others, which have to wait for those before them."""
        named: set[object] = set()
        ready: list[DeferredCreate] = []
        later: list[DeferredCreate] = []
        for one in left:
            names = _names(one.ask)
            (ready if named.isdisjoint(names) else later).append(one)
            named.update(names)
        settling = (create_one(self._core, one.ask, unknown_outcomes=one.unknown_outcomes) for one in ready)
        for one, answer in zip(ready, await asyncio.gather(*settling, return_exceptions=True), strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, errors.FabricError):
                raise answer
            self._answers[one.answer_index] = answer
        return later


async def create_in_transaction(core: Runtime, inside: TransactionView, ask: CreateExecution) -> CreateAnswer:
    """Create one as part of a caller's transaction; it is seen by others when that commits."""
    rows, now = None, core.estimate.now()
    while True:
        decision = _decide(core, ask, [[], []] if rows is None else rows, now)
        if decision.change is None:
            if rows is not None:
                return decision.unwrap(now)
        else:
            change = msgspec.structs.replace(decision.change, id=core.minter.change_id())
            committed = result_of(await inside.commit(change))
            if isinstance(committed, errors.FabricError):
                raise committed
            if committed is not None:
                lines = {
                    write.row.line
                    for write in change.writes
                    if isinstance(write, Insert | Upsert) and isinstance(write.row, Execution)
                }
                await inside.notify(frozenset(lane_topic(line.lane_id) for line in lines if line is not None))
                return decision.unwrap(committed)
        loaded = await inside.load(_wants(ask))
        rows, now = loaded.rows, loaded.now


def defaults_of(core: Runtime) -> PolicyDefaults:
    """What holds where policies do not say."""
    return PolicyDefaults(core.settings.retention_ms, core.settings.ageing_ms)


def _wants(ask: CreateExecution) -> tuple[Read, ...]:
    wants: tuple[Read, ...] = (Read(Execution, (ask.execution_id,)),)
    if ask.idempotency_key:
        wants += (Read(IdempotencyKey, (ask.partition, ask.digest)),)
    return wants


def _decide(core: Runtime, ask: CreateExecution, rows: list[list[Any]], now: int) -> Decision[CreateAnswer]:
    existing = rows[0][0] if rows[0] else None
    remembered = rows[1][0] if len(rows) > 1 and rows[1] else None
    return create(existing, remembered, ask, now, defaults=defaults_of(core))


def _names(ask: CreateExecution) -> tuple[object, ...]:
    """What may make two creates the same one."""
    return (ask.execution_id, ask.digest) if ask.idempotency_key else (ask.execution_id,)


async def create_one(
    core: Runtime,
    ask: CreateExecution,
    *,
    assume_absent: bool = False,
    unknown_outcomes: tuple[UnknownOutcome, ...] = (),
) -> CreateAnswer:
    """Create one; `trusting` begins with the belief that neither id nor key is known, if somebody knows the lane."""
    wants = _wants(ask)
    assume_absent = assume_absent and core.knows_lane(ask.lane_id)
    return await core.decide_and_commit(
        wants,
        lambda rows, now: _decide(core, ask, rows, now),
        assumed_rows=[[] for _ in wants] if assume_absent else None,
        unknown_outcomes=unknown_outcomes,
    )
