"""`ff bench`: benchmarks of a store, compared with a control in the same run."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from flowfabric.cli.output import JsonOption, console, exit_on_error, print_json, print_table
from flowfabric.cli.stores import StoreOption, resolve_store_url
from flowfabric.model.text import pluralize

if TYPE_CHECKING:
    from flowfabric.bench.capability import CapabilityReport, RoutingResult
    from flowfabric.bench.flow import FlowReport, LatencyPercentiles
    from flowfabric.bench.http import HttpReport
    from flowfabric.bench.scratch_store import BenchReport
    from flowfabric.bench.sdk import SdkReport
    from flowfabric.bench.suspend import SuspendReport as WaitReport
    from flowfabric.bench.throughput import ProgressCallback, ThroughputReport

T = TypeVar("T")
Row = tuple[object, ...]

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Benchmark a store, compared with a bare table."""


@app.command()
def throughput(
    jobs: Annotated[int, typer.Option(min=100, help="Executions per round.")] = 20_000,
    payload: Annotated[int, typer.Option(min=0, help="Bytes of input of each execution.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of engine and control; medians are reported.")] = 5,
    depth: Annotated[
        int, typer.Option(min=0, help="Also measure claims in a store with this many finished and waiting rows.")
    ] = 0,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Submit, drain and latency. In a scratch store that is created beside the named one and removed afterwards."""
    from flowfabric.bench.throughput import throughput

    measure = partial(throughput, jobs=jobs, payload_bytes=payload, rounds=rounds, depth=depth)
    _measure(measure, _print_throughput, store, json=json)


@app.command()
def suspend(
    rounds: Annotated[int, typer.Option(min=1, help="Suspends, each followed by its signal and claim.")] = 300,
    frames: Annotated[int, typer.Option(min=256, help="Frames written to one execution.")] = 50_000,
    tails: Annotated[int, typer.Option(min=1, help="Frames whose delivery to a waiting reader is timed.")] = 300,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Suspend → signal → running again, and streams. Frames per second, and their latency to a reader."""
    from flowfabric.bench.suspend import suspend

    _measure(partial(suspend, rounds=rounds, frames=frames, tails=tails), _print_waits, store, json=json)


@app.command()
def flow(
    chains: Annotated[int, typer.Option(min=16, help="Chains of ten steps per round.")] = 600,
    samples: Annotated[int, typer.Option(min=2, help="Fan-outs and cancels that are measured.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of chains; the median is reported.")] = 3,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Chains, fan-outs with joins, and cancels of siblings. In a scratch store beside the named one."""
    from flowfabric.bench.flow import flow

    _measure(partial(flow, chains=chains, samples=samples, rounds=rounds), _print_flow, store, json=json)


@app.command()
def capability(
    jobs: Annotated[int, typer.Option(min=100, help="Executions per round.")] = 20_000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds with and without requirements; medians are reported.")] = 3,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """The cost of ten capability sets in a drain. And how tasks are routed to capable workers, in a scratch store."""
    from flowfabric.bench.capability import capability

    _measure(partial(capability, jobs=jobs, rounds=rounds), _print_capability, store, json=json)


@app.command()
def sdk(
    jobs: Annotated[
        int | None, typer.Option(min=200, help="Tasks per round: by default 10,000 on SQLite, else 20,000.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Slots of a worker: by default 100 on SQLite, else 200.")
    ] = None,
    functions: Annotated[int, typer.Option(min=16, help="Durable functions of ten steps per round.")] = 600,
    samples: Annotated[int, typer.Option(min=20, help="Tasks that are timed from submit to result.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of FlowFabric and peer; medians are reported.")] = 3,
    workers: Annotated[int, typer.Option(min=1, help="Also drain with this many worker processes.")] = 1,
    peer: Annotated[bool, typer.Option(help="Measure another task queue, too.")] = True,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Tasks through a worker, compared with another queue. pgqueuer on Postgres, dramatiq on Valkey, huey on SQLite."""
    from flowfabric.bench.sdk import sdk

    measure = partial(
        sdk,
        jobs=jobs,
        slots=slots,
        samples=samples,
        functions=functions,
        rounds=rounds,
        workers=workers,
        with_peer=peer,
    )
    report = _measure(measure, _print_sdk, store, json=json)
    if report.peer_missing:
        typer.echo(f"ff: no peer: {report.peer_missing}", err=True)


@app.command()
def http(
    requests: Annotated[int, typer.Option(min=100, help="Requests of each kind per round.")] = 3000,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of server and bare route.")] = 3,
    clients: Annotated[int, typer.Option(min=1, help="Keep-alive connections.")] = 32,
    store: StoreOption = None,
    json: JsonOption = False,
) -> None:
    """Requests to the server, compared with a bare FastAPI route. Create, claim and complete."""
    from flowfabric.bench.http import http

    _measure(partial(http, requests=requests, rounds=rounds, clients=clients), _print_http, store, json=json)


def _measure(
    measure: Callable[..., Coroutine[Any, Any, T]],
    print_report: Callable[[T], None],
    store: str | None,
    *,
    json: bool,
) -> T:
    """Run a benchmark with a progress bar, print its report or the JSON document, and return the report."""
    from flowfabric import event_loop

    with exit_on_error(), _progress(quiet=json) as progress:
        report = event_loop.run(measure(resolve_store_url(store), progress=progress))
    if json:
        print_json(report)
    else:
        print_report(report)
    return report


@contextmanager
def _progress(*, quiet: bool) -> Iterator[ProgressCallback | None]:
    if quiet:
        yield None
        return
    from rich.progress import Progress as Bar

    screen = console(stderr=True)
    with Bar(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, steps: bar.update(task, description=what, completed=done, total=steps)


def _print_throughput(report: ThroughputReport) -> None:
    rows: list[Row] = [
        ("drain", f"{report.drain_per_s:,}/s", _rate(report.control_drain_per_s), report.drain_ratio),
        ("bulk submit", f"{report.bulk_submit_per_s:,}/s", _rate(report.control_insert_per_s), report.submit_ratio),
        ("64 concurrent submits", f"{report.single_submit_per_s:,}/s", "", None),
        (
            "submit → claimed, p50 / p99",
            f"{report.latency_p50_ms} / {report.latency_p99_ms} ms",
            "" if report.control_latency_p50_ms is None else f"{report.control_latency_p50_ms} ms",
            report.latency_ratio,
        ),
    ]
    if report.server_us_per_drained is not None:
        bare = report.control_server_us_per_drained
        rows.append(("server CPU of a bulk submit", f"{report.server_us_per_submit} µs", "", None))
        rows.append(("server CPU of a drain", f"{report.server_us_per_drained} µs", f"{bare} µs", None))
    if report.claim_cost_ratio is not None:
        deep = f"claim of 100 beside {report.depth:,} + {report.depth:,} rows"
        rows.append((deep, f"{report.claim_at_depth_ms} ms", f"{report.claim_ms} ms", report.claim_cost_ratio))
    print_table("", ("", "engine", "control", "ratio"), rows)
    _print_setup(report, f"{report.jobs:,} jobs of {report.payload_bytes} bytes, {pluralize(report.rounds, 'round')}")


def _print_waits(report: WaitReport) -> None:
    rows: list[Row] = [
        ("suspend → signal → running again", f"{report.resume_p50_ms} ms", f"{report.resume_p99_ms} ms"),
        ("  of which suspend", f"{report.suspend_p50_ms} ms", ""),
        ("  of which signal", f"{report.signal_p50_ms} ms", ""),
        ("  from signal to running", f"{report.running_p50_ms} ms", ""),
        ("one small guarded commit", f"{report.commit_p50_ms} ms", ""),
        ("append → a waiting tail has it", f"{report.tail_p50_ms} ms", f"{report.tail_p99_ms} ms"),
    ]
    print_table("", ("", "p50", "p99"), rows)
    typer.echo(f"frames to one execution: {report.frames_per_s:,}/s ({report.frames:,} frames)")
    _print_setup(report, f"{pluralize(report.rounds, 'round')}, {pluralize(report.tails, 'tail')}")


def _print_flow(report: FlowReport) -> None:
    fan, control = report.fan_out_and_join, report.control_cancel
    chains = f"chains of {report.steps}, {report.in_flight} in flight"
    cancels = f"cancel of {report.siblings - 1} siblings, p50 / p99"
    rows: list[Row] = [
        (chains, f"{report.chains_per_s:,}/s", _rate(report.control_chains_per_s), report.chains_ratio),
        (f"fan-out of {report.fan} and join, p50 / p99", _spread(fan), "", None),
        (cancels, _spread(report.quorum_cancel), "" if control is None else _spread(control), None),
        (f"a graph of {report.graph_nodes:,} nodes in one call", f"{report.graph_create_s} s", "", None),
    ]
    print_table("", ("", "engine", "control", "ratio"), rows)
    _print_setup(report, f"{pluralize(report.rounds, 'round')}, {pluralize(fan.samples, 'sample')}")


def _print_capability(report: CapabilityReport) -> None:
    rows: list[Row] = [
        ("drain without requirements", f"{report.plain_drain_per_s:,}/s", ""),
        (f"drain of {report.sets} capability sets", f"{report.drain_per_s:,}/s", report.drain_ratio),
    ]
    for name, routing in (("happy", report.happy), ("partial", report.partial), ("scarce", report.scarce)):
        rows.append((f"{name}: {routing.tasks:,} tasks, {routing.workers} workers", _routed(routing), routing.routed))
    print_table("", ("", "engine", "ratio"), rows)
    _print_setup(report, f"{report.jobs:,} jobs, {pluralize(report.rounds, 'round')}")


def _print_sdk(report: SdkReport) -> None:
    peer = report.peer
    done = f"{report.submit_to_done_p50_ms} / {report.submit_to_done_p99_ms} ms"
    functions = f"functions of {report.durable_steps} steps, {report.durable_in_flight} in flight"
    rows: list[Row] = [
        ("drain", f"{report.drain_per_s:,}/s", f"{peer.drain_per_s:,}/s" if peer else "", report.drain_ratio),
        ("submit → done, p50 / p99", done, "", None),
        (functions, f"{report.durable_per_s:,}/s", "", None),
    ]
    if report.drain_by_workers_per_s is not None:
        rows.append((f"drain by {report.workers} workers", f"{report.drain_by_workers_per_s:,}/s", "", None))
        rows.append(("  to one worker", report.workers_ratio, "", None))
    if report.server_us_per_drained is not None:
        rows.append(("server CPU of a drained task", f"{report.server_us_per_drained} µs", "", None))
    print_table("", ("", "flowfabric", f"{peer.name} {peer.version}" if peer else "", "ratio"), rows)
    jobs = f"{report.jobs:,} jobs of {report.payload_bytes} bytes, {report.slots} slots"
    _print_setup(report, f"{jobs}, {pluralize(report.rounds, 'round')}")
    if report.load > 0.5:
        typer.echo(f"the machine was not idle: its load was {report.load} before anything was measured")
    if peer:
        typer.echo(f"durability of {peer.name}: {peer.durability}")


def _print_http(report: HttpReport) -> None:
    rates = [(name, getattr(report, name)) for name in ("control", "create", "claim", "complete")]
    title = f"{report.clients} clients, {report.store}: {report.durability}"
    print_table(title, ("", "per s", "p99 ms"), [(name, rate.per_s, rate.p99_ms) for name, rate in rates])
    typer.echo(f"create: {report.create_ratio} of a bare FastAPI route")


def _print_setup(report: BenchReport, workload: str) -> None:
    """Print what was measured on which machine, versions and durability."""
    typer.echo(f"{workload}, {pluralize(report.cores, 'core')}")
    typer.echo(f"versions: {', '.join(f'{name} {version}' for name, version in report.versions.items())}")
    typer.echo(f"durability: {report.durability}")


def _spread(times: LatencyPercentiles) -> str:
    return f"{times.p50_ms} / {times.p99_ms} ms"


def _routed(routing: RoutingResult) -> str:
    times = f"{routing.latency_p50_ms} / {routing.latency_p99_ms} ms"
    return f"{times}, {routing.claims_per_task} claims a task"


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,}/s"
