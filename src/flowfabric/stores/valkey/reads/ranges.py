"""Ranges: the part of an index, or of the keys, that holds all rows of a scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from flowfabric.ids import PartitionCounts
from flowfabric.model.flow import Edge
from flowfabric.stores.catalog import HomeKind
from flowfabric.stores.homes import HomeTag, home_of
from flowfabric.stores.queries import Scan, Where
from flowfabric.stores.valkey.rows.codec import ValkeyIndex, ValkeyTable, biased_hex
from flowfabric.stores.verdicts import Unstorable

UNTAGGED_HOME = HomeTag("{fp:0}")  # of ids without a partition, which only tests use
_AFTER_ALL = "\U0010ffff" * 4
_NAMES_HOME = {"execution_id", "upstream_execution_id", "downstream_execution_id"}
_OF_LIMITS = {HomeKind.BUDGET, HomeKind.QUOTA}  # such rows are not in the partition of the execution that they name


class KeyRange(msgspec.Struct, frozen=True):
    """A part of an index in one partition, or of the keys if there is no index; the bounds are the server's."""

    home: HomeTag
    index: ValkeyIndex | None
    first: str
    last: str


class Ranges(msgspec.Struct, frozen=True):
    """How to read a scan: ranges of one index in one or in all partitions.

    `is_ordered` says that each range is in the order of the scan. `is_global_order` says that the ranges of `sequence`
    follow one another in that order.
    """

    table: ValkeyTable
    index: ValkeyIndex | None
    bounds: tuple[tuple[str, str], ...]
    home: HomeTag | None = None
    is_ordered: bool = False
    is_queue: bool = False
    is_global_order: bool = False
    after: str | None = None  # the id after which a global order continues
    key_prefix: tuple[Any, ...] = ()

    def in_home(self, home: HomeTag) -> list[KeyRange]:
        """Return the ranges in one partition."""
        if self.index is None and self.key_prefix:
            try:
                prefix = self.table.prefix_text(self.key_prefix, home)
            except Unstorable:
                return []
            if len(self.key_prefix) == len(self.table.table.key):
                return [KeyRange(home, None, "[" + prefix[:-1], "[" + prefix[:-1])]
            return [KeyRange(home, None, "[" + prefix, "(" + prefix[:-1] + "\1")]
        return [KeyRange(home, self.index, first, last) for first, last in self.bounds]

    def sequence(self, homes: Sequence[HomeTag]) -> list[KeyRange]:
        """Return the ranges of all keys in their order: ids are ordered by their tags first.

        In its partition an id is `{` and the rest, so ids with a tag lie between `{` and `|`.
        """
        ranges = [KeyRange(UNTAGGED_HOME, None, "-", "({")] if UNTAGGED_HOME in homes else []
        for home in sorted(homes):
            first = "[{"
            if self.after is not None and self.after.startswith(home + ":"):
                first = "({" + self.after[len(home) + 1 :]
            elif self.after is not None and home + ";" <= self.after:
                continue  # all of its ids come before
            ranges.append(KeyRange(home, None, first, "[|"))
        if UNTAGGED_HOME in homes:
            ranges.append(KeyRange(UNTAGGED_HOME, None, "[|", "+"))
        return ranges


def ranges_of(scan: Scan, table: ValkeyTable, counts: PartitionCounts, encode: Callable[[Any], Any]) -> Ranges:
    """Return ranges that hold all rows of a scan."""
    equal = {one.column: one.value for one in scan.where if one.op == "="}
    for index in table.indexes.values():
        if index.key_parts and all(name in equal for name in table.table.key[: index.key_parts]):
            return _by_key_parts(scan, table, index, counts, equal)
    by_column = {name for name, index in table.indexes.items() if not index.key_parts}
    for condition in scan.where:
        if condition.op in ("=", "in") and condition.column in by_column and condition.value is not None:
            return _by_values(scan, table, condition, encode)
    prefix = tuple(equal[name] for name in takewhile(equal.__contains__, table.table.key))
    if prefix:
        home = home_of(table.table.row, prefix, counts)
        ordered = _is_ordered(scan, table.table.key, set(equal))
        return Ranges(table, None, (("-", "+"),), home, ordered, key_prefix=prefix)
    for condition in scan.where:
        if condition.column in by_column and condition.op in ("starts", ">", ">=", "<", "<=", "set"):
            return _by_bounds(scan, table, condition, encode)
    first = scan.full_order[0]
    if not scan.where and first in by_column and not table.column[first].optional:  # the index has all rows
        return _by_bounds(scan, table, Where(first, "set"), encode)
    return _by_key(scan, table, counts)


