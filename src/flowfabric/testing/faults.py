"""A store whose wire breaks when it is told to: requests that never arrive, answers that are lost, calls that wait.

    store = FlakyStore(MemoryStore())
    store.lose("commit", Loss.REPLY)            # the next commit is written, and nobody hears of it
    gate = store.stop_before("commit")          # the next commit waits here ...
    await gate.reached()                        # ... and the test does something else meanwhile ...
    gate.open()                                 # ... before it lets it go on

A lost answer is the case that finds most mistakes: the work was done, and the one who asked for it cannot know.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from flowfabric.errors import StoreFault, StoreUnavailable
from flowfabric.model.change import Change
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import LineKey
from flowfabric.stores.claims import Handed, Held, Take, Taken
from flowfabric.stores.port import Schema, Store
from flowfabric.stores.queries import Due, FeedPage, Loaded, Scan, Tally, Want, Where

T = TypeVar("T")

WRITES = ("commit", "take", "renew")


class Loss(StrEnum):
    """What becomes of a call."""

    REQUEST = "request"  # it never arrives, and the caller knows that
    UNSURE = "unsure"  # it never arrives, but the caller cannot know
    REPLY = "reply"  # it is done, and its answer is lost


class Gate:
    """A place where one call stops until it is let through."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._open = asyncio.Event()

    async def reached(self) -> None:
        """Wait until the call stands here."""
        await self._reached.wait()

    def open(self) -> None:
        """Let it go on."""
        self._open.set()

    async def passes(self) -> None:
        """The call's side: stop, and wait to be let through."""
        self._reached.set()
        await self._open.wait()


class FlakyStore:
    """Any store behind a wire that can be cut. Without orders it behaves like the store itself."""

    def __init__(self, store: Store, *, chance: random.Random | None = None, rate: float = 0.0) -> None:
        """With a `chance`, each writing call suffers some loss with this rate, the same for the same seed."""
        self.inner = store
        self.tag = store.tag
        self.clock = store.clock
        self.commit_lanes = store.commit_lanes
        self.in_order = False  # not when answers are held up
        self.batch_limit = store.batch_limit
        self.lost: list[tuple[str, Loss]] = []  # what was lost so far, to assert that something was
        self._chance = chance
        self._rate = rate
        self.is_down = False
        self._orders: dict[str, deque[Loss | None]] = defaultdict(deque)
        self._before: dict[str, deque[Gate]] = defaultdict(deque)
        self._after: dict[str, deque[Gate]] = defaultdict(deque)

    def lose(self, verb: str, loss: Loss, *, times: int = 1, after: int = 0) -> None:
        """Lose the next calls of a verb in this way, once `after` calls have gone well."""
        self._orders[verb].extend([None] * after + [loss] * times)

    def stop_before(self, verb: str) -> Gate:
        """Stop the next call of a verb before it reaches the store."""
        return self._stop(self._before, verb)

    def stop_after(self, verb: str) -> Gate:
        """Stop the next call of a verb when it is done, before its answer is heard."""
        return self._stop(self._after, verb)

    def heal(self) -> None:
        """Forget all orders and lose nothing more."""
        self._orders.clear()
        self._rate = 0.0
        self.is_down = False

    def _stop(self, gates: dict[str, deque[Gate]], verb: str) -> Gate:
        gate = Gate()
        gates[verb].append(gate)
        return gate

    def _loss(self, verb: str) -> Loss | None:
        if orders := self._orders[verb]:
            return orders.popleft()
        if self._chance is not None and verb in WRITES and self._chance.random() < self._rate:
            return self._chance.choice(tuple(Loss))
        return None

    def go_down(self) -> None:
        """Let no call arrive any more, until `heal`."""
        self.is_down = True

    async def _sent(self, verb: str, call: Callable[[], Awaitable[T]]) -> T:
        if self.is_down:
            raise self._broken(verb, Loss.REQUEST)
        if gates := self._before[verb]:
            await gates.popleft().passes()
        loss = self._loss(verb)
        if loss in (Loss.REQUEST, Loss.UNSURE):
            raise self._broken(verb, loss)
        answer = await call()
        if gates := self._after[verb]:
            await gates.popleft().passes()
        if loss is Loss.REPLY:
            raise self._broken(verb, loss)
        return answer

    def _broken(self, verb: str, loss: Loss) -> StoreUnavailable:
        self.lost.append((verb, loss))
        in_doubt = verb in WRITES and loss is not Loss.REQUEST
        return StoreUnavailable(
            f"{verb}: {loss.value} lost on purpose",
            backend=self.tag.title,
            source=StoreFault.TRANSPORT,
            in_doubt=in_doubt,
        )

    # -- the port -------------------------------------------------------------------------------------------------

    async def open(self, *, migrate: bool) -> Schema:
        return await self.inner.open(migrate=migrate)

    async def close(self) -> None:
        await self.inner.close()

    async def ping(self) -> int:
        return await self._sent("ping", self.inner.ping)

    def peek(self, wants: Sequence[Want]) -> Loaded | None:
        return None  # every look goes over the wire

    async def load(self, wants: Sequence[Want]) -> Loaded:
        return await self._sent("load", lambda: self.inner.load(wants))

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        return await self._sent("commit", lambda: self.inner.commit(changes, hint))

    async def hand_over(self, changes: Sequence[Change], hint: frozenset[str], take: Take) -> Handed:
        return await self._sent("commit", lambda: self.inner.hand_over(changes, hint, take))

    async def take(self, take: Take) -> Taken:
        return await self._sent("take", lambda: self.inner.take(take))

    async def renew(self, leases: Sequence[Held]) -> list[int | None]:
        return await self._sent("renew", lambda: self.inner.renew(leases))

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        return await self._sent("due", lambda: self.inner.due(row, column, limit=limit, where=where))

    async def scan(self, scan: Scan) -> list[Any]:
        return await self._sent("scan", lambda: self.inner.scan(scan))

    async def tally(self, tally: Tally) -> dict[tuple[Any, ...], int]:
        return await self._sent("tally", lambda: self.inner.tally(tally))

    async def lines(self, lane_id: str | None = None) -> list[LineKey]:
        return await self._sent("lines", lambda: self.inner.lines(lane_id))

    async def standing(self, lane_id: str) -> list[LineKey]:
        return await self._sent("standing", lambda: self.inner.standing(lane_id))

    async def unlisted(self, limit: int) -> list[str]:
        return await self._sent("unlisted", lambda: self.inner.unlisted(limit))

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        return await self._sent("lanes", lambda: self.inner.lanes(after, limit))

    async def feed(self, topic: Topic, after: int, limit: int) -> FeedPage:
        return await self._sent("feed", lambda: self.inner.feed(topic, after, limit))

    async def feed_end(self) -> int:
        return await self._sent("feed_end", self.inner.feed_end)

    async def trim_feed(self, before: int, limit: int) -> int:
        return await self._sent("trim_feed", lambda: self.inner.trim_feed(before, limit))

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str = "") -> list[FeedEvent]:
        return await self._sent("history", lambda: self.inner.history(execution_id, topic, limit, without))

    def notify(self, topics: frozenset[str]) -> None:
        self.inner.notify(topics)

    def limit_commands(self, command_s: float) -> None:
        self.inner.limit_commands(command_s)

    def on_wake(self, callback: Callable[[frozenset[str]], None]) -> None:
        self.inner.on_wake(callback)
