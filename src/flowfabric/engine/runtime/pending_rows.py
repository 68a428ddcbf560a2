"""Many decisions about one root, written together.

Optimistic writers of one row refuse each other: of two hundred signals to one execution, one would win a round. So
what this process decides about one root stands in line. While one batch is on its way the next one fills; a batch is
looked at once, decided in order of arrival, each on what the one before left, and written as one change.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.change import Change, Delete, Guard, Insert, Patch, Upsert, Write
from flowfabric.model.execution import Execution
from flowfabric.model.instant import FromNow
from flowfabric.rules.decision import Decision
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.queries import Read

A = TypeVar("A")

MAX_BATCH_DECISIONS = 100  # decisions in one change

Rows = list[list[Any]]
Decide = Callable[[Rows, int], Decision[Any]]
RowKey = tuple[type[msgspec.Struct], tuple[Any, ...]]


class _QueuedDecision(msgspec.Struct):
    wants: Sequence[Read]
    decide: Decide
    answer: asyncio.Future[Any]


class RootQueues:
    """The lines of this process, one a root."""

    def __init__(self, core: Runtime) -> None:
        self._core = core
        self._queues: dict[Hashable, deque[_QueuedDecision]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def decide_and_commit(
        self, root: Hashable, wants: Sequence[Read], decide: Callable[[Rows, int], Decision[A]]
    ) -> A:
        """Settle a decision in its turn. All decisions about this root guard it."""
        line = self._queues.get(root)
        if line is None:  # nobody else is at it
            self._queues[root] = line = deque()
            try:
                return await self._core.decide_and_commit(wants, decide)
            finally:
                if line:
                    task = asyncio.create_task(self._work(root, line))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
                else:
                    del self._queues[root]
        asked = _QueuedDecision(wants, decide, asyncio.get_running_loop().create_future())
        line.append(asked)
        answer: A | errors.FabricError = await asked.answer
        if isinstance(answer, errors.FabricError):
            raise answer
        return answer

    async def _work(self, root: Hashable, line: deque[_QueuedDecision]) -> None:
        try:
            while line:
                batch = [line.popleft() for _ in range(min(MAX_BATCH_DECISIONS, len(line)))]
                for asked, answer in zip(batch, await self._settled(batch), strict=True):
                    if not asked.answer.done():
                        asked.answer.set_result(answer)
        finally:
            del self._queues[root]

    async def _settled(self, batch: list[_QueuedDecision]) -> list[Any]:
        wants = list(dict.fromkeys(want for asked in batch for want in asked.wants))
        try:
            return await self._core.decide_and_commit(wants, lambda rows, now: decide_batch(batch, wants, rows, now))
        except errors.StoreUnavailable as away:
            return [away] * len(batch)
        except errors.FabricError as refused:  # the store cannot keep something: each has to stand for itself
            if len(batch) == 1:
                return [refused]
            return [answer for asked in batch for answer in await self._settled([asked])]
        except Exception as bug:
            return [_bug(bug)] * len(batch)


def decide_batch(batch: Sequence[_QueuedDecision], wants: Sequence[Read], rows: Rows, now: int) -> Decision[list[Any]]:
    """One decision for many: each is made on what the ones before it would have left."""
    ledger = PendingRows(wants, rows, now)
    decisions: list[Decision[Any]] = []
    for asked in batch:
        decision = asked.decide([ledger.find(want) for want in asked.wants], now)
        if decision.change is not None:
            ledger.apply(decision.change)
        decisions.append(decision)
    return Decision(lambda then: [_answer(decision, then) for decision in decisions], ledger.to_change())


def _answer(decision: Decision[Any], now: int) -> Any:
    try:
        return decision.unwrap(now)
    except errors.FabricError as refused:
        return refused


class PendingRows:
    """Rows as they will be once some changes are written, and the one change that makes them so."""

    def __init__(self, wants: Sequence[Read], rows: Rows, now: int) -> None:
        self._now = now
        self._rows: dict[RowKey, Any] = {}
        for want, found in zip(wants, rows, strict=True):
            self._rows.update(((want.row, _key(row)), row) for row in found)
        self._known = dict(self._rows)
        self._meant: dict[RowKey, Any] = {}  # rows to be written, with the instants that the store fills in
        self._execution_patches: dict[RowKey, dict[str, Any]] = {}
        self._dropped: dict[RowKey, None] = {}
        self._guards: dict[RowKey, Guard] = {}
        self._changes: list[Change] = []

    def find(self, want: Read) -> list[Any]:
        """The rows of a want as they are by now, in key order."""
        length = len(want.key)
        found = [(key, row) for (kind, key), row in self._rows.items() if kind is want.row and key[:length] == want.key]
        return [row for _, row in sorted(found, key=lambda one: one[0])]

    def apply(self, change: Change) -> None:
        """What the rows become."""
        self._changes.append(change)
        for guard in change.guards:
            kept = self._guards.setdefault((guard.row, guard.key), guard)
            if kept.lease is None and guard.lease is not None:
                self._guards[guard.row, guard.key] = msgspec.structs.replace(kept, lease=guard.lease)
        for write in change.writes:
            self._write(write)

    def _write(self, write: Write) -> None:
        match write:
            case Insert(row=new) | Upsert(row=new):
                self._set((type(new), _key(new)), new)
            case Patch():
                self._patch(write)
            case Delete(row=kind, key=start):
                self._dropped[kind, start] = None
                for place in [one for one in self._rows if one[0] is kind and one[1][: len(start)] == start]:
                    del self._rows[place]
                    self._meant.pop(place, None)

    def _patch(self, patch: Patch) -> None:
        place = (patch.row, patch.key)
        row = self._rows.get(place)
        if row is None:
            raise errors.BugError(f"a patch of a row that was not asked for: {patch.row.__name__}")
        if patch.unless_set is not None and getattr(row, patch.unless_set) is not None:
            return
        if patch.row is Execution:  # its pulse moves without a guard, so it is never written as a whole
            self._execution_patches.setdefault(place, {}).update(patch.fields)
            self._rows[place] = self._filled(msgspec.structs.replace(row, **patch.fields))
        else:
            self._set(place, msgspec.structs.replace(self._meant.get(place, row), **patch.fields))

    def _set(self, place: RowKey, row: Any) -> None:
        self._meant[place] = row
        self._rows[place] = self._filled(row)

    def _filled(self, row: Any) -> Any:
        values = msgspec.structs.asdict(row)
        given = {name: self._now + value.offset for name, value in values.items() if type(value) is FromNow}
        return msgspec.structs.replace(row, **given) if given else row

    def to_change(self) -> Change | None:
        """Everything that was applied, as one change; None when there was nothing."""
        if not self._changes:
            return None
        writes: list[Write] = [Delete(kind, key) for kind, key in self._dropped]
        writes += [Patch(kind, key, fields) for (kind, key), fields in self._execution_patches.items()]
        for place, row in self._meant.items():
            writes.append(Upsert(row) if place in self._known or self._was_dropped(place) else Insert(row))
        bounds = [(change.not_before, change.not_after) for change in self._changes]
        return Change(
            guards=tuple(self._guards.values()),
            writes=tuple(writes),
            events=tuple(event for change in self._changes for event in change.events),
            not_before=max((early for early, _ in bounds if early is not None), default=None),
            not_after=min((late for _, late in bounds if late is not None), default=None),
        )

    def _was_dropped(self, place: RowKey) -> bool:
        kind, key = place
        return any(kind is dropped and key[: len(start)] == start for dropped, start in self._dropped)


def _key(row: Any) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in TABLE[type(row)].key)


def _bug(cause: Exception) -> errors.FabricError:
    error = errors.BugError(f"together: {cause!r}")
    error.__cause__ = cause
    return error
