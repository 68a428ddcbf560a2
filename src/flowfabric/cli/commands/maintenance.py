"""`ff version`, `ff migrate`, `ff backup`, `ff doctor`: maintain the installation and its store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flowfabric.cli.output import JsonOption, console, exit_on_error, hint_for, print_json, report
from flowfabric.cli.stores import (
    StoreOption,
    StoreOrServerOption,
    check_is_store,
    redact_url,
    resolve_store_url,
    run_on_store,
)
from flowfabric.model.text import pluralize

if TYPE_CHECKING:
    from flowfabric import Engine
    from flowfabric.engine_protocol import EngineAPI
    from flowfabric.model.deployment import LaneNearCeiling, ServerReport, SnapshotHolder

PINGS = 7
SLOW_MS = 50
SKEWED_MS = 5_000
MAX_NAMED = 3  # executions or holders of snapshots
LONG_SNAPSHOT_S = 60  # an older snapshot is reported as a problem
MANY_TRANSACTIONS = 10_000  # a transaction is also old if this many began after it


def version() -> None:
    """Print the version of FlowFabric."""
    from flowfabric import __version__

    typer.echo(f"flowfabric {__version__}")


def print_version_and_exit(asked: bool) -> None:
    """Print the version for `ff --version` and exit."""
    if asked:
        version()
        raise typer.Exit


def migrate(store: StoreOption = None, json: JsonOption = False) -> None:
    """Create the store, or migrate its schema to this release. A store that is up to date is not changed."""

    async def versions(engine: EngineAPI) -> tuple[int, int, bool]:
        return engine.schema.found, engine.schema.current, engine.schema.compatible

    with exit_on_error():
        check_is_store(resolve_store_url(store), "it brings its store up to date when it starts")
    found, known, compatible = run_on_store(store, versions, migrate=True)
    url = redact_url(resolve_store_url(store))
    done = f"schema version {found} → {known}" if found else f"created with schema version {known}"
    if found == known:
        done = f"already at schema version {known}"
    report(json, f"✓ {url}: {done}", **{"store": url, "from": found, "to": known, "compatible": compatible})
    if not compatible:
        typer.echo("  the release before does not run on it: its workers and servers stop by themselves", err=True)


def backup(
    target: Annotated[Path, typer.Argument(metavar="FILE", help="The new file; one that exists is refused.")],
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Copy a SQLite store to a new file while it is in use. The copy is checked, and opens like any store."""
    import asyncio

    from flowfabric.connector import backup as copy_store

    with exit_on_error():
        size = asyncio.run(copy_store(resolve_store_url(store), target))
    text, url = f"✓ {target}: {size} bytes, integrity ok", redact_url(resolve_store_url(store))
    report(json, text, store=url, file=str(target), bytes=size, integrity="ok")


def doctor(store: StoreOrServerOption = None, json: JsonOption = False) -> None:
    """Check the store. Whether it exists and is current, how fast it answers, and its clock."""
    with exit_on_error():
        url = resolve_store_url(store)
    findings = _run_checks(url)
    healthy = all(finding["ok"] for finding in findings)
    if json:
        print_json({"store": redact_url(url), "healthy": healthy, "checks": findings})
    else:
        _print(url, findings)
    if not healthy:
        raise typer.Exit(1)


def _print(url: str, findings: list[dict[str, Any]]) -> None:
    out = console()
    out.print(redact_url(url), markup=False)
    for finding in findings:
        mark = "[green]✓[/]" if finding["ok"] else "[red]✗[/]"
        out.print(f"{mark} {finding['check']:<9}", end="")
        out.print(finding["says"], markup=False)
        if finding["hint"]:
            out.print(f"            {finding['hint']}", style="dim", markup=False)


def _run_checks(url: str) -> list[dict[str, Any]]:
    import asyncio

    from flowfabric import FabricError

    try:
        return asyncio.run(_check_store(url))
    except FabricError as error:
        return [_finding("store", False, str(error), hint_for(error))]


async def _check_store(url: str) -> list[dict[str, Any]]:
    from flowfabric import Engine, connect
    from flowfabric.cli.stores import check_store_exists

    check_store_exists(url)
    async with await connect(url, migrate=False) as engine:
        backend, schema = engine.capabilities().backend, engine.schema.current
        release = getattr(engine, "release", None)
        return [
            *([] if release is None else [_server(release)]),
            _finding("store", True, f"{backend} answers" + ("" if release is None else ", behind the server")),
            _finding("schema", True, f"version {schema}, the one {'this release' if release is None else 'it'} knows"),
            *await _latency_and_clock(engine),
            *(await _store_checks(engine) if isinstance(engine, Engine) else []),
            _held(await engine.count_held()),
            await _keystore(engine),
        ]


def _server(release: str) -> dict[str, Any]:
    from flowfabric import __version__

    same = release == __version__
    says = f"FlowFabric {release}" + ("" if same else f"; this is {__version__}")
    return _finding("server", True, says, "they should be compatible; if not, update the older one", show_hint=not same)


