"""Runtime: decide and commit.

Load the rows (or use a row cached under a live lease), ask the rule, commit, answer. If the store refuses the commit,
another writer was faster or the cached row was stale: load again and ask the same rule again, so that the reason given
is the true one. If the reply to a commit is lost, the next load shows whether it was written (`rules.commit_evidence`).
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.engine.runtime.after_commit import AfterCommit, Rows, execution_among, first_row
from flowfabric.engine.runtime.load_queue import LoadQueue
from flowfabric.engine.runtime.read_set import ReadSet
from flowfabric.handles import Handle, HandleFields, open_handle
from flowfabric.ids import Minter
from flowfabric.model.change import Change, Delete, Patch, Upsert, expand
from flowfabric.model.event import TOPIC_FIELDS, Event, FeedEvent
from flowfabric.model.execution import Execution
from flowfabric.rules.commit_evidence import evidence_rows, find_event, is_evidence
from flowfabric.rules.decision import Decision
from flowfabric.rules.flow.successors import succeeded_upstream
from flowfabric.settings import Settings
from flowfabric.stores.catalog import TABLE, key_of
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Loaded, Read, Scan, Search, SearchPage

A = TypeVar("A")
_RANDOM = random.SystemRandom()  # the application's own generator is left alone
RETRY_FOR_S = 15.0
PERMANENT_FAULTS = (errors.StoreFault.OTHER, errors.StoreFault.AUTH)  # retrying does not help
MAX_PROBED_ROWS = 100  # of one change: any of them proves that it was written
MAX_HISTORY_EVENTS = 1000


class UnknownOutcome(msgspec.Struct, frozen=True):
    """A change whose reply was lost, with its decision and the rows it was decided on."""

    change: Change
    decision: Decision[Any]
    rows: Rows


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
                    if unknown and (
                        found := _find_by_revision(unknown, rows) or await self._find_evidence(unknown, rows)
                    ):
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

    async def _find_evidence(
        self, unknown: dict[int, UnknownOutcome], rows: Rows
    ) -> tuple[UnknownOutcome, int | None] | None:
        """Return the change that was written and whose roots others have written since: its event or row is stored.

        A root that nobody has written since the decision proves that the change was not written.
        """
        for lost in unknown.values():
            change = lost.change if lost.change.template is None else expand(lost.change, first_row(lost.rows))
            if _is_unwritten(change, rows):
                continue
            if change.events and (event := await self._stored_event(change.events[0], lost.rows)) is not None:
                return lost, event.at
            intended = evidence_rows(change, (row for found in lost.rows for row in found))[-MAX_PROBED_ROWS:]
            if not intended:
                continue
            stored = (await self.load([Read(type(row), key_of(row)) for row in intended])).rows
            if any(found and is_evidence(found[0], row) for row, found in zip(intended, stored, strict=True)):
                return lost, None
        return await self._find_deleted(unknown)

    async def _find_deleted(self, unknown: dict[int, UnknownOutcome]) -> tuple[UnknownOutcome, int | None] | None:
        """Return the change without events that deletes a root which no longer exists, by this change or another."""
        for lost in unknown.values():
            if lost.change.events:
                continue
            roots = {(guard.row, guard.key) for guard in lost.change.guards}
            deletes = [
                write for write in lost.change.writes if isinstance(write, Delete) and (write.row, write.key) in roots
            ]
            if deletes and not any((await self.load([Read(write.row, write.key) for write in deletes])).rows):
                return lost, None
        return None

    async def _stored_event(self, event: Event, decided_on: Rows) -> FeedEvent | None:
        """Return an event as its execution's history has it, if it was stored since the decision."""
        topic = next(topic for topic, field in TOPIC_FIELDS.items() if getattr(event, field) is not None)
        history = await self.retry_while_unavailable(
            lambda: self.store.history(event.execution_id, topic, MAX_HISTORY_EVENTS)
        )
        return find_event(history, event, execution_among(event.execution_id, decided_on))

    def handle_fields(self, handle: Handle) -> HandleFields:
        """Return the content of a handle; refuse one of another store."""
        if not isinstance(handle, Handle):
            raise errors.InvalidInput("handle: not a handle")
        return open_handle(handle, self.store.tag)


def _find_by_revision(unknown: dict[int, UnknownOutcome], rows: Rows) -> tuple[UnknownOutcome, int | None] | None:
    """Return the change that wrote one of these roots last, and the commit's time if the row has it."""
    for found in rows:
        for row in found:
            if lost := unknown.get(getattr(row, "revision", 0)):
                return lost, getattr(row, "last_mutation_at", None)
    return None


def _is_unwritten(change: Change, rows: Rows) -> bool:
    """Return whether a root that the change writes still has the revision that it was decided on."""
    decided_on = {(guard.row, guard.key): guard.revision for guard in change.guards}
    written = {
        (write.row, write.key)
        for write in change.writes
        if isinstance(write, Delete) or (isinstance(write, Patch) and write.unless_set is None)
    }
    written |= {(type(write.row), key_of(write.row)) for write in change.writes if isinstance(write, Upsert)}
    return any(
        (root := (type(row), key_of(row))) in written and decided_on.get(root) == getattr(row, "revision", None)
        for found in rows
        for row in found
        if TABLE[type(row)].is_aggregate_root
    )


class StoreBackoff:
    """A growing, jittered delay between attempts, up to a limit that starts with the first failure."""

    __slots__ = ("_attempts", "_give_up_at", "_retry_for_s")

    def __init__(self, retry_for_s: float = RETRY_FOR_S) -> None:
        self._retry_for_s = retry_for_s
        self._attempts = 0

    async def sleep_or_raise(self) -> None:
        """Sleep before the next attempt; called in an exception handler, raises its error when the time is used up.

        A permanent fault (closed store, not a database, wrong password) is raised at once, unless the outcome is
        unknown: then the caller has to find out first.
        """
        error = sys.exception()
        if isinstance(error, errors.StoreUnavailable) and error.source in PERMANENT_FAULTS and not error.in_doubt:
            raise
        now = asyncio.get_running_loop().time()
        if not self._attempts:
            self._give_up_at = now + self._retry_for_s
        elif now >= self._give_up_at:
            raise
        self._attempts += 1
        await asyncio.sleep(_RANDOM.random() * min(1.0, 0.02 * 2**self._attempts))
