"""`ff bench`: measurements beside a control, in one run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from flowfabric.cli.stores import StoreOption, chosen_store
from flowfabric.cli.telling import JsonOption, console, document, table, telling_errors

if TYPE_CHECKING:
    from flowfabric.bench.suspend import Report as WaitReport
    from flowfabric.bench.throughput import Progress, Report


def add_to(app: typer.Typer) -> None:
    """Hang the commands up."""
    bench = typer.Typer(help="Measure a store through the engine, beside a bare table.", no_args_is_help=True)
    bench.callback()(_bench)
    bench.command()(throughput)
    bench.command()(suspend)
    app.add_typer(bench, name="bench")


def _bench() -> None:
    """Measure a store through the engine, beside a bare table."""


def throughput(
    jobs: Annotated[int, typer.Option(min=100, help="Executions per round.")] = 20_000,
    payload: Annotated[int, typer.Option(min=0, help="Bytes of input of each.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Engine and control take turns this often; medians count.")] = 3,
    depth: Annotated[
        int, typer.Option(min=0, help="Also: what a claim costs beside so many finished and so many waiting rows.")
    ] = 0,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Submit, drain and latency, in a scratch store made beside the named one and removed afterwards."""
    import asyncio

    from flowfabric.bench.throughput import throughput as measured

    with telling_errors(), _progress(quiet=json) as progress:
        url = chosen_store(store)
        report = asyncio.run(
            measured(url, jobs=jobs, payload_bytes=payload, rounds=rounds, depth=depth, progress=progress)
        )
    if json:
        document(report)
    else:
        _print(report)


def suspend(
    rounds: Annotated[int, typer.Option(min=1, help="Suspends, each followed by its signal and claim.")] = 300,
    frames: Annotated[int, typer.Option(min=256, help="Frames written to one execution.")] = 50_000,
    tails: Annotated[int, typer.Option(min=1, help="Frames that a waiting tail is timed with.")] = 300,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Suspend → signal → running again, frames per second, and how soon a tail has a frame."""
    import asyncio

    from flowfabric.bench.suspend import suspend as measured

    with telling_errors(), _progress(quiet=json) as progress:
        url = chosen_store(store)
        report = asyncio.run(measured(url, rounds=rounds, frames=frames, tails=tails, progress=progress))
    if json:
        document(report)
    else:
        _print_waits(report)


def _print_waits(report: WaitReport) -> None:
    rows: list[tuple[object, ...]] = [
        ("suspend → signal → running again", f"{report.resume_p50_ms} ms", f"{report.resume_p99_ms} ms"),
        ("  of which suspend", f"{report.suspend_p50_ms} ms", ""),
        ("  of which signal", f"{report.signal_p50_ms} ms", ""),
        ("  of which claim", f"{report.claim_p50_ms} ms", ""),
        ("one small guarded commit", f"{report.commit_p50_ms} ms", ""),
        ("append → a waiting tail has it", f"{report.tail_p50_ms} ms", f"{report.tail_p99_ms} ms"),
    ]
    table("", ("", "p50", "p99"), rows)
    typer.echo(f"frames to one execution: {report.frames_per_s:,}/s ({report.frames:,} frames)")
    typer.echo(f"{report.rounds} rounds, {report.tails} tails, {report.cores} cores")
    typer.echo(f"durability: {report.durability}")


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Progress | None]:
    if quiet:
        yield None
        return
    from rich.progress import Progress as Bar

    screen = console(stderr=True)
    with Bar(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, steps: bar.update(task, description=what, completed=done, total=steps)


def _print(report: Report) -> None:
    rows: list[tuple[object, ...]] = [
        ("drain", f"{report.drain_per_s:,}/s", _rate(report.control_drain_per_s), report.drain_ratio),
        ("bulk submit", f"{report.bulk_submit_per_s:,}/s", _rate(report.control_insert_per_s), report.submit_ratio),
        ("64 concurrent submits", f"{report.single_submit_per_s:,}/s", "", None),
        ("submit → claimed, p50 / p99", f"{report.latency_p50_ms} / {report.latency_p99_ms} ms", "", None),
    ]
    if report.claim_cost_ratio is not None:
        deep = f"claim of 100 beside {report.depth:,} + {report.depth:,} rows"
        rows.append((deep, f"{report.claim_at_depth_ms} ms", f"{report.claim_ms} ms", report.claim_cost_ratio))
    table("", ("", "engine", "control", "ratio"), rows)
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    typer.echo(f"{report.jobs:,} jobs of {report.payload_bytes} bytes, {report.rounds} rounds, {report.cores} cores")
    typer.echo(f"versions: {versions}")
    typer.echo(f"durability: {report.durability}")


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,}/s"
