"""The SQL statements of this store: templates of `statements.sql`, filled from the catalog once per shape."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache, lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from flowfabric.model.change import ColumnRef, Condition, Expected, IfSet, Parameter, Plus, RowTemplate
from flowfabric.model.execution import Execution
from flowfabric.model.instant import FromNow
from flowfabric.stores.catalog import TABLE, Table, index_columns
from flowfabric.stores.claim_result import PAYLOAD_COLUMNS, claim_columns
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


def _for_rows(name: str, width: int, leading: int = 0, /, **parts: str) -> StatementForRows:
    """`leading` is the number of parameters before those of the rows."""
    text = _TEXT[name].format(rows="{rows}", **parts)
    row = f"({','.join('?' * width)})"

    @cache
    def with_rows(count: int) -> str:
        rows = ",".join([row] * count)
        if leading:  # numbered, because a statement need not contain every leading parameter
            numbers = itertools.count(leading + 1)
            rows = re.sub(r"\?", lambda _: f"?{next(numbers)}", rows)
        return text.format(rows=rows)

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
        same_key=" AND ".join(f"{column} = ?" for column in table.key[:length]) or "TRUE",
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


TemplateKey = Literal["key", "rowid"]  # how the rows of a template are found


def _found_by(template: RowTemplate, key: TemplateKey) -> tuple[dict[str, str], int]:
    """Return the parts of a statement that find the rows, and the number of their key's columns."""
    table = TABLE[template.row]
    if key == "rowid":
        return {"table": table.name, "same_key": "r.rowid = g.column1"}, 1
    return {"table": table.name, "same_key": _same_key(table, 1)}, len(table.key)


def _parameters(first: int, names: Iterable[str], shared: Iterable[str] = ()) -> dict[str, str]:
    """Return the SQL of template parameters: columns of the rows from the first, and those for all after the time."""
    columns = {name: f"g.column{ordinal}" for ordinal, name in enumerate(names, first)}
    return columns | {name: f"?{ordinal}" for ordinal, name in enumerate(shared, 2)}


@lru_cache(512)
def update_by_template(
    template: RowTemplate, key: TemplateKey, parameters: tuple[str, ...], shared: tuple[str, ...] = ()
) -> StatementForRows:
    """Set the columns of a template: rows of (key…, parameter…), after the time and the shared parameters."""
    parts, width = _found_by(template, key)
    sql = _parameters(width + 1, parameters, shared)
    fields = template.fields | ({"revision": Parameter("revision")} if "revision" in parameters else {})
    settings = ", ".join(f"{name} = {_value_sql(value, sql)}" for name, value in fields.items())
    return _for_rows("update_by_template", width + len(parameters), 1 + len(shared), settings=settings, **parts)


@lru_cache(512)
def insert_template_events(template: RowTemplate, key: TemplateKey) -> StatementForRows:
    """Insert the events of rows that a template was applied to: rows of (key…), after the time."""
    parts, width = _found_by(template, key)
    event = {name: _value_sql(value) for name, value in template.event.items() if value is not None}
    columns, values = ", ".join(event), ", ".join(event.values())
    return _for_rows("insert_template_events", width, 1, columns=columns, values=values, **parts)


@lru_cache(64)
def failed_conditions(template: RowTemplate, parameters: tuple[str, ...]) -> StatementForRows:
    """Select the rows that do not meet a template's condition: rows of (key…, parameter…, number), after the time."""
    parts, width = _found_by(template, "key")
    condition = template.condition or Condition({})
    sql = _parameters(width + 1, parameters)
    met = [f"r.{name} IS {_value_sql(value, sql)}" for name, value in condition.equal.items()]
    met += [f"(r.{name} > ?1) IS 1" for name in condition.future]
    met += [f"r.{name} IS NOT NULL" for name in TABLE[template.row].key[:1]]
    width += len(parameters) + 1
    return _for_rows("failed_conditions", width, 1, number=str(width), conditions=" AND ".join(met), **parts)


def _value_sql(value: Any, parameters: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a template's value as SQL, with braces escaped. Constants come from a rule, never from a caller."""
    kind = type(value)
    if kind is ColumnRef:
        return f"r.{value.column}"
    if kind is FromNow:
        return f"?1 + {value.offset}" if value.offset else "?1"
    if kind is Parameter:
        return parameters[value.name]
    if kind is Plus:
        return f"{_value_sql(value.left, parameters)} + {_value_sql(value.right, parameters)}"
    if kind is IfSet:
        then, otherwise = _value_sql(value.then, parameters), _value_sql(value.otherwise, parameters)
        return f"iif(r.{value.column} IS NULL, {otherwise}, {then})"
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


@cache
def queue_heads(count: int) -> str:
    """Select the first rows of `count` queues: (queue id, now) for each, then the limit."""
    # SQLite merges the branches of an ordered compound row by row: each queue is read only as far as needed.
    return _TEXT["queue_heads"].format(queues=" UNION ALL ".join([_TEXT["heads_of_one_queue"]] * count))


@lru_cache(16)
def claimed_rows(template: RowTemplate) -> StatementForRows:
    """Select claimed rows, without the columns that the claim itself has supplied."""
    columns = claim_columns(template)
    return _for_rows(
        "claimed_rows",
        1,
        columns=", ".join(f"r.{name}" for name in columns.dense),
        sparse=", ".join(f"r.{name}" for name in columns.sparse),
        payload_columns=", ".join(
            f"length(p.{name})" if name == INPUT_COLUMN else f"p.{name}" for name in PAYLOAD_COLUMNS
        ),
    )


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


def search(bounds: str, filters: str) -> str:
    """Select the executions of a search with their kinds; arguments: the bounds', the budget, the filters', the limit.

    Each of the two is a condition, or empty.
    """
    columns = ", ".join(f"r.{name}" for name in TABLE[Execution].column_names)
    return _TEXT["search"].format(
        columns=columns,
        bounds=f"WHERE {bounds}" if bounds else "",
        filters=f"WHERE {filters}" if filters else "",
    )


def search_end(bounds: str) -> str:
    """Select the position of the last row that the budget of a search allows; arguments: the bounds', the budget."""
    return _TEXT["search_end"].format(bounds=f"WHERE {bounds}" if bounds else "")


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
        case "contains":
            return f"instr({column}, ?) > 0", [where.value]
        case _:
            return f"{column} {where.op} ?", [encode(where.value)]
