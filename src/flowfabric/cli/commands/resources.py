"""`ff workers`, `ff lanes`, `ff budgets`: list live workers, lanes and budgets, and spread a lane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.output import JsonOption, format_instant, print_json, print_table
from flowfabric.cli.stores import NamespaceOption, StoreOrServerOption, run_on_store
from flowfabric.model.text import format_amount, split_dimension

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.model.answers.limits import BudgetStatus
    from flowfabric.model.scheduling.lane import LaneSpread

LANES_PAGE = 500


def workers(
    namespace: NamespaceOption = "default",
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


def lanes(
    lane: Annotated[str | None, typer.Argument(help="Only this lane.")] = None,
    spread: Annotated[
        int | None,
        typer.Option(min=1, help="Spread its new executions over this many partitions."),
    ] = None,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """List the lanes and over how many partitions they are spread. With --spread, change that of one lane.

    A change takes effect ten seconds later. It moves nothing: executions stay where they were created.
    """
    if spread is not None and lane is None:
        raise typer.BadParameter("name the lane to spread", param_hint="LANE")

    async def read_lanes(engine: EngineAPI) -> list[LaneSpread]:
        if lane is not None:
            return [await (engine.read_lane(lane) if spread is None else engine.set_lane_spread(lane, spread))]
        page = await engine.list_lanes(limit=LANES_PAGE)
        names = page.lanes
        while page.next_cursor is not None:
            page = await engine.list_lanes(cursor=page.next_cursor, limit=LANES_PAGE)
            names += page.lanes
        return [await engine.read_lane(name) for name in names]

    found = run_on_store(store, read_lanes)
    if json:
        print_json({"lanes": found})
    elif not found:
        typer.echo("No lanes yet: a lane exists from its first execution.")
    else:
        print_table(
            "",
            ("lane", "spread", "next", "from"),
            [(item.lane_id, item.spread, item.next_spread or "", format_instant(item.effective_at)) for item in found],
        )


def budgets(
    budget_id: Annotated[
        str | None,
        typer.Argument(metavar="ID", help="Only this budget; a unique prefix is enough."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many at a time.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Continue after this id.")] = None,
    namespace: NamespaceOption = "default",
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
        name, _ = split_dimension(dimension)
        share = format_amount(used, dimension) + (f" ({used * 100 // hard} %)" if hard else "")
        first = (status.budget_id, of) if not rows else ("", "")
        last = (resets, status.on_hard_limit) if not rows else ("", "")
        kept = format_amount(promised, dimension) if promised else ""
        rows.append((*first, name, share, kept, _limit(soft, dimension), _limit(hard, dimension), *last))
    return rows


def _limit(value: int, dimension: str) -> str:
    return format_amount(value, dimension) if value else "none"
