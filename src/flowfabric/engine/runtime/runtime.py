"""Runtime: decide and commit.

Load the rows (or use a row cached under a live lease), ask the rule, commit, answer. If the store refuses the commit,
another writer was faster or the cached row was stale: load again and ask the same rule again, so that the reason given
is the true one. If the reply to a commit is lost, the next load shows whether it was written (`unknown_outcomes`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.engine.runtime.after_commit import AfterCommit, Rows, first_row
from flowfabric.engine.runtime.backoff import StoreBackoff
from flowfabric.engine.runtime.load_queue import LoadQueue
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.engine.runtime.unknown_outcomes import UnknownOutcome, UnknownOutcomes
from flowfabric.handles import Handle, HandleFields, open_handle
from flowfabric.ids import Minter
from flowfabric.model.change import Change
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import Execution
from flowfabric.rules.decision import Decision
from flowfabric.rules.flow.successors import succeeded_upstream
from flowfabric.settings import Settings
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Loaded, Read, Scan, Search, SearchPage

A = TypeVar("A")
_RANDOM = random.SystemRandom()  # the application's own generator is left alone


class ReleaseInliner(Protocol):
    """Adds the release of waiting successors to the change that completes an execution."""

    async def inline_release(self, change: Change, row: Execution) -> Change:
        """Return the change with the releases, loading rows if necessary."""

    def try_inline_release(self, change: Change, row: Execution) -> Change | None:
        """Return the change with the releases; None if rows have to be loaded first."""


class Runtime(AfterCommit):
    """Loads rows, decides and commits on behalf of every operation."""

    def __init__(self, store: Store, *, minter: Minter, settings: Settings) -> None:
        super().__init__(store)
        self.minter = minter
        self.settings = settings
        self.partitions = settings.partitions
        self.poll_interval_s = settings.poll_ms / 1000
        self.load_queue = LoadQueue(store)
        self._unknown_outcomes = UnknownOutcomes(self.load, self._history)
        self.random: Callable[[], float] = _RANDOM.random
        self._lane_refreshed_at: dict[str, int] = {}  # by lane: when this process last loaded its queues
        self._next_lease_expiry: dict[str, int] = {}  # by lane: the earliest known expiry, ignoring renewals
        self.release_inliner: ReleaseInliner | None = None

    async def retry_while_unavailable(self, call: Callable[[], Awaitable[A]]) -> A:
        """Call something idempotent; retry while the store is unavailable."""
        backoff = StoreBackoff()
        while True:
            try:
                return await call()
            except errors.StoreUnavailable:
                await backoff.sleep_or_raise()

    async def load(self, reads: Sequence[Read]) -> Loaded:
        """Return the rows of each read, and the store's time."""
        loaded = self.store.try_load_now(reads)
        if loaded is None:
            loaded = await self.retry_while_unavailable(lambda: self.load_queue.load(reads))
        self.estimate.update(loaded.now)
        return loaded

    def knows_lane(self, lane_id: str) -> bool:
        """Return whether this process knows a queue of this lane, so that an execution was created in it."""
        return lane_id in self._queues

    async def load_lane_queues(self, lane_id: str) -> None:
        """Load the queues of a lane, which other processes may have created."""
        for queue in await self.retry_while_unavailable(lambda: self.store.queues(lane_id)):
            self.add_queue(queue)

    def track_lease_expiry(self, lane_id: str, until: int) -> None:
        """Remember when a lease of this lane expires, if it is the first to expire."""
        if until < self._next_lease_expiry.get(lane_id, until + 1):
            self._next_lease_expiry[lane_id] = until

    async def scan(self, scan: Scan) -> list[Any]:
        """Return the rows of a scan."""
        return await self.retry_while_unavailable(lambda: self.store.scan(scan))

    async def kinds(self, execution_ids: Sequence[str]) -> dict[str, str]:
        """Return the kinds of executions by id; a missing execution is left out."""
        if not execution_ids:
            return {}
        return await self.retry_while_unavailable(lambda: self.store.kinds(execution_ids))

    async def search(self, search: Search) -> SearchPage:
        """Return executions that meet the conditions, newest first; the store reads at most the search's budget."""
        return await self.retry_while_unavailable(lambda: self.store.search(search))

    async def decide_and_commit(
        self,
        reads: Sequence[Read] | Callable[[], Sequence[Read]],
        decide: Callable[[Rows, int], Decision[A]],
        *,
        assumed_rows: Rows | None = None,
        unknown_outcomes: Sequence[UnknownOutcome] = (),
        load_more: Callable[[Rows], Awaitable[Rows]] | None = None,
    ) -> A:
        """Decide and commit until the rule has answered on rows that were still current at the commit.

        `assumed_rows` are rows to decide on first without a load: a leased row, or the absence of a row to create. They
        are mostly current; where that matters, `reads` is a function, which is called before a load.
        `unknown_outcomes` are earlier changes of the same call whose replies were lost; if one turns out to be written,
        its answer is returned. `load_more` loads further rows, depending on those that were loaded first.
        """
        rows, now, conflicts = assumed_rows, self.estimate.now(), 0
        fresh, backoff = False, None
        unknown = {lost.change.id: lost for lost in unknown_outcomes} if unknown_outcomes else {}
        try:
            while True:
                if rows is None:
                    loaded = await self.load(reads() if callable(reads) else reads)
                    rows, now, fresh = loaded.rows, loaded.now, True
                    if unknown and (found := await self._unknown_outcomes.find_written(unknown, rows)):
                        written, committed_at = found
                        self.publish_commit(written.change, written.rows, committed_at or now)
                        answer: A = written.decision.unwrap(committed_at or now)
                        return answer
                    if load_more is not None:
                        rows = rows + await load_more(rows)
                decision = decide(rows, now)
                if not fresh and (decision.change is None or isinstance(decision.answer, errors.FabricError)):
                    rows = None  # a refusal, or "nothing to do", is never decided on assumed rows
                    continue
                if decision.change is None:
                    return decision.unwrap(now)
                change = msgspec.structs.replace(decision.change, id=self.minter.change_id())
                if (change.events or change.template) and not conflicts and self.release_inliner is not None:
                    upstream = succeeded_upstream(change, first_row(rows))
                    if upstream is not None:
                        change = await self.release_inliner.inline_release(change, upstream)
                try:
                    committed = await self.commit_queue.add(change)
                except errors.StoreUnavailable as lost:
                    backoff = backoff or StoreBackoff()
                    await backoff.sleep_or_raise()
                    if not lost.in_doubt:
                        continue  # nothing was written, and the rows may still be current
                    unknown[change.id] = UnknownOutcome(change, decision, rows)
                    committed = None
                if committed is not None:
                    self.publish_commit(change, rows, committed)
                    return decision.unwrap(committed)
                conflicts += fresh
                if conflicts > 2:  # a hot root: let other writers finish
                    await asyncio.sleep(self.random() * min(0.1, 0.002 * 2 ** min(conflicts, 10)))
                rows = None
        except errors.StoreUnavailable as away:
            if unknown and not away.in_doubt:
                raise away.with_unknown_outcome() from away
            raise

    def decide_execution(
        self, execution_id: str, decide: Callable[[Execution | None, int], Decision[A]], *, use_cache: bool = False
    ) -> Awaitable[A]:
        """Decide about one execution and commit; with `use_cache`, first on the row cached under its lease."""
        cached = self._lease_cache.get(execution_id) if use_cache else None
        reads = ReadSet()
        row = reads.one(Execution, execution_id)
        return self.decide_and_commit(
            reads,
            lambda rows, now: decide(row(rows), now),
            assumed_rows=None if cached is None else reads.assume(row, cached),
        )

    async def _history(self, execution_id: str, topic: Topic, limit: int) -> list[FeedEvent]:
        return await self.retry_while_unavailable(lambda: self.store.history(execution_id, topic, limit))

    def handle_fields(self, handle: Handle) -> HandleFields:
        """Return the content of a handle; refuse one of another store."""
        if not isinstance(handle, Handle):
            raise errors.InvalidInput("handle: not a handle")
        return open_handle(handle, self.store.tag)
