"""Ready queues and their numbers.

A queue's number is the first 63 bits of the digest of its key. So a number means the same queue on every server and
after every failover, restore or crash, whatever of the queue table was lost. The table says which queues a lane has,
and what key stands behind a number that this process has not made itself.

A process checks a queue once: the row exists, and no other key has the same number. It checks again after a connection
broke, since the next server may have lost the row. And a commit that puts work into a queue adds the queue's row where
it is missing (`ensure` in lines.sql): a row that stands in a queue is committed with the queue, or after it on the same
server, and is never kept without it. A session that is our own ends with its server, so its first such commit will do;
behind a pooler every commit does it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import astuple

from flowfabric.model.execution import MISSING_QUEUE, LineKey
from flowfabric.stores.codec import LineAt
from flowfabric.stores.port import Unstorable
from flowfabric.stores.postgres.pool import Links
from flowfabric.stores.postgres.sql import numbered, pieces

T = TypeVar("T")

_COLUMNS = LineKey.__struct_fields__
_STATEMENTS = pieces("lines.sql")
_ADD = numbered(_STATEMENTS["add"], ("numbers", "digests", *_COLUMNS))
_FIND = numbered(_STATEMENTS["find"], ("numbers",))
_UNLISTED = numbered(_STATEMENTS["unlisted"], ("limit",))
_NONE: frozenset[int] = frozenset()
ENSURE = _STATEMENTS["ensure"]
MOST_ROWS = 1000  # sets of queues whose rows are kept ready to be sent
_READ = numbered(_STATEMENTS["read"], ("lane_id",))
_LANES = numbered(_STATEMENTS["lanes"], ("after", "limit"))


class UnknownLine(LookupError):
    """The queue was not checked yet, or the table has no key for its number."""


class Lines:
    """The queue table, and what of it this process knows."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._checked: dict[LineKey, int] = {}
        self._keys: dict[int, LineKey] = {}
        self._written: set[LineKey] = set()
        self._rows: dict[tuple[LineKey, ...], tuple[list[int], str]] = {}
        self._ensured: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()
        links.on_break(self.forget)

    def forget(self) -> None:
        """Check every queue again before something is written to it. What a number means stays known."""
        self._checked.clear()

    def number(self, line: LineKey) -> int:
        """The number of a queue for a write; `UnknownLine` for one that was not checked. `written` collects it."""
        number = self._checked.get(line)
        if number is None:
            raise UnknownLine(line)
        self._written.add(line)
        return number

    def written(self, more: Iterable[LineKey] = ()) -> tuple[list[int], str] | None:
        """The queues that were asked for since the last call, as `ensure` gets them; None when there are none."""
        self._written.update(more)
        if not self._written:
            return None
        lines, self._written = tuple(self._written), set()
        rows = self._rows.get(lines)
        if rows is None:
            if len(self._rows) >= MOST_ROWS:
                self._rows.clear()
            ordered = sorted(lines, key=number_of)
            keys = [[_digest(line).hex(), *astuple(line)] for line in ordered]
            rows = self._rows[lines] = [number_of(line) for line in ordered], msgspec.json.encode(keys).decode()
        return rows

    def ensured(self, connection: Any, numbers: list[int]) -> bool:
        """Whether the server behind this session is known to have these queues."""
        return self._links.own_sessions and self._ensured.get(connection, _NONE).issuperset(numbers)

    def note_ensured(self, connection: Any, numbers: list[int]) -> None:
        """Note a commit of this session that made sure of these queues."""
        if self._links.own_sessions:
            self._ensured.setdefault(connection, set()).update(numbers)

    def key(self, number: int) -> LineKey:
        """The queue behind a number that was seen before."""
        try:
            return self._keys[number]
        except KeyError:
            raise UnknownLine(number) from None

    def key_or_missing(self, number: int) -> LineKey:
        """The queue behind a number, or `MISSING_QUEUE` if the table has lost it."""
        return self._keys.get(number, MISSING_QUEUE)

    async def add(self, lines: Iterable[LineKey]) -> None:
        """Make sure that these queues exist, committed, under their own numbers."""
        missing = sorted({line for line in lines if line not in self._checked})
        if not missing:
            return
        if MISSING_QUEUE in missing:
            raise Unstorable("an execution cannot be put into a missing ready queue")
        digests = [_digest(line) for line in missing]
        numbers = [number_of(line) for line in missing]
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

    async def read(self, lane_id: str | None) -> list[LineKey]:
        """All lines, or those of a lane, in order."""
        found = await self._links.read(lambda connection: connection.fetch(_READ, lane_id))
        return sorted(self._learn(found))

    async def keys_of(self, numbers: Iterable[int]) -> list[LineKey]:
        """The queues behind some numbers, as far as the table has them."""
        asked = set(numbers)
        if unknown := sorted(asked - self._keys.keys()):
            self._learn(await self._links.read(lambda connection: connection.fetch(_FIND, unknown)))
        return [self._keys[number] for number in asked if number in self._keys]

    async def decoded(self, decode: Callable[[LineAt], T]) -> T:
        """Decode rows; when one stands in a queue that another process made, learn the queues first.

        A queue that the table has lost is no reason not to read the row: it shows `MISSING_QUEUE`.
        """
        try:
            return decode(self.key)
        except UnknownLine:
            await self.read(None)
            return decode(self.key_or_missing)

    async def unlisted(self, limit: int) -> list[str]:
        """The executions that stand in a queue which the table does not have, by id."""
        found = await self._links.read(lambda connection: connection.fetch(_UNLISTED, limit))
        return [row["execution_id"] for row in found]

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        """The lanes that have a line, ascending."""
        found = await self._links.read(lambda connection: connection.fetch(_LANES, after, limit))
        return [row["lane_id"] for row in found]

    def _learn(self, found: list[Any]) -> list[LineKey]:
        keys = []
        for number, *values in found:
            key = LineKey(*values)
            self._keys[number] = key
            keys.append(key)
        return keys


@lru_cache(maxsize=10_000)
def number_of(line: LineKey) -> int:
    """The number of a queue."""
    return int.from_bytes(_digest(line)[:8]) >> 1


def _digest(line: LineKey) -> bytes:
    return hashlib.sha256(msgspec.json.encode(astuple(line))).digest()
