"""`ff demo`: a demonstration that checks its own claims."""

from __future__ import annotations

from typing import Annotated

import typer

from flowfabric.cli.output import JsonOption, exit_on_error


def demo(
    ui: Annotated[bool, typer.Option("--ui", help="Serve the console at the end, until Ctrl-C.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port of the console; 0 is a free one.")] = 0,
    json: JsonOption = False,
) -> None:
    """Run a demonstration and check its results.

    A retry, a killed worker, a takeover, a quorum and an approval, on SQLite in a temporary folder.
    """
    from flowfabric.demo import run_demo

    with exit_on_error():
        code = run_demo(json=json, console_port=port if ui else None)
    raise typer.Exit(code)
