"""DecisionQueue: concurrent decisions of one process about one root are committed as one change.

Optimistic writers of one row conflict: of two hundred signals to one execution, one would be written per round trip.
So decisions about one root are queued. While one batch is in flight the next one fills. A batch is loaded once, decided
in order of arrival, each decision on the rows that the one before leaves, and committed as one change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.batcher import KeyedBatcher
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.change import PATCHED_ROWS, Change, Delete, Guard, Insert, Patch, Upsert, Write
from flowfabric.model.instant import FromNow
from flowfabric.rules.decision import Decision
from flowfabric.stores.catalog import key_of
from flowfabric.stores.queries import Read

A = TypeVar("A")

MAX_BATCH_DECISIONS = 100  # in one change

Rows = list[list[Any]]
Decide = Callable[[Rows, int], Decision[Any]]
RowKey = tuple[type[msgspec.Struct], tuple[Any, ...]]


class _QueuedDecision(NamedTuple):
    reads: Sequence[Read]
    decide: Decide


class DecisionQueue:
    """Makes decisions about each root one after the other."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._batcher: KeyedBatcher[Hashable, _QueuedDecision, Any] = KeyedBatcher(
            self._decide_batch, max_items=MAX_BATCH_DECISIONS
        )

    async def decide_and_commit(
        self, root: Hashable, reads: Sequence[Read], decide: Callable[[Rows, int], Decision[A]]
    ) -> A:
        """Decide and commit in order of arrival. Every decision about this root has to guard it."""
        answer: A = await self._batcher.add(root, _QueuedDecision(reads, decide))
        return answer

    async def _decide_batch(self, root: Hashable, batch: list[_QueuedDecision]) -> list[Any]:
        if len(batch) == 1:
            return [await self._runtime.decide_and_commit(batch[0].reads, batch[0].decide)]
        reads = list(dict.fromkeys(read for queued in batch for read in queued.reads))
        try:
            answers: list[Any] = await self._runtime.decide_and_commit(
                reads, lambda rows, now: decide_batch(batch, reads, rows, now)
            )
        except errors.StoreUnavailable:
            raise
        except errors.FabricError:  # one decision is at fault: each is made alone
            return [await self._decide_alone(queued) for queued in batch]
        return answers

    async def _decide_alone(self, queued: _QueuedDecision) -> Any:
        try:
            return await self._runtime.decide_and_commit(queued.reads, queued.decide)
        except errors.FabricError as refused:
            return refused


def decide_batch(batch: Sequence[_QueuedDecision], reads: Sequence[Read], rows: Rows, now: int) -> Decision[list[Any]]:
    """Make one decision of many, each on the rows that the ones before it leave."""
    pending = PendingRows(reads, rows, now)
    decisions: list[Decision[Any]] = []
    for queued in batch:
        decision = queued.decide([pending.find(read) for read in queued.reads], now)
        if decision.change is not None:
            pending.apply(decision.change)
        decisions.append(decision)
    return Decision(lambda now: [_answer(decision, now) for decision in decisions], pending.to_change())


def _answer(decision: Decision[Any], now: int) -> Any:
    try:
        return decision.unwrap(now)
    except errors.FabricError as refused:
        return refused


class PendingRows:
    """Rows as they will be after some changes, and one change that has the same effect."""

    def __init__(self, reads: Sequence[Read], rows: Rows, now: int) -> None:
        self._now = now
        self._rows: dict[RowKey, Any] = {}
        for read, found in zip(reads, rows, strict=True):
            self._rows.update(((read.row, key_of(row)), row) for row in found)
        self._loaded = dict(self._rows)
        self._written: dict[RowKey, Any] = {}  # rows to write, with the instants that the store fills in
        self._patches: dict[RowKey, dict[str, Any]] = {}
        self._deleted: dict[RowKey, None] = {}
        self._guards: dict[RowKey, Guard] = {}
        self._changes: list[Change] = []

    def find(self, read: Read) -> list[Any]:
        """Return the rows of a read as they are by now, in key order."""
        length = len(read.key)
        found = [(key, row) for (kind, key), row in self._rows.items() if kind is read.row and key[:length] == read.key]
        return [row for _, row in sorted(found, key=lambda entry: entry[0])]

    def apply(self, change: Change) -> None:
        """Apply a change to the rows."""
        self._changes.append(change)
        for guard in change.guards:
            first = self._guards.setdefault((guard.row, guard.key), guard)
            if first.lease is None and guard.lease is not None:
                self._guards[guard.row, guard.key] = msgspec.structs.replace(first, lease=guard.lease)
        for write in change.writes:
            self._write(write)

    def _write(self, write: Write) -> None:
        match write:
            case Insert(row=new) | Upsert(row=new):
                self._set((type(new), key_of(new)), new)
            case Patch():
                self._patch(write)
            case Delete(row=kind, key=prefix):
                self._deleted[kind, prefix] = None
                for key in [key for key in self._rows if key[0] is kind and key[1][: len(prefix)] == prefix]:
                    del self._rows[key]
                    self._written.pop(key, None)

    def _patch(self, patch: Patch) -> None:
        key = (patch.row, patch.key)
        row = self._rows.get(key)
        if row is None:
            raise errors.BugError(f"a patch of a row that was not loaded: {patch.row.__name__}")
        if patch.unless_set is not None and getattr(row, patch.unless_set) is not None:
            return
        if patch.row in PATCHED_ROWS:
            self._patches.setdefault(key, {}).update(patch.fields)
            self._rows[key] = self._with_instants(msgspec.structs.replace(row, **patch.fields))
        else:
            self._set(key, msgspec.structs.replace(self._written.get(key, row), **patch.fields))

    def _set(self, key: RowKey, row: Any) -> None:
        self._written[key] = row
        self._rows[key] = self._with_instants(row)

    def _with_instants(self, row: Any) -> Any:
        values = msgspec.structs.asdict(row)
        instants = {name: self._now + value.offset for name, value in values.items() if type(value) is FromNow}
        return msgspec.structs.replace(row, **instants) if instants else row

    def to_change(self) -> Change | None:
        """Return everything that was applied as one change; None if nothing was."""
        if not self._changes:
            return None
        writes: list[Write] = [Delete(kind, key) for kind, key in self._deleted]
        writes += [Patch(kind, key, fields) for (kind, key), fields in self._patches.items()]
        for key, row in self._written.items():
            writes.append(Upsert(row) if key in self._loaded or self._was_deleted(key) else Insert(row))
        bounds = [(change.not_before, change.not_after) for change in self._changes]
        return Change(
            guards=tuple(self._guards.values()),
            writes=tuple(writes),
            events=tuple(event for change in self._changes for event in change.events),
            not_before=max((early for early, _ in bounds if early is not None), default=None),
            not_after=min((late for _, late in bounds if late is not None), default=None),
        )

    def _was_deleted(self, key: RowKey) -> bool:
        return any(key[0] is kind and key[1][: len(prefix)] == prefix for kind, prefix in self._deleted)
