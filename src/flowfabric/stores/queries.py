"""Read queries of the store port: loads by key, scans, counts, due rows and feed pages, with their results."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal

import msgspec

from flowfabric.errors import Corruption
from flowfabric.model.event import FeedEvent
from flowfabric.model.execution import Execution
from flowfabric.stores.catalog import TABLE


class Read(msgspec.Struct, frozen=True, gc=False):
    """A load of the rows whose key starts with `key`, in key order."""

    row: type[msgspec.Struct]
    key: tuple[Any, ...]


class Loaded(msgspec.Struct, frozen=True, gc=False):
    """The rows of each `Read`, and the store's time in the partition of the first one."""

    now: int
    rows: list[list[Any]]
    times: list[int] | None = None  # the time of each read, if the store has several clocks

    def part(self, begin: int, end: int) -> Loaded:
        """Return what was loaded for some of the reads."""
        if self.times is None or begin == end:
            return Loaded(self.now, self.rows[begin:end])
        return Loaded(self.times[begin], self.rows[begin:end], self.times[begin:end])


class Due(msgspec.Struct, frozen=True, gc=False):
    """Rows whose instant has passed, earliest first, and the next future instant; None if there is none.

    With conditions `next_at` is a lower bound: no row that meets them becomes due before it, but none may be due then.
    A store may disregard the conditions, because finding the next row that meets them can mean reading all others.
    """

    now: int
    rows: list[Any]
    next_at: int | None


Op = Literal["=", "<", "<=", ">", ">=", "in", "set", "unset", "starts", "contains"]


class Where(msgspec.Struct, frozen=True, gc=False):
    """A condition on one column; `set` means not null, `unset` means null, `starts` means a text prefix.

    `contains` means that a text occurs in the column, with the same letters in the same case; only a search has it.
    """

    column: str
    op: Op
    value: Any = None


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "starts": str.startswith,
    "contains": operator.contains,
}


def meets(value: Any, condition: Where, encode: Callable[[Any], Any]) -> bool:
    """True if a stored value meets a condition; `encode` returns what is stored of the condition's values."""
    if condition.op in ("set", "unset"):
        return (value is None) == (condition.op == "unset")
    if value is None or condition.value is None:
        return False
    if condition.op == "in":
        return value in [encode(choice) for choice in condition.value]
    return _COMPARE[condition.op](value, encode(condition.value))


def prefix_upper_bound(prefix: str) -> str | None:
    """Return the smallest text greater than every text with this prefix; None if there is none."""
    stem = prefix.rstrip("\U0010ffff")
    if not stem:
        return None
    last = ord(stem[-1]) + 1
    return stem[:-1] + chr(0xE000 if last == 0xD800 else last)  # surrogates are not valid in texts


