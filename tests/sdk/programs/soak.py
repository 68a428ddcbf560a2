"""Runs many random programs: `./dev soak programs --count 20000 --seed 1 --place memory --jobs 2`.

Programs are drawn in parts of 100, each from a seed of its own: `--seed SEED --count 100` draws a part again. A program
that breaks a promise is reduced and printed, with the faults that did it.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from itertools import islice
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.conftest import STORES, migrate
from tests.sdk.programs.environments import Fault, explain, faults, run_program
from tests.sdk.programs.loops import IN_REAL_TIME, run_on_uvloop
from tests.sdk.programs.program import EVERYTHING, Feature, Program, programs
from tests.sdk.programs.worlds import run_in_world
from tests.servers import postgres

PART = 100  # programs of one seed
PLACES = ("world", "uvloop", *STORES)

kills: st.SearchStrategy[list[int]] = st.lists(st.integers(0, 15), max_size=2)


def check_program(place: str, program: Program, some: Sequence[Any], *, dsn: str | None = None) -> None:
    """Run a program with faults, in a world with kills; raise an error that explains which promises were broken."""
    match place:
        case "world":
            violations, journal, end = asyncio.run(run_in_world(program, some))
        case "uvloop":
            violations, journal, end = run_on_uvloop(program, some)
        case _:
            violations, journal, end = asyncio.run(run_program(place, program, some, dsn=dsn))
    assert not violations, f"{program!r}\n{list(some)!r}\n{explain(violations, journal, end)}"


def run_part(
    place: str,
    features: frozenset[Feature],
    *,
    examples: int = PART,
    seed: int | None = None,
    reduces: bool = True,
    dsn: str | None = None,
) -> None:
    """Draw programs and faults from a seed; reduce a case that breaks a promise."""
    phases = (Phase.generate, Phase.shrink) if reduces else (Phase.generate,)
    drawn_faults: st.SearchStrategy[Sequence[int] | tuple[Fault, ...]] = faults if place in STORES else kills
    features = features & IN_REAL_TIME if place == "uvloop" else features

    @settings(
        max_examples=examples,
        deadline=None,
        phases=phases,
        derandomize=seed is None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(features), drawn_faults)
    def check(program: Program, some: Sequence[Any]) -> None:
        check_program(place, program, some, dsn=dsn)

    (check if seed is None else hypothesis.seed(seed)(check))()


@cache
def _database() -> str:
    """Create a database for this process; return its DSN. It goes with the server, which is one for tests."""
    server = postgres()
    template = server.template(f"ff_soak_{os.getppid()}", migrate)
    return server.create_database(f"ff_soak_{os.getpid()}", template)


def _part_report(place: str, features: frozenset[Feature], seed: int, examples: int) -> str | None:
    """Run a part in a process of its own; return what went wrong."""
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    try:
        dsn = _database() if place == "postgres" else None
        run_part(place, features, examples=examples, seed=seed, dsn=dsn)
    except BaseExceptionGroup as failures:  # a program that failed once only
        return "\n".join([f"seed {seed}, {place}", str(failures), *map(str, failures.exceptions)])
    except BaseException as failure:
        return f"seed {seed}, {place}\n{failure}"
    return None


def main(arguments: Sequence[str]) -> int:
    """Run parts until all programs were run; return the number of parts that broke a promise."""
    parser = argparse.ArgumentParser(prog="./dev soak programs", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="how many programs")
    parser.add_argument("--seed", type=int, default=1, help="the seed of the first part")
    parser.add_argument("--place", choices=PLACES, default="memory")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--without", default="", help="features to leave out: OPTIONS,RACE")
    options = parser.parse_args(arguments)
    features = EVERYTHING - {Feature[name] for name in options.without.split(",") if name}
    parts = iter(range(options.seed, options.seed + -(-options.count // PART)))
    failed, done, began = 0, 0, time.monotonic()

    with ProcessPoolExecutor(options.jobs) as pool:

        def start() -> Iterator[Future[str | None]]:
            for seed in parts:
                size = min(PART, options.count - (seed - options.seed) * PART)
                yield pool.submit(_part_report, options.place, features, seed, size)

        waiting = start()
        running = set(islice(waiting, options.jobs))
        while running:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for part in finished:
                report = part.result()
                done += 1
                failed += report is not None
                if report is not None:
                    print(report, flush=True)
                running.update(islice(waiting, 1))
            if done % 10 == 0:
                print(f"· {done * PART} programs, {failed} wrong, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{options.count} programs in {options.place}, seed {options.seed}: {failed} wrong parts")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
