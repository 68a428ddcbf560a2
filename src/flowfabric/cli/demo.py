"""`ff demo`: a demonstration that checks its own claims."""

from __future__ import annotations

import typer

from flowfabric.cli.output import JsonOption


def add_to(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command()(demo)


def demo(json: JsonOption = False) -> None:
    """Watch it work, proven at the end.

    A retry, a killed worker, a takeover, a quorum and an approval, in a folder of its own.
    """
    from flowfabric.demo import run_demo

    raise typer.Exit(run_demo(json=json))
