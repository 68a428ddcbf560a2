"""Random durable functions with crashes, lost replies, lapsed leases and SIGTERM: what they do is what was promised.

The contract has sections: 0 tasks as branches, 1 steps that fail, 2 deploys, 3 left operations, 7 budgets. `BROKEN`
lists features that are not safe yet.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sdk.programs import program as syntax
from tests.sdk.programs.environments import Fault, FaultKind, explain, run_program
from tests.sdk.programs.model import History
from tests.sdk.programs.program import (
    ALWAYS,
    EVERYTHING,
    Ask,
    Catch,
    Child,
    Feature,
    Group,
    Leave,
    Loop,
    Node,
    Options,
    Pause,
    Program,
    Race,
    RaceOf,
    Receive,
    Reserve,
    Saga,
    Sequence,
    Sleep,
    Spend,
    Step,
    WaitFor,
    programs,
)
from tests.sdk.programs.soak import PLACES, run_part

pytestmark = pytest.mark.timeout(600)  # a part takes seconds to a minute; a test that is cut off disturbs the next ones

# Features whose programs may still break a promise. Random programs are drawn from all others.
BROKEN: frozenset[Feature] = frozenset()
HOLDS = EVERYTHING - BROKEN
EXAMPLES = {
    "world": 40,
    "uvloop": 20,
    "memory": 100,
    "sqlite": 20,
    "postgres": 15,
    "valkey": 10,
}  # about a minute on two cores
CALLS = 40  # of the store, at each of which a fault is tried


def assert_promised(
    place: str, program: Program, some: tuple[Fault, ...] = (), *, section: int | None = None, **ways: Any
) -> None:
    """Run a program and check it against the contract, or against one of its sections."""
    violations, journal, end = asyncio.run(run_program(place, program, some, **ways))
    violations = [one for one in violations if section in (None, one.section)]
    assert not violations, explain(violations, journal, end)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> tuple[str, str | None]:
    """A world, uvloop, or a store by its name and where it is."""
    return request.param, request.getfixturevalue("own_database") if request.param == "postgres" else None


def test_random_programs_keep_every_promise_that_holds_so_far(place: tuple[str, str | None]) -> None:
    name, dsn = place
    run_part(name, HOLDS, examples=5 if "FF_TEST_BRIEF" in os.environ else EXAMPLES[name], dsn=dsn)


def test_random_programs_of_every_kind_keep_every_promise() -> None:
    run_part("memory", EVERYTHING, reduces=False)


@pytest.mark.soak
def test_many_random_programs_keep_every_promise_that_holds_so_far(place: tuple[str, str | None]) -> None:
    name, dsn = place
    for seed in range(20):
        run_part(name, HOLDS, seed=seed, dsn=dsn)


# -- programs by name ----------------------------------------------------------------------------------------------


def holds(section: int, name: str, body: Node, *, retries: int = 0, fault: FaultKind | None = None) -> Any:
    """Return a case: a program, run once, or with a fault at each of its first calls of the store."""
    return pytest.param(section, Program(body, retries), fault, id=name)


def tasks(*members: Node) -> Group:
    return Group("TaskGroup", members)


def chain(*items: Node) -> Sequence:
    return Sequence(items)


DECLINED = Step(failures=1)

PROGRAMS = [
    holds(1, "a declined card is charged once", chain(Catch(DECLINED), Sleep(2))),
    holds(
        1,
        "a saga that rolled back never books again",
        chain(Saga((Step("book"), Step("book", failures=1))), Step("tell", failures=1)),
        retries=1,
    ),
    holds(
        1,
        "a saga that raises on is not retried",
        Saga((Step("book"), Step("book", failures=ALWAYS)), raises=True),
        retries=2,
    ),
    holds(1, "polls are calls", Loop(3, Catch(DECLINED, Sleep(2)))),
    holds(1, "a failure caught beside a wait", Group("ctx.gather", (Catch(DECLINED), Sleep(2)))),
    holds(1, "gather with return_exceptions then park", Group("return_exceptions", (DECLINED, Sleep(2)))),
    holds(
        0,
        "two tasks swap their sleeps",
        tasks(chain(Step(ms=300), Sleep(20)), chain(Pause(10), Sleep(2))),
    ),
    holds(0, "two tasks swap their children", tasks(chain(Step(ms=300), Child()), chain(Pause(10), Child(), Sleep(2)))),
    holds(
        0,
        "two tasks swap their payments after a crash",
        tasks(chain(Step("check", ms=300), Step("charge")), chain(Pause(10), Step("charge"))),
        fault=FaultKind.CRASH,
    ),
    holds(0, "a run parks under a pause of its own", Group("asyncio.gather", (Sleep(20), chain(Pause(10), Sleep(2))))),
    holds(
        0,
        "a run parks under a pause beside a wait that a failure left",
        Catch(Group("asyncio.gather", (Sleep(2), DECLINED)), Pause(10)),
    ),
    holds(3, "a receive that was left swallows nothing", chain(Leave(2), Receive(3), Receive(3))),
    holds(3, "a step that was left does not run again", chain(WaitFor(Step(), is_late=True), Sleep(2))),
    holds(
        3,
        "a step that a failed task group left does not run again",
        chain(Catch(tasks(WaitFor(Step(), is_late=True), chain(Step(), DECLINED))), Sleep(2)),
    ),
    holds(
        1,
        "a sibling fails between two tries of a step",
        Catch(Group("ctx.gather", (Options(Step(failures=1), 1), Step("book", failures=1)))),
    ),
    holds(
        1,
        "a failure in nested gathers is retried, whatever begins meanwhile",
        Group(
            "ctx.gather",
            (
                Step(),
                Group("ctx.gather", (Sleep(2), Step(), WaitFor(DECLINED, is_late=False))),
                Group("ctx.gather", (Sleep(2), Leave(2))),
            ),
        ),
        retries=1,
    ),
    holds(3, "a race ends although its loser still waits", Race(2)),
    holds(
        3,
        "a race ends although a wait_for in its loser swallows the cancellation",
        RaceOf((chain(WaitFor(Step(), is_late=False), Step(), Sleep(2)), chain(Step(), Step()))),
    ),
    holds(
        1,
        "a failure in a race is retried, whatever begins while the losers end",
        RaceOf((Group("ctx.gather", (Sleep(2), Sleep(2))), Group("asyncio.gather", (DECLINED, Sleep(2))))),
        retries=2,
    ),
    holds(
        1,
        "a failure in a race is retried, whatever begins beside the race",
        Group("asyncio.gather", (RaceOf((DECLINED, Sleep(2))), chain(Step(), Sleep(2)))),
        retries=2,
    ),
    holds(
        0,
        "a pause that begins while the run is about to park is not torn",
        chain(
            Group(
                "return_exceptions",
                (Step(ms=10), chain(Step(), Group("asyncio.gather", (DECLINED, Sleep(2))))),
            ),
            Pause(10),
        ),
    ),
    holds(3, "a race has one winner whatever crashes", chain(Race(20, 3), Step()), fault=FaultKind.CRASH_AFTER),
    holds(
        1,
        "a failure beside a wait in a reservation is retried",
        Reserve(1, Group("asyncio.gather", (Sleep(2), Step(failures=1, ms=10)))),
        retries=1,
    ),
    holds(
        1,
        "a failure is retried, whatever began before it",
        chain(
            WaitFor(Step(), is_late=True),
            Group("ctx.gather", (chain(Spend(1), Step()), RaceOf((Sleep(2), DECLINED)))),
        ),
        retries=1,
    ),
    holds(
        1,
        "a failure that leaves a reservation is retried, whatever begins beside it",
        Group("ctx.gather", (Loop(20, Step()), Reserve(1, DECLINED))),
        retries=1,
    ),
    holds(7, "a failed attempt spends a reservation once", Reserve(2, Step(failures=1)), retries=1),
    holds(
        7, "SIGTERM in a reservation spends it once", Reserve(2, chain(Step(ms=300), Step())), fault=FaultKind.SIGTERM
    ),
]


@pytest.mark.parametrize(("section", "program", "fault"), PROGRAMS)
def test_a_program_keeps_its_promise(section: int, program: Program, fault: FaultKind | None) -> None:
    for call in range(CALLS) if fault else (0,):
        assert_promised("memory", program, () if fault is None else (Fault(fault, call),), section=section)


@pytest.mark.parametrize("calls_between", [0, 1, 2])
@pytest.mark.parametrize("body", [Child(), chain(Ask(after=0), Child())])
def test_a_worker_that_stalls_after_a_lost_reply_to_its_claim_does_not_begin_the_run(
    body: Node, calls_between: int
) -> None:
    for call in range(CALLS):
        stalls = Fault(FaultKind.LEASE_LAPSES, call + 1 + calls_between)
        assert_promised("memory", Program(body), (Fault(FaultKind.LOST_REPLY, call), stalls))


def test_a_renamed_step_does_not_repeat_its_effect() -> None:
    before = Program(chain(Step("charge"), Sleep(2)))
    after = Program(chain(Step("charge_card"), Sleep(2)))
    for call in range(CALLS):
        deploy = (Fault(FaultKind.DEPLOY, call),)
        _, journal, _ = asyncio.run(run_program("memory", before, deploy, deployed=after))
        assert not list(History(before, journal).repeated_effects())


def test_a_fallback_after_a_caught_failure_raises_no_alarm() -> None:
    assert_promised("memory", Program(chain(Catch(DECLINED, Step("book")), Sleep(2))), section=2)


# -- the checker itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["memory", "sqlite"])
def test_a_program_without_faults_does_what_the_model_says(place: str) -> None:
    body = chain(
        Step("book"),
        Group("ctx.gather", (chain(Step("charge"), Sleep(2)), chain(Receive(3), Child()))),
        Catch(Step("book", failures=ALWAYS), Step("charge")),
    )
    assert_promised(place, Program(body))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_programs_survive_a_round_trip_through_their_text(data: st.DataObject) -> None:
    program = data.draw(programs())
    assert eval(repr(program), dict(vars(syntax))) == program


def test_a_step_that_is_cancelled_before_it_begins_does_not_run_in_the_replay() -> None:
    charge = Step(name="charge", failures=0, kind="declined", ms=0, argument=False)
    declined = Step(name="charge", failures=1, kind="declined", ms=0, argument=False)
    cancelled = Group(how="TaskGroup", members=(declined, charge))
    group = Group(how="return_exceptions", members=(Sleep(minutes=2), cancelled))
    assert_promised("memory", Program(body=Sequence(items=(charge, group)), retries=0))
