"""Players: pairs of engines that receive the same calls and answer as comparable plain data.

A player has two engines on one store, like two processes. All randomness is the same for all players: one clock, the
same identifiers in the same order, the same random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import Enum
from typing import Any

import msgspec

from flowfabric.api.encoding import variant_name
from flowfabric.clock import ManualClock, StoreClockEstimate
from flowfabric.engine.engine import Engine
from flowfabric.errors import FabricError
from flowfabric.handles import BackendTag, Handle, HandleFields, HandleKind
from flowfabric.ids import SeededMinter
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import Execution
from flowfabric.stores.catalog import TABLES
from flowfabric.stores.port import Store
from flowfabric.stores.queries import Scan, Where
from flowfabric.testing.invariants import scan_all

SEATS = 2
DUE = ("lease_expires_at", "delay_until", "attempt_timeout_at", "deadline_at", "purge_at")


def other_than(tag: BackendTag) -> BackendTag:
    """Return the kind of a store that did not issue a handle of this one."""
    return BackendTag.VALKEY if tag is not BackendTag.VALKEY else BackendTag.MEMORY


class Held(msgspec.Struct, frozen=True):
    """A handle without the store that issued it, so that every player can have its own."""

    kind: HandleKind
    fields: HandleFields
    foreign: bool = False  # presented to a store that did not issue it

    def handle(self, tag: BackendTag) -> Handle:
        return Handle.mint(other_than(tag) if self.foreign else tag, self.kind, self.fields)


class Call(msgspec.Struct, frozen=True):
    """One call that every player executes."""

    verb: str
    given: dict[str, Any]
    seat: int = 0  # the index of the player's engine


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a call: the answer itself, and the plain data that is compared."""

    answer: Any
    said: Any


class SteadyMinter(SeededMinter):
    """Change ids have a separate random sequence: retries of an engine must not change any other id."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._changes = random.Random(seed)

    def change_id(self) -> int:
        return self._changes.getrandbits(63) or 1


class Player:
    """Two engines on one store."""

    def __init__(self, store: Store, clock: ManualClock) -> None:
        self.store = store
        self.engines = [self._engine(clock, seat) for seat in range(SEATS)]
        self._read_to = dict.fromkeys(Topic, 0)

    def _engine(self, clock: ManualClock, seat: int) -> Engine:
        engine = Engine(self.store, minter=SteadyMinter(seat))
        engine.runtime.random = random.Random(seat).random
        # It keeps its last estimate, which is wrong after a jump.
        engine.runtime.estimate = StoreClockEstimate(monotonic_s=lambda: 0.0)
        engine.estimate.update(clock.now)
        return engine

    async def begin(self) -> None:
        """Read past what others may have left in the feed."""
        self._read_to = dict.fromkeys(Topic, await self.store.feed_end())

    async def play(self, call: Call) -> Outcome:
        """Execute a call and return its outcome."""
        given = {name: self._own(value) for name, value in call.given.items()}
        answer: Any
        try:
            answer = await getattr(self.engines[call.seat], call.verb)(**given)
        except FabricError as refused:
            answer = refused
        await self.engines[call.seat].child_cancels.drain()
        return Outcome(answer, self.plain(answer))

    def _own(self, value: Any) -> Any:
        if isinstance(value, Held):
            return value.handle(self.store.tag)
        if isinstance(value, list) and value and isinstance(value[0], Held):
            return [held.handle(self.store.tag) for held in value]
        return value

    def plain(self, value: Any) -> Any:
        """Return a value as plain data, the same for every store: only the store's own name is left out.

        A field that is UNSET is absent, as in the answers of the server.
        """
        match value:
            case FabricError():
                facts = {name: self.plain(fact) for name, fact in value.facts.items()}
                return self.plain({"refused": value.kind, "detail": value.detail, **facts})
            case Handle():
                return {"handle": value.kind.value, **msgspec.structs.asdict(value.fields)}
            case msgspec.Struct():
                fields = {name: one for name, one in msgspec.structs.asdict(value).items() if one is not msgspec.UNSET}
                return {"is": variant_name(type(value)), **self.plain(fields)}
            case dict():
                return {str(name): self.plain(one) for name, one in value.items()}
            case list() | tuple():
                return [self.plain(one) for one in value]
            case Enum():
                return value.value
            case str():
                other = other_than(self.store.tag).title
                if value == other:
                    return "<other store>"
                return value.replace(self.store.tag.title, "<store>").replace(f"actual={other}", "actual=<other store>")
            case _:
                return value

    # -- stored rows ------------------------------------------------------------------------------------------------

    async def execution_rows(self) -> list[Execution]:
        """Return the row of every execution, by any writer."""
        return [msgspec.structs.replace(row, revision=0) for row in await scan_all(self.store, Execution)]

    async def rows(self) -> dict[str, list[Any]]:
        """Return every row of every table except the executions."""
        found: dict[str, list[Any]] = {}
        for table in TABLES:
            if table.row is not Execution:
                rows = await scan_all(self.store, table.row)
                revised = "revision" in table.column_names
                found[table.name] = [msgspec.structs.replace(row, revision=0) if revised else row for row in rows]
        return found

    async def queued(self) -> dict[Any, list[str]]:
        """Return every non-empty queue in order; a store may know queues that were never used."""
        found = {}
        for line in await self.store.queues():
            scan = Scan(Execution, (Where("line", "=", line),), ("rank", "execution_id"), limit=1000)
            if rows := await self.store.scan(scan):
                found[line] = [row.execution_id for row in rows]
        return found

    async def due(self) -> dict[str, Any]:
        """Return what every sweep would find, and when it would scan again."""
        found = {}
        for column in DUE:
            due = await self.store.due(Execution, column, limit=1000)
            found[column] = ([row.execution_id for row in due.rows], due.next_at, due.now)
        return found

    async def news(self) -> dict[Topic, list[FeedEvent]]:
        """Return what every feed has emitted since the last call, ordered per execution and without positions.

        Expired leases are marked concurrently, so any order between executions is right.
        """
        return {topic: by_execution(await self._news(topic)) for topic in Topic}

    async def _news(self, topic: Topic) -> list[FeedEvent]:
        events: list[FeedEvent] = []
        while True:
            page = await self.store.feed(topic, self._read_to[topic], 3)
            events += page.events
            self._read_to[topic] = page.position
            if not page.events:
                return events

    async def histories(self, execution_ids: Sequence[str]) -> dict[str, Any]:
        """Return attempts, leases and views of each execution."""
        engine = self.engines[0]
        return {
            execution_id: (
                await engine.attempt_history(execution_id),
                await engine.lease_history(execution_id),
                await engine.read_execution_info(execution_id),
                await engine.describe_execution(execution_id),
                await engine.get_execution_result(execution_id),
            )
            for execution_id in execution_ids
        }


def by_execution(events: list[FeedEvent]) -> list[FeedEvent]:
    """Return events without positions, grouped by execution and in order."""
    ordered = sorted(events, key=lambda one: one.event.execution_id)
    return [msgspec.structs.replace(one, position=0) for one in ordered]
