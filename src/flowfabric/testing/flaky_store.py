"""`FlakyStore`: a store with a faulty connection, for tests: lost requests, lost replies, and calls that wait.

    store = FlakyStore(MemoryStore())
    store.lose("commit", Loss.REPLY)            # the next commit is written, but its reply is lost
    point = store.stop_before("commit")         # the next commit waits here ...
    await point.reached()                       # ... while the test does something else ...
    point.release()                             # ... before it continues

A lost reply finds most mistakes: the write was done, and the caller cannot know it.
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
from flowfabric.ids import DEFAULT_PARTITIONS, PartitionCounts
from flowfabric.model.change import Change, RowTemplate
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import QueueKey
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult, LeaseRef
from flowfabric.stores.port import SchemaVersion, Store
from flowfabric.stores.queries import Due, FeedPage, GroupedCount, Loaded, Read, Scan, Search, SearchPage, Where
from flowfabric.stores.verdicts import Verdict

T = TypeVar("T")

WRITE_VERBS = ("commit", "take", "renew")


class Loss(StrEnum):
    """How a call fails."""

    REQUEST = "request"  # it never arrives, and the caller knows that
    UNSURE = "unsure"  # it never arrives, and the caller does not know that
    REPLY = "reply"  # it is executed, and its reply is lost


class SyncPoint:
    """A point at which one call stops until it is released."""

    def __init__(self) -> None:
        self._reached = asyncio.Event()
        self._open = asyncio.Event()

    async def reached(self) -> None:
        """Wait until the call has reached this point."""
        await self._reached.wait()

    def release(self) -> None:
        """Let the call continue."""
        self._open.set()

    async def pause(self) -> None:
        """Stop the calling store operation until `release`."""
        self._reached.set()
        await self._open.wait()


class FlakyStore:
    """Any store behind a connection that can fail. Without injected faults it behaves like the store itself."""

    def __init__(self, store: Store, *, rng: random.Random | None = None, rate: float = 0.0) -> None:
        """Wrap a store. With `rng`, writing calls fail at random at this `rate`, equally for equal seeds."""
        self.inner = store
        self.tag = store.tag
        self.clock = store.clock
        self.concurrent_commits = store.concurrent_commits
        self.claim_parts = store.claim_parts
        self.executes_in_order = False  # a stopped call is overtaken by later ones
        self.batch_limit = store.batch_limit
        self.deletes_in_pages = store.deletes_in_pages
        self.losses: list[tuple[str, Loss]] = []  # all losses so far, for assertions
        self._rng = rng
        self._rate = rate
        self.is_down = False
        self._planned: dict[str, deque[Loss | None]] = defaultdict(deque)
        self._before: dict[str, deque[SyncPoint]] = defaultdict(deque)
        self._after: dict[str, deque[SyncPoint]] = defaultdict(deque)

    def lose(self, verb: str, loss: Loss, *, times: int = 1, after: int = 0) -> None:
        """Let the next `times` calls of a verb fail in this way, after `after` successful ones."""
        self._planned[verb].extend([None] * after + [loss] * times)

    def stop_before(self, verb: str) -> SyncPoint:
        """Stop the next call of a verb before it reaches the store."""
        return self._stop(self._before, verb)

    def stop_after(self, verb: str) -> SyncPoint:
        """Stop the next call of a verb after it was executed, before its reply arrives."""
        return self._stop(self._after, verb)

    def heal(self) -> None:
        """Drop all planned faults, and let calls arrive again."""
        self._planned.clear()
        self._rate = 0.0
        self.is_down = False

    def _stop(self, points: dict[str, deque[SyncPoint]], verb: str) -> SyncPoint:
        point = SyncPoint()
        points[verb].append(point)
        return point

    def _next_loss(self, verb: str) -> Loss | None:
        if planned := self._planned[verb]:
            return planned.popleft()
        if self._rng is not None and verb in WRITE_VERBS and self._rng.random() < self._rate:
            return self._rng.choice(tuple(Loss))
        return None

    def go_down(self) -> None:
        """Let no call arrive until `heal`."""
        self.is_down = True

    async def _call(self, verb: str, call: Callable[[], Awaitable[T]]) -> T:
        if self.is_down:
            raise self._error(verb, Loss.REQUEST)
        if points := self._before[verb]:
            await points.popleft().pause()
        loss = self._next_loss(verb)
        if loss in (Loss.REQUEST, Loss.UNSURE):
            raise self._error(verb, loss)
        answer = await call()
        if points := self._after[verb]:
            await points.popleft().pause()
        if loss is Loss.REPLY:
            raise self._error(verb, loss)
        return answer

    def _error(self, verb: str, loss: Loss) -> StoreUnavailable:
        self.losses.append((verb, loss))
        in_doubt = verb in WRITE_VERBS and loss is not Loss.REQUEST
        return StoreUnavailable(
            f"{verb}: {loss.value} lost on purpose",
            backend=self.tag.title,
            source=StoreFault.TRANSPORT,
            in_doubt=in_doubt,
        )

    # -- the port -------------------------------------------------------------------------------------------------

    async def open(self, *, migrate: bool, partitions: PartitionCounts = DEFAULT_PARTITIONS) -> SchemaVersion:
        return await self.inner.open(migrate=migrate, partitions=partitions)

    async def close(self) -> None:
        await self.inner.close()

    async def ping(self) -> int:
        return await self._call("ping", self.inner.ping)

    def try_load_now(self, wants: Sequence[Read]) -> Loaded | None:
        return None  # every load passes through the faulty connection

    async def load(self, wants: Sequence[Read]) -> Loaded:
        return await self._call("load", lambda: self.inner.load(wants))

    async def commit(self, changes: Sequence[Change], hint: frozenset[str] = frozenset()) -> list[Verdict]:
        return await self._call("commit", lambda: self.inner.commit(changes, hint))

    async def commit_and_claim(
        self, changes: Sequence[Change], hint: frozenset[str], take: ClaimRequest
    ) -> CommitAndClaimResult:
        return await self._call("commit", lambda: self.inner.commit_and_claim(changes, hint, take))

    async def claim_rows(self, take: ClaimRequest) -> ClaimedRows:
        return await self._call("take", lambda: self.inner.claim_rows(take))

    async def renew(self, leases: Sequence[LeaseRef], template: RowTemplate) -> list[int | None]:
        return await self._call("renew", lambda: self.inner.renew(leases, template))

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        return await self._call("due", lambda: self.inner.due(row, column, limit=limit, where=where))

    async def scan(self, scan: Scan) -> list[Any]:
        return await self._call("scan", lambda: self.inner.scan(scan))

    async def search(self, search: Search) -> SearchPage:
        return await self._call("scan", lambda: self.inner.search(search))

    async def kinds(self, execution_ids: Sequence[str]) -> dict[str, str]:
        return await self._call("load", lambda: self.inner.kinds(execution_ids))

    async def count_grouped(self, tally: GroupedCount) -> dict[tuple[Any, ...], int]:
        return await self._call("tally", lambda: self.inner.count_grouped(tally))

    async def queues(self, lane_id: str | None = None) -> list[QueueKey]:
        return await self._call("lines", lambda: self.inner.queues(lane_id))

    async def nonempty_queues(self, lane_id: str) -> list[QueueKey]:
        return await self._call("standing", lambda: self.inner.nonempty_queues(lane_id))

    async def executions_in_missing_queues(self, limit: int) -> list[str]:
        return await self._call("unlisted", lambda: self.inner.executions_in_missing_queues(limit))

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        return await self._call("lanes", lambda: self.inner.lanes(after, limit))

    async def feed(self, topic: Topic, after: int, limit: int) -> FeedPage:
        return await self._call("feed", lambda: self.inner.feed(topic, after, limit))

    async def feed_end(self) -> int:
        return await self._call("feed_end", self.inner.feed_end)

    async def trim_feed(self, before: int, limit: int) -> int:
        return await self._call("trim_feed", lambda: self.inner.trim_feed(before, limit))

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str = "") -> list[FeedEvent]:
        return await self._call("history", lambda: self.inner.history(execution_id, topic, limit, without))

    def notify(self, topics: frozenset[str]) -> None:
        self.inner.notify(topics)

    def limit_commands(self, command_s: float) -> None:
        self.inner.limit_commands(command_s)

    def on_notify(self, callback: Callable[[frozenset[str]], None]) -> None:
        self.inner.on_notify(callback)
