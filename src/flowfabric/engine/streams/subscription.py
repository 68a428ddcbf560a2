"""Subscriptions: committed events in order, resumable, never skipping, never repeating."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec

from flowfabric import errors
from flowfabric.cursors import encode_cursor
from flowfabric.engine.runtime.runtime import RETRY_FOR_S, Runtime, StoreBackoff
from flowfabric.engine.runtime.wakeups import FEED_TOPIC, wait_for_wakeup
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.rules.feed import CompletionFeedEntry, Filter
from flowfabric.stores.queries import FeedPage

N = TypeVar("N")
PAGE_SIZE = 256
DIVERGED = "the cursor is not in this feed: the store was restored, or failed over and lost its newest events"


class Subscription(AsyncIterator[N]):
    """The events of one feed after a place. Reading ahead is bounded by one page; a slow reader slows itself only.

    What has to be said besides events is raised where it belongs among them. After `StreamBackpressure` (a gap: events
    were no longer kept, or the cursor points to what the store has lost) and `Corruption` (one could not be read) the
    next one can be asked for; `StreamDisconnected` is the end, and subscribing with its cursor loses nothing.
    """

    def __init__(
        self, core: Runtime, topic: Topic, position: int, chosen: Filter, tell: Callable[[FeedEvent], N | None]
    ) -> None:
        self._core = core
        self._topic = topic
        self._position = position
        self._read_to = position
        self._filter = chosen
        self._tell = tell
        self._page: deque[tuple[int, N | errors.FabricError]] = deque()
        self._ended = False
        self.retry_for_s = RETRY_FOR_S  # how long a store that is away is waited for

    @property
    def cursor(self) -> bytes:
        """The place after the last event that was handed out, or passed over by the filter."""
        return encode_cursor(self._position)

    def __aiter__(self) -> Subscription[N]:
        return self

    async def __anext__(self) -> N:
        while not self._ended:
            event = await self.next(timeout_s=3600)
            if event is not None:
                return event
        raise StopAsyncIteration

    async def next(self, *, timeout_s: float) -> N | None:
        """The next event; None when there was none in time, or when the subscription has ended."""
        while not self._page and not self._ended:
            hint = self._core.wakeups.subscribe(FEED_TOPIC)
            try:
                if await self._read():
                    continue
                if timeout_s <= 0:
                    return None
                pause = min(timeout_s, self._core.poll_interval_s)
                if not await wait_for_wakeup(hint, pause):
                    timeout_s -= pause
            finally:
                hint.cancel()
        if self._ended:
            return None
        self._position, event = self._page.popleft()
        if not self._page:
            self._position = self._read_to
        if isinstance(event, errors.FabricError):
            raise event
        return event

    async def _read(self) -> bool:
        """Read a page; True when the feed had anything new, wanted or not."""
        before = self._read_to
        page = await self._fetch()
        if page.has_gap or page.diverged:
            self._page.append((before, errors.StreamBackpressure(DIVERGED if page.diverged else "")))
        for told in page.events:
            if self._filter.accepts(told.event) and (news := self._told(told)) is not None:
                self._page.append((told.position, news))
        self._read_to = page.position
        if not self._page:
            self._position = self._read_to
        return page.position > before or page.has_gap or page.diverged

    async def _fetch(self) -> FeedPage:
        pause = StoreBackoff(self.retry_for_s)
        while True:
            try:
                return await self._core.store.feed(self._topic, self._read_to, PAGE_SIZE)
            except errors.StoreUnavailable as away:
                try:
                    await pause.sleep_or_raise()
                except errors.StoreUnavailable:
                    self._ended = True
                    raise errors.StreamDisconnected(self.cursor) from away

    def _told(self, told: FeedEvent) -> N | errors.FabricError | None:
        try:
            return self._tell(told)
        except (errors.Corruption, msgspec.DecodeError, ValueError):
            return errors.Corruption(f"event at {told.position}", execution_id=told.event.execution_id)


class LegacyCompletion(msgspec.Struct, frozen=True):
    """A completion in the older form."""

    execution_id: str
    outcome: str
    produced_at_ms: int
    flow_id: str | None
    payload_bytes: bytes | None = None


class LegacyCompletions(AsyncIterator[LegacyCompletion]):
    """Completions from now on, in the older form; it goes on through everything and never ends."""

    def __init__(
        self,
        subscription: Subscription[CompletionFeedEntry],
        subscribe: Callable[[bytes], Awaitable[Subscription[CompletionFeedEntry]]],
    ) -> None:
        """`subscribe` subscribes again, from a cursor."""
        self._subscription = subscription
        self._subscribe = subscribe

    def __aiter__(self) -> LegacyCompletions:
        return self

    async def __anext__(self) -> LegacyCompletion:
        while True:
            try:
                done = await self._subscription.__anext__()
            except (errors.StreamBackpressure, errors.Corruption):
                continue
            except errors.StreamDisconnected as gone:
                self._subscription = await self._subscribe(gone.cursor)
                continue
            return LegacyCompletion(done.execution_id, done.outcome, done.at, done.flow_id)
