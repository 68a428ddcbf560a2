"""The heart of the engine: settle a decision.

Look (or trust what a lease lets us remember), ask the rule, commit, answer. When the store says no, somebody was
faster or the copy was old: look again and ask the same rule again, so that the reason given is the true one.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.engine.runtime.after_commit import AfterCommit, Rows, execution_among
from flowfabric.engine.runtime.load_queue import LoadQueue
from flowfabric.handles import Handle, HandleFields, open_handle
from flowfabric.ids import Minter
from flowfabric.model.change import Change, Delete, Insert, Patch, Upsert, expand, outcome_of
from flowfabric.model.event import TOPIC_FIELDS, Event, FeedEvent
from flowfabric.model.execution import Execution
from flowfabric.model.flow import Edge
from flowfabric.model.instant import FromNow
from flowfabric.model.states import TerminalOutcome
from flowfabric.model.stream import Frame
from flowfabric.model.suspension import IdempotencyRecord, Signal, Waitpoint
from flowfabric.rules.decision import Decision
from flowfabric.settings import Settings
from flowfabric.stores.catalog import TABLE
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Loaded, Read, Scan, SearchPage

A = TypeVar("A")
_RANDOM = random.SystemRandom()  # the application's own generator is left alone
RETRY_FOR_S = 15.0
PERMANENT_FAULTS = (errors.StoreFault.OTHER, errors.StoreFault.AUTH)  # faults that no waiting cures
ROWS_WITH_MINTED_IDS = (
    Waitpoint,
    IdempotencyRecord,
    Frame,
    Edge,
)  # rows whose ids or places are one call's own, if it inserts them
WAITPOINT_IDENTITY = (
    "execution_id",
    "attempt_index",
    "waitpoint_key",
    "suspension_id",
    "gate",
)  # what a waitpoint stays by
MAX_PROBED_ROWS = 100  # of those that one change inserts: any of them tells that it was written
MAX_HISTORY_EVENTS = 1000


class UnknownOutcome(msgspec.Struct, frozen=True):
    """A change whose answer got lost, the decision it belongs to, and the rows that was made on."""

    change: Change
    decision: Decision[Any]
    rows: Rows


class ReleaseInliner(Protocol):
    """Lets the change that ends an execution carry what that means to those who wait for it."""

    async def inline_release(self, change: Change, row: Execution) -> Change:
        """The change with as much of that as there is to know, after a look if need be."""
        ...

    def try_inline_release(self, change: Change, row: Execution) -> Change | None:
        """The same without a look; None when there is something to look at."""
        ...


class Runtime(AfterCommit):
    """What every verb of the engine stands on."""

    def __init__(self, store: Store, *, minter: Minter, settings: Settings) -> None:
        super().__init__(store)
        self.minter = minter
        self.settings = settings
        self.partitions = settings.partitions
        self.poll_interval_s = settings.poll_ms / 1000
        self.load_queue = LoadQueue(store)
        self.random: Callable[[], float] = _RANDOM.random
        self._lane_refreshed_at: dict[str, int] = {}  # when this process last looked around in a lane
        self._next_lease_expiry: dict[
            str, int
        ] = {}  # by lane: the first end of a lease that it knows of, unless renewed
        self.release_inliner: ReleaseInliner | None = None

    async def retry_while_unavailable(self, ask: Callable[[], Awaitable[A]]) -> A:
        """Ask what may be asked again at will; a store that is away for a moment is asked again."""
        pause = StoreBackoff()
        while True:
            try:
                return await ask()
            except errors.StoreUnavailable:
                await pause.sleep_or_raise()

    async def load(self, wants: Sequence[Read]) -> Loaded:
        """Rows and the store's time."""
        loaded = self.store.try_load_now(wants)
        if loaded is None:
            loaded = await self.retry_while_unavailable(lambda: self.load_queue.load(wants))
        self.estimate.update(loaded.now)
        return loaded

    def knows_lane(self, lane_id: str) -> bool:
        """Whether this process has heard of a line of this lane, so that somebody created an execution on it."""
        return lane_id in self._queues

    async def load_lane_queues(self, lane_id: str) -> None:
        """Learn the lines of a lane that other processes began."""
        for line in await self.retry_while_unavailable(lambda: self.store.queues(lane_id)):
            self.add_queue(line)

    def track_lease_expiry(self, lane_id: str, until: int) -> None:
        """Know until when a lease of this lane holds."""
        if until < self._next_lease_expiry.get(lane_id, until + 1):
            self._next_lease_expiry[lane_id] = until

    async def scan(self, scan: Scan) -> list[Any]:
        """Rows of a list."""
        return await self.retry_while_unavailable(lambda: self.store.scan(scan))

    async def search(self, scan: Scan, budget: int) -> SearchPage:
        """Return rows of a list that no index serves; the store reads at most `budget` rows."""
        return await self.retry_while_unavailable(lambda: self.store.search(scan, budget))

    async def decide_and_commit(
        self,
        wants: Sequence[Read],
        decide: Callable[[Rows, int], Decision[A]],
        *,
        assumed_rows: Rows | None = None,
        unknown_outcomes: Sequence[UnknownOutcome] = (),
        load_more: Callable[[Rows], Awaitable[Rows]] | None = None,
    ) -> A:
        """Decide and commit until the rule has answered on rows that were still true when written.

        `trusting` are rows to decide on first without a look: a claimed sheet, or the absence of what is created.
        `doubts` are changes for the same end whose answer got lost: a root that shows one of them tells that it holds.
        `further` looks at more, depending on what the first look found.
        """
        rows, now, misses = assumed_rows, self.estimate.now(), 0
        fresh, pause = False, StoreBackoff()
        doubtful = {doubt.change.id: doubt for doubt in unknown_outcomes} if unknown_outcomes else {}
        while True:
            if rows is None:
                loaded = await self.load(wants)
                rows, now, fresh = loaded.rows, loaded.now, True
                if doubtful and (found := _recognised(doubtful, rows) or await self._overtaken(doubtful, rows)):
                    doubt, committed_at = found
                    self.publish_commit(doubt.change, doubt.rows, committed_at or now)
                    answer: A = doubt.decision.unwrap(committed_at or now)
                    return answer
                if load_more is not None:
                    rows = rows + await load_more(rows)
            decision = decide(rows, now)
            if not fresh and (decision.change is None or isinstance(decision.answer, errors.FabricError)):
                rows = None  # nobody is refused, and nothing is marked for it, without a look
                continue
            if decision.change is None:
                return decision.unwrap(now)
            change = msgspec.structs.replace(decision.change, id=self.minter.change_id())
            if not misses and self.release_inliner is not None and (ending := _waited_for(change, rows)) is not None:
                change = await self.release_inliner.inline_release(change, ending)
            try:
                committed = await self.commit_queue.add(change)
            except errors.StoreUnavailable as lost:
                await pause.sleep_or_raise()
                if not lost.in_doubt:
                    continue  # nothing was written, and what it was decided on may still be true
                doubtful[change.id] = UnknownOutcome(change, decision, rows)
                committed = None
            if committed is not None:
                self.publish_commit(change, rows, committed)
                return decision.unwrap(committed)
            misses += fresh
            if misses > 2:  # a hot root: let the others pass
                await asyncio.sleep(self.random() * min(0.1, 0.002 * 2 ** min(misses, 10)))
            rows = None

    def decide_execution(
        self, execution_id: str, decide: Callable[[Execution | None, int], Decision[A]], *, use_cache: bool = False
    ) -> Awaitable[A]:
        """Settle a decision about one execution; `trust` may begin with the sheet remembered from its claim."""
        seen = self._lease_cache.get(execution_id) if use_cache else None
        return self.decide_and_commit(
            (Read(Execution, (execution_id,)),),
            lambda rows, now: decide(rows[0][0] if rows[0] else None, now),
            assumed_rows=None if seen is None else [[seen]],
        )

    async def _overtaken(
        self, doubtful: dict[int, UnknownOutcome], rows: Rows
    ) -> tuple[UnknownOutcome, int | None] | None:
        """The doubtful change that others have written over since: what it told, or a row of its own, is there.

        What an earlier life told may read the same. So a root that nobody has written since tells that nothing was
        written, and what was told before the decision does not count.
        """
        for doubt in doubtful.values():
            change = doubt.change if doubt.change.template is None else expand(doubt.change, doubt.rows[0][0])
            if _is_unwritten(change, rows):
                continue
            if change.events and (told := await self._told(change.events[0], doubt.rows)) is not None:
                return doubt, told.at
            made = [*_inserted(change), *_bound(change, doubt.rows)][-MAX_PROBED_ROWS:]
            wants = [Read(type(row), _key_of(row)) for row in made]
            if not wants:
                continue
            for row, kept in zip(made, (await self.load(wants)).rows, strict=True):
                if kept and matches_intended(kept[0], row):
                    return doubt, None
        return await self._removed(doubtful)

    async def _removed(self, doubtful: dict[int, UnknownOutcome]) -> tuple[UnknownOutcome, int | None] | None:
        """The doubtful change that was to remove a root which is gone.

        One that tells something was looked for by that. What is gone may have been removed by others.
        """
        for doubt in doubtful.values():
            if doubt.change.events:
                continue
            roots = {(guard.row, guard.key) for guard in doubt.change.guards}
            gone = [
                write for write in doubt.change.writes if isinstance(write, Delete) and (write.row, write.key) in roots
            ]
            if gone and not any((await self.load([Read(write.row, write.key) for write in gone])).rows):
                return doubt, None
        return None

    async def _told(self, event: Event, decided_on: Rows) -> FeedEvent | None:
        """An event as it stands in its execution's history, if it was told since that was decided."""
        topic = next(topic for topic, field in TOPIC_FIELDS.items() if getattr(event, field) is not None)
        told = await self.retry_while_unavailable(
            lambda: self.store.history(event.execution_id, topic, MAX_HISTORY_EVENTS)
        )
        sheet = execution_among(event.execution_id, decided_on)
        since = 0 if sheet is None else sheet.last_mutation_at
        return next((one for one in reversed(told) if one.event == event and one.at >= since), None)

    def handle_fields(self, handle: Handle) -> HandleFields:
        """What a handle says, if this store gave it out."""
        if not isinstance(handle, Handle):
            raise errors.InvalidInput("handle: not a handle")
        return open_handle(handle, self.store.tag)


