"""The reads of one partition, as the argument of one call of the function `load`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from flowfabric.stores.homes import HomeTag
from flowfabric.stores.queries import Read
from flowfabric.stores.valkey.rows.codec import VALKEY_TABLES
from flowfabric.stores.verdicts import Unstorable

MAX_READS = 1000  # rows of one table that one command names


class PartitionLoad:
    """The reads of one partition."""

    def __init__(self, home: HomeTag) -> None:
        self.home = home
        self.ordinals: set[int] = set()
        self._exact: dict[type[msgspec.Struct], list[tuple[int, tuple[Any, ...], str]]] = {}
        self._listed: list[tuple[int, type[msgspec.Struct], str]] = []

    def add(self, ordinal: int, read: Read) -> None:
        """Add a read; one whose key no row can have finds nothing."""
        table = VALKEY_TABLES[read.row]
        self.ordinals.add(ordinal)
        try:
            if len(read.key) == len(table.table.key):
                text = table.key_text(read.key, self.home)
                self._exact.setdefault(read.row, []).append((ordinal, read.key, text))
            else:
                self._listed.append((ordinal, read.row, table.prefix_text(read.key, self.home)))
        except Unstorable:
            pass

    @property
    def _groups(self) -> list[tuple[type[msgspec.Struct], list[tuple[int, tuple[Any, ...], str]]]]:
        return [
            (row, reads[start : start + MAX_READS])
            for row, reads in self._exact.items()
            for start in range(0, len(reads), MAX_READS)
        ]

    @property
    def keys(self) -> list[str]:
        """The names of the keys that the call reads."""
        rows = dict.fromkeys(self._exact, False) | {row: True for _, row, _ in self._listed}
        names = [f"{self.home}:{VALKEY_TABLES[row].name}" for row in rows]
        names += [f"{self.home}:{VALKEY_TABLES[row].name}:k" for row, listed in rows.items() if listed]
        return names or [f"{self.home}:f"]

    def request(self) -> bytes:
        """Return the argument of the function."""
        exact = [[VALKEY_TABLES[row].number, *(text for _, _, text in reads)] for row, reads in self._groups]
        listed = [[VALKEY_TABLES[row].number, prefix] for _, row, prefix in self._listed]
        return msgspec.msgpack.encode([exact, listed])

    def assign(
        self,
        exact: Sequence[Sequence[bytes | None]],
        listed: Sequence[Sequence[bytes]],
        rows: list[list[tuple[Any, ...]]],
    ) -> None:
        """Add keys and blobs to the rows of each read."""
        for (_, reads), blobs in zip(self._groups, exact, strict=True):
            for (ordinal, key, _), blob in zip(reads, blobs, strict=True):
                if blob is not None:
                    rows[ordinal].append((key, blob))
        for (ordinal, row, _), found in zip(self._listed, listed, strict=True):
            table = VALKEY_TABLES[row]
            rows[ordinal] += [
                (table.key(text.decode(), self.home), blob) for text, blob in zip(found[::2], found[1::2], strict=True)
            ]