async def _latency_and_clock(engine: EngineAPI) -> list[dict[str, Any]]:
    from statistics import median
    from time import perf_counter, time

    latencies, skews = [], []
    for _ in range(PINGS):
        started, before = perf_counter(), time()
        now = await engine.ping()
        latencies.append((perf_counter() - started) * 1000)
        skews.append(now - (before + time()) / 2 * 1000)
    latency, skew = median(latencies), median(skews)
    return [
        _finding(
            "latency",
            latency <= SLOW_MS,
            f"a round trip takes {latency:.1f} ms",
            "every operation waits for it: run workers near the store",
        ),
        _finding(
            "clock",
            abs(skew) <= SKEWED_MS,
            f"the store is {abs(skew):.0f} ms {'ahead of' if skew >= 0 else 'behind'} this machine",
            "leases and delays go by the store's clock and are safe; logs will disagree: set this machine's clock",
        ),
    ]


async def _store_checks(engine: Engine) -> list[dict[str, Any]]:
    """Check what is visible only on the store itself, not through a server."""
    holders = await engine.gauges.snapshot_holders(MAX_NAMED)
    report = await engine.gauges.server_report()
    near = [] if report is None else await engine.gauges.lanes_near_ceiling(report, engine.lane_spreads.spreads())
    return [
        _queues(await engine.gauges.executions_without_queue(MAX_NAMED + 1)),
        *([] if holders is None else [_snapshots(holders)]),
        *([] if report is None else _servers(report)),
        *([] if report is None else _lanes(report, near)),
    ]


def _held(held: dict[str, int]) -> dict[str, Any]:
    if not held:
        return _finding("held", True, "no execution waits for other code")
    tasks = ", ".join(f"{count} of {task}" for task, count in sorted(held.items()))
    return _finding(
        "held",
        False,
        f"{pluralize(sum(held.values()), 'execution')} held because the code of the task has changed: {tasks}",
        "`ff explain` says what does not fit; a version that fits continues them, or `ff release --accept` one",
    )


def _servers(report: ServerReport) -> list[dict[str, Any]]:
    return [
        _finding("durable", True, report.durability),
        *(_finding("servers", False, warning) for warning in report.warnings),
    ]


def _lanes(report: ServerReport, near: list[LaneNearCeiling]) -> list[dict[str, Any]]:
    if not near:
        busiest = max((node.cpu for node in report.nodes), default=0.0)
        return [_finding("lanes", True, f"no lane fills its server; the busiest server uses {busiest:.0%} of a core")]
    return [
        _finding(
            "lanes",
            False,
            f"lane {lane.lane_id} has {lane.share:.0%} of the work on {lane.address},"
            f" which uses {lane.cpu:.0%} of a core",
            f"on a cluster, spread it over more partitions: ff lanes {lane.lane_id} --spread {max(8, 2 * lane.spread)}",
        )
        for lane in near
    ]


def _queues(unlisted: list[str]) -> dict[str, Any]:
    if not unlisted:
        return _finding("queues", True, "no claimable execution is missing from its ready queue")
    names = ", ".join(unlisted[:MAX_NAMED]) + (" and others" if len(unlisted) > MAX_NAMED else "")
    return _finding(
        "queues",
        False,
        f"no claim finds {names}: their ready queues are missing, as after a failover that lost writes",
        "the sweeps of any worker or server put them back into their queues within seconds: start one",
    )


def _snapshots(holders: list[SnapshotHolder]) -> dict[str, Any]:
    old = [
        holder
        for holder in holders
        if holder.transactions >= MANY_TRANSACTIONS or (holder.age_s or 0) >= LONG_SNAPSHOT_S
    ]
    reported = old or [holder for holder in holders if (holder.age_s or 0) >= 1 or holder.kind != "transaction"]
    if not reported:
        return _finding("snapshot", True, "no old snapshot keeps dead rows from being removed")
    says = "; ".join(_holder(holder) for holder in reported)
    return _finding(
        "snapshot",
        not old,
        f"dead rows since then cannot be removed: {says}",
        "claims cost more and find retries later: end the transaction (pg_terminate_backend), commit or roll back the"
        " prepared one, or drop the slot; idle_in_transaction_session_timeout prevents it",
    )


def _holder(holder: SnapshotHolder) -> str:
    """Describe the holder of a snapshot."""
    parts = [holder.name, holder.application, holder.database and f"database {holder.database}", holder.state]
    age = f" for {holder.age_s} s" if holder.age_s is not None else ""
    since = f"{pluralize(holder.transactions, 'transaction')} ago"
    return f"{holder.kind} {', '.join(part for part in parts if part)}{age}, {since}"


async def _keystore(engine: EngineAPI) -> dict[str, Any]:
    kids = await engine.list_waitpoint_hmac_kids()
    if kids.current_kid is None:
        return _finding(
            "keystore",
            True,
            "no signing key yet: approval links and grants need one",
            "the first worker, server or submit makes one",
            show_hint=True,
        )
    others = f"; tokens of {pluralize(len(kids.verifying), 'other key')} are still valid" if kids.verifying else ""
    return _finding("keystore", True, f"{kids.current_kid} signs{others}")


def _finding(check: str, ok: bool, says: str, hint: str | None = None, *, show_hint: bool = False) -> dict[str, Any]:
    return {"check": check, "ok": ok, "says": says, "hint": hint if show_hint or not ok else None}
