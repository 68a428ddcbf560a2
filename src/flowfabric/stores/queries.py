"""queries: split from flowfabric.stores.base."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from flowfabric.errors import Corruption
from flowfabric.model.event import FeedEvent
from flowfabric.stores.catalog import TABLE


class Read(msgspec.Struct, frozen=True, gc=False):
    """Rows to load: those whose key begins like this, in key order."""

    row: type[msgspec.Struct]
    key: tuple[Any, ...]


class Loaded(msgspec.Struct, frozen=True, gc=False):
    """The rows of each want, and the store's time."""

    now: int
    rows: list[list[Any]]


class Due(msgspec.Struct, frozen=True, gc=False):
    """Rows whose instant has come, earliest first, and the next instant to come (None: there is none)."""

    now: int
    rows: list[Any]
    next_at: int | None


Op = Literal["=", "<", "<=", ">", ">=", "in", "set", "unset", "starts"]


class Where(msgspec.Struct, frozen=True, gc=False):
    """One condition on one column; `set` and `unset` ask for a value and for none."""

    column: str
    op: Op
    value: Any = None


def prefix_upper_bound(prefix: str) -> str | None:
    """The first text after all that begin like this; None when there is none."""
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return None
    last = ord(kept[-1]) + 1
    return kept[:-1] + chr(0xE000 if last == 0xD800 else last)  # the half characters between are no text


class Scan(msgspec.Struct, frozen=True):
    """A list: rows of one table that meet all conditions, ordered, strictly after a place.

    `each` names a column that an `in` condition gives values for, or a `starts` condition several prefixes (none
    of them empty): the limit then holds for each of these, so that the first rows of many lines or ranges come in one
    trip. With `values`, a `starts` condition with one prefix stands for the values of an indexed text column that begin
    with it, in order and at most so many: the limit holds for each value. A `>` condition on that column skips values.

    A row that cannot be read fails the list with `Corruption`, unless it is `tolerant`: then an `Unreadable` stands in
    its place.

    A `partial` list of the first rows of some queues may leave out rows where it would cost too much to find them. A
    later list finds them: Postgres says when (its `dead_entries.py`), and the other stores leave out nothing.
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

    @property
    def full_order(self) -> tuple[str, ...]:
        """The columns that the rows are ordered by, the key included."""
        return self.order + tuple(name for name in TABLE[self.row].key if name not in self.order)

    def split_by_value(self) -> list[Scan]:
        """The same as one list for each value, for stores that read them one after the other."""
        named = self.limit_by_condition
        op: Op = "=" if named.op == "in" else "starts"
        return [
            msgspec.structs.replace(self, where=(Where(named.column, op, value), *self.other_conditions), limit_by=None)
            for value in dict.fromkeys(named.value)
        ]

    def with_values(self, values: Iterable[str]) -> Scan:
        """The same list for these values, which were found in the index."""
        where = (Where(self.limit_by_condition.column, "in", tuple(values)), *self.other_conditions)
        return msgspec.structs.replace(self, where=where, max_values=None)

    @property
    def other_conditions(self) -> tuple[Where, ...]:
        """The conditions that every row has to meet, whichever value it is listed for."""
        if self.max_values is not None:
            return tuple(one for one in self.where if one.column != self.limit_by)
        return tuple(one for one in self.where if one is not self.limit_by_condition)

    @property
    def values_after(self) -> str | None:
        """The value behind which the values of the `each` column begin; None for the first."""
        return next((one.value for one in self.where if one.column == self.limit_by and one.op == ">"), None)

    @property
    def limit_by_condition(self) -> Where:
        """The condition that `each` is about."""
        return next(one for one in self.where if one.column == self.limit_by and one.op in ("in", "starts"))


class UnreadableRow(msgspec.Struct, frozen=True):
    """A row of a tolerant list that cannot be read: its place in the order of the list, and what is wrong with it."""

    sort_key: tuple[Any, ...]
    error: Corruption


class GroupedCount(msgspec.Struct, frozen=True):
    """A count: rows that are set in an indexed column, by some columns of the execution that each belongs to.

    `execution` names the column that says which execution that is. The rows are looked at by the index, no more than
    `limit` of them, or of each value in `each` when there are such.
    """

    row: type[msgspec.Struct]
    column: str
    group_by: tuple[str, ...]
    limit: int
    execution_column: str = "execution_id"
    values: tuple[Any, ...] | None = None


class FeedPage(msgspec.Struct, frozen=True, gc=False):
    """Events in order, and how far the feed was read: the place to go on from, events or not.

    `lost` says that events of this topic after the place that was asked for are no longer kept. `diverged` says that
    the place itself is not in this feed: what was read up to it was lost, as by a failover or a restore. The page goes
    on with everything that came after the loss, and `position` may lie before the place that was asked for.
    """

    events: list[FeedEvent]
    position: int
    has_gap: bool = False
    diverged: bool = False
