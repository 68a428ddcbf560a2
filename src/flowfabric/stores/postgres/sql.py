"""The words of this store: named statements from its `.sql` files, and the column types of the catalogue."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

import msgspec

from flowfabric.model.execution import QueueKey
from flowfabric.stores.catalog import Column, Table

RowType = type[msgspec.Struct]

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
    """The type that keeps this column."""
    return "smallint" if column.is_enum else _TYPES[column.kind]


def column_list(names: Iterable[str], prefix: str = "") -> str:
    """The names as a list of columns; some of them are words of the language."""
    return ", ".join(f'{prefix}"{name}"' for name in names)


def columns_equal(names: Iterable[str], left: str, right: str) -> str:
    """The condition that two rows agree in these columns."""
    return " and ".join(f'{left}."{name}" = {right}."{name}"' for name in names)


def table_column_list(table: Table, prefix: str = "") -> str:
    """All columns of a table, in the order of the catalogue."""
    return column_list(table.column_names, prefix)


@cache
def load_statements(file: str) -> dict[str, str]:
    """The statements of a file by name; `:word` stands for the parameter that the caller numbers."""
    text = resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
    parts = _NAME.split(text)
    return dict(zip(parts[1::2], (part.strip().removesuffix(";") for part in parts[2::2]), strict=True))


def number_parameters(statement: str, parameters: Iterable[str]) -> str:
    """The statement with its `:words` as numbers, in the order in which the caller will give them."""
    return ParameterNumbering().bind_names(statement, parameters)


class ParameterNumbering:
    """Numbers the parameters of a statement in the order in which they are asked for."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, kind: str) -> str:
        """The next parameter."""
        self._count += 1
        return f"${self._count}::{kind}"

    def bind_names(self, statement: str, names: Iterable[str]) -> str:
        """A statement with its `:words` as the next parameters, in the order of these names."""
        place = {name: f"${number}" for number, name in enumerate(names, start=self._count + 1)}
        self._count += len(place)
        return _PARAMETER.sub(lambda found: place[found[1]], statement)
