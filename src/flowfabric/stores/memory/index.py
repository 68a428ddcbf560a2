"""index: split from flowfabric.stores.memory."""

from __future__ import annotations

import operator
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import Any

from flowfabric.model.execution import QueueKey
from flowfabric.stores.codec import RowCodec, encode
from flowfabric.stores.queries import Scan, Where

Key = tuple[Any, ...]


class MemoryTable:
    """The rows of one table by key, their keys in order, and the indexes of the catalogue."""

    def __init__(self, codec: RowCodec, line_of: Callable[[QueueKey], int]) -> None:
        self.codec = codec
        self.rows: dict[Key, Any] = {}
        self.keys: list[Key] = []
        self.indexes: dict[str, list[tuple[Any, ...]]] = {index.columns[0]: [] for index in codec.table.indexes}
        self._columns = {index.columns[0]: index.columns for index in codec.table.indexes}
        self._line_of = line_of

    def set_row(self, key: Key, row: Any | None) -> Any | None:
        """Set, replace or (None) drop a row; the row that was there."""
        old = self.rows.pop(key, None)
        if old is not None:
            for entry, entries in self._entries(key, old):
                del entries[bisect_left(entries, entry)]
        if row is not None:
            self.rows[key] = row
            for entry, entries in self._entries(key, row):
                insort(entries, entry)
        if old is None and row is not None:
            insort(self.keys, key)
        elif old is not None and row is None:
            del self.keys[bisect_left(self.keys, key)]
        return old

    def keys_with_prefix(self, prefix: Key) -> list[Key]:
        """The keys that begin like this, in order."""
        keys = islice(self.keys, bisect_left(self.keys, prefix), None)
        return [*takewhile(lambda key: key[: len(prefix)] == prefix, keys)]

    def encoded_value(self, row: Any, column: str) -> Any:
        """A column as conditions and orders see it."""
        return encode(getattr(row, column), self._line_of)

    def candidates(self, scan: Scan) -> Iterator[Any]:
        """Rows among which are all that a list may hold: those of an index or a key that its conditions name."""
        for one in scan.where:
            if one.op in ("=", "in") and one.value is not None and one.column in self.indexes:
                values = one.value if one.op == "in" else (one.value,)
                codes = {encode(value, self._line_of) for value in values if value is not None}
                return chain.from_iterable(self.rows_by_index(one.column, code) for code in codes)
        return self._among(scan)

    def _among(self, scan: Scan) -> Iterator[Any]:
        """Those whose key begins with what the conditions say, after the place of the list."""
        first = self.codec.table.key[0]
        start = next((one.value for one in scan.where if one.op == "starts" and one.column == first), None)
        if start:
            keys = islice(self.keys, bisect_left(self.keys, (start,)), None)
            yield from (self.rows[key] for key in takewhile(lambda key: key[0].startswith(start), keys))
            return
        given = {one.column: one.value for one in scan.where if one.op == "="}
        names = self.codec.table.key
        prefix = tuple(given[name] for name in takewhile(given.__contains__, names))
        if not prefix:
            yield from self.rows.values()
            return
        begin = prefix
        if scan.after is not None and scan.order[: len(scan.after)] == names[: len(scan.after)]:
            begin = max(prefix, scan.after)
        for key in islice(self.keys, bisect_left(self.keys, begin), None):
            if key[: len(prefix)] != prefix:
                return
            yield self.rows[key]

    def matches(self, row: Any, where: Sequence[Where]) -> bool:
        """Whether the row meets all conditions."""
        return all(self._meets(self.encoded_value(row, one.column), one) for one in where)

    def rows_by_index(self, column: str, value: Any) -> Iterator[Any]:
        """Rows by an index: those that have this value."""
        entries, width = self.indexes[column], len(self.codec.table.key)
        place = bisect_left(entries, (value,))
        while place < len(entries) and entries[place][0] == value:
            yield self.rows[entries[place][-width:]]
            place += 1

    def distinct_values(self, column: str, prefix: str, after: str | None) -> Iterator[str]:
        """The distinct values of an index that begin with a prefix and come after a value, in order."""
        # No text holds NUL: a value with one behind it comes directly after all entries of the value.
        entries = self.indexes[column]
        place = bisect_left(entries, (prefix,))
        if after is not None:
            place = max(place, bisect_left(entries, (after + "\0",)))
        while place < len(entries) and entries[place][0].startswith(prefix):
            yield (value := entries[place][0])
            place = bisect_left(entries, (value + "\0",), place)

    def _meets(self, value: Any, one: Where) -> bool:
        if one.op in ("set", "unset"):
            return (value is None) == (one.op == "unset")
        if value is None or one.value is None:
            return False
        if one.op == "in":
            return value in [encode(choice, self._line_of) for choice in one.value]
        wanted = encode(one.value, self._line_of)
        return bool(value.startswith(wanted) if one.op == "starts" else _COMPARE[one.op](value, wanted))

    def _entries(self, key: Key, row: Any) -> Iterator[tuple[tuple[Any, ...], list[tuple[Any, ...]]]]:
        for first, columns in self._columns.items():
            if getattr(row, first) is not None:
                yield (*(self.encoded_value(row, column) for column in columns), *key), self.indexes[first]


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
