"""The children of an execution for `ff show`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flowfabric.cli.output import first_line, format_instant, print_table

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI

MAX_CHILDREN = 100


async def load_children(engine: EngineAPI, execution_id: str) -> list[dict[str, Any]]:
    """Load the children of an execution, oldest first."""
    children = await engine.list_children(execution_id, limit=MAX_CHILDREN)
    return [
        {
            "execution_id": child.execution_id,
            "execution_kind": child.execution_kind,
            "public_state": child.public_state,
            "created_at": child.created_at,
            "ended_at": child.ended_at,
            "reason": child.reason,
        }
        for child in children.executions
    ]


def print_children(children: list[dict[str, Any]]) -> None:
    """Print the children as a table."""
    if children:
        print_table(
            "Children",
            ("execution", "task", "state", "created", "ended", "failure"),
            [
                (
                    child["execution_id"],
                    child["execution_kind"],
                    child["public_state"].value,
                    format_instant(child["created_at"]),
                    format_instant(child["ended_at"]),
                    first_line(child["reason"]),
                )
                for child in children
            ],
        )
