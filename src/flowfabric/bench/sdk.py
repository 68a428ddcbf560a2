"""`ff bench sdk`: tasks through a real worker process, beside another task queue in the same run."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median, quantiles
from time import monotonic, perf_counter
from urllib.parse import urlsplit

import msgspec

from flowfabric.bench import sdk_app
from flowfabric.bench.peers import DRAMATIQ, HUEY, PGQUEUER, Peer, PeerMissing
from flowfabric.bench.peers.starts import RECORD_VARIABLE, body, count, per_second
from flowfabric.bench.scratch_store import BenchReport, ScratchStore, paced, per_job, scratch_store
from flowfabric.bench.throughput import PER_SECOND, ProgressCallback, StepCounter
from flowfabric.connector import VALKEY_SCHEMES
from flowfabric.engine_protocol import EngineAPI
from flowfabric.errors import InvalidInput

SLOTS = 100
# pgqueuer fetches 100 jobs at a time and starts them without a limit; the smallest limit that it accepts is 200.
SLOTS_ON_A_SERVER = 200
JOBS = 10_000
JOBS_ON_A_SERVER = 20_000  # as in other benchmarks of pgqueuer, which becomes slower with more jobs
WORKERS_JOBS = 4  # times as many jobs for several workers, which do not begin at the same moment
IN_FLIGHT = 16
TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.02


class PeerReport(msgspec.Struct, frozen=True):
    """The results of the other task queue with the same jobs."""

    name: str
    version: str
    durability: str
    jobs: int
    drain_per_s: float


class Drained(msgspec.Struct, frozen=True):
    """A drain: its rate, and the CPU that it cost the servers for each job."""

    per_s: float
    server_us: float | None


class SdkReport(BenchReport, frozen=True, omit_defaults=True):
    """The results; rates are medians over the rounds, from the first start of a job to the last."""

    load: float  # load average before the run; if it is not near 0, other processes disturb the results
    rounds: int
    jobs: int
    payload_bytes: int
    slots: int
    drain_per_s: float
    submit_to_done_p50_ms: float
    submit_to_done_p99_ms: float
    durable_steps: int
    durable_in_flight: int
    durable_per_s: float
    server_us_per_drained: float | None = None  # CPU of all servers
    workers: int | None = None
    drain_by_workers_per_s: float | None = None  # rate of `workers` processes together
    workers_ratio: float | None = None  # rate divided by that of one worker in the same round
    peer: PeerReport | None = None
    drain_ratio: float | None = None  # rate divided by the peer's
    peer_missing: str | None = None  # why there is none


async def sdk(
    url: str,
    *,
    jobs: int | None = None,
    slots: int | None = None,
    samples: int = 200,
    functions: int = 600,
    rounds: int = 3,
    workers: int = 1,
    with_peer: bool = True,
    progress: ProgressCallback | None = None,
) -> SdkReport:
    """Measure on scratch stores beside the named one; the drain also with so many worker processes."""
    on_a_server = not url.startswith("sqlite")
    jobs = jobs or (JOBS_ON_A_SERVER if on_a_server else JOBS)
    slots = slots or (SLOTS_ON_A_SERVER if on_a_server else SLOTS)
    begin_step, load = StepCounter(progress, (4 if workers > 1 else 3) * rounds + 2), os.getloadavg()[0]
    begin_step("preparing")
    peer, missing = _peer(url) if with_peer else (None, "not asked for")
    ours, together, theirs, durable = list[Drained](), list[Drained](), list[float](), list[float]()
    with tempfile.TemporaryDirectory(prefix="ff-bench-") as name:
        folder = Path(name)
        begin_step("submit → done")  # first: after the rounds the server is busy with vacuuming
        async with _app_on_scratch_store(url) as scratch:
            times = await _latencies(scratch, folder / "latency", samples)
        for number in range(rounds):
            gc.collect()
            begin_step(f"round {number + 1}: drain")
            async with _app_on_scratch_store(url) as scratch:
                ours.append(await _drain(scratch, folder / f"starts-{number}", jobs, slots))
            if workers > 1:
                begin_step(f"round {number + 1}: drain by {workers} workers")
                async with _app_on_scratch_store(url) as scratch:
                    starts = folder / f"together-{number}"
                    together.append(await _drain(scratch, starts, jobs * WORKERS_JOBS, slots, workers))
            begin_step(f"round {number + 1}: {peer.name if peer else 'no peer'}")
            if peer is not None:
                async with scratch_store(url) as beside:
                    theirs.append(await _peer_drain(peer, beside, folder / f"peer-{number}", jobs))
            begin_step(f"round {number + 1}: durable functions")
            async with _app_on_scratch_store(url) as scratch:
                durable.append(await _durable(scratch, folder / "unused", functions))
        begin_step.finish()
    percentiles = quantiles(times, n=100)
    drained, compared = median(one.per_s for one in ours), median(theirs) if theirs else None
    server_us = [one.server_us for one in ours if one.server_us is not None]
    ratios = [two.per_s / one.per_s for one, two in zip(ours, together, strict=False)]
    loop = "uvloop" if find_spec("uvloop") else "asyncio"
    return SdkReport(
        **(scratch.report_fields() | {"versions": {"loop": loop, **scratch.all_versions}}),
        load=round(load, 2),
        rounds=rounds,
        jobs=jobs,
        payload_bytes=len(msgspec.json.encode(body())),
        slots=slots,
        drain_per_s=round(drained),
        submit_to_done_p50_ms=round(percentiles[49], 2),
        submit_to_done_p99_ms=round(percentiles[98], 2),
        durable_steps=sdk_app.STEPS,
        durable_in_flight=IN_FLIGHT,
        durable_per_s=round(median(durable), 1),
        server_us_per_drained=round(median(server_us), 1) if server_us else None,
        workers=workers if together else None,
        drain_by_workers_per_s=round(median(one.per_s for one in together)) if together else None,
        workers_ratio=round(median(ratios), 2) if ratios else None,
        peer=None
        if peer is None or compared is None
        else PeerReport(peer.name, peer.version, peer.durability, _share(peer, jobs), round(compared)),
        drain_ratio=None if compared is None else round(drained / compared, 2),
        peer_missing=missing,
    )


# -- FlowFabric -------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _app_on_scratch_store(url: str) -> AsyncIterator[ScratchStore]:
    """Run the app on a new scratch store, as each peer has one."""
    async with scratch_store(url) as scratch:
        if not scratch.shared:
            raise InvalidInput("store: a worker in another process cannot use it; use SQLite or Postgres")
        sdk_app.app.url = scratch.url
        async with sdk_app.app:
            yield scratch


async def _drain(scratch: ScratchStore, starts: Path, jobs: int, slots: int, workers: int = 1) -> Drained:
    """Submit all jobs before the workers start; return how many these started per second."""
    runs = await sdk_app.noop.submit_many([body()] * jobs)
    began_us = await scratch.server_us()
    with ExitStack() as stack:
        for _ in range(workers):
            stack.enter_context(_worker(scratch.url, starts, "--slots", str(slots), "--lanes", "noop"))
        await _started(starts, jobs)
        async with asyncio.timeout(TIMEOUT_S):
            for run in runs[-slots:]:
                if await run.result() != {"ok": True}:
                    raise AssertionError(f"{run} has another result")
        server_us = per_job(began_us, await scratch.server_us(), jobs)
    engine = await sdk_app.app.engine()
    left = [state for state in ("waiting", "active") if await _any(engine, state)]
    if left:
        raise AssertionError(f"not everything was completed: some are {' and '.join(left)}")
    return Drained(per_second(str(starts)), server_us)


async def _any(engine: EngineAPI, state: str) -> bool:
    page = await engine.search_executions(public_state=state, limit=1)
    while not page.executions and page.next_cursor is not None:
        page = await engine.search_executions(public_state=state, limit=1, cursor=page.next_cursor)
    return bool(page.executions)


async def _durable(scratch: ScratchStore, starts: Path, functions: int) -> float:
    """Run durable functions, `IN_FLIGHT` at a time; return the rate per second."""
    left = iter(range(functions))

    async def run_functions() -> None:
        for number in left:
            run = await sdk_app.ten_steps.submit(number)
            if await run.result(timeout=TIMEOUT_S) != number + sdk_app.STEPS:
                raise AssertionError(f"{run} lost a step")

    with _worker(scratch.url, starts, "--slots", str(IN_FLIGHT), "--lanes", "durable"):
        await (await sdk_app.ten_steps.submit(0)).result(timeout=TIMEOUT_S)  # the worker is up
        started = perf_counter()
        await asyncio.gather(*(run_functions() for _ in range(IN_FLIGHT)))
        return functions / (perf_counter() - started)


async def _latencies(scratch: ScratchStore, starts: Path, samples: int) -> list[float]:
    """Return the milliseconds from submit to result, at a low rate."""
    times: list[float] = []

    async def submit_and_wait() -> None:
        started = perf_counter()
        run = await sdk_app.noop.submit(body())
        await run.result(timeout=TIMEOUT_S)
        times.append((perf_counter() - started) * 1000)

    with _worker(scratch.url, starts, "--slots", "10"):
        for _ in range(20):
            await submit_and_wait()
        times.clear()
        await asyncio.gather(*[asyncio.create_task(submit_and_wait()) async for _ in paced(samples, PER_SECOND)])
    return times


@contextmanager
def _worker(url: str, starts: Path, *arguments: str) -> Iterator[None]:
    command = [sys.executable, "-m", "flowfabric.cli", "worker", "flowfabric.bench.sdk_app:app", "--store", url]
    with _process([*command, "--lease-ttl", "60s", *arguments], starts, {}):
        yield


# -- the peer ---------------------------------------------------------------------------------------------------------


def _peer(url: str) -> tuple[Peer | None, str | None]:
    """Return the peer for this kind of store, ready to run, or the reason why there is none."""
    scheme = url.partition("://")[0]
    peer = HUEY if scheme == "sqlite" else DRAMATIQ if _is_valkey(scheme) else PGQUEUER
    if scheme.endswith("+cluster"):
        return None, f"{peer.name} cannot use a cluster"
    try:
        peer.python()
    except PeerMissing as missing:
        return None, str(missing)
    return peer, None


def _is_valkey(scheme: str) -> bool:
    return scheme.removesuffix("+cluster") in VALKEY_SCHEMES


def _share(peer: Peer, jobs: int) -> int:
    return max(2, round(jobs * peer.share))


async def _peer_drain(peer: Peer, scratch: ScratchStore, starts: Path, jobs: int) -> float:
    parts = urlsplit(scratch.url)
    match peer.name:
        case HUEY.name:
            at = str(Path(parts.path[1:]).with_name("peer.db"))
        case DRAMATIQ.name:
            scheme = "rediss" if parts.scheme in ("valkeys", "rediss") else "redis"
            at = parts._replace(scheme=scheme, query="").geturl()
        case _:
            at = scratch.url
    share = _share(peer, jobs)
    submitting = await asyncio.create_subprocess_exec(
        *peer.command("submit", at, share), env={**os.environ, RECORD_VARIABLE: str(starts), "PYTHONPATH": ""}
    )
    if await submitting.wait():
        raise AssertionError(f"{peer.name} could not submit")
    with _process(peer.command("work", at), starts, {"PYTHONPATH": ""}):
        await _started(starts, share)
    return per_second(str(starts))


# -- processes --------------------------------------------------------------------------------------------------------


async def _started(starts: Path, jobs: int) -> None:
    """Wait until this many jobs have started; fail if none has started for `TIMEOUT_S`."""
    seen, seen_at = 0, monotonic()
    while seen < jobs:
        await asyncio.sleep(POLL_INTERVAL_S)
        now = count(str(starts))
        if now > seen:
            seen, seen_at = now, monotonic()
        elif monotonic() - seen_at > TIMEOUT_S:
            raise AssertionError(f"only {seen} of {jobs} jobs started")


@contextmanager
def _process(command: list[str], starts: Path, environ: Mapping[str, str]) -> Iterator[None]:
    """Run a process during the block and end it afterwards; its output is added to an error as a note."""
    log = starts.with_suffix(".log")
    with log.open("ab") as output:
        started = subprocess.Popen(
            command,
            env={**os.environ, RECORD_VARIABLE: str(starts), **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield
    except BaseException as error:
        error.add_note(log.read_text()[-2000:])
        raise
    finally:
        started.terminate()
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
