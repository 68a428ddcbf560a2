"""`ff worker`: run a worker for the tasks of an app."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.locate import AppArgument, load_app
from flowfabric.cli.output import exit_on_error
from flowfabric.cli.stores import StoreOrServerOption, redact_url
from flowfabric.model.text import pluralize

if TYPE_CHECKING:
    from flowfabric import Fabric
    from flowfabric.cli.status import StatusLine
    from flowfabric.sdk.worker.worker import Worker

PARENT_CHECK_INTERVAL_S = 0.5
STATUS_INTERVAL_S = 1.0


def worker(
    target: AppArgument,
    slots: Annotated[int, typer.Option(min=1, help="Executions that run at the same time.")] = 10,
    lanes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LANE,…",
            help="Serve these, comma-separated or repeated; else the lanes of its tasks.",
        ),
    ] = None,
    capabilities: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,…", help="Capabilities of this worker, comma-separated or repeated."),
    ] = None,
    lease_ttl: Annotated[
        str, typer.Option(help="How long a lease lasts without renewal before another worker takes over.")
    ] = "15s",
    grace: Annotated[str, typer.Option(help="How long work may continue after SIGTERM.")] = "30s",
    stall_limit: Annotated[
        str, typer.Option(help="How long the event loop may be blocked before its leases expire.")
    ] = "5m",
    reload: Annotated[
        bool, typer.Option("--reload", help="Restart when a .py file below this folder changes.")
    ] = False,
    store: StoreOrServerOption = None,
) -> None:
    """Run a worker for the tasks of an app. SIGTERM or Ctrl-C drains it; a second one releases the rest at once."""
    if reload:
        from flowfabric.cli.reload import run_with_reload

        raise typer.Exit(run_with_reload())
    with exit_on_error():
        app = load_app(target)
        if store is not None:
            app.url = store

        from flowfabric import event_loop

        event_loop.run(
            _work(
                app,
                slots=slots,
                lanes=_split_names(lanes) or None,
                capabilities=_split_names(capabilities),
                lease_ttl=lease_ttl,
                grace=grace,
                stall_limit=stall_limit,
            )
        )


async def _work(app: Fabric, **options: Any) -> None:
    import asyncio
    import logging

    from flowfabric.cli.status import status_line
    from flowfabric.sdk.worker.worker import Worker

    with status_line() as status:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
        worker = Worker(app, **options)
        running = asyncio.create_task(worker.run_until_told())
        await asyncio.sleep(0)  # signals are handled from here on: a script may send one after the next line
        _print_introduction(worker, app, options["lanes"], options["slots"])
        background = [asyncio.create_task(_stop_with_parent(worker))]
        if status is not None:
            background.append(asyncio.create_task(_show_status(worker, status)))
        try:
            await running
        finally:
            for task in background:
                task.cancel()
    failed = f", {pluralize(worker.failed, 'attempt')} failed" if worker.failed else ""
    typer.echo(f"{worker.instance_id} stopped after {worker.done:,} completed{failed}", err=True)


def _print_introduction(worker: Worker, app: Fabric, chosen: list[str] | None, slots: int) -> None:
    """Print the worker, its lanes and tasks, and warn of lanes without tasks."""
    task_lanes = {task.default_options.lane for task in app.tasks.values()}
    lanes = chosen or sorted(task_lanes)
    lane_text = f"{'lane' if len(lanes) == 1 else 'lanes'} {', '.join(lanes)}"
    summary = f"{pluralize(len(app.tasks), 'task')}, {lane_text}, {pluralize(slots, 'slot')}"
    typer.echo(f"{worker.instance_id} on {redact_url(app.url)}: {summary}", err=True)
    if lanes_without_tasks := [lane for lane in chosen or () if lane not in task_lanes]:
        typer.echo(
            f"no task of the app is in lane {', '.join(lanes_without_tasks)}: only explicit submits reach it",
            err=True,
        )


async def _show_status(worker: Worker, status: StatusLine) -> None:
    """Update the status line once a second: running and ended executions, and the rate."""
    import asyncio
    from time import monotonic

    ended, at = 0, monotonic()
    while True:
        now, total = monotonic(), worker.done + worker.failed
        rate = (total - ended) / (now - at) if now > at else 0.0
        ended, at = total, now
        status.show(status_text(worker.running, worker.done, worker.failed, rate))
        await asyncio.sleep(STATUS_INTERVAL_S)


def status_text(running: int, done: int, failed: int, rate: float) -> str:
    """Return the status line of a worker."""
    return f"{running:,} running · {done:,} done · {failed:,} failed · {rate:,.0f}/s"


async def _stop_with_parent(worker: Worker) -> None:
    """Drain a reloaded worker when its parent process is gone."""
    import asyncio
    import os

    from flowfabric.cli.reload import PARENT_PID_VARIABLE

    parent = os.environ.get(PARENT_PID_VARIABLE)
    while parent is not None:
        if str(os.getppid()) != parent:
            worker.stop()
            return
        await asyncio.sleep(PARENT_CHECK_INTERVAL_S)


def _split_names(values: list[str] | None) -> list[str]:
    return [name for value in values or () for part in value.split(",") if (name := part.strip())]
