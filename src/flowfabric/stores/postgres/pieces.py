"""The pieces that a commit statement is made of: each knows its shape, and the words for it.

A piece holds a fixed set of columns; the cells come as one array a column, so that the same words serve any number of
rows. Pieces are compared by shape: two batches with equal pieces share one prepared statement. The order in which a
piece asks for its parameters is the order in which `batch.py` hands over the arrays.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from flowfabric.model.event import Event
from flowfabric.rules.change import LeaseWant
from flowfabric.stores.postgres.sql import column_type, matched, quoted
from flowfabric.stores.rows import TABLE

Row = type[msgspec.Struct]

# What a column of a written row holds: a value, an offset to add to the clock, or some of each.
Cell = Literal["value", "offset", "either"]
Lock = Literal["update", "share", "none"]

EVENT_TYPES = {
    name: "bigint" if name in ("lease_epoch", "attempt_index") else "text" for name in Event.__struct_fields__
}


_TYPES = {table.row: {column.name: column_type(column) for column in table.columns} for table in TABLE.values()}


class Parameters:
    """Numbers the parameters of a statement in the order in which they are asked for."""

    def __init__(self) -> None:
        self._count = 0

    def one(self, kind: str) -> str:
        """The next parameter."""
        self._count += 1
        return f"${self._count}::{kind}"

    def rows(self, name: str, columns: list[tuple[str, str]]) -> str:
        """The next parameters, an array each, as a table with these columns and types."""
        arrays = ", ".join(self.one(f"{kind}[]") for _, kind in columns)
        return f"unnest({arrays}) as {name} ({quoted(column for column, _ in columns)})"


class Judged(NamedTuple):
    """Guards of one table: each row is found by its key, locked, and compared with what the change had seen."""

    row: Row
    lock: Lock  # "none" is for rows that must be absent: one that is there refuses the change, locked or not
    leased: bool

    def words(self, name: str, before: str | None, parameters: Parameters) -> str:
        """A table expression with `no` and `holds` a guard; of a lease's end only what the clock has still to judge."""
        table, kind = TABLE[self.row], _TYPES[self.row]
        key = [(column, kind[column]) for column in table.key]
        if self.lock == "none":
            given = parameters.rows("g", [("no", "int"), *key])
            found = f"select 1 from {table.name} t where {matched(table.key, 't', 'g')}"
            return f"{name} as materialized (select g.no, not exists ({found}) as holds from {given})"
        columns = [("no", "int"), *key, ("revision", "bigint")]
        seen, holds, ends = ["revision"], "g.revision = t.revision", ""
        if self.leased:
            columns += [("want", "smallint"), ("lease_id", "text"), ("lease_epoch", "bigint")]
            seen += ["lease_id", "lease_epoch", "lease_expires_at"]
            holds += " and (g.want is null or (g.lease_id = t.lease_id and g.lease_epoch = t.lease_epoch))"
            ends = ", g.want, t.lease_expires_at as ends_at"
        given = parameters.rows("g", columns)
        after = f" and (select count(*) from {before}) >= 0" if before else ""
        return (
            f"{name} as materialized (select g.no, coalesce({holds}, false) as holds{ends} from {given}"
            f" left join lateral (select {quoted(seen)} from {table.name} r"
            f" where {matched(table.key, 'r', 'g')}{after} for {self.lock}) t on true)"
        )

    def verdict(self, name: str) -> str:
        """`no` and `ok` a guard, once the clock has been read."""
        if not self.leased or self.lock == "none":
            return f"select no, holds as ok from {name}"
        live = f"g.want = {LeaseWant.LIVE.value}"
        return (
            f"select g.no, g.holds and (g.want is null or coalesce((g.ends_at > c.now) = ({live}), false)) as ok"
            f" from {name} g, clock c"
        )


class Timed(NamedTuple):
    """Changes with a time before or after which they do not hold, and those without any guard."""

    def words(self, name: str, before: str | None, parameters: Parameters) -> str:
        """A table expression with the two bounds of each change."""
        given = parameters.rows("g", [("no", "int"), ("not_before", "bigint"), ("not_after", "bigint")])
        return f"{name} as materialized (select * from {given})"

    def verdict(self, name: str) -> str:
        """`no` and `ok` a change."""
        return (
            f"select g.no, c.now >= coalesce(g.not_before, c.now) and c.now <= coalesce(g.not_after, c.now) as ok"
            f" from {name} g, clock c"
        )


