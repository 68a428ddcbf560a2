"""Programs on uvloop, in real time: virtual time needs the loop of asyncio.

They wait for children only, so that they take little time. A process dies at a point of its durable function, and
another one takes over at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import uvloop

from flowfabric import Context, Retry, current
from flowfabric.sdk.durable.attempt import SimulatedCrash
from tests.sdk.conftest import running_worker
from tests.sdk.programs.interpreter import make_app, make_purse
from tests.sdk.programs.journal import Journal
from tests.sdk.programs.model import End, Violation, find_violations
from tests.sdk.programs.outside import collected_alarms, wait_for_end
from tests.sdk.programs.program import EVERYTHING, Feature, Program

IN_REAL_TIME = EVERYTHING - {
    Feature.ASK,
    Feature.LEAVE,
    Feature.OPTIONS,
    Feature.RACE,
    Feature.RECEIVE,
    Feature.RESERVE,
    Feature.SLEEP,
    Feature.WAIT_FOR,
}


class Call:
    """One call of a handler: a process of its own, as the journal sees it."""

    is_dead = False


def run_on_uvloop(program: Program, crashes: Sequence[int] = ()) -> tuple[list[Violation], Journal, End]:
    """Run a program whose process dies at these of its points, counted from the crash before."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(program, list(crashes)))


async def _run(program: Program, crashes: list[int]) -> tuple[list[Violation], Journal, End]:
    calls: dict[str, Call] = {}  # by lease
    count = len(crashes)

    def begin() -> Call:
        call = calls[current().handle.fields.lease_id] = Call()
        return call

    async def reach(context: Context, point: str, moment: str) -> None:
        call = calls[context.handle.fields.lease_id]
        if not crashes or call.is_dead:
            return
        crashes[0] -= 1
        if crashes[0] < 0:
            del crashes[0]
            await (await app.engine()).revoke_lease(context.run_id)  # others of its tasks may go on meanwhile
            call.is_dead = True
            raise SimulatedCrash(f"{point} {moment}")

    journal = Journal(asyncio.get_running_loop().time)
    app = make_app(journal, begin, program)
    app.on_fault_point = reach
    with collected_alarms(journal):
        async with app, running_worker(app):
            retry = Retry(max=program.retries, base="1ms", jitter=False)
            run = await app.tasks["program"].options(retry=retry).submit()
            end = await wait_for_end(run, 60)
            engine: Any = await app.engine()
            usage, _ = await engine.read_budget_usage_and_limits(make_purse().id("default"))
    end = msgspec.structs.replace(end, spent=usage.get("tokens", 0))
    return find_violations(program, journal, end, faults=count), journal, end
