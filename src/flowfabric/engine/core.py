"""The heart of the engine: settle a decision.

Look (or trust what a lease lets us remember), ask the rule, commit, answer. When the store says no, somebody was
faster or the copy was old: look again and ask the same rule again, so that the reason given is the true one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence, Set
from typing import Any, Protocol, TypeVar

import msgspec

from flowfabric import errors
from flowfabric.clock import Estimate
from flowfabric.engine.commits import Commits
from flowfabric.engine.loads import Loads
from flowfabric.engine.meters import Meters
from flowfabric.engine.outcomes import Outcomes
from flowfabric.engine.wakes import FEED, LANE, Wakes, due_topic, end_topic, lane_topic
from flowfabric.handles import Handle, HandleFields, open_handle
from flowfabric.ids import Minter
from flowfabric.model.event import TOPIC_FIELDS, Event, FeedEvent
from flowfabric.model.execution import Execution, LineKey
from flowfabric.model.states import LifecyclePhase, OwnershipState, TerminalOutcome
from flowfabric.model.stream import Frame
from flowfabric.model.suspension import Waitpoint
from flowfabric.rules.change import Change, Decision, Delete, FromNow, Insert, Patch, Write, outcome_of, spelled_out
from flowfabric.settings import Settings
from flowfabric.stores.base import Loaded, Scan, Store, Want
from flowfabric.stores.rows import TABLE

A = TypeVar("A")
Row = type[msgspec.Struct]
Rows = list[list[Any]]
Follow = Callable[[Change, Rows], None]  # a change that was written, and the rows that it was decided on

SEEN_LIMIT = 20_000
PATIENCE_S = 15.0
LATER_S = 0.02  # what nobody waits for is told to other processes by then
MINTED = (Waitpoint, Frame)  # rows that are told in no feed, and whose ids or places are one call's own
HISTORY = 1000
NOTHING: dict[str, int] = {}


class Doubt(msgspec.Struct, frozen=True):
    """A change whose answer got lost, the decision it belongs to, and the rows that was made on."""

    change: Change
    decision: Decision[Any]
    rows: Rows


class Carrier(Protocol):
    """Lets the change that ends an execution carry what that means to those who wait for it."""

    async def carry(self, change: Change, row: Execution) -> Change:
        """The change with as much of that as there is to know, after a look if need be."""
        ...

    def carried(self, change: Change, row: Execution) -> Change | None:
        """The same without a look; None when there is something to look at."""
        ...


class Core:
    """What every verb of the engine stands on."""

    def __init__(self, store: Store, *, minter: Minter, settings: Settings) -> None:
        self.store = store
        self.minter = minter
        self.settings = settings
        self.partitions = settings.partitions
        self.poll_s = settings.poll_ms / 1000
        self.estimate = Estimate()
        self.wakes = Wakes()
        self.commits = Commits(store, self._announce if store.in_order else None)
        self.meters = Meters()
        self.outcomes = Outcomes(self.meters)
        self.loads = Loads(store)
        self.chance: Callable[[], float] = random.random
        self._seen: dict[str, Execution] = {}
        self._lines: dict[str, set[LineKey]] = {}
        self.planned: dict[type[msgspec.Struct], dict[str, int]] = {}  # by row and column: when we look at it next
        self._untold: set[str] = set()
        self._telling = False
        self._late: asyncio.TimerHandle | None = None
        self._decided_lanes: set[str] = set()  # lanes where this process put work that is claimed by decision
        self._takeovers: set[str] = set()  # those where some of it is up for takeover
        self._looked_at: dict[str, int] = {}  # when this process last looked around in a lane
        self.carrier: Carrier | None = None
        self.followers: dict[Row, list[Follow]] = {}  # what to do when such a row was written

    def follow(self, act: Follow, *rows: Row) -> None:
        """Have something done about every change of this process that writes one of these rows."""
        for row in rows:
            self.followers.setdefault(row, []).append(act)

    async def patiently(self, ask: Callable[[], Awaitable[A]]) -> A:
        """Ask what may be asked again at will; a store that is away for a moment is asked again."""
        pause = Pause()
        while True:
            try:
                return await ask()
            except errors.StoreUnavailable:
                await pause.or_raise()

    async def load(self, wants: Sequence[Want]) -> Loaded:
        """Rows and the store's time."""
        loaded = self.store.peek(wants)
        if loaded is None:
            loaded = await self.patiently(lambda: self.loads.load(wants))
        self.estimate.hear(loaded.now)
        return loaded

    async def scan(self, scan: Scan) -> list[Any]:
        """Rows of a list."""
        return await self.patiently(lambda: self.store.scan(scan))

    async def settle(
        self,
        wants: Sequence[Want],
        decide: Callable[[Rows, int], Decision[A]],
        *,
        trusting: Rows | None = None,
        doubts: Sequence[Doubt] = (),
        further: Callable[[Rows], Awaitable[Rows]] | None = None,
    ) -> A:
        """Decide and commit until the rule has answered on rows that were still true when written.

        `trusting` are rows to decide on first without a look: a claimed sheet, or the absence of what is created.
        `doubts` are changes for the same end whose answer got lost: a root that shows one of them tells that it holds.
        `further` looks at more, depending on what the first look found.
        """
        rows, now, misses = trusting, self.estimate.now(), 0
        fresh, pause = False, Pause()
        doubtful = {doubt.change.id: doubt for doubt in doubts} if doubts else {}
        while True:
            if rows is None:
                loaded = await self.load(wants)
                rows, now, fresh = loaded.rows, loaded.now, True
                if doubtful and (found := _recognised(doubtful, rows) or await self._overtaken(doubtful)):
                    doubt, committed_at = found
                    self.note(doubt.change, doubt.rows, committed_at or now)
                    answer: A = doubt.decision.unwrap(committed_at or now)
                    return answer
                if further is not None:
                    rows = rows + await further(rows)
            decision = decide(rows, now)
            if not fresh and (decision.change is None or isinstance(decision.answer, errors.FabricError)):
                rows = None  # nobody is refused, and nothing is marked for it, without a look
                continue
            if decision.change is None:
                return decision.unwrap(now)
            change = msgspec.structs.replace(decision.change, id=self.minter.change_id())
            if not misses and self.carrier is not None and (ending := _waited_for(change, rows)) is not None:
                change = await self.carrier.carry(change, ending)
            try:
                committed = await self.commits.add(change)
            except errors.StoreUnavailable as lost:
                await pause.or_raise()
                if not lost.in_doubt:
                    continue  # nothing was written, and what it was decided on may still be true
                doubtful[change.id] = Doubt(change, decision, rows)
                committed = None
            if committed is not None:
                self.note(change, rows, committed)
                return decision.unwrap(committed)
            misses += fresh
            if misses > 2:  # a hot root: let the others pass
                await asyncio.sleep(random.random() * min(0.1, 0.002 * 2 ** min(misses, 10)))
            rows = None

    def settle_execution(
        self, execution_id: str, decide: Callable[[Execution | None, int], Decision[A]], *, trust: bool = False
    ) -> Awaitable[A]:
        """Settle a decision about one execution; `trust` may begin with the sheet remembered from its claim."""
        seen = self._seen.get(execution_id) if trust else None
        return self.settle(
            (Want(Execution, (execution_id,)),),
            lambda rows, now: decide(rows[0][0] if rows[0] else None, now),
            trusting=None if seen is None else [[seen]],
        )

    async def _overtaken(self, doubtful: dict[int, Doubt]) -> tuple[Doubt, int | None] | None:
        """The doubtful change that others have written over since: what it told, or a row of its own, is there."""
        for doubt in doubtful.values():
            change = doubt.change if doubt.change.form is None else spelled_out(doubt.change, doubt.rows[0][0])
            if change.events and (told := await self._told(change.events[0])) is not None:
                return doubt, told.at
            inserts = [write.row for write in change.writes if isinstance(write, Insert)]
            inserts = [row for row in inserts if isinstance(row, MINTED)]
            wants = [Want(type(row), tuple(getattr(row, name) for name in TABLE[type(row)].key)) for row in inserts]
            if not wants:
                continue
            for row, kept in zip(inserts, (await self.load(wants)).rows, strict=True):
                if kept and is_as_meant(kept[0], row):
                    return doubt, None
        return await self._removed(doubtful)

    async def _removed(self, doubtful: dict[int, Doubt]) -> tuple[Doubt, int | None] | None:
        """The doubtful change that was to remove a root which is gone."""
        for doubt in doubtful.values():
            roots = {(guard.row, guard.key) for guard in doubt.change.guards}
            gone = [
                write for write in doubt.change.writes if isinstance(write, Delete) and (write.row, write.key) in roots
            ]
            if gone and not any((await self.load([Want(write.row, write.key) for write in gone])).rows):
                return doubt, None
        return None

    async def _told(self, event: Event) -> FeedEvent | None:
        """An event as it stands in its execution's history, if it does."""
        topic = next(topic for topic, field in TOPIC_FIELDS.items() if getattr(event, field) is not None)
        told = await self.patiently(lambda: self.store.history(event.execution_id, topic, HISTORY))
        return next((one for one in told if one.event == event), None)

    def note(self, change: Change, rows: Rows, committed_at: int) -> None:
        """Remember and tell what a written change means to this process and to others."""
        self.note_all(((change, rows),), committed_at)

    def note_all(self, written: Sequence[tuple[Change, Rows]], committed_at: int) -> None:
        """The same for changes that were written together: they are told in one hint."""
        self.estimate.hear(committed_at)
        topics: set[str] = set()
        known: set[str] = set()  # of these, what this process was told when the changes were on their way
        for change, rows in written:
            found = self._noted(change, rows, committed_at)
            topics |= found
            if change.id in self.commits.announced:
                self.commits.announced.discard(change.id)
                known.update(topic for topic in found if topic.startswith(LANE))
        if formed := [(change, first(first(rows))) for change, rows in written if change.form is not None]:
            self._note_forms(formed, committed_at, topics)
        if topics:
            self.tell(topics, but_here=known)
        for change, rows in written:
            for follow in self._following(change):
                follow(change, rows)

    def _noted(self, change: Change, rows: Rows, committed_at: int) -> set[str]:
        """Remember what a change writes and tells beyond its form; what there is to tell."""
        topics: set[str] = set()
        if self.planned:
            self._note_due(change, committed_at)
        for write in change.writes:  # compared by type: this runs for every change
            row: Any = write.row
            if type(write) is Patch:
                if row is Execution:
                    self._note_line(write.fields.get("line"), topics)
                    self._note_sheet(write.key[0], write.fields, change.id, rows, committed_at)
            elif type(write) is not Delete and type(row) is Execution:
                self._note_line(row.line, topics)
        for event in change.events:
            topics.add(FEED)
            if event.outcome is not None:
                topics.add(end_topic(event.execution_id))
            if event.outcome is not None or event.lease == "released":
                self.outcomes.note(event, change, _sheet_of(event.execution_id, rows), committed_at)
        return topics

    def _following(self, change: Change) -> Iterable[Follow]:
        """What is to be done about a change, once each."""
        followers, found = self.followers, dict[Follow, None]()
        if change.form is not None and change.form.root in followers:
            found.update(dict.fromkeys(followers[change.form.root]))
        for write in change.writes:
            row: Any = write.row
            if type(write) is not Patch and type(write) is not Delete:
                row = type(row)
            if row in followers:
                found.update(dict.fromkeys(followers[row]))
        return found

    def note_alike(self, ends: Sequence[tuple[Change, Execution]], committed_at: int) -> None:
        """The same for ends of ordinary work, of which the forms say it all: many are told in one hint."""
        if Execution in self.followers:
            for change, row in ends:
                self.note(change, [[row]], committed_at)
            return
        self.estimate.hear(committed_at)
        topics: set[str] = set()
        self._note_forms(ends, committed_at, topics)
        self.tell(topics)

    def _note_forms(self, ends: Sequence[tuple[Change, Execution]], committed_at: int, topics: set[str]) -> None:
        forms = {change.form for change, _ in ends if change.form is not None}
        for change, row in ends:
            assert change.form is not None
            self._seen.pop(row.execution_id, None)
            topics.add(end_topic(row.execution_id))
            self.outcomes.formed(row, change.form.event["outcome"], committed_at)
        for column, planned_at in self.planned.get(Execution, NOTHING).items():
            for form in forms:
                if isinstance(instant := form.fields.get(column), FromNow):
                    self._note_instant(Execution, column, committed_at + instant.offset, planned_at)
        topics.add(FEED)

    def _announce(self, changes: Sequence[Change]) -> None:
        """Wake the claims of this process that wait for lanes where these changes put work, so that they come along.

        Their takes are handed over after the changes, and mostly join the same transaction.
        """
        for change in changes:
            lines = {line for write in change.writes if (line := _line_of(write)) is not None}
            topics = [lane_topic(line.lane_id) for line in lines]
            if not any(map(self.wakes.waiting, topics)):
                continue
            if all(not line.decided and line in self._lines.get(line.lane_id, ()) for line in lines):
                self.commits.announced.add(change.id)
                self.wakes.fire(topics)

    def tell(self, topics: Collection[str], *, at_once: bool = True, but_here: Set[str] = frozenset()) -> None:
        """Wake whoever waits for these, here and in other processes; there with the next hint if that will do.

        `but_here` are those that this process was told before.
        """
        self.wakes.fire([topic for topic in topics if topic not in but_here] if but_here else topics)
        self._untold.update(topics)
        if at_once and not self._telling:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell_others)
        elif not at_once and not self._telling and self._late is None:
            self._late = asyncio.get_running_loop().call_later(LATER_S, self._tell_others)

    def _tell_others(self) -> None:
        """One hint for everything that a turn of the loop brought about."""
        if self._late is not None:
            self._late.cancel()
        topics, self._untold, self._telling, self._late = frozenset(self._untold), set(), False, None
        self.store.notify(topics)

    def note_line(self, line: LineKey) -> bool:
        """Know a line; True when it is news."""
        known = self._lines.setdefault(line.lane_id, set())
        if line in known:
            return False
        known.add(line)
        return True

    def _note_due(self, change: Change, committed_at: int) -> None:
        """Wake a sweep of this process that meant to look only after an instant that has just been written."""
        for write in change.writes:  # compared by type: this runs for every change
            if type(write) is Delete:
                continue
            row: Any = write.row if type(write) is Patch else type(write.row)
            for column, planned_at in self.planned.get(row, NOTHING).items():
                instant = write.fields.get(column) if type(write) is Patch else getattr(write.row, column)
                if isinstance(instant, FromNow):
                    instant = committed_at + instant.offset
                self._note_instant(row, column, instant, planned_at)

    def _note_instant(self, row: type[msgspec.Struct], column: str, instant: int | None, planned_at: int) -> None:
        if instant is not None and instant < planned_at:
            self.wakes.fire((due_topic(row, column),))

    def note_taken(self, rows: Sequence[Execution]) -> None:
        """The same for rows that the store claimed by itself."""
        for column, planned_at in self.planned.get(Execution, NOTHING).items():
            for taken in rows:
                self._note_instant(Execution, column, getattr(taken, column), planned_at)

    def _note_line(self, line: LineKey | None, topics: set[str]) -> None:
        if line is None:
            return
        self.note_line(line)
        topics.add(lane_topic(line.lane_id))
        if line.decided:
            self._decided_lanes.add(line.lane_id)

    def _note_sheet(
        self, execution_id: str, fields: dict[str, Any], revision: int, rows: Rows, committed_at: int
    ) -> None:
        owned = fields.get("ownership_state")
        if owned is not None and owned is not OwnershipState.LEASED:
            if owned is not OwnershipState.UNOWNED and (line := fields.get("line")):
                self._takeovers.add(line.lane_id)
            self._seen.pop(execution_id, None)
            return
        if owned is None and execution_id not in self._seen:
            return  # it was not held before, and is not now
        if (row := _sheet_of(execution_id, rows)) is not None:
            self.remember(applied(row, fields, revision, committed_at))

    def remember(self, row: Execution) -> None:
        """Keep a held sheet: its lease is the licence to trust it."""
        if row.lifecycle_phase is not LifecyclePhase.ACTIVE or row.ownership_state is not OwnershipState.LEASED:
            return
        seen = self._seen
        seen[row.execution_id] = row
        if len(seen) > SEEN_LIMIT:
            del seen[next(iter(seen))]

    def opened(self, handle: Handle) -> HandleFields:
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


