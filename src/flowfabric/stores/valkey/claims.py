"""Claims: which partitions to ask, and how many rows of each.

The rows of a queue without flows are in one partition, and one call claims them. Otherwise the first positions of each
partition are read. A small claim gets the best of all partitions. A large one is divided among a few partitions that
have rows, and the next claim begins with others: a call for a few rows costs a server much more for each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from flowfabric.errors import StoreUnavailable
from flowfabric.model.execution import Execution, Payload, QueueKey
from flowfabric.stores.claims import ClaimedRows, ClaimRequest, LeaseIds
from flowfabric.stores.homes import HomeTag
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.reads.reader import Reader
from flowfabric.stores.valkey.registry import MAX_VALUES, Registry
from flowfabric.stores.valkey.rows.alike import ClaimedDecoder
from flowfabric.stores.valkey.rows.codec import VALKEY_TABLES, biased_hex, wide_integer
from flowfabric.stores.valkey.rows.templates import packed_claim_form

MAX_CLAIMED = 200  # rows that one call claims, so that it is short
MAX_POSITIONS = 1000  # positions that a claim reads of all partitions
SHARE = 100  # rows that a large claim takes of a partition before it goes on to the next one
ASKED = 4  # partitions that a large claim asks first whether they have rows; then twice as many

Claimed = list[tuple[Execution, Payload]]


class ValkeyClaims:
    """Claims rows of fast queues."""

    def __init__(
        self, client: ValkeyClient, registry: Registry, reader: Reader, functions: Callable[[str], str]
    ) -> None:
        self._client = client
        self._registry = registry
        self._reader = reader
        self._functions = functions
        self._turn = 0  # number of the partition that the next large claim begins with

    async def claim(self, request: ClaimRequest) -> ClaimedRows:
        """Claim the first rows of some queues."""
        digests = list(dict.fromkeys(map(self._registry.digest_of, request.queues)))
        now, rows, left = self._reader.now_argument(), Claimed(), list(request.lease_ids)
        at, homes, asked, number = 0, self._registry.places(digests), set[HomeTag](), ASKED
        while left:
            if not homes:  # other processes may have registered partitions meanwhile
                await self._registry.refresh()
                homes = [home for home in self._registry.places(digests) if home not in asked]
                if not homes:
                    break
            asked.update(homes)
            offered = self._in_turn(homes)[:number] if len(left) >= SHARE else homes
            number *= 2
            shares = [(homes[0], left)] if len(homes) == 1 else await self._shares(offered, digests, left)
            if not shares:
                homes = [home for home in homes if home not in offered]
                continue
            calls = [self._call(home, request, digests, ids, now) for home, ids in shares]
            replies = await asyncio.gather(*calls, return_exceptions=True)
            found, at = self._collect(replies, shares, at)
            rows += [one for part in found for one in part]
            used = {row.lease_id for part in found for row, _ in part}
            left = [ids for ids in left if ids.lease_id not in used]
            # A partition that gave less than its share has no more rows.
            short = {
                home for (home, ids), part in zip(shares, found, strict=True) if len(part) < min(len(ids), MAX_CLAIMED)
            }
            homes = [home for home in homes if home not in short]
        if len(asked) > 1:
            rows.sort(key=lambda one: (one[0].rank, one[0].execution_id))
        return ClaimedRows(at or await self._reader.ping(), rows)

    def _in_turn(self, homes: Sequence[HomeTag]) -> Sequence[HomeTag]:
        """Return these partitions beginning with another one each time."""
        start = self._turn % len(homes)
        self._turn += 1
        return [*homes[start:], *homes[:start]]

    async def _shares(
        self, homes: Sequence[HomeTag], digests: Sequence[str], left: Sequence[LeaseIds]
    ) -> list[tuple[HomeTag, list[LeaseIds]]]:
        """Divide the wanted rows among the partitions that have some."""
        is_large = len(left) >= SHARE
        depth = len(left) if not is_large and len(homes) * len(left) <= MAX_POSITIONS else 1
        heads = await asyncio.gather(*(self._heads(home, digests, depth) for home in homes))
        shares: dict[HomeTag, list[LeaseIds]] = {}
        start = 0
        if is_large:
            for home, (total, _) in zip(homes, heads, strict=True):
                if size := min(total, SHARE, len(left) - start):
                    shares[home] = list(left[start : start + size])
                    start += size
            return list(shares.items())
        found = sorted(
            (position, home, total) for home, (total, first) in zip(homes, heads, strict=True) for position in first
        )
        if depth > 1 or len(left) == 1:
            for (_, home, _), ids in zip(found, left, strict=False):
                shares.setdefault(home, []).append(ids)
            return list(shares.items())
        totals = {home: total for _, home, total in found}
        for number, (home, total) in enumerate(totals.items()):
            fair = -(-(len(left) - start) // (len(totals) - number))
            if size := min(total, fair):
                shares[home] = list(left[start : start + size])
                start += size
        return list(shares.items())

    async def _heads(self, home: HomeTag, digests: Sequence[str], depth: int) -> tuple[int, list[str]]:
        key, name = f"{home}:exec_core:line", self._functions("heads")
        # On the write connection, so that it follows the commits that were sent before.
        total, found = await self._client.call(home, "FCALL_RO", name, 1, key, home, depth, *digests)
        texts = [member.decode() for member in found]
        table = VALKEY_TABLES[Execution]
        return total, sorted(text[:16] + table.key(text[16:], home)[0] for text in texts)[:depth]

    def _call(
        self, home: HomeTag, request: ClaimRequest, digests: Sequence[str], ids: Sequence[LeaseIds], now: str
    ) -> asyncio.Future[Any]:
        keys = [f"{home}:{suffix}" for suffix in (*VALKEY_TABLES[Execution].suffixes, "payload", "f", "h")]
        shared = (request.worker_id, request.worker_instance_id, wide_integer(request.lease_ttl_ms))
        leases = [(one.lease_id, one.attempt_id, biased_hex(one.revision)) for one in ids[:MAX_CLAIMED]]
        packed = msgspec.msgpack.encode((digests, shared, leases))
        form = packed_claim_form(request.template)
        return self._client.call(home, "FCALL", self._functions("claim"), len(keys), *keys, home, now, form, packed)

    def _collect(
        self, replies: Sequence[Any], shares: Sequence[tuple[HomeTag, Sequence[LeaseIds]]], at: int
    ) -> tuple[list[Claimed], int]:
        """Decode the replies. If one failed and another claimed rows, the outcome of the whole claim is unknown."""
        failures = [reply for reply in replies if isinstance(reply, BaseException)]
        if failures:
            failure = next((one for one in failures if not isinstance(one, StoreUnavailable)), failures[0])
            if isinstance(failure, StoreUnavailable) and len(failures) < len(replies) and not failure.in_doubt:
                raise failure.with_unknown_outcome() from failure
            raise failure
        parts = []
        for (home, ids), (_, found) in zip(shares, replies, strict=True):
            decode = ClaimedDecoder(home, self._registry.queue_of).decode
            parts.append(list(map(decode, found[::3], found[1::3], found[2::3], ids)))
        return parts, at or replies[0][0]

    # Queues

    async def nonempty_queues(self, lane_id: str) -> list[QueueKey]:
        """List the queues of a lane that have rows."""
        homes = await self._reader.homes_of(Execution)
        found = await asyncio.gather(*(self._registry.digests_in(home, MAX_VALUES) for home in homes))
        queues = {self._registry.queue_of(digest) for digests in found for digest in digests}
        return sorted(queue for queue in queues if queue.lane_id == lane_id)

    async def executions_in_missing_queues(self, limit: int) -> list[str]:
        """List executions whose queue is not in the registry."""
        homes = await self._reader.homes_of(Execution)
        found = await asyncio.gather(*(self._registry.digests_in(home, MAX_VALUES) for home in homes))
        table, names = VALKEY_TABLES[Execution], list[str]()
        for home, digests in zip(homes, found, strict=True):
            for digest in digests:
                if self._registry.knows(digest) or len(names) >= limit:
                    continue
                self._registry.forget_registrations()
                index, bounds = table.indexes["line"], (f"[{digest}\0", f"({digest}\1")
                page = (index.suffix, *bounds, "LIMIT", 0, limit - len(names))
                members = await self._client.read(home, "ZRANGEBYLEX", f"{home}:{page[0]}", *page[1:])
                texts = [index.key_text(member.decode()) for member in members]
                names += [table.key(text, home)[0] for text in texts]
        return names