def _by_key_parts(
    scan: Scan, table: ValkeyTable, index: ValkeyIndex, counts: PartitionCounts, equal: dict[str, Any]
) -> Ranges:
    """Return the range of an index whose text is the beginning of the key."""
    key = tuple(equal[name] for name in table.table.key[: index.key_parts])
    home = home_of(table.table.row, key, counts)
    assert home is not None
    try:
        text = table.key_text(key, home)
    except Unstorable:
        return Ranges(table, index, (), home, True)
    ordered = _is_ordered(scan, _natural_order(table, index), set(equal))
    ranks = [one.value for one in scan.where if one.column == index.rank and one.op in (">", ">=")]
    if ordered and scan.after and scan.full_order[0] == index.rank:
        ranks.append(scan.after[0])
    start = biased_hex(max(ranks)) if ranks else ""  # the rows of this rank are compared one by one
    return Ranges(table, index, ((f"[{text}\0{start}", f"({text}\1"),), home, ordered)


def _by_values(scan: Scan, table: ValkeyTable, condition: Where, encode: Callable[[Any], Any]) -> Ranges:
    index = table.indexes[condition.column]
    values = condition.value if condition.op == "in" else (condition.value,)
    texts = list(dict.fromkeys(encode(value) for value in values if value is not None))
    fixed = {one.column for one in scan.where if one.op == "="}
    if len(texts) == 1:
        fixed.add(condition.column)
    if index.is_score:
        return Ranges(table, index, tuple((str(value), str(value)) for value in texts))
    ordered = _is_ordered(scan, _natural_order(table, index), fixed)
    bounds = tuple((f"[{text}\0", f"({text}\1") for text in texts)
    if ordered and index.rank_place is not None and scan.after and scan.full_order[0] == index.rank:
        start = biased_hex(scan.after[0])  # the rows of this rank are compared one by one
        bounds = tuple((f"[{text}\0{start}", last) for text, (_, last) in zip(texts, bounds, strict=True))
    home = None
    is_with_execution = table.table.home is not None and table.table.home[1] not in _OF_LIMITS
    if condition.column in _NAMES_HOME and is_with_execution and len(texts) == 1:
        tag, brace, _ = texts[0].partition("}")
        home = HomeTag(tag + brace) if brace else UNTAGGED_HOME
    return Ranges(table, index, bounds, home, ordered, is_queue=condition.column == "line")


def _by_bounds(scan: Scan, table: ValkeyTable, condition: Where, encode: Callable[[Any], Any]) -> Ranges:
    index = table.indexes[condition.column]
    fixed = {one.column for one in scan.where if one.op == "="}
    ordered = _is_ordered(scan, _natural_order(table, index), fixed, backwards=index.is_score)
    if index.is_score:
        first, last = "-inf", "+inf"
        for one in scan.where:
            if one.column == condition.column and one.op in (">", ">="):
                first = str(one.value)
            elif one.column == condition.column and one.op in ("<", "<="):
                last = str(one.value)
        if ordered and scan.after and scan.full_order[0] == condition.column:
            position = scan.after[0]
            if scan.descending:
                last = str(position if last == "+inf" else min(int(last), position))
            else:
                first = str(position if first == "-inf" else max(int(first), position))
        return Ranges(table, index, ((first, last),), None, ordered)
    if condition.op == "starts" and condition.value:
        return Ranges(table, index, (("[" + condition.value, "(" + condition.value + _AFTER_ALL),), None, ordered)
    return Ranges(table, index, (("-", "+"),), None, ordered)


def _by_key(scan: Scan, table: ValkeyTable, counts: PartitionCounts) -> Ranges:
    key = table.table.key
    starts = next((one.value for one in scan.where if one.op == "starts" and one.column == key[0]), None)
    is_tagged = table.is_tagged_first
    ordered = _is_ordered(scan, key, set())
    if starts and is_tagged and len(key) == 1 and isinstance(starts, str):
        tag, brace, rest = starts.partition("}:")
        home = HomeTag(tag + "}") if brace else UNTAGGED_HOME
        text = "{" + rest if brace else starts
        if brace or not starts.startswith("{"):
            return Ranges(table, None, (("[" + text, "(" + text + _AFTER_ALL),), home, ordered)
    after = scan.after[0] if scan.after and scan.full_order[0] == key[0] else None
    if is_tagged and ordered and table.is_listed:
        return Ranges(table, None, (("-", "+"),), None, True, is_global_order=True, after=after)
    first = "-"
    if ordered and not is_tagged and scan.after and len(scan.after) <= len(key) and table.is_listed:
        first = "[" + table.key_text(scan.after, "")
    return Ranges(table, None, ((first, "+"),), home_of(table.table.row, (), counts), ordered)


def _natural_order(table: ValkeyTable, index: ValkeyIndex) -> tuple[str, ...]:
    first = table.table.key[: index.key_parts] if index.key_parts else index.columns[:1]
    rank = () if index.rank is None else (index.rank,)
    return (*first, *rank, *(name for name in table.table.key if name not in (*first, *rank)))


def _is_ordered(scan: Scan, natural: Sequence[str], fixed: set[str], *, backwards: bool = False) -> bool:
    """True if rows in the natural order of a range are in the order of the scan; `fixed` columns have one value.

    `backwards` says that the range can also be read from its end.
    """
    if scan.row is Edge:
        fixed = fixed | {"flow_id"}  # the edges of one execution belong to one flow
    if scan.descending and not backwards:
        return False
    left = [name for name in natural if name not in fixed]
    return left == [name for name in scan.full_order if name not in fixed]
