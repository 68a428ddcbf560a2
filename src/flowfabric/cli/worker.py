"""`ff worker`: work on what an app's tasks were handed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.stores import StoreOrServerOption, shown
from flowfabric.cli.telling import telling_errors

if TYPE_CHECKING:
    from types import ModuleType

    from flowfabric import Fabric
    from flowfabric.sdk.worker import Worker

ORPHAN_LOOK_S = 0.5


def add_to(app: typer.Typer) -> None:
    """Hang the command up."""
    app.command()(worker)


def worker(
    target: Annotated[
        str,
        typer.Argument(metavar="MODULE[:APP]", help="Where the Fabric is: `shop.tasks:app`.", show_default=False),
    ],
    slots: Annotated[int, typer.Option(min=1, help="How much may run at once.")] = 10,
    lanes: Annotated[
        list[str] | None,
        typer.Option(help="Serve these, comma-separated or repeated; else the lanes of its tasks.", show_default=False),
    ] = None,
    capabilities: Annotated[
        list[str] | None,
        typer.Option(help="What this worker can do, comma-separated or repeated.", show_default=False),
    ] = None,
    lease_ttl: Annotated[str, typer.Option(help="After how long silence others take over.")] = "15s",
    grace: Annotated[str, typer.Option(help="How long work may go on after SIGTERM.")] = "30s",
    reload: Annotated[bool, typer.Option("--reload", help="Start anew when a .py file below here changes.")] = False,
    store: StoreOrServerOption = None,
) -> None:
    """Run a worker until SIGTERM or Ctrl-C, which drains; a second one hands the rest back at once."""
    if reload:
        from flowfabric.cli.reloading import reloading

        raise typer.Exit(reloading())
    with telling_errors():
        app = found_app(target)
        if store is not None:
            app.url = store

        from flowfabric import loops

        loops.run(
            _work(
                app,
                slots=slots,
                lanes=_each(lanes) or None,
                capabilities=_each(capabilities),
                lease_ttl=lease_ttl,
                grace=grace,
            )
        )


async def _work(app: Fabric, **options: Any) -> None:
    import asyncio
    import logging

    from flowfabric.sdk.worker import Worker

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    made = Worker(app, **options)
    lanes = ", ".join(options["lanes"] or sorted({task.own.lane for task in app.tasks.values()}))
    typer.echo(
        f"{made.instance_id} on {shown(app.url)}: {len(app.tasks)} tasks, lanes {lanes}, {options['slots']} slots",
        err=True,
    )
    guard = asyncio.create_task(_stop_with_parent(made))
    try:
        await made.run_until_told()
    finally:
        guard.cancel()
    typer.echo(f"{made.instance_id} stopped after {made.done} completed", err=True)


async def _stop_with_parent(made: Worker) -> None:
    """A worker that is reloaded drains when the process that reloads it is gone."""
    import asyncio
    import os

    from flowfabric.cli.reloading import PARENT

    parent = os.environ.get(PARENT)
    while parent is not None:
        if str(os.getppid()) != parent:
            made.stop()
            return
        await asyncio.sleep(ORPHAN_LOOK_S)


def found_app(target: str) -> Fabric:
    """The Fabric that `module:name` names; without a name, the only one of the module."""
    import importlib
    import sys

    from flowfabric import Fabric
    from flowfabric.errors import InvalidInput

    module_name, _, name = target.partition(":")
    sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not (module_name == missing.name or module_name.startswith(f"{missing.name}.")):
            raise  # the module is there, and what it imports is not: its traceback tells where
        raise InvalidInput(
            f"there is no module {missing.name!r} here; run ff in the folder that contains it, or install it"
        ) from None
    except ValueError:
        raise InvalidInput(f"{target!r} is not MODULE:APP, as in shop.tasks:app") from None
    if name:
        app = getattr(module, name, None)
        if not isinstance(app, Fabric):
            raise InvalidInput(f"{module_name} has no Fabric named {name!r}{_others(module)}")
        return app
    apps = _apps(module)
    if len(apps) != 1:
        raise InvalidInput(f"say which Fabric of {module_name} is meant, as in {module_name}:app{_others(module)}")
    return next(iter(apps.values()))


def _apps(module: ModuleType) -> dict[str, Fabric]:
    from flowfabric import Fabric

    return {name: value for name, value in vars(module).items() if isinstance(value, Fabric)}


def _others(module: ModuleType) -> str:
    apps = _apps(module)
    return f"; it has {', '.join(apps)}" if apps else "; it has none"


def _each(values: list[str] | None) -> list[str]:
    return [one for value in values or () for part in value.split(",") if (one := part.strip())]
