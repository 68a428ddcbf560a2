"""The command line: `ff …`.

Commands print tables and colours, and with `--json` one document on stdout. Errors go to stderr with a hint, and the
exit code is above 0. Each command imports its heavy modules itself, so that help and shell completion answer at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from flowfabric.cli.commands import (
    admin,
    bench,
    demo,
    dev,
    executions,
    maintenance,
    messages,
    priority,
    resources,
    results,
    schedules,
    serve,
    signals,
    submit,
    tail,
    ui,
    worker,
)

app = typer.Typer(
    name="ff",
    epilog="The store is --store, else FLOWFABRIC_URL, else by FF_BACKEND, else sqlite:///flowfabric.db.",
    no_args_is_help=True,
    rich_markup_mode=None,  # rich help pages take 0.3 s to import
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


COMMANDS = (
    *(maintenance.version, maintenance.migrate, maintenance.doctor, maintenance.backup),
    *(executions.ls, executions.show, executions.find, executions.cancel, executions.replay, executions.release),
    *(executions.unpin, executions.patches, priority.priority),
    *(submit.submit, results.result, tail.explain, tail.tail, signals.signal, signals.approvals),
    *(messages.send, messages.facts),
    *(resources.workers, resources.lanes, resources.budgets, worker.worker, serve.serve, dev.dev, ui.ui, demo.demo),
)
for command in COMMANDS:
    app.command()(command)
admin.add_commands(app, hidden=True)  # admin commands also work without `admin`
app.add_typer(admin.app, name="admin")
app.add_typer(bench.app, name="bench")
app.add_typer(schedules.app, name="schedules")


def main() -> None:
    """Run `ff` with the arguments of this process."""
    app()
