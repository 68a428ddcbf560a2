"""`ff serve`: the REST server."""

from __future__ import annotations

from typing import Annotated

import typer

from flowfabric.cli.output import exit_on_error
from flowfabric.cli.stores import StoreOption, check_is_store, resolve_store_url


def serve(
    store: StoreOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; FF_LISTEN_ADDR, else 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65_535, help="Port; FF_LISTEN_ADDR, else 9090.")] = None,
    allow_unauthenticated: Annotated[
        bool, typer.Option(help="Listen beyond this machine although no FF_API_TOKEN is set.")
    ] = False,
    ui: Annotated[bool, typer.Option(help="Serve the console under /ui; FF_NO_UI switches it off, too.")] = True,
    sweeps: Annotated[bool, typer.Option(help="Run the background sweeps in this process, too.")] = True,
) -> None:
    """Serve the REST API. SIGTERM stops it after the requests in flight are finished."""

    import msgspec

    from flowfabric.errors import InvalidInput

    with exit_on_error():
        try:
            from flowfabric.server import lifecycle, logging
            from flowfabric.server.settings import from_environment
        except ImportError as missing:
            raise InvalidInput("the server needs further packages: pip install 'flowfabric[server]'") from missing
        url = resolve_store_url(store)
        check_is_store(url, "serve the store that is behind it")
        settings = from_environment()
        settings = msgspec.structs.replace(
            settings,
            host=settings.host if host is None else host,
            port=settings.port if port is None else port,
            allow_unauthenticated=settings.allow_unauthenticated or allow_unauthenticated,
            run_sweeps=settings.run_sweeps and sweeps,
            serve_console=settings.serve_console and ui,
        )
        settings.check()
        logging.log_to_stderr(settings.log, settings.log_format)
        from flowfabric import event_loop

        event_loop.run(lifecycle.serve(url, settings))
