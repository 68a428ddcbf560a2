"""Arguments of the engine's verbs as they come in, and rows as they come out: readings that several pages share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from flowfabric import errors, ids
from flowfabric.rules import limits

T = TypeVar("T")


def flow_id(text: object) -> ids.FlowId:
    """A flow's id in its one form."""
    return ids.FlowId(ids.parse_uuid(limits.text("flow_id", text), "flow_id"))


def edge_id(text: object) -> str:
    """An edge's id in its one form."""
    return ids.parse_uuid(limits.text("edge_id", text), "edge_id")


def execution_id(text: object, name: str = "execution_id") -> ids.ExecutionId:
    """An execution's id, letter for letter."""
    return ids.parse_execution_id(limits.text(name, text))


def parsed(value: T | errors.FabricError) -> T:
    """The value, if it is one; a refusal is raised."""
    if isinstance(value, errors.FabricError):
        raise value
    return value


def first(rows: Sequence[Any]) -> Any:
    """The row, or None."""
    return rows[0] if rows else None
