"""`ff bench http`: requests per second through the server, beside a bare FastAPI route, in one run.

Both servers run in processes of their own behind the same uvicorn; 32 keep-alive connections ask as fast as they are
answered. Ours also keeps what it is told: every create is durable before it is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import sys
import uuid
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator, Sequence
from importlib.util import find_spec
from statistics import median, quantiles
from time import perf_counter, time
from typing import Any

import msgspec

from flowfabric import __version__
from flowfabric.bench.scratch_store import scratch_store
from flowfabric.bench.throughput import ProgressCallback, StepCounter
from flowfabric.errors import InvalidInput

CLIENTS = 32
LANE = "bench"


class RequestRate(msgspec.Struct, frozen=True):
    """Requests per second, and how long the slowest hundredth took at least."""

    per_s: float
    p99_ms: float


class HttpReport(msgspec.Struct, frozen=True):
    """What was measured; rates are medians over the rounds."""

    store: str
    durability: str
    versions: dict[str, str]
    cores: int
    clients: int
    requests: int
    rounds: int
    create: RequestRate
    claim: RequestRate
    complete: RequestRate
    control: RequestRate
    create_ratio: float  # of the control


async def http(
    url: str, *, requests: int, rounds: int = 3, clients: int = CLIENTS, progress: ProgressCallback | None = None
) -> HttpReport:
    """Measure on a scratch store beside the named one."""
    if find_spec("fastapi") is None:
        raise InvalidInput("the bare route to compare with needs FastAPI: pip install fastapi")
    tell = StepCounter(progress, 4 * rounds)
    found: dict[str, list[RequestRate]] = {"control": [], "create": [], "claim": [], "complete": []}
    async with scratch_store(url) as place, _server("control") as control, _server("fabric", place.url) as ours:
        for number in range(1, rounds + 1):
            tell(f"round {number}: bare route")
            bodies = [_creation() for _ in range(requests)]
            found["control"].append((await _asked(control, "/v1/executions", bodies, clients, 201))[0])
            tell(f"round {number}: create")
            found["create"].append((await _asked(ours, "/v1/executions", bodies, clients, 201))[0])
            tell(f"round {number}: claim")
            wishes = [_claim()] * requests
            rate, answers = await _asked(ours, "/v1/workers/bench/claims", wishes, clients, 200)
            found["claim"].append(rate)
            tell(f"round {number}: complete")
            ends = [_complete(work["handle"]) for answer in answers for work in msgspec.json.decode(answer)["claimed"]]
            found["complete"].append((await _asked(ours, "/v1/leases/complete", ends, clients, 200))[0])
        tell.finish()
        middle = {name: _median(rates) for name, rates in found.items()}
        return HttpReport(
            store=place.url.partition("://")[0],
            durability=place.durability,
            versions={"flowfabric": __version__, "python": platform.python_version(), **place.versions},
            cores=os.cpu_count() or 1,
            clients=clients,
            requests=requests,
            rounds=rounds,
            create=middle["create"],
            claim=middle["claim"],
            complete=middle["complete"],
            control=middle["control"],
            create_ratio=round(
                median(ours.per_s / bare.per_s for ours, bare in zip(found["create"], found["control"], strict=True)), 3
            ),
        )


def _creation() -> bytes:
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


def _claim() -> bytes:
    return msgspec.json.encode({"worker_instance_id": "bench-1", "lanes": [LANE], "lease_ttl_ms": 3_600_000})


def _complete(handle: str) -> bytes:
    return msgspec.json.encode({"handle": handle, "result_b64": "e30="})


@contextlib.asynccontextmanager
async def _server(*arguments: str) -> AsyncIterator[int]:
    """A server in a process of its own; its port."""
    command = (sys.executable, "-m", "flowfabric.bench.http_servers", *arguments)
    process: Process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert process.stdout is not None
    try:
        yield int(await asyncio.wait_for(process.stdout.readline(), 60))
    finally:
        process.terminate()
        await process.wait()


async def _asked(
    port: int, path: str, bodies: Sequence[bytes], clients: int, expected: int
) -> tuple[RequestRate, list[bytes]]:
    """Ask everything, each client one after the other; the rate, and what was answered."""
    left: Iterator[bytes] = iter(bodies)
    times: list[float] = []
    answers: list[bytes] = []
    connections = [await asyncio.open_connection("127.0.0.1", port) for _ in range(clients)]

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for body in left:
            began = perf_counter()
            writer.write(_request(path, body))
            status, answer = await _answer(reader)
            times.append(perf_counter() - began)
            if status != expected:
                raise RuntimeError(f"{path} answered {status}: {answer[:200]!r}")
            answers.append(answer)

    began = perf_counter()
    await asyncio.gather(*(client(*one) for one in connections))
    took = perf_counter() - began
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
    return RequestRate(median(one.per_s for one in rates), median(one.p99_ms for one in rates))


def report_rows(report: HttpReport) -> list[tuple[Any, ...]]:
    """The report as rows of a table."""
    rows = [(name, getattr(report, name)) for name in ("control", "create", "claim", "complete")]
    return [(name, rate.per_s, rate.p99_ms) for name, rate in rows]
