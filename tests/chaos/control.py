"""A control process beside the workers that measures how much slower this machine is than an idle one.

The process repeats the same small computation, with pauses, and uses no store. The time it loses is lost to other
processes, so a bound in wall time may be stretched by it without hiding a wait inside the engine.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

PAUSE_S = 0.2
WORK_S = 0.02  # Processor time: longer than the scheduler lets a process run that has just slept.


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One computation: start, end, and the ratio of wall time to processor time."""

    began_ms: int
    ended_ms: int
    stretch: float


def run(path: Path) -> None:
    """Write samples until the process is killed."""
    with path.open("ab", buffering=0) as file:
        while True:
            at_ms, began, used = int(time.time() * 1000), time.monotonic(), time.process_time()
            while time.process_time() - used < WORK_S:
                pass
            stretch = (time.monotonic() - began) / (time.process_time() - used)
            file.write(msgspec.json.encode(Sample(at_ms, int(time.time() * 1000), max(1.0, stretch))) + b"\n")
            time.sleep(PAUSE_S)


def samples(path: Path) -> list[Sample]:
    """Return everything that the control process has measured so far."""
    decode = msgspec.json.Decoder(Sample).decode
    return [decode(line) for line in path.read_bytes().splitlines()]


def stretch_between(measured: list[Sample], since_ms: int, until_ms: int) -> float:
    """Return the highest slowdown between two instants; 1 on an idle machine."""
    return max((one.stretch for one in measured if one.ended_ms > since_ms and one.began_ms < until_ms), default=1.0)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
