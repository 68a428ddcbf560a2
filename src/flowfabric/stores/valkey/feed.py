"""The feed: events of all partitions in an order that never changes, and the histories of executions.

Every call of a function that emits events adds one entry to the stream of its partition. Nothing else is done for the
feed when a change is committed. The first reader of the feed numbers the entries that are not numbered yet: it reads
them, and appends a reference to each to `{ff}:feed`. The function `number` does this only if nobody else has done it
meanwhile. The id of a reference is the position of the entry's first event; the following events have the following
positions. So events are stored once, in their partition, where histories find them, and nobody pays for a feed that is
not read.

Positions follow the time of the server with `{ff}`, as `milliseconds << 20 | number`. A failover may lose the newest
references, and the clock of the new primary may be behind. Therefore positions leap by a minute whenever that server
begins another lineage (its replication id, which changes at every failover and restart): the lost references are made
again with positions that no subscriber has passed, and a subscriber sees their events again.

A partition that lost its newest entries in a failover might give their ids to new entries, which would seem numbered.
So the last numbered id is kept with the lineage of the server that had it. If the lineage differs and the partition
does not have the last numbered entry any more, its ids are set to continue after the numbered one, and the entries of
the minute before (`REREAD_MS`) are compared with the references one by one, by id and checksum: those without a
reference are numbered now. The same is done if the last id that a partition gave is below the numbered one, which is
compared from time to time (`CHECK_S`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any
from zlib import crc32

import msgspec

from flowfabric.model.event import TOPIC_FIELDS, Event, FeedEvent, Topic
from flowfabric.stores.homes import HomeTag, home_of_event
from flowfabric.stores.queries import FeedPage
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.reads.reader import Reader
from flowfabric.stores.valkey.registry import Registry
from flowfabric.stores.valkey.rows.codec import decode_event, event_key
from flowfabric.stores.valkey.server_checks import parse_info

FEED, FROM, LOST = "{ff}:feed", "{ff}:from", "{ff}:lost"
PAGE = 500  # entries or references that one command reads
MAX_ENTRIES = 10_000  # entries of a partition that a trim leaves
MAX_TRIMMED = 5_000  # references that a trim reads
CHECK_S = 5.0
REREAD_MS = 60_000
_SEQUENCE_BITS = 20
_START = "0-0"

Entry = tuple[int, list[bytes]]  # the instant of an entry, and its events


class _Reference(msgspec.Struct, frozen=True, gc=False):
    """A numbered entry: the position of its first event, its partition, its id there, and what it contained."""

    position: int
    home: HomeTag
    id: str
    count: int  # of events
    checksum: int


class _Numbered(msgspec.Struct, frozen=True, gc=False):
    """How far a partition is numbered: the last numbered entry, and the lineage of the server that had it."""

    value: str  # as it is stored: id, lineage and checksum; empty if nothing is numbered
    id: str = ""
    lineage: str = ""
    checksum: str = ""


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
                # References after `end` were added since it was read; none can come before one that was read.
                position = max(after, end, events[-1].position if events else 0)
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
        last: dict[HomeTag, str] = {}
        for one in gone:  # entries that were numbered again come after later ones
            last[one.home] = max(last.get(one.home, _START), one.id, key=_position_of)
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
        while homes:
            lineages, numbered = await asyncio.gather(self._lineages(homes), self._numbered(homes))
            if await self._number_again(homes, numbered, lineages):
                continue
            pages = await asyncio.gather(*(self._entries(home, numbered[home].id) for home in homes))
            if any(pages) and await self._lineages(homes) != lineages:
                continue  # a failover in between: the entries may be of another lineage than the one that was read
            calls = []
            for home, page in zip(homes, pages, strict=True):
                if page:
                    value = f"{page[-1][0]} {lineages[home]} {_checksum(page[-1][1])}"
                    calls.append(self._call_number(home, numbered[home], value, page))
                    read |= {(home, id_): entry for id_, entry in page}
            answers = await asyncio.gather(*calls)
            if 0 in answers:
                continue  # another process numbered a part of them
            homes = [home for home, page in zip(homes, pages, strict=True) if len(page) == PAGE]
        return read

    def _call_number(
        self, home: HomeTag, numbered: _Numbered, value: str, entries: Iterable[tuple[str, Entry]]
    ) -> asyncio.Future[Any]:
        described = [part for id_, entry in entries for part in (id_, len(entry[1]), _checksum(entry))]
        name = self._functions("number")
        return self._client.call(FROM, "FCALL", name, 2, FROM, FEED, home, numbered.value, value, *described)

    async def _numbered(self, homes: Sequence[HomeTag]) -> dict[HomeTag, _Numbered]:
        found = await self._client.read(FROM, "HMGET", FROM, *homes)
        values = ["" if value is None else value.decode() for value in found]
        return {home: _Numbered(value, *value.split()) for home, value in zip(homes, values, strict=True)}

    async def _lineages(self, homes: Sequence[HomeTag]) -> dict[HomeTag, str]:
        """Return the lineages of the servers that have these partitions."""
        nodes = {home: self._client.node_for(home) for home in homes}
        one_of = {node: home for home, node in nodes.items()}  # whose slot the question follows after a failover
        infos = await asyncio.gather(*(self._client.read(home, "INFO", "replication") for home in one_of.values()))
        lineages = {
            node: parse_info(info).get("master_replid", "")[:16] for node, info in zip(one_of, infos, strict=True)
        }
        return {home: lineages[node] for home, node in nodes.items()}

    async def _entries(self, home: HomeTag, after: str) -> list[tuple[str, Entry]]:
        first = f"({after}" if after else "-"
        found = await self._client.read(home, "XRANGE", f"{home}:f", first, "+", "COUNT", PAGE)
        return [(id_.decode(), _entry(fields)) for id_, fields in found]

    async def _number_again(
        self, homes: Sequence[HomeTag], numbered: dict[HomeTag, _Numbered], lineages: dict[HomeTag, str]
    ) -> bool:
        """Number what partitions added under ids that seem numbered, because a failover lost their newest entries.

        Return True if the numbered ids have to be read again.
        """
        suspect = {home for home in homes if numbered[home].id and numbered[home].lineage != lineages[home]}
        if monotonic() - self._checked_at > CHECK_S:
            self._checked_at = monotonic()
            suspect |= await self._partitions_behind(homes, numbered)
        for home in sorted(suspect):
            last = numbered[home]
            missing: list[tuple[str, Entry]] = []
            if not await self._has_last(home, last):
                # First of all, so that no entry is added below the numbered id after the entries were read.
                name = self._functions("rewind")
                await self._client.call(home, "FCALL", name, 1, f"{home}:f", home, last.id)
                missing = await self._entries_without_reference(home, last.id)
            # The last id stays the numbered one, after which the partition continues. If another process was first,
            # the value differs and nothing is numbered twice.
            await self._call_number(home, last, f"{last.id} {lineages[home]} {last.checksum}", missing)
        return bool(suspect)

    async def _has_last(self, home: HomeTag, last: _Numbered) -> bool:
        """True if a partition still has the last entry that was numbered: then it has lost none that was."""
        found = await self._client.read(home, "XRANGE", f"{home}:f", last.id, last.id)
        return bool(found) and str(_checksum(_entry(found[0][1]))) == last.checksum

    async def _partitions_behind(self, homes: Sequence[HomeTag], numbered: dict[HomeTag, _Numbered]) -> set[HomeTag]:
        """Return the partitions whose last id is below the last numbered one."""
        name = self._functions("tail")
        tails = await asyncio.gather(
            *(self._client.read(home, "FCALL_RO", name, 1, f"{home}:f", home) for home in homes)
        )
        pairs = zip(homes, tails, strict=True)
        return {h for h, tail in pairs if numbered[h].id and _position_of(tail.decode()) < _position_of(numbered[h].id)}

    async def _entries_without_reference(self, home: HomeTag, last: str) -> list[tuple[str, Entry]]:
        """Return the entries of the minute before an id that no reference names."""
        since = max(0, _ms_of(last) - REREAD_MS)
        entries: list[tuple[str, Entry]] = []
        first = f"{since}-0"
        while True:
            found = await self._client.read(home, "XRANGE", f"{home}:f", first, last, "COUNT", PAGE)
            entries += [(id_.decode(), _entry(fields)) for id_, fields in found]
            if len(found) < PAGE:
                break
            first = f"({entries[-1][0]}"
        if not entries:
            return []
        # Positions are never behind ids by more than the clocks differ.
        references = await self._all_references(f"{max(0, since - REREAD_MS)}-0")
        known = {(one.id, one.checksum) for one in references if one.home == home}
        return [one for one in entries if (one[0], _checksum(one[1])) not in known]

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
            home, entry, number, checksum = fields[1::2]
            position = _position_of(id_.decode())
            references.append(_Reference(position, HomeTag(home.decode()), entry.decode(), int(number), int(checksum)))
        return references

    async def _contents(
        self, references: Sequence[_Reference], known: dict[tuple[HomeTag, str], Entry]
    ) -> list[Entry | None]:
        """Return the entries; None for one that is gone."""

        async def content(reference: _Reference) -> Entry | None:
            entry = known.get((reference.home, reference.id))
            if entry is None:
                key = f"{reference.home}:f"
                found = await self._client.read(reference.home, "XRANGE", key, reference.id, reference.id)
                entry = _entry(found[0][1]) if found else None
            # After a failover another entry may have the id of one that was lost.
            return entry if entry is not None and _checksum(entry) == reference.checksum else None

        return await asyncio.gather(*map(content, references))


def _entry(fields: Sequence[bytes]) -> Entry:
    return int(fields[1]), list(fields[3::2])


def _checksum(entry: Entry) -> int:
    at, blobs = entry
    return crc32(b"".join(blobs), at & 0xFFFFFFFF)


def _ms_of(id_: str) -> int:
    return int(id_.partition("-")[0])


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
