"""SQL helpers of this store: named statements from its `.sql` files, column types, and parameter numbering."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from flowfabric.model.execution import QueueKey
from flowfabric.model.limits.budget import Budget, BudgetDimension
from flowfabric.model.limits.quota import QuotaPolicy
from flowfabric.stores.catalog import Column, Table

RowType = type[msgspec.Struct]

# Rows that thousands of executions update: beside an old snapshot each has thousands of dead versions.
HOT_ROWS: frozenset[RowType] = frozenset((Budget, BudgetDimension, QuotaPolicy))

_TYPES: dict[type[Any], str] = {
    int: "bigint",
    str: "text",
    bytes: "bytea",
    bool: "boolean",
    float: "double precision",
    QueueKey: "bigint",
}
_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)")


def column_type(column: Column) -> str:
    """Return the database type of a column."""
    return "smallint" if column.is_enum else _TYPES[column.kind]


def column_list(names: Iterable[str], prefix: str = "") -> str:
    """Return a list of quoted column names; some names are SQL keywords."""
    return ", ".join(f'{prefix}"{name}"' for name in names)


def columns_equal(names: Iterable[str], left: str, right: str) -> str:
    """Return the condition that two relations are equal in these columns."""
    return " and ".join(f'{left}."{name}" = {right}."{name}"' for name in names)


def row_sql(columns: str, table: Table, key: Sequence[str], condition: str = "") -> str:
    """Return a query for the row `r` with this key; for a hot row it reads a bounded number of dead versions.

    New versions of a row go to the end of the table, and equal index entries are in the order of the table. So a
    backward scan finds the live version first, whereas a search by key begins with the oldest one. A range and an order
    make the server scan backward; with equality it drops the order.
    """
    if table.row not in HOT_ROWS:
        equal = " and ".join(f'r."{name}" = {value}' for name, value in zip(table.key, key, strict=True))
        return f"select {columns} from {table.name} r where {equal}{condition}"
    own, given = column_list(table.key, "r."), ", ".join(key)
    return (
        f"select {columns} from {table.name} r where ({own}) >= ({given}) and ({own}) <= ({given}){condition}"
        f" order by {_descending(table)} limit 1"
    )


def hot_rows_sql(table: Table, prefix: Sequence[str]) -> str:
    """Return a query for all rows whose keys begin with `prefix`, by backward scans as in `row_sql`."""
    start, given = column_list(table.key[: len(prefix)], "r."), ", ".join(prefix)
    own, found = column_list(table.key, "r."), column_list(table.key, "(v.each).")
    last = f"select r from {table.name} r where ({start}) >= ({given})"
    order = f"order by {_descending(table)} limit 1"
    exists = f'(v.each)."{table.key[0]}" is not null'
    return (
        f"with recursive v(each) as (({last} and ({start}) <= ({given}) {order})"
        f" union all select ({last} and ({own}) < ({found}) {order}) from v where {exists})"
        f" select (v.each).* from v where {exists} order by {found}"
    )


def _descending(table: Table) -> str:
    return ", ".join(f'r."{name}" desc' for name in table.key)


def table_column_list(table: Table, prefix: str = "") -> str:
    """Return all columns of a table, in the order of the catalog."""
    return column_list(table.column_names, prefix)


@cache
def load_statements(file: str) -> dict[str, str]:
    """Return the statements of a file by name; `:name` stands for a parameter that the caller numbers."""
    text = resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
    parts = _NAME.split(text)
    return dict(zip(parts[1::2], (part.strip().removesuffix(";") for part in parts[2::2]), strict=True))


def number_parameters(statement: str, parameters: Iterable[str]) -> str:
    """Replace the `:name` parameters of a statement by numbers, in the order of `parameters`."""
    return ParameterNumbering().bind_names(statement, parameters)


class ParameterNumbering:
    """Numbers the parameters of a statement in the order in which they are added."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, kind: str) -> str:
        """Return the next parameter."""
        self._count += 1
        return f"${self._count}::{kind}"

    def bind_names(self, statement: str, names: Iterable[str]) -> str:
        """Replace the `:name` parameters of a statement by the next parameters, in the order of `names`."""
        parameters = {name: f"${number}" for number, name in enumerate(names, start=self._count + 1)}
        self._count += len(parameters)
        return _PARAMETER.sub(lambda match: parameters[match[1]], statement)