YES = "(select yes from verdict)[x.no]"
NOW = "(select now from verdict)"


class Patched(NamedTuple):
    """Rows that get new values in the same columns."""

    row: Row
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    unless: str | None

    def words(self, parameters: Parameters) -> str:
        table, kind = TABLE[self.row], _TYPES[self.row]
        # Columns of the given rows are numbered, since a patch may set a column that is also part of the key.
        given = [("no", "int"), *((f"k{i}", kind[name]) for i, name in enumerate(table.key))]
        sets = []
        for i, (name, cell) in enumerate(zip(self.columns, self.cells, strict=True)):
            given.append((f"c{i}", kind[name]))
            if cell == "either":
                given.append((f"o{i}", "boolean"))
            sets.append(f'"{name}" = {_cell(cell, f"x.c{i}", f"x.o{i}")}')
        rows = parameters.rows("x", given)
        keys = " and ".join(f't."{name}" = x.k{i}' for i, name in enumerate(table.key))
        unless = f' and t."{self.unless}" is null' if self.unless else ""
        return f"update {table.name} t set {', '.join(sets)} from {rows} where {keys}{unless} and {YES}"


class Inserted(NamedTuple):
    """New rows, or (`put`) rows that replace what is there; columns that are unset in all of them are left out."""

    row: Row
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    put: bool

    def words(self, parameters: Parameters) -> str:
        table, kind = TABLE[self.row], _TYPES[self.row]
        given = [("no", "int")]
        for name, cell in zip(self.columns, self.cells, strict=True):
            given.append((name, kind[name]))
            if cell == "either":
                given.append((f"{name} is an offset", "boolean"))
        rows = parameters.rows("x", given)
        values = ", ".join(
            _cell(cell, f'x."{name}"', f'x."{name} is an offset"')
            for name, cell in zip(self.columns, self.cells, strict=True)
        )
        into = f"insert into {table.name} ({quoted(self.columns)}) select {values} from {rows} where {YES}"
        if not self.put:
            return into
        others = [name for name in table.column_names if name not in table.key]
        sets = ", ".join(f'"{name}" = excluded."{name}"' for name in others)
        then = f"update set {sets}" if others else "nothing"
        return f"{into} on conflict ({quoted(table.key)}) do {then}"


class Deleted(NamedTuple):
    """All rows whose keys begin like the given ones."""

    row: Row
    width: int

    def words(self, parameters: Parameters) -> str:
        table, kind = TABLE[self.row], _TYPES[self.row]
        start = table.key[: self.width]
        rows = parameters.rows("x", [("no", "int"), *((name, kind[name]) for name in start)])
        return f"delete from {table.name} t using {rows} where {matched(start, 't', 'x')} and {YES}"


class Told(NamedTuple):
    """Events, with the columns that any of them uses."""

    columns: tuple[str, ...]

    def words(self, parameters: Parameters) -> str:
        """Two table expressions: the batch, numbered only when all locks are held, and its events."""
        given = [("no", "int"), ("ord", "int"), *((name, EVENT_TYPES[name]) for name in self.columns)]
        rows = parameters.rows("x", given)
        return (
            f"told as materialized (select x.* from {rows} where {YES}),"
            f" batch as (insert into ff_batch (at) select {NOW} where exists (select 1 from told) returning batch_id),"
            f" events as (insert into ff_event (batch_id, ord, {quoted(self.columns)})"
            f" select b.batch_id, x.ord, {quoted(self.columns, 'x.')} from batch b, told x)"
        )


def _cell(cell: Cell, value: str, is_offset: str) -> str:
    if cell == "value":
        return value
    if cell == "offset":
        return f"{NOW} + {value}"
    return f"case when {is_offset} then {NOW} + {value} else {value} end"


Guards = Judged | Timed
Writes = Patched | Inserted | Deleted
