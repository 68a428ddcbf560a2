"""`ff demo`: a demonstration that checks its own claims."""

from __future__ import annotations

import typer

from flowfabric.cli.output import JsonOption


def demo(json: JsonOption = False) -> None:
    """Run a demonstration and check its results.

    A retry, a killed worker, a takeover, a quorum and an approval, on SQLite in a temporary folder.
    """
    from flowfabric.demo import run_demo

    raise typer.Exit(run_demo(json=json))
