"""`ff ui`: a link that opens the console."""

from __future__ import annotations

from typing import Annotated

import typer

from flowfabric.cli.output import exit_on_error
from flowfabric.cli.stores import resolve_store_url


def ui(
    server: Annotated[
        str | None,
        typer.Argument(
            metavar="URL",
            help="The server: FF_PUBLIC_URL, FLOWFABRIC_URL if it is one, else http://127.0.0.1:9090.",
        ),
    ] = None,
) -> None:
    """Print a link that opens the console once, within five minutes. FF_API_TOKEN asks for it."""
    import os

    from flowfabric.connector import public_base_url
    from flowfabric.errors import InvalidInput

    with exit_on_error():
        try:
            import httpx2
        except ImportError as missing:
            raise InvalidInput("the console needs further packages: pip install 'flowfabric[client]'") from missing
        base = public_base_url(resolve_store_url(None), server)
        token = os.environ.get("FF_API_TOKEN") or os.environ.get("FLOWFABRIC_TOKEN")
        headers = {"authorization": f"Bearer {token}"} if token else {}
        try:
            answer = httpx2.post(f"{base}/ui/links", headers=headers)
        except httpx2.TransportError as fault:
            raise InvalidInput(f"no server answers at {base}: start one with `ff serve` ({fault})") from None
        if answer.status_code == 401:
            raise InvalidInput("the server requires a token: set FF_API_TOKEN to its own, or to one that it made")
        if answer.status_code != 200:
            raise InvalidInput(f"{base} has no console: it answered {answer.status_code}")
        path = str(answer.json()["path"])
    # The server answers with a path below its own host; a mount point is part of it.
    typer.echo(f"{base.partition('://')[0]}://{base.partition('://')[2].partition('/')[0]}{path}")
