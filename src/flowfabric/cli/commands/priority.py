"""`ff priority`: let executions be claimed earlier or later than others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli import bulk
from flowfabric.cli.commands.executions import OptionalIdArgument
from flowfabric.cli.output import JsonOption, report
from flowfabric.cli.stores import StoreOrServerOption, run_on_execution
from flowfabric.cli.where import WhereOption

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI


def priority(
    value: Annotated[int, typer.Option("--to", metavar="PRIORITY", help="The new one; higher is claimed first.")],
    execution_id: OptionalIdArgument = None,
    where: WhereOption = None,
    reason: Annotated[str, typer.Option(help="Kept with the bulk operation.")] = "prioritised by operator",
    most: bulk.CeilingOption = bulk.DEFAULT_CEILING,
    dry_run: bulk.PreviewOption = False,
    yes: bulk.YesOption = False,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Change priorities. Of one claimable execution, or of all that --where finds."""
    bulk.require_one(execution_id, where)
    if execution_id is None:
        bulk.run(
            "priority",
            where or [],
            store=store,
            reason=reason,
            most=most,
            yes=yes,
            dry_run=dry_run,
            json=json,
            priority=value,
        )
        return

    async def request_change(engine: EngineAPI, full_id: str) -> str:
        await engine.change_priority(full_id, value)
        return full_id

    changed = run_on_execution(store, execution_id, request_change)
    report(json, f"✓ {changed} has priority {value}", execution_id=changed, priority=value)
