"""The model notices what the contract forbids, and nothing else, in journals written by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.sdk.programs.journal import Event, Journal, What
from tests.sdk.programs.model import End, History, find_violations
from tests.sdk.programs.program import (
    Catch,
    Group,
    Node,
    Pause,
    Program,
    RaceOf,
    Saga,
    Sequence,
    Sleep,
    Spend,
    Step,
    describe_failure,
    make_failure,
)

DECLINED = describe_failure(make_failure("declined", "r.0.0", 1))
CARD = Sequence((Catch(Step(failures=1)), Step("book")))  # the card is r.0.0, the booking r.1
Line = tuple[int, What, str, Any]


class Alive:
    """A process that lives."""

    is_dead = False


def written(*lines: Line, branches: tuple[str, ...] = ()) -> Journal:
    """Return a journal with these lines: invocation, event, path and value. Other branches than the root are named."""
    journal = Journal(lambda: 0.0)
    begun = 0
    for invocation, what, path, value in lines:
        while begun <= invocation:
            journal.begin(Alive())
            begun += 1
        branch = next((one for one in branches if path.startswith(one)), "r")
        journal.note(invocation, what, path, branch, value)
        if what is What.CALL:
            journal.calls[path] += 1
    return journal


def declined(invocation: int, call: int = 1) -> list[Line]:
    value = describe_failure(make_failure("declined", "r.0.0", call))
    return [(invocation, What.CALL, "r.0.0", call), (invocation, What.FAILED, "r.0.0", value)]


def booked(invocation: int) -> list[Line]:
    return [(invocation, What.CALL, "r.1", 1), (invocation, What.DONE, "r.1", ["r.1", 1])]


def sections(body: Node, journal: Journal, end: End, *, faults: int = 1, retries: int = 0) -> set[int]:
    return {one.section for one in find_violations(Program(body, retries), journal, end, faults=faults)}


CAUGHT = [["caught", DECLINED, []], ["r.1", 1]]


def test_a_remembered_failure_is_as_promised() -> None:
    again: list[Line] = [(1, What.FAILED, "r.0.0", DECLINED), (1, What.DONE, "r.1", ["r.1", 1])]
    journal = written(*declined(0), *booked(0), *again)
    assert sections(CARD, journal, End(CAUGHT)) == set()


def test_a_failure_that_was_moved_past_must_not_run_again() -> None:
    journal = written(*declined(0), *booked(0), (1, What.CALL, "r.0.0", 2))
    assert sections(CARD, journal, End(CAUGHT)) == {1}


@pytest.mark.parametrize("field", ["class", "text", "fields"])
def test_a_remembered_failure_keeps_class_text_and_fields(field: str) -> None:
    other: dict[str, Any] = {**DECLINED, field: {"code": 7} if field == "fields" else "another r.0.0"}
    journal = written(*declined(0), *booked(0), (1, What.FAILED, "r.0.0", other))
    assert sections(CARD, journal, End(CAUGHT)) == {1}


def test_a_failure_that_nothing_followed_may_run_again_after_a_crash() -> None:
    success: list[Line] = [(1, What.CALL, "r.0.0", 2), (1, What.DONE, "r.0.0", ["r.0.0", 2])]
    journal = written(*declined(0), *success, *booked(1))
    assert sections(CARD, journal, End([["r.0.0", 2], ["r.1", 1]])) == set()


def test_a_parked_run_has_moved_past_its_failures() -> None:
    journal = written(*declined(0), (0, What.PARKED, "", None), (1, What.CALL, "r.0.0", 2), *booked(1))
    assert 1 in sections(CARD, journal, End(CAUGHT))


def test_a_result_of_another_step_is_noticed() -> None:
    body = Group("TaskGroup", (Step(), Step()))
    journal = written(
        (0, What.CALL, "r.0", 1),
        (0, What.DONE, "r.0", ["r.0", 1]),
        (0, What.CALL, "r.1", 1),
        (0, What.DONE, "r.1", ["r.0", 1]),
    )
    assert sections(body, journal, End([["r.0", 1], ["r.0", 1]])) == {0}


def test_a_compensation_that_is_missing_is_noticed() -> None:
    saga = Saga((Step("book"), Step("book", failures=1)))
    failure = describe_failure(make_failure("declined", "r.1", 1))
    journal = written(
        (0, What.CALL, "r.0", 1),
        (0, What.DONE, "r.0", ["r.0", 1]),
        (0, What.CALL, "r.1", 1),
        (0, What.FAILED, "r.1", failure),
    )
    assert sections(saga, journal, End(["undone", failure, []])) == {0}


def test_an_effect_that_does_not_belong_to_the_program_is_noticed() -> None:
    journal = written((0, What.CALL, "r", 1), (0, What.DONE, "r", ["r", 1]), (0, What.CALL, "r.0.undo", 1))
    assert sections(Step(), journal, End(["r", 1])) == {1}


def test_a_sleep_that_is_too_short_is_noticed() -> None:
    journal = written((0, What.ENTER, "r", None), (0, What.DONE, "r", None))
    assert sections(Sleep(2), journal, End()) == {0}


def test_a_cancelled_step_that_runs_again_is_noticed() -> None:
    journal = written((0, What.CALL, "r.0.0", 1), (0, What.CANCELLED, "r.0.0", None), *booked(0))
    journal.begin(Alive())
    journal.note(1, What.CALL, "r.0.0", "r", 2)
    assert 3 in sections(CARD, journal, End(CAUGHT))


def test_a_step_of_a_branch_that_was_cancelled_is_noticed() -> None:
    group = Group("ctx.gather", (Sequence((Pause(10), Step())), Step(failures=1)))
    path, failed = "r.0.0.0", describe_failure(make_failure("declined", "r.0.0.1", 1))
    rolled_back = [(0, What.BRANCH_END, "r.0.0.1", None), (0, What.FAILED, "r.0.0.1", failed), *booked(0)]
    before = [(0, What.BRANCH_CANCELLED, path, None), (0, What.BRANCH_END, path, None), *rolled_back]
    late = [(1, What.CALL, f"{path}.1", 1), *booked(1)]
    for lines, is_noticed in ((before + late, True), (late[:1] + before, False), (before, False)):
        history = History(Program(Sequence((Catch(group), Step("book")))), written(*lines, branches=(path, "r.0.0.1")))
        assert bool(list(history.late_effects())) == is_noticed


def test_two_winners_of_a_race_are_noticed() -> None:
    race = RaceOf((Step(), Step()))
    lines = [(0, What.DONE, "r", ["m0", ["r.0", 1]]), (1, What.DONE, "r", ["m1", ["r.1", 1]])]
    assert 0 in sections(race, written(*lines), End(value=["m1", ["r.1", 1]]))


def test_a_race_that_failed_and_has_a_winner_later_is_noticed() -> None:
    race = Sequence((Catch(RaceOf((Pause(1), Step(failures=1)))), Step("book")))
    lines = [(0, What.RACE_FAILED, "r.0.0", DECLINED), *booked(0), (1, What.DONE, "r.0.0", ["m0", None]), *booked(1)]
    assert 1 in sections(race, written(*lines), End(value=[["m0", None], ["r.1", 1]]))


def test_a_pause_that_parking_cut_off_is_noticed() -> None:
    assert sections(Pause(10), written((0, What.TORN, "r", None)), End()) == {0}


@pytest.mark.parametrize(("spent", "expected"), [(2, set[int]()), (0, {7}), (4, {7})])
def test_a_spend_counts_once(spent: int, expected: set[int]) -> None:
    journal = written((0, What.ENTER, "r", None), (0, What.DONE, "r", None))
    assert sections(Spend(2), journal, End(spent=spent)) == expected


def test_a_run_that_does_not_end_is_noticed() -> None:
    assert sections(Sleep(2), written((0, What.ENTER, "r", None)), End(is_stuck=True)) == {0}


@pytest.mark.parametrize(("attempts", "expected"), [(1, {1}), (2, {1}), (3, set[int]())])
def test_an_uncaught_failure_is_retried_as_often_as_the_task_says(attempts: int, expected: set[int]) -> None:
    failures = [describe_failure(make_failure("value", "r", call + 1)) for call in range(attempts)]
    events = [
        event
        for number, failure in enumerate(failures)
        for event in (
            (number, What.CALL, "r", number + 1),
            (number, What.FAILED, "r", failure),
            (number, What.RAISED, "", failure),
        )
    ]
    end = End(reason=f"ValueError: {failures[-1]['text']}")
    assert sections(Step(failures=9, kind="value"), written(*events), end, faults=0, retries=2) == expected


@pytest.mark.parametrize(("waited_s", "expected"), [(0.0, {1}), (1.0, set[int]())])
def test_an_operation_beside_a_failure_excuses_no_missing_retry_unless_the_function_waited(
    waited_s: float, expected: set[int]
) -> None:
    failure = describe_failure(make_failure("declined", "r.0", 1))
    journal = written(
        (0, What.CALL, "r.0", 1),
        (0, What.FAILED, "r.0", failure),
        (0, What.CALL, "r.1", 1),
        (0, What.RAISED, "", failure),
        branches=("r.0", "r.1"),
    )
    journal.events[-1] = msgspec.structs.replace(journal.events[-1], at_s=waited_s)
    group, end = Group("ctx.gather", (Step(failures=1), Step())), End(reason=failure["text"])
    assert sections(group, journal, end, faults=0, retries=1) == expected


def test_events_of_a_dead_process_have_not_happened() -> None:
    journal, process = Journal(lambda: 0.0), Alive()
    invocation = journal.begin(process)
    process.is_dead = True
    journal.note(invocation, What.RETURNED)
    assert journal.events == [Event(0.0, 0, What.BEGIN, "", "")]


def test_a_call_of_a_process_that_lost_its_lease_does_not_show_how_the_run_ended() -> None:
    failures = [describe_failure(make_failure("declined", "r", call)) for call in (1, 2)]
    journal = written(
        (0, What.ENTER, "r", None),
        (1, What.CALL, "r", 1),
        (1, What.FAILED, "r", failures[0]),
        (1, What.RAISED, "", failures[0]),
        (0, What.CALL, "r", 2),  # its lease had ended
        (0, What.FAILED, "r", failures[1]),
        (0, What.RAISED, "", failures[1]),
    )
    body = Step(failures=2)
    assert sections(body, journal, End(reason=failures[0]["text"])) == set()
    assert sections(body, journal, End(reason=failures[1]["text"])) == {1}
