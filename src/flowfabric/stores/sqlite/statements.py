"""The statements as text: pieces of `statements.sql`, filled from the catalogue once per shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import msgspec

from flowfabric.model.change import ColumnRef, Expected, FromNow, RowTemplate
from flowfabric.model.execution import Execution
from flowfabric.stores.catalog import TABLE, Table, index_columns
from flowfabric.stores.claim_result import PAYLOAD_COLUMNS, dense_columns, sparse_columns
from flowfabric.stores.codec import EVENT_COLUMNS, encode, refuse_queue
from flowfabric.stores.queries import Where, prefix_upper_bound
from flowfabric.stores.sqlite.claim_result import INPUT_COLUMN

StatementForRows = Callable[[int], str]  # the text of a statement that takes so many rows at once

_PIECES = re.split(r"^-- name: (\w+)\n", (files(__package__) / "statements.sql").read_text(), flags=re.MULTILINE)
_TEXT = {
    name: re.sub(r"^--.*\n", "", text, flags=re.MULTILINE).strip().removesuffix(";")
    for name, text in zip(_PIECES[1::2], _PIECES[2::2], strict=True)
}

EVENT_COLUMN_LIST = ", ".join(EVENT_COLUMNS)


def statement(name: str) -> str:
    """A statement that needs no filling."""
    return _TEXT[name]


def _filled(name: str, width: int, **parts: str) -> StatementForRows:
    text = _TEXT[name].format(rows="{rows}", **parts)
    row = f"({','.join('?' * width)})"

    @cache
    def with_rows(count: int) -> str:
        return text.format(rows=",".join([row] * count))

    return with_rows


def _same_key(table: Table, first: int) -> str:
    return " AND ".join(f"r.{name} = g.column{place}" for place, name in enumerate(table.key, first))


@cache
def failed_guards(row: type[msgspec.Struct], *, with_leases: bool) -> StatementForRows:
    """Which guards do not hold: rows of (number, key…, revision), with a lease (…, live, lease id, epoch), then now."""
    table = TABLE[row]
    revision = len(table.key) + 2
    shared = {"table": table.name, "same_key": _same_key(table, 2), "revision": str(revision)}
    if not with_leases:
        return _filled("refused_guards", revision, **shared, first_key=table.key[0])
    places = {"live": str(revision + 1), "lease_id": str(revision + 2), "lease_epoch": str(revision + 3)}
    return _filled("refused_leases", revision + 3, **shared, **places)


@lru_cache(64)
def failed_expectations(row: type[msgspec.Struct], like: Expected) -> StatementForRows:
    """Which roots do not look like this: rows of (number, key…, own columns…)."""
    table = TABLE[row]
    width = len(table.key) + 1
    looks = [f"r.{name} IS {_formed(value)}" for name, value in like.fields.items()]
    looks += [f"r.{name} IS g.column{place}" for place, name in enumerate(like.per_row, width + 1)]
    shared = {"table": table.name, "same_key": _same_key(table, 2), "first_key": table.key[0]}
    return _filled("refused_looks", width + len(like.per_row), **shared, looks=" AND ".join(looks))


@cache
def rows_by_key(row: type[msgspec.Struct]) -> StatementForRows:
    """Whole rows by their keys: rows of (number, key…). Not for rows with bytes, which JSON cannot tell."""
    table = TABLE[row]
    columns = ", ".join(f"r.{name}" for name in table.column_names)
    return _filled("keyed", len(table.key) + 1, columns=columns, table=table.name, same_key=_same_key(table, 2))


@lru_cache(256)
def rows_of_tables(shape: tuple[tuple[type[msgspec.Struct], int], ...]) -> str:
    """Rows of several tables in one step, as JSON: for each a table and how much of its key is given."""
    return f"SELECT {', '.join(_one_of_several(TABLE[row], length) for row, length in shape)}"


def _one_of_several(table: Table, length: int) -> str:
    name = "one_of_several" if length == len(table.key) else "some_of_several"
    return _TEXT[name].format(
        columns=", ".join(table.column_names),
        table=table.name,
        same_key=" AND ".join(f"{column} = ?" for column in table.key[:length]),
        order=", ".join(table.key),
    )


@cache
def insert(row: type[msgspec.Struct], *, upsert: bool) -> StatementForRows:
    """Write whole rows, columns in the order of the catalogue."""
    table = TABLE[row]
    names, parts = table.column_names, {"table": table.name, "columns": ", ".join(table.column_names)}
    if not upsert:
        return _filled("insert", len(names), **parts)
    others = [name for name in names if name not in table.key] or list(table.key)
    settings = ", ".join(f"{name} = excluded.{name}" for name in others)
    return _filled("put", len(names), **parts, key=", ".join(table.key), settings=settings)


@cache
def patch(row: type[msgspec.Struct], columns: tuple[str, ...], unless: str | None) -> StatementForRows:
    """Set some columns: rows of (value…, key…)."""
    table = TABLE[row]
    settings = ", ".join(f"{name} = g.column{place}" for place, name in enumerate(columns, 1))
    return _filled(
        "patch",
        len(columns) + len(table.key),
        table=table.name,
        settings=settings,
        same_key=_same_key(table, len(columns) + 1),
        unless="" if unless is None else f" AND r.{unless} IS NULL",
    )


@lru_cache(512)
def apply_template(form: RowTemplate) -> tuple[StatementForRows, ...]:
    """Tell the events and set the columns of a form: rows of (change id, now, key…) of its roots."""
    root = TABLE[form.row]
    settings = [f"{name} = {_formed(value)}" for name, value in form.fields.items()]
    width = len(root.key) + 2
    shared = {"root": root.name, "same_key": _same_key(root, 3)}
    told = {name: _formed(value) for name, value in form.event.items() if value is not None}
    return (
        _filled("form_tells", width, columns=", ".join(told), values=", ".join(told.values()), **shared),
        _filled("form_sets", width, settings=", ".join([*settings, "revision = g.column1"]), **shared),
    )


def _formed(value: Any) -> str:
    """A value of a form in the words of SQL that is still to be filled; it comes from a rule, never from a caller."""
    if type(value) is ColumnRef:
        return f"r.{value.column}"
    if type(value) is FromNow:
        return f"g.column2 + {value.offset}"
    if isinstance(value, str) and not isinstance(value, Enum):
        return "'" + value.replace("'", "''").replace("{", "{{").replace("}", "}}") + "'"
    return "NULL" if value is None else str(encode(value, refuse_queue))


@cache
def delete(row: type[msgspec.Struct], length: int) -> StatementForRows:
    """Drop all rows whose key begins like one of these."""
    table = TABLE[row]
    if length == 0:
        return lambda _: f"DELETE FROM {table.name} WHERE ? IS NOT NULL"  # there is always a row to fill in
    return _filled("delete", length, table=table.name, key=", ".join(table.key[:length]))


INSERT_EVENTS = _filled("tell", len(EVENT_COLUMNS) + 1, events=EVENT_COLUMN_LIST)
FAILED_RENEWALS = _filled("refused_renewals", 6)
INSERT_RENEWAL_EVENTS = _filled("tell_renewals", 2)
RENEW = _filled("renew", 3)


@cache
def queue_heads(lines: int) -> str:
    """The first rows of so many lines: (line, now) for each, then how many rows."""
    # SQLite merges the branches of a compound by its order, row by row: each line is read only as far as needed.
    return _TEXT["heads"].format(lines=" UNION ALL ".join([_TEXT["line_heads"]] * lines))


@lru_cache(16)
def claim_rows(becomes: tuple[tuple[str, Any], ...]) -> StatementForRows:
    """Claim rows, all of which get these fields; values come from a rule, never from a caller."""
    return _filled("take", 4, becomes="".join(f"{name} = {_formed(value)}, " for name, value in becomes))


@lru_cache(16)
def claimed_rows(becomes: tuple[str, ...]) -> StatementForRows:
    """What there is to hear of claimed rows."""
    return _filled(
        "taken",
        1,
        columns=", ".join(f"r.{name}" for name in dense_columns(becomes)),
        rare=", ".join(f"r.{name}" for name in sparse_columns(becomes)),
        payload_columns=", ".join(
            f"length(p.{name})" if name == INPUT_COLUMN else f"p.{name}" for name in PAYLOAD_COLUMNS
        ),
    )


INSERT_CLAIM_EVENTS = _filled("tell_taken", 1)


def select_rows(row: type[msgspec.Struct], where: str, order: Iterable[str] = (), *, limit: bool = False) -> str:
    """Rows of a table that meet a condition."""
    return _rows(row, where, tuple(order), limit)


@lru_cache(512)
def _rows(row: type[msgspec.Struct], where: str, order: tuple[str, ...], limit: bool) -> str:
    table = TABLE[row]
    return _TEXT["rows"].format(
        columns=", ".join(table.column_names),
        table=table.name,
        where=f" WHERE {where}" if where else "",
        order=f" ORDER BY {', '.join(order)}" if order else "",
        limit=" LIMIT ?" if limit else "",
    )


@lru_cache(64)
def distinct_values(row: type[msgspec.Struct], column: str, beyond: str) -> str:
    """The values of an indexed column between two bounds; `beyond` compares them with the lower one."""
    return _TEXT["values"].format(table=TABLE[row].name, column=column, beyond=beyond)


@lru_cache(512)
def next_instant(row: type[msgspec.Struct], column: str, where: str) -> str:
    """The smallest value of a column among the rows that meet a condition."""
    return _TEXT["next_instant"].format(table=TABLE[row].name, column=column, where=f" WHERE {where}")


@lru_cache(64)
def count_grouped(row: type[msgspec.Struct], column: str, execution: str, by: tuple[str, ...], where: str) -> str:
    """How many rows that meet a condition, by columns of their executions."""
    return _TEXT["tally" if row is Execution else "tally_of"].format(
        table=TABLE[row].name,
        execution=execution,
        where=where,
        order=", ".join(index_columns(row, column)),
        by=", ".join(by),
    )


@cache
def select_events(name: str, topic: str) -> str:
    """The feed or the history of one topic."""
    return _TEXT[name].format(events=EVENT_COLUMN_LIST, topic=topic)


def condition(where: Where, encode: Callable[[Any], Any]) -> tuple[str, list[Any]]:
    """One condition as text and what fills it."""
    column = where.column
    match where.op:
        case "set":
            return f"{column} IS NOT NULL", []
        case "unset":
            return f"{column} IS NULL", []
        case "in":
            choices = [encode(choice) for choice in where.value]
            return f"{column} IN ({','.join('?' * len(choices))})", choices
        case "starts":
            end = prefix_upper_bound(where.value)
            if end is None:
                return f"{column} >= ?", [where.value]
            return f"{column} >= ? AND {column} < ?", [where.value, end]
        case _:
            return f"{column} {where.op} ?", [encode(where.value)]
