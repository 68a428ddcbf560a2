"""The lines: which number stands for which key. A number never changes, so a process remembers what it has seen."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
from msgspec.structs import astuple

from flowfabric.model.execution import LineKey
from flowfabric.stores.codec import LineAt
from flowfabric.stores.postgres.links import Links
from flowfabric.stores.postgres.sql import numbered, pieces

T = TypeVar("T")

_COLUMNS = LineKey.__struct_fields__
_STATEMENTS = pieces("lines.sql")
_ADD = numbered(_STATEMENTS["add"], ("digests", *_COLUMNS))
_FIND = numbered(_STATEMENTS["find"], ("digests",))
_READ = numbered(_STATEMENTS["read"], ("lane_id",))
STANDING = numbered(_STATEMENTS["standing"], ("lane_id",))
_LANES = numbered(_STATEMENTS["lanes"], ("after", "limit"))


class UnknownLine(LookupError):
    """This process has not seen the line yet."""


class Lines:
    """The line table, and what of it this process knows."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._numbers: dict[LineKey, int] = {}
        self._keys: dict[int, LineKey] = {}

    def number(self, line: LineKey) -> int:
        """The number of a line that was seen before."""
        try:
            return self._numbers[line]
        except KeyError:
            raise UnknownLine(line) from None

    def key(self, number: int) -> LineKey:
        """The line behind a number that was seen before."""
        try:
            return self._keys[number]
        except KeyError:
            raise UnknownLine(number) from None

    async def known(self, lines: Iterable[LineKey]) -> list[int]:
        """The numbers of those lines that exist."""
        lines = list(lines)
        missing = [line for line in lines if line not in self._numbers]
        if missing:
            digests = [_digest(line) for line in missing]
            self._learn(await self._links.read(lambda connection: connection.fetch(_FIND, digests)))
        return [self._numbers[line] for line in lines if line in self._numbers]

    async def add(self, lines: Iterable[LineKey]) -> None:
        """Make sure that these lines exist, committed: a row may name them as soon as this returns."""
        missing = [line for line in lines if line not in self._numbers]
        if missing:
            digests = [_digest(line) for line in missing]
            columns = list(zip(*[astuple(line) for line in missing], strict=True))
            # Found in a second statement, since the first does not see what another process adds at the same time.
            await self._links.write(lambda connection: connection.fetch(_ADD, digests, *columns))
            await self.known(missing)

    async def read(self, lane_id: str | None) -> list[LineKey]:
        """All lines, or those of a lane, in order."""
        found = await self._links.read(lambda connection: connection.fetch(_READ, lane_id))
        return sorted(self._learn(found))

    async def standing(self, lane_id: str) -> list[LineKey]:
        """The lines of a lane in which something stands, in order."""
        return sorted(self._learn(await self._links.read(lambda connection: connection.fetch(STANDING, lane_id))))

    async def decoded(self, decode: Callable[[LineAt], T]) -> T:
        """Decode rows; when one stands in a line that another process made, learn the lines first."""
        try:
            return decode(self.key)
        except UnknownLine:
            await self.read(None)
            return decode(self.key)

    async def lanes(self, after: str | None, limit: int) -> list[str]:
        """The lanes that have a line, ascending."""
        found = await self._links.read(lambda connection: connection.fetch(_LANES, after, limit))
        return [row["lane_id"] for row in found]

    def _learn(self, found: list[Any]) -> list[LineKey]:
        keys = []
        for number, *values in found:
            key = LineKey(*values)
            self._numbers[key] = number
            self._keys[number] = key
            keys.append(key)
        return keys


def _digest(line: LineKey) -> bytes:
    return hashlib.sha256(msgspec.json.encode(astuple(line))).digest()
