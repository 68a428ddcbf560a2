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
from flowfabric.model.execution import QueueKey
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult, LeaseRef
from flowfabric.stores.port import SchemaVersion, Store
from flowfabric.stores.queries import Due, FeedPage, GroupedCount, Loaded, Read, Scan, Where

T = TypeVar("T")

WRITE_VERBS = ("commit", "take", "renew")


class Loss(StrEnum):
    """What becomes of a call."""

    REQUEST = "request"  # it never arrives, and the caller knows that
    UNSURE = "unsure"  # it never arrives, but the caller cannot know
    REPLY = "reply"  # it is done, and its answer is lost


class SyncPoint:
    """A place where one call stops until it is let through."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._open = asyncio.Event()

    async def reached(self) -> None:
        """Wait until the call stands here."""
        await self._reached.wait()

    def release(self) -> None:
        """Let it go on."""
        self._open.set()

    async def pause(self) -> None:
        """The call's side: stop, and wait to be let through."""
        self._reached.set()
        await self._open.wait()


class FlakyStore:
    """Any store behind a wire that can be cut. Without orders it behaves like the store itself."""

    def __init__(self, store: Store, *, rng: random.Random | None = None, rate: float = 0.0) -> None:
        """With a `chance`, each writing call suffers some loss with this rate, the same for the same seed."""
        self.inner = store
        self.tag = store.tag
        self.clock = store.clock
        self.concurrent_commits = store.concurrent_commits
        self.executes_in_order = False  # not when answers are held up
        self.batch_limit = store.batch_limit
        self.losses: list[tuple[str, Loss]] = []  # what was lost so far, to assert that something was
        self._chance = rng
        self._rate = rate
        self.is_down = False
        self._orders: dict[str, deque[Loss | None]] = defaultdict(deque)
        self._before: dict[str, deque[SyncPoint]] = defaultdict(deque)
        self._after: dict[str, deque[SyncPoint]] = defaultdict(deque)

    def lose(self, verb: str, loss: Loss, *, times: int = 1, after: int = 0) -> None:
        """Lose the next calls of a verb in this way, once `after` calls have gone well."""
        self._orders[verb].extend([None] * after + [loss] * times)

    def stop_before(self, verb: str) -> SyncPoint:
        """Stop the next call of a verb before it reaches the store."""
        return self._stop(self._before, verb)

    def stop_after(self, verb: str) -> SyncPoint:
        """Stop the next call of a verb when it is done, before its answer is heard."""
        return self._stop(self._after, verb)

    def heal(self) -> None:
        """Forget all orders and lose nothing more."""
        self._orders.clear()
        self._rate = 0.0
        self.is_down = False

    def _stop(self, gates: dict[str, deque[SyncPoint]], verb: str) -> SyncPoint:
        gate = SyncPoint()
        gates[verb].append(gate)
        return gate

    def _loss(self, verb: str) -> Loss | None:
        if orders := self._orders[verb]:
            return orders.popleft()
        if self._chance is not None and verb in WRITE_VERBS and self._chance.random() < self._rate:
            return self._chance.choice(tuple(Loss))
        return None

    def go_down(self) -> None:
        """Let no call arrive any more, until `heal`."""
        self.is_down = True

    async def _sent(self, verb: str, call: Callable[[], Awaitable[T]]) -> T:
        if self.is_down:
            raise self._broken(verb, Loss.REQUEST)
        if gates := self._before[verb]:
            await gates.popleft().pause()
        loss = self._loss(verb)
        if loss in (Loss.REQUEST, Loss.UNSURE):
            raise self._broken(verb, loss)
        answer = await call()
        if gates := self._after[verb]:
            await gates.popleft().pause()
        if loss is Loss.REPLY:
            raise self._broken(verb, loss)
        return answer

    def _broken(self, verb: str, loss: Loss) -> StoreUnavailable:
        self.losses.append((verb, loss))
        in_doubt = verb in WRITE_VERBS and loss is not Loss.REQUEST
        return StoreUnavailable(
            f"{verb}: {loss.value} lost on purpose",
            backend=self.tag.title,
            source=StoreFault.TRANSPORT,
            in_doubt=in_doubt,
        )

    # -- the port -------------------------------------------------------------------------------------------------

    async def open(self, *, migrate: bool) -> SchemaVersion:
        return await self.inner.open(migrate=migrate)

    async def close(self) -> None:
        await self.inner.close()

    async def ping(self) -> int:
        return await self._sent("ping", self.inner.ping)

    def try_load_now(self, wants: Sequence[Read]) -> Loaded | None:
        return None  # every look goes over the wire

    async def load(self, wants: Sequence[Read]) -> Loaded:
        return await self._sent("load", lambda: self.inner.load(wants))

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[int | None]:
        return await self._sent("commit", lambda: self.inner.commit(changes, hint))

    async def commit_and_claim(
        self, changes: Sequence[Change], hint: frozenset[str], take: ClaimRequest
    ) -> CommitAndClaimResult:
        return await self._sent("commit", lambda: self.inner.commit_and_claim(changes, hint, take))

    async def claim_rows(self, take: ClaimRequest) -> ClaimedRows:
        return await self._sent("take", lambda: self.inner.claim_rows(take))

    async def renew(self, leases: Sequence[LeaseRef]) -> list[int | None]:
        return await self._sent("renew", lambda: self.inner.renew(leases))

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        return await self._sent("due", lambda: self.inner.due(row, column, limit=limit, where=where))

    async def scan(self, scan: Scan) -> list[Any]:
        return await self._sent("scan", lambda: self.inner.scan(scan))

    async def count_grouped(self, tally: GroupedCount) -> dict[tuple[Any, ...], int]:
        return await self._sent("tally", lambda: self.inner.count_grouped(tally))

    async def queues(self, lane_id: str | None = None) -> list[QueueKey]:
        return await self._sent("lines", lambda: self.inner.queues(lane_id))

    async def nonempty_queues(self, lane_id: str) -> list[QueueKey]:
        return await self._sent("standing", lambda: self.inner.nonempty_queues(lane_id))

    async def executions_in_missing_queues(self, limit: int) -> list[str]:
        return await self._sent("unlisted", lambda: self.inner.executions_in_missing_queues(limit))

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

    def on_notify(self, callback: Callable[[frozenset[str]], None]) -> None:
        self.inner.on_notify(callback)
