"""The registry: which queues exist, and which partitions hold rows, and rows of which queue.

It belongs to no partition and is kept beside `{ff}`. A process registers a queue and a partition before it writes there
for the first time, in the same flush and without waiting: on one server the registration is executed first. On a
cluster a process may die after the write and before the registration. So every process compares the partitions with the
registry from time to time (`VERIFY_S`) and adds what is missing.

Every registration raises a version, by which other processes know when to read the registry again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from time import monotonic

import msgspec
from msgspec.structs import astuple

from flowfabric.errors import FabricError
from flowfabric.event_loop import start_task
from flowfabric.ids import PartitionCounts
from flowfabric.model.execution import MISSING_QUEUE, Execution, QueueKey
from flowfabric.stores.homes import GLOBAL_HOME, HomeTag
from flowfabric.stores.valkey.cluster import ValkeyClient
from flowfabric.stores.valkey.rows.codec import VALKEY_TABLES
from flowfabric.stores.verdicts import Unstorable

VERIFY_S = 10.0
MAX_VALUES = 1000  # distinct queues of a partition that one call lists
QUEUES, PLACES, HOMES, VERSION = "{ff}:queues", "{ff}:places", "{ff}:homes", "{ff}:version"

_LINE = list(VALKEY_TABLES[Execution].indexes).index("line") + 1


class Registry:
    """The registry as this process knows it."""

    def __init__(self, client: ValkeyClient, functions: Callable[[str], str]) -> None:
        self._client = client
        self._functions = functions
        self._digests: dict[QueueKey, str] = {}
        self._queues: dict[str, QueueKey] = {}
        self._places: dict[str, set[HomeTag]] = defaultdict(set)
        self._homes: set[HomeTag] = set()
        self._registered: set[tuple[str, HomeTag]] = set()
        self._version = b""
        self._verified_at = monotonic()
        self._verifying: asyncio.Task[None] | None = None
        self.all_homes: list[HomeTag] = []

    def set_partitions(self, counts: PartitionCounts) -> None:
        """Set the numbers of partitions."""
        families = (("fp", counts.flow), ("b", counts.budget), ("q", counts.quota))
        homes = [HomeTag(f"{{{family}:{number}}}") for family, count in families for number in range(count)]
        self.all_homes = [*homes, GLOBAL_HOME]

    # Queues

    def digest_of(self, queue: QueueKey) -> str:
        """Return the digest of a queue, by which rows and indexes name it."""
        digest = self._digests.get(queue)
        if digest is None:
            if queue == MISSING_QUEUE:
                raise Unstorable("an execution cannot be put into a missing ready queue")
            for text in (queue.lane_id, queue.required, queue.fairness_key):
                if "\0" in text:
                    raise Unstorable("a queue contains NUL")
            try:
                packed = msgspec.msgpack.encode(astuple(queue))
            except UnicodeEncodeError as error:
                raise Unstorable("a queue is not valid Unicode") from error
            digest = self._digests[queue] = hashlib.sha256(packed).hexdigest()[:12]
        return digest

    def queue_of(self, digest: str) -> QueueKey:
        """Return the queue with this digest; `MISSING_QUEUE` if the registry does not know it."""
        return self._queues.get(digest, MISSING_QUEUE)

    def knows(self, digest: str) -> bool:
        return digest in self._queues

    @property
    def queues(self) -> Iterable[QueueKey]:
        return self._queues.values()

    def places(self, digests: Iterable[str]) -> list[HomeTag]:
        """Return the partitions that ever held rows of these queues."""
        return list(dict.fromkeys(home for digest in digests for home in self._places.get(digest, ())))

    @property
    def homes(self) -> set[HomeTag]:
        """The partitions that ever held rows."""
        return self._homes

    # Registration

    def register(self, home: HomeTag, queues: Iterable[QueueKey]) -> list[asyncio.Future[object]]:
        """Send what is not registered yet; return the replies to wait for."""
        new = [queue for queue in queues if (self.digest_of(queue), home) not in self._registered]
        if not new and home in self._homes and ("", home) in self._registered:
            return []
        places, packed = list[str](), list[str | bytes]()
        for queue in new:
            digest = self.digest_of(queue)
            packed += [digest, msgspec.json.encode(queue)]
            places.append(f"{digest} {home}")
            self._queues[digest] = queue
            self._places[digest].add(home)
        self._homes.add(home)
        call = self._client.call
        sent = [call(QUEUES, "HSET", QUEUES, *packed), call(PLACES, "SADD", PLACES, *places)] if new else []
        sent += [call(HOMES, "SADD", HOMES, home), call(VERSION, "INCR", VERSION)]
        pairs = [("", home), *((self.digest_of(queue), home) for queue in new)]
        self._registered.update(pairs)
        for reply in sent:
            reply.add_done_callback(lambda done: self._check(done, pairs))
        return sent

    def _check(self, reply: asyncio.Future[object], pairs: list[tuple[str, HomeTag]]) -> None:
        """Register again with the next write what was not registered."""
        if reply.cancelled() or reply.exception() is not None:
            self._registered.difference_update(pairs)

    def forget_registrations(self) -> None:
        """Register everything again with the next writes: the store lost a part of the registry."""
        self._registered.clear()

    # Reading

    async def refresh(self) -> None:
        """Learn what other processes have registered."""
        version = await self._client.read(VERSION, "GET", VERSION) or b"none"
        if version != self._version:
            queues, places, homes = await asyncio.gather(
                self._client.read(QUEUES, "HGETALL", QUEUES),
                self._client.read(PLACES, "SMEMBERS", PLACES),
                self._client.read(HOMES, "SMEMBERS", HOMES),
            )
            self._version = version
            for digest, packed in zip(queues[::2], queues[1::2], strict=True):
                self._queues[digest.decode()] = msgspec.json.decode(packed, type=QueueKey)
            for place in places:
                digest, _, home = place.decode().partition(" ")
                self._places[digest].add(HomeTag(home))
            self._homes.update(HomeTag(home.decode()) for home in homes)
        if monotonic() - self._verified_at > VERIFY_S and self._verifying is None:
            self._verified_at = monotonic()
            self._verifying = start_task(self._verify_quietly())

    async def _verify_quietly(self) -> None:
        try:
            await self.verify()
        except FabricError:
            pass  # the next refresh will find it
        finally:
            self._verifying = None

    async def verify(self) -> None:
        """Compare all partitions with the registry, and register what is missing in it."""
        known = await asyncio.gather(*(self._digests_in(home) for home in self.all_homes))
        sent: list[asyncio.Future[object]] = []
        for home, (exists, digests) in zip(self.all_homes, known, strict=True):
            if exists and home not in self._homes:
                self._registered.discard(("", home))
            queues = [self._queues[digest] for digest in digests if digest in self._queues]
            missing = [queue for queue in queues if home not in self._places[self.digest_of(queue)]]
            self._registered.difference_update((self.digest_of(queue), home) for queue in missing)
            if missing or (exists and home not in self._homes):
                sent += self.register(home, missing)
        await asyncio.gather(*sent)

    async def _digests_in(self, home: HomeTag) -> tuple[bool, list[str]]:
        names = [f"{home}:{table.name}" for table in VALKEY_TABLES.values()]
        exists, digests = await asyncio.gather(
            self._client.read(home, "EXISTS", *names), self.digests_in(home, MAX_VALUES)
        )
        return bool(exists), digests

    async def digests_in(self, home: HomeTag, limit: int) -> list[str]:
        """Return the digests of the queues that have rows in a partition."""
        number = VALKEY_TABLES[Execution].number
        found = await self._client.read(
            home,
            "FCALL_RO",
            self._functions("values"),
            1,
            f"{home}:exec_core:line",
            home,
            number,
            _LINE,
            "-",
            "+",
            limit,
        )
        return [digest.decode() for digest in found]

    async def close(self) -> None:
        """Stop the comparison."""
        if self._verifying is not None:
            self._verifying.cancel()
