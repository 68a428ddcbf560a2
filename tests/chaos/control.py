"""A control beside the workers: how much slower this machine is right now than when it is idle.

The process does the same small piece of work again and again, with pauses. It touches no store. What it loses is lost
to other processes, so a bound in wall time may be stretched by it without hiding a wait of the engine's own.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

PAUSE_S = 0.2
WORK_S = 0.02  # of processor time: longer than the scheduler lets somebody run who has just slept


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One piece of work: when it began and ended, and how many times longer it took than it ran."""

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
    """Everything that the control has measured so far."""
    decode = msgspec.json.Decoder(Sample).decode
    return [decode(line) for line in path.read_bytes().splitlines()]


def stretch_between(taken: list[Sample], since_ms: int, until_ms: int) -> float:
    """How many times longer work took between two instants, at worst; 1 on an idle machine."""
    return max((one.stretch for one in taken if one.ended_ms > since_ms and one.began_ms < until_ms), default=1.0)


if __name__ == "__main__":
    run(Path(sys.argv[1]))
