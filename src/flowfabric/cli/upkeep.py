"""`ff version`, `ff migrate`, `ff doctor`: the installation and its store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from flowfabric.cli.stores import StoreOption, StoreOrServerOption, chosen_store, must_be_a_store, on_store, shown
from flowfabric.cli.telling import JsonOption, console, document, hint_for, telling_errors

if TYPE_CHECKING:
    from flowfabric import Engine

PINGS = 7
SLOW_MS = 50
SKEWED_MS = 5_000


def add_to(app: typer.Typer) -> None:
    """Hang the commands up."""
    for command in (version, migrate, doctor):
        app.command()(command)


def version() -> None:
    """Print the version of FlowFabric."""
    from flowfabric import __version__

    typer.echo(f"flowfabric {__version__}")


def tell_version(asked: bool) -> None:
    """The same for `ff --version`."""
    if asked:
        version()
        raise typer.Exit


def migrate(store: StoreOption = None, json: JsonOption = False) -> None:
    """Make the store, or bring its schema up to this release. A store that is up to date stays as it is."""

    async def versions(engine: Engine) -> tuple[int, int, bool]:
        return engine.schema.found, engine.schema.known, engine.schema.compatible

    with telling_errors():
        must_be_a_store(chosen_store(store), "it brings its store up to date when it starts")
    found, known, compatible = on_store(store, versions, migrate=True)
    if json:
        document({"store": shown(chosen_store(store)), "from": found, "to": known, "compatible": compatible})
    elif found == known:
        typer.echo(f"✓ {shown(chosen_store(store))}: already at schema version {known}")
    else:
        typer.echo(f"✓ {shown(chosen_store(store))}: schema version {found} → {known}")
    if not compatible:
        typer.echo("  the release before does not run on it: its workers and servers stop by themselves", err=True)


def doctor(store: StoreOrServerOption = None, json: JsonOption = False) -> None:
    """Check the store. Is it there, is it current, how fast does it answer, what time does it think it is?"""
    with telling_errors():
        url = chosen_store(store)
    findings = _examined(url)
    healthy = all(finding["ok"] for finding in findings)
    if json:
        document({"store": shown(url), "healthy": healthy, "checks": findings})
    else:
        _print(url, findings)
    if not healthy:
        raise typer.Exit(1)


def _print(url: str, findings: list[dict[str, Any]]) -> None:
    out = console()
    out.print(shown(url), markup=False)
    for finding in findings:
        mark = "[green]✓[/]" if finding["ok"] else "[red]✗[/]"
        out.print(f"{mark} {finding['check']:<9}", end="")
        out.print(finding["says"], markup=False)
        if finding["hint"]:
            out.print(f"            {finding['hint']}", style="dim", markup=False)


def _examined(url: str) -> list[dict[str, Any]]:
    import asyncio

    from flowfabric import FabricError

    try:
        return asyncio.run(_examine(url))
    except FabricError as error:
        return [_finding("store", False, str(error), hint_for(error))]


async def _examine(url: str) -> list[dict[str, Any]]:
    from flowfabric import connect
    from flowfabric.cli.stores import must_exist

    must_exist(url)
    async with await connect(url, migrate=False) as engine:
        backend, schema = engine.capabilities().backend, engine.schema.known
        release = getattr(engine, "release", None)
        return [
            *([] if release is None else [_server(release)]),
            _finding("store", True, f"{backend} answers" + ("" if release is None else ", behind the server")),
            _finding("schema", True, f"version {schema}, the one {'this release' if release is None else 'it'} knows"),
            *await _times(engine),
            await _keystore(engine),
        ]


def _server(release: str) -> dict[str, Any]:
    from flowfabric import __version__

    same = release == __version__
    says = f"FlowFabric {release}" + ("" if same else f"; this is {__version__}")
    return _finding(
        "server", True, says, "they should understand each other; if not, update the older one", tell=not same
    )


async def _times(engine: Engine) -> list[dict[str, Any]]:
    from statistics import median
    from time import perf_counter, time

    trips, skews = [], []
    for _ in range(PINGS):
        began, before = perf_counter(), time()
        now = await engine.ping()
        trips.append((perf_counter() - began) * 1000)
        skews.append(now - (before + time()) / 2 * 1000)
    trip, skew = median(trips), median(skews)
    return [
        _finding(
            "latency",
            trip <= SLOW_MS,
            f"a round trip takes {trip:.1f} ms",
            "everything that is asked waits for it: keep workers near",
        ),
        _finding(
            "clock",
            abs(skew) <= SKEWED_MS,
            f"the store is {abs(skew):.0f} ms {'ahead of' if skew >= 0 else 'behind'} this machine",
            "leases and delays go by the store's clock and are safe; logs will disagree: set this machine's clock",
        ),
    ]


async def _keystore(engine: Engine) -> dict[str, Any]:
    kids = await engine.list_waitpoint_hmac_kids()
    if kids.current_kid is None:
        return _finding(
            "keystore",
            True,
            "no signing key yet, so no grants; plain claims need none",
            "a Fabric makes one when it first starts",
            tell=True,
        )
    return _finding("keystore", True, f"{kids.current_kid} signs, {len(kids.verifying)} more verify")


def _finding(check: str, ok: bool, says: str, hint: str | None = None, *, tell: bool = False) -> dict[str, Any]:
    return {"check": check, "ok": ok, "says": says, "hint": hint if tell or not ok else None}
