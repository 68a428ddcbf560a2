"""`ff schedules`: list, show, create, pause, resume, trigger, backfill and delete schedules."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.output import JsonOption, exit_on_error, format_instant, print_json, print_table, report
from flowfabric.cli.stores import NamespaceOption, StoreOrServerOption, run_on_store

if TYPE_CHECKING:
    from flowfabric import Task
    from flowfabric.engine.types import ScheduleStatus
    from flowfabric.engine_protocol import EngineAPI

PAGE = 500

app = typer.Typer(help="Schedules: runs at instants.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]
OverlapOption = Annotated[str, typer.Option(help="While a run is under way: skip, queue_one, queue, cancel or allow.")]


@app.command("list")
def list_schedules(
    namespace: NamespaceOption = "default", store: StoreOrServerOption = None, json: JsonOption = False
) -> None:
    """List the schedules of a namespace: when they fire, when they do next, and what they have done."""

    async def load(engine: EngineAPI) -> list[ScheduleStatus]:
        page = await engine.list_schedules(namespace=namespace, limit=PAGE)
        found = page.schedules
        while page.next_cursor is not None:
            page = await engine.list_schedules(namespace=namespace, cursor=page.next_cursor, limit=PAGE)
            found += page.schedules
        return found

    found = run_on_store(store, load)
    if json:
        print_json({"schedules": found})
    elif not found:
        typer.echo(f"No schedules in namespace {namespace}.")
    else:
        print_table(
            "",
            ("schedule", "fires", "next", "runs", "skipped", "missed", "task", "state"),
            [
                (
                    *(item.name, item.spec.text, format_instant(item.next_instant)),
                    *(item.fired, item.skipped, item.missed, item.task, _state(item)),
                )
                for item in found
            ],
        )


@app.command()
def show(
    name: NameArgument,
    namespace: NamespaceOption = "default",
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Show a schedule with its last ten runs and its next ten instants."""
    found = run_on_store(store, lambda engine: engine.describe_schedule(name, namespace=namespace))
    if json:
        print_json(found)
        return
    status, spec = found.status, found.status.spec
    print_table(
        "",
        ("", ""),
        [
            ("schedule", status.name),
            ("fires", spec.text),
            ("task", f"{status.task} in lane {status.lane}"),
            ("overlap", spec.overlap.value),
            ("catch up", f"{spec.catch_up_ms / 1000:g} s"),
            ("jitter", f"{spec.jitter_ms / 1000:g} s"),
            ("declared by", status.owner or "no code: it was created by hand"),
            ("state", _state(status)),
            (
                "so far",
                f"{status.fired} runs, {status.skipped} skipped, {status.missed} missed, {status.queued} queued",
            ),
        ],
    )
    if found.runs:
        rows = [(run.execution_id, run.state.value, format_instant(run.created_at)) for run in found.runs]
        print_table("The last runs", ("run", "state", "created"), rows)
    print_table("The next instants", ("instant",), [(format_instant(at),) for at in found.next_instants])


