"""The SQL statements of this store: templates of `statements.sql`, filled from the catalog once per shape."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any

import msgspec

from flowfabric.model.change import ColumnRef, Expected, RowTemplate
from flowfabric.model.execution import Execution
from flowfabric.model.instant import FromNow
from flowfabric.stores.catalog import TABLE, Table, index_columns
from flowfabric.stores.claim_result import PAYLOAD_COLUMNS, dense_columns, sparse_columns
from flowfabric.stores.codec import EVENT_COLUMNS, encode, refuse_queue
from flowfabric.stores.queries import Where, prefix_upper_bound
from flowfabric.stores.sqlite.claim_result import INPUT_COLUMN

StatementForRows = Callable[[int], str]  # returns the statement for this number of rows

_PARTS = re.split(r"^-- name: (\w+)\n", (files(__package__) / "statements.sql").read_text(), flags=re.MULTILINE)
_TEXT = {
    name: re.sub(r"^--.*\n", "", text, flags=re.MULTILINE).strip().removesuffix(";")
    for name, text in zip(_PARTS[1::2], _PARTS[2::2], strict=True)
}

EVENT_COLUMN_LIST = ", ".join(EVENT_COLUMNS)


def statement(name: str) -> str:
    """Return a statement that has no placeholders to fill."""
    return _TEXT[name]


def _for_rows(name: str, width: int, **parts: str) -> StatementForRows:
    text = _TEXT[name].format(rows="{rows}", **parts)
    row = f"({','.join('?' * width)})"

    @cache
    def with_rows(count: int) -> str:
        return text.format(rows=",".join([row] * count))

    return with_rows


def _same_key(table: Table, first: int) -> str:
    return " AND ".join(f"r.{name} = g.column{ordinal}" for ordinal, name in enumerate(table.key, first))


@cache
def failed_guards(row: type[msgspec.Struct], *, with_leases: bool) -> StatementForRows:
    """Select failed guards: rows of (number, key…, revision), with leases (…, live, lease id, epoch), then now."""
    table = TABLE[row]
    revision = len(table.key) + 2
    shared = {"table": table.name, "same_key": _same_key(table, 2), "revision": str(revision)}
    if not with_leases:
        return _for_rows("failed_guards", revision, **shared, first_key=table.key[0])
    ordinals = {"live": str(revision + 1), "lease_id": str(revision + 2), "lease_epoch": str(revision + 3)}
    return _for_rows("failed_lease_guards", revision + 3, **shared, **ordinals)


@lru_cache(64)
def failed_expectations(row: type[msgspec.Struct], expected: Expected) -> StatementForRows:
    """Select the roots that differ from their expected values: rows of (number, key…, per-row value…)."""
    table = TABLE[row]
    width = len(table.key) + 1
    equal = [f"r.{name} IS {_value_sql(value)}" for name, value in expected.fields.items()]
    equal += [f"r.{name} IS g.column{ordinal}" for ordinal, name in enumerate(expected.per_row, width + 1)]
    shared = {"table": table.name, "same_key": _same_key(table, 2), "first_key": table.key[0]}
    return _for_rows("failed_expectations", width + len(expected.per_row), **shared, expectations=" AND ".join(equal))


@cache
def rows_by_key(row: type[msgspec.Struct]) -> StatementForRows:
    """Select rows by key: rows of (number, key…). Not for tables with blobs, which JSON cannot represent."""
    table = TABLE[row]
    columns = ", ".join(f"r.{name}" for name in table.column_names)
    return _for_rows("rows_by_key", len(table.key) + 1, columns=columns, table=table.name, same_key=_same_key(table, 2))


@lru_cache(256)
def rows_of_tables(shape: tuple[tuple[type[msgspec.Struct], int], ...]) -> str:
    """Select rows of several tables in one step, as JSON; `shape` has the table and the key length of each read."""
    return f"SELECT {', '.join(_rows_of_table(TABLE[row], length) for row, length in shape)}"


def _rows_of_table(table: Table, length: int) -> str:
    name = "one_row_of_table" if length == len(table.key) else "rows_of_table_by_prefix"
    return _TEXT[name].format(
        columns=", ".join(table.column_names),
        table=table.name,
        same_key=" AND ".join(f"{column} = ?" for column in table.key[:length]),
        order=", ".join(table.key),
    )


@cache
def insert(row: type[msgspec.Struct], *, upsert: bool) -> StatementForRows:
    """Insert or upsert rows, with the columns in the order of the catalog."""
    table = TABLE[row]
    names, parts = table.column_names, {"table": table.name, "columns": ", ".join(table.column_names)}
    if not upsert:
        return _for_rows("insert", len(names), **parts)
    others = [name for name in names if name not in table.key] or list(table.key)
    settings = ", ".join(f"{name} = excluded.{name}" for name in others)
    return _for_rows("upsert", len(names), **parts, key=", ".join(table.key), settings=settings)


@cache
def update(row: type[msgspec.Struct], columns: tuple[str, ...], unless_set: str | None) -> StatementForRows:
    """Set some columns: rows of (value…, key…)."""
    table = TABLE[row]
    settings = ", ".join(f"{name} = g.column{ordinal}" for ordinal, name in enumerate(columns, 1))
    return _for_rows(
        "update",
        len(columns) + len(table.key),
        table=table.name,
        settings=settings,
        same_key=_same_key(table, len(columns) + 1),
        unless_set="" if unless_set is None else f" AND r.{unless_set} IS NULL",
    )


@lru_cache(512)
def apply_template(template: RowTemplate) -> tuple[StatementForRows, ...]:
    """Insert the events and set the columns of a template: rows of (change id, now, key…) of its roots."""
    root = TABLE[template.row]
    settings = [f"{name} = {_value_sql(value)}" for name, value in template.fields.items()]
    width = len(root.key) + 2
    shared = {"root": root.name, "same_key": _same_key(root, 3)}
    event = {name: _value_sql(value) for name, value in template.event.items() if value is not None}
    return (
        _for_rows(
            "insert_template_events", width, columns=", ".join(event), values=", ".join(event.values()), **shared
        ),
        _for_rows("update_by_template", width, settings=", ".join([*settings, "revision = g.column1"]), **shared),
    )


def _value_sql(value: Any) -> str:
    """Return a template's value as SQL, with braces escaped. It comes from a rule, never from a caller."""
    if type(value) is ColumnRef:
        return f"r.{value.column}"
    if type(value) is FromNow:
        return f"g.column2 + {value.offset}"
    if isinstance(value, str) and not isinstance(value, Enum):
        return "'" + value.replace("'", "''").replace("{", "{{").replace("}", "}}") + "'"
    return "NULL" if value is None else str(encode(value, refuse_queue))