def _waited_for(change: Change, rows: Rows) -> Execution | None:
    """The execution that a change ends well while others wait for that."""
    row = rows[0][0] if rows and rows[0] else None
    if type(row) is not Execution or row.successors is None or outcome_of(change) != TerminalOutcome.SUCCESS:
        return None
    return row if change.guards[0].key == (row.execution_id,) else None


def _recognised(doubtful: dict[int, UnknownOutcome], rows: Rows) -> tuple[UnknownOutcome, int | None] | None:
    """The doubtful change that a root shows as its last one, and when it was written if the root tells."""
    for found in rows:
        for row in found:
            if doubt := doubtful.get(getattr(row, "revision", 0)):
                return doubt, getattr(row, "last_mutation_at", None)
    return None


def _is_unwritten(change: Change, rows: Rows) -> bool:
    """Whether a root that the change was to write is still as it was decided on."""
    decided_on = {(guard.row, guard.key): guard.revision for guard in change.guards}
    written = {
        (write.row, write.key)
        for write in change.writes
        if isinstance(write, Delete) or (isinstance(write, Patch) and write.unless_set is None)
    }
    written |= {(type(write.row), _key_of(write.row)) for write in change.writes if isinstance(write, Upsert)}
    return any(
        (root := (type(row), _key_of(row))) in written and decided_on.get(root) == getattr(row, "revision", None)
        for found in rows
        for row in found
        if TABLE[type(row)].is_aggregate_root
    )


