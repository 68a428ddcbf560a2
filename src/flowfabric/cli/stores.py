"""Find the store of a command and run work on its engine."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar
from urllib.parse import urlsplit

import typer

from flowfabric.cli.output import exit_on_error

if TYPE_CHECKING:
    from flowfabric.engine_protocol import EngineAPI

T = TypeVar("T")

DEFAULT_URL = "sqlite:///flowfabric.db"

StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="sqlite:///path, postgresql://…, valkey://… or memory://"),
]
StoreOrServerOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="URL",
        help="sqlite:///path, postgresql://…, valkey://…, or the http://… of a server",
    ),
]

NamespaceOption = Annotated[str, typer.Option(help="Of this namespace.")]


def resolve_store_url(named: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """Return the store URL: the given one, else FLOWFABRIC_URL, else by FF_BACKEND, else a file in this folder."""
    return named or environ.get("FLOWFABRIC_URL") or _by_backend(environ) or DEFAULT_URL


def _by_backend(environ: Mapping[str, str]) -> str | None:
    from flowfabric.errors import InvalidInput

    match environ.get("FF_BACKEND", "").lower():
        case "":
            return None
        case "sqlite":
            path = environ.get("FF_SQLITE_PATH") or ":memory:"
            return "memory://" if path == ":memory:" or "mode=memory" in path else f"sqlite:///{path}"
        case "postgres":
            if url := environ.get("FF_POSTGRES_URL"):
                return url
            raise InvalidInput("FF_POSTGRES_URL: must be set when FF_BACKEND is postgres")
        case other:
            raise typer.BadParameter(  # a usage error: exit code 2
                f"FF_BACKEND: {other!r} is no known store; use sqlite or postgres, or name a URL in --store"
            )


def run_on_store(named: str | None, work: Callable[[EngineAPI], Awaitable[T]], *, migrate: bool = False) -> T:
    """Run a coroutine function on an engine of the chosen store; print an error and exit if it fails."""
    import asyncio

    async def connected() -> T:
        from flowfabric import connect

        url = resolve_store_url(named)
        if not migrate:
            check_store_exists(url)
        async with await connect(url, migrate=migrate) as engine:
            return await work(engine)

    with exit_on_error():
        return asyncio.run(connected())


def run_on_execution(named: str | None, execution_id: str, work: Callable[[EngineAPI, str], Awaitable[T]]) -> T:
    """Run a coroutine function on one execution, given by its id or a unique prefix; it gets the full id."""

    async def resolved(engine: EngineAPI) -> T:
        from flowfabric.cli.short_ids import resolve_execution_id
        from flowfabric.errors import NotFound

        full_id = await resolve_execution_id(engine, execution_id)
        try:
            return await work(engine, full_id)
        except NotFound as missing:
            if missing.execution_id is not None:
                raise
            raise NotFound(missing.entity, execution_id=full_id) from None

    return run_on_store(named, resolved)


def check_store_exists(url: str) -> None:
    """Raise Unavailable if a SQLite file does not exist; opening it would create it."""
    from flowfabric.errors import Unavailable

    if url.startswith("sqlite:") and not (path := Path(urlsplit(url).path[1:])).exists():
        raise Unavailable("open", f"there is no store at {path}")


def check_is_store(url: str, why: str) -> None:
    """Raise InvalidInput if the URL is a server."""
    from flowfabric.connector import is_server_url
    from flowfabric.errors import InvalidInput

    if is_server_url(url):
        raise InvalidInput(f"--store: {url} is a server; {why}")


def redact_url(url: str) -> str:
    """Return the URL without its password."""
    secret = urlsplit(url).password if "@" in url else None
    return url.replace(f":{secret}@", ":…@", 1) if secret else url
