"""`ff workers`, `ff budgets`: list live workers and budgets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.output import JsonOption, format_instant, print_json, print_table
from flowfabric.cli.stores import StoreOrServerOption, run_on_store

if TYPE_CHECKING:
    from flowfabric.engine_api import EngineAPI
    from flowfabric.model.answers.limits import BudgetStatus


def workers(
    namespace: Annotated[str, typer.Option(help="Of this namespace.")] = "default",
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """List the live workers. Their lanes, capabilities and last heartbeat."""

    async def load_workers(engine: EngineAPI) -> list[Any]:
        page = await engine.list_workers(namespace)
        entries = page.entries
        while page.cursor is not None:
            page = await engine.list_workers(namespace, after=page.cursor)
            entries += page.entries
        return entries

    live = run_on_store(store, load_workers)
    if json:
        print_json({"workers": live})
    elif not live:
        typer.echo(f"No live workers in namespace {namespace}.")
    else:
        print_table(
            "",
            ("worker", "lanes", "capabilities", "since", "last heartbeat"),
            [
                (
                    item.worker_instance_id,
                    ", ".join(item.lanes),
                    ", ".join(item.capabilities),
                    format_instant(item.registered_at_ms),
                    format_instant(item.last_heartbeat_ms),
                )
                for item in live
            ],
        )


def budgets(
    budget_id: Annotated[
        str | None,
        typer.Argument(metavar="ID", help="Only this budget; a unique prefix is enough.", show_default=False),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at a time.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Continue after this id.", show_default=False)] = None,
    namespace: Annotated[str, typer.Option(help="Of this namespace.")] = "default",
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """List budgets. The usage, reservations and limits of each dimension, and the next reset."""

    async def load_budgets(engine: EngineAPI) -> list[BudgetStatus]:
        from flowfabric.cli.short_ids import resolve_budget_id

        if budget_id:
            name = await resolve_budget_id(engine, budget_id, namespace)
            return [await engine.get_budget_status(name, namespace=namespace)]
        names = await engine.list_budgets(cursor=cursor, limit=limit, namespace=namespace)
        return [await engine.get_budget_status(name, namespace=namespace) for name in names]

    known = run_on_store(store, load_budgets)
    more = known[-1].budget_id if budget_id is None and len(known) == limit else None
    if json:
        print_json({"budgets": known, "next_cursor": more})
    elif not known:
        typer.echo("No budgets." if cursor is None else "No more budgets.")
    else:
        print_table(
            "",
            (
                "budget",
                "of",
                "dimension",
                "used",
                "promised",
                "soft limit",
                "hard limit",
                "next reset",
                "at the limit",
            ),
            [row for item in known for row in _rows(item)],
        )
        if more:
            whose = "" if namespace == "default" else f" --namespace '{namespace}'"
            typer.echo(f"More: ff budgets --cursor '{more}'{whose}")


def _rows(status: BudgetStatus) -> list[tuple[object, ...]]:
    """Return a row for each dimension; the fields of the whole budget are in the first."""
    of = ":".join(part for part in (status.scope_type, status.scope_id) if part)
    resets = format_instant(int(status.next_reset_at)) if status.next_reset_at else ""
    rows: list[tuple[object, ...]] = []
    for dimension in dict.fromkeys((*status.hard_limits, *status.usage)):
        hard, soft = status.hard_limits.get(dimension, 0), status.soft_limits.get(dimension, 0)
        used, promised = status.usage.get(dimension, 0), status.reserved.get(dimension, 0)
        name, unit = _unit(dimension)
        share = _amount(used, unit) + (f" ({used * 100 // hard} %)" if hard else "")
        first = (status.budget_id, of) if not rows else ("", "")
        last = (resets, status.on_hard_limit) if not rows else ("", "")
        kept = _amount(promised, unit) if promised else ""
        rows.append((*first, name, share, kept, _limit(soft, unit), _limit(hard, unit), *last))
    return rows


def _unit(dimension: str) -> tuple[str, int]:
    """Return the display name of a dimension and its unit."""
    from flowfabric.sdk.limits import MILLIONTHS_SUFFIX

    if dimension.endswith(MILLIONTHS_SUFFIX):
        return dimension.removesuffix(MILLIONTHS_SUFFIX), 1_000_000
    return dimension, 1


def _amount(value: int, unit: int) -> str:
    return f"{value:,}" if unit == 1 else f"{value / unit:,.6f}".rstrip("0").rstrip(".")


def _limit(value: int, unit: int) -> str:
    return _amount(value, unit) if value else "none"
