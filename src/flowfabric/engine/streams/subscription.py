"""Subscriptions: committed events in order, resumable, never skipping, never repeating."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec

from flowfabric import errors
from flowfabric.cursors import encode_cursor
from flowfabric.engine.runtime.backoff import RETRY_FOR_S, StoreBackoff
from flowfabric.engine.runtime.runtime import Runtime
from flowfabric.engine.runtime.wakeups import FEED_TOPIC, wait_for_wakeup
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.rules import feed
from flowfabric.rules.feed import CompletionFeedEntry, Filter
from flowfabric.stores.queries import FeedPage

N = TypeVar("N")
PAGE_SIZE = 256


class Subscription(AsyncIterator[N]):
    """The events of one feed after a position. It reads ahead by at most one page; a slow reader delays only itself.

    Errors are raised at their position among the events. The subscription continues after `StreamBackpressure` (a gap:
    events were trimmed, or the cursor points to events that the store has lost) and `Corruption` (an event cannot be
    decoded). `StreamDisconnected` ends it; subscribing again with its cursor loses nothing.
    """

    def __init__(
        self, runtime: Runtime, topic: Topic, position: int, chosen: Filter, decode: Callable[[FeedEvent], N | None]
    ) -> None:
        self._runtime = runtime
        self._topic = topic
        self._position = position
        self._read_to = position
        self._filter = chosen
        self._decode = decode
        self._page: deque[tuple[int, N | errors.FabricError]] = deque()
        self._ended = False
        self.retry_for_s = RETRY_FOR_S  # how long an unavailable store is retried

    @property
    def cursor(self) -> bytes:
        """The position after the last event that was returned or filtered out."""
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
        """Return the next event; None if there is none in time, or if the subscription has ended."""
        while not self._page and not self._ended:
            hint = self._runtime.wakeups.subscribe(FEED_TOPIC)
            try:
                if await self._read():
                    continue
                if timeout_s <= 0:
                    return None
                pause = min(timeout_s, self._runtime.poll_interval_s)
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
        """Read a page; True if the feed had new events, filtered out or not."""
        before = self._read_to
        page = await self._fetch()
        gap = feed.check_gap(has_gap=page.has_gap, diverged=page.diverged)
        if gap is not None:
            self._page.append((before, gap))
        for event in page.events:
            if self._filter.accepts(event.event) and (entry := self._decode_event(event)) is not None:
                self._page.append((event.position, entry))
        self._read_to = page.position
        if not self._page:
            self._position = self._read_to
        return page.position > before or gap is not None

    async def _fetch(self) -> FeedPage:
        pause = StoreBackoff(self.retry_for_s)
        while True:
            try:
                return await self._runtime.store.feed(self._topic, self._read_to, PAGE_SIZE)
            except errors.StoreUnavailable as away:
                try:
                    await pause.sleep_or_raise()
                except errors.StoreUnavailable:
                    self._ended = True
                    raise errors.StreamDisconnected(self.cursor) from away

    def _decode_event(self, event: FeedEvent) -> N | errors.FabricError | None:
        try:
            return self._decode(event)
        except (errors.Corruption, msgspec.DecodeError, ValueError):
            return errors.Corruption(f"event at {event.position}", execution_id=event.event.execution_id)


class LegacyCompletion(msgspec.Struct, frozen=True):
    """A completion in the older form."""

    execution_id: str
    outcome: str
    produced_at_ms: int
    flow_id: str | None
    payload_bytes: bytes | None = None


class LegacyCompletions(AsyncIterator[LegacyCompletion]):
    """New completions in the older form; it never ends: gaps are skipped and disconnects are followed by a new
    subscription."""

    def __init__(
        self,
        subscription: Subscription[CompletionFeedEntry],
        subscribe: Callable[[bytes], Awaitable[Subscription[CompletionFeedEntry]]],
    ) -> None:
        """`subscribe` opens a new subscription at a cursor."""
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
