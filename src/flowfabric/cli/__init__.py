"""The command line: `ff …`.

People get tables and colours, `--json` gives machines one document on stdout. What goes wrong is told on stderr, with a
hint, and the exit code is above 0. Everything heavy is imported by the command that needs it, so that help and shell
completion answer at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from flowfabric.cli import (
    admin,
    bench,
    demo,
    executions,
    maintenance,
    resources,
    results,
    serve,
    signals,
    submit,
    tail,
    worker,
)

app = typer.Typer(
    name="ff",
    epilog="The store is --store, else FLOWFABRIC_URL, else what FF_BACKEND says, else sqlite:///flowfabric.db.",
    no_args_is_help=True,
    rich_markup_mode=None,  # its help pages alone take 0.3 s to import
    pretty_exceptions_enable=False,
)


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=maintenance.print_version_and_exit, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """FlowFabric, from the command line."""


for page in (maintenance, executions, submit, results, tail, signals, resources, worker, serve, admin, demo, bench):
    page.add_to(app)


def main() -> None:
    """Run `ff` with the arguments of this process."""
    app()
