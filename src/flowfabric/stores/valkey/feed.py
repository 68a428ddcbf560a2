"""The feed: events of all partitions in an order that never changes, and the histories of executions.

Every call of a function that emits events adds one entry to the stream of its partition. Nothing else is done for the
feed when a change is committed. Whoever reads the feed first numbers the entries that are not numbered yet: it reads
them, and appends a reference to each to `{ff}:feed`. The function `number` does this only if nobody else has done it
meanwhile. The id of a reference is the position of the entry's first event; the following events have the following
positions. So events are stored once, in their partition, where histories find them, and nobody pays for a feed that is
not read.

Positions follow the time of the server with `{ff}`, as `milliseconds << 20 | number`. They rise even after a failover
that lost the newest references: their events are numbered again, and a subscriber sees them again.

A partition that lost its newest entries in a failover might give their ids to new entries, which would seem numbered.
So the last id that each partition gave is compared from time to time with the last one that was numbered (`CHECK_S`).
If it is lower, the entries of the last `REREAD_MS` are compared with the references one by one, and the ids of the
partition continue after those that were numbered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any

import msgspec

from flowfabric.model.event import TOPIC_FIELDS, Event, FeedEvent, Topic
from flowfabric.stores.homes import HomeTag, home_of_event
from flowfabric.stores.queries import FeedPage
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.reads.reader import Reader
from flowfabric.stores.valkey.registry import Registry
from flowfabric.stores.valkey.rows.codec import decode_event, event_key

FEED, FROM, LOST = "{ff}:feed", "{ff}:from", "{ff}:lost"
PAGE = 500  # entries or references that one command reads
MAX_ENTRIES = 10_000  # of a partition, that a trim leaves
MAX_TRIMMED = 5_000  # references that a trim looks at
CHECK_S = 5.0
REREAD_MS = 60_000
_SEQUENCE_BITS = 20
_START = "0-0"

Entry = tuple[int, list[bytes]]  # the instant of an entry, and its events


class _Reference(msgspec.Struct, frozen=True, gc=False):
    """A numbered entry: the position of its first event, its partition, its id there and the number of its events."""

    position: int
    home: HomeTag
    id: str
    count: int


class Feed:
    """Reads, numbers and trims the feed."""

    def __init__(
        self, client: ValkeyClient, registry: Registry, reader: Reader, functions: Callable[[str], str]
    ) -> None:
        self._client = client
        self._registry = registry
        self._reader = reader
        self._functions = functions
        self._checked_at = 0.0
        self.max_entries = MAX_ENTRIES

    async def read(self, topic: Topic, after: int, limit: int) -> FeedPage:
        """Return the events of a topic after a position."""
        entries = await self._number()
        end, lost = await asyncio.gather(self._end(), self._client.read(LOST, "HGET", LOST, topic.value))
        has_gap = lost is not None and after < int(lost)
        if after > end:
            return FeedPage([], end, has_gap, diverged=True)
        events: list[FeedEvent] = []
        first = await self._reference_at(after)
        position = after
        while len(events) < limit:
            references = await self._references(first, PAGE)
            contents = await self._contents(references, entries)
            for reference, content in zip(references, contents, strict=True):
                if content is None:
                    has_gap = True
                    continue
                events += [
                    fed
                    for fed in _expand(reference, content)
                    if fed.position > after and getattr(fed.event, TOPIC_FIELDS[topic]) is not None
                ]
            if len(references) < PAGE:
                position = max(after, end)
                break
            first = _id_of(references[-1].position + 1)
        if len(events) >= limit:
            events = events[:limit]
            position = events[-1].position if events else after
        return FeedPage(events, position, has_gap)

    async def end(self) -> int:
        """Number everything; return the last position."""
        await self._number()
        return await self._end()

    async def _end(self) -> int:
        last = await self._client.read(FROM, "HGET", FROM, "end")
        return 0 if last is None else _position_of(last.decode())

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str) -> list[FeedEvent]:
        """Return the newest events of an execution, oldest first."""
        # An id without a tag is that of a flow.
        home = home_of_event(Event(execution_id, "", flow_id=execution_id), self._reader.counts)
        key = event_key(execution_id, home)
        keys = (f"{home}:h", f"{home}:f")
        found = await self._client.read(home, "FCALL_RO", self._functions("history"), 2, *keys, home, key)
        events: list[FeedEvent] = []
        for at, blob in zip(found[::2], found[1::2], strict=True):
            event = decode_event(blob, home)
            if getattr(event, TOPIC_FIELDS[topic]) not in (None, without):
                events.append(FeedEvent(0, int(at), event))
        return events[:limit][::-1] if limit else []

    # Trimming

    async def trim(self, before: int, limit: int) -> int:
        """Delete about `limit` of the oldest events that are older than an instant or too many."""
        await self._number()
        homes = sorted(self._registry.homes)
        lengths = await asyncio.gather(*(self._client.read(home, "XLEN", f"{home}:f") for home in homes))
        excess = {home: length - self.max_entries for home, length in zip(homes, lengths, strict=True)}
        removed, gone, lost = 0, list[_Reference](), dict[str, int]()
        first, looked_at, may_age = "-", 0, True
        while removed < limit and looked_at < MAX_TRIMMED:
            references = await self._references(first, min(PAGE, limit))
            contents = await self._contents(references, {})
            for reference, content in zip(references, contents, strict=True):
                is_old = may_age and (content is None or content[0] < before)
                if removed >= limit or not (is_old or excess.get(reference.home, 0) > 0):
                    may_age = False
                    continue
                excess[reference.home] = excess.get(reference.home, 0) - 1
                gone.append(reference)
                if content is not None:
                    removed += reference.count
                    for fed in _expand(reference, content):
                        lost |= {t.value: fed.position for t, name in TOPIC_FIELDS.items() if getattr(fed.event, name)}
            looked_at += len(references)
            if len(references) < min(PAGE, limit) or not (may_age or any(n > 0 for n in excess.values())):
                break
            first = _id_of(references[-1].position + 1)
        await self._remove(gone, lost)
        return removed

    async def _remove(self, gone: Sequence[_Reference], lost: dict[str, int]) -> None:
        """Delete entries, then note the loss and delete their references; a reader between sees a gap."""
        last = {reference.home: reference.id for reference in gone}
        await asyncio.gather(
            *(self._client.call(home, "XTRIM", f"{home}:f", "MINID", "=", _next(id_)) for home, id_ in last.items())
        )
        if lost:
            await self._client.call(LOST, "HSET", LOST, *(part for item in lost.items() for part in item))
        for start in range(0, len(gone), PAGE):
            ids = [_id_of(reference.position) for reference in gone[start : start + PAGE]]
            await self._client.call(FEED, "XDEL", FEED, *ids)

    # Numbering

    async def _number(self) -> dict[tuple[HomeTag, str], Entry]:
        """Number all entries that were added before the call; return those that this process numbered."""
        await self._registry.refresh()
        read: dict[tuple[HomeTag, str], Entry] = {}
        homes = sorted(self._registry.homes)
        if monotonic() - self._checked_at > CHECK_S:
            self._checked_at = monotonic()
            await self._check_partitions(homes)
        while homes:
            numbered = await self._numbered_ids(homes)
            pages = await asyncio.gather(*(self._entries(home, numbered[home]) for home in homes))
            calls = []
            for home, page in zip(homes, pages, strict=True):
                if page:
                    counts = [part for id_, (_, events) in page for part in (id_, len(events))]
                    calls.append(self._call_number(home, numbered[home], counts))
                    read |= {(home, id_): entry for id_, entry in page}
            answers = await asyncio.gather(*calls)
            if 0 in answers:
                continue  # another process numbered a part of them
            homes = [home for home, page in zip(homes, pages, strict=True) if len(page) == PAGE]
        return read

    def _call_number(self, home: HomeTag, numbered: str, counts: Iterable[str | int]) -> asyncio.Future[Any]:
        name = self._functions("number")
        return self._client.call(FROM, "FCALL", name, 2, FROM, FEED, home, numbered, *counts)

    async def _numbered_ids(self, homes: Sequence[HomeTag]) -> dict[HomeTag, str]:
        found = await self._client.read(FROM, "HMGET", FROM, *homes)
        return {home: "" if id_ is None else id_.decode() for home, id_ in zip(homes, found, strict=True)}

    async def _entries(self, home: HomeTag, after: str) -> list[tuple[str, Entry]]:
        first = f"({after}" if after else "-"
        found = await self._client.read(home, "XRANGE", f"{home}:f", first, "+", "COUNT", PAGE)
        return [(id_.decode(), _entry(fields)) for id_, fields in found]

    async def _check_partitions(self, homes: Sequence[HomeTag]) -> None:
        """Number what partitions added under ids that seem numbered, because a failover lost their newest entries."""
        if not homes:
            return
        numbered = await self._numbered_ids(homes)
        name = self._functions("tail")
        tails = await asyncio.gather(
            *(self._client.read(home, "FCALL_RO", name, 1, f"{home}:f", home) for home in homes)
        )
        for home, tail in zip(homes, tails, strict=True):
            if numbered[home] and _position_of(tail.decode()) < _position_of(numbered[home]):
                await self._number_again(home, numbered[home])

    async def _number_again(self, home: HomeTag, numbered: str) -> None:
        since = max(0, int(numbered.partition("-")[0]) - REREAD_MS)
        found = await self._client.read(home, "XRANGE", f"{home}:f", since, "+")
        known = {reference.id for reference in await self._all_references(f"{since}-0") if reference.home == home}
        name = self._functions("rewind")
        await self._client.call(home, "FCALL", name, 1, f"{home}:f", home, numbered)
        unknown = [(id_.decode(), _entry(fields)) for id_, fields in found if id_.decode() not in known]
        if unknown:
            counts = [part for id_, (_, events) in unknown for part in (id_, len(events))]
            # The last id stays the numbered one, after which the partition continues.
            await self._call_number(home, numbered, [*counts, numbered, 0])

    async def _all_references(self, first: str) -> list[_Reference]:
        found: list[_Reference] = []
        while page := await self._references(first, PAGE):
            found += page
            first = _id_of(page[-1].position + 1)
        return found

    # References

    async def _reference_at(self, position: int) -> str:
        """Return the id from which references have to be read to find the events after a position."""
        found = await self._client.read(FEED, "XREVRANGE", FEED, _id_of(position), "-", "COUNT", 1)
        return found[0][0].decode() if found else "-"

    async def _references(self, first: str, count: int) -> list[_Reference]:
        found = await self._client.read(FEED, "XRANGE", FEED, first, "+", "COUNT", count)
        references = []
        for id_, fields in found:
            home, entry, number = fields[1::2]
            position = _position_of(id_.decode())
            references.append(_Reference(position, HomeTag(home.decode()), entry.decode(), int(number)))
        return references

    async def _contents(
        self, references: Sequence[_Reference], known: dict[tuple[HomeTag, str], Entry]
    ) -> list[Entry | None]:
        """Return the entries; None for one that is gone."""

        async def content(reference: _Reference) -> Entry | None:
            if (entry := known.get((reference.home, reference.id))) is not None:
                return entry
            if not reference.count:
                return 0, []
            key = f"{reference.home}:f"
            found = await self._client.read(reference.home, "XRANGE", key, reference.id, reference.id)
            return _entry(found[0][1]) if found else None

        return await asyncio.gather(*map(content, references))


def _entry(fields: Sequence[bytes]) -> Entry:
    return int(fields[1]), list(fields[3::2])


def _expand(reference: _Reference, entry: Entry) -> list[FeedEvent]:
    at, blobs = entry
    return [
        FeedEvent(reference.position + number, at, decode_event(blob, reference.home))
        for number, blob in enumerate(blobs)
    ]


def _position_of(id_: str) -> int:
    ms, _, sequence = id_.partition("-")
    return int(ms) << _SEQUENCE_BITS | int(sequence)


def _id_of(position: int) -> str:
    return f"{position >> _SEQUENCE_BITS}-{position & ((1 << _SEQUENCE_BITS) - 1)}"


def _next(id_: str) -> str:
    ms, _, sequence = id_.partition("-")
    return f"{ms}-{int(sequence) + 1}"
