"""Chains: decisions about one hot root, made one after the other in memory and written once a batch.

Optimistic writers of one row refuse each other: of fifty, one wins a round. So the decisions of a process about one
root form a chain. While a batch is on its way the next one fills; a batch is loaded once, decided in order of arrival,
each decision on what the one before left, and committed as one change. When another process was faster, the whole
batch is loaded and decided again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.batcher import KeyedBatcher
from flowfabric.engine.runtime.runtime import Runtime, StoreBackoff
from flowfabric.model.change import Change
from flowfabric.model.owned_id import NamespacedId
from flowfabric.stores.queries import Read

S = TypeVar("S")
A = TypeVar("A")

MAX_BATCH_DECISIONS = 500

Decide = Callable[[S, int], tuple[A | errors.FabricError, S]]


class AggregateAdapter(Protocol[S]):
    """How the rows of one kind of root become a sheet, and how the difference between two sheets is written."""

    def reads(self, key: NamespacedId) -> tuple[Read, ...]:
        """The rows that every decision needs."""
        ...

    def build_state(self, key: NamespacedId, rows: Iterable[Any]) -> S:
        """The rows as a sheet."""
        ...

    def change_between(self, before: S, after: S, change_id: int) -> Change | None:
        """What makes the one of the other, under this id; None when nothing differs."""
        ...

    def commit_marker(self, key: NamespacedId, change_id: int) -> Read:
        """A row that tells, after a lost answer, whether this change was written."""
        ...

    def confirms(self, row: Any, change_id: int) -> bool:
        """Whether it does."""
        ...


class _AggregateDecision(NamedTuple, Generic[S]):
    decide: Callable[[S, int], tuple[Any, S]]
    wants: tuple[Read, ...]


class AggregateRepository(Generic[S]):
    """Loads aggregates of one kind, and makes decisions about each of them one after the other."""

    def __init__(self, core: Runtime, book: AggregateAdapter[S]) -> None:
        self._core = core
        self._book = book
        self._decisions: KeyedBatcher[NamespacedId, _AggregateDecision[S], Any] = KeyedBatcher(
            self._decide_batch, max_items=MAX_BATCH_DECISIONS
        )

    async def decide_and_commit(self, key: NamespacedId, decide: Decide[S, A], wants: tuple[Read, ...] = ()) -> A:
        """Decide about the aggregate of this key; `wants` are rows that this decision needs beside the aggregate."""
        answer: A = await self._decisions.add(key, _AggregateDecision(decide, wants))
        return answer

    async def load(self, keys: Sequence[NamespacedId]) -> tuple[int, dict[NamespacedId, S]]:
        """Sheets as they are now, for reading only, and the store's time."""
        groups = [self._book.reads(key) for key in keys]
        loaded = await self._core.load([want for group in groups for want in group])
        sheets, start = {}, 0
        for key, group in zip(keys, groups, strict=True):
            found = loaded.rows[start : start + len(group)]
            sheets[key] = self._book.build_state(key, (row for rows in found for row in rows))
            start += len(group)
        return loaded.now, sheets

    async def _decide_batch(self, key: NamespacedId, batch: list[_AggregateDecision[S]]) -> list[Any]:
        """Load the root once, decide in order, commit one change; repeat if another process was faster."""
        wants = tuple(dict.fromkeys((*self._book.reads(key), *(want for one in batch for want in one.wants))))
        doubts: list[tuple[Change, list[Any]]] = []  # and the answers to give should one turn out to be written
        misses, pause = 0, StoreBackoff()
        while True:
            # Asked at every look, not once: a change whose answer got lost may still be on its way.
            traces = [self._book.commit_marker(key, doubt.id) for doubt, _ in doubts]
            loaded = await self._core.load((*wants, *traces))
            for (doubt, meant), found in zip(doubts, loaded.rows[len(wants) :], strict=True):
                if any(self._book.confirms(row, doubt.id) for row in found):
                    self._core.publish_commit(doubt, [], loaded.now)
                    return meant
            rows = loaded.rows[: len(wants)]
            before = after = self._book.build_state(key, (row for found in rows for row in found))
            answers = []
            for asked in batch:
                answer, after = asked.decide(after, loaded.now)
                answers.append(answer)
            change_id = self._core.minter.change_id()
            change = self._book.change_between(before, after, change_id)
            if change is None:
                return answers
            change = msgspec.structs.replace(change, id=change_id)
            try:
                committed_at = await self._core.commit_queue.add(change)
            except errors.StoreUnavailable as lost:
                if lost.in_doubt:
                    doubts.append((change, answers))
                await pause.sleep_or_raise()
                continue
            if committed_at is not None:
                self._core.publish_commit(change, [], committed_at)
                return answers
            misses += 1
            await asyncio.sleep(self._core.random() * min(0.1, 0.001 * 2**misses))
