"""Subscriptions: committed events in order, resumable, never skipping, never repeating."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from flowfabric import errors
from flowfabric.cursors import decode_cursor, encode_cursor
from flowfabric.engine.core import Core
from flowfabric.engine.wakes import FEED, waited
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.rules import feeds, limits
from flowfabric.rules.feeds import Completion, Filter, LeaseNews, OperatorNews

N = TypeVar("N")

PAGE = 256


class Subscription(AsyncIterator[N]):
    """The events of one feed after a place. Reading ahead is bounded by one page; a slow reader slows itself only."""

    def __init__(
        self, core: Core, topic: Topic, position: int, chosen: Filter, tell: Callable[[FeedEvent], N | None]
    ) -> None:
        self._core = core
        self._topic = topic
        self._position = position
        self._read_to = position
        self._filter = chosen
        self._tell = tell
        self._page: list[tuple[int, N]] = []

    @property
    def cursor(self) -> bytes:
        """The place after the last event that was handed out, or passed over by the filter."""
        return encode_cursor(self._position)

    def __aiter__(self) -> Subscription[N]:
        return self

    async def __anext__(self) -> N:
        while True:
            event = await self.next(timeout_s=3600)
            if event is not None:
                return event

    async def next(self, *, timeout_s: float) -> N | None:
        """The next event; None when there was none in time."""
        while not self._page:
            hint = self._core.wakes.expect(FEED)
            try:
                if await self._read():
                    continue
                if timeout_s <= 0:
                    return None
                pause = min(timeout_s, self._core.poll_s)
                if not await waited(hint, pause):
                    timeout_s -= pause
            finally:
                hint.cancel()
        self._position, event = self._page.pop(0)
        if not self._page:
            self._position = self._read_to
        return event

    async def _read(self) -> bool:
        """Read a page; True when the feed had anything new, wanted or not."""
        page = await self._core.patiently(lambda: self._core.store.feed(self._topic, self._read_to, PAGE))
        advanced = page.position > self._read_to
        for told in page.events:
            if self._filter.accepts(told.event) and (news := self._tell(told)) is not None:
                self._page.append((told.position, news))
        self._read_to = page.position
        if not self._page:
            self._position = self._read_to
        return advanced


class Subscriptions(Core):
    """The feeds that can be subscribed to; an empty cursor means from now on."""

    async def subscribe_lease_history(
        self, cursor: bytes = b"", chosen: Filter | None = None
    ) -> Subscription[LeaseNews]:
        """Every change of every lease."""
        return await self._subscribe(Topic.LEASE, cursor, chosen, feeds.lease_news)

    async def subscribe_completion(self, cursor: bytes = b"", chosen: Filter | None = None) -> Subscription[Completion]:
        """Every end of a life."""
        return await self._subscribe(Topic.COMPLETION, cursor, chosen, feeds.completion)

    async def subscribe_operator_event(
        self, cursor: bytes = b"", chosen: Filter | None = None
    ) -> Subscription[OperatorNews]:
        """What operators did."""
        return await self._subscribe(Topic.OPERATOR, cursor, chosen, feeds.operator_news)

    async def _subscribe(
        self, topic: Topic, cursor: bytes, chosen: Filter | None, tell: Callable[[FeedEvent], N | None]
    ) -> Subscription[N]:
        if not isinstance(cursor, bytes | bytearray):
            raise errors.InvalidInput("cursor: not bytes")
        wanted = _filter(chosen)
        position = decode_cursor(bytes(cursor))
        if position is None:
            position = await self.patiently(self.store.feed_end)
        return Subscription(self, topic, position, wanted, tell)


def _filter(chosen: object) -> Filter:
    """A filter whose parts are texts."""
    if chosen is None:
        return Filter()
    if not isinstance(chosen, Filter):
        raise errors.InvalidInput("filter: not a filter")
    limits.optional_text("namespace", chosen.namespace)
    tag: object = chosen.instance_tag
    if tag is not None:
        if not isinstance(tag, tuple | list) or len(tag) != 2:
            raise errors.InvalidInput("instance_tag: not a pair of key and value")
        for part in tag:
            limits.text("instance_tag", part)
    return chosen