@cache
def delete(row: type[msgspec.Struct], length: int) -> StatementForRows:
    """Delete all rows with one of these key prefixes."""
    table = TABLE[row]
    if length == 0:
        return lambda _: f"DELETE FROM {table.name} WHERE ? IS NOT NULL"  # the caller always supplies one value
    return _for_rows("delete", length, table=table.name, key=", ".join(table.key[:length]))


INSERT_EVENTS = _for_rows("insert_events", len(EVENT_COLUMNS) + 1, events=EVENT_COLUMN_LIST)
FAILED_RENEWALS = _for_rows("failed_renewals", 6)
INSERT_RENEWAL_EVENTS = _for_rows("insert_renewal_events", 2)
RENEW = _for_rows("renew_leases", 3)


@cache
def queue_heads(count: int) -> str:
    """Select the first rows of `count` queues: (queue id, now) for each, then the limit."""
    # SQLite merges the branches of an ordered compound row by row: each queue is read only as far as needed.
    return _TEXT["queue_heads"].format(queues=" UNION ALL ".join([_TEXT["heads_of_one_queue"]] * count))


@lru_cache(16)
def claim_rows(shared_fields: tuple[tuple[str, Any], ...]) -> StatementForRows:
    """Claim rows, all of which get these fields; the values come from a rule, never from a caller."""
    assignments = "".join(f"{name} = {_value_sql(value)}, " for name, value in shared_fields)
    return _for_rows("claim_rows", 4, shared_fields=assignments)


@lru_cache(16)
def claimed_rows(shared_fields: tuple[str, ...]) -> StatementForRows:
    """Select claimed rows, without the columns that the claim itself has supplied."""
    return _for_rows(
        "claimed_rows",
        1,
        columns=", ".join(f"r.{name}" for name in dense_columns(shared_fields)),
        sparse=", ".join(f"r.{name}" for name in sparse_columns(shared_fields)),
        payload_columns=", ".join(
            f"length(p.{name})" if name == INPUT_COLUMN else f"p.{name}" for name in PAYLOAD_COLUMNS
        ),
    )


INSERT_CLAIM_EVENTS = _for_rows("insert_claim_events", 1)


def select_rows(row: type[msgspec.Struct], where: str, order: Iterable[str] = (), *, limit: bool = False) -> str:
    """Select the rows of a table that meet a condition."""
    return _rows(row, where, tuple(order), limit)


@lru_cache(512)
def _rows(row: type[msgspec.Struct], where: str, order: tuple[str, ...], limit: bool) -> str:
    table = TABLE[row]
    return _TEXT["select_rows"].format(
        columns=", ".join(table.column_names),
        table=table.name,
        where=f" WHERE {where}" if where else "",
        order=f" ORDER BY {', '.join(order)}" if order else "",
        limit=" LIMIT ?" if limit else "",
    )


@lru_cache(64)
def distinct_values(row: type[msgspec.Struct], column: str, lower_op: str) -> str:
    """Select the values of an indexed column between two bounds; `lower_op` compares them with the lower one."""
    return _TEXT["distinct_values"].format(table=TABLE[row].name, column=column, lower_op=lower_op)


@lru_cache(512)
def next_instant(row: type[msgspec.Struct], column: str, where: str) -> str:
    """Select the smallest value of a column among the rows that meet a condition."""
    return _TEXT["next_instant"].format(table=TABLE[row].name, column=column, where=f" WHERE {where}")


@lru_cache(64)
def count_grouped(
    row: type[msgspec.Struct], column: str, execution_column: str, group_by: tuple[str, ...], where: str
) -> str:
    """Count the rows that meet a condition, by columns of their executions."""
    return _TEXT["count_executions" if row is Execution else "count_by_execution"].format(
        table=TABLE[row].name,
        execution_column=execution_column,
        where=where,
        order=", ".join(index_columns(row, column)),
        group_by=", ".join(group_by),
    )


@cache
def select_events(name: str, topic: str) -> str:
    """Return one of the event statements for a topic."""
    return _TEXT[name].format(events=EVENT_COLUMN_LIST, topic=topic)


def condition(where: Where, encode: Callable[[Any], Any]) -> tuple[str, list[Any]]:
    """Return a condition as SQL, and its arguments."""
    column = where.column
    match where.op:
        case "set":
            return f"{column} IS NOT NULL", []
        case "unset":
            return f"{column} IS NULL", []
        case "in":
            values = [encode(value) for value in where.value]
            return f"{column} IN ({','.join('?' * len(values))})", values
        case "starts":
            end = prefix_upper_bound(where.value)
            if end is None:
                return f"{column} >= ?", [where.value]
            return f"{column} >= ? AND {column} < ?", [where.value, end]
        case _:
            return f"{column} {where.op} ?", [encode(where.value)]
