"""Ready queues and their ids.

A queue's id is the first 63 bits of the digest of its key. So an id means the same queue on every server and after
every failover, restore or crash, even if rows of the queue table were lost. The table lists the queues of a lane, and
the keys of ids that this process has not computed itself.

A process registers a queue once: it makes sure that the row exists and that no other key has the same id. It registers
the queue again after a connection was lost, because the next server may have lost the row. In addition, a commit that
enqueues work inserts the queue's row if it is missing (`ensure_queues` in queue_ids.sql). So an enqueued execution is
committed with its queue's row, or after it on the same server, and never survives without it. A session of our own ends
with its server, so its first such commit is enough; behind a pooler every commit does it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import astuple

from flowfabric.model.execution import MISSING_QUEUE, QueueKey
from flowfabric.stores.codec import QueueDecoder
from flowfabric.stores.postgres.pool import ConnectionPool
from flowfabric.stores.postgres.sql import load_statements, number_parameters
from flowfabric.stores.verdicts import Unstorable

T = TypeVar("T")

_COLUMNS = QueueKey.__struct_fields__
_STATEMENTS = load_statements("queue_ids.sql")
_ADD = number_parameters(_STATEMENTS["add_queues"], ("queue_ids", "digests", *_COLUMNS))
_FIND = number_parameters(_STATEMENTS["find_queues"], ("queue_ids",))
_IN_MISSING_QUEUES = number_parameters(_STATEMENTS["executions_in_missing_queues"], ("limit",))
_NONE: frozenset[int] = frozenset()
ENSURE_QUEUES = _STATEMENTS["ensure_queues"]
MAX_CACHED_ROW_SETS = 1000  # sets of queues whose encoded rows are cached
_QUEUES = number_parameters(_STATEMENTS["queues"], ("lane_id",))
_LANES = number_parameters(_STATEMENTS["lanes"], ("after", "limit"))


class UnknownQueue(LookupError):
    """The queue is not registered yet, or the table has no key for its id."""


class PostgresQueueIds:
    """The queue table, with a cache of the ids and keys that this process knows."""

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._checked: dict[QueueKey, int] = {}
        self._keys: dict[int, QueueKey] = {}
        self._written: set[QueueKey] = set()
        self._rows: dict[tuple[QueueKey, ...], tuple[list[int], str]] = {}
        self._ensured: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
        pool.on_connection_lost(self.invalidate)

    def invalidate(self) -> None:
        """Require every queue to be registered again before a write. The keys of ids stay cached."""
        self._checked.clear()

    def checked_id(self, queue: QueueKey) -> int:
        """Return the id of a queue for a write, and record it for `drain_written`; raise `UnknownQueue` if the queue
        is not registered."""
        id_ = self._checked.get(queue)
        if id_ is None:
            raise UnknownQueue(queue)
        self._written.add(queue)
        return id_

    def drain_written(self, more: Iterable[QueueKey] = ()) -> tuple[list[int], str] | None:
        """Return the ids and rows of `more` and of the queues written since the last call; None if there are none."""
        self._written.update(more)
        if not self._written:
            return None
        queues, self._written = tuple(self._written), set()
        rows = self._rows.get(queues)
        if rows is None:
            if len(self._rows) >= MAX_CACHED_ROW_SETS:
                self._rows.clear()
            ordered = sorted(queues, key=queue_id)
            keys = [[_digest(queue).hex(), *astuple(queue)] for queue in ordered]
            rows = self._rows[queues] = [queue_id(queue) for queue in ordered], msgspec.json.encode(keys).decode()
        return rows

    def is_ensured(self, connection: Any, ids: list[int]) -> bool:
        """True if the server of this session is known to have the rows of these queues."""
        return self._pool.has_own_sessions and self._ensured.get(connection, _NONE).issuperset(ids)

    def mark_ensured(self, connection: Any, ids: list[int]) -> None:
        """Record that a commit of this session inserted the missing rows of these queues."""
        if self._pool.has_own_sessions:
            self._ensured.setdefault(connection, set()).update(ids)

    def key_of(self, id_: int) -> QueueKey:
        """Return the key of a cached id; raise `UnknownQueue` for others."""
        try:
            return self._keys[id_]
        except KeyError:
            raise UnknownQueue(id_) from None

    def key_or_missing(self, id_: int) -> QueueKey:
        """Return the key of an id, or `MISSING_QUEUE` if the table has no row for it."""
        return self._keys.get(id_, MISSING_QUEUE)

    async def register(self, queues: Iterable[QueueKey]) -> None:
        """Make sure that the rows of these queues are committed, and that no two queues share an id."""
        missing = sorted({queue for queue in queues if queue not in self._checked})
        if not missing:
            return
        if MISSING_QUEUE in missing:
            raise Unstorable("an execution cannot be put into a missing ready queue")
        digests = [_digest(queue) for queue in missing]
        ids = [queue_id(queue) for queue in missing]
        columns = list(zip(*[astuple(queue) for queue in missing], strict=True))
        # A second statement, because the first one does not see rows that another process inserts at the same time.
        await self._pool.write(lambda connection: connection.fetch(_ADD, ids, digests, *columns))
        result = await self._pool.read(lambda connection: connection.fetch(_FIND, ids))
        self._cache(result)
        for queue, id_ in zip(missing, ids, strict=True):
            other = self._keys.get(id_)
            if other != queue:
                raise Unstorable(f"the ready queue {queue} has the same id as {other}")
            self._checked[queue] = id_

    async def load_keys(self, lane_id: str | None) -> list[QueueKey]:
        """Load the keys of all queues, or of those of a lane, in order."""
        result = await self._pool.read(lambda connection: connection.fetch(_QUEUES, lane_id))
        return sorted(self._cache(result))

    async def keys_of(self, ids: Iterable[int]) -> list[QueueKey]:
        """Return the keys of some ids, without those that the table does not have."""
        asked = set(ids)
        if unknown := sorted(asked - self._keys.keys()):
            self._cache(await self._pool.read(lambda connection: connection.fetch(_FIND, unknown)))
        return [self._keys[id_] for id_ in asked if id_ in self._keys]

    async def decode(self, decode: Callable[[QueueDecoder], T]) -> T:
        """Decode rows; load the queue table first if a row is in a queue that another process created.

        A row whose queue is missing from the table is decoded with `MISSING_QUEUE`.
        """
        try:
            return decode(self.key_of)
        except UnknownQueue:
            await self.load_keys(None)
            return decode(self.key_or_missing)

    async def executions_in_missing_queues(self, limit: int) -> list[str]:
        """List executions whose queue has no row in the table."""
        result = await self._pool.read(lambda connection: connection.fetch(_IN_MISSING_QUEUES, limit))
        return [row["execution_id"] for row in result]

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        """List the lanes that have a queue, ascending."""
        result = await self._pool.read(lambda connection: connection.fetch(_LANES, after, limit))
        return [row["lane_id"] for row in result]

    def _cache(self, result: list[Any]) -> list[QueueKey]:
        keys = []
        for id_, *values in result:
            key = QueueKey(*values)
            self._keys[id_] = key
            keys.append(key)
        return keys


@lru_cache(maxsize=10_000)
def queue_id(queue: QueueKey) -> int:
    """Compute the id of a queue."""
    return int.from_bytes(_digest(queue)[:8]) >> 1


def _digest(queue: QueueKey) -> bytes:
    return hashlib.sha256(msgspec.json.encode(astuple(queue))).digest()
