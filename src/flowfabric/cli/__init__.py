"""The command line: `ff …`."""

from importlib.metadata import version as installed_version

import typer

app = typer.Typer(name="ff", help="FlowFabric, from the command line.", no_args_is_help=True, add_completion=True)


@app.callback()
def ff() -> None:
    """FlowFabric, from the command line."""


@app.command()
def version() -> None:
    """Print the version of FlowFabric."""
    typer.echo(f"flowfabric {installed_version('flowfabric')}")


def main() -> None:
    """Run `ff` with the arguments of this process."""
    app()
