"""`ff bench http`: requests per second through the server, beside a bare FastAPI route, in one run.

Both servers run in separate processes with the same uvicorn; 32 keep-alive connections send requests without pause.
Only FlowFabric stores something: every create is durable before it is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib.util import find_spec
from statistics import median, quantiles
from time import perf_counter, time

import msgspec

from flowfabric.bench.scratch_store import BenchReport, scratch_store
from flowfabric.bench.throughput import ProgressCallback, StepCounter
from flowfabric.errors import InvalidInput

CLIENTS = 32
LANE = "bench"


class RequestRate(msgspec.Struct, frozen=True):
    """Requests per second, and the 99th percentile of their latency."""

    per_s: float
    p99_ms: float


class HttpReport(BenchReport, frozen=True):
    """The results; rates are medians over the rounds."""

    clients: int
    requests: int
    rounds: int
    create: RequestRate
    claim: RequestRate
    complete: RequestRate
    control: RequestRate
    create_ratio: float  # creates per second, divided by the control's


async def http(
    url: str, *, requests: int, rounds: int = 3, clients: int = CLIENTS, progress: ProgressCallback | None = None
) -> HttpReport:
    """Measure on a scratch store beside the named one."""
    if find_spec("fastapi") is None:
        raise InvalidInput("the bare route to compare with needs FastAPI: pip install fastapi")
    begin_step = StepCounter(progress, 4 * rounds)
    rates: dict[str, list[RequestRate]] = {"control": [], "create": [], "claim": [], "complete": []}
    async with scratch_store(url) as scratch, _server("control") as control, _server("fabric", scratch.url) as ours:
        for number in range(1, rounds + 1):
            begin_step(f"round {number}: bare route")
            bodies = [_create_body() for _ in range(requests)]
            rates["control"].append((await _measure(control, "/v1/executions", bodies, clients, 201))[0])
            begin_step(f"round {number}: create")
            rates["create"].append((await _measure(ours, "/v1/executions", bodies, clients, 201))[0])
            begin_step(f"round {number}: claim")
            claims = [_claim_body()] * requests
            rate, answers = await _measure(ours, "/v1/workers/bench/claims", claims, clients, 200)
            rates["claim"].append(rate)
            begin_step(f"round {number}: complete")
            completions = [
                _complete_body(work["handle"]) for answer in answers for work in msgspec.json.decode(answer)["claimed"]
            ]
            rates["complete"].append((await _measure(ours, "/v1/leases/complete", completions, clients, 200))[0])
        begin_step.finish()
        medians = {name: _median(samples) for name, samples in rates.items()}
        return HttpReport(
            **scratch.report_fields(),
            clients=clients,
            requests=requests,
            rounds=rounds,
            create=medians["create"],
            claim=medians["claim"],
            complete=medians["complete"],
            control=medians["control"],
            create_ratio=round(
                median(ours.per_s / bare.per_s for ours, bare in zip(rates["create"], rates["control"], strict=True)), 3
            ),
        )


def _create_body() -> bytes:
    return msgspec.json.encode(
        {
            "execution_id": f"{{fp:7}}:{uuid.uuid4()}",
            "namespace": "bench",
            "lane_id": LANE,
            "execution_kind": "bench",
            "input_payload": list(b"a small payload"),
            "priority": 0,
            "creator_identity": "bench",
            "partition_id": 7,
            "now": int(time() * 1000),
        }
    )


def _claim_body() -> bytes:
    return msgspec.json.encode({"worker_instance_id": "bench-1", "lanes": [LANE], "lease_ttl_ms": 3_600_000})


def _complete_body(handle: str) -> bytes:
    return msgspec.json.encode({"handle": handle, "result_b64": "e30="})


@contextlib.asynccontextmanager
async def _server(*arguments: str) -> AsyncIterator[int]:
    """Run a server in a separate process; yield its port."""
    command = (sys.executable, "-m", "flowfabric.bench.http_servers", *arguments)
    process: Process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert process.stdout is not None
    try:
        yield int(await asyncio.wait_for(process.stdout.readline(), 60))
    finally:
        process.terminate()
        await process.wait()


async def _measure(
    port: int, path: str, bodies: Sequence[bytes], clients: int, expected: int
) -> tuple[RequestRate, list[bytes]]:
    """Send all requests from concurrent clients; return the rate and the answers."""
    left: Iterator[bytes] = iter(bodies)
    times: list[float] = []
    answers: list[bytes] = []
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(clients)]

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for body in left:
            started = perf_counter()
            writer.write(_request(path, body))
            status, answer = await _answer(reader)
            times.append(perf_counter() - started)
            if status != expected:
                raise RuntimeError(f"{path} answered {status}: {answer[:200]!r}")
            answers.append(answer)

    started = perf_counter()
    await asyncio.gather(*(client(*connection) for connection in connections))
    took = perf_counter() - started
    for _, writer in connections:
        writer.close()
    return RequestRate(round(len(bodies) / took), round(quantiles(times, n=100)[98] * 1000, 2)), answers


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    _, _, length = head.lower().partition(b"content-length: ")
    return int(head[9:12]), await reader.readexactly(int(length.partition(b"\r")[0]))


def _median(rates: Sequence[RequestRate]) -> RequestRate:
    return RequestRate(
        median(connection.per_s for connection in rates), median(connection.p99_ms for connection in rates)
    )