class Scan(msgspec.Struct, frozen=True):
    """A scan: the rows of one table that meet all conditions, ordered, strictly after the sort key `after`.

    `limit_by` names a column with an `in` condition, or with a `starts` condition that lists several nonempty prefixes.
    The limit then applies to each value or prefix, so that one round trip reads the first rows of many queues. With
    `max_values`, a `starts` condition with one prefix stands for the values of an indexed text column that have this
    prefix, in order and at most `max_values` of them; the limit applies to each value. A `>` condition on that column
    skips values.

    A row that cannot be decoded fails the scan with `Corruption`. A `tolerant` scan returns an `UnreadableRow` instead.

    A `partial` scan of the first rows of some queues may omit rows that are too expensive to find. A later scan finds
    them. Only Postgres does this (see its `dead_entries.py`).
    """

    row: type[msgspec.Struct]
    where: tuple[Where, ...] = ()
    order: tuple[str, ...] = ()
    after: tuple[Any, ...] | None = None
    limit: int = 100
    limit_by: str | None = None
    tolerant: bool = False
    max_values: int | None = None
    partial: bool = False
    descending: bool = False  # in all columns of the order; not together with `limit_by`

    @property
    def full_order(self) -> tuple[str, ...]:
        """The columns that the rows are ordered by, including the key."""
        return self.order + tuple(name for name in TABLE[self.row].key if name not in self.order)

    def split_by_value(self) -> list[Scan]:
        """Split into one scan per value, for stores that read them one after the other."""
        condition = self.limit_by_condition
        op: Op = "=" if condition.op == "in" else "starts"
        others = self.other_conditions
        return [
            msgspec.structs.replace(self, where=(Where(condition.column, op, value), *others), limit_by=None)
            for value in dict.fromkeys(condition.value)
        ]

    def with_values(self, values: Iterable[str]) -> Scan:
        """Return this scan for values that were found in the index."""
        where = (Where(self.limit_by_condition.column, "in", tuple(values)), *self.other_conditions)
        return msgspec.structs.replace(self, where=where, max_values=None)

    @property
    def other_conditions(self) -> tuple[Where, ...]:
        """The conditions that apply to every row, whichever value it belongs to."""
        if self.max_values is not None:
            return tuple(condition for condition in self.where if condition.column != self.limit_by)
        return tuple(condition for condition in self.where if condition is not self.limit_by_condition)

    @property
    def values_after(self) -> str | None:
        """The exclusive lower bound of the values of the `limit_by` column; None if they are not bounded."""
        return next((where.value for where in self.where if where.column == self.limit_by and where.op == ">"), None)

    @property
    def limit_by_condition(self) -> Where:
        """The condition that lists the values or prefixes of `limit_by`."""
        return next(where for where in self.where if where.column == self.limit_by and where.op in ("in", "starts"))


class UnreadableRow(msgspec.Struct, frozen=True):
    """A row of a tolerant scan that cannot be decoded: its sort key and the error."""

    sort_key: tuple[Any, ...]
    error: Corruption


SearchPosition = tuple[int, str]  # the creation instant and the id of an execution


class Search(msgspec.Struct, frozen=True):
    """A search of executions, newest first: by `created_at`, then by id, both descending, strictly after `after`.

    The rows are read in this order through an index, and no index serves the other conditions. So a search reads at
    most `budget` rows, whether they meet the conditions or not, and no call takes long. `kind` is the execution kind,
    which the payload row holds.
    """

    where: tuple[Where, ...] = ()
    kind: str | None = None
    after: SearchPosition | None = None
    limit: int = 50  # at least 1
    budget: int = 1000  # at least 1

    @property
    def bounds(self) -> tuple[Where, ...]:
        """The conditions that the index serves."""
        return tuple(where for where in self.where if where.column == "created_at")

    @property
    def filters(self) -> tuple[Where, ...]:
        """The conditions that every row is checked against."""
        return tuple(where for where in self.where if where.column != "created_at")


class FoundExecution(msgspec.Struct, frozen=True, gc=False):
    """An execution that a search has found, with its kind."""

    row: Execution
    kind: str

    @property
    def position(self) -> SearchPosition:
        return self.row.created_at, self.row.execution_id


class SearchPage(msgspec.Struct, frozen=True):
    """What a search has found, newest first, and the position to continue after; None if nothing is left to read.

    A page with fewer rows than the limit and a position is incomplete: the budget was spent.
    """

    found: list[FoundExecution]
    after: SearchPosition | None


class GroupedCount(msgspec.Struct, frozen=True):
    """A count of the rows whose indexed `column` is not null, grouped by columns of the execution they belong to.

    `execution_column` names the column that holds the execution's id. At most `limit` rows are read through the index,
    or at most `limit` for each of `values` if these are given.
    """

    row: type[msgspec.Struct]
    column: str
    group_by: tuple[str, ...]
    limit: int
    execution_column: str = "execution_id"
    values: tuple[Any, ...] | None = None


class FeedPage(msgspec.Struct, frozen=True, gc=False):
    """Events in order, and the position to continue from, which advances even if no event matched.

    `has_gap` says that events of this topic after the requested position have been trimmed. `diverged` says that the
    requested position is not in this feed, because its events were lost in a failover or a restore. The page then
    contains everything after the loss, and `position` may be lower than the requested one.
    """

    events: list[FeedEvent]
    position: int
    has_gap: bool = False
    diverged: bool = False
