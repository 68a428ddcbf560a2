"""Ready queues and their numbers.

A queue's number is the first 63 bits of the digest of its key. So a number means the same queue on every server and
after every failover, restore or crash, whatever of the queue table was lost. The table says which queues a lane has,
and what key stands behind a number that this process has not made itself.

A process checks a queue once: the row exists, and no other key has the same number. It checks again after a connection
broke, since the next server may have lost the row. And a commit that puts work into a queue adds the queue's row where
it is missing (`ensure` in queue_ids.sql): a row that stands in a queue is committed with the queue, or after it on the
same server, and is never kept without it. A session that is our own ends with its server, so its first such commit will
do; behind a pooler every commit does it.
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
from flowfabric.stores.port import Unstorable
from flowfabric.stores.postgres.pool import ConnectionPool
from flowfabric.stores.postgres.sql import load_statements, number_parameters

T = TypeVar("T")

_COLUMNS = QueueKey.__struct_fields__
_STATEMENTS = load_statements("queue_ids.sql")
_ADD = number_parameters(_STATEMENTS["add"], ("numbers", "digests", *_COLUMNS))
_FIND = number_parameters(_STATEMENTS["find"], ("numbers",))
_UNLISTED = number_parameters(_STATEMENTS["unlisted"], ("limit",))
_NONE: frozenset[int] = frozenset()
ENSURE_QUEUES = _STATEMENTS["ensure"]
MAX_CACHED_ROW_SETS = 1000  # sets of queues whose rows are kept ready to be sent
_READ = number_parameters(_STATEMENTS["read"], ("lane_id",))
_LANES = number_parameters(_STATEMENTS["lanes"], ("after", "limit"))


class UnknownQueue(LookupError):
    """The queue was not checked yet, or the table has no key for its number."""


class PostgresQueueIds:
    """The queue table, and what of it this process knows."""

    def __init__(self, links: ConnectionPool) -> None:
        self._links = links
        self._checked: dict[QueueKey, int] = {}
        self._keys: dict[int, QueueKey] = {}
        self._written: set[QueueKey] = set()
        self._rows: dict[tuple[QueueKey, ...], tuple[list[int], str]] = {}
        self._ensured: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
        links.on_connection_lost(self.invalidate)

    def invalidate(self) -> None:
        """Check every queue again before something is written to it. What a number means stays known."""
        self._checked.clear()

    def checked_id(self, line: QueueKey) -> int:
        """The number of a queue for a write; `UnknownLine` for one that was not checked. `written` collects it."""
        number = self._checked.get(line)
        if number is None:
            raise UnknownQueue(line)
        self._written.add(line)
        return number

    def drain_written(self, more: Iterable[QueueKey] = ()) -> tuple[list[int], str] | None:
        """The queues that were asked for since the last call, as `ensure` gets them; None when there are none."""
        self._written.update(more)
        if not self._written:
            return None
        lines, self._written = tuple(self._written), set()
        rows = self._rows.get(lines)
        if rows is None:
            if len(self._rows) >= MAX_CACHED_ROW_SETS:
                self._rows.clear()
            ordered = sorted(lines, key=queue_id)
            keys = [[_digest(line).hex(), *astuple(line)] for line in ordered]
            rows = self._rows[lines] = [queue_id(line) for line in ordered], msgspec.json.encode(keys).decode()
        return rows

    def is_ensured(self, connection: Any, numbers: list[int]) -> bool:
        """Whether the server behind this session is known to have these queues."""
        return self._links.has_own_sessions and self._ensured.get(connection, _NONE).issuperset(numbers)

    def mark_ensured(self, connection: Any, numbers: list[int]) -> None:
        """Note a commit of this session that made sure of these queues."""
        if self._links.has_own_sessions:
            self._ensured.setdefault(connection, set()).update(numbers)

    def key_of(self, number: int) -> QueueKey:
        """The queue behind a number that was seen before."""
        try:
            return self._keys[number]
        except KeyError:
            raise UnknownQueue(number) from None

    def key_or_missing(self, number: int) -> QueueKey:
        """The queue behind a number, or `MISSING_QUEUE` if the table has lost it."""
        return self._keys.get(number, MISSING_QUEUE)

    async def register(self, lines: Iterable[QueueKey]) -> None:
        """Make sure that these queues exist, committed, under their own numbers."""
        missing = sorted({line for line in lines if line not in self._checked})
        if not missing:
            return
        if MISSING_QUEUE in missing:
            raise Unstorable("an execution cannot be put into a missing ready queue")
        digests = [_digest(line) for line in missing]
        numbers = [queue_id(line) for line in missing]
        columns = list(zip(*[astuple(line) for line in missing], strict=True))
        # Found in a second statement, since the first does not see what another process adds at the same time.
        await self._links.write(lambda connection: connection.fetch(_ADD, numbers, digests, *columns))
        found = await self._links.read(lambda connection: connection.fetch(_FIND, numbers))
        self._learn(found)
        for line, number in zip(missing, numbers, strict=True):
            other = self._keys.get(number)
            if other != line:
                raise Unstorable(f"the ready queue {line} has the same number as {other}")
            self._checked[line] = number

    async def load_keys(self, lane_id: str | None) -> list[QueueKey]:
        """All lines, or those of a lane, in order."""
        found = await self._links.read(lambda connection: connection.fetch(_READ, lane_id))
        return sorted(self._learn(found))

    async def keys_of(self, numbers: Iterable[int]) -> list[QueueKey]:
        """The queues behind some numbers, as far as the table has them."""
        asked = set(numbers)
        if unknown := sorted(asked - self._keys.keys()):
            self._learn(await self._links.read(lambda connection: connection.fetch(_FIND, unknown)))
        return [self._keys[number] for number in asked if number in self._keys]

    async def decode(self, decode: Callable[[QueueDecoder], T]) -> T:
        """Decode rows; when one stands in a queue that another process made, learn the queues first.

        A queue that the table has lost is no reason not to read the row: it shows `MISSING_QUEUE`.
        """
        try:
            return decode(self.key_of)
        except UnknownQueue:
            await self.load_keys(None)
            return decode(self.key_or_missing)

    async def executions_in_missing_queues(self, limit: int) -> list[str]:
        """The executions that stand in a queue which the table does not have, by id."""
        found = await self._links.read(lambda connection: connection.fetch(_UNLISTED, limit))
        return [row["execution_id"] for row in found]

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        """The lanes that have a line, ascending."""
        found = await self._links.read(lambda connection: connection.fetch(_LANES, after, limit))
        return [row["lane_id"] for row in found]

    def _learn(self, found: list[Any]) -> list[QueueKey]:
        keys = []
        for number, *values in found:
            key = QueueKey(*values)
            self._keys[number] = key
            keys.append(key)
        return keys


@lru_cache(maxsize=10_000)
def queue_id(line: QueueKey) -> int:
    """The number of a queue."""
    return int.from_bytes(_digest(line)[:8]) >> 1


def _digest(line: QueueKey) -> bytes:
    return hashlib.sha256(msgspec.json.encode(astuple(line))).digest()