def _key_of(row: msgspec.Struct) -> tuple[Any, ...]:
    return tuple(getattr(row, name) for name in TABLE[type(row)].key)


def _inserted(change: Change) -> list[msgspec.Struct]:
    """The rows of a change that nobody else would insert; a signal that is told was sent, and may be sent twice."""
    minted = ROWS_WITH_MINTED_IDS if change.events else (*ROWS_WITH_MINTED_IDS, Signal)
    rows = (write.row for write in change.writes if isinstance(write, Insert))
    return [row for row in rows if isinstance(row, minted)]


def _bound(change: Change, decided_on: Rows) -> list[Waitpoint]:
    """The waitpoints that were there before, and that a change gives to a suspension."""
    put = [write.row for write in change.writes if isinstance(write, Upsert) and isinstance(write.row, Waitpoint)]
    known = [row for found in decided_on for row in found if isinstance(row, Waitpoint)]
    return [one for one in put if not any(_key_of(row) == _key_of(one) and matches_intended(row, one) for row in known)]


def matches_intended(found: msgspec.Struct, meant: msgspec.Struct) -> bool:
    """Whether a row says what was to be written; instants that the store filled in, and revisions, say nothing.

    A waitpoint is known by what it was born with: others count signals there, activate it and close it.
    """
    values = msgspec.structs.asdict(meant)
    if isinstance(meant, Waitpoint):
        values = {name: values[name] for name in WAITPOINT_IDENTITY if values[name] is not None}
    return all(
        type(value) is FromNow or name == "revision" or getattr(found, name) == value for name, value in values.items()
    )


class StoreBackoff:
    """A growing, jittered wait between tries, until patience runs out; it begins with the first failure."""

    __slots__ = ("_patience_s", "_tries", "_until")

    def __init__(self, retry_for_s: float = RETRY_FOR_S) -> None:
        self._patience_s = retry_for_s
        self._tries = 0

    async def sleep_or_raise(self) -> None:
        """Wait a little; called while handling an error, which is raised again when patience has run out.

        At once when waiting cannot help: the store was closed, the file is no database, the password is wrong. What
        may have been written all the same is looked for first.
        """
        error = sys.exception()
        if isinstance(error, errors.StoreUnavailable) and error.source in PERMANENT_FAULTS and not error.in_doubt:
            raise
        now = asyncio.get_running_loop().time()
        if not self._tries:
            self._until = now + self._patience_s
        elif now >= self._until:
            raise
        self._tries += 1
        await asyncio.sleep(_RANDOM.random() * min(1.0, 0.02 * 2**self._tries))