def _line_of(write: Write) -> LineKey | None:
    """The line that a write puts an execution into."""
    row: Any = write.row
    if type(write) is Patch:
        return write.fields.get("line") if row is Execution else None
    return row.line if type(row) is Execution else None


def first(rows: Sequence[Any]) -> Any:
    """The row of a want that names one, or None."""
    return rows[0] if rows else None


def _sheet_of(execution_id: str, rows: Rows) -> Execution | None:
    """The execution of this name among some rows."""
    for found in rows:
        for row in found:
            if type(row) is Execution and row.execution_id == execution_id:
                return row
    return None


def _recognised(doubtful: dict[int, Doubt], rows: Rows) -> tuple[Doubt, int | None] | None:
    """The doubtful change that a root shows as its last one, and when it was written if the root tells."""
    for found in rows:
        for row in found:
            if doubt := doubtful.get(getattr(row, "revision", 0)):
                return doubt, getattr(row, "last_mutation_at", None)
    return None


def is_as_meant(found: msgspec.Struct, meant: msgspec.Struct) -> bool:
    """Whether a row says what was to be inserted; instants that the store filled in, and revisions, say nothing."""
    return all(
        type(value) is FromNow or name == "revision" or getattr(found, name) == value
        for name, value in msgspec.structs.asdict(meant).items()
    )


def applied(row: Execution, fields: dict[str, Any], revision: int, committed_at: int) -> Execution:
    """The row as it is after a patch that was written at that time."""
    values = {
        name: committed_at + value.offset if isinstance(value, FromNow) else value for name, value in fields.items()
    }
    return msgspec.structs.replace(row, **values, revision=revision)


class Pause:
    """A growing, jittered wait between tries, until patience runs out; it begins with the first failure."""

    __slots__ = ("_patience_s", "_tries", "_until")

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._tries = 0

    async def or_raise(self) -> None:
        """Wait a little; called while handling an error, which is raised again when patience has run out."""
        now = asyncio.get_running_loop().time()
        if not self._tries:
            self._until = now + self._patience_s
        elif now >= self._until:
            raise
        self._tries += 1
        await asyncio.sleep(random.random() * min(1.0, 0.02 * 2**self._tries))
