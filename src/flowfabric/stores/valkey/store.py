"""The Valkey store: partitions of rows on one server or on the nodes of a cluster.

Everything that a partition holds is in keys with its tag, so it is on one node, and one function call changes it
atomically. A commit is one call for each partition that it touches; each declares all keys that it may touch, because a
slot that is being moved must either have all of them or refuse the call. Functions check first and write last, because
the server rolls nothing back (`lua/commit.lua`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import astuple

from flowfabric.clock import Clock
from flowfabric.errors import StoreUnavailable
from flowfabric.handles import BackendTag
from flowfabric.ids import DEFAULT_PARTITIONS, PartitionCounts
from flowfabric.model.change import Change, RowTemplate
from flowfabric.model.deployment import ServerReport
from flowfabric.model.event import FeedEvent, Topic
from flowfabric.model.execution import Execution, QueueKey
from flowfabric.settings import Deadlines
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, CommitAndClaimResult, LeaseRef
from flowfabric.stores.homes import HomeTag, home_of
from flowfabric.stores.port import SchemaVersion
from flowfabric.stores.queries import Due, FeedPage, GroupedCount, Loaded, Read, Scan, Search, SearchPage, Where
from flowfabric.stores.valkey import durability
from flowfabric.stores.valkey.address import ValkeyAddress
from flowfabric.stores.valkey.claims import ValkeyClaims
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.feed import Feed
from flowfabric.stores.valkey.library import library
from flowfabric.stores.valkey.library_use import LibraryUse, delete_unused_libraries, ensure_library
from flowfabric.stores.valkey.notifier import ValkeyNotifier
from flowfabric.stores.valkey.reads.reader import Reader
from flowfabric.stores.valkey.reads.scans import Scanner
from flowfabric.stores.valkey.reads.search import Searcher
from flowfabric.stores.valkey.registry import Registry
from flowfabric.stores.valkey.rows.batch import PartitionBatch, partition_batches
from flowfabric.stores.valkey.rows.codec import VALKEY_TABLES, integer
from flowfabric.stores.valkey.rows.templates import RENEWAL_PARAMETERS, condition_form, template_form
from flowfabric.stores.valkey.schema import SchemaWatch, ensure_schema
from flowfabric.stores.valkey.server_checks import check_servers
from flowfabric.stores.verdicts import Unstorable, Verdict

_LOG = logging.getLogger("flowfabric.store")


class ValkeyStore:
    """A store on a Valkey server or cluster, or on Redis 7."""

    tag = BackendTag.VALKEY
    concurrent_commits = 4
    batch_limit = 200
    deletes_in_pages = True
    claim_parts = 2
    executes_in_order = True

    def __init__(self, address: ValkeyAddress, clock: Clock | None = None, deadlines: Deadlines | None = None) -> None:
        self.clock = clock
        self.client = ValkeyClient(address, deadlines)
        self._library = library()
        self.client.library = self._library.text
        functions = self._library.functions.__getitem__
        self._functions = functions
        self.registry = Registry(self.client, functions)
        self._reader = Reader(self.client, self.registry, functions, clock)
        self._scanner = Scanner(self.client, self.registry, self._reader, functions)
        self._searcher = Searcher(self.client, self._reader, functions)
        self._claimer = ValkeyClaims(self.client, self.registry, self._reader, functions)
        self._feed = Feed(self.client, self.registry, self._reader, functions)
        self._notifier = ValkeyNotifier(self.client)
        self._library_use = LibraryUse(self.client, self._library)
        self._schema_watch = SchemaWatch(self.client)
        self._counts = DEFAULT_PARTITIONS
        self.warnings: list[str] = []  # warnings about the settings of the servers when the store was opened

    async def open(self, *, migrate: bool, partitions: PartitionCounts = DEFAULT_PARTITIONS) -> SchemaVersion:
        self._counts = self._reader.counts = partitions
        self.registry.set_partitions(partitions)
        await self.client.open()
        self.warnings = await check_servers(self.client)
        for warning in self.warnings:
            _LOG.warning(warning)
        await ensure_library(self.client, self._library)
        schema = await ensure_schema(self.client, migrate=migrate)
        self._library_use = LibraryUse(self.client, self._library)
        self._library_use.note()
        self._schema_watch = SchemaWatch(self.client)
        if migrate and (deleted := await delete_unused_libraries(self.client, self._library)):
            _LOG.info("deleted the functions of releases that were not used for a day: %s", ", ".join(deleted))
        await self.registry.refresh()
        return schema

    async def close(self) -> None:
        await self.registry.close()
        await self.client.close()

    async def ping(self) -> int:
        return await self._reader.ping()

    async def load(self, reads: Sequence[Read]) -> Loaded:
        self._schema_watch.check()
        return await self._reader.load(reads)

    def try_load_now(self, reads: Sequence[Read]) -> Loaded | None:
        return None

    async def server_report(self) -> ServerReport:
        """Return what acknowledged writes survive with the settings of the servers, and how busy they are."""
        return await durability.report(self.client, self._counts.flow)

    # Writes

    async def commit(self, changes: Sequence[Change], topics: frozenset[str] = frozenset()) -> list[Verdict]:
        self._schema_watch.check()
        self._library_use.note()
        verdicts: list[Verdict] = [None] * len(changes)
        batches, faults = partition_batches(changes, self._counts, self.registry.digest_of)
        for ordinal, fault in faults.items():
            verdicts[ordinal] = fault
        now, sent, registering = self._reader.now_argument(), list[asyncio.Future[Any]](), list[asyncio.Future[Any]]()
        for batch in batches:  # without an await: a claim that is called next is executed next
            registering += self.registry.register(batch.home, batch.queues)
            sent.append(self._send(batch, now))
        if topics:
            self._notifier.notify_behind(topics, (batch.home for batch in batches))
        resent = self.client.resent
        replies = await asyncio.gather(*sent, *registering, return_exceptions=True)
        if topics and batches and self.client.resent != resent:
            self._notifier.notify(topics)  # the first message may have come before a commit that was sent again
        for batch, reply in zip(batches, _checked(replies[: len(sent)]), strict=True):
            self._assign(batch, reply, verdicts)
        return verdicts

    def _send(self, batch: PartitionBatch, now: str) -> asyncio.Future[Any]:
        keys = batch.keys
        return self.client.call(batch.home, "FCALL", self._functions("commit"), len(keys), *keys, *batch.arguments(now))

    @staticmethod
    def _assign(batch: PartitionBatch, reply: Any, verdicts: list[Verdict]) -> None:
        at, codes = reply
        for ordinal, code in zip(batch.ordinals, codes, strict=True):
            if code == _WRITTEN:
                verdicts[ordinal] = at
            elif code == _UNSTORABLE:
                verdicts[ordinal] = Unstorable("an instant needs more than 64 bits")

    async def commit_and_claim(
        self, changes: Sequence[Change], topics: frozenset[str], request: ClaimRequest
    ) -> CommitAndClaimResult:
        return CommitAndClaimResult(await self.commit(changes, topics), [])

    async def claim_rows(self, request: ClaimRequest) -> ClaimedRows:
        self._schema_watch.check()
        self._library_use.note()
        return await self._claimer.claim(request)

    async def renew(self, leases: Sequence[LeaseRef], template: RowTemplate) -> list[int | None]:
        self._schema_watch.check()
        table, now = VALKEY_TABLES[Execution], self._reader.now_argument()
        by_home: dict[HomeTag, list[int]] = {}
        for ordinal, lease in enumerate(leases):
            home = home_of(Execution, (lease.execution_id,), self._counts)
            assert home is not None
            by_home.setdefault(home, []).append(ordinal)
        form, condition = template_form(template, RENEWAL_PARAMETERS), condition_form(template, RENEWAL_PARAMETERS)
        calls, parts = list[asyncio.Future[Any]](), list[list[int]]()
        for home, ordinals in by_home.items():
            keys = [f"{home}:{suffix}" for suffix in (*table.suffixes, "f", "h")]
            for start in range(0, len(ordinals), self.batch_limit):
                part = ordinals[start : start + self.batch_limit]
                rows = [[table.key_text((leases[n].execution_id,), home), astuple(leases[n])[1:]] for n in part]
                request = msgspec.msgpack.encode([form, condition or False, rows])
                name = self._functions("renew")
                calls.append(self.client.call(home, "FCALL", name, len(keys), *keys, home, now, request))
                parts.append(part)
        expiries: list[int | None] = [None] * len(leases)
        replies = _checked(await asyncio.gather(*calls, return_exceptions=True))
        for part, (_, found) in zip(parts, replies, strict=True):
            for ordinal, expiry in zip(part, found, strict=True):
                expiries[ordinal] = None if expiry is None else integer(expiry.decode())
        return expiries

    # Reads

    async def due(self, row: type[msgspec.Struct], column: str, *, limit: int, where: tuple[Where, ...] = ()) -> Due:
        self._schema_watch.check()
        return await self._reader.due(row, column, limit, where)

    async def scan(self, scan: Scan) -> list[Any]:
        self._schema_watch.check()
        return await self._scanner.scan(scan)

    async def search(self, search: Search) -> SearchPage:
        self._schema_watch.check()
        return await self._searcher.search(search)

    async def kinds(self, execution_ids: Sequence[str]) -> dict[str, str]:
        return await self._searcher.kinds(execution_ids)

    async def count_grouped(self, query: GroupedCount) -> dict[tuple[Any, ...], int]:
        return await self._scanner.count_grouped(query)

    async def queues(self, lane_id: str | None = None) -> list[QueueKey]:
        await self.registry.refresh()
        return sorted(queue for queue in self.registry.queues if lane_id in (None, queue.lane_id))

    async def nonempty_queues(self, lane_id: str) -> list[QueueKey]:
        return await self._claimer.nonempty_queues(lane_id)

    async def executions_in_missing_queues(self, limit: int) -> list[str]:
        return await self._claimer.executions_in_missing_queues(limit)

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        lanes = sorted({queue.lane_id for queue in await self.queues()})
        return [lane for lane in lanes if after is None or lane > after][:limit]

    # Feed

    async def feed(self, topic: Topic, after: int, limit: int) -> FeedPage:
        self._schema_watch.check()
        return await self._feed.read(topic, after, limit)

    async def feed_end(self) -> int:
        return await self._feed.end()

    async def trim_feed(self, before: int, limit: int) -> int:
        return await self._feed.trim(before, limit)

    async def history(self, execution_id: str, topic: Topic, limit: int, without: str = "") -> list[FeedEvent]:
        return await self._feed.history(execution_id, topic, limit, without)

    # Notifications

    def notify(self, topics: frozenset[str]) -> None:
        self._notifier.notify(topics)

    def limit_commands(self, command_s: float) -> None:
        self.client.deadlines = self.client.deadlines.limited(command_s)

    def on_notify(self, callback: Callable[[frozenset[str]], None]) -> None:
        self._notifier.on_notify(callback)


_WRITTEN, _UNSTORABLE = b"1"[0], b"2"[0]


def _checked(replies: Sequence[Any]) -> Sequence[Any]:
    """Return the replies of a batch; if one failed, raise an error that holds for the whole batch."""
    failures = [reply for reply in replies if isinstance(reply, BaseException)]
    if not failures:
        return replies
    unavailable = [failure for failure in failures if isinstance(failure, StoreUnavailable)]
    if len(unavailable) < len(failures):
        raise next(failure for failure in failures if not isinstance(failure, StoreUnavailable))
    first = unavailable[0]
    if any(failure.in_doubt for failure in unavailable) or len(failures) == len(replies):
        raise next((failure for failure in unavailable if failure.in_doubt), first)
    raise first.with_unknown_outcome() from first