@app.command()
def create(
    name: NameArgument,
    target: Annotated[str, typer.Argument(metavar="MODULE:TASK", help="The task that it runs.")],
    cron: Annotated[str | None, typer.Option(help='As in "0 3 * * *", or @daily.')] = None,
    every: Annotated[str | None, typer.Option(help='As in "30s" or "1h".')] = None,
    payload: Annotated[str, typer.Option(help="The input as a JSON object of the task's parameters.")] = "{}",
    tz: Annotated[str, typer.Option(help="The time zone of a cron expression.")] = "UTC",
    overlap: OverlapOption = "skip",
    catch_up: Annotated[str, typer.Option(help="How late a missed instant may still get its run.")] = "10m",
    jitter: Annotated[str, typer.Option(help="Delay each run by up to this.")] = "0s",
    pause_on_failure: Annotated[bool, typer.Option(help="Pause when a run fails.")] = False,
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Create a schedule that no code declares."""
    import asyncio

    from flowfabric.cli.locate import load_task
    from flowfabric.cli.stores import resolve_store_url

    async def put(task: Task[..., Any]) -> None:
        async with task.app as fabric:
            await fabric.schedules.create(
                name,
                task.s(**_arguments(payload)),
                cron=cron,
                every=every,
                tz=tz,
                overlap=overlap,
                catch_up=catch_up,
                jitter=jitter,
                pause_on_failure=pause_on_failure,
            )

    with exit_on_error():
        task = load_task(target)
        if store is not None:
            task.app.url = resolve_store_url(store)
        asyncio.run(put(task))
    report(json, f"{name} is in place.", created=True)


@app.command()
def pause(
    name: NameArgument,
    note: Annotated[str, typer.Option(help="The reason, shown with the schedule.")] = "",
    namespace: NamespaceOption = "default",
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Pause a schedule until it is resumed, also through deploys."""
    changed = run_on_store(store, lambda engine: engine.pause_schedule(name, note=note, namespace=namespace))
    report(json, f"{name} is paused." if changed else f"{name} was paused already.", changed=changed)


@app.command()
def resume(
    name: NameArgument,
    namespace: NamespaceOption = "default",
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Resume a schedule with its next instant."""
    changed = run_on_store(store, lambda engine: engine.resume_schedule(name, namespace=namespace))
    report(json, f"{name} is resumed." if changed else f"{name} was not paused.", changed=changed)


@app.command()
def trigger(
    name: NameArgument,
    namespace: NamespaceOption = "default",
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Create a run now, and print its id."""

    async def create_run(engine: EngineAPI) -> str:
        trigger_id = engine.minter.ordered_uuid()
        return (await engine.trigger_schedule(name, trigger_id=trigger_id, namespace=namespace)).execution_id

    run = run_on_store(store, create_run)
    report(json, run, execution_id=run)


@app.command()
def backfill(
    name: NameArgument,
    start: Annotated[str, typer.Argument(help="From this instant, as in 2026-11-17T00:00Z.")],
    end: Annotated[str, typer.Argument(help="To before this instant.")],
    overlap: OverlapOption = "queue",
    namespace: NamespaceOption = "default",
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Create the runs of past instants; an instant that has its run is skipped."""
    first, last = _instant("START", start), _instant("END", end)
    done = run_on_store(
        store, lambda engine: engine.backfill_schedule(name, first, last, overlap=overlap, namespace=namespace)
    )
    text = f"{done.created} created, {done.queued} queued, {done.skipped} skipped, {done.known} had a run"
    report(json, text, created=done.created, queued=done.queued, skipped=done.skipped, known=done.known)


@app.command()
def delete(
    name: NameArgument,
    namespace: NamespaceOption = "default",
    store: StoreOrServerOption = None,
    json: JsonOption = False,
) -> None:
    """Delete a schedule; its runs continue. One that is declared in code comes back with the next start of a worker."""
    changed = run_on_store(store, lambda engine: engine.delete_schedule(name, namespace=namespace))
    report(json, f"{name} is deleted." if changed else f"There is no schedule {name}.", changed=changed)


def _state(status: ScheduleStatus) -> str:
    if status.paused_at is None:
        return "active" if status.next_instant is not None else "has no further instant"
    by = "" if status.paused_by is None else f" by {status.paused_by.value}"
    return f"paused{by}" + (f": {status.note}" if status.note else "")


def _arguments(payload: str) -> dict[str, Any]:
    import msgspec

    try:
        return msgspec.json.decode(payload, type=dict[str, Any])
    except msgspec.DecodeError as wrong:
        raise typer.BadParameter(f"no JSON object: {wrong}", param_hint="--payload") from None


def _instant(name: str, text: str) -> int:
    try:
        instant = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter("write it like 2026-11-17T00:00Z", param_hint=name) from None
    return int((instant if instant.tzinfo else instant.replace(tzinfo=UTC)).timestamp() * 1000)
