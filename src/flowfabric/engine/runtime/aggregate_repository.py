"""AggregateRepository: decisions about one hot aggregate are made one after the other and committed as one change.

Optimistic writers of one row conflict: of fifty, one is written per round trip. So the decisions of a process about one
root are queued. While a batch is in flight the next one fills. A batch is loaded once, decided in order of arrival,
each decision on the state that the one before leaves, and committed as one change. After a conflict with another
process the whole batch is loaded and decided again.

An aggregate may have any number of rows, and on Postgres any number of deleted ones beside them. So a batch loads the
root and only those rows that its decisions name. What depends on the root or on the time is read after it: the change
is guarded by the root's revision, so these rows are as they were with it, or the commit is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.batcher import KeyedBatcher
from flowfabric.engine.runtime.backoff import StoreBackoff
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.model.change import Change
from flowfabric.model.security.owned_id import NamespacedId
from flowfabric.stores.queries import Read, Scan

S = TypeVar("S")
A = TypeVar("A")

MAX_BATCH_DECISIONS = 500
EMPTY: Mapping[NamespacedId, Sequence[Read]] = MappingProxyType({})

Decide = Callable[[S, int], tuple[A | errors.FabricError, S]]


class AggregateAdapter(Protocol[S]):
    """Builds the state of one kind of aggregate from its rows, and a change from the difference of two states."""

    def reads(self, key: NamespacedId) -> tuple[Read, ...]:
        """Return the reads that every decision needs; the first one is the root's."""

    def further_reads(self, state: S, now: int) -> tuple[Read, ...]:
        """Return the reads that every decision on this state needs in addition."""

    def display_scan(self, state: S, now: int) -> Scan | None:
        """Return the scan that a state for reading needs in addition."""

    def build_state(self, key: NamespacedId, rows: Iterable[Any]) -> S:
        """Return the state that these rows hold."""

    def change_between(self, before: S, after: S, change_id: int) -> Change | None:
        """Return the change with this id that turns one state into the other; None if they are equal."""

    def commit_marker(self, key: NamespacedId, change_id: int) -> Read:
        """Return the read of a row that shows, after a lost reply, whether this change was written."""

    def confirms(self, row: Any, change_id: int) -> bool:
        """Return whether that row shows that the change was written."""


class _AggregateDecision(NamedTuple, Generic[S]):
    decide: Callable[[S, int], tuple[Any, S]]
    reads: tuple[Read, ...]
    scan: Callable[[int], Scan] | None


class AggregateRepository(Generic[S]):
    """Loads aggregates of one kind, and makes decisions about each of them one after the other."""

    def __init__(self, runtime: Runtime, adapter: AggregateAdapter[S]) -> None:
        self._runtime = runtime
        self._adapter = adapter
        self._decisions: KeyedBatcher[NamespacedId, _AggregateDecision[S], Any] = KeyedBatcher(
            self._decide_batch, max_items=MAX_BATCH_DECISIONS
        )

    async def decide_and_commit(
        self,
        key: NamespacedId,
        decide: Decide[S, A],
        reads: tuple[Read, ...] = (),
        scan: Callable[[int], Scan] | None = None,
    ) -> A:
        """Decide about the aggregate of this key.

        `reads` are the rows that this decision needs beside those that every decision needs; `scan` returns a scan for
        more of them, given the store's time.
        """
        answer: A = await self._decisions.add(key, _AggregateDecision(decide, reads, scan))
        return answer

    async def load(
        self, keys: Sequence[NamespacedId], reads: Mapping[NamespacedId, Sequence[Read]] = EMPTY
    ) -> tuple[int, dict[NamespacedId, S]]:
        """Return the store's time and the current states, for reading only; `reads` are further rows of some."""
        groups = [(*self._adapter.reads(key), *reads.get(key, ())) for key in keys]
        loaded = await self._runtime.load([read for group in groups for read in group])
        found, start = dict[NamespacedId, list[Any]](), 0
        for key, group in zip(keys, groups, strict=True):
            found[key] = [row for rows in loaded.rows[start : start + len(group)] for row in rows]
            start += len(group)
        states = {key: self._adapter.build_state(key, rows) for key, rows in found.items()}
        scans = {key: scan for key, state in states.items() if (scan := self._adapter.display_scan(state, loaded.now))}
        for key, rows in zip(scans, await asyncio.gather(*map(self._runtime.scan, scans.values())), strict=True):
            states[key] = self._adapter.build_state(key, (*found[key], *rows))
        return loaded.now, states

    async def _decide_batch(self, key: NamespacedId, batch: list[_AggregateDecision[S]]) -> list[Any]:
        """Load the root once, decide in order, commit one change; repeat after a conflict."""
        reads = tuple(dict.fromkeys((*self._adapter.reads(key), *(read for queued in batch for read in queued.reads))))
        unknown: list[tuple[Change, list[Any]]] = []  # changes with a lost reply, and the answers if one was written
        conflicts, backoff = 0, StoreBackoff()
        try:
            while True:
                # Read after every round trip, not once: a change whose reply was lost may still be in flight.
                markers = [self._adapter.commit_marker(key, lost.id) for lost, _ in unknown]
                loaded = await self._runtime.load((*reads, *markers))
                for (lost, answers), found in zip(unknown, loaded.rows[len(reads) :], strict=True):
                    if any(self._adapter.confirms(row, lost.id) for row in found):
                        self._runtime.publish_commit(lost, [], loaded.now)
                        return answers
                before = after = await self._complete_state(key, batch, loaded.rows[: len(reads)], loaded.now)
                answers = []
                for queued in batch:
                    answer, after = queued.decide(after, loaded.now)
                    answers.append(answer)
                change_id = self._runtime.minter.change_id()
                change = self._adapter.change_between(before, after, change_id)
                if change is None:
                    return answers
                change = msgspec.structs.replace(change, id=change_id)
                try:
                    committed_at = await self._runtime.commit_queue.add(change)
                except errors.StoreUnavailable as error:
                    if error.in_doubt:
                        unknown.append((change, answers))
                    await backoff.sleep_or_raise()
                    continue
                if committed_at is not None:
                    self._runtime.publish_commit(change, [], committed_at)
                    return answers
                conflicts += 1
                await asyncio.sleep(self._runtime.random() * min(0.1, 0.001 * 2**conflicts))
        except errors.StoreUnavailable as away:
            if unknown and not away.in_doubt:
                raise away.with_unknown_outcome() from away
            raise

    async def _complete_state(
        self, key: NamespacedId, batch: list[_AggregateDecision[S]], loaded: list[list[Any]], now: int
    ) -> S:
        """Return the state with everything that the batch needs; mostly the loaded rows are enough."""
        rows = [row for found in loaded for row in found]
        state = self._adapter.build_state(key, rows)
        count = len(rows)
        if further := self._adapter.further_reads(state, now):
            rows += [row for found in (await self._runtime.load(further)).rows for row in found]
        scans = [queued.scan(now) for queued in batch if queued.scan is not None]
        if scans:
            different = [scan for number, scan in enumerate(scans) if scan not in scans[:number]]
            for found in await asyncio.gather(*map(self._runtime.scan, different)):
                rows += found
        return state if len(rows) == count else self._adapter.build_state(key, rows)
