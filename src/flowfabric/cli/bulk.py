"""`ff cancel --where`, `ff replay --where`, `ff priority --where`: act on every execution that a filter finds.

The command shows what it would act on and asks first. On a store it works the operation off itself; on a server it
follows the progress.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.output import console, first_line, print_json, print_table
from flowfabric.cli.stores import run_on_store
from flowfabric.cli.where import parse_filters
from flowfabric.model.text import pluralize

if TYPE_CHECKING:
    from flowfabric.engine.operations.bulk import BulkPreview
    from flowfabric.engine.types import BulkStatus
    from flowfabric.engine_protocol import EngineAPI

SWEEP = "bulk_operations"
POLL_S = 0.5
DEFAULT_CEILING = 10_000

CeilingOption = Annotated[
    int, typer.Option("--most", min=1, max=1_000_000, help="With --where: act on at most this many.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="With --where: do not ask.")]
PreviewOption = Annotated[bool, typer.Option("--dry-run", help="With --where: only show what would be done.")]


def require_one(execution_id: str | None, where: list[str] | None) -> None:
    """Raise a usage error unless either an execution or a filter is given."""
    if (execution_id is None) == (not where):
        raise typer.BadParameter("name either one execution or, with --where, a filter")


def run(
    verb: str,
    where: list[str],
    *,
    store: str | None,
    reason: str,
    most: int,
    yes: bool,
    dry_run: bool,
    json: bool,
    priority: int | None = None,
) -> None:
    """Preview, ask, start and follow a bulk operation."""

    async def work(engine: EngineAPI) -> BulkPreview | BulkStatus:
        criteria = await parse_filters(engine, where)
        if not yes:
            preview = await engine.preview_operation(verb, criteria)
            if dry_run or not preview.count:
                return preview
            if not sys.stdin.isatty():
                found = pluralize(preview.count, "execution")
                typer.echo(
                    f"ff: {found} to {verb}, and no terminal to ask on: pass --yes, or preview with --dry-run", err=True
                )
                raise typer.Exit(1)
            _print_preview(verb, preview, most)
            typer.confirm(f"{verb} them?", abort=True)
        started = await engine.start_operation(verb, criteria, reason=reason, ceiling=most, priority=priority)
        return await _follow(engine, started)

    answer: Any = run_on_store(store, work)
    if json:
        print_json(answer)
    elif hasattr(answer, "sample"):
        _print_preview(verb, answer, most)
    else:
        _print_status(verb, answer)


async def _follow(engine: EngineAPI, status: BulkStatus) -> BulkStatus:
    import asyncio

    from flowfabric.engine.engine import Engine
    from flowfabric.model.bulk_operation import BulkState

    shown = -1
    while status.state is BulkState.RUNNING:
        if isinstance(engine, Engine):
            await engine.sweep_once(SWEEP)
        else:
            await asyncio.sleep(POLL_S)
        status = await engine.read_operation(status.operation_id)
        if status.changed != shown and sys.stderr.isatty():
            shown = status.changed
            typer.echo(f"… {shown:,}", err=True)
    return status


def _print_preview(verb: str, preview: BulkPreview, most: int) -> None:
    at_least = "" if preview.complete else "at least "
    limited = f"; {verb} at most {most:,}" if preview.count > most or not preview.complete else ""
    refused = f", and {preview.refused:,} that cannot be" if preview.refused else ""
    typer.echo(f"{at_least}{pluralize(preview.count, 'execution')} to {verb}{refused}{limited}")
    if preview.sample:
        print_table(
            "The newest of them",
            ("execution", "task", "state", "lane", "reason"),
            [
                (item.execution_id, item.execution_kind, item.public_state.value, item.lane_id, first_line(item.reason))
                for item in preview.sample
            ],
        )


def _print_status(verb: str, status: BulkStatus) -> None:
    out = console()
    out.print(f"✓ {verb}: {status.changed:,} done, {status.refused:,} refused ({status.state.value})", markup=False)
    if status.last_refusal:
        out.print(f"  the last refusal: {status.last_refusal}", markup=False)
