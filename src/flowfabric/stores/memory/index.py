"""Tables of the memory store: rows by key, with the ordered indexes of the catalog and the scans over them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import Any

from flowfabric.model.execution import QueueKey
from flowfabric.stores.codec import RowCodec, encode
from flowfabric.stores.queries import Scan, Where, meets

Key = tuple[Any, ...]


class MemoryTable:
    """The rows of one table by key, their keys in order, and the indexes of the catalog."""

    def __init__(self, codec: RowCodec, encode_queue: Callable[[QueueKey], int]) -> None:
        self.codec = codec
        self.rows: dict[Key, Any] = {}
        self.keys: list[Key] = []
        self.indexes: dict[str, list[tuple[Any, ...]]] = {index.columns[0]: [] for index in codec.table.indexes}
        self._columns = {index.columns[0]: index.columns for index in codec.table.indexes}
        self._encode_queue = encode_queue

    def set_row(self, key: Key, row: Any | None) -> Any | None:
        """Set, replace or (None) delete a row; return the previous row."""
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
        """Return the keys with this prefix, in order."""
        keys = islice(self.keys, bisect_left(self.keys, prefix), None)
        return [*takewhile(lambda key: key[: len(prefix)] == prefix, keys)]

    def encoded_value(self, row: Any, column: str) -> Any:
        """Return a column's value as conditions and sort keys compare it."""
        return self._encode(getattr(row, column))

    def _encode(self, value: Any) -> Any:
        return encode(value, self._encode_queue)

    def candidates(self, scan: Scan) -> Iterator[Any]:
        """Return a superset of the rows of a scan, through an index or a key that its conditions name."""
        for condition in scan.where:
            if condition.op in ("=", "in") and condition.value is not None and condition.column in self.indexes:
                values = condition.value if condition.op == "in" else (condition.value,)
                codes = {self._encode(value) for value in values if value is not None}
                return chain.from_iterable(self.rows_by_index(condition.column, code) for code in codes)
        return self._candidates_by_key(scan)

    def _candidates_by_key(self, scan: Scan) -> Iterator[Any]:
        """Yield the rows whose key starts with the values of the conditions, from the scan's `after` on."""
        first = self.codec.table.key[0]
        start = next(
            (condition.value for condition in scan.where if condition.op == "starts" and condition.column == first),
            None,
        )
        if start:
            keys = islice(self.keys, bisect_left(self.keys, (start,)), None)
            yield from (self.rows[key] for key in takewhile(lambda key: key[0].startswith(start), keys))
            return
        equal = {condition.column: condition.value for condition in scan.where if condition.op == "="}
        names = self.codec.table.key
        prefix = tuple(equal[name] for name in takewhile(equal.__contains__, names))
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
        """True if the row meets all conditions."""
        return all(meets(self.encoded_value(row, condition.column), condition, self._encode) for condition in where)

    def rows_by_index(self, column: str, value: Any) -> Iterator[Any]:
        """Yield the rows that have this value in an indexed column."""
        entries, key_length = self.indexes[column], len(self.codec.table.key)
        index = bisect_left(entries, (value,))
        while index < len(entries) and entries[index][0] == value:
            yield self.rows[entries[index][-key_length:]]
            index += 1

    def distinct_values(self, column: str, prefix: str, after: str | None) -> Iterator[str]:
        """Yield the distinct values of an index that have a prefix and come after a value, in order."""
        # No text contains NUL, so a value followed by NUL sorts directly after all entries of the value.
        entries = self.indexes[column]
        index = bisect_left(entries, (prefix,))
        if after is not None:
            index = max(index, bisect_left(entries, (after + "\0",)))
        while index < len(entries) and entries[index][0].startswith(prefix):
            yield (value := entries[index][0])
            index = bisect_left(entries, (value + "\0",), index)

    def _entries(self, key: Key, row: Any) -> Iterator[tuple[tuple[Any, ...], list[tuple[Any, ...]]]]:
        for first, columns in self._columns.items():
            if getattr(row, first) is not None:
                yield (*(self.encoded_value(row, column) for column in columns), *key), self.indexes[first]
